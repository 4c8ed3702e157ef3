"""Resampling of probes or groups: mean bootstrap, sign flips, two-sample permutation.

Everything works on *units*: a unit is a probe, or a group of probes where probes have groups. Each
unit is reduced to its sum and its count of non-missing probes, so that a resample is one matrix
product. Resamples are drawn one after the other from one seeded generator, and `chunk` only bounds
how many of them are in memory, so that it changes no result.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

_CHUNK_BYTES = 16_000_000


@dataclass(frozen=True)
class Units:
    """Sums and counts of the non-missing probes of each unit, float64 (unit, column)."""

    sums: Array
    counts: Array

    @property
    def present(self) -> NDArray[np.intp]:
        """Return how many units have a value, for each column."""
        return np.asarray((self.counts > 0).sum(axis=0), dtype=np.intp)

    @property
    def mean(self) -> Array:
        """Return the mean over probes of each column; NaN where no probe has a value."""
        total = self.counts.sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(total > 0, self.sums.sum(axis=0) / total, np.nan)

    def centred(self) -> Units:
        """Return the units with the mean of each column taken off."""
        return Units(self.sums - np.nan_to_num(self.mean) * self.counts, self.counts)


def encode_groups(groups: Sequence[str | None] | None, n: int) -> Codes | None:
    """Return a code for each probe, or None when no probe has a group.

    A probe without a group beside probes with groups is a unit of its own.

    Raises
    ------
    ValueError
        When the number of groups is not the number of probes.
    """
    if groups is None:
        return None
    if len(groups) != n:
        raise ValueError(f"groups: expected one entry for each of {n} probes, got {len(groups)}")
    if all(group is None for group in groups):
        return None
    keys = [("probe", str(i)) if group is None else ("group", str(group)) for i, group in enumerate(groups)]
    order = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    return np.array([order[key] for key in keys], dtype=np.intp)


def collapse(values: Array, codes: Codes | None) -> Units:
    """Return the units of `values` (probe, column); NaN marks a missing value."""
    present = ~np.isnan(values)
    sums, counts = np.where(present, values, 0.0), present.astype(np.float64)
    if codes is None:
        return Units(sums, counts)
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    return Units(np.add.reduceat(sums[order], starts), np.add.reduceat(counts[order], starts))


def variance_of_mean(units: Units) -> Array:
    """Return the variance of each column's mean over units (linearised ratio estimator).

    With one probe a unit this is s²/n. With groups it is the usual cluster estimator
    g/(g−1)·Σ_g(Σ_{p∈g} x_p − x̄·n_g)²/N² (Cochran, Sampling Techniques, 3rd ed., eq. 9A.2, equal
    weights). NaN with fewer than two units.
    """
    g, total = units.present, units.counts.sum(axis=0)
    squares = (units.centred().sums ** 2).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(g > 1, g / (g - 1.0) * squares / total**2, np.nan)


# --- bootstrap --------------------------------------------------------------------------------


def _weight_chunks(n: int, resamples: int, seed: Sequence[int], chunk: int | None) -> Iterator[Array]:
    """Yield multinomial counts (resample, unit): how often each unit is drawn."""
    rows = chunk or max(1, min(256, _CHUNK_BYTES // (8 * n)))
    generator = np.random.default_rng(list(seed))
    for start in range(0, resamples, rows):
        weights = np.empty((min(rows, resamples - start), n))
        for row in weights:
            row[:] = np.bincount(generator.integers(0, n, n), minlength=n)
        yield weights


def bootstrap_means(units: Units, *, resamples: int, seed: Sequence[int], chunk: int | None = None) -> Array:
    """Return the means of `resamples` draws of units with replacement, (resample, column).

    A draw that holds no value of a column repeats the column's mean, which can only happen where
    nearly all of it is missing.
    """
    mean, centred = np.nan_to_num(units.mean), units.centred()
    patterns, inverse = np.unique(units.counts, axis=1, return_inverse=True)
    means = np.empty((resamples, units.sums.shape[1]))
    done = 0
    for weights in _weight_chunks(len(units.sums), resamples, seed, chunk):
        drawn = (weights @ patterns)[:, inverse.reshape(-1)]
        block = means[done : done + len(weights)]
        np.divide(weights @ centred.sums, drawn, out=block, where=drawn > 0)
        block[drawn == 0] = 0.0
        block += mean
        done += len(weights)
    return means


def column_quantiles(draws: Array, levels: Array) -> Array:
    """Return one quantile for each column of `draws` (resample, column), at its own level."""
    ordered, n = np.sort(draws, axis=0), len(draws)
    place = np.clip(levels * (n + 1) - 1, 0, n - 1)
    below = np.floor(place).astype(np.intp)
    above = np.minimum(below + 1, n - 1)
    columns = np.arange(draws.shape[1])
    low, high = ordered[below, columns], ordered[above, columns]
    return np.asarray(low + (place - below) * (high - low))


def percentile_interval(draws: Array, present: NDArray[np.intp], alpha: float) -> tuple[Array, Array]:
    """Return the expanded percentile interval of level 1 − 2α for each column.

    The plain percentile interval is too short by √((n−1)/n)·z/t; the levels are moved to
    Φ(±√(n/(n−1))·t_{n−1}) (Hesterberg, The American Statistician 69 (2015) 371, section 4.3.1).
    """
    df = np.maximum(present - 1.0, 1.0)
    tail = special.ndtr(np.sqrt((df + 1) / df) * special.stdtrit(df, alpha))
    return column_quantiles(draws, tail), column_quantiles(draws, 1 - tail)


def bca_interval(draws: Array, units: Units, alpha: float) -> tuple[Array, Array]:
    """Return the bias-corrected accelerated interval of level 1 − 2α for each column.

    Efron, Better bootstrap confidence intervals, JASA 82 (1987) 171, eq. 4.3 and 6.6: the
    acceleration comes from leaving out one unit at a time. A constant column gives (mean, mean).
    """
    mean = units.mean
    share = np.mean(draws < mean, axis=0) + np.mean(draws == mean, axis=0) / 2
    n = len(draws)
    z0 = special.ndtri(np.clip(share, 0.5 / n, 1 - 0.5 / n))
    total, count = units.sums.sum(axis=0), units.counts.sum(axis=0)
    left = count - units.counts
    with np.errstate(invalid="ignore", divide="ignore"):
        jackknife = np.where((units.counts > 0) & (left > 0), (total - units.sums) / left, np.nan)
        centre = np.nansum(jackknife, axis=0) / np.maximum((~np.isnan(jackknife)).sum(axis=0), 1)
        away = np.nan_to_num(centre - jackknife)
        spread = (away**2).sum(axis=0)
        acceleration = np.where(spread > 0, (away**3).sum(axis=0) / (6 * spread**1.5), 0.0)

    def bound(z: float) -> Array:
        shifted = z0 + z
        level = special.ndtr(z0 + shifted / (1 - acceleration * shifted))
        return column_quantiles(draws, np.asarray(level))

    z = float(special.ndtri(alpha))
    return bound(z), bound(-z)


# --- permutation ------------------------------------------------------------------------------


def sign_flip_sums(
    sums: Array, *, resamples: int, seed: Sequence[int], chunk: int | None = None
) -> Iterator[Array]:
    """Yield the sums over units after flipping the sign of each unit at random, (resample, column)."""
    n = len(sums)
    rows = chunk or max(1, min(256, _CHUNK_BYTES // (8 * n)))
    generator = np.random.default_rng(list(seed))
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        packed = np.stack([generator.integers(0, 256, (n + 7) // 8, dtype=np.uint8) for _ in range(size)])
        signs = np.unpackbits(packed, axis=1, count=n).astype(np.float64) * 2 - 1
        yield signs @ sums


def _threshold(observed: Array) -> Array:
    """Return |observed| less a rounding error, so that exact ties count as reached."""
    return np.asarray(np.abs(observed) * (1 - 1e-10))


@dataclass(frozen=True)
class SignFlips:
    """Sign flips of some columns, all with the same signs.

    Attributes
    ----------
    pvalue : float64 (column,)
        Two-sided (k+1)/(N+1) of each column's mean being 0.
    statistic : float64 (column,)
        |Σ x| / √(Σ x²), less a rounding error.
    largest : float64 (resample,)
        Largest statistic over the columns after each flip.
    """

    pvalue: Array
    statistic: Array
    largest: Array


def sign_flips(units: Units, *, resamples: int, seed: Sequence[int]) -> SignFlips:
    """Flip the sign of each unit at random; equal seeds and units give equal signs for other columns."""
    scale = np.sqrt((units.sums**2).sum(axis=0))
    sums = np.divide(units.sums, scale, out=np.zeros_like(units.sums), where=scale > 0)
    statistic = _threshold(sums.sum(axis=0))
    reached, largest = np.zeros(sums.shape[1]), np.zeros(resamples)
    done = 0
    for drawn in sign_flip_sums(sums, resamples=resamples, seed=seed):
        size = np.abs(drawn)
        reached += (size >= statistic).sum(axis=0)
        largest[done : done + len(size)] = size.max(axis=1, initial=0.0)
        done += len(size)
    return SignFlips((reached + 1) / (resamples + 1), statistic, largest)


def max_pvalues(flips: Sequence[SignFlips]) -> Array:
    """Return single-step max-T adjusted p-values over blocks of columns flipped with the same signs."""
    largest = np.sort(np.maximum.reduce([one.largest for one in flips]))
    statistic = np.concatenate([one.statistic for one in flips])
    return np.asarray((resamples_at_least(largest, statistic) + 1) / (len(largest) + 1))


def sign_flip_max_pvalues(units: Units, *, resamples: int, seed: Sequence[int]) -> Array:
    """Return single-step max-T adjusted p-values: every column is flipped with the same signs."""
    return max_pvalues([sign_flips(units, resamples=resamples, seed=seed)])


def resamples_at_least(ordered: Array, threshold: Array) -> NDArray[Any]:
    """Return how many entries of the sorted `ordered` are at least each `threshold`."""
    return len(ordered) - np.searchsorted(ordered, threshold, side="left")


def wilcoxon_pvalues(differences: Array) -> Array:
    """Return the two-sided signed-rank p-value of each column of paired differences; NaN where undefined.

    Zero differences are left out (Wilcoxon, Biometrics Bulletin 1 (1945) 80); NaN is missing.
    """
    from scipy import stats

    found = np.full(differences.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few or tied probes: the p-value is approximate
        for i, column in enumerate(differences.T):
            values = column[~np.isnan(column)]
            if values.any():
                found[i] = stats.wilcoxon(values).pvalue
    return found


def two_sample_pvalues(
    first: Units, second: Units, *, resamples: int, seed: Sequence[int], chunk: int | None = None
) -> Array:
    """Return the two-sided permutation p-value of a difference of means, units relabelled at random.

    A relabelling that leaves one side of a column without values counts as reached.
    """
    sums = np.concatenate([first.sums, second.sums])
    counts = np.concatenate([first.counts, second.counts])
    pooled = Units(sums, counts).centred()
    n, taken = len(sums), len(second.sums)
    threshold = _threshold(second.mean - first.mean)
    total = counts.sum(axis=0)
    rows = chunk or max(1, min(256, _CHUNK_BYTES // (8 * n)))
    generator = np.random.default_rng(list(seed))
    reached = np.zeros(sums.shape[1])
    for start in range(0, resamples, rows):
        chosen = np.zeros((min(rows, resamples - start), n))
        for row in chosen:
            row[generator.permutation(n)[:taken]] = 1.0
        inside, size = chosen @ pooled.sums, chosen @ pooled.counts
        with np.errstate(invalid="ignore", divide="ignore"):
            # The pooled sums are centred, so that what is not chosen sums to −inside.
            difference = np.abs(inside / size + inside / (total - size))
        reached += (~(difference < threshold)).sum(axis=0)
    return (reached + 1) / (resamples + 1)
