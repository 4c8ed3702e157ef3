"""Build the cells of aligned tables: estimates over probes, and the replicates beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from audit.calibrate import replicate_test
from audit.records import STRONG_KINDS, Cell, Column, Effect, ReplicateTest
from audit.statistics.resampling import (
    Array,
    Codes,
    SignFlips,
    Units,
    bca_interval,
    bootstrap_means,
    collapse,
    max_pvalues,
    percentile_interval,
    sign_flips,
    two_sample_pvalues,
    variance_of_mean,
    wilcoxon_pvalues,
)

Interval = Literal["percentile", "bca"]
_BLOCK = 512  # columns whose resamples are in memory at once

NO_CHANGE = "no change at all"
ONE_PROBE = "one probe: no interval"
ONE_GROUP = "one group: no interval"
EMPTY = "the region is missing in every probe"
NO_SHARE_BEFORE = "the region's share before is 0 or too near to it for a ratio"


@dataclass(frozen=True)
class Options:
    """What all cells of one call share."""

    effect: Effect
    segment: str | None
    alpha: float
    resamples: int
    seed: int
    interval: Interval = "percentile"
    sizes: Sequence[float | None] | None = None
    ranks: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha: expected a number in (0, 0.5), got {self.alpha!r}")
        if self.resamples < 1:
            raise ValueError(f"resamples: expected at least 1, got {self.resamples!r}")
        if self.interval not in ("percentile", "bca"):
            raise ValueError(f"interval: expected 'percentile' or 'bca', got {self.interval!r}")


@dataclass(frozen=True)
class Replicates:
    """The measure of each replicate, and v of STATISTICS.md, over columns.

    `values` is float64 (replicate, column); NaN where undefined.
    """

    values: Array
    variance: Array
    df: Array
    strong: NDArray[np.bool_]


@dataclass(frozen=True)
class Estimates:
    """One measure of every column, float64 (column,); NaN where undefined."""

    measure: str
    value: Array
    low: Array
    high: Array
    before: Array
    after: Array
    sd: Array | None = None
    pvalue: Array | None = None
    adjusted: Array | None = None
    wilcoxon: Array | None = None


@dataclass(frozen=True)
class Numbers:
    """How many probes and clusters a column rests on, (column,); the smaller side when unpaired."""

    probes: NDArray[np.intp]
    missing: NDArray[np.intp]
    units: NDArray[np.intp]
    grouped: bool


def strong_mask(kinds: Sequence[str], k: int) -> NDArray[np.bool_]:
    """Return which replicates may decide: all when their kinds are not given, or when all are weak.

    Weak kinds understate the spread; where all are weak their numbers are shown, and the gate refuses
    to decide by them.

    Raises
    ------
    ValueError
        When there are kinds, but not one for each replicate.
    """
    if not kinds:
        return np.ones(k, dtype=bool)
    if len(kinds) != k:
        raise ValueError(f"replicate_kinds: expected one for each of {k} replicates, got {len(kinds)}")
    strong = np.array([kind in STRONG_KINDS for kind in kinds], dtype=bool)
    return strong if strong.any() else np.ones(k, dtype=bool)


def spread(values: Array) -> Array:
    """Return the SD over probes of each column (n − 1); 0 for rounding errors, NaN below two probes."""
    n = (~np.isnan(values)).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=0) / n
        sd = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / (n - 1.0))
        scale = np.abs(np.nan_to_num(values)).max(axis=0, initial=0.0)
    return np.where(n < 2, np.nan, np.where(sd <= 1e-13 * scale, 0.0, sd))


def _bounds(draws: Array, units: Units, options: Options) -> tuple[Array, Array]:
    if options.interval == "bca":
        return bca_interval(draws, units, options.alpha)
    return percentile_interval(draws, units.present, options.alpha)


def _ratio(after: Array, before: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(before > 0, after / before, np.nan)


def _ratio_bounds(
    after: Array, before: Array, present: NDArray[np.intp], alpha: float
) -> tuple[Array, Array]:
    draws = _ratio(after, before)
    undefined = np.isnan(draws).any(axis=0)
    low, high = percentile_interval(np.where(np.isnan(draws), 0.0, draws), present, alpha)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)


def paired_estimates(before: Array, after: Array, codes: Codes | None, options: Options) -> list[Estimates]:
    """Return shift, level and ratio of paired tables (probe, column) with the same missing entries."""
    blocks = [slice(i, i + _BLOCK) for i in range(0, before.shape[1], _BLOCK)]
    flips = [_flips(after[:, block] - before[:, block], codes, options) for block in blocks]
    parts = [_paired_block(before[:, block], after[:, block], codes, options) for block in blocks]
    shift, *others = (_concatenate([part[i] for part in parts]) for i in range(3))
    tested = replace(
        shift,
        pvalue=np.concatenate([one.pvalue for one in flips]),
        adjusted=max_pvalues(flips),
        wilcoxon=wilcoxon_pvalues(after - before) if codes is None and options.ranks else None,
    )
    return [tested, *others]


def _flips(difference: Array, codes: Codes | None, options: Options) -> SignFlips:
    return sign_flips(collapse(difference, codes), resamples=options.resamples, seed=[options.seed, 1])


def _concatenate(parts: Sequence[Estimates]) -> Estimates:
    def join(name: str) -> Array | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    names = ("value", "low", "high", "before", "after", "sd")
    return Estimates(parts[0].measure, **{name: join(name) for name in names})  # type: ignore[arg-type]


def _paired_block(before: Array, after: Array, codes: Codes | None, options: Options) -> list[Estimates]:
    columns = before.shape[1]
    difference = after - before
    units = collapse(np.concatenate([difference, after], axis=1), codes)
    draws = bootstrap_means(units, resamples=options.resamples, seed=[options.seed, 0])
    low, high = _bounds(draws, units, options)
    mean, shift = units.mean, Units(units.sums[:, :columns], units.counts[:, :columns])
    moved, old = mean[:columns], mean[columns:] - mean[:columns]
    ratio_low, ratio_high = _ratio_bounds(
        draws[:, columns:], draws[:, columns:] - draws[:, :columns], shift.present, options.alpha
    )
    ends = (old, mean[columns:])
    return [
        Estimates("shift", moved, low[:columns], high[:columns], *ends, spread(difference)),
        Estimates("level", mean[columns:], low[columns:], high[columns:], *ends, spread(after)),
        Estimates("ratio", _ratio(ends[1], ends[0]), ratio_low, ratio_high, *ends),
    ]


def two_sample_estimates(
    first: Array, second: Array, codes: tuple[Codes | None, Codes | None], options: Options
) -> list[Estimates]:
    """Return shift (second − first), level and ratio of two independent samples (probe, column)."""
    one, two = collapse(first, codes[0]), collapse(second, codes[1])
    old = bootstrap_means(one, resamples=options.resamples, seed=[options.seed, 0])
    new = bootstrap_means(two, resamples=options.resamples, seed=[options.seed, 2])
    present = np.minimum(one.present, two.present)
    low, high = percentile_interval(new - old, present, options.alpha)
    level_low, level_high = percentile_interval(new, two.present, options.alpha)
    ratio_low, ratio_high = _ratio_bounds(new, old, present, options.alpha)
    pvalue = two_sample_pvalues(one, two, resamples=options.resamples, seed=[options.seed, 1])
    ends = (one.mean, two.mean)
    deviations = np.concatenate([first - ends[0], second - ends[1]])
    return [
        Estimates("shift", ends[1] - ends[0], low, high, *ends, spread(deviations), pvalue),
        Estimates("level", ends[1], level_low, level_high, *ends, spread(second)),
        Estimates("ratio", _ratio(ends[1], ends[0]), ratio_low, ratio_high, *ends),
    ]


def count_numbers(values: Sequence[Array], codes: Sequence[Codes | None]) -> Numbers:
    """Return the numbers of probes and units of each column, the smaller over the samples."""
    units = [collapse(sample, code) for sample, code in zip(values, codes, strict=True)]
    probes = np.stack([(~np.isnan(sample)).sum(axis=0) for sample in values])
    missing = np.stack([np.isnan(sample).sum(axis=0) for sample in values])
    smaller = np.argmin(probes, axis=0)
    columns = np.arange(probes.shape[1])
    return Numbers(
        probes=probes[smaller, columns],
        missing=missing[smaller, columns],
        units=np.stack([one.present for one in units]).min(axis=0),
        grouped=any(code is not None for code in codes),
    )


def paired_replicates(
    before: Array,
    after: Array,
    replicates: Sequence[Array],
    codes: Codes | None,
    strong: NDArray[np.bool_],
) -> dict[str, Replicates]:
    """Return the replicates' shift, level and ratio, and the variance over probes of each excess."""
    level, old = np.empty((2, len(replicates), after.shape[1]))
    deciding = np.zeros_like(after)
    for i, shares in enumerate(replicates):
        level[i] = collapse(np.where(np.isnan(after), np.nan, shares), None).mean
        old[i] = collapse(np.where(np.isnan(shares), np.nan, before), None).mean
        if strong[i]:
            deciding += shares
    excess = after - deciding / strong.sum()
    total = np.nan_to_num(collapse(before, None).mean)
    # Linearised: (mean after − mean replicate) / mean before, with before resampled as well.
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = (excess - np.nan_to_num(collapse(excess, None).mean) * before / total) / total
    scaled[~np.isfinite(scaled)] = np.nan
    plain, relative = collapse(excess, codes), collapse(scaled, codes)
    plain_v, relative_v = (plain, variance_of_mean(plain)), (relative, variance_of_mean(relative))

    def pack(values: Array, units: Units, variance: Array) -> Replicates:
        return Replicates(values, variance, np.asarray(units.present - 1.0, dtype=np.float64), strong)

    return {
        "shift": pack(level - old, *plain_v),
        "level": pack(level, *plain_v),
        "ratio": pack(_ratio(level, old), *relative_v),
    }


def build_cells(
    columns: Sequence[Column],
    estimates: Sequence[Estimates],
    numbers: Numbers,
    options: Options,
    replicates: dict[str, Replicates] | None = None,
) -> list[Cell]:
    """Return one cell for each measure and column, without any NaN."""
    return [
        _cell(column, i, one, numbers, options=options, null=(replicates or {}).get(one.measure))
        for one in estimates
        for i, column in enumerate(columns)
    ]


def number(value: float | None) -> float | None:
    """Return `value` as a float, None where it is not finite."""
    return float(value) if value is not None and np.isfinite(value) else None


def _pair(low: float, high: float) -> tuple[float, float] | None:
    ends = (number(low), number(high))
    return None if ends[0] is None or ends[1] is None else (ends[0], ends[1])


def _reason(one: Estimates, i: int, numbers: Numbers) -> str | None:
    if numbers.probes[i] == 0:
        return EMPTY
    if one.measure == "ratio" and not np.isfinite(one.low[i]):
        return NO_SHARE_BEFORE
    if numbers.units[i] < 2:
        return ONE_PROBE if numbers.probes[i] < 2 else ONE_GROUP
    if one.measure == "shift" and one.value[i] == 0 and one.sd is not None and one.sd[i] == 0:
        return NO_CHANGE
    return None


def _cell(
    column: Column, i: int, one: Estimates, numbers: Numbers, *, options: Options, null: Replicates | None
) -> Cell:
    empty = numbers.probes[i] == 0
    value = None if empty else number(one.value[i])
    sd = None if one.sd is None else number(one.sd[i])
    judged = value is not None and numbers.units[i] > 1
    shift = one.measure == "shift"
    values, variance, excess = _against_replicates(value, i, null, options.alpha)
    return Cell(
        measure=one.measure,
        region=column.region,
        stream=column.stream,
        layer=column.layer,
        effect=options.effect,
        segment=options.segment,
        value=value,
        interval=_pair(one.low[i], one.high[i]) if judged else None,
        before=number(one.before[i]),
        after=number(one.after[i]),
        sd=sd,
        effect_size=value / sd if shift and value is not None and sd else None,
        size=None if options.sizes is None else number(options.sizes[i]),
        pvalue=float(one.pvalue[i]) if one.pvalue is not None and not empty else None,
        adjusted_pvalue=float(one.adjusted[i]) if one.adjusted is not None and not empty else None,
        wilcoxon_pvalue=None if one.wilcoxon is None else number(one.wilcoxon[i]),
        n_probes=int(numbers.probes[i]),
        n_missing=int(numbers.missing[i]),
        n_clusters=int(numbers.units[i]) if numbers.grouped else None,
        replicates=values,
        probe_variance=variance,
        excess=excess,
        reason=_reason(one, i, numbers),
    )


def _against_replicates(
    value: float | None, i: int, null: Replicates | None, alpha: float
) -> tuple[tuple[float, ...], float | None, ReplicateTest | None]:
    """Return the replicates' values, v and the replicate test; nothing where one is undefined."""
    if null is None or value is None or not np.isfinite(null.values[:, i]).all():
        return (), None, None
    variance, df = number(null.variance[i]), number(null.df[i])
    test = replicate_test(
        value,
        null.values[null.strong, i],
        alpha=alpha,
        probe_variance=variance or 0.0,
        probe_df=df if df and df > 0 else None,
    )
    return tuple(float(one) for one in null.values[:, i]), variance, test
