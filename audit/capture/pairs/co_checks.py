"""Check that the rules for two streams hold in a model: what follows from the place of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.mixing import TOLERANCE
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.attention.threads import own_thread
from audit.capture.inputs.encoded import core_model
from audit.capture.pairs.co_attention import crosses
from audit.errors import CaptureError


def check_streams(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> None:
    """Check that both directions read the state before their layer, and that nothing else mixes positions.

    Every attention gives what it gave before, while every other position of what the cross-modality layers
    take is changed: the positions left alone must come out as they were.

    Raises
    ------
    CaptureError
    """
    name, core = type(core_model(model)).__name__, core_model(model)
    first = next(layer for layer in plan.layers if crosses(layer.path))
    block = core.get_submodule(f"{first.stack}.{first.block}")
    last = list(core.get_submodule(first.stack).children())[-1]
    plain = _replayed(model, plan, tensors, (block, last))
    for parity in (0, 1):
        changed = _replayed(model, plan, tensors, (block, last), before=plain, parity=parity)
        for whole, other in zip(plain.final, changed.final, strict=True):
            moved = (other.double() - whole.double()).abs().amax(dim=(0, 2))
            odd = torch.arange(len(moved), device=moved.device) % 2 == parity
            leaked = float(moved[~odd].amax()) if bool((~odd).any()) else 0.0
            if leaked > TOLERANCE[whole.dtype] * max(
                float(moved[odd].amax()) if bool(odd.any()) else 0.0, 1e-6
            ):
                raise CaptureError(
                    f"{name}: positions mix outside the captured attention; no exact map exists"
                )
    nudged = _Replay()
    nudged.outputs[first.path, 0] = plain.outputs[first.path, 0] + 1
    after = _replayed(model, plan, tensors, (block, last), before=nudged)
    if not torch.equal(after.weights[first.path, 1], plain.weights[first.path, 1]):
        raise CaptureError(
            f"{name}: one direction of {first.path} sees the other's result; no exact map exists"
        )


@dataclass
class _Replay:
    """What each attention call gave, its weights, and the last layer's two outputs."""

    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    weights: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    final: tuple[Tensor, ...] = ()


def _replayed(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    ends: tuple[nn.Module, nn.Module],
    *,
    before: _Replay | None = None,
    parity: int | None = None,
) -> _Replay:
    found, calls = _Replay(), Counter[str]()

    def receive(call: AttentionCall) -> Tensor | None:
        index = call.path, calls[call.path]
        calls[call.path] += 1
        found.outputs[index] = call.output if call.returned is None else call.returned
        found.weights[index] = call.weights
        return None if before is None else before.outputs.get(index)

    with exclusive(model, plan.configs), watched(plan, receive, None, {}), _changed_ends(ends, found, parity):
        run_model(model, tensors, attentions=True)
    return found


@contextmanager
def _changed_ends(ends: tuple[nn.Module, nn.Module], found: _Replay, parity: int | None) -> Iterator[None]:
    """Change every other position of what the first layer takes, and keep what the last one gives."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        if parity is None:
            return None
        return tuple(_noisy(item, parity) if i in (0, 2) else item for i, item in enumerate(args))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        found.final = tuple(output[:2])

    handles = (
        ends[0].register_forward_pre_hook(own_thread(before)),
        ends[1].register_forward_hook(own_thread(after)),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noisy(hidden: Tensor, parity: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=generator, dtype=torch.float32).to(hidden)
    odd = torch.arange(hidden.shape[1], device=hidden.device) % 2 == parity
    return torch.where(odd[None, :, None], hidden + noise, hidden)
