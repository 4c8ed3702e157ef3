"""Fuse the heads of one layer into one matrix, and prune its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from audit.methods._arrays import (
    AnyArray,
    Array,
    check_weights,
    fill_empty_rows,
    restore,
    to_tensor,
    working_dtype,
)

HeadFusion = Literal["mean", "max", "min", "weighted"]


def fuse_heads(
    attention: Array,
    *,
    head_fusion: HeadFusion = "mean",
    head_weights: Sequence[float] | AnyArray | None = None,
    discard_ratio: float = 0.0,
    discard_below: float | None = None,
    top_k: int | None = None,
    mask: AnyArray | None = None,
    query_offset: int | None = 0,
) -> Array:
    """Return one layer's heads as one matrix, pruned if wanted, each row with the sum it had.

    Parameters
    ----------
    attention : (batch, head, query, key)
        Weights of one layer, or of a block of its queries.
    head_fusion : {"mean", "max", "min", "weighted"}
        ``max`` and ``min`` take the entry-wise extreme and give the row back its mean sum.
    head_weights : (head,), optional
        Weights of the heads for ``weighted``: non-negative, sum 1.
    discard_ratio : float in [0, 1)
        Drop the ⌊ratio·m⌋ smallest of a row's m unmasked keys; ties at the threshold are kept.
    discard_below : float in [0, 1], optional
        Drop entries of the fused row under this share.
    top_k : int, optional
        Keep the k largest entries of a row, ties included.
    mask : bool (batch, key) or (batch, query, key), optional
        True where a query may attend. Without it the exact zeros of the fused matrix count as masked,
        which is what softmax gives for masked keys. Keys that are masked here get no weight.
    query_offset : int or None
        Position of the first query, for blocks of queries. None for cross-attention, where an empty
        row stays zero.

    Returns
    -------
    (batch, query, key), float32 or float64
        A row left without mass is the identity row. Several prunings each judge the same fused row.

    Raises
    ------
    ValueError
        When an argument has the wrong shape or range, or attention is NaN or negative.

    Notes
    -----
    Row-wise throughout, so a block of queries gives the same rows as the whole matrix. ``max`` shows
    where any head looks, ``min`` only where all look; neither can tell which head the model uses.

    Examples
    --------
    >>> import numpy as np
    >>> attention = np.array([[[[.6, .3, .1]], [[.2, .5, .3]]]])
    >>> fuse_heads(attention, top_k=2).round(3)
    array([[[0.5, 0.5, 0. ]]])
    >>> fuse_heads(attention, head_fusion="max").round(3)
    array([[[0.429, 0.357, 0.214]]])
    """
    return fuse_heads_counted(
        attention,
        head_fusion=head_fusion,
        head_weights=head_weights,
        discard_ratio=discard_ratio,
        discard_below=discard_below,
        top_k=top_k,
        mask=mask,
        query_offset=query_offset,
    )[0]


def fuse_heads_counted(
    attention: Array,
    *,
    head_fusion: HeadFusion = "mean",
    head_weights: Sequence[float] | AnyArray | None = None,
    discard_ratio: float = 0.0,
    discard_below: float | None = None,
    top_k: int | None = None,
    mask: AnyArray | None = None,
    query_offset: int | None = 0,
) -> tuple[Array, Array]:
    """Return what :func:`fuse_heads` returns, and how many empty rows it replaced, int (batch,).

    Parameters, exceptions and formulas are those of :func:`fuse_heads`.

    Examples
    --------
    >>> import numpy as np
    >>> fused, empty = fuse_heads_counted(np.full((1, 1, 2, 2), 0.5), discard_below=0.6)
    >>> fused.tolist(), empty.tolist()
    ([[[1.0, 0.0], [0.0, 1.0]]], [2])
    """
    tensor = to_tensor("attention", attention)
    if tensor.ndim != 4:
        raise ValueError(f"attention: expected (batch, head, query, key), got shape {tuple(tensor.shape)}")
    fused = _merge_heads(tensor, head_fusion, head_weights)
    check_weights("attention", fused)
    kept = _kept_entries(fused, discard_ratio, discard_below, top_k, mask)
    if kept is not None:
        fused = _with_row_sums(fused * kept, fused.sum(-1, keepdim=True))
    empty = fused.new_zeros(fused.shape[0], dtype=torch.int64)
    if query_offset is not None:
        _check_offset(query_offset, fused)
        fused, empty = fill_empty_rows(fused, offset=query_offset)
    return restore(fused, attention), restore(empty, attention)


def _merge_heads(
    attention: torch.Tensor, head_fusion: str, head_weights: Sequence[float] | AnyArray | None
) -> torch.Tensor:
    dtype = working_dtype(attention)
    if (head_fusion == "weighted") != (head_weights is not None):
        raise ValueError(
            "head_weights: expected with head_fusion='weighted' and only there, "
            f"got head_fusion={head_fusion!r} and head_weights={'None' if head_weights is None else 'given'}"
        )
    if head_weights is not None:
        weights = _checked_head_weights(head_weights, attention)
        fused = weights[0] * attention[:, 0].to(dtype)
        for head in range(1, len(weights)):
            fused = fused + weights[head] * attention[:, head].to(dtype)
        return fused
    if head_fusion == "mean":
        return attention.mean(dim=1, dtype=dtype)
    if head_fusion not in ("max", "min"):
        raise ValueError(f"head_fusion: expected 'mean', 'max', 'min' or 'weighted', got {head_fusion!r}")
    extreme = attention.amax(dim=1) if head_fusion == "max" else attention.amin(dim=1)
    return _with_row_sums(extreme.to(dtype), attention.sum(-1, dtype=dtype).mean(1)[..., None])


def _with_row_sums(weights: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return `weights` with each row scaled to `sums`; rows without mass become exactly zero."""
    own = weights.sum(-1, keepdim=True)
    empty = own < torch.finfo(weights.dtype).tiny
    return weights * torch.where(empty, torch.zeros_like(own), sums / torch.where(empty, 1.0, own))


def _kept_entries(
    fused: torch.Tensor,
    discard_ratio: float,
    discard_below: float | None,
    top_k: int | None,
    mask: AnyArray | None,
) -> torch.Tensor | None:
    """Return which entries stay, or None where all do."""
    _check_pruning(discard_ratio, discard_below, top_k)
    if mask is None and discard_ratio == 0 and discard_below is None and top_k is None:
        return None
    allowed = fused > 0 if mask is None else _checked_mask(mask, fused)
    kept = allowed
    if discard_ratio > 0:
        dropped = (allowed.sum(-1, keepdim=True, dtype=torch.float64) * discard_ratio + 1e-9).floor().long()
        ascending = fused.masked_fill(~allowed, torch.inf).sort(dim=-1).values
        kept = kept & (fused >= ascending.gather(-1, dropped))
    if top_k is not None and top_k < fused.shape[-1]:
        largest = fused.masked_fill(~allowed, -torch.inf).topk(top_k, dim=-1).values
        kept = kept & (fused >= largest[..., -1:])
    return kept if discard_below is None else kept & (fused >= discard_below)


def _check_pruning(discard_ratio: float, discard_below: float | None, top_k: int | None) -> None:
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio: expected a share in [0, 1), got {discard_ratio}")
    if discard_below is not None and not 0 <= discard_below <= 1:
        raise ValueError(f"discard_below: expected a share in [0, 1], got {discard_below}")
    if top_k is not None and (
        isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1
    ):
        raise ValueError(f"top_k: expected an integer >= 1, got {top_k!r}")


def _checked_mask(mask: AnyArray, fused: torch.Tensor) -> torch.Tensor:
    allowed = torch.as_tensor(mask, device=fused.device)
    batch, queries, keys = fused.shape
    if allowed.dtype != torch.bool or tuple(allowed.shape) not in ((batch, keys), (batch, queries, keys)):
        raise ValueError(
            f"mask: expected bool (batch, key) = {(batch, keys)} or (batch, query, key) = "
            f"{(batch, queries, keys)}, got {allowed.dtype} of shape {tuple(allowed.shape)}"
        )
    return (allowed[:, None] if allowed.ndim == 2 else allowed).expand_as(fused)


def _checked_head_weights(head_weights: Sequence[float] | AnyArray, attention: torch.Tensor) -> torch.Tensor:
    weights = torch.as_tensor(head_weights, dtype=working_dtype(attention), device=attention.device)
    if tuple(weights.shape) != (attention.shape[1],):
        raise ValueError(
            f"head_weights: expected {attention.shape[1]} weights, got shape {tuple(weights.shape)}"
        )
    check_weights("head_weights", weights)
    if abs(float(weights.detach().sum()) - 1) > 1e-4:
        raise ValueError(f"head_weights: expected a sum of 1, got {float(weights.detach().sum()):.6g}")
    return weights


def _check_offset(query_offset: int, fused: torch.Tensor) -> None:
    queries, keys = fused.shape[-2:]
    if query_offset < 0 or query_offset + queries > keys:
        raise ValueError(
            f"query_offset: expected {queries} queries to lie among {keys} keys, got offset {query_offset} "
            "(use query_offset=None for cross-attention)"
        )
