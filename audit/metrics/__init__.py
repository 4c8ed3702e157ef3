"""Measures of one map against another, and of one map alone.

Maps run along the last axis and sum to 1; leading axes are broadcast and give the shape of the result
(a float for a single pair). ``p`` is before, ``q`` after. Sums are taken in float64.

What no measure here can tell: whether a position mattered to the output. They compare maps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import entr, rel_entr

from audit.metrics.maps import Result, as_result, checked_map, checked_pair
from audit.metrics.positions import (
    center_of_mass,
    center_of_mass_shift,
    earth_mover_distance,
    energy_distance,
    resample_grid,
    spread_to_words,
    wasserstein,
)

__all__ = [
    "center_of_mass",
    "center_of_mass_shift",
    "cosine_similarity",
    "depth_collapse",
    "earth_mover_distance",
    "energy_distance",
    "entropy",
    "hellinger",
    "js_distance",
    "js_divergence",
    "kl_divergence",
    "resample_grid",
    "sink_share",
    "spearman",
    "spread_to_words",
    "top_k_overlap",
    "total_variation",
    "wasserstein",
]

SMOOTHING = 1e-6
"""ε that :func:`kl_divergence` adds to every position."""

# --- one map against another ------------------------------------------------------------------


def js_divergence(p: ArrayLike, q: ArrayLike) -> Result:
    r"""Return the Jensen-Shannon divergence in bits.

    .. math:: \mathrm{JS} = \tfrac12 \mathrm{KL}(p \| m) + \tfrac12 \mathrm{KL}(q \| m),
              \quad m = \tfrac12 (p + q)

    (Lin, IEEE Transactions on Information Theory 37, 1991, equation 4.1).

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float or (...)
        Bits, in [0, 1]; 0 only for identical maps. Never above the total variation, and never raised
        by summing positions to regions.

    Raises
    ------
    ValueError
        When the maps differ in length, are negative, not finite, or do not sum to 1.

    Examples
    --------
    >>> round(js_divergence([0.5, 0.5], [1.0, 0.0]), 4)
    0.3113
    """
    before, after = checked_pair(p, q)
    middle = 0.5 * (before + after)
    nats = 0.5 * (rel_entr(before, middle) + rel_entr(after, middle)).sum(-1)
    return as_result(np.clip(nats / np.log(2), 0.0, 1.0))


def js_distance(p: ArrayLike, q: ArrayLike) -> Result:
    """Return the root of the Jensen-Shannon divergence in bits, which is a metric.

    The quantity of `scipy.spatial.distance.jensenshannon` with base 2 (Endres & Schindelin, IEEE
    Transactions on Information Theory 49, 2003).

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float or (...)
        In [0, 1]; 1 for maps without a common position.

    Raises
    ------
    ValueError
        As for :func:`js_divergence`.

    Examples
    --------
    >>> round(js_distance([0.5, 0.5], [1.0, 0.0]), 4)
    0.5579
    """
    return as_result(np.sqrt(js_divergence(p, q)))


def kl_divergence(p: ArrayLike, q: ArrayLike, *, smoothing: float = SMOOTHING) -> Result:
    r"""Return the Kullback-Leibler divergence of the smoothed maps in bits.

    .. math:: \sum_i p'_i \log_2 (p'_i / q'_i), \quad p' = (p + \epsilon)/(1 + n\epsilon)

    (Kullback & Leibler, Annals of Mathematical Statistics 22, 1951.)

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1. The divergence is not symmetric: p is before.
    smoothing : float > 0
        ε; the value depends on it wherever q is zero and p is not, so report it.

    Returns
    -------
    float or (...)
        Bits, >= 0, finite.

    Raises
    ------
    ValueError
        As for :func:`js_divergence`, or when `smoothing` is not positive.

    Examples
    --------
    >>> round(kl_divergence([1.0, 0.0], [0.5, 0.5]), 4)
    1.0
    """
    if not 0 < smoothing < np.inf:
        raise ValueError(f"smoothing: expected a positive number, got {smoothing}")
    before, after = checked_pair(p, q)
    total = 1 + before.shape[-1] * smoothing
    bits = rel_entr((before + smoothing) / total, (after + smoothing) / total).sum(-1) / np.log(2)
    return as_result(np.maximum(bits, 0.0))


def total_variation(p: ArrayLike, q: ArrayLike) -> Result:
    """Return half the summed absolute differences: the most that any region's share can have moved.

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float or (...)
        Share of the mass, in [0, 1].

    Raises
    ------
    ValueError
        As for :func:`js_divergence`.

    Examples
    --------
    >>> total_variation([0.5, 0.5], [1.0, 0.0])
    0.5
    """
    before, after = checked_pair(p, q)
    return as_result(0.5 * np.abs(after - before).sum(-1))


def hellinger(p: ArrayLike, q: ArrayLike) -> Result:
    r"""Return the Hellinger distance :math:`\sqrt{\tfrac12 \sum (\sqrt{p_i} - \sqrt{q_i})^2}`.

    It brackets the total variation: H² ≤ TV ≤ H·√(2 - H²) (Le Cam, 1986).

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float or (...)
        In [0, 1].

    Raises
    ------
    ValueError
        As for :func:`js_divergence`.

    Examples
    --------
    >>> hellinger([0.0, 1.0], [1.0, 0.0])
    1.0
    """
    before, after = checked_pair(p, q)
    squared = 0.5 * ((np.sqrt(before) - np.sqrt(after)) ** 2).sum(-1)
    return as_result(np.sqrt(np.minimum(squared, 1.0)))


def cosine_similarity(p: ArrayLike, q: ArrayLike) -> Result:
    """Return the cosine of the angle between two maps.

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float or (...)
        In [0, 1]; 1 for identical maps.

    Raises
    ------
    ValueError
        As for :func:`js_divergence`.

    Notes
    -----
    Dominated by the largest weights; it cannot tell a shift among small ones.

    Examples
    --------
    >>> cosine_similarity([1.0, 0.0], [0.0, 1.0])
    0.0
    """
    before, after = checked_pair(p, q)
    lengths = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    same = (before == after).all(-1)
    return as_result(np.where(same, 1.0, np.clip((before * after).sum(-1) / lengths, 0.0, 1.0)))


def spearman(p: ArrayLike, q: ArrayLike) -> float | np.ma.MaskedArray[Any, Any] | None:
    """Return Spearman's rank correlation of two maps; a constant map has none.

    The Pearson correlation of the average ranks (Spearman, American Journal of Psychology 15, 1904).

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.

    Returns
    -------
    float, None, or masked array (...)
        In [-1, 1]. None, or masked, where either map is constant: count these.

    Raises
    ------
    ValueError
        As for :func:`js_divergence`.

    Examples
    --------
    >>> round(spearman([0.1, 0.2, 0.7], [0.2, 0.3, 0.5]), 9)
    1.0
    >>> spearman([0.5, 0.5], [0.2, 0.8]) is None
    True
    """
    from scipy.stats import rankdata

    before, after = checked_pair(p, q)
    x, y = (rankdata(map_, axis=-1) - (before.shape[-1] + 1) / 2 for map_ in (before, after))
    spread = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    undefined = np.asarray(spread == 0)
    value = np.clip((x * y).sum(-1) / np.where(undefined, 1.0, spread), -1.0, 1.0)
    if undefined.ndim == 0:
        return None if undefined else float(value)
    return np.ma.MaskedArray(np.where(undefined, 0.0, value), mask=undefined)


def top_k_overlap(p: ArrayLike, q: ArrayLike, k: int) -> Result:
    """Return which share of the k largest positions two maps have in common.

    Parameters
    ----------
    p, q : (..., n)
        Maps; each sums to 1.
    k : int
        In [1, n]. Positions that tie with the k-th largest belong to the set, which may then be larger
        than k.

    Returns
    -------
    float or (...)
        Size of the common set divided by that of the larger set, in [0, 1].

    Raises
    ------
    ValueError
        As for :func:`js_divergence`, or when k lies outside [1, n].

    Examples
    --------
    >>> top_k_overlap([0.5, 0.3, 0.2], [0.5, 0.2, 0.3], k=2)
    0.5
    """
    before, after = checked_pair(p, q)
    if not isinstance(k, int | np.integer) or not 1 <= k <= before.shape[-1]:
        raise ValueError(f"k: expected an integer in [1, {before.shape[-1]}], got {k}")
    top = [map_ >= np.partition(map_, -k, axis=-1)[..., -k, None] for map_ in (before, after)]
    larger = np.maximum(top[0].sum(-1), top[1].sum(-1))
    return as_result((top[0] & top[1]).sum(-1) / larger)


# --- one map alone ----------------------------------------------------------------------------


def entropy(p: ArrayLike) -> Result:
    """Return the entropy of a map divided by log n: 0 on one position, 1 for the uniform map.

    (Shannon, Bell System Technical Journal 27, 1948.)

    Parameters
    ----------
    p : (..., n)
        Map; sums to 1.

    Returns
    -------
    float or (...)
        In [0, 1]; 0 for an input of one position.

    Raises
    ------
    ValueError
        When the map is negative, not finite, or does not sum to 1.

    Examples
    --------
    >>> entropy([0.25, 0.25, 0.25, 0.25])
    1.0
    """
    map_ = checked_map("p", p)
    nats = entr(map_).sum(-1)
    return as_result(np.clip(nats / np.log(max(map_.shape[-1], 2)), 0.0, 1.0))


def sink_share(p: ArrayLike, position: int | None = None) -> Result:
    """Return the share of a map's mass on its sink.

    Parameters
    ----------
    p : (..., n)
        Map; sums to 1.
    position : int, optional
        Where the sink is; by default wherever the largest weight is.

    Returns
    -------
    float or (...)
        In [0, 1].

    Raises
    ------
    ValueError
        As for :func:`entropy`, or when `position` does not exist.

    Examples
    --------
    >>> sink_share([0.7, 0.2, 0.1])
    0.7
    """
    map_ = checked_map("p", p)
    if position is None:
        return as_result(map_.max(-1))
    if not -map_.shape[-1] <= position < map_.shape[-1]:
        raise ValueError(f"position: expected one of {map_.shape[-1]} positions, got {position}")
    return as_result(map_[..., position])


def depth_collapse(rollout: ArrayLike, *, max_rows: int = 64) -> Result:
    """Return the mean JS divergence between the rows of a rollout matrix, in bits.

    Near 0 every output position has the same map, as in deep stacks: the row that is read says little
    about its own position.

    Parameters
    ----------
    rollout : (..., query, key)
        Rows sum to 1.
    max_rows : int
        At most this many rows, evenly spaced, are compared in pairs.

    Returns
    -------
    float or (...)
        In [0, 1]; 0 for a single row.

    Raises
    ------
    ValueError
        When a row is not a map, or `max_rows` is below 2.

    Examples
    --------
    >>> depth_collapse([[1.0, 0.0], [0.0, 1.0]]), depth_collapse([[0.5, 0.5], [0.5, 0.5]])
    (1.0, 0.0)
    """
    if max_rows < 2:
        raise ValueError(f"max_rows: expected an integer >= 2, got {max_rows}")
    rows = checked_map("rollout", rollout)
    if rows.ndim < 2:
        raise ValueError(f"rollout: expected (..., query, key), got shape {rows.shape}")
    count = rows.shape[-2]
    rows = rows[..., np.unique(np.linspace(0, count - 1, min(count, max_rows)).round().astype(int)), :]
    count = rows.shape[-2]
    total = np.zeros(rows.shape[:-2])
    for index in range(count - 1):
        pairs = js_divergence(rows[..., index, None, :], rows[..., index + 1 :, :])
        total = total + np.asarray(pairs).sum(-1)
    return as_result(total / max(count * (count - 1) // 2, 1))
