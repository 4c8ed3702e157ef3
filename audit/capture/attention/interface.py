"""See every attention call of a model through transformers' attention interface.

One function and one mask per original kernel are registered, once per process, under names of our
own. :func:`interface_capture` switches the configs of a model to these names for one forward pass.
The original kernel still computes the output, so that the model's answers keep every bit; the
weights are computed beside it. Calls of other threads, and of modules that nobody captures, go to
the original kernel alone.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from audit.capture.attention.scratch import Scratch
from audit.capture.attention.weights import attention_weights

KERNELS = ("sdpa", "eager")
_PREFIX = "rollout_audit_"


@dataclass(frozen=True)
class AttentionCall:
    """One call of one attention layer.

    Attributes
    ----------
    path : str
        Where the layer sits in the model.
    weights : Tensor (batch, head, query, key), float32 or higher
        With `sink`, the last key is the sink.
    value : Tensor (batch, key head, key, dim) or None
    output : Tensor (batch, query, head, dim)
        What the model's own kernel returned.
    returned : Tensor or None
        What the layer gives on, where that is not `output`.
    projection : str
        Name of the layer's projection that takes `output`, where the layer does more than attend.
    """

    path: str
    weights: Tensor
    output: Tensor
    value: Tensor | None = None
    sink: bool = False
    returned: Tensor | None = None
    projection: str = ""


# May return what the layer is to give on in the place of `output`.
Receiver = Callable[[AttentionCall], Tensor | None]


@dataclass(frozen=True)
class KernelCall:
    """One call of the attention interface, before anything is computed.

    Attributes
    ----------
    path : str
    module : nn.Module
    kernel : function
        The original kernel, called as ``kernel(module, query, key, value, mask, **options)``.
    query, key, value : Tensor (batch, head, position, dim); keys and values may have fewer heads
    mask : Tensor or None
    options : mapping
    """

    path: str
    module: nn.Module
    kernel: Callable[..., tuple[Tensor, Tensor | None]]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Return what the kernel gives: output (batch, query, head, dim), and weights or None."""
        return self.kernel(self.module, self.query, self.key, self.value, self.mask, **self.options)

    def weights(self) -> Tensor:
        """Return the weights, computed beside the kernel: (batch, head, query, key)."""
        return _beside(self)

    @property
    def is_causal(self) -> bool:
        """Return whether a call without a mask hides later keys, as transformers' sdpa decides."""
        causal = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if causal is None else causal)


@dataclass(frozen=True)
class Replacing:
    """A receiver that computes the output of a call in the place of the kernel."""

    attend: Callable[[KernelCall], tuple[Tensor, Tensor | None]]

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """Refuse to watch: only layers on the attention interface can be replaced."""
        raise ValueError(f"{call.path}: expected a layer on the attention interface")


_register_lock = threading.Lock()
_config_locks: dict[int, threading.RLock] = {}
# (thread, module) -> what receives its calls, and from where their weights are taken; innermost capture last.
_receivers: dict[tuple[int, int], list[tuple[str, Receiver, Scratch | None]]] = {}


class _KernelName(str):
    """Our name of a kernel, which is looked up by itself and also equals the kernel's own name.

    Some models take another path where their config asks for neither ``eager`` nor ``sdpa``.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(other) in (str(self), self.removeprefix(_PREFIX))

    def __ne__(self, other: object) -> bool:
        return not self == other


def original_name(name: str | None) -> str | None:
    """Return the kernel that a config asks for, whether or not it is being captured."""
    return None if name is None else name.removeprefix(_PREFIX)


def interface_function(cls: type[nn.Module]) -> FunctionType | None:
    """Return the method of `cls` that calls the attention interface, or None."""
    if issubclass(cls, PreTrainedModel):  # whole models name the interface too, but do not attend
        return None
    for base in cls.__mro__:
        for attribute in vars(base).values():
            function = inspect.unwrap(attribute) if inspect.isfunction(attribute) else None
            if isinstance(function, FunctionType) and "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
                return function
    return None


def original_kernel(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function that `module` itself would call under the implementation `name`."""
    function = interface_function(type(module))
    if function is None:
        raise ValueError(f"module: expected a layer on the attention interface, got {type(module).__name__}")
    scope = function.__globals__
    eager = next((scope[n] for n in function.__code__.co_names if n.startswith("eager") and n in scope), None)
    kernel: Callable[..., tuple[Tensor, Tensor | None]] = scope["ALL_ATTENTION_FUNCTIONS"].get_interface(
        name, eager
    )
    return kernel


def register_interface() -> None:
    """Register the capturing kernels; doing it again changes nothing (there is no way to unregister)."""
    with _register_lock:
        if _PREFIX + KERNELS[0] in AttentionInterface._global_mapping:
            return
        for name in KERNELS:
            AttentionMaskInterface.register(_PREFIX + name, AttentionMaskInterface._global_mapping[name])
            AttentionInterface.register(_PREFIX + name, _capturing(name))


def _capturing(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if name == "sdpa":
            kwargs.pop("output_attentions", None)  # it changes nothing there but logs a warning
        kernel = original_kernel(module, name)
        stack = _receivers.get((threading.get_ident(), id(module)))
        path, receive, scratch = stack[-1] if stack else ("", None, None)
        call = KernelCall(path, module, kernel, query, key, value, attention_mask, kwargs)
        if isinstance(receive, Replacing):
            return receive.attend(call)
        output, weights = call.run()
        if receive is not None:
            sink = kwargs.get("s_aux") is not None
            # What a kernel returns beside a sink may or may not be scaled by it.
            seen = None if sink else weights
            seen = _beside(call, scratch) if seen is None else seen
            replaced = receive(AttentionCall(path, seen, output, value, sink))
            output = output if replaced is None else replaced
        return output, weights

    return attention


def _beside(call: KernelCall, scratch: Scratch | None = None) -> Tensor:
    """Weights of a fused call: the arguments mean what they mean to transformers' sdpa function."""
    compute = attention_weights if scratch is None else scratch.weights
    return compute(
        call.query.detach(),
        call.key.detach(),
        call.mask,
        scaling=call.options.get("scaling"),
        is_causal=call.is_causal,
        softcap=call.options.get("softcap"),
        position_bias=call.options.get("position_bias"),
        sinks=call.options.get("s_aux"),
    )


def involved_configs(model: nn.Module, paths: Sequence[str]) -> list[Any]:
    """Return the config objects, each once, that steer the attention layers at `paths`.

    These are the layers' own configs and those of the models around them, which build the masks.
    """
    wanted: dict[int, Any] = {}
    ancestors = {path[:cut] for path in paths for cut in _dots(path)}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        steers = path in paths or (path in ancestors and isinstance(module, PreTrainedModel))
        if steers and original_name(getattr(config, "_attn_implementation", None)) in KERNELS:
            wanted[id(config)] = config
    return list(wanted.values())


def _dots(path: str) -> list[int]:
    return [0, *(i for i, character in enumerate(path) if character == ".")]


@contextmanager
def config_locks(configs: Sequence[Any]) -> Iterator[None]:
    """Hold the lock of every config object: one forward pass at a time over shared configs.

    Locks are taken in one order, so that two threads cannot wait for each other, and may be taken
    again by the thread that has them.
    """
    with ExitStack() as stack:
        for config in sorted(configs, key=id):
            stack.enter_context(_config_lock(config))
        yield


def _config_lock(config: Any) -> threading.RLock:
    with _register_lock:
        lock = _config_locks.get(id(config))
        if lock is None:
            lock = _config_locks[id(config)] = threading.RLock()
            weakref.finalize(config, _config_locks.pop, id(config), None)
        return lock


@contextmanager
def interface_capture(
    layers: Mapping[str, nn.Module],
    configs: Sequence[Any],
    receive: Receiver,
    scratch: Scratch | None = None,
) -> Iterator[None]:
    """Send every attention call that this thread makes through `layers` to `receive`.

    Parameters
    ----------
    layers : mapping of path to module
    configs : config objects to switch, as :func:`involved_configs` returns them
        Their previous values come back on leaving, also after an exception. The caller holds
        :func:`config_locks` over the whole forward pass.
    receive : function of an AttentionCall
    scratch : Scratch, optional
        Where weights lie that `receive` is done with when it returns.
    """
    register_interface()
    thread = threading.get_ident()
    previous = [config._attn_implementation_internal for config in configs]
    try:
        for path, module in layers.items():
            _receivers.setdefault((thread, id(module)), []).append((path, receive, scratch))
        for config, name in zip(configs, previous, strict=True):
            config._attn_implementation_internal = _KernelName(_PREFIX + str(original_name(name)))
        yield
    finally:
        for config, name in zip(configs, previous, strict=True):
            config._attn_implementation_internal = name
        for module in layers.values():
            _forget(thread, module)


def _forget(thread: int, module: nn.Module) -> None:
    stack = _receivers.get((thread, id(module)), [])
    if stack:
        stack.pop()
    if not stack:
        _receivers.pop((thread, id(module)), None)
