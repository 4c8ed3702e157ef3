"""Per-head rollout: each head of one layer over the merged heads of the layers below."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from audit.methods._arrays import (
    Array,
    Residual,
    as_layers,
    as_working,
    check_row_sums,
    check_square,
    check_weights,
    fill_empty_rows,
    normalize_rows,
    residual_per_layer,
    restore,
)
from audit.methods.rollout import add_residual


def per_head_rollout(
    attentions: Sequence[Array] | Array,
    *,
    residual: Residual = 0.5,
    layer: int = -1,
    same_head: bool = False,
    normalize: bool = True,
) -> Array:
    r"""Return a rollout matrix for each head of one layer.

    .. math:: R^{(l,k)} = \tilde A^{(l,k)} R_{l-1}

    with the lower layers head-merged, since head indices do not correspond across layers; after the
    rollout of Abnar & Zuidema (ACL 2020, arXiv 2005.00928).

    Parameters
    ----------
    attentions : sequence of (batch, head, query, key), or (layer, batch, head, query, key)
        Attention weights; rows over keys sum to 1.
    residual : float, one float per layer, or (layer, batch, query)
        Weight ρ of the identity in [0, 1].
    layer : int
        Whose heads; layers above it are not used. Negative numbers count from the last.
    same_head : bool
        Multiply head k of every layer instead of the merged lower layers.
    normalize : bool
        Divide each row of every matrix by its sum.

    Returns
    -------
    (batch, head, query, key), float32 or float64
        Rows are distributions over the input positions. Without `same_head` their mean over heads is
        the plain rollout of the layers up to `layer`.

    Raises
    ------
    ValueError
        When an argument has the wrong shape or range.

    Notes
    -----
    It tells which heads of a layer look at a region. It cannot tell which heads the output uses, and
    across two checkpoints a head's index names the same head only if one was fine-tuned from the
    other.

    Examples
    --------
    >>> import numpy as np
    >>> identity, swap = np.eye(2), np.eye(2)[::-1]
    >>> per_head_rollout(np.stack([identity, swap])[None, None])[0].tolist()
    [[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]
    """
    layers = as_layers("attentions", attentions)
    check_square("attentions", layers)
    last = _layer_index(layer, len(layers))
    if same_head and len({found.shape[1] for found in layers[: last + 1]}) > 1:
        raise ValueError("attentions: expected the same number of heads in every layer for same_head=True")
    batch, _, queries, _ = layers[0].shape
    weights = residual_per_layer("residual", residual, len(layers), (batch, queries))
    rollout: torch.Tensor | None = None
    for index in range(last + 1):
        heads = as_working(f"attentions[{index}]", layers[index])
        if not same_head and index < last:
            heads = heads.mean(1, keepdim=True)
        mixed = _mix_heads(heads, weights[index], normalize, f"attentions[{index}]")
        rollout = mixed if rollout is None else mixed @ rollout.to(mixed.device)
    return restore(rollout, layers[0]) if rollout is not None else layers[0]


def _mix_heads(
    heads: torch.Tensor, residual: float | torch.Tensor, normalize: bool, name: str
) -> torch.Tensor:
    """Return Ã of every head (batch, head, query, key)."""
    check_weights(name, heads)
    check_row_sums(name, heads)
    batch, count, queries, keys = heads.shape
    filled, _ = fill_empty_rows(heads.reshape(batch * count, queries, keys))
    if isinstance(residual, torch.Tensor):
        residual = residual.repeat_interleave(count, dim=0)
    mixed = add_residual(filled, residual)
    return (normalize_rows(mixed) if normalize else mixed).reshape(heads.shape)


def _layer_index(layer: int, layers: int) -> int:
    if not -layers <= layer < layers:
        raise ValueError(f"layer: expected one of {layers} layers, got {layer}")
    return layer % layers
