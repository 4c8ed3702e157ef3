"""Measures of one map, or of one rollout matrix, alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import entr

from audit.metrics.maps import Result, as_result, checked_map
from audit.metrics.pairs import js_divergence


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
