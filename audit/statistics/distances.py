"""Summarise measures that compare two maps, probe by probe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.calibrate import distance_replicate_test, replicate_test
from audit.records import Cell, Column, Effect, ReplicateTest
from audit.statistics.cells import (
    NO_CHANGE,
    ONE_GROUP,
    ONE_PROBE,
    Interval,
    Options,
    number,
    spread,
    strong_mask,
)
from audit.statistics.measures import DISTANCES
from audit.statistics.resampling import (
    Array,
    Codes,
    bca_interval,
    bootstrap_means,
    collapse,
    encode_groups,
    percentile_interval,
    variance_of_mean,
)


def compare_distances(
    measure: str,
    values: ArrayLike,
    replicates: Sequence[ArrayLike] = (),
    *,
    column: Column,
    groups: Sequence[str | None] | None = None,
    effect: Effect = "model",
    segment: str | None = None,
    replicate_kinds: Sequence[str] = (),
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
    interval: Interval = "percentile",
) -> Cell:
    """Summarise a measure that already compares before with after, probe by probe.

    Parameters
    ----------
    measure : str
        Name of the measure. Distances (``js_distance``, ``wasserstein``, ...) are judged one-sided on
        the log scale against the replicates and have no p-value against 0.
    values : array_like (probe,)
        Measure of each probe; NaN is missing.
    replicates : sequence of array_like (probe,)
        The same between before and each replicate.
    column : Column
        Region, stream and layer of the cell; region ``*`` for the whole map.
    groups, effect, segment, replicate_kinds, alpha, resamples, seed, interval
        As in :func:`audit.statistics.tables.compare_tables`.

    Returns
    -------
    Cell

    Raises
    ------
    ValueError
        When there are no probes, lengths differ, or a distance is negative.

    Examples
    --------
    >>> cell = compare_distances("js_distance", [0.1, 0.2, 0.3], column=Column("*"))
    >>> round(cell.value, 2), cell.pvalue is None
    (0.2, True)
    """
    options = Options(effect, segment, alpha, resamples, seed, interval)
    sample = _measured(measure, "values", values, None)
    null = [_measured(measure, f"replicates[{i}]", one, len(sample)) for i, one in enumerate(replicates)]
    strong = strong_mask(replicate_kinds, len(null))
    codes = encode_groups(groups, len(sample))
    units = collapse(sample[:, None], codes)
    draws = bootstrap_means(units, resamples=resamples, seed=[seed, 0])
    bounds = bca_interval(draws, units, alpha) if interval == "bca" else None
    low, high = bounds or percentile_interval(draws, units.present, alpha)
    count, clusters = int((~np.isnan(sample)).sum()), int(units.present[0])
    value, reason = number(units.mean[0]), _distance_reason(sample, count, clusters)
    floor, variance, test = _distance_floor(
        measure, sample, null, codes=codes, strong=strong, options=options
    )
    return Cell(
        measure=measure,
        region=column.region,
        stream=column.stream,
        layer=column.layer,
        effect=effect,
        segment=segment,
        value=value,
        interval=(float(low[0]), float(high[0])) if clusters > 1 else None,
        sd=number(spread(sample[:, None])[0]),
        n_probes=count,
        n_missing=len(sample) - count,
        n_clusters=None if codes is None else clusters,
        replicates=floor,
        probe_variance=variance,
        excess=test,
        reason=reason,
    )


def _measured(measure: str, name: str, values: ArrayLike, length: int | None) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or (length is not None and len(array) != length):
        wanted = "at least one probe" if length is None else f"{length} probes"
        raise ValueError(f"{name}: expected a 1-D array of {wanted}, got shape {array.shape}")
    if np.isinf(array).any():
        raise ValueError(f"{name}: expected finite numbers or NaN for missing ones, got an infinite one")
    if measure in DISTANCES and (array < -1e-9).any():
        raise ValueError(f"{name}: expected {measure} >= 0, got {np.nanmin(array):.3g}")
    return np.maximum(array, 0.0) if measure in DISTANCES else array


def _distance_reason(sample: Array, count: int, clusters: int) -> str | None:
    if count == 0:
        return "the measure is undefined for every probe"
    if clusters < 2:
        return ONE_PROBE if count < 2 else ONE_GROUP
    return NO_CHANGE if not np.nan_to_num(sample).any() else None


def _distance_floor(
    measure: str,
    sample: Array,
    null: Sequence[Array],
    *,
    codes: Codes | None,
    strong: NDArray[np.bool_],
    options: Options,
) -> tuple[tuple[float, ...], float | None, ReplicateTest | None]:
    """Return the replicates' means, v, and the replicate test (both on the log scale for distances)."""
    value, means = number(_mean(sample)), [_mean(one) for one in null]
    if value is None or not means or not np.isfinite(means).all():
        return (), None, None
    logs = measure in DISTANCES
    chosen = [i for i, deciding in enumerate(strong) if deciding]
    centre = [one / mean if logs else one for one, mean in zip(null, means, strict=True) if not logs or mean]
    variance, df = None, None
    if len(centre) == len(null) and (not logs or value > 0):
        own = sample / value if logs else sample
        units = collapse((own - sum(centre[i] for i in chosen) / len(chosen))[:, None], codes)
        variance, df = number(variance_of_mean(units)[0]), float(units.present[0] - 1)
    test = distance_replicate_test if logs else replicate_test
    found = test(
        value,
        [means[i] for i in chosen],
        alpha=options.alpha,
        probe_variance=variance or 0.0,
        probe_df=df if df and df > 0 else None,
    )
    return tuple(means), variance, found


def _mean(sample: Array) -> float:
    return float(collapse(sample[:, None], None).mean[0])
