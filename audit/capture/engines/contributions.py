"""Value-aware methods: what each position adds to each other, layer by layer, while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import VALUE_TOLERANCE, check_rows, check_values
from audit.capture.attention.interface import AttentionCall, KernelCall
from audit.capture.attention.layers import CapturePlan, expected_calls
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.attention.threads import own_thread
from audit.capture.engines.blocks import Block, first_input, first_output, projection_weight
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import MEASURED, FoldSettings
from audit.capture.engines.written import Written
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError
from audit.methods.rollout import measured_residual
from audit.methods.value_aware import (
    alti_contributions,
    identity_where_empty,
    norm_contributions,
)

BLOCK_ENTRIES = 2**23
"""Entries (batch × query × key × dim) of the vectors of one block: 32 MB in float32."""


@dataclass
class LayerParts:
    """What is known of the layer that is running: its input, attention, and what its norms take and give."""

    hidden: Tensor
    call: AttentionCall | KernelCall | None = None
    added: Tensor | None = None
    summed: Tensor | None = None
    normed: Tensor | None = None
    second: Tensor | None = None
    written: Written | None = None

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> LayerParts:
        """Return the same with every tensor of the layer passed through `arrange`."""
        found = replace(self)
        for name in ("hidden", "added", "summed", "normed", "second"):
            part = getattr(self, name)
            setattr(found, name, None if part is None else arrange(part))
        return found

    def residual(self) -> Tensor:
        """Return the measured weight of the residual: (batch, query)."""
        if self.added is None:
            raise CaptureError("a layer ended without attention; use the method rollout")
        return measured_residual(self.hidden, self.added)


def blocks_of(made: Written) -> Iterator[slice]:
    """Yield blocks of queries whose vectors fit into memory."""
    batch, _, keys, width = made.heads.shape
    size, length = max(1, BLOCK_ENTRIES // (batch * keys * width)), made.own.shape[1]
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _values(call: AttentionCall | KernelCall, dtype: torch.dtype) -> Tensor:
    """Return the values, those of grouped heads repeated: (batch, head, key, dim)."""
    value: Tensor = call.value  # type: ignore[assignment]
    return value.to(dtype).repeat_interleave(heads_of(call) // value.shape[1], dim=1)


def heads_of(call: AttentionCall | KernelCall) -> int:
    """Return the number of heads that attend."""
    return (call.weights if isinstance(call, AttentionCall) else call.query).shape[1]


class LayerWatch:
    """Collects one layer's pieces and hands them to :meth:`take` when it ends; holds one layer at a time."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, Block], settings: FoldSettings, verify: bool
    ) -> None:
        self.modules, self.blocks = dict(model.named_modules()), blocks
        self.factors = {
            block.factor: model.get_parameter(block.factor) for block in blocks.values() if block.factor
        }
        self.settings, self.verify = settings, verify
        self.current: LayerParts | None = None

    def take(self, found: LayerParts, call: Any, block: Block) -> None:
        """Take a layer that has ended, with its call as it was noted."""
        raise NotImplementedError

    def note(self, call: AttentionCall | KernelCall) -> None:
        """Note the attention of the layer that is running."""
        if self.current is not None:
            self.current.call = call

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the layers while the model runs."""
        with ExitStack() as stack:
            for block in dict.fromkeys(self.blocks.values()):
                layer = self.modules[block.layer]
                stack.callback(
                    layer.register_forward_pre_hook(own_thread(self._begin), with_kwargs=True).remove
                )
                self._keep(stack, block.projection, "added", output=True)
                if block.scale is not None:
                    self._keep(stack, block.scale, "added", output=True)
                self._keep(stack, block.norm, "summed")
                self._keep(stack, block.norm, "normed", output=True)
                if block.second is not None:
                    self._keep(stack, block.second, "second")
                stack.callback(layer.register_forward_hook(own_thread(self._end)).remove)
            yield

    def _keep(self, stack: ExitStack, path: str, name: str, *, output: bool = False) -> None:
        def hook(_module: nn.Module, args: Any, kwargs: Any, given: Any) -> None:
            if self.current is not None:
                setattr(self.current, name, first_output(given) if output else first_input(args, kwargs))

        stack.callback(self.modules[path].register_forward_hook(own_thread(hook), with_kwargs=True).remove)

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = first_input(args, kwargs)
        self.current = None if hidden is None else LayerParts(hidden)

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        found, self.current = self.current, None
        if found is None or found.call is None or found.added is None:
            raise CaptureError("a layer ended without attention; use the method rollout")
        block = self.blocks[found.call.path]
        if block.factor is not None:
            found.added = found.added * self.factors[block.factor].detach()
        self.take(found, found.call, block)

    def split(self, found: LayerParts, call: AttentionCall, block: Block, valid: Tensor) -> Tensor:
        """Return one layer's contributions (batch, query, key), row-normalised; a row may have no mass.

        Parameters
        ----------
        found : LayerParts
            Of shape (batch, query, dim), in the order of the call.
        call : AttentionCall
        block : Block
        valid : bool Tensor (batch, query)
            Which queries are no pads. Where there are more keys, the queries are the last of them.
        """
        found.written = self.written(found, call, block)
        parts = [
            self.rows_split(found, replace(call, weights=call.weights[:, :, rows]), block, rows, valid)
            for rows in blocks_of(found.written)
        ]
        return torch.cat(parts, dim=1)

    def written(self, found: LayerParts, call: AttentionCall | KernelCall, block: Block) -> Written:
        """Return what is written of each position, up to the norm behind which vectors are measured.

        Raises
        ------
        CaptureError
            For a layer that a norm of another kind follows.
        """
        if call.value is None or found.summed is None or found.normed is None:
            raise CaptureError(f"attention layer {call.path}: a part of its block did not run")
        weight, _ = self._projected(block, heads_of(call))
        value = _values(call, weight.dtype)
        made = Written.of(value, weight, found.hidden.to(weight.dtype))
        if block.post:
            made = made.through(_layer_norm(self.modules[block.norm], call.path).weight)
        if self.settings.method == "globenc":
            if block.second is None:
                raise CaptureError(
                    f"attention layer {call.path}: no layer norm follows its feed-forward block, so globenc "
                    "would be norms; use the method norms"
                )
            made = made.through(_layer_norm(self.modules[block.second], call.path).weight)
        return made if self.settings.method == "alti" else made.short()

    def rows_split(
        self, found: LayerParts, call: AttentionCall, block: Block, rows: slice, valid: Tensor
    ) -> Tensor:
        """Return the contributions to a block of queries; `call` has the weights of these alone."""
        made, summed, normed = found.written, found.summed, found.normed
        if made is None or call.value is None or summed is None or normed is None:
            raise CaptureError(f"attention layer {call.path}: a part of its block did not run")
        weights = call.weights[..., : call.value.shape[2]].to(made.heads.dtype)
        if self.verify:
            self._check_rows(found, replace(call, weights=weights), block, rows, valid)
        vectors = made.vectors(weights, rows)
        if self.settings.method != "alti":
            return norm_contributions(vectors)
        if block.post:
            norm = _layer_norm(self.modules[block.norm], call.path)
            vectors = vectors / _deviation(norm, summed[:, rows])[..., None, None]
        output = normed if block.post else summed
        return alti_contributions(vectors, output[:, rows].to(vectors.dtype))

    def _check_rows(
        self, found: LayerParts, call: AttentionCall, block: Block, rows: slice, valid: Tensor
    ) -> None:
        """Check that attention, residual and bias add up to what the norm takes, and give what it gives."""
        weight, constant = self._projected(block, heads_of(call))
        attended = call.weights @ _values(call, weight.dtype)
        total = torch.einsum("bhqd,hdm->bqm", attended, weight) + constant
        total = total + found.hidden[:, rows].to(weight.dtype)
        _check_sum(call, total, found.summed[:, rows], valid[:, rows])  # type: ignore[index]
        if block.post:
            norm = _layer_norm(self.modules[block.norm], call.path)
            scaled = (total - total.mean(-1, keepdim=True)) / _deviation(norm, total)[..., None]
            again = norm.weight * scaled if norm.bias is None else norm.weight * scaled + norm.bias
            _check_sum(call, again, found.normed[:, rows], valid[:, rows])  # type: ignore[index]

    def _projected(self, block: Block, heads: int) -> tuple[Tensor, Tensor]:
        """Return the output projection by heads and its bias, with the learned factor that follows it."""
        projection = self.modules[block.projection]
        weight = projection_weight(projection, heads)
        bias = getattr(projection, "bias", None)
        constant = torch.zeros_like(weight[0, 0]) if bias is None else bias.detach().to(weight.dtype)
        if block.scale is not None:
            factor = self.modules[block.scale].lambda1
        elif block.factor is not None:
            factor = self.factors[block.factor]
        else:
            return weight, constant
        factor = factor.detach().to(weight.dtype)
        return weight * factor, constant * factor


class _Watch(LayerWatch):
    """Folds each layer of one stack when it ends."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block], fold: BatchFold, verify: bool) -> None:
        super().__init__(model, blocks, fold.settings, verify)
        self.fold = fold

    def receive(self, call: AttentionCall) -> None:
        check_rows(call, self.fold.valid)
        if self.verify:
            check_values(call, self.fold.valid)
        self.note(call)

    def take(self, found: LayerParts, call: AttentionCall, block: Block) -> None:
        """Fold the layer by its contributions, or by its attention with the measured residual."""
        fold = self.fold
        found = found.arranged(lambda part: part.reshape(found.hidden.shape))
        if fold.settings.residual == MEASURED:
            fold.fold(call.weights, sink=call.sink, residual=found.residual())
            return
        fold.note_causal(call.weights)
        matrix, empty = identity_where_empty(self.split(found, call, block, fold.valid))
        fold.empty_rows += empty
        eye = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        fold.push(torch.where(fold.valid[:, :, None], matrix, eye))


def _layer_norm(module: nn.Module, path: str) -> nn.LayerNorm:
    if not isinstance(module, nn.LayerNorm):
        raise CaptureError(
            f"attention layer {path} is followed by {type(module).__name__}, expected a LayerNorm, which "
            "alone can be split; use rollout with residual = 'measured'"
        )
    return module


def _deviation(norm: nn.LayerNorm, summed: Tensor) -> Tensor:
    work = summed.to(torch.promote_types(summed.dtype, torch.float32))
    return (work.var(dim=-1, unbiased=False) + norm.eps).sqrt()


def _check_sum(call: AttentionCall, total: Tensor, output: Tensor, valid: Tensor) -> None:
    """Check that the parts add up to what the model computed."""
    whole = output.to(total.dtype)
    error = ((total - whole).abs() * valid[..., None]).amax()
    scale = whole.abs().amax().clamp_min(1e-6)
    if not error <= VALUE_TOLERANCE[output.dtype] * 10 * scale:
        raise CaptureError(
            f"attention layer {call.path}: what its positions add differs from the layer's own output by "
            f"{float(error / scale):.3g}; this kind of layer is not supported, use the method rollout"
        )


def contribution_batch(
    model: nn.Module,
    plan: CapturePlan,
    blocks: Mapping[str, Block],
    tensors: Mapping[str, Tensor],
    fold: BatchFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
) -> Any:
    """Run one batch and fold what each position adds, layer by layer.

    Parameters
    ----------
    model, plan, tensors
    blocks : mapping of attention path to Block
        From :func:`audit.capture.engines.blocks.find_blocks`.
    fold : BatchFold
        Filled with the rollout of the batch: of the contributions of ``norms``, ``globenc`` or
        ``alti``, or of attention with the measured residual.
    verify : bool
        Also compare the sum of the parts with every layer's own output.
    keep_logits : bool

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
    """
    core = core_model(model)
    watch = _Watch(core, blocks, fold, verify)
    expected = None if plan.narrowed else expected_calls(core)
    with exclusive(model, plan.configs), watch.hooks(), watched(plan, watch.receive, expected):
        return run_model(model, tensors, attentions=plan.has_hooks, keep_logits=keep_logits)
