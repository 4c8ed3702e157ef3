"""Measures of one map against another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import rel_entr

from audit.metrics.maps import Result, as_result, checked_pair

SMOOTHING = 1e-6
"""ε that :func:`kl_divergence` adds to every position."""


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
