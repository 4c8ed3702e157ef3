"""Value-aware methods on encoder-decoders: what each position of source and prefix adds, block by block.

A decoder block has two sums, x + self-attention and x + cross-attention. Each is split as in one stack;
the second into the vectors of the encoder's positions and the residual, which carries everything from
below. Their row-normalised sizes are the matrices of :func:`audit.methods.encoder_decoder_rollout`, with
the residual's share in the place of a chosen weight (the decomposition of ALTI+: Ferrando et al., EMNLP
2022, arXiv 2205.11631; of norms by the same rule). A gate scales what attention adds, and so its vectors.
GlobEnc sends the sum that the feed-forward block takes through the norm behind that block as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.attention.threads import own_thread
from audit.capture.engines.blocks import _Trace, first_input, first_output, projection_weight
from audit.capture.engines.contributions import BLOCK_ENTRIES, _check_sum, _deviation, _layer_norm
from audit.capture.engines.settings import MEASURED, FoldSettings
from audit.capture.inputs.encoded import core_model
from audit.capture.pairs.encoder_decoder import CrossFold
from audit.capture.pairs.multi import check_call
from audit.capture.pairs.parts import Part
from audit.errors import CaptureError
from audit.methods.rollout import measured_residual
from audit.methods.value_aware import (
    alti_contributions,
    identity_where_empty,
    linearized_layer_norm,
    norm_contributions,
    transformed_vectors,
)


class PartWatch:
    """Collects the pieces of one block and hands its parts on when it ends; holds one block at a time.

    Parameters
    ----------
    model : the model that `parts` were found in
    parts : mapping of attention path to Part
    settings : FoldSettings
        Name ``norms``, ``globenc`` or ``alti``, or have a measured residual.
    verify : bool
        Compare attention × values, and the sum of all parts, with what the model computes.
    """

    def __init__(
        self, model: nn.Module, parts: Mapping[str, Part], settings: FoldSettings, *, verify: bool
    ) -> None:
        self.modules, self.parts = dict(model.named_modules()), parts
        self.settings, self.verify = settings, verify
        self.calls: dict[str, AttentionCall] = {}
        self.pieces: dict[str, _Trace] = {}

    def valid(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """Return a layer's valid queries, and its valid keys where they are others."""
        raise NotImplementedError

    def push(self, call: AttentionCall, layer: AttentionLayer, matrix: Tensor) -> None:
        """Take contributions (batch, query, key); cross-attention has one more key: the residual."""
        raise NotImplementedError

    def push_measured(self, call: AttentionCall, layer: AttentionLayer, residual: Tensor) -> None:
        """Take attention with its measured residual (batch, query)."""
        raise NotImplementedError

    def receive(self, call: AttentionCall) -> None:
        """Keep one call of one layer, checked."""
        check_call(call, *self.valid(self.parts[call.path].layer), verify=self.verify)
        self.calls[call.path] = call

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the modules of all parts."""
        each = [(p.projection, p.residual[0], p.norm, p.second) for p in self.parts.values()]
        wanted = {path for paths in each for path in paths if path is not None}
        blocks = dict.fromkeys(part.block for part in self.parts.values())
        with ExitStack() as stack:
            for path in wanted - set(blocks):
                keep = own_thread(self._keeping(path))
                stack.callback(self.modules[path].register_forward_hook(keep, with_kwargs=True).remove)
            for path in blocks:
                end = own_thread(self._ending(path))
                stack.callback(self.modules[path].register_forward_hook(end, with_kwargs=True).remove)
            yield

    def _keeping(self, path: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            taken, given = first_input(args, kwargs), first_output(output)
            if taken is not None and given is not None:
                self.pieces[path] = _Trace(taken, given)

        return hook

    def _ending(self, path: str) -> Any:
        keep = self._keeping(path)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            keep(module, args, kwargs, output)
            for call in self.calls.values():
                self._fold(self.parts[call.path], call)
            self.calls, self.pieces = {}, {}

        return hook

    def _fold(self, part: Part, call: AttentionCall) -> None:
        hidden: Tensor = getattr(self.pieces[part.residual[0]], part.residual[1])
        if self.settings.residual == MEASURED:
            added = part.scale * self.pieces[part.projection].given.reshape(hidden.shape)
            self.push_measured(call, part.layer, measured_residual(hidden, added))
            return
        self.push(call, part.layer, self._contributions(part, call, hidden))

    def _contributions(self, part: Part, call: AttentionCall, hidden: Tensor) -> Tensor:
        """Return one attention's contributions (batch, query, key), row-normalised.

        Cross-attention has one more key: the residual.
        """
        if call.value is None:
            raise CaptureError(f"attention layer {call.path}: its values cannot be found")
        batch, length, dim = hidden.shape
        keys = call.value.shape[2] + (part.layer.kind == "cross")
        size = max(1, min(length, BLOCK_ENTRIES // (batch * keys * dim)))
        rows = [slice(start, min(start + size, length)) for start in range(0, length, size)]
        matrix = torch.cat([self._rows(part, call, hidden, block) for block in rows], dim=1)
        alone = torch.zeros_like(matrix)
        if part.layer.kind == "cross":
            alone[..., -1] = 1
            matrix = torch.where(matrix.sum(-1, keepdim=True) > 0, matrix, alone)
        else:
            alone.diagonal(dim1=-2, dim2=-1).fill_(1)
            matrix = identity_where_empty(matrix)[0]
        return torch.where(self.valid(part.layer)[0][:, :, None], matrix, alone)

    def _rows(self, part: Part, call: AttentionCall, hidden: Tensor, rows: slice) -> Tensor:
        vectors, constant = self._vectors(part, call, hidden, rows)
        norm = self.pieces[part.norm]
        output = norm.taken
        if part.post:
            module = _layer_norm(self.modules[part.norm], call.path)
            deviation = _deviation(module, norm.taken.reshape(hidden.shape)[:, rows])
            free = constant.expand(vectors.shape[0], vectors.shape[1], 1, -1)
            constant = linearized_layer_norm(free, module.weight, deviation)[:, :, 0]
            constant = constant if module.bias is None else constant + module.bias
            vectors, output = linearized_layer_norm(vectors, module.weight, deviation), norm.given
        output = output.reshape(hidden.shape)[:, rows]
        if self.verify:
            _check_sum(call, vectors.sum(2) + constant, output, self.valid(part.layer)[0][:, rows])
        if self.settings.method == "alti":
            return alti_contributions(vectors, output.to(vectors.dtype))
        if self.settings.method == "globenc" and not part.followed:
            vectors = self._behind_feed_forward(part, vectors, rows)
        return norm_contributions(vectors)

    def _behind_feed_forward(self, part: Part, vectors: Tensor, rows: slice) -> Tensor:
        """Return the vectors through the norm behind the feed-forward block, which is left out."""
        if part.second is None:
            raise CaptureError(
                f"attention layer {part.layer.path}: no layer norm follows its feed-forward block, so "
                "globenc would be norms; use the method norms"
            )
        norm = _layer_norm(self.modules[part.second], part.layer.path)
        taken = self.pieces[part.second].taken
        taken = taken.reshape(vectors.shape[0], -1, vectors.shape[-1])[:, rows]
        return linearized_layer_norm(vectors, norm.weight, _deviation(norm, taken))

    def _vectors(self, part: Part, call: AttentionCall, hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the vectors of a block of queries, and what no key adds."""
        if call.value is None:
            raise CaptureError(f"attention layer {call.path}: its values cannot be found")
        projection, heads = self.modules[part.projection], call.weights.shape[1]
        weight = part.scale * projection_weight(projection, heads)
        bias = getattr(projection, "bias", None)
        constant = torch.zeros_like(weight[0, 0]) if bias is None else bias.detach().to(weight.dtype)
        constant = part.scale * constant
        value = call.value.to(weight.dtype).repeat_interleave(heads // call.value.shape[1], dim=1)
        attention, own = call.weights[:, :, rows].to(weight.dtype), hidden[:, rows].to(weight.dtype)
        if part.layer.kind == "cross":
            vectors = transformed_vectors(attention, value, weight)
            return torch.cat([vectors, own[:, :, None]], dim=2), constant
        return transformed_vectors(attention, value, weight, own, query_offset=rows.start), constant


class _PairWatch(PartWatch):
    """Folds the parts of both stacks of an encoder-decoder."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Part], fold: CrossFold) -> None:
        super().__init__(model, parts, fold.settings, verify=fold.verify)
        self.fold, self.encoder = fold, next(iter(parts.values())).layer.stack

    def valid(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """Return which positions of source or prefix are no pads."""
        source, prefix = self.fold.valid
        inside = layer.stack == self.encoder
        return source if inside else prefix, source if layer.kind == "cross" else None

    def push(self, call: AttentionCall, layer: AttentionLayer, matrix: Tensor) -> None:
        """Take contributions; see :class:`PartWatch`."""
        if layer.stack == self.encoder:
            self.fold.encoder.note_causal(call.weights)
            self.fold.encoder.push(matrix)
        elif layer.kind == "cross":
            self.fold.push_cross(matrix[..., :-1], matrix[..., -1])
        else:
            self.fold.push_self(matrix)

    def push_measured(self, call: AttentionCall, layer: AttentionLayer, residual: Tensor) -> None:
        """Take attention with its measured residual."""
        fold, cross = self.fold, layer.kind == "cross"
        inside = layer.stack == self.encoder
        take = fold.take_encoder if inside else fold.take_cross if cross else fold.take_self
        take(call.weights.detach(), residual)


def pair_contribution_batch(
    model: nn.Module,
    plan: CapturePlan,
    parts: Mapping[str, Part],
    tensors: Mapping[str, Tensor],
    fold: CrossFold,
) -> Any:
    """Run one batch and fold what each position adds, or attention with the measured residual.

    Parameters
    ----------
    model, plan, tensors
    parts : mapping of attention path to Part
        From :func:`audit.capture.pairs.parts.find_parts`.
    fold : CrossFold
        Its settings name ``norms``, ``globenc`` or ``alti``, or have a measured residual.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
    """
    return run_parts(model, plan, tensors, _PairWatch(core_model(model), parts, fold))


def run_parts(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], watch: PartWatch) -> Any:
    """Run one batch while `watch` takes its blocks apart, and return the model's outputs.

    Raises
    ------
    CaptureError
    """
    with exclusive(model, plan.configs), watch.hooks(), watched(plan, watch.receive, None):
        return run_model(model, tensors, attentions=plan.has_hooks, keep_logits=True)
