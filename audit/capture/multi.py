"""Rollout of models with two stacks: an encoder that a decoder attends to, or two separate towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.check import check_rows, check_values
from audit.capture.engine import BatchFold
from audit.capture.interface import AttentionCall
from audit.capture.layers import CapturePlan
from audit.capture.passes import exclusive, run_model, watched
from audit.capture.settings import ROLLOUT, FoldSettings
from audit.errors import CaptureError, ConfigError
from audit.methods.encoder_decoder import cross_rollout_step
from audit.methods.fusion import fuse_heads
from audit.methods.rollout import add_residual


@dataclass
class StreamRows:
    """What the output row of one batch draws on in one stream.

    Attributes
    ----------
    final : Tensor (batch, position)
        With the mass that falls on this stream; see `share`.
    layers : list of Tensor (batch, position)
        The same after each layer of the stack that is read.
    causal : bool Tensor (batch,)
    """

    final: Tensor
    layers: list[Tensor]
    causal: Tensor

    @property
    def share(self) -> Tensor:
        """Return the row's mass on this stream: (batch,)."""
        return self.final.sum(dim=1)


@dataclass
class PairFold:
    """The rollout of both stacks of one batch, filled while their layers run.

    Parameters
    ----------
    plan : CapturePlan
        Its first stack is the encoder, or the first tower.
    settings : FoldSettings
    valid : two bool Tensors (batch, position)
        False at pads, for each stack.
    read : two float Tensors (batch, position)
        The output row of each stack as weights over its rows; an encoder's is not read.
    """

    plan: CapturePlan
    settings: FoldSettings
    valid: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]
    verify: bool = False
    folds: tuple[BatchFold, BatchFold] = field(init=False)
    source: Tensor | None = None
    prefix: Tensor | None = None
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        first, second = (
            BatchFold(self.settings, read, valid) for read, valid in zip(self.read, self.valid, strict=True)
        )
        self.folds = (first, second)
        self._layers = {layer.path: layer for layer in self.plan.layers}
        self._decoder_layer = 0
        self._open = False

    def receive(self, call: AttentionCall) -> None:
        """Take the attention of one layer of either stack."""
        layer = self._layers[call.path]
        index = self._stacks.index(layer.stack)
        queries = self.valid[index]
        check_rows(call, queries, self.valid[0] if layer.kind == "cross" else None)
        if self.verify:
            check_values(call, queries)
        if call.sink:
            raise CaptureError(
                f"attention layer {call.path} has a learned sink, which is not supported in a model with "
                "two stacks"
            )
        if index == 0 or self.plan.wiring == "towers":
            self.folds[index].fold(call.weights)
        elif layer.kind == "cross":
            self._cross(call.weights)
        else:
            self._self(call.weights)

    @property
    def _stacks(self) -> tuple[str, ...]:
        return self.plan.stacks

    def _fused(self, weights: Tensor, *, cross: bool = False) -> Tensor:
        valid = self.valid[1]
        if not bool(valid.all()):
            weights = torch.where(valid[:, None, :, None], weights, torch.zeros_like(weights))
        return fuse_heads(weights.detach(), query_offset=None if cross else 0, **self.settings.fusion)

    def _state(self) -> tuple[Tensor, Tensor]:
        if self.source is None or self.prefix is None:
            batch, steps = self.valid[1].shape
            top = self._top()
            self.source = top.new_zeros(batch, steps, top.shape[-1])
            self.prefix = torch.eye(steps, dtype=top.dtype, device=top.device).repeat(batch, 1, 1)
        return self.source, self.prefix

    def _top(self) -> Tensor:
        """Return the rollout of the encoder."""
        top = self.folds[0].matrix
        if top is None:
            raise CaptureError("the decoder ran before the encoder; this architecture is not supported")
        return top

    def _self(self, weights: Tensor) -> None:
        source, prefix = self._state()
        fused = self._fused(weights)
        fold = self.folds[1]
        fold.causal &= (fused.triu(1) == 0).flatten(1).all(dim=1)
        step = add_residual(fused, self.settings.residual_of(self._decoder_layer))
        self.source, self.prefix = step.to(source.dtype) @ source, step.to(prefix.dtype) @ prefix
        self._decoder_layer += 1
        self._note()
        self._open = True

    def _cross(self, weights: Tensor) -> None:
        source, prefix = self._state()
        reached = self._fused(weights, cross=True).to(source.dtype) @ self._top()
        beta = self.settings.residual_of(max(self._decoder_layer - 1, 0))
        self.source, self.prefix = cross_rollout_step(source, prefix, reached, beta)
        if self._open:  # one row for each block: after its cross-attention
            self.rows.pop()
        self._note()
        self._open = False

    def _note(self) -> None:
        source, prefix = self._state()
        read = self.read[1].to(source.dtype)
        self.rows.append((torch.einsum("bq,bqk->bk", read, source), torch.einsum("bq,bqk->bk", read, prefix)))

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return what the output rows draw on, in the order of the stacks (source before prefix)."""
        first, second = self.folds
        if self.plan.wiring == "towers":
            return (
                StreamRows(first.final_row(), first.rows, first.causal),
                StreamRows(second.final_row(), second.rows, second.causal),
            )
        if not self.rows:
            raise CaptureError("the decoder gave no attention; this architecture is not supported")
        final = self.rows[-1]
        return (
            StreamRows(final[0], [row for row, _ in self.rows], first.causal),
            StreamRows(final[1], [row for _, row in self.rows], second.causal),
        )


def fold_pair(model: nn.Module, tensors: Mapping[str, Tensor], fold: PairFold) -> Any:
    """Run one batch through a model with two stacks and fold both.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed or its weights are not what it used.
    """
    with exclusive(model, fold.plan.configs), watched(fold.plan, fold.receive, None):
        return run_model(model, tensors, attentions=fold.plan.has_hooks, keep_logits=True)


def check_pair_settings(settings: FoldSettings) -> None:
    """Raise ConfigError for methods and parameters that have no meaning for two stacks yet."""
    plain = settings.start_layer == 0 and settings.head_weights is None
    if settings.method != ROLLOUT or not plain or not isinstance(settings.residual, float):
        raise ConfigError(
            f"[method] name = {settings.method!r} with these parameters is not available for an "
            "encoder-decoder or two towers; use rollout with one residual, no start_layer and no head_weights"
        )
