"""Gradient rollout in step with the backward pass: one layer's n² alive at a time.

The forward pass runs the model's own kernel and keeps queries, keys and values only. When backward
reaches a layer, its weights P are computed again, ∇P = dO·Vᵀ is at hand, and the pair is folded into
the row that is read, from the last layer down, a block of queries at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from audit.capture.attention.check import check_counts, check_rows, check_values
from audit.capture.attention.hooks import counted_calls, hook_capture
from audit.capture.attention.interface import AttentionCall, KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan, expected_calls
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.scratch import Scratch
from audit.capture.attention.threads import own_thread
from audit.capture.attention.weights import with_sink
from audit.capture.engines.query_blocks import block_weights, laid_out, query_blocks
from audit.capture.engines.row_fold import check_blocks
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import resolve_targets, target_scores
from audit.errors import CaptureError
from audit.methods.gradient import gradient_map, weigh_by_gradient
from audit.records import Checkpoint

BLOCK_ENTRIES = 2**22
"""Weights (batch × head × query × key) of one block of queries: 16 MB in float32."""


class LayerFold(Protocol):
    """What takes the weights and gradients of the layers, the last layer first; see :class:`GradientFold`."""

    calls: int

    def start_layer(self, layer: int) -> None:
        """Begin a layer, counted in the order of the forward pass."""

    def block(self, start: int, weights: Tensor, gradient: Tensor) -> None:
        """Take a block of the layer's queries."""

    def finish_layer(self, layer: int) -> None:
        """End the layer."""


class GradientFold:
    """The output row of a gradient rollout, carried from the last layer down.

    Parameters
    ----------
    settings : FoldSettings
        ``form`` is relevance (the row of R − I) or product (the row of R).
    read : float Tensor (batch, position)
        The output row, as weights over the rows.
    valid : bool Tensor (batch, position)
    """

    sink = False

    def __init__(self, settings: FoldSettings, read: Tensor, valid: Tensor) -> None:
        self.settings, self.read, self.valid = settings, read, valid
        self.relevance = settings.form == "relevance"
        self.rows: list[Tensor] = []
        self.causal = torch.ones(len(read), dtype=torch.bool, device=read.device)
        self.targets: dict[str, Score] = {}
        self.calls = 0
        self._vector = torch.zeros_like(read) if self.relevance else read.clone()
        self._next: int | None = None
        self._base = self._added = self._vector

    def start_layer(self, layer: int) -> None:
        """Begin the layer below the last one that was finished; `layer` is checked against it."""
        if layer != (self.calls - 1 if self._next is None else self._next):
            raise CaptureError(
                f"gradients of attention layer {layer} arrived out of order, so its layers do not form one "
                "stack; use the method rollout"
            )
        self._base, self._added = self._vector.clone(), torch.zeros_like(self._vector)

    def block(self, start: int, weights: Tensor, gradient: Tensor) -> None:
        """Fold a block of this layer's queries, the first at position `start`.

        Parameters
        ----------
        start : int
        weights, gradient : Tensor (batch, head, query of the block, key)
        """
        try:
            weighted = weigh_by_gradient(weights, gradient).to(self._vector.dtype)
        except ValueError as error:
            raise CaptureError(f"gradient rollout: {error}; load the checkpoint in float32") from None
        stop = start + weighted.shape[1]
        if bool(self.causal.any()):
            rows = torch.arange(start, stop, device=weights.device)[:, None]
            later = torch.arange(weighted.shape[2], device=weights.device)[None] > rows
            self.causal &= ((weights * later) == 0).flatten(1).all(dim=1)
        source = self._vector[:, start:stop]
        if self.relevance:
            source = source + self.read[:, start:stop]
        else:
            source = source / (1 + weighted.sum(-1))
            self._base[:, start:stop] = source
        self._added += (source[:, None] @ weighted)[:, 0]

    def finish_layer(self, layer: int) -> None:
        """Take the layer's blocks together; the layer below comes next."""
        self._vector, self._next = self._base + self._added, layer - 1

    def final_row(self) -> Tensor:
        """Return the map: (batch, position), all zero where no attention favours the target."""
        if self._next != -1:
            raise CaptureError(
                f"gradients reached {0 if self._next is None else self.calls - 1 - self._next} of "
                f"{self.calls} attention layers; the target does not depend on the others"
            )
        return gradient_map(self._vector)[0]

    def diagnostics(self) -> dict[str, Tensor]:
        """Return numbers that go with the maps: name to (batch,)."""
        return {"relevance": self._vector.sum(dim=1)}


@dataclass(frozen=True)
class _Saved:
    """What a layer's backward needs besides its tensors."""

    call: KernelCall
    fold: LayerFold
    layer: int


class _StreamedAttention(torch.autograd.Function):
    """The model's own kernel forward; weights, their gradient and the fold in backward."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, *tensors: Tensor | None) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(*tensors)
        return _with_tensors(saved.call, [None if t is None else t.detach() for t in tensors]).run()[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved: _Saved = ctx.saved
        needed = ctx.needs_input_grad[1:]
        return None, *_backward(saved, list(ctx.saved_tensors), needed, upstream[0])


def _with_tensors(call: KernelCall, tensors: Sequence[Tensor | None]) -> KernelCall:
    query, key, value, mask, bias, sinks = tensors
    options = dict(call.options)
    options |= {name: t for name, t in (("position_bias", bias), ("s_aux", sinks)) if t is not None}
    if query is None or key is None or value is None:
        raise ValueError("tensors: expected query, key and value")
    return replace(call, query=query, key=key, value=value, mask=mask, options=options)


@dataclass(frozen=True)
class _Backward:
    """The backward pass of one layer: its tensors, which gradients are wanted, and their sums."""

    saved: _Saved
    tensors: Sequence[Tensor | None]
    needed: Sequence[bool]
    total: list[Tensor | None]

    def block(self, upstream: Tensor, rows: slice) -> None:
        """Fold one block of queries, with `upstream` (batch, query, head, dim), and add its part."""
        value = self.tensors[2]
        leaves = [_leaf(t, want) for t, want in zip(self.tensors, self.needed, strict=True)]
        if value is None:
            raise ValueError("tensors: expected query, key and value")
        with torch.enable_grad():
            weights = block_weights(_with_tensors(self.saved.call, leaves), rows)
        back = upstream.transpose(1, 2)  # (batch, head, query, dim)
        groups = weights.shape[1] // value.shape[1]
        spread = value.detach().to(back.dtype)
        spread = spread.repeat_interleave(groups, dim=1) if groups > 1 else spread
        gradient = back @ spread.transpose(-1, -2)
        plain = weights.detach()[..., : gradient.shape[-1]]
        self.saved.fold.block(rows.start, plain, gradient)
        if self.total[2] is not None:
            summed = plain.to(back.dtype).transpose(-1, -2) @ back
            grouped = summed.reshape(len(summed), value.shape[1], groups, *summed.shape[2:])
            self._add(2, grouped.sum(dim=2))
        extra = weights.shape[-1] - gradient.shape[-1]
        if extra:  # a sink has no value, so nothing pulls at it
            gradient = torch.nn.functional.pad(gradient, (0, extra))
        self._back_to(leaves, weights, gradient)

    def _back_to(self, leaves: Sequence[Tensor | None], weights: Tensor, gradient: Tensor) -> None:
        """Send the gradient of the weights back to what they were computed from."""
        asked = [(i, t) for i, t in enumerate(leaves) if t is not None and t.requires_grad and i != 2]
        if not asked:
            return
        found = torch.autograd.grad(
            weights, [t for _, t in asked], gradient.to(weights.dtype), allow_unused=True
        )
        for (i, _), part in zip(asked, found, strict=True):
            if part is not None:
                self._add(i, part)

    def _add(self, index: int, part: Tensor) -> None:
        whole = self.total[index]
        if whole is not None:
            whole += part


def _backward(
    saved: _Saved, tensors: Sequence[Tensor | None], needed: Sequence[bool], upstream: Tensor
) -> list[Tensor | None]:
    """Return the gradients of the layer's tensors, folding its weights on the way."""
    query = saved.call.query
    work = torch.promote_types(query.dtype, torch.float32)
    total = [
        torch.zeros_like(t, dtype=work) if t is not None and want else None
        for t, want in zip(tensors, needed, strict=True)
    ]
    run = _Backward(saved, tensors, needed, total)
    batch, heads, length, _ = query.shape
    size = max(1, min(length, BLOCK_ENTRIES // (batch * heads * length)))
    saved.fold.start_layer(saved.layer)
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        run.block(upstream[:, rows].to(work), rows)
    saved.fold.finish_layer(saved.layer)
    return [None if g is None or t is None else g.to(t.dtype) for g, t in zip(total, tensors, strict=True)]


def _leaf(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(wanted)


def gradient_batch(
    checkpoint: Checkpoint,
    plan: CapturePlan,
    batch: Sequence[Encoded],
    tensors: Mapping[str, Tensor],
    fold: GradientFold,
    *,
    wanted: Mapping[str, Any],
    verify: bool = False,
    keep_logits: bool = False,
    root: nn.Module | None = None,
) -> Any:
    """Run one batch forward and backward, and fold its attention on the way back.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its parameters get no ``.grad``: gradients are taken with respect to the embedded inputs.
    plan : CapturePlan
    batch : sequence of Encoded
    tensors : their tensors, stacked
    fold : GradientFold
        Filled with the output row of the batch; `fold.targets` with the classes that were explained.
    wanted : mapping of probe id to target class, None = the probe's label, else the predicted class
    verify, keep_logits
        See :func:`audit.capture.attention.passes.fold_batch`.
    root : nn.Module, optional
        The part of the model whose inputs gradients are taken with respect to; all of it when None.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer cannot be reached, or its weights are not what it used.
    """
    model, valid = checkpoint.model, fold.valid
    with exclusive(model, plan.configs), torch.enable_grad(), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        leaf = stack.enter_context(gradient_leaf(core_model(model) if root is None else root))
        seen = Counter[str]()
        attend = Replacing(lambda call: _attend(call, fold, seen, valid if verify else None))
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, attend))
        hooked = lambda call: _hooked(call, fold, seen, valid)  # noqa: E731
        stack.enter_context(hook_capture(plan.modules("hook"), hooked))
        outputs = run_model(model, tensors, attentions=plan.has_hooks, keep_logits=keep_logits)
        check_counts(plan, called, seen, _expected(model, plan))
        fold.targets = resolve_targets(checkpoint, batch, outputs, wanted, fold.read)
        scores = target_scores(batch, outputs, fold.targets, fold.read, checkpoint.task)
        if not leaf or not scores.requires_grad:
            raise CaptureError(
                f"{type(core_model(model)).__name__}: its logits do not depend on a float input, so there is "
                "no gradient; use the method rollout"
            )
        torch.autograd.grad(scores.sum(), leaf[0], allow_unused=True)
    return _detached(outputs)


def _expected(model: nn.Module, plan: CapturePlan) -> int | None:
    return None if getattr(plan, "narrowed", False) else expected_calls(core_model(model))


def _attend(
    call: KernelCall,
    fold: LayerFold,
    seen: Counter[str],
    valid: Tensor | None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer so that backward comes past the fold; `keys` are valid keys of another stream."""
    seen[call.path] += 1
    saved, fold.calls = _Saved(call, fold, fold.calls), fold.calls + 1
    bias, sinks = call.options.get("position_bias"), call.options.get("s_aux")
    tensors = (call.query, call.key, call.value, call.mask, bias, sinks)
    output: Tensor = _StreamedAttention.apply(saved, *tensors)  # type: ignore[no-untyped-call]
    if valid is not None and keys is None:
        _verify(call, output.detach(), valid)
    elif valid is not None:
        weights = call.weights().detach()
        sink = sinks is not None
        if sink and weights.shape[-1] == call.key.shape[-2]:
            weights = with_sink(weights)
        watched = AttentionCall(call.path, weights, output.detach(), call.value.detach(), sink)
        check_rows(watched, valid, keys)
        check_values(watched, valid)
    return output, None


@torch.no_grad()
def _verify(call: KernelCall, output: Tensor, valid: Tensor) -> None:
    """Check rows and attention × values of a layer, a block of queries at a time."""
    check_blocks(call, output, valid)
    call, sink, scratch = laid_out(call), call.options.get("s_aux") is not None, Scratch()
    for rows in query_blocks(call):
        watched = AttentionCall(call.path, block_weights(call, rows, scratch), output, sink=sink)
        check_rows(watched, valid[:, rows], valid)


def _hooked(
    call: AttentionCall, fold: LayerFold, seen: Counter[str], valid: Tensor, keys: Tensor | None = None
) -> None:
    """Fold a layer off the interface when autograd reaches the weights that it returned."""
    seen[call.path] += 1
    layer, fold.calls = fold.calls, fold.calls + 1
    weights = call.weights
    check_rows(replace(call, weights=weights.detach()), valid, keys)
    if not weights.requires_grad:
        raise CaptureError(
            f"attention layer {call.path} gives weights without a gradient; use another method"
        )

    def take(gradient: Tensor) -> None:
        fold.start_layer(layer)
        fold.block(0, weights.detach(), gradient)
        fold.finish_layer(layer)

    weights.register_hook(take)  # type: ignore[no-untyped-call]


@contextmanager
def gradient_leaf(model: nn.Module) -> Iterator[list[Tensor]]:
    """Make the first float tensor of a forward pass the leaf of its graph, and yield it in a list.

    Embedding or patch projection: everything later depends on it, and nothing before it is in the
    graph. Parameters are left as they are.
    """
    leaf: list[Tensor] = []

    def mark(_module: nn.Module, _args: Any, output: Any) -> Any:
        if leaf or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    with ExitStack() as stack:
        for module in model.modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(own_thread(mark)).remove)
        yield leaf


def _detached(outputs: Any) -> Any:
    for name, item in list(outputs.items()):
        if isinstance(item, Tensor):
            outputs[name] = item.detach()
    return outputs
