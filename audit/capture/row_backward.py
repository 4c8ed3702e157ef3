r"""Rows, backward: a few rows of the rollout matrix from stored queries and keys, in linear memory.

Derivation. Row r of R = Ã_L ⋯ Ã_1 is r·R, a vector times matrices, so it can be carried from the last
layer down: r ← (1-ρ)·mean_h r·A^h + ρ·r. No A is needed for r·A: with O = A·V and any cotangent G of O,
the vector–Jacobian product with respect to V is AᵀG. Autograd of the fused kernel computes it in
linear memory, and with G = [r_1 … r_m, 0 …] of the width of a head it gives up to that many rows at
once:

.. math:: \mathrm{vjp}_V(G)_{kj} = \sum_q A_{qk}\,G_{qj} = (r_j A)_k .

One row on a CPU is cheaper still. With λ_i = log Σ_k exp(s q_i·k_k), the log-sum-exp that the kernel
returns beside its output,

.. math:: (rA)_k = \sum_i r_i\,e^{s\,q_i\cdot k_k - \lambda_i}
          = \exp\Big(\operatorname{logsumexp}_i\, [\,s\,k_k\cdot q_i + \log r_i - \lambda_i\,]\Big),

which is the log-sum-exp of a second call with queries and keys exchanged, log r_i - λ_i being one more
dimension of the exchanged keys against a 1 in the exchanged queries. Causal masks are kept by turning
both sequences around. Two forward calls replace one forward and one backward.

Layers that the fused kernel cannot express go through blocks of queries, see
:mod:`audit.capture.query_blocks`, which costs block × n for each head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.check import check_counts
from audit.capture.hooks import counted_calls
from audit.capture.inputs import core_model
from audit.capture.interface import KernelCall, Replacing, interface_capture
from audit.capture.layers import CapturePlan, expected_calls
from audit.capture.passes import exclusive, run_model
from audit.capture.query_blocks import rows_by_blocks
from audit.capture.region_forward import fused_product, refusal, settings_refusal
from audit.capture.settings import MEASURED, ROLLOUT, FoldSettings
from audit.errors import CaptureError

SMALLEST_SHARE = 1e-38
"""In the place of zero under the logarithm; what it adds lies below float32's resolution."""


def rows_times_attention(call: KernelCall, rows: Tensor, head_weights: Tensor | None = None) -> Tensor:
    """Return r·(Σ_h w_h A^h) for each row r, with equal weights where none are given.

    Parameters
    ----------
    call : KernelCall
        One for which :func:`audit.capture.region_forward.refusal` is None.
    rows : float Tensor (batch, row, query)
        Zero at pads.
    head_weights : Tensor (head,), optional

    Returns
    -------
    Tensor (batch, row, key)
        Each with the sum of its row.
    """
    if rows.shape[1] == 1 and _exchangeable(call):
        heads = _exchanged(call, rows[:, 0])[:, :, None]
    else:
        heads = torch.cat(
            [_pulled_back(call, part) for part in torch.split(rows, call.query.shape[-1], 1)], 2
        )
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


def _exchangeable(call: KernelCall) -> bool:
    """Return whether torch's CPU kernel gives the log-sum-exp of this call."""
    plain = call.mask is None and call.options.get("position_bias") is None
    return plain and call.query.device.type == "cpu" and call.query.dtype != torch.float64


def _exchanged(call: KernelCall, row: Tensor) -> Tensor:
    """Return r·A^h by exchanging queries and keys: (batch, head, key)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key = call.query.float(), call.key.float()
    heads, width, n = query.shape[1], query.shape[-1], query.shape[2]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    scale = call.options.get("scaling")
    scale = width**-0.5 if scale is None else scale
    causal = call.is_causal and n > 1
    norm = kernel(query, key, key, 0.0, causal, scale=scale)[1].reshape(len(row), heads, n)
    if causal:
        query, key, norm, row = query.flip(2), key.flip(2), norm.flip(2), row.flip(1)
    offset = (row.clamp_min(SMALLEST_SHARE).log()[:, None] - norm) / scale
    blank = (-width - 1) % 8
    left = torch.cat([key, torch.ones_like(key[..., :1]), key.new_zeros(*key.shape[:-1], blank)], dim=-1)
    right = torch.cat([query, offset[..., None], query.new_zeros(*query.shape[:-1], blank)], dim=-1)
    found: Tensor = kernel(left, right, right, 0.0, causal, scale=scale)[1].reshape(len(row), heads, n).exp()
    return found.flip(2) if causal else found


def row_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    read: Tensor,
    valid: Tensor,
    *,
    settings: FoldSettings,
    keep_logits: bool = False,
) -> tuple[Tensor, Any]:
    """Run one batch, then carry rows from its last layer down to the input.

    Parameters
    ----------
    model, plan, tensors, keep_logits : see :func:`audit.capture.passes.fold_batch`
        All layers of `plan` are on the attention interface.
    read : float Tensor (batch, row, position)
        The output rows, as weights over the rows of R.
    valid : bool Tensor (batch, position)
    settings : FoldSettings
        ``rollout`` with constant residuals and any fusion or pruning of heads.

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
    calls: list[KernelCall] = []

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        calls.append(replace(call, value=call.key))  # values are not needed again
        return call.run()

    expected = None if plan.narrowed else expected_calls(core_model(model))
    with exclusive(model, plan.configs), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, Replacing(attend)))
        outputs = run_model(model, tensors, keep_logits=keep_logits)
        check_counts(plan, called, Counter(call.path for call in calls), expected)
        return _down(calls, settings, read, valid), outputs


def _down(calls: list[KernelCall], settings: FoldSettings, read: Tensor, valid: Tensor) -> Tensor:
    rows = read.to(torch.promote_types(calls[0].query.dtype, torch.float32))
    plain = settings_refusal(settings) is None
    for layer in range(len(calls) - 1, settings.start_layer - 1, -1):
        call, rho = calls.pop(), settings.residual_of(layer)
        if plain and refusal(call) is None and rows.shape[2] == call.key.shape[2]:
            weights = settings.head_weights_of(layer)
            attended = rows_times_attention(call, rows, None if weights is None else rows.new_tensor(weights))
        else:
            attended = rows_by_blocks(call, rows, valid, settings, layer)
            rows = torch.nn.functional.pad(rows, (0, attended.shape[2] - rows.shape[2]))
        rows = torch.lerp(attended, rows, rho)
    return rows
