"""Measures that know where positions lie: in a row, or on a patch grid."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.metrics.maps import Result, as_result, checked_map, checked_pair


def wasserstein(p: ArrayLike, q: ArrayLike) -> Result:
    r"""Return the Wasserstein-1 distance on positions i/(n - 1).

    .. math:: \frac{1}{n-1} \sum_{i<n-1} |P_i - Q_i|, \quad P, Q \text{ the cumulative sums}

    (Vallender, Theory of Probability and its Applications 18, 1974). The quantity of
    `scipy.stats.wasserstein_distance` on those positions.

    Parameters
    ----------
    p, q : (..., n)
        Maps over positions in their order; each sums to 1.

    Returns
    -------
    float or (...)
        In units of the input's length, in [0, 1]; at least the absolute centre-of-mass shift. 0 for a
        single position.

    Raises
    ------
    ValueError
        As for :func:`audit.metrics.js_divergence`.

    Examples
    --------
    >>> wasserstein([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    0.5
    """
    gaps = _cumulative_gaps(p, q)
    return as_result(np.abs(gaps).sum(-1) / max(gaps.shape[-1], 1))


def energy_distance(p: ArrayLike, q: ArrayLike) -> Result:
    r"""Return the energy distance on positions i/(n - 1).

    .. math:: \sqrt{\frac{2}{n-1} \sum_{i<n-1} (P_i - Q_i)^2}

    (Székely & Rizzo, Journal of Statistical Planning and Inference 143, 2013). The quantity of
    `scipy.stats.energy_distance` on those positions.

    Parameters
    ----------
    p, q : (..., n)
        Maps over positions in their order; each sums to 1.

    Returns
    -------
    float or (...)
        In [0, √2]; 0 for a single position.

    Raises
    ------
    ValueError
        As for :func:`audit.metrics.js_divergence`.

    Examples
    --------
    >>> energy_distance([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    1.0
    """
    gaps = _cumulative_gaps(p, q)
    return as_result(np.sqrt(2 * (gaps**2).sum(-1) / max(gaps.shape[-1], 1)))


def earth_mover_distance(p: ArrayLike, q: ArrayLike, grid: tuple[int, int]) -> Result:
    """Return the earth mover's distance between maps over a patch grid.

    The ground cost is the number of steps between neighbouring patches (L1), for which a minimum-cost
    flow along the grid's edges is exact (Ling & Okada, IEEE PAMI 29, 2007); it is solved by SciPy's
    HiGHS.

    Parameters
    ----------
    p, q : (..., n)
        Maps over patches, row by row; each sums to 1.
    grid : (rows, columns)
        With rows · columns = n.

    Returns
    -------
    float or (...)
        In units of the longest way, (rows - 1) + (columns - 1) steps: in [0, 1]. On a grid of one row
        it is :func:`wasserstein`.

    Raises
    ------
    ValueError
        As for :func:`audit.metrics.js_divergence`, or when the grid does not hold n patches.

    Examples
    --------
    >>> round(earth_mover_distance([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], (2, 2)), 9)
    1.0
    """
    before, after = checked_pair(p, q)
    check_grid(grid, before.shape[-1])
    steps = max(grid[0] - 1 + grid[1] - 1, 1)
    gaps = np.reshape(after - before, (-1, before.shape[-1]))
    costs = [grid_flow_cost(gap, grid) for gap in gaps]
    return as_result(np.reshape(costs, before.shape[:-1]) / steps)


def center_of_mass(p: ArrayLike) -> Result:
    """Return the mean position of a map, on positions i/(n - 1).

    Parameters
    ----------
    p : (..., n)
        Map over positions in their order; sums to 1.

    Returns
    -------
    float or (...)
        In [0, 1]; 0 for a single position.

    Raises
    ------
    ValueError
        As for :func:`audit.metrics.entropy`.

    Examples
    --------
    >>> center_of_mass([0.0, 0.5, 0.5])
    0.75
    """
    map_ = checked_map("p", p)
    return as_result(map_ @ np.linspace(0.0, 1.0, map_.shape[-1]))


def center_of_mass_shift(p: ArrayLike, q: ArrayLike) -> Result:
    """Return how far the mean position moved: after - before, on positions i/(n - 1).

    Parameters
    ----------
    p, q : (..., n)
        Maps over positions in their order; each sums to 1.

    Returns
    -------
    float or (...)
        In [-1, 1]; positive towards the end of the input. 0 for a single position.

    Raises
    ------
    ValueError
        As for :func:`audit.metrics.js_divergence`.

    Examples
    --------
    >>> center_of_mass_shift([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    0.5
    """
    gaps = _cumulative_gaps(p, q)
    return as_result(gaps.sum(-1) / max(gaps.shape[-1], 1))


def _cumulative_gaps(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Return P_i - Q_i for i < n - 1, where the last, zero by definition, is left out."""
    before, after = checked_pair(p, q)
    gaps: NDArray[np.float64] = np.cumsum(before - after, axis=-1)[..., :-1]
    return gaps


def check_grid(grid: tuple[int, int], positions: int) -> None:
    """Raise ValueError unless the grid holds as many patches as there are positions."""
    if len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] != positions:
        raise ValueError(f"grid: expected rows × columns = {positions} patches, got {tuple(grid)}")


def grid_flow_cost(gap: NDArray[np.float64], grid: tuple[int, int]) -> float:
    """Return the steps that the mass in `gap` travels along the grid's edges, at least."""
    from scipy.optimize import linprog

    if not gap.any() or gap.size < 2:
        return 0.0
    gap = gap - gap.mean()  # maps that differ by rounding alone need not balance
    incidence = _grid_incidence(grid)
    scale = np.abs(gap).max()
    solution = linprog(
        np.ones(incidence.shape[1]),
        A_eq=incidence,
        b_eq=gap / scale,
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not solution.success:
        raise ValueError(f"p: expected maps that flow into each other, got {solution.message}")
    return float(solution.fun * scale)


def _grid_incidence(grid: tuple[int, int]) -> Any:
    """Return what each directed edge of the grid brings to each patch, sparse (patch, edge)."""
    from scipy.sparse import csr_array

    patches = np.arange(grid[0] * grid[1]).reshape(grid)
    sides = [(patches[:, :-1], patches[:, 1:]), (patches[:-1], patches[1:])]
    tails = np.concatenate([tail.ravel() for tail, _ in sides])
    heads = np.concatenate([head.ravel() for _, head in sides])
    tails, heads = np.concatenate([tails, heads]), np.concatenate([heads, tails])
    edges = np.arange(len(tails))
    data = np.repeat([-1.0, 1.0], len(edges))
    index = (np.concatenate([tails, heads]), np.concatenate([edges, edges]))
    return csr_array((data, index), shape=(patches.size, len(edges)))
