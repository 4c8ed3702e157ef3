"""Two towers that do not see each other: check that, and find the rows that their heads read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, place, run_model, watched
from audit.capture.inputs.encoded import core_model
from audit.capture.outputs.pooling import Pooling, check_pooled, pooling_calls, pooling_head, tower_root
from audit.errors import CaptureError
from audit.methods.fusion import fuse_heads


def check_independent(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> None:
    """Check that each tower's attention depends on its own input alone.

    Raises
    ------
    CaptureError
        When both towers change with one input, or one with both.
    """
    plain = _totals(model, plan, tensors)
    for name, changed in _changes(tensors).items():
        now = _totals(model, plan, changed)
        moved = [stack for stack in plan.stacks if not torch.equal(plain[stack], now[stack])]
        if len(moved) != 1:
            raise CaptureError(
                f"{type(core_model(model)).__name__}: another {name} changes the attention of "
                f"{' and '.join(moved) or 'no stack'}, so its stacks are not two separate towers; "
                "no exact rollout exists for it"
            )


def _changes(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found = {}
    if "input_ids" in tensors:
        ids = tensors["input_ids"]
        found["text"] = {**tensors, "input_ids": torch.cat([ids[:, -1:], ids[:, :-1]], dim=1)}
    if "pixel_values" in tensors:
        found["image"] = {**tensors, "pixel_values": tensors["pixel_values"].flip(-1) * 0.5}
    return found


def _totals(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a summary of the attention of each stack that differs where any row differs."""
    stacks = {layer.path: layer.stack for layer in plan.layers}
    totals: dict[str, Tensor] = {}

    def receive(call: AttentionCall) -> None:
        keys = torch.arange(1, call.weights.shape[-1] + 1, device=call.weights.device)
        value = (call.weights.detach().double() * keys).sum(dim=-1).flatten()
        before = totals.get(stacks[call.path])
        totals[stacks[call.path]] = value if before is None else before + value

    with exclusive(model, plan.configs), watched(plan, receive, None):
        run_model(model, tensors, attentions=plan.has_hooks)
    return totals


def tower_reads(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    masks: tuple[Tensor, Tensor],
    row: str,
    *,
    fusion: Mapping[str, Any] | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[bool, bool]]:
    """Return the rows of each tower that the similarity of text and image depends on.

    Parameters
    ----------
    model, plan, tensors
    masks : two bool Tensors (batch, position)
        False at pads.
    row : str
        ``auto`` measures them: the rows of the last block with a gradient from the similarity, which must
        be one row or all alike; where a head reads them through one more attention, its weights.
        ``cls``, ``mean`` and ``last`` set them for both towers.
    fusion : mapping
        How heads are fused, those of a pooling head too.

    Returns
    -------
    reads : two float Tensors (batch, position)
        Each row sums to 1.
    pooled : two bools
        Whether a row is that of a pooling head.

    Raises
    ------
    CaptureError
        When the rows cannot be told.
    """
    if row != "auto":
        return (_fixed(masks[0], row), _fixed(masks[1], row)), (False, False)
    core, calls = core_model(model), dict[str, Pooling]()
    with exclusive(model, plan.configs), torch.enable_grad(), ExitStack() as hooks:
        states = hooks.enter_context(_last_states(model, plan))
        for stack, head in _pooling_heads(core, plan).items():
            hooks.enter_context(pooling_calls(head, partial(_cut, calls, stack)))
        outputs = run_model(model, place(tensors, core.device, core.dtype))
        similarity = getattr(outputs, "logits_per_image", None)
        if similarity is None:
            raise CaptureError(
                f"{type(core).__name__} gives no similarity of text and image; set [method] row"
            )
        similarity.diagonal().sum().backward()
        for stack, call in calls.items():
            check_pooled(call, states[stack], stack)
    found = [
        _pooled(calls[stack], mask, fusion or {}) if stack in calls else _measured(states[stack], mask, stack)
        for stack, mask in zip(plan.stacks, masks, strict=True)
    ]
    return (found[0], found[1]), (plan.stacks[0] in calls, plan.stacks[1] in calls)


def _pooling_heads(core: nn.Module, plan: CapturePlan) -> dict[str, tuple[str, nn.MultiheadAttention]]:
    roots = {one: tower_root(one, other) for one, other in (plan.stacks, plan.stacks[::-1])}
    heads = {stack: pooling_head(core, root) for stack, root in roots.items()}
    return {stack: head for stack, head in heads.items() if head is not None}


def _cut(calls: dict[str, Pooling], stack: str, call: Pooling) -> Tensor:
    """Note a call of a pooling head, and cut it off: what still reaches the tower goes past the head."""
    calls[stack] = call
    return call.output.detach()


def _pooled(call: Pooling, mask: Tensor, fusion: Mapping[str, Any]) -> Tensor:
    rule = {key: value for key, value in fusion.items() if value != "weighted"}
    row = fuse_heads(call.weights, query_offset=None, **rule)[:, 0]
    if bool((row * ~mask).sum() > 1e-6):
        raise CaptureError("the pooling head reads padding; pass an attention mask")
    return row


def _fixed(mask: Tensor, row: str) -> Tensor:
    weights = torch.zeros(mask.shape, device=mask.device)
    if row == "mean":
        weights = mask.float()
    elif row == "cls":
        weights[:, 0] = 1
    elif row == "last":
        weights[torch.arange(len(mask)), mask.sum(dim=1) - 1] = 1
    else:
        raise CaptureError(
            f"[method] row = {row!r} is not available for two towers; use auto, cls, mean or last"
        )
    return weights / weights.sum(dim=1, keepdim=True)


@contextmanager
def _last_states(model: nn.Module, plan: CapturePlan) -> Iterator[dict[str, Tensor]]:
    """Keep the output of the last block of each stack as a leaf that collects a gradient."""
    core = core_model(model)
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in plan.stacks:

            def keep(_module: nn.Module, _args: Any, output: Any, name: str = name) -> Any:
                first = output[0] if isinstance(output, tuple) else output
                leaf = first.detach().requires_grad_()
                states[name] = leaf
                return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

            last = list(core.get_submodule(name).children())[-1]
            hooks.callback(last.register_forward_hook(keep).remove)
        yield states


def _measured(state: Tensor, mask: Tensor, stack: str) -> Tensor:
    gradient = state.grad
    if gradient is None or gradient.shape[:2] != mask.shape:
        raise CaptureError(f"the similarity does not depend on the last block of {stack}; set [method] row")
    size = gradient.abs().amax(dim=-1)
    read = (size > 1e-9 * size.amax(dim=1, keepdim=True)).float()
    alike = (gradient - gradient.sum(dim=1, keepdim=True) / read.sum(dim=1)[:, None, None]).abs().amax(dim=-1)
    uneven = (alike * read).amax(dim=1) > 1e-3 * size.amax(dim=1)
    if bool(uneven.any()):
        raise CaptureError(
            f"the head over {stack} weighs its rows unequally, so no row is its output; set [method] row"
        )
    return read / read.sum(dim=1, keepdim=True)
