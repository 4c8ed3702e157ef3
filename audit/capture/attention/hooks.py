"""See attention calls through forward hooks, where a layer is not on the attention interface.

Such layers return their weights themselves, some only with ``output_attentions=True``. Hooks act for
the thread that set them alone, hand the weights on and leave an empty tensor in their place, so that
the model does not collect the weights of all its layers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from audit.capture.attention.banded import dense_call, through
from audit.capture.attention.families import asks_for_weights, recomputed_weights, with_gradient
from audit.capture.attention.interface import AttentionCall, Receiver
from audit.capture.attention.kernels import has_kernel, kernel_capture
from audit.capture.attention.parts import Inner, values_and_output
from audit.errors import CaptureError


@contextmanager
def counted_calls(layers: Mapping[str, nn.Module]) -> Iterator[Counter[str]]:
    """Count how often this thread calls each layer, whether or not its weights are seen."""
    thread, calls = threading.get_ident(), Counter[str]()
    with ExitStack() as stack:
        for path, module in layers.items():

            def count(_module: nn.Module, _args: Any, path: str = path) -> None:
                if threading.get_ident() == thread:
                    calls[path] += 1

            stack.callback(module.register_forward_pre_hook(count).remove)
        yield calls


Replay = Mapping[str, Sequence[tuple[str, Tensor]]]
"""For each layer, call by call, a projection of it and what that projection is to take."""


@contextmanager
def hook_capture(
    layers: Mapping[str, nn.Module], receive: Receiver, replay: Replay | None = None
) -> Iterator[None]:
    """Send the weights that `layers` return to `receive` for calls of this thread.

    Parameters
    ----------
    layers : mapping of path to module
    receive : function of an AttentionCall
    replay : Replay, optional
        What projections take in the place of what the layer's attention gives in this pass; its weights
        are not verified then.

    Raises
    ------
    CaptureError
        When a layer returns no weights, several tensors that could be them, or weights that do not give
        its output.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for path, module in layers.items():
            if has_kernel(module):
                stack.enter_context(kernel_capture(path, module, receive))
                continue
            inner: dict[str, tuple[Tensor, Tensor]] = {}
            if asks_for_weights(module):
                stack.callback(module.register_forward_pre_hook(_asking(thread), with_kwargs=True).remove)
            for name, child in module.named_children():
                if isinstance(getattr(child, "weight", None), Tensor):
                    stack.callback(child.register_forward_hook(_keep(name, inner, thread)).remove)
                inputs = [x for projection, x in (replay or {}).get(path, ()) if projection == name]
                if inputs:
                    stack.callback(child.register_forward_pre_hook(_replaying(inputs, thread)).remove)
            hook = _taking(path, inner, receive, thread, verify=replay is None)
            stack.callback(module.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
        yield


def _asking(thread: int) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "output_attentions": True}) if threading.get_ident() == thread else None

    return hook


def _keep(name: str, inner: dict[str, tuple[Tensor, Tensor]], thread: int) -> Any:
    def hook(_module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output  # I-BERT's scale comes behind
        if threading.get_ident() == thread and isinstance(first, Tensor) and args:
            inner[name] = (args[0], first)

    return hook


def _replaying(inputs: Sequence[Tensor], thread: int) -> Any:
    left = list(inputs)

    def hook(_module: nn.Module, args: Any) -> Any:
        return (left.pop(0), *args[1:]) if threading.get_ident() == thread and left else None

    return hook


def _taking(
    path: str, inner: dict[str, tuple[Tensor, Tensor]], receive: Receiver, thread: int, *, verify: bool
) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        dense = dense_call(path, module, (args, kwargs), output, inner, verify=verify)
        if dense is not None:
            replaced = receive(dense.call)
            if replaced is None and dense.mixed.requires_grad:
                replaced = through(module, dense)
            inner.clear()
            return _handed_on(output, replaced, dense.first)
        whole, nested = output, isinstance(output, tuple) and output and isinstance(output[0], tuple)
        output = whole[0] if nested else whole
        index = _weights_index(path, module, output)
        weights, context = output[index], output[0]
        hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        again = recomputed_weights(module, hidden, output[-1])
        weights = weights if again is None else again
        found = _values_and_output(weights, context, inner, module, hidden) if verify else None
        if verify and found is None and weights.shape[2] in context.shape[:2]:
            raise CaptureError(
                f"attention layer {path} ({type(module).__name__}): the weights it returns times none of its "
                "projections give its output, so they cannot be verified; this architecture is not supported"
            )
        # Windows are refused by their shape.
        value, mixed, projection = (None, context, "") if found is None else found
        call = AttentionCall(path, weights, mixed, value, returned=context, projection=projection)
        replaced = receive(call)
        if again is not None and found is not None and replaced is None and weights.requires_grad:
            replaced = with_gradient(module, call)
        inner.clear()
        items = list(output)
        items[index] = weights.new_empty((*weights.shape[:-1], 0))
        if replaced is not None:
            items[0] = replaced
        result = _like(output, items)
        return (result, *whole[1:]) if nested else result

    return hook


def _values_and_output(
    weights: Tensor, context: Tensor, inner: Inner, module: nn.Module, hidden: Tensor | None
) -> tuple[Tensor, Tensor, str] | None:
    """Find values and output also where a layer has the positions first, the probes second (FSMT)."""
    found = values_and_output(weights, context, inner, module, hidden)
    if found is not None or context.dim() != 3 or context.shape[:2] != (weights.shape[2], weights.shape[0]):
        return found
    turned = {
        name: (before.transpose(0, 1), after.transpose(0, 1))
        for name, (before, after) in inner.items()
        if before.dim() == after.dim() == 3
    }
    found = values_and_output(weights, context.transpose(0, 1), turned, module, None)
    return None if found is None else (*found[:2], "")  # its projection takes the positions first


def _handed_on(output: Any, replaced: Tensor | None, first: int) -> Any:
    """Return what a layer is to give on, its tensors from the index `first` on left empty."""
    kept = [output[0] if replaced is None else replaced, *output[1:first]]
    return _like(output, [*kept, *(x.new_empty((*x.shape[:-1], 0)) for x in output[first:])])


def _like(output: Any, items: list[Any]) -> Any:
    """Return `items` as the kind of sequence that `output` is."""
    if isinstance(output, list):
        return items
    return type(output)(*items) if hasattr(output, "_fields") else tuple(items)


def _weights_index(path: str, module: nn.Module, output: Any) -> int:
    items = output if isinstance(output, (tuple, list)) else ()
    axes = items[0].shape[:2] if items and isinstance(items[0], Tensor) else (-1, -1)
    four = {i: t.shape for i, t in enumerate(items) if i and isinstance(t, Tensor) and t.dim() == 4}
    found = [i for i, shape in four.items() if shape[0] == axes[0]]
    found = found or [i for i, shape in four.items() if (shape[2], shape[0]) == axes]
    if len(found) != 1:
        raise CaptureError(
            f"attention layer {path} ({type(module).__name__}) returned {len(found)} weight "
            "tensors, expected 1; "
            'load the checkpoint with attention_implementation = "eager" or audit another architecture'
        )
    return found[0]
