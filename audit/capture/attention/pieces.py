"""Layers that attend within pieces of their positions, one call for each: put together to one matrix.

Towers that take images of any size, packed into one row, call their kernel once for each image or window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from audit.capture.attention.check import VALUE_TOLERANCE
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.threads import own_thread
from audit.errors import CaptureError


def join_pieces(
    calls: Sequence[AttentionCall], taken: Sequence[Tensor], given: Sequence[Tensor]
) -> AttentionCall:
    """Return the calls of one layer as one call, whose weights are zero between pieces.

    Parameters
    ----------
    calls : sequence of AttentionCall
        In the order of the positions.
    taken, given : sequences of Tensor
        What the projections of the layer took and gave: in them the positions stand in the layer's order.

    Raises
    ------
    CaptureError
        When the pieces do not stand behind each other in the order of the layer's positions.
    """
    path = calls[0].path
    values = [call.value for call in calls]
    known = all(value is not None for value in values) and not any(call.sink for call in calls)
    if not known or any(
        len(call.weights) != 1 or call.weights.shape[-2] != call.weights.shape[-1] for call in calls
    ):
        raise CaptureError(f"attention layer {path} attends in pieces that are not supported")
    output = torch.cat([call.output for call in calls], dim=1)
    value = torch.cat([value for value in values if value is not None], dim=2)
    in_order = any(_same(output.flatten(2), one) for one in taken)
    in_order = in_order and any(_ends_with(one, value.transpose(1, 2).flatten(2)) for one in given)
    if not in_order:
        raise CaptureError(
            f"attention layer {path} attends in pieces whose order among its positions cannot be verified; "
            "such attention is not supported"
        )
    return AttentionCall(path, _diagonal([call.weights for call in calls]), output, value)


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Return weights (1, head, n, n) that are zero between the blocks."""
    size = sum(block.shape[-1] for block in blocks)
    whole, start = blocks[0].new_zeros(1, blocks[0].shape[1], size, size), 0
    for block in blocks:
        stop = start + block.shape[-1]
        whole[..., start:stop, start:stop] = block
        start = stop
    return whole


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape[-1] != b.shape[-1] or a.numel() != b.numel():
        return False
    difference = (a.reshape(-1, a.shape[-1]) - b.reshape(-1, b.shape[-1])).abs().amax()
    return bool(difference <= VALUE_TOLERANCE[a.dtype] * b.abs().amax().clamp_min(1e-6))


def _ends_with(projected: Tensor, value: Tensor) -> bool:
    """Tell whether a projection gave the values alone, or behind queries and keys."""
    width = value.shape[-1]
    return projected.shape[-1] >= width and _same(value, projected[..., -width:])


@contextmanager
def joined_pieces(
    layers: Mapping[str, nn.Module], pieces: Mapping[str, list[AttentionCall]], receive: Callable[..., object]
) -> Iterator[None]:
    """Hand on what lies in `pieces` as one call whenever one of `layers` returns, and empty it.

    Parameters
    ----------
    layers : mapping of path to module
    pieces : mapping of path to the calls of its kernel
    receive : function of an AttentionCall
    """
    with ExitStack() as stack:
        for path, module in layers.items():
            seen = _Projections()
            for child in module.modules():
                if isinstance(child, nn.Linear):
                    stack.callback(child.register_forward_hook(own_thread(seen.keep)).remove)
            leave = own_thread(_leaving(pieces[path], seen, receive))
            stack.callback(module.register_forward_hook(leave).remove)
        yield


class _Projections:
    """What the projections of one call of a layer took and gave."""

    def __init__(self) -> None:
        self.taken, self.given = list[Tensor](), list[Tensor]()

    def keep(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.taken.append(args[0])
        self.given.append(output)


def _leaving(
    calls: list[AttentionCall], seen: _Projections, receive: Callable[..., object]
) -> Callable[..., None]:
    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        receive(join_pieces(calls, seen.taken, seen.given))
        for kept in (calls, seen.taken, seen.given):
            kept.clear()

    return leave
