r"""Region, forward: what every output row draws from a few regions, in linear memory.

Derivation. The rollout of the layers up to l is R_l = Ã_l R_(l-1) with R_0 = I and
Ã_l = (1-ρ)·mean_h A^h + ρ·I. A region is a column x of weights over the input positions, and what
row i of R_l draws from it is (R_l x)_i. Multiplying the recursion by X = [x_1 … x_G] from the right,

.. math:: X_l = (1-\rho)\,\tfrac1H \sum_h \mathrm{softmax}(Q_h K_h^\top)\,X_{l-1} + \rho\,X_{l-1},
          \qquad X_0 = X,

so R_l X needs no R_l: each layer costs one more call of the fused attention kernel with X in the
place of V. No matrix of query × key exists anywhere, all output rows are there, and X_l of every l on
the way gives the reliance of each cumulative R_l for nothing.

Conditions. X is padded with zeros to the width of a head (another width leaves the fused kernel) and
kept in float32; more regions than that take several calls. Pad rows are set to zero in X: no valid row
draws on them, and their NaN must not spread. Masks that differ by row and additive biases keep the
result exact but cost n², as they do in the model. Soft-capped scores and learned sinks cannot be
expressed in the fused kernel: :func:`refusal` says so, and the dense engine takes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import ROW_TOLERANCE, VALUE_TOLERANCE
from audit.capture.attention.interface import KernelCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import attend_batch
from audit.capture.engines.query_blocks import prunes
from audit.capture.engines.settings import MEASURED, ROLLOUT, FoldSettings
from audit.errors import CaptureError


def settings_refusal(settings: FoldSettings) -> str | None:
    """Return why a method has no linear engine for regions, or None.

    Examples
    --------
    >>> settings_refusal(FoldSettings(fusion={"top_k": 3}))
    'heads are fused and pruned row by row'
    """
    if settings.method != ROLLOUT:
        return f"{settings.method} is no product of fused attention matrices"
    if settings.residual == MEASURED:
        return "residuals are measured"
    if prunes(settings):
        return "heads are fused and pruned row by row"
    return None


def refusal(call: KernelCall) -> str | None:
    """Return why the weights of a call cannot be had from torch's fused kernel, or None."""
    if call.options.get("softcap") is not None:
        return f"attention layer {call.path} caps its scores"
    if call.options.get("s_aux") is not None:
        return f"attention layer {call.path} has learned sinks"
    if call.query.shape[2] != call.key.shape[2]:
        return f"attention layer {call.path} has keys of another stream"
    return None


def fused_product(call: KernelCall, value: Tensor) -> Tensor:
    """Return softmax(QKᵀ)·value of each head by the fused kernel.

    Parameters
    ----------
    call : KernelCall
        One for which :func:`refusal` is None.
    value : Tensor (batch, head or 1, key, dim)
        In the place of the values; the kernel is linear in memory where dim is that of the keys.

    Returns
    -------
    Tensor (batch, head, query, dim), float32 or float64
        Rows without any key are NaN or zero.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key = call.query.to(dtype), call.key.to(dtype)
    heads = query.shape[1]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    mask = _mask(call, dtype)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value.to(dtype).expand(-1, heads, -1, -1),
        attn_mask=mask,
        is_causal=mask is None and call.is_causal and query.shape[2] > 1,
        scale=call.options.get("scaling"),
    )


def _mask(call: KernelCall, dtype: torch.dtype) -> Tensor | None:
    """Return mask and position bias as one."""
    keys = call.key.shape[2]
    bias: Tensor | None = call.options.get("position_bias")
    mask = None if call.mask is None else call.mask[..., :keys]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    if bias is None:
        return mask
    bias = bias[..., :keys].to(dtype)
    if mask is None:
        hidden = torch.ones(keys, keys, dtype=torch.bool, device=bias.device).triu(1)
        return bias.masked_fill(hidden, -torch.inf) if call.is_causal else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def attend_columns(call: KernelCall, columns: Tensor, head_weights: Tensor | None = None) -> Tensor:
    """Return Σ_h w_h·softmax(Q_h K_hᵀ)·X, with equal weights where none are given.

    Parameters
    ----------
    call : KernelCall
    columns : float Tensor (batch, key, column)
    head_weights : Tensor (head,), optional

    Returns
    -------
    Tensor (batch, query, column)
    """
    width = call.query.shape[-1]
    parts = []
    for chunk in torch.split(columns, width, dim=-1):
        padded = torch.nn.functional.pad(chunk, (0, width - chunk.shape[-1]))
        heads = fused_product(call, padded[:, None])[..., : chunk.shape[-1]]
        mixed = (
            heads.mean(dim=1) if head_weights is None else torch.einsum("h,bhqc->bqc", head_weights, heads)
        )
        parts.append(mixed)
    return torch.cat(parts, dim=-1)


class RegionFold:
    """Columns of R_l·X, one layer at a time.

    Parameters
    ----------
    settings : FoldSettings
        One for which :func:`settings_refusal` is None.
    read : float Tensor (batch, position)
        The output row, as weights over the rows.
    valid : bool Tensor (batch, position)
    columns : float Tensor (batch, position, column)
        Weights of the regions over the input positions.

    Attributes
    ----------
    columns : Tensor (batch, position, column)
        R_l X of the layers so far: what each output row draws from each region; zero at pads.
    masses : list of Tensor (batch, column)
        The row that is read, of each R_l.
    """

    def __init__(self, settings: FoldSettings, read: Tensor, valid: Tensor, columns: Tensor) -> None:
        self.settings, self.read, self.valid = settings, read, valid
        ones = torch.ones_like(columns[..., :1])
        self._state = self._clean(torch.cat([columns, ones], dim=-1))
        self.causal = torch.ones(len(read), dtype=torch.bool, device=read.device)
        self.masses: list[Tensor] = []

    @property
    def columns(self) -> Tensor:
        """Return R_l X of the layers so far: (batch, position, column)."""
        return self._state[..., :-1]

    def _clean(self, state: Tensor) -> Tensor:
        return torch.where(self.valid[..., None], state, torch.zeros_like(state))

    def fold(self, call: KernelCall) -> None:
        """Take the next layer.

        Raises
        ------
        CaptureError
            When the call is not one for the fused kernel, or its rows do not sum to 1.
        """
        if (reason := refusal(call)) is not None:
            raise CaptureError(f"{reason}; use engine = 'dense'")
        layer = len(self.masses)
        self.causal &= sees_no_future(call)
        if layer >= self.settings.start_layer:
            rho, weights = self.settings.residual_of(layer), self.settings.head_weights_of(layer)
            each = None if weights is None else self._state.new_tensor(weights)
            attended = self._clean(attend_columns(call, self._state, each))
            self._state = torch.lerp(attended, self._state, rho)
            self._check_rows(call)
        self.masses.append(torch.einsum("bq,bqc->bc", self.read.to(self._state.dtype), self.columns))

    def _check_rows(self, call: KernelCall) -> None:
        """Check the column of ones: valid rows sum to 1, and nothing of them goes to pads."""
        error = (self._state[..., -1] - self.valid.to(self._state.dtype)).abs().amax()
        if not error <= ROW_TOLERANCE[call.query.dtype]:
            raise CaptureError(
                f"attention layer {call.path} has rows that sum to 1 ± {float(error):.3g} over the positions "
                "that are no padding; this kind of attention is not supported"
            )


def sees_no_future(call: KernelCall) -> Tensor | bool:
    """Return for each probe, or for all of them, whether no position attends beyond itself."""
    mask = call.mask
    if mask is None:
        return call.is_causal
    later = mask[..., : call.key.shape[2]].triu(1)
    seen = later if mask.dtype == torch.bool else _open(mask).triu(1)
    return ~seen.flatten(1).any(dim=1)


def _open(mask: Tensor) -> Tensor:
    """Return where an additive mask lets attention through."""
    return mask > torch.finfo(mask.dtype).min / 2


def region_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    fold: RegionFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
) -> Any:
    """Run one batch and carry its regions through every layer.

    Parameters
    ----------
    model, plan, tensors, keep_logits : see :func:`audit.capture.attention.passes.fold_batch`
        All layers of `plan` are on the attention interface.
    fold : RegionFold
    verify : bool
        Also compare the fused kernel on the model's own values with each layer's output.

    Returns
    -------
    The model's outputs, the same to the last bit as without capture

    Raises
    ------
    CaptureError
    """

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        fold.fold(call)
        if verify:
            check_output(call, output, fold.valid)
        return output, weights

    return attend_batch(model, plan, tensors, attend, keep_logits=keep_logits)


def check_output(call: KernelCall, output: Tensor, valid: Tensor) -> None:
    """Check that the fused kernel on the layer's own values gives what the layer's kernel returned.

    Raises
    ------
    CaptureError
        When the largest difference exceeds the tolerance of the dtype.
    """
    groups = call.query.shape[1] // call.value.shape[1]
    again = fused_product(call, call.value.repeat_interleave(groups, dim=1)).transpose(1, 2)
    given = output.to(again.dtype).reshape(again.shape)
    rows = valid[:, :, None, None]
    error = torch.where(rows, (again - given).abs(), torch.zeros_like(again)).amax()
    scale = torch.where(rows, given.abs(), torch.zeros_like(again)).amax().clamp_min(1e-6)
    if not error <= VALUE_TOLERANCE[output.dtype] * scale:
        raise CaptureError(
            f"attention layer {call.path}: fused attention on its values differs from its own output by "
            f"{float(error / scale):.3g}, allowed {VALUE_TOLERANCE[output.dtype]:g}; use engine = 'dense'"
        )
