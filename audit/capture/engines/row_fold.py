r"""Maps of long inputs without a query × key matrix: the rows that a run stores, and no others.

Derivation. A run stores the output row of each cumulative R_l = Ã_l ⋯ Ã_1. Row vectors are carried from
the last layer down (:mod:`audit.capture.engines.row_backward`), and the row of R_l starts its way at layer
l: going down, layer l adds one row to those that are on their way, and all of them take each lower layer's
step at once,

.. math:: r_m \leftarrow (1-\rho_l)\, r_m \bar A_l + \rho_l\, r_m \qquad (m \ge l).

With L layers that is at most L rows; a block of queries is fused and pruned once for all of them. Some more
rows, evenly spread over the positions, go all the way and tell how alike the rows of R have become. Memory
is that of the queries and keys of all layers and of one block of queries: linear in n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import require_close
from audit.capture.attention.interface import KernelCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.scratch import Scratch
from audit.capture.engines.fold import BatchFold, generalized_divergence
from audit.capture.engines.query_blocks import block_weights, laid_out, may_empty, query_blocks
from audit.capture.engines.region_forward import sees_no_future
from audit.capture.engines.row_backward import kernel_calls, step_down, widened
from audit.capture.engines.settings import MEASURED, ROLLOUT, FoldSettings

LEAST_POSITIONS = 256
"""From this length on, rows cost less than the n × n map."""
COLLAPSE_ROWS = 32
"""Rows, evenly spread over the positions, from which the depth collapse of a long map is taken."""


def rows_suffice(settings: FoldSettings, plan: CapturePlan, positions: int) -> bool:
    """Return whether maps of this length are had from rows: rollout of long inputs, without loss.

    Rows that pruning leaves empty are counted in every layer, those below `start_layer` included, through
    which no row is carried here.
    """
    constant = settings.method == ROLLOUT and settings.residual != MEASURED
    return positions >= LEAST_POSITIONS and constant and countable(settings) and not plan.has_hooks


def countable(settings: FoldSettings) -> bool:
    """Return whether rows pass all layers in which rows may be left empty."""
    return settings.start_layer == 0 or not may_empty(settings)


class RowFold(BatchFold):
    """The rows that a run stores of one batch, from the calls of all of its layers.

    Parameters
    ----------
    settings, read, valid : see :class:`audit.capture.engines.fold.BatchFold`
    scratch : Scratch, optional
        Whose memory is used; the next batch may have it again.
    """

    def __init__(
        self, settings: FoldSettings, read: Tensor, valid: Tensor, scratch: Scratch | None = None
    ) -> None:
        super().__init__(settings, read, valid)
        self.scratch = scratch or Scratch()

    def carry(self, calls: list[KernelCall]) -> None:
        """Take the calls of all layers, the first layer first, and leave the list empty.

        Raises
        ------
        CaptureError
            When a row's weights do not sum to 1.
        """
        start = self.read.to(torch.promote_types(calls[0].query.dtype, torch.float32))[:, None]
        rows, below = self._spread().to(start), min(self.settings.start_layer, len(calls))
        for layer in range(len(calls) - 1, below - 1, -1):
            call = calls.pop()
            self.causal &= sees_no_future(call)
            rows = torch.cat([rows, widened(start, rows)], dim=1)
            rows = self.step(call, rows, layer)
        calls.clear()
        self.sink = rows.shape[2] > start.shape[2]
        self._ends = rows[:, :COLLAPSE_ROWS]
        self.rows = [widened(start, rows)[:, 0]] * below + [*rows[:, COLLAPSE_ROWS:].unbind(dim=1)][::-1]

    def step(self, call: KernelCall, rows: Tensor, layer: int) -> Tensor:
        """Return r·Ã_l for each row r: (batch, row, key)."""
        return step_down(
            call,
            rows,
            self.valid,
            self.settings,
            layer,
            empty_rows=self.empty_rows,
            scratch=self.scratch,
        )

    def _spread(self) -> Tensor:
        """Return rows of the identity, evenly spread over each probe's valid positions."""
        count = self.valid.sum(dim=1)
        order = self.valid.int().argsort(dim=1, descending=True, stable=True)
        steps = torch.linspace(0, 1, COLLAPSE_ROWS, dtype=torch.float64, device=count.device)
        at = order.gather(1, (steps * (count[:, None] - 1)).round().long())
        return torch.nn.functional.one_hot(at, self.valid.shape[1])

    def depth_collapse(self) -> Tensor:
        """Return how different the rows of R still are, in bits, from evenly spread rows: (batch,)."""
        rows = self._ends.to(torch.float64)
        weight = torch.full(rows.shape[:2], 1 / COLLAPSE_ROWS, dtype=torch.float64, device=rows.device)
        return generalized_divergence(rows, weight)


def row_fold_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    fold: RowFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
) -> Any:
    """Run one batch and carry its rows; see :func:`audit.capture.attention.passes.fold_batch`.

    Returns
    -------
    The model's outputs, the same to the last bit as without capture
    """

    def check(call: KernelCall, output: Tensor) -> None:
        check_blocks(call, output, fold.valid)

    calls, outputs = kernel_calls(
        model,
        plan,
        tensors,
        keep_logits=keep_logits,
        check=check if verify else None,
        scratch=fold.scratch,
    )
    fold.carry(calls)
    return outputs


def check_blocks(call: KernelCall, output: Tensor, valid: Tensor) -> None:
    """Check, a block of queries at a time, that weights × values is what the layer's kernel returned."""
    call = laid_out(call)
    keys = call.value.shape[2]
    dtype = torch.promote_types(call.value.dtype, torch.float32)
    value = call.value.to(dtype).repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
    given = output.to(dtype).reshape(len(output), -1, call.query.shape[1], value.shape[-1])
    error = scale = given.new_zeros(())
    scratch = Scratch()
    for block in query_blocks(call):
        again = (block_weights(call, block, scratch)[..., :keys].to(dtype) @ value).transpose(1, 2)
        rows, part = valid[:, block, None, None], given[:, block]
        zero = torch.zeros_like(part)
        error = torch.maximum(error, torch.where(rows, (again - part).abs(), zero).amax())
        scale = torch.maximum(scale, torch.where(rows, part.abs(), zero).amax())
    require_close(call.path, error, scale, output.dtype)
