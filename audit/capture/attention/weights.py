"""Recompute the attention weights that a fused kernel used but did not return."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scaling · QKᵀ + bias) in float32 (float64 is kept).

    Parameters
    ----------
    query : Tensor (batch, head, query, dim)
    key : Tensor (batch, key head, key, dim)
        Fewer key heads than query heads mean grouped queries: each key head serves consecutive
        query heads.
    mask : bool or float Tensor, broadcast to (batch, head, query, key), or None
        True = may attend; a float mask is added to the scores. Keys beyond the scores' are cut.
    scaling : float or None
        1/√dim when None.
    is_causal : bool
        Mask j > i; only used where `mask` is None.
    softcap : float or None
        Scores become softcap · tanh(scores / softcap) before masking.
    position_bias : Tensor, broadcast to (batch, head, query, key), or None
    sinks : Tensor (head,) or None
        Learned logits of a sink: one more column that takes part in the softmax.

    Returns
    -------
    Tensor (batch, head, query, key), one more key with `sinks`
        Rows sum to 1; a row whose keys are all masked is zero.

    Notes
    -----
    Vaswani et al., "Attention is all you need", 2017, equation 1; sinks as in the gpt-oss model card.

    Examples
    --------
    >>> attention_weights(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), is_causal=True)[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query * scale) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias[..., : scores.shape[-1]].to(dtype)
    scores = _masked(scores, mask, is_causal)
    if sinks is not None:
        column = sinks.to(dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if mask is None:
        return weights  # every query sees a key
    empty = torch.isneginf(scores.amax(dim=-1, keepdim=True))
    # Only pad rows have no key at all; zero keeps them from spreading NaN.
    return weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    queries, keys = scores.shape[-2:]
    if mask is None:
        if not is_causal or queries == 1:
            return scores
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill(~allowed, float("-inf"))
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    # Additive masks hide keys with the most negative number of the model's dtype; in float32 that
    # of float16 would leave e^-65504, which is zero as well.
    return scores + mask.to(scores.dtype)


def with_sink(weights: Tensor) -> Tensor:
    """Append the mass that a learned sink took, 1 − row sum, as one more key.

    Parameters
    ----------
    weights : Tensor (batch, head, query, key)
        Rows sum to 1 or less.

    Returns
    -------
    Tensor (batch, head, query, key + 1)
        Rows sum to 1.
    """
    missing = (1.0 - weights.sum(dim=-1, keepdim=True)).clamp_min(0.0)
    return torch.cat([weights, missing], dim=-1)
