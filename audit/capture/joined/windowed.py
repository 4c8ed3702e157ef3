"""Attention within windows of an image, such as Swin's: each window put where its patches are in the whole.

The windows are not computed again from a family's rule. Gradients tell which position of its block each
row of a window is made of, and to which position what the attention gives is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.attention.mixing import find_stream
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.links import feeds
from audit.errors import CaptureError

Slots = Mapping[str, Tensor]
"""For each layer that attends in windows, which position of its stack each row of each window is."""


def has_windows(config: Any) -> bool:
    """Return whether a model of images says that it attends within windows, in stages (Swin and its kin)."""
    parts = [config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)]
    return any(hasattr(part, "window_size") and hasattr(part, "depths") for part in parts)


def measure_slots(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> Slots:
    """Measure the windows of every layer for one probe.

    Raises
    ------
    CaptureError
        When a row of a window is made of several positions, or is not added back where it came from.
    """
    core, found = core_model(model), dict[str, Tensor]()
    with exclusive(model, plan.configs), torch.enable_grad(), _tapped(core, plan, found):
        run_model(model, tensors, attentions=plan.has_hooks)
    return found


@contextmanager
def _tapped(core: Any, plan: CapturePlan, found: dict[str, Tensor]) -> Iterator[None]:
    with ExitStack() as hooks:
        for layer in plan.layers:
            tap = _Tap(layer, found)
            block = core.get_submodule(f"{layer.stack}.{layer.block}")
            hooks.callback(
                block.register_forward_pre_hook(own_thread(tap.enter_block), with_kwargs=True).remove
            )
            hooks.callback(block.register_forward_hook(own_thread(tap.leave_block), prepend=True).remove)
            enter = own_thread(tap.enter_attention)
            hooks.callback(layer.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(
                layer.module.register_forward_hook(own_thread(tap.leave_attention), prepend=True).remove
            )
        yield


class _Tap:
    """One layer: the block's input and the attention's output as leaves."""

    def __init__(self, layer: AttentionLayer, found: dict[str, Tensor]) -> None:
        self.layer, self.found = layer, found
        self.taken: Tensor | None = None
        self.attended: Tensor | None = None
        self.windows: Tensor | None = None

    def enter_block(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = find_stream(args, kwargs)
        if where is None:
            return None
        taken = args[where] if isinstance(where, int) else kwargs[where]
        self.taken = taken.detach().requires_grad_()
        given = self.taken.clone()
        if isinstance(where, int):
            return tuple(given if i == where else item for i, item in enumerate(args)), kwargs
        return args, {**kwargs, where: given}

    def enter_attention(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = find_stream(args, kwargs)
        if where is not None:
            self.windows = args[where] if isinstance(where, int) else kwargs[where]

    def leave_attention(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) else output
        self.attended = first.detach().requires_grad_()
        given = self.attended.clone()
        return (given, *output[1:]) if isinstance(output, (tuple, list)) else given

    def leave_block(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if self.taken is None or self.windows is None or self.attended is None:
            raise CaptureError(f"attention layer {self.layer.path} has no windows of vectors; not supported")
        (slot,) = feeds(_rows(self.windows), [self.taken])
        (back,) = feeds(_rows(first), [self.attended])
        slot, back = slot.flatten(), back.flatten()
        order = torch.arange(len(slot), device=slot.device)
        if bool((slot < 0).any()) or not torch.equal(back[slot], order):
            raise CaptureError(
                f"attention layer {self.layer.path} attends in windows that overlap or do not give each "
                "position its own back; such attention is not supported"
            )
        here = torch.full((len(back),), -1, dtype=torch.int64, device=slot.device)
        here[slot] = order
        if len(back) != len(slot) or not torch.equal(slot, order) or self.windows.shape != self.taken.shape:
            self.found[self.layer.path] = here.reshape(self.windows.shape[:-1])
        return (first.detach(), *output[1:]) if isinstance(output, (tuple, list)) else first.detach()


def _rows(states: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1])


def spread_windows(call: AttentionCall, slots: Tensor, sequences: int, length: int) -> Tensor:
    """Return the weights of windows as one matrix over all positions, zero between windows.

    Parameters
    ----------
    call : AttentionCall
        Weights (window, head, m, m).
    slots : int Tensor (window, m)
        Position of each row, over the sequences one after the other; negative at padding.
    sequences, length : int

    Returns
    -------
    Tensor (sequence, head, length, length)

    Raises
    ------
    CaptureError
        When a position attends to padding, which is no position of the image.

    Examples
    --------
    >>> call = AttentionCall("layer", torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, 2, 1, 1))
    >>> spread_windows(call, torch.tensor([[0, 2], [3, 1]]), 1, 4)[0, 0].tolist()
    [[0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.5], [0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.5]]
    """
    weights, here = call.weights, slots >= 0
    padding = (weights * (here[:, None, :, None] & ~here[:, None, None, :])).amax()
    if padding > 1e-6:
        raise CaptureError(
            f"attention layer {call.path} attends to the padding of its windows (weight "
            f"{float(padding):.3g}), which is no part of the image; use images whose patches fill the windows"
        )
    whole = weights.new_zeros(sequences, weights.shape[1], length, length)
    sequence, place = slots.clamp_min(0) // length, slots.clamp_min(0) % length
    for w in range(len(weights)):
        rows = here[w].nonzero()[:, 0]
        if len(rows):
            own, at = int(sequence[w, rows[0]]), place[w, rows]
            whole[own, :, at[:, None], at[None, :]] = weights[w][:, rows[:, None], rows[None, :]]
    return whole
