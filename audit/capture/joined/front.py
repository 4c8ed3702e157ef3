"""What lies before a decoder that reads an image with text: which pixels and words each position reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.attention.mixing import find_stream
from audit.capture.attention.passes import exclusive, place, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.links import NONE, SEVERAL, feeds
from audit.capture.outputs.predictions import first_tensor
from audit.errors import CaptureError

Depth = tuple[str, int]
"""A stack, and how many of its blocks have run."""
KEYS = "the keys of cross-attention"
"""In the place of a stack: what the last one attends to beside its own positions."""


@dataclass(frozen=True)
class Front:
    """How the input of each stack comes about; the last stack is the one whose rows are read.

    Attributes
    ----------
    sizes : mapping of stack to (sequence, position)
        A vision tower may run several pictures at once, as sequences that do not see each other.
    sources : mapping of stack to a mapping of Depth to int array
        Which position of the stack each position of an earlier stack feeds at that depth; negative for none.
    contexts : mapping of stack to (sequence, position)
        What a stack of learned latents attends to in front of its own positions: how large it is. Its
        sources stand under ``context_of(stack)``.
    words : int array (token,)
        Which position of the last stack each token feeds.
    pixels : int array of the shape of the processed image
        Which position of the first stack each number feeds.
    """

    sizes: Mapping[str, tuple[int, int]]
    sources: Mapping[str, Mapping[Depth, NDArray[np.int64]]]
    words: NDArray[np.int64]
    pixels: NDArray[np.int64]
    contexts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def depths(self) -> frozenset[Depth]:
        """Return the states of earlier stacks that are read."""
        return frozenset(depth for sources in self.sources.values() for depth in sources)


def context_of(stack: str) -> str:
    """Return the name under which stands what a stack of latents attends to."""
    return f"what {stack} attends to"


class _Reached(Exception):  # noqa: N818 - no error: the pass has shown what it was run for
    """The last stack is about to run."""


@dataclass
class _Trace:
    """What one pass shows, as leaves that collect gradients and stack inputs that were made of them."""

    words: Tensor | None = None
    states: dict[Depth, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    keys: list[Tensor] = field(default_factory=list)
    contexts: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def trace_front(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], picture: str) -> Front:
    """Measure, for one probe, what feeds what before the last stack of `plan`.

    Parameters
    ----------
    model : model of transformers
    plan : CapturePlan
        Its stacks in the order in which they run.
    tensors : mapping of argument to Tensor
        One probe.
    picture : str
        Which argument is the image.

    Raises
    ------
    CaptureError
        When a position of the image or the text feeds several positions of what follows (a connector that
        mixes them), or the image does not reach the last stack.
    """
    core = core_model(model)
    trace = _Trace()
    with exclusive(model, plan.configs), torch.enable_grad(), _tapped(core, plan, tensors, trace):
        given = place(tensors, core.device, core.dtype)
        pixels = given[picture].detach().requires_grad_()
        with suppress(_Reached):
            run_model(model, {**given, picture: pixels.clone()}, attentions=plan.has_hooks)
        return _front(core, plan, trace, pixels)


def check_entry(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], picture: str) -> None:
    """Check that the image reaches the output through the input of the last stack's first block alone.

    Some decoders add what lower layers of the vision tower give to the states between their blocks.

    Raises
    ------
    CaptureError
    """
    core = core_model(model)
    trace = _Trace()
    with exclusive(model, plan.configs), torch.enable_grad(), _tapped(core, plan, {}, trace, stop=False):
        given = place(tensors, core.device, core.dtype)
        pixels = given[picture].detach().requires_grad_()
        outputs = run_model(
            model, {**given, picture: pixels.clone()}, attentions=plan.has_hooks, keep_logits=True
        )
        answer = first_tensor(outputs)
        leaves = [pixels, *(leaf for (stack, _), leaf in trace.states.items() if stack != plan.stacks[-1])]
        gradients = (
            torch.autograd.grad(answer, leaves, torch.ones_like(answer), allow_unused=True)
            if answer.requires_grad
            else [None] * len(leaves)
        )
    if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
        raise CaptureError(
            f"{type(core).__name__}: the image enters {plan.stacks[-1]} again behind its first block, by "
            "other ways than attention; no exact map of the image exists for it"
        )


def _front(core: Any, plan: CapturePlan, trace: _Trace, pixels: Tensor) -> Front:
    name, stacks = type(core).__name__, plan.stacks
    for stack in stacks:
        if stack not in trace.inputs:
            raise CaptureError(f"{name}: the blocks {stack} take no stream of positions; not supported")
    sizes = {stack: _size(trace.inputs[stack]) for stack in stacks}
    (seen,) = feeds(_rows(trace.inputs[stacks[0]]), [pixels], whole=False)
    if bool((seen == SEVERAL).any()):
        raise CaptureError(
            f"{name}: pixels feed several positions of {stacks[0]} (its patches overlap or are convolved); "
            "no exact map of the image exists for it"
        )
    sources: dict[str, Mapping[Depth, NDArray[np.int64]]] = {}
    if trace.keys:
        if any(keys is not trace.keys[0] and not torch.equal(keys, trace.keys[0]) for keys in trace.keys):
            raise CaptureError(f"{name}: its cross-attention layers attend to different keys; not supported")
        sizes[KEYS] = _size(trace.keys[0])
        before = {depth: leaf for depth, leaf in trace.states.items() if depth[0] != stacks[-1]}
        sources[KEYS] = _sources(name, KEYS, trace.keys[0], before)
    for i, stack in enumerate(stacks[1:], start=1):
        earlier = {depth: leaf for depth, leaf in trace.states.items() if depth[0] in stacks[:i]}
        sources[stack] = _sources(name, stack, trace.inputs[stack], earlier)
    contexts = {}
    for stack in (stack for stack in stacks[1:-1] if not sources[stack]):
        before = {depth: leaf for depth, leaf in trace.states.items() if depth[0] == stacks[0]}
        context = _context(name, stack, trace)
        contexts[stack] = _size(context)
        sources[context_of(stack)] = _sources(name, stack, context, before)
    words = np.zeros(0, np.int64)
    if trace.words is not None:
        (found,) = feeds(_rows(trace.inputs[stacks[-1]]), [trace.words])
        words = found[0].cpu().numpy()
    if (words == SEVERAL).any():
        raise CaptureError(
            f"{name}: tokens of the text feed several positions of {stacks[-1]}; not supported"
        )
    _check_reached(name, stacks[-1], seen, sources)
    return Front(sizes, sources, words, seen.cpu().numpy(), contexts)


def _sources(
    name: str, stack: str, taken: Tensor, earlier: Mapping[Depth, Tensor]
) -> dict[Depth, NDArray[np.int64]]:
    found = {}
    for depth, fed in zip(earlier, feeds(_rows(taken), list(earlier.values())), strict=True):
        if bool((fed == SEVERAL).any()):
            raise CaptureError(
                f"{name}: the connector between {depth[0]} and {stack} mixes patches (one patch feeds "
                "several positions), other than by attention that could be captured; no exact map of the "
                "image exists for it"
            )
        if bool((fed != NONE).any()):
            found[depth] = fed.flatten().cpu().numpy()
    return found


def _context(name: str, stack: str, trace: _Trace) -> Tensor:
    """Return what all layers of a stack of latents attend to, the same for each."""
    found = trace.contexts.get(stack, [])
    if not found or any(one is not found[0] and not torch.equal(one, found[0]) for one in found):
        raise CaptureError(
            f"{name}: the positions of {stack} are learned latents that attend to the patches otherwise than "
            "as one row of patches and latents (a Q-Former); composing them is not supported"
        )
    return found[0]


def _check_reached(
    name: str, last: str, seen: Tensor, sources: Mapping[str, Mapping[Depth, NDArray[np.int64]]]
) -> None:
    alone = last not in sources
    reached = alone or sources[last] or sources.get(KEYS)
    if not bool((seen >= 0).any()) or not reached:
        raise CaptureError(
            f"{name}: no position of {last} draws on the image (or it does so through tokens that have no "
            "gradient), so its map cannot be told"
        )


def _size(taken: Tensor) -> tuple[int, int]:
    return (1, len(taken)) if taken.dim() == 2 else (len(taken), taken[0, ..., 0].numel())


def _rows(taken: Tensor) -> Tensor:
    return taken.reshape(-1, taken.shape[-1])


@contextmanager
def _tapped(
    core: Any, plan: CapturePlan, tensors: Mapping[str, Tensor], trace: _Trace, *, stop: bool = True
) -> Iterator[None]:
    """Turn tokens, stack inputs and block outputs into leaves, and `stop` before the last stack."""
    last = plan.stacks[-1]
    with ExitStack() as hooks:
        crossed = [layer for layer in plan.layers if layer.kind == "cross"]
        for layer in crossed:
            look = own_thread(_keys(trace))
            hooks.callback(layer.module.register_forward_pre_hook(look, with_kwargs=True).remove)
        for layer in plan.layers:
            if layer.stack in plan.stacks[1:-1]:
                hooks.enter_context(_contexts(layer, trace))
        stop = stop and not crossed
        for stack in plan.stacks:
            entry = own_thread(_entry(stack, trace, stop=stop and stack == last))
            leave = own_thread(_leave(stack, trace))
            for block in core.get_submodule(stack).children():
                hooks.callback(block.register_forward_pre_hook(entry, with_kwargs=True).remove)
                if stack != last:
                    hooks.callback(block.register_forward_hook(leave, prepend=True).remove)
        if "input_ids" in tensors:
            embed = own_thread(_words(trace, tensors["input_ids"].shape[1]))
            for module in _embeddings(core):
                hooks.callback(module.register_forward_hook(embed, prepend=True).remove)
        yield


def _embeddings(core: Any) -> list[nn.Module]:
    found = core.get_input_embeddings()
    return [found] if isinstance(found, nn.Module) else []


def _entry(stack: str, trace: _Trace, *, stop: bool) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stack in trace.inputs:
            return None
        where = find_stream(args, kwargs)
        if where is None:
            return None
        taken = args[where] if isinstance(where, int) else kwargs[where]
        trace.inputs[stack] = taken
        if stop:
            raise _Reached
        leaf = trace.states[stack, 0] = taken.detach().requires_grad_()
        given = leaf.clone()
        if isinstance(where, int):
            return tuple(given if i == where else item for i, item in enumerate(args)), kwargs
        return args, {**kwargs, where: given}

    return hook


def _keys(trace: _Trace) -> Any:
    """Keep what a cross-attention layer attends to, and give it on without its history."""
    names = ("encoder_hidden_states", "cross_attention_states", "key_value_states")

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = find_stream(args, kwargs)
        places: list[int | str] = [*(name for name in names if name in kwargs), *range(len(args))]
        values = [(at, args[at] if isinstance(at, int) else kwargs[at]) for at in places if at != own]
        found = next(((at, x) for at, x in values if isinstance(x, Tensor) and x.dim() == 3), None)
        if found is None:
            raise CaptureError(f"{type(module).__name__} attends to keys that cannot be seen; not supported")
        at, keys = found
        trace.keys.append(keys)
        if isinstance(at, int):
            return tuple(keys.detach() if i == at else item for i, item in enumerate(args)), kwargs
        return args, {**kwargs, at: keys.detach()}

    return hook


@contextmanager
def _contexts(layer: AttentionLayer, trace: _Trace) -> Iterator[None]:
    """Keep what a layer of latents attends to, where its keys are made of that and then of the latents."""
    taken, inner = list[Tensor](), list[Tensor]()

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 3)
        taken[:] = [x for x in streams if x.is_floating_point()]

    def project(_module: nn.Module, args: tuple[Any, ...]) -> None:
        inner.append(args[0])

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if len(taken) == 2 and taken[0].shape[-1] == taken[1].shape[-1]:
            together = torch.cat([taken[1], taken[0]], dim=1)
            if any(x.shape == together.shape and torch.equal(x, together) for x in inner):
                trace.contexts.setdefault(layer.stack, []).append(taken[1])
        inner.clear()

    with ExitStack() as hooks:
        hooks.callback(layer.module.register_forward_pre_hook(own_thread(enter), with_kwargs=True).remove)
        hooks.callback(layer.module.register_forward_hook(own_thread(leave)).remove)
        for child in layer.module.children():
            if isinstance(child, nn.Linear):
                hooks.callback(child.register_forward_pre_hook(own_thread(project)).remove)
        yield


def _leave(stack: str, trace: _Trace) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(first, Tensor):
            return None
        trace.counts[stack] = trace.counts.get(stack, 0) + 1
        leaf = trace.states[stack, trace.counts[stack]] = first.detach().requires_grad_()
        return (leaf.clone(), *output[1:]) if isinstance(output, (tuple, list)) else leaf.clone()

    return hook


def _words(trace: _Trace, tokens: int) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if trace.words is not None or not isinstance(output, Tensor) or output.shape[:2] != (1, tokens):
            return None
        trace.words = output.detach().requires_grad_()
        return trace.words.clone()

    return hook
