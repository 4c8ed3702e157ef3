"""Find the residual connections inside the blocks of an encoder-decoder, by what its modules really compute.

A block of a decoder has two attentions, each with a residual connection of its own:
x + scale · projection(attention × values). Wherever such a sum is taken by a norm, the block can be split.
The scale is 1, or a gate: tanh of a single parameter of the block (Llama 3.2, in decoder and tower).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.attention.passes import run_model, watched
from audit.capture.engines.blocks import _is_linear, _Trace, _traced, _unknown, same

Side = Literal["taken", "given"]


@dataclass(frozen=True)
class Part:
    """One attention of a block: x + scale · projection(attention × values), read by a norm.

    Attributes
    ----------
    layer : AttentionLayer
    block : str
        Path of the block.
    projection : str
        Path of the output projection.
    residual : (path, "taken" or "given")
        The module that takes, or gives, x.
    norm : str
        The norm whose input is the sum.
    post : bool
        Whether the norm's output goes on as the residual.
    scale : float
        The gate, 1 without one.
    second : str or None
        The norm behind the feed-forward block, where that block takes the norm's output and adds to it.
    followed : bool
        Whether another attention of the block comes next, and not the feed-forward block.
    """

    layer: AttentionLayer
    block: str
    projection: str
    residual: tuple[str, Side]
    norm: str
    post: bool
    scale: float = 1.0
    second: str | None = None
    followed: bool = False


def find_parts(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return the part of each attention layer.

    Parameters
    ----------
    model : the model that `plan` was made of
    plan : CapturePlan
    tensors : mapping
        One probe.

    Returns
    -------
    dict of attention path to Part

    Raises
    ------
    CaptureError
        For a layer whose sum of residual and attention no norm takes.
    """
    modules = dict(model.named_modules())
    blocks = dict.fromkeys(f"{layer.stack}.{layer.block}" for layer in plan.layers)
    inside = {p: m for p, m in modules.items() if any(p == b or p.startswith(f"{b}.") for b in blocks)}
    calls: dict[str, AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        calls.setdefault(call.path, call)

    with _traced(inside) as traces, watched(plan, keep, None), torch.no_grad():
        run_model(model, tensors, attentions=plan.has_hooks, keep_logits=True)
    parts = [_part(layer, calls[layer.path], modules, traces) for layer in plan.layers]
    return {part.layer.path: _with_next(part, parts, modules, traces) for part in parts}


def _with_next(
    part: Part, parts: Sequence[Part], modules: Mapping[str, nn.Module], traces: Mapping[str, _Trace]
) -> Part:
    """Return a part with what comes after its sum."""
    others = [one for one in parts if one.block == part.block and one is not part]
    total = getattr(traces[part.norm], "given" if part.post else "taken")
    if any(same(getattr(traces[one.residual[0]], one.residual[1]), total) for one in others):
        return replace(part, followed=True)
    last = traces[part.block].given
    norms = [
        path
        for path, trace in traces.items()
        if path.startswith(f"{part.block}.") and "norm" in type(modules[path]).__name__.lower()
        if path != part.norm and same(trace.given, last)
    ]
    return replace(part, second=norms[0] if part.post and norms else None)


def _part(
    layer: AttentionLayer,
    call: AttentionCall,
    modules: Mapping[str, nn.Module],
    traces: Mapping[str, _Trace],
) -> Part:
    block = f"{layer.stack}.{layer.block}"
    own = {path: trace for path, trace in traces.items() if path.startswith(f"{block}.")}
    linear = [path for path in own if _is_linear(modules[path])]
    norms = [path for path in own if "norm" in type(modules[path]).__name__.lower()]
    context = call.output.flatten(2)
    projection = next((path for path in linear if same(own[path].taken, context)), None)
    if projection is None or block not in traces or call.value is None:
        raise _unknown(layer.path, layer.module, "its output projection or its values cannot be found")
    queries = [path for path in linear if path.startswith(f"{layer.path}.")]
    for scale in _scales(modules[block]):
        added = scale * own[projection].given
        for residual, x in _residuals(block, norms, traces):
            norm = next((p for p in norms if _is_sum(own[p].taken, x, added)), None)
            if norm is None:
                continue
            before = [own[path].given for path in norms if same(own[path].taken, x)]
            # First, since what comes from a norm is hardly changed by another that was never trained.
            if any(same(own[path].taken, given) for path in queries for given in before):
                return Part(layer, block, projection, residual, norm, post=False, scale=scale)
            if any(same(own[path].taken, x) for path in queries):
                return Part(layer, block, projection, residual, norm, post=True, scale=scale)
    raise _unknown(layer.path, layer.module, "no norm takes the sum of residual and attention")


def _scales(block: nn.Module) -> list[float]:
    """Return what a block may scale its attention by: 1, or a gate of its own."""
    gates = [parameter for parameter in block.parameters(recurse=False) if parameter.numel() == 1]
    return [1.0, *(float(gate.detach().tanh()) for gate in gates)]


def _residuals(
    block: str, norms: list[str], traces: Mapping[str, _Trace]
) -> Iterator[tuple[tuple[str, Side], Tensor]]:
    """Yield what may be the residual: the block's input, and what its norms take and give."""
    yield (block, "taken"), traces[block].taken
    for path in norms:
        yield (path, "given"), traces[path].given
        yield (path, "taken"), traces[path].taken


def _is_sum(total: Any, one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and same(total, one.reshape(other.shape) + other)
