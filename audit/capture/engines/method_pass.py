"""Run one batch by the method that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, fold_batch
from audit.capture.attention.scratch import Scratch
from audit.capture.attributions.attribution import AttributionFold, Question, attribute
from audit.capture.engines.blocks import Block, find_blocks
from audit.capture.engines.contributions import contribution_batch
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.folds import FlowFold, PerHeadFold
from audit.capture.engines.gradient import GradientFold, gradient_batch
from audit.capture.engines.row_fold import RowFold, row_fold_batch, rows_suffice
from audit.capture.engines.settings import (
    ATTRIBUTION,
    FLOW,
    MEASURED,
    PER_HEAD,
    RAW,
    ROLLOUT,
    VALUE_AWARE,
    FoldSettings,
)
from audit.capture.engines.split_rows import SplitRowFold, split_row_batch, split_rows_suffice
from audit.capture.engines.zeroing import zeroing_batch
from audit.capture.inputs.batches import beginning
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.targets import resolve_targets
from audit.records import Checkpoint

Fold = BatchFold | GradientFold | AttributionFold


def weight_fold(settings: FoldSettings) -> type[BatchFold] | None:
    """Return the fold of a method that reads nothing but attention weights, None for other methods."""
    if settings.residual == MEASURED:
        return None
    folds = {ROLLOUT: BatchFold, RAW: BatchFold, PER_HEAD: PerHeadFold, FLOW: FlowFold}
    return folds.get(settings.method)


@dataclass(frozen=True)
class Engine:
    """A method on a checkpoint: everything that its batches share.

    `alone` says that the model takes one sequence at a time.
    """

    checkpoint: Checkpoint
    plan: CapturePlan
    settings: FoldSettings
    wanted: Mapping[str, Any]
    batch_tokens: int
    keep_logits: bool = False
    alone: bool = False
    _blocks: dict[str, Block] = field(default_factory=dict)
    _scratch: Scratch = field(default_factory=Scratch)

    def by_rows(self, positions: int) -> bool:
        """Return whether maps of this length are had from rows, without a query × key matrix."""
        return any(
            suffice(self.settings, self.plan, positions) for suffice in (rows_suffice, split_rows_suffice)
        )

    def run(
        self,
        batch: Sequence[Encoded],
        tensors: Mapping[str, Tensor],
        read: Tensor,
        valid: Tensor,
        *,
        verify: bool = False,
    ) -> tuple[Fold, Any]:
        """Return the maps of one batch and the model's outputs.

        Parameters
        ----------
        batch : sequence of Encoded
        tensors : their tensors, stacked
        read : float Tensor (batch, position)
            The output row, as weights over the rows.
        valid : bool Tensor (batch, position)
        verify : bool
            Also compare what is captured with what every layer computes.

        Returns
        -------
        fold, outputs
        """
        model, method = self.checkpoint.model, self.settings.method
        options: dict[str, Any] = {"keep_logits": self.keep_logits}
        if method == "gradient_rollout":
            gradient = GradientFold(self.settings, read, valid)
            outputs = gradient_batch(
                self.checkpoint,
                self.plan,
                batch,
                tensors,
                gradient,
                wanted=self.wanted,
                verify=verify,
                **options,
            )
            return gradient, outputs
        if method in ATTRIBUTION:
            return self._attribution(batch, tensors, BatchFold(FoldSettings(), read, valid), verify)
        if rows_suffice(self.settings, self.plan, read.shape[1]):
            by_rows = RowFold(self.settings, read, valid, self._scratch)
            return by_rows, row_fold_batch(model, self.plan, tensors, by_rows, verify=verify, **options)
        fold = (weight_fold(self.settings) or BatchFold)(self.settings, read, valid)
        if split_rows_suffice(self.settings, self.plan, read.shape[1]):
            split = SplitRowFold(self.settings, read, valid, self._scratch)
            blocks = self._find_blocks(batch[0])
            return split, split_row_batch(model, self.plan, blocks, tensors, split, verify=verify, **options)
        if method == "value_zeroing":
            blocks = self._find_blocks(batch[0])
            return fold, zeroing_batch(model, self.plan, blocks, tensors, fold, verify=verify, **options)
        if method in VALUE_AWARE or self.settings.residual == MEASURED:
            blocks = self._find_blocks(batch[0])
            outputs = contribution_batch(model, self.plan, blocks, tensors, fold, verify=verify, **options)
            return fold, outputs
        outputs = fold_batch(model, self.plan, tensors, fold, verify=verify, scratch=self._scratch, **options)
        return fold, outputs

    def _find_blocks(self, item: Encoded) -> dict[str, Block]:
        """Return the block of each layer, found on the beginning of the first probe."""
        if not self._blocks:
            core, (tensors, _) = core_model(self.checkpoint.model), beginning(item)
            with exclusive(self.checkpoint.model, self.plan.configs):
                self._blocks.update(find_blocks(core, self.plan, tensors, keep_logits=self.keep_logits))
        return self._blocks

    def _attribution(
        self, batch: Sequence[Encoded], tensors: Mapping[str, Tensor], inner: BatchFold, verify: bool
    ) -> tuple[AttributionFold, Any]:
        outputs = fold_batch(
            self.checkpoint.model, self.plan, tensors, inner, verify=verify, keep_logits=self.keep_logits
        )
        fold = AttributionFold(self.settings, inner)
        with torch.no_grad():
            fold.targets = resolve_targets(self.checkpoint, batch, outputs, self.wanted, inner.read)
        question = Question(
            self.checkpoint,
            batch,
            fold.targets,
            inner.read,
            self.batch_tokens,
            self.keep_logits,
            self.alone,
        )
        attribute(question, fold)
        return fold, outputs
