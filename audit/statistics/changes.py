"""Where the mean of a series changes, by exact segmentation; for reading a history, never for judging it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST = 5
"""A shorter series has no change points: too little to tell a change from noise."""
FACTOR = 4.0
"""The penalty of one change point is this times log n."""
GAUSSIAN = 1.4826
"""Median absolute deviation to standard deviation, for Gaussian noise."""


def noise_scale(values: ArrayLike, known: float = 0.0) -> float:
    """Return the standard deviation of the noise: the larger of what is known and what the series shows.

    The series shows 1.4826 · median of the steps |x_(t+1) - x_t| / √2, which one jump does not raise and a
    slow drift does, so that a drift is not cut into steps.

    Parameters
    ----------
    values : float array (n,)
        Finite.
    known : float
        For example the standard deviation of replicates.

    Examples
    --------
    >>> noise_scale([0.0, 0.0, 0.0, 1.0, 1.0], known=0.1)
    0.1
    """
    steps = np.abs(np.diff(np.asarray(values, dtype=np.float64)))
    shown = GAUSSIAN * float(np.median(steps)) / np.sqrt(2) if len(steps) else 0.0
    return max(float(known), float(shown))


def change_points(values: ArrayLike, *, scale: float) -> tuple[int, ...]:
    """Return the indices at which a new mean begins.

    Minimises Σ over segments of Σ (x - mean)² / σ² plus 4 log n for each change, exactly, by optimal
    partitioning: F(t) = min over s < t of F(s) + C(s, t) + β (Jackson et al. 2005, IEEE Signal Processing
    Letters 12(2), 105-108, equation 3). A series that one straight line explains as well, at the price of
    one change, drifts and has no change points. With Gaussian noise of the given scale and neither, at most
    1 in 20 series of any length from 5 to 200 has one (tests/unit/test_changes.py).

    Parameters
    ----------
    values : float array (n,)
        Finite, in order of time.
    scale : float
        σ, the standard deviation of the noise.

    Returns
    -------
    tuple of int
        Ascending, each in 1 … n - 1; empty for fewer than five values.

    Raises
    ------
    ValueError
        When a value is not finite, or `scale` is not positive.

    Examples
    --------
    >>> change_points([0.1, 0.11, 0.1, 0.3, 0.31, 0.3], scale=0.01)
    (3,)
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not np.isfinite(series).all():
        raise ValueError(f"values: expected finite numbers (n,), got shape {series.shape}")
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale!r}")
    n = len(series)
    if n < FEWEST:
        return ()
    series, penalty = (series - series[0]) / scale, FACTOR * float(np.log(n))
    cost, found = _segment(series, penalty)
    return () if _line_cost(series) + penalty <= cost else found


def _line_cost(series: NDArray[np.float64]) -> float:
    """Return what is left over of a series beside its best straight line, as a sum of squares."""
    at = np.arange(len(series)) - (len(series) - 1) / 2
    centred = series - series.mean()
    return float((centred**2).sum() - (at @ centred) ** 2 / (at @ at))


def _segment(series: NDArray[np.float64], penalty: float) -> tuple[float, tuple[int, ...]]:
    """Return the lowest cost, and where its segments begin after the first."""
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (series, series**2))
    best = np.full(len(series) + 1, -penalty)
    last = np.zeros(len(series) + 1, dtype=np.intp)
    for end in range(1, len(series) + 1):
        start = np.arange(end)
        inside = squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)
        costs = best[start] + inside + penalty
        last[end] = int(np.argmin(costs))
        best[end] = costs[last[end]]
    found, end = [], int(last[-1])
    while end > 0:
        found.append(end)
        end = int(last[end])
    return float(best[-1]), tuple(found[::-1])
