"""See attention calls through forward hooks, where a layer is not on the attention interface.

Such layers return their weights themselves, some only with ``output_attentions=True``. Hooks act for
the thread that set them alone, hand the weights on and leave an empty tensor in their place, so that
the model does not collect the weights of all its layers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from audit.capture.interface import AttentionCall, Receiver
from audit.errors import CaptureError

VALUE_NAMES = ("value", "value_proj", "v_proj", "v_lin", "to_v", "v")


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


@contextmanager
def hook_capture(layers: Mapping[str, nn.Module], receive: Receiver) -> Iterator[None]:
    """Send the weights that `layers` return to `receive` for calls of this thread.

    Parameters
    ----------
    layers : mapping of path to module
    receive : function of an AttentionCall
        Its `value` is there where the layer has a value projection whose shape fits.

    Raises
    ------
    CaptureError
        When a layer returns no weights, or several tensors that could be them.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for path, module in layers.items():
            inner: dict[str, tuple[Tensor, Tensor]] = {}
            for name, child in module.named_children():
                if isinstance(getattr(child, "weight", None), Tensor):
                    stack.callback(child.register_forward_hook(_keep(name, inner, thread)).remove)
            hook = _taking(path, inner, receive, thread)
            stack.callback(module.register_forward_hook(hook, prepend=True).remove)
        yield


def _keep(name: str, inner: dict[str, tuple[Tensor, Tensor]], thread: int) -> Any:
    def hook(_module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread and isinstance(output, Tensor) and args:
            inner[name] = (args[0], output)

    return hook


def _taking(path: str, inner: dict[str, tuple[Tensor, Tensor]], receive: Receiver, thread: int) -> Any:
    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        index = _weights_index(path, module, output)
        weights, context = output[index], output[0]
        call = AttentionCall(path, weights, *_unmixed(weights, context, inner), returned=context)
        replaced = receive(call)
        inner.clear()
        items = list(output)
        items[index] = weights.new_empty((*weights.shape[:-1], 0))
        if replaced is not None:
            items[0] = replaced
        return tuple(items)

    return hook


def _weights_index(path: str, module: nn.Module, output: Any) -> int:
    items = output if isinstance(output, tuple) else ()
    batch = items[0].shape[0] if items and isinstance(items[0], Tensor) else -1
    found = [
        i for i, t in enumerate(items) if i and isinstance(t, Tensor) and t.dim() == 4 and t.shape[0] == batch
    ]
    if len(found) != 1:
        raise CaptureError(
            f"attention layer {path} ({type(module).__name__}) returned {len(found)} weight "
            "tensors, expected 1; "
            'load the checkpoint with attention_implementation = "eager" or audit another architecture'
        )
    return found[0]


def _unmixed(
    weights: Tensor, context: Tensor, inner: Mapping[str, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor | None]:
    """Split what the layer computed from its values, and the values, into heads where they can be told."""
    batch, heads, queries, keys = weights.shape
    value = next((inner[name][1] for name in VALUE_NAMES if name in inner), None)
    # A projection whose output is what the layer returns took attention × values as its input.
    mixed = next((before for before, after in inner.values() if after is context), context)
    if value is None or mixed.dim() != 3 or value.shape != (batch, keys, mixed.shape[-1]):
        return context, None
    split = value.view(batch, keys, heads, -1).transpose(1, 2)
    return mixed.reshape(batch, queries, heads, -1), split
