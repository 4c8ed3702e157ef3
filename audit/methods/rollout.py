"""Attention rollout, whole or one layer at a time.

The three incremental pieces `fuse_heads`, `add_residual` and `rollout_step` are what a capture folds
each layer with, so that one layer's attention is alive at a time; `row_step` does the same for a
single output row, from the last layer down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from audit.methods._arrays import (
    AnyArray,
    Array,
    Residual,
    as_layers,
    as_working,
    check_finite,
    check_row_sums,
    check_share,
    check_square,
    normalize_rows,
    residual_per_layer,
    restore,
)
from audit.methods.fusion import HeadFusion, fuse_heads

__all__ = [
    "add_residual",
    "attention_rollout",
    "fuse_heads",
    "measured_residual",
    "raw_attention",
    "rollout_step",
    "row_step",
]


def attention_rollout(
    attentions: Sequence[Array] | Array,
    *,
    head_fusion: HeadFusion = "mean",
    residual: Residual = 0.5,
    discard_ratio: float = 0.0,
    top_k: int | None = None,
    start_layer: int = 0,
    normalize: bool = True,
    head_weights: Sequence[Sequence[float]] | AnyArray | None = None,
    discard_below: float | None = None,
    mask: AnyArray | None = None,
) -> Array:
    r"""Return how each output position draws on the input positions through all layers.

    .. math:: \tilde A_l = (1-\rho) \operatorname{fuse}_h A^{(l,h)} + \rho I, \qquad
              R_l = \tilde A_l R_{l-1}, \quad R_{-1} = I

    so later layers multiply from the left (Abnar & Zuidema, ACL 2020, arXiv 2005.00928, section 3).

    Parameters
    ----------
    attentions : sequence of (batch, head, query, key), or (layer, batch, head, query, key)
        Attention weights; rows over keys sum to 1 (less where a learned sink was left out).
    head_fusion : {"mean", "max", "min", "weighted"}
        How the heads of a layer become one matrix. After ``max`` and ``min`` a row gets back the sum
        it had, before the residual is added. ``weighted`` needs `head_weights`.
    residual : float, one float per layer, or (layer, batch, query)
        Weight ρ of the identity in [0, 1]; 0.5 gives ½A + ½I.
    discard_ratio, discard_below, top_k
        Pruning of the fused rows, see :func:`fuse_heads`.
    start_layer : int
        First layer that takes part; the layers below it count as the identity.
    normalize : bool
        Divide each row of every layer's matrix by its sum, so that rows of the result sum to 1. With
        False rows keep their own sum.
    head_weights : (layer, head), optional
        Weights for ``weighted`` fusion; each layer's sum to 1.
    mask : bool (batch, key) or (batch, query, key), optional
        True where a query may attend; see :func:`fuse_heads`.

    Returns
    -------
    (batch, query, key), float32 or float64
        Rollout matrix R, non-negative; row i is a distribution over the input positions.

    Raises
    ------
    ValueError
        When an argument has the wrong shape or range, or attention is negative, NaN or sums to more
        than 1 over the keys.

    Notes
    -----
    It tells where information could have come from if every head mattered alike and values were
    interchangeable. It cannot tell what a head writes, nor what a feed-forward layer or the output
    head does with it: two models with the same attention have the same rollout. It cannot tell
    evidence for a class from evidence against it, and deep stacks tend to the same row everywhere.

    Examples
    --------
    Two layers of which the second mixes first: order matters.

    >>> import numpy as np
    >>> lower, upper = np.array([[1, 0], [.5, .5]]), np.array([[.5, .5], [0, 1]])
    >>> attention_rollout([lower[None, None], upper[None, None]])[0]
    array([[0.8125, 0.1875],
           [0.25  , 0.75  ]])
    """
    layers = as_layers("attentions", attentions)
    check_square("attentions", layers)
    _check_start_layer(start_layer, len(layers))
    batch, _, queries, _ = layers[0].shape
    weights = residual_per_layer("residual", residual, len(layers), (batch, queries))
    heads = _weights_per_layer(head_weights, len(layers))
    rollout: Array | None = None
    for index in range(start_layer, len(layers)):
        fused = fuse_heads(
            layers[index],
            head_fusion=head_fusion,
            head_weights=heads[index],
            discard_ratio=discard_ratio,
            discard_below=discard_below,
            top_k=top_k,
            mask=mask,
        )
        rollout = rollout_step(rollout, _mixed(fused, weights[index], normalize, f"attentions[{index}]"))
    return cast("Array", rollout)


def raw_attention(
    attentions: Sequence[Array] | Array,
    *,
    layer: int = -1,
    head_fusion: HeadFusion = "mean",
    head_weights: Sequence[float] | AnyArray | None = None,
) -> Array:
    """Return the fused attention of one layer, without residual.

    Parameters
    ----------
    attentions : sequence of (batch, head, query, key), or (layer, batch, head, query, key)
    layer : int
        Which layer, from 0; negative numbers count from the last.
    head_fusion, head_weights
        See :func:`fuse_heads`.

    Returns
    -------
    (batch, query, key)
        Rows sum to what the layer's rows sum to.

    Raises
    ------
    ValueError
        When `layer` does not exist or the attention is not what it should be.

    Notes
    -----
    It tells which positions of *that layer's input* a position reads. Above layer 0 those are mixtures
    already, so it cannot tell which input tokens they stand for.

    Examples
    --------
    >>> import numpy as np
    >>> raw_attention(np.full((2, 1, 3, 2, 2), 0.5))
    array([[[0.5, 0.5],
            [0.5, 0.5]]])
    """
    layers = as_layers("attentions", attentions)
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"layer: expected one of {len(layers)} layers, got {layer}")
    chosen = layers[layer]
    return fuse_heads(chosen, head_fusion=head_fusion, head_weights=head_weights, query_offset=None)


def add_residual(fused: Array, residual: float | AnyArray) -> Array:
    """Return (1 - ρ)·A + ρ·I.

    Parameters
    ----------
    fused : (batch, query, key)
        One layer's fused attention; square.
    residual : float or (batch, query)
        Weight ρ of the identity in [0, 1], for each query.

    Returns
    -------
    (batch, query, key)
        Rows keep a sum of 1.

    Raises
    ------
    ValueError
        When `fused` is not square or `residual` lies outside [0, 1].

    Examples
    --------
    >>> import torch
    >>> add_residual(torch.tensor([[[0., 1.], [1., 0.]]]), 0.75)
    tensor([[[0.7500, 0.2500],
             [0.2500, 0.7500]]])
    """
    tensor = as_working("fused", fused)
    if tensor.ndim != 3 or tensor.shape[1] != tensor.shape[2]:
        raise ValueError(f"fused: expected square (batch, query, key), got shape {tuple(tensor.shape)}")
    weight = _residual_column(residual, tensor)
    mixed = tensor * (1 - weight)
    mixed.diagonal(dim1=-2, dim2=-1).add_(weight.squeeze(-1))
    return restore(mixed, fused)


def rollout_step(rollout: Array | None, fused_with_residual: Array) -> Array:
    """Return R_l = Ã_l R_{l-1}; the first layer (rollout None) is its own rollout.

    Parameters
    ----------
    rollout : (batch, query, key) or None
        R of the layers below.
    fused_with_residual : (batch, query, key)
        Ã of this layer.

    Returns
    -------
    (batch, query, key)

    Raises
    ------
    ValueError
        When the shapes do not match.

    Examples
    --------
    >>> import torch
    >>> swap = torch.tensor([[[0., 1.], [1., 0.]]])
    >>> rollout_step(rollout_step(None, swap), swap)
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    step = as_working("fused_with_residual", fused_with_residual)
    if rollout is None:
        return restore(step, fused_with_residual)
    below = as_working("rollout", rollout).to(device=step.device)
    if (
        step.ndim != 3
        or below.ndim != 3
        or step.shape[0] != below.shape[0]
        or step.shape[2] != below.shape[1]
    ):
        raise ValueError(
            f"rollout: expected (batch, key, …) to follow a layer of shape {tuple(step.shape)}, "
            f"got shape {tuple(below.shape)}"
        )
    dtype = torch.promote_types(step.dtype, below.dtype)
    return restore(step.to(dtype) @ below.to(dtype), fused_with_residual)


def row_step(row: Array, fused: Array, residual: float | AnyArray = 0.5) -> Array:
    """Return the row vector r·Ã = (r ⊙ (1 - ρ))·A + r ⊙ ρ, one layer further down.

    Started with the identity's row (or any mixture of rows) at the last layer and carried down to
    layer 0, it gives that row of R at a cost of n² per layer instead of n³.

    Parameters
    ----------
    row : (batch, query) or (batch, row, query)
        Weights over this layer's queries.
    fused : (batch, query, key)
        One layer's fused attention.
    residual : float or (batch, query)
        Weight ρ of the identity; it belongs to the queries.

    Returns
    -------
    (batch, key) or (batch, row, key)
        Weights over this layer's keys, that is over the queries of the layer below.

    Raises
    ------
    ValueError
        When the shapes do not match or `residual` lies outside [0, 1].

    Examples
    --------
    >>> import torch
    >>> row_step(torch.tensor([[0., 1.]]), torch.tensor([[[1., 0.], [.5, .5]]]))
    tensor([[0.2500, 0.7500]])
    """
    vector, matrix = as_working("row", row), as_working("fused", fused)
    if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
        raise ValueError(f"fused: expected square (batch, query, key), got shape {tuple(matrix.shape)}")
    if vector.ndim not in (2, 3) or (vector.shape[0], vector.shape[-1]) != tuple(matrix.shape[:2]):
        raise ValueError(
            f"row: expected (batch, query) or (batch, row, query) for a layer of shape "
            f"{tuple(matrix.shape)}, got shape {tuple(vector.shape)}"
        )
    dtype = torch.promote_types(vector.dtype, matrix.dtype)
    vector, matrix = vector.to(dtype), matrix.to(device=vector.device, dtype=dtype)
    weight = _residual_column(residual, matrix).transpose(1, 2)
    rows = vector if vector.ndim == 3 else vector[:, None]
    below = (rows * (1 - weight)) @ matrix + rows * weight
    return restore(below if vector.ndim == 3 else below[:, 0], row)


def measured_residual(hidden: Array, attention_output: Array) -> Array:
    """Return the residual weight ρ_i = ‖x_i‖ / (‖attn_i‖ + ‖x_i‖) of one layer.

    Parameters
    ----------
    hidden : (batch, query, dim)
        What the layer's residual connection carries.
    attention_output : (batch, query, dim)
        What its attention adds.

    Returns
    -------
    (batch, query)
        In [0, 1]; 1 where both are zero, since then nothing moves. Stacked over layers it is the
        (layer, batch, query) form of `residual`.

    Raises
    ------
    ValueError
        When the shapes differ or hold NaN.

    Notes
    -----
    Norms only: it cannot tell a large update that the next layer norm removes from one that stays.

    Examples
    --------
    >>> import torch
    >>> measured_residual(torch.tensor([[[3., 4.]]]), torch.tensor([[[0., 15.]]]))
    tensor([[0.2500]])
    """
    kept, added = as_working("hidden", hidden), as_working("attention_output", attention_output)
    if kept.ndim != 3 or kept.shape != added.shape:
        raise ValueError(
            f"attention_output: expected (batch, query, dim) like hidden, {tuple(kept.shape)}, "
            f"got shape {tuple(added.shape)}"
        )
    check_finite("hidden", kept)
    check_finite("attention_output", added)
    residual, attention = torch.linalg.vector_norm(kept, dim=-1), torch.linalg.vector_norm(added, dim=-1)
    total = residual + attention
    return restore(torch.where(total > 0, residual / total.clamp_min(1e-30), 1.0), hidden)


def _weights_per_layer(
    head_weights: Sequence[Sequence[float]] | AnyArray | None, layers: int
) -> list[Sequence[float] | AnyArray | None]:
    if head_weights is None:
        return [None] * layers
    if len(head_weights) != layers:
        raise ValueError(
            f"head_weights: expected one vector for each of {layers} layers, got {len(head_weights)}"
        )
    return list(head_weights)


def _residual_column(residual: float | AnyArray, fused: torch.Tensor) -> torch.Tensor:
    """Return ρ as (batch or 1, query or 1, 1), checked to lie in [0, 1]."""
    weight = torch.as_tensor(residual, dtype=fused.dtype, device=fused.device)
    if weight.ndim > 0 and tuple(weight.shape) != tuple(fused.shape[:2]):
        raise ValueError(
            f"residual: expected a float or (batch, query) = {tuple(fused.shape[:2])}, "
            f"got shape {tuple(weight.shape)}"
        )
    check_share("residual", weight)
    return weight[..., None] if weight.ndim else weight.reshape(1, 1, 1)


def _check_start_layer(start_layer: int, layers: int) -> None:
    if not 0 <= start_layer < layers:
        raise ValueError(f"start_layer: expected one of 0…{layers - 1}, got {start_layer}")


def _mixed(fused: Array, residual: float | torch.Tensor, normalize: bool, name: str) -> Array:
    """Return Ã of one layer."""
    tensor = as_working(name, fused)
    check_row_sums(name, tensor)
    mixed = add_residual(tensor, residual)
    return restore(normalize_rows(mixed) if normalize else mixed, fused)
