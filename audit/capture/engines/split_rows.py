r"""Value-aware maps of long inputs without a query × key matrix: the rows that a run stores, and no others.

Derivation. A layer's matrix C of contributions has a row for each query, made of that query's own vectors
T_i(x_j) (:mod:`audit.methods.value_aware`), so that rows are carried as by
:mod:`audit.capture.engines.query_blocks`,

.. math:: (rC)_j = \sum_{\text{blocks } B}\; \sum_{q\in B} r_q C_{qj},

a block of queries at a time: softmax of the block, its vectors, their sizes, each row divided by its sum. A
measured residual ρ_q belongs to its query as well: r ← (r ⊙ (1-ρ))·A + r ⊙ ρ. What is kept of a layer is
what its blocks are made of (queries, keys, values, its input, what its norms took), all of them linear in n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall, KernelCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import attend_batch
from audit.capture.engines.blocks import Block
from audit.capture.engines.contributions import LayerParts, LayerWatch, blocks_of
from audit.capture.engines.query_blocks import block_weights, kept_call, laid_out, rows_by_blocks
from audit.capture.engines.row_backward import widened
from audit.capture.engines.row_fold import LEAST_POSITIONS, RowFold, check_blocks, countable
from audit.capture.engines.settings import MEASURED, ROLLOUT, FoldSettings
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError
from audit.methods.value_aware import identity_where_empty

LEAST_SPLIT = 4096
"""From this length on, what is kept of all layers is less than one layer's weights of all heads."""
SPLIT = frozenset({"norms", "globenc", "alti"})


def split_rows_suffice(settings: FoldSettings, plan: CapturePlan, positions: int) -> bool:
    """Return whether value-aware maps of this length are had from rows."""
    if plan.has_hooks or not countable(settings):
        return False
    if settings.residual == MEASURED:
        return settings.method == ROLLOUT and positions >= LEAST_POSITIONS
    return settings.method in SPLIT and positions >= LEAST_SPLIT


@dataclass
class _Layer:
    """What is kept of one layer: with measured residuals those alone."""

    path: str
    block: Block
    parts: LayerParts | None = None
    residual: Tensor | None = None


class SplitRowFold(RowFold):
    """The rows that a run stores of one batch, by contributions or by attention with measured residuals."""

    watch: _Keeping

    @torch.no_grad()
    def step(self, call: KernelCall, rows: Tensor, layer: int) -> Tensor:
        """Return r·C_l for each row r; see :meth:`RowFold.step`."""
        kept = self.watch.kept.pop()
        if kept.path != call.path:
            raise CaptureError(f"attention layer {call.path} ended after {kept.path}; use the method rollout")
        if kept.residual is not None:
            own = torch.nn.functional.pad(kept.residual, (0, rows.shape[2] - kept.residual.shape[1]))
            own = own[:, None].to(rows.dtype)
            attended = rows_by_blocks(
                call,
                rows * (1 - own),
                self.valid,
                self.settings,
                layer,
                empty_rows=self.empty_rows,
                scratch=self.scratch,
            )
            return attended + widened(rows * own, attended)
        return self._split(laid_out(call), rows, kept)

    def _split(self, call: KernelCall, rows: Tensor, kept: _Layer) -> Tensor:
        found, parts = torch.zeros_like(rows), kept.parts
        if parts is None:
            raise CaptureError(f"attention layer {call.path}: nothing was kept of it")
        parts.written = self.watch.written(parts, call, kept.block)
        for one in blocks_of(parts.written):
            given = AttentionCall(call.path, block_weights(call, one, self.scratch), call.value, call.value)
            matrix = self.watch.rows_split(parts, given, kept.block, one, self.valid)
            matrix, empty = identity_where_empty(matrix * self.valid[:, one, None], query_offset=one.start)
            self.empty_rows += empty - (~self.valid[:, one]).sum(dim=1)
            found += rows[:, :, one] @ matrix.to(rows.dtype)
        return found


class _Keeping(LayerWatch):
    """Keeps what each layer's rows are made of, the first layer first."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, Block], settings: FoldSettings, verify: bool
    ) -> None:
        super().__init__(model, blocks, settings, verify)
        self.kept: list[_Layer] = []

    def take(self, found: LayerParts, call: KernelCall, block: Block) -> None:
        """Keep a layer that has ended."""
        found = found.arranged(lambda part: part.reshape(found.hidden.shape))
        if self.settings.residual == MEASURED:
            self.kept.append(_Layer(call.path, block, residual=found.residual()))
        else:
            self.kept.append(_Layer(call.path, block, replace(found, call=None, added=None)))


def split_row_batch(
    model: nn.Module,
    plan: CapturePlan,
    blocks: Mapping[str, Block],
    tensors: Mapping[str, Tensor],
    fold: SplitRowFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
) -> Any:
    """Run one batch and carry its rows; see :func:`audit.capture.engines.contributions.contribution_batch`.

    Returns
    -------
    The model's outputs, the same to the last bit as without capture
    """
    watch = fold.watch = _Keeping(core_model(model), blocks, fold.settings, verify)
    measured = fold.settings.residual == MEASURED
    calls: list[KernelCall] = []

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        if verify:
            check_blocks(call, output, fold.valid)
        calls.append(kept_call(call, fold.scratch, len(calls)) if measured else call)
        watch.note(call)
        return output, weights

    with watch.hooks():
        outputs = attend_batch(model, plan, tensors, attend, keep_logits=keep_logits)
    fold.carry(calls)
    return outputs
