"""Rates of alarms from shifts: the replicate test over all splits, floors, and intervals over bases.

Shifts are mean shares of one region after minus before; nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]
LEVEL = 0.05
RESAMPLES = 9999


@dataclass(frozen=True)
class Rate:
    """A rate with its 95 % interval over bases."""

    value: float
    low: float
    high: float
    bases: int

    @property
    def width(self) -> float:
        """Return the width of the interval."""
        return self.high - self.low

    def holds(self, value: float) -> bool:
        """Return whether the interval contains a value."""
        return self.low <= value <= self.high


def rejections(candidates: ArrayLike, replicates: ArrayLike, *, level: float = LEVEL) -> NDArray[np.bool_]:
    """Return for which candidates the unadjusted two-sided replicate test rejects.

    The decision of :func:`audit.replicate_test`, for many splits at once.

    Parameters
    ----------
    candidates : array (..., candidate)
    replicates : array (..., replicate)
        Without spread there is no test, and nothing is rejected.
    """
    x, s = np.asarray(candidates, dtype=np.float64), np.asarray(replicates, dtype=np.float64)
    k = s.shape[-1]
    mean, sd = s.mean(axis=-1, keepdims=True), s.std(axis=-1, ddof=1, keepdims=True)
    critical = special.stdtrit(k - 1, 1 - level / 2) * sd * np.sqrt(1 + 1 / k)
    return np.asarray((np.abs(x - mean) > critical) & (sd > 1e-12 * np.abs(s).max(axis=-1, keepdims=True)))


@lru_cache(maxsize=8)
def _splits(runs: int, k: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    chosen = np.array(list(combinations(range(runs), k)))
    rest = np.array([[i for i in range(runs) if i not in one] for one in map(set, chosen.tolist())])
    return chosen, rest


def plain_rate(harmless: ArrayLike, k: int = 5) -> float:
    """Return the share of harmless candidates that alarm: the first `k` runs are the replicates."""
    shifts = np.asarray(harmless, dtype=np.float64)
    return float(rejections(shifts[k:], shifts[:k]).mean())


def split_rate(harmless: ArrayLike, k: int = 5) -> float:
    """Return the mean of the same over every choice of `k` replicates: a complete U-statistic.

    Its expectation is that of :func:`plain_rate` where the runs are exchangeable; its variance is smaller.
    """
    shifts = np.asarray(harmless, dtype=np.float64)
    chosen, rest = _splits(len(shifts), k)
    return float(rejections(shifts[rest], shifts[chosen]).mean())


def alarm_rate(candidates: ArrayLike, pool: ArrayLike, k: int = 5) -> Array:
    """Return for each candidate the share of choices of `k` replicates from `pool` that reject it."""
    given, shifts = np.asarray(candidates, dtype=np.float64), np.asarray(pool, dtype=np.float64)
    chosen, _ = _splits(len(shifts), k)
    return np.asarray(
        rejections(np.broadcast_to(given, (len(chosen), *given.shape)), shifts[chosen]).mean(axis=0)
    )


def leave_one_out_rate(shifts: ArrayLike) -> float:
    """Return the share of runs that alarm when all the others are the replicates."""
    return split_rate(shifts, k=len(np.asarray(shifts)) - 1)


def naive_rate(shares: ArrayLike) -> float:
    """Return the share of pairs of harmless runs whose probes a paired test tells apart.

    Parameters
    ----------
    shares : array (run, probe)
    """
    values = np.asarray(shares, dtype=np.float64)
    values = values[:, np.isfinite(values).all(axis=0)]
    first, second = np.triu_indices(len(values), 1)
    differences = values[first] - values[second]
    differences = differences[(differences != 0).any(axis=1)]
    if not differences.size:
        return 0.0
    found = stats.wilcoxon(differences, axis=1, method="asymptotic")
    return float((found.pvalue < LEVEL).sum() / len(first))


def frozen_limit(harmless: ArrayLike) -> float:
    """Return the size of shift that 5 % of harmless runs (of any base) exceed."""
    return float(np.quantile(np.abs(np.asarray(harmless, dtype=np.float64)), 1 - LEVEL))


def over_bases(values: Sequence[float], *, seed: int = 0) -> Rate:
    """Return the mean over bases with a percentile bootstrap interval that resamples bases.

    Raises
    ------
    ValueError
        When there is no base.
    """
    return pooled([[one] for one in values], seed=seed)


def pooled(groups: Sequence[ArrayLike], *, seed: int = 0) -> Rate:
    """Return the mean over everything in `groups`, one group a base, resampled by base.

    Bases whose group is empty say nothing and are left out.

    Raises
    ------
    ValueError
        When all groups are empty.
    """
    kept = [np.asarray(one, dtype=np.float64) for one in groups if np.size(one)]
    if not kept:
        raise ValueError("groups: expected at least one value, got none")
    sums, counts = np.array([one.sum() for one in kept]), np.array([one.size for one in kept])
    rows = np.random.default_rng(seed).integers(0, len(kept), (RESAMPLES, len(kept)))
    means = sums[rows].sum(axis=1) / counts[rows].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Rate(float(sums.sum() / counts.sum()), float(low), float(high), len(kept))


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float:
    """Return Spearman's correlation; 0 when either is constant."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(stats.spearmanr(a, b).statistic)
