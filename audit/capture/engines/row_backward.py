r"""Rows, backward: a few rows of the rollout matrix from stored queries and keys, in linear memory.

Derivation. Row r of R = Ã_L ⋯ Ã_1 is r·R, a vector times matrices, so it can be carried from the last
layer down: r ← (1-ρ)·mean_h r·A^h + ρ·r. No A is needed for r·A: with O = A·V and any cotangent G of O,
the vector–Jacobian product with respect to V is AᵀG. Autograd of the fused kernel computes it in
linear memory, and with G = [r_1 … r_m, 0 …] of the width of a head it gives up to that many rows at
once:

.. math:: \mathrm{vjp}_V(G)_{kj} = \sum_q A_{qk}\,G_{qj} = (r_j A)_k .

That is one forward and one backward of the fused kernel for each layer, and taken on accelerators, where
blocks of weights are dear (not measured yet). On a CPU, blocks of queries that stay in the cache cost
about one forward call, and any layer that the fused kernel cannot express goes the same way:
:mod:`audit.capture.engines.query_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import KernelCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import attend_batch
from audit.capture.attention.scratch import Scratch
from audit.capture.engines.query_blocks import kept_call, rows_by_blocks
from audit.capture.engines.region_forward import fused_product, refusal, settings_refusal
from audit.capture.engines.settings import MEASURED, ROLLOUT, FoldSettings
from audit.errors import CaptureError


def rows_times_attention(call: KernelCall, rows: Tensor, head_weights: Tensor | None = None) -> Tensor:
    """Return r·(Σ_h w_h A^h) for each row r, with equal weights where none are given.

    Parameters
    ----------
    call : KernelCall
        One for which :func:`audit.capture.engines.region_forward.refusal` is None.
    rows : float Tensor (batch, row, query)
        Zero at pads.
    head_weights : Tensor (head,), optional

    Returns
    -------
    Tensor (batch, row, key)
        Each with the sum of its row.
    """
    width = call.query.shape[-1]
    heads = torch.cat([_pulled_back(call, part) for part in torch.split(rows, width, 1)], dim=2)
    return heads.mean(dim=1) if head_weights is None else torch.einsum("h,bhrk->brk", head_weights, heads)


def _pulled_back(call: KernelCall, rows: Tensor) -> Tensor:
    """Return r·A^h by the vector–Jacobian product with respect to the values: (batch, head, row, key)."""
    width, heads = call.query.shape[-1], call.query.shape[1]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    cotangent = torch.nn.functional.pad(rows.transpose(1, 2).to(dtype), (0, width - rows.shape[1]))
    with torch.enable_grad():
        value = cotangent.new_zeros(len(rows), heads, rows.shape[2], width, requires_grad=True)
        output = fused_product(call, value)
    spread = cotangent[:, None].expand(-1, heads, -1, -1)
    (pulled,) = torch.autograd.grad(output, value, spread)
    return pulled[..., : rows.shape[1]].transpose(2, 3)


def row_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    read: Tensor,
    valid: Tensor,
    *,
    settings: FoldSettings,
    keep_logits: bool = False,
    scratch: Scratch | None = None,
) -> tuple[Tensor, Any]:
    """Run one batch, then carry rows from its last layer down to the input.

    Parameters
    ----------
    model, plan, tensors, keep_logits : see :func:`audit.capture.attention.passes.fold_batch`
        All layers of `plan` are on the attention interface.
    read : float Tensor (batch, row, position)
        The output rows, as weights over the rows of R.
    valid : bool Tensor (batch, position)
    settings : FoldSettings
        ``rollout`` with constant residuals and any fusion or pruning of heads.
    scratch : see :func:`kernel_calls`

    Returns
    -------
    rows : Tensor (batch, row, position), one more position with learned sinks
        Each with the sum of its `read`.
    outputs
        The model's.

    Raises
    ------
    CaptureError
        When a layer was missed, or the method is not rollout with constant residuals.
    """
    if settings.method != ROLLOUT or settings.residual == MEASURED:
        raise CaptureError(
            f"{settings.method} with residual {settings.residual} has no row engine; use capture"
        )
    scratch = scratch or Scratch()
    calls, outputs = kernel_calls(model, plan, tensors, keep_logits=keep_logits, scratch=scratch)
    return _down(calls, settings, read, valid, scratch), outputs


def kernel_calls(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    *,
    keep_logits: bool = False,
    check: Callable[[KernelCall, Tensor], None] | None = None,
    scratch: Scratch | None = None,
) -> tuple[list[KernelCall], Any]:
    """Run one batch and keep the queries and keys of every layer, but no weights.

    Parameters
    ----------
    model, plan, tensors, keep_logits : see :func:`audit.capture.attention.passes.fold_batch`
    check : function of a KernelCall and its output, optional
        Called with each.
    scratch : Scratch, optional
        Where queries and keys may lie until the next batch.

    Returns
    -------
    calls : list of KernelCall
        The first layer first, each as :func:`audit.capture.engines.query_blocks.kept_call` keeps it.
    outputs
        The model's, the same to the last bit as without capture.

    Raises
    ------
    CaptureError
        When a layer was missed.
    """
    calls: list[KernelCall] = []
    room = scratch or Scratch()

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        if check is not None:
            check(call, output)
        calls.append(kept_call(call, room, len(calls)))
        return output, weights

    outputs = attend_batch(model, plan, tensors, attend, keep_logits=keep_logits)
    return calls, outputs


def _fused_is_better(call: KernelCall, rows: Tensor, settings: FoldSettings) -> bool:
    known = settings_refusal(settings) is None and refusal(call) is None
    return known and rows.device.type != "cpu" and rows.shape[2] == call.key.shape[2]


@torch.no_grad()
def step_down(
    call: KernelCall,
    rows: Tensor,
    valid: Tensor,
    settings: FoldSettings,
    layer: int,
    *,
    empty_rows: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return (1-ρ)·r·Ā + ρ·r for each row r: one layer's step towards the input.

    Parameters
    ----------
    call : KernelCall
    rows : float Tensor (batch, row, query), perhaps one more query: the sink
        Zero at pads.
    valid : bool Tensor (batch, position)
    settings : FoldSettings
        ``rollout`` with constant residuals and any fusion or pruning of heads.
    layer : int
        Whose residual and weights of heads are taken.
    empty_rows, scratch : see :func:`audit.capture.engines.query_blocks.rows_by_blocks`

    Returns
    -------
    Tensor (batch, row, key), one more key with a sink
    """
    if _fused_is_better(call, rows, settings):
        weights = settings.head_weights_of(layer)
        attended = rows_times_attention(call, rows, None if weights is None else rows.new_tensor(weights))
    else:
        attended = rows_by_blocks(call, rows, valid, settings, layer, empty_rows=empty_rows, scratch=scratch)
    return torch.lerp(attended, widened(rows, attended), settings.residual_of(layer))


def widened(rows: Tensor, like: Tensor) -> Tensor:
    """Give rows the sink's position that `like` has."""
    return torch.nn.functional.pad(rows, (0, like.shape[2] - rows.shape[2]))


def _down(
    calls: list[KernelCall], settings: FoldSettings, read: Tensor, valid: Tensor, scratch: Scratch
) -> Tensor:
    rows = read.to(torch.promote_types(calls[0].query.dtype, torch.float32))
    for layer in range(len(calls) - 1, settings.start_layer - 1, -1):
        rows = step_down(calls.pop(), rows, valid, settings, layer, scratch=scratch)
    return rows
