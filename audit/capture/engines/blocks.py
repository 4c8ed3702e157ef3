"""Find the residual block around each attention layer, by what its modules really compute.

No table of families: one pass over one probe keeps what every module of a layer takes and gives. The
output projection is the one that takes attention × values; the layer norm is the one that takes the
residual plus what the projection gives. Where no module does, the block is not of a known form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from audit.capture.attention.check import VALUE_TOLERANCE
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import run_model, watched
from audit.capture.attention.threads import own_thread
from audit.errors import CaptureError


@dataclass(frozen=True)
class Block:
    """Modules of one layer: x + scale · projection(attention × values), read by a norm.

    Attributes
    ----------
    layer : str
        Path of the module whose input is the residual x.
    projection : str
        Path of the output projection.
    norm : str
        Path of the norm whose input is the sum. In a post-norm layer its output goes on as the
        residual; in a pre-norm layer it only feeds the feed-forward block.
    post : bool
    second : str or None
        Post-norm only: the norm after the feed-forward block.
    scale : str or None
        A module with a learned factor for each dimension between projection and sum.
    factor : str or None
        The same as a parameter of the layer itself.
    """

    layer: str
    projection: str
    norm: str
    post: bool
    second: str | None = None
    scale: str | None = None
    factor: str | None = None


class _Trace(NamedTuple):
    taken: Tensor
    given: Tensor


def find_blocks(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    *,
    keep_logits: bool = False,
    slots: Mapping[str, Tensor] | None = None,
) -> dict[str, Block]:
    """Return the block of each attention layer.

    Parameters
    ----------
    model : the model that `plan` was made of
    plan : CapturePlan
    tensors : mapping
        One probe.
    keep_logits : bool
    slots : mapping of attention path to int Tensor (window, row), optional
        Of layers that attend within windows: which position each row is, negative at padding.

    Returns
    -------
    dict of attention path to Block

    Raises
    ------
    CaptureError
        For a layer whose sum of residual and attention no norm takes: parallel blocks, norms between
        attention and sum.
    """
    modules = dict(model.named_modules())
    around = {layer.path: nearest_block(layer.path) for layer in plan.layers}
    calls: dict[str, AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        calls.setdefault(call.path, call)

    wanted = [p for p in modules if any(p == a or p.startswith(f"{a}.") for a in set(around.values()))]
    with (
        _traced({path: modules[path] for path in wanted}) as traces,
        watched(plan, keep, None),
        torch.no_grad(),
    ):
        run_model(model, tensors, attentions=plan.has_hooks, keep_logits=keep_logits)
    places = slots or {}
    return {
        path: _block(path, around[path], calls[path], modules, traces, slots=places.get(path))
        for path in around
    }


def nearest_block(path: str) -> str:
    """Return the path of the nearest list item around an attention layer.

    Raises
    ------
    CaptureError
        When it lies in no list.

    Examples
    --------
    >>> nearest_block("encoder.layers.1.self_attn")
    'encoder.layers.1'
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if parts[cut - 1].isdigit():
            return ".".join(parts[:cut])
    raise CaptureError(f"attention layer {path} lies in no list of layers; use the method rollout")


@contextmanager
def _traced(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, _Trace]]:
    """Keep what each module takes and gives in its first call."""
    traces: dict[str, _Trace] = {}
    with ExitStack() as stack:
        for path, module in modules.items():

            def keep(_m: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                taken, given = first_input(args, kwargs), first_output(output)
                if path not in traces and taken is not None and given is not None:
                    traces[path] = _Trace(taken, given)

            stack.callback(module.register_forward_hook(own_thread(keep), with_kwargs=True).remove)
        yield traces


def first_input(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the hidden states that a module was called with."""
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, Tensor) else None


def first_output(output: Any) -> Tensor | None:
    """Return the hidden states that a module returned."""
    found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) else None


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors agree up to the rounding of their dtype."""
    if a.shape[-1:] != b.shape[-1:] or a.numel() != b.numel() or not a.is_floating_point():
        return False
    a, b = a.detach().flatten(0, -2), b.detach().flatten(0, -2)  # OPT joins batch and position
    tolerance = VALUE_TOLERANCE[a.dtype] * float(b.abs().amax().clamp_min(1e-6))
    return bool(((a - b).abs() <= tolerance).all())


def _block(
    path: str,
    layer: str,
    call: AttentionCall,
    modules: Mapping[str, nn.Module],
    traces: Mapping[str, _Trace],
    *,
    slots: Tensor | None,
) -> Block:
    context = call.output.flatten(2)
    inside = [p for p in traces if p.startswith(f"{layer}.")]
    linear = [p for p in inside if _is_linear(modules[p])]
    projection = next((p for p in linear if same(traces[p].taken, context)), None)
    if projection is None or layer not in traces or call.value is None:
        raise _unknown(path, modules[path], "its output projection or its values cannot be found")
    residual, added = traces[layer].taken, in_order(traces[projection].given, slots, traces[layer].taken)
    scaled = [p for p in inside if hasattr(modules[p], "lambda1") and same(traces[p].taken, added)]
    added = traces[scaled[0]].given if scaled else added
    norms = [p for p in inside if "norm" in type(modules[p]).__name__.lower()]
    norm, factor = _sum_norm(modules[layer], residual, added, {p: traces[p].taken for p in norms})
    own = next((traces[p].taken for p in linear if p.startswith(f"{path}.")), None)
    if norm is None or own is None:
        raise _unknown(path, modules[path], "no norm takes the sum of residual and attention")
    own = in_order(own, slots, residual)
    # Behind a norm the residual may be what its norm gives: CLIP's first layer, until it is trained.
    pre = any(same(own, traces[p].given) and same(traces[p].taken, residual) for p in norms)
    if not pre and not same(own, residual):
        raise _unknown(path, modules[path], "it takes neither the residual nor its norm")
    after = [p for p in norms if p != norm and same(traces[p].given, traces[layer].given)]
    second = None if pre or not after else after[0]
    factor = None if factor is None else f"{layer}.{factor}"
    return Block(layer, projection, norm, not pre, second, scaled[0] if scaled else None, factor)


def in_order(windows: Tensor, slots: Tensor | None, like: Tensor) -> Tensor:
    """Return vectors of windows (window, row, dim) in the order of the positions, shaped as `like`.

    Without `slots` they are in that order already.
    """
    if slots is None:
        return windows
    known = slots.flatten() >= 0
    ordered = windows.new_zeros(like.shape).flatten(0, -2)
    ordered[slots.flatten()[known]] = windows.flatten(0, -2)[known]
    return ordered.reshape(like.shape)


def _sum_norm(
    layer: nn.Module, residual: Tensor, added: Tensor, taken: Mapping[str, Tensor]
) -> tuple[str | None, str | None]:
    """Return the norm that takes residual + attention, and which factor of the layer scales the attention."""
    if residual.shape[-1] != added.shape[-1] or residual.numel() != added.numel():
        return None, None
    added = added.reshape(residual.shape)
    width = residual.shape[-1:]
    own = [(name, x) for name, x in layer.named_parameters(recurse=False) if x.shape == width]
    sums = [(None, residual + added), *((name, residual + x.detach() * added) for name, x in own)]
    found = ((path, name) for name, total in sums for path, x in taken.items() if same(x, total))
    return next(found, (None, None))


def _unknown(path: str, module: nn.Module, why: str) -> CaptureError:
    return CaptureError(
        f"attention layer {path} ({type(module).__name__}): {why}, so it cannot be split into what each "
        "position adds; use rollout with a constant residual, or gradient_rollout"
    )


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def projection_weight(module: nn.Module, heads: int) -> Tensor:
    """Return the weight of an output projection, cut by heads: (head, head_dim, dim)."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise ValueError(f"module: expected a weight matrix, got {type(module).__name__}")
    # Conv1D of transformers keeps (in, out), nn.Linear (out, in).
    rows = weight if type(module).__name__ == "Conv1D" else weight.T
    work = torch.promote_types(rows.dtype, torch.float32)
    return rows.detach().to(work).reshape(heads, -1, rows.shape[1])


def refuse_hooks(plan: CapturePlan) -> None:
    """Raise CaptureError for layers whose values cannot be changed, naming the first."""
    path = next((layer.path for layer in plan.layers if layer.mechanism == "hook"), None)
    if path is not None:
        raise CaptureError(
            f"attention layer {path} is not on the attention interface, so its values cannot be zeroed; use "
            "alti or norms"
        )
