"""Compare tables of reliance: paired, unpaired, and the 2×2 of model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from audit.records import Cell, Column, Effect, ShareTable
from audit.statistics.cells import (
    Interval,
    Options,
    Replicates,
    build_cells,
    count_numbers,
    paired_estimates,
    paired_replicates,
    strong_mask,
    two_sample_estimates,
)
from audit.statistics.multiplicity import benjamini_hochberg
from audit.statistics.resampling import Array, Codes, collapse, encode_groups, variance_of_mean

Groups = Sequence[str | None]
_NAMED = 3


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _column_name(column: Column) -> str:
    layer = "" if column.layer is None else f" at layer {column.layer}"
    return f"{column.region} ({column.stream}){layer}"


def _order(name: str, wanted: Sequence[object], found: Sequence[object], what: str) -> list[int]:
    """Return where each of `wanted` stands in `found`; both must hold the same things."""
    label = [_column_name(one) if isinstance(one, Column) else str(one) for one in (*wanted, *found)]
    place, known = {one: i for i, one in enumerate(found)}, set(wanted)
    if len(place) != len(found):
        raise ValueError(f"{name}: expected every {what} once, got some of them twice")
    lacking = [label[i] for i, one in enumerate(wanted) if one not in place]
    extra = [label[len(wanted) + i] for i, one in enumerate(found) if one not in known]
    if lacking or extra:
        parts = [f"lacks {_some(lacking)}"] if lacking else []
        parts += [f"has beside them {_some(extra)}"] if extra else []
        raise ValueError(f"{name}: expected the {what}s of before, but it {' and '.join(parts)}")
    return [place[one] for one in wanted]


def _values(name: str, table: ShareTable) -> Array:
    values = np.asarray(table.values, dtype=np.float64)
    shape = (len(table.probe_ids), len(table.columns))
    if values.shape != shape:
        raise ValueError(f"{name}: expected values of shape {shape} (probe, column), got {values.shape}")
    if np.isinf(values).any():
        raise ValueError(f"{name}: expected finite shares or NaN for missing ones, got an infinite one")
    return values


def _aligned(name: str, before: ShareTable, other: ShareTable, *, probes: bool = True) -> Array:
    """Return the values of `other` in the order of `before`'s columns and, if asked, probes."""
    values = _values(name, other)
    values = values[:, _order(name, before.columns, other.columns, "column")]
    return values[_order(name, before.probe_ids, other.probe_ids, "probe")] if probes else values


def _require_pairs(before: ShareTable, after: ShareTable) -> None:
    if not before.probe_ids or not after.probe_ids:
        raise ValueError("before, after: expected at least one probe each, got no pairs")


def _two_groups(groups: object, before: ShareTable, after: ShareTable) -> tuple[Codes | None, Codes | None]:
    if groups is None:
        return None, None
    if not isinstance(groups, tuple | list) or len(groups) != 2 or isinstance(groups[0], str):
        raise ValueError(
            "groups: expected a pair (groups of before, groups of after) for unpaired tables, "
            f"got {type(groups).__name__}"
        )
    return (
        encode_groups(groups[0], len(before.probe_ids)),
        encode_groups(groups[1], len(after.probe_ids)),
    )


def segment_rows(segments: Mapping[str, Sequence[str | None]] | None, n: int) -> dict[str, list[int]]:
    """Return the rows of each ``key=value``."""
    rows: dict[str, list[int]] = {}
    for key, values in (segments or {}).items():
        if len(values) != n:
            raise ValueError(
                f"segments[{key!r}]: expected one value for each of {n} probes, got {len(values)}"
            )
        for i, value in enumerate(values):
            if value is not None and value != "":
                rows.setdefault(f"{key}={value}", []).append(i)
    return rows


def compare_tables(
    before: ShareTable,
    after: ShareTable,
    replicates: Sequence[ShareTable] = (),
    *,
    groups: Groups | tuple[Groups | None, Groups | None] | None = None,
    segments: Mapping[str, Sequence[str | None]] | None = None,
    effect: Effect = "model",
    paired: bool = True,
    replicate_kinds: Sequence[str] = (),
    sizes: Sequence[float | None] | None = None,
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
    interval: Interval = "percentile",
) -> tuple[Cell, ...]:
    """Compare the reliance of two runs in every column.

    Parameters
    ----------
    before, after : ShareTable
        Paired tables hold the same probes, in any order; unpaired ones need only the same columns.
        NaN is a missing region: a pair with one missing side is missing.
    replicates : sequence of ShareTable
        Harmless re-trainings on the probes of `before`; paired tables only.
    groups : sequence of str, or a pair of them when unpaired, optional
        Group of each probe of `before` (and of `after`): groups are resampled whole.
    segments : mapping of key to one value a probe, optional
        Each ``key=value`` gets cells of its own; paired tables only.
    effect : {"model", "data", "model_on_domain", "interaction"}
        Written into the cells.
    replicate_kinds : sequence of str, optional
        Kind of each replicate; weak kinds are shown and left out of the replicate test.
    sizes : sequence of float, optional
        Share that a uniform map would give each column (share / size is the lift); of all probes, so that
        the segments' cells have none.
    alpha : float
        Intervals have level 1 − 2 alpha.
    resamples, seed : int
        Bootstrap and permutation; equal arguments give equal cells.
    interval : {"percentile", "bca"}
        Paired shift and level; ratio and unpaired cells use the expanded percentile interval.

    Returns
    -------
    tuple of Cell
        ``shift``, ``level``, ``ratio`` of each column, the segments' after the whole. p-values are by
        sign flips (paired) or relabelling (unpaired) and (k+1)/(N+1). `adjusted_pvalue` is max-T over the
        columns of the whole, and Benjamini–Hochberg's over all segments × columns, and over the columns
        of unpaired tables. Wilcoxon's p-value is that of ungrouped probes. `n_probes` of unpaired cells
        is that of the smaller side.

    Raises
    ------
    ValueError
        When there are no pairs, or probes, columns, groups or kinds do not fit.

    Examples
    --------
    >>> column, ids = Column("corner"), tuple("abcd")
    >>> old = ShareTable(ids, (column,), np.array([[0.1], [0.2], [0.1], [0.2]]))
    >>> new = ShareTable(ids, (column,), np.array([[0.2], [0.3], [0.3], [0.4]]))
    >>> shift, level, ratio = compare_tables(old, new)
    >>> round(shift.value, 2), round(level.value, 2), round(ratio.value, 2)
    (0.15, 0.3, 2.0)
    """
    _require_pairs(before, after)
    if not before.columns:  # probes without a region, compared by whole maps alone
        return ()
    options = Options(effect, None, alpha, resamples, seed, interval, sizes)
    if not paired:
        if replicates or segments:
            raise ValueError("replicates, segments: expected none for unpaired tables, got some")
        samples = (_values("before", before), _aligned("after", before, after, probes=False))
        codes = _two_groups(groups, before, after)
        estimates = two_sample_estimates(*samples, codes, options)
        return adjusted(build_cells(before.columns, estimates, count_numbers(samples, codes), options))
    old, new = _values("before", before), _aligned("after", before, after)
    others = [_aligned(f"replicates[{i}]", before, one) for i, one in enumerate(replicates)]
    strong = strong_mask(replicate_kinds, len(others))
    parts = segment_rows(segments, len(old))
    whole = encode_groups(groups, len(old))  # type: ignore[arg-type]
    cells = _paired_cells(before.columns, old, new, others, codes=whole, strong=strong, options=options)
    segmented: list[Cell] = []
    for name, rows in parts.items():
        part = Options(effect, name, alpha, resamples, seed, interval)
        segmented += _paired_cells(
            before.columns,
            old[rows],
            new[rows],
            [one[rows] for one in others],
            codes=None if whole is None else whole[rows],
            strong=strong,
            options=part,
        )
    return (*cells, *adjusted(segmented))


def adjusted(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return cells whose shifts' p-values are adjusted for looking at all of them (Benjamini–Hochberg)."""
    rows = [i for i, cell in enumerate(cells) if cell.measure == "shift" and cell.pvalue is not None]
    values = benjamini_hochberg([cells[i].pvalue or 0.0 for i in rows])
    found = list(cells)
    for i, value in zip(rows, values, strict=True):
        found[i] = replace(found[i], adjusted_pvalue=float(value))
    return tuple(found)


def _paired_cells(
    columns: Sequence[Column],
    before: Array,
    after: Array,
    replicates: Sequence[Array],
    *,
    codes: Codes | None,
    strong: NDArray[np.bool_],
    options: Options,
) -> list[Cell]:
    missing = np.isnan(before) | np.isnan(after)
    before, after = np.where(missing, np.nan, before), np.where(missing, np.nan, after)
    null = paired_replicates(before, after, replicates, codes, strong) if len(replicates) else None
    estimates = paired_estimates(before, after, codes, options)
    return build_cells(columns, estimates, count_numbers([after], [codes]), options, null)


def compare_interaction(
    before: ShareTable,
    after: ShareTable,
    before_domain: ShareTable,
    after_domain: ShareTable,
    replicates: Sequence[tuple[ShareTable, ShareTable]] = (),
    *,
    groups: Groups | None = None,
    domain_groups: Groups | None = None,
    replicate_kinds: Sequence[str] = (),
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[Cell, ...]:
    """Compare the shift on a second probe set with the shift on the first: the 2×2 of model and data.

    Interaction = (after − before) on the domain − (after − before) on the first probe set. The other
    three effects of the 2×2 are :func:`compare_tables` with effect ``model``, ``model_on_domain``
    (paired) and ``data`` (unpaired).

    Parameters
    ----------
    before, after : ShareTable
        The two checkpoints on the first probe set.
    before_domain, after_domain : ShareTable
        The same checkpoints on the second probe set.
    replicates : sequence of (ShareTable, ShareTable)
        Each replicate on the first and on the second probe set; its interaction is the null.
    groups, domain_groups : sequence of str, optional
        Group of each probe of either set.
    replicate_kinds, alpha, resamples, seed
        As in :func:`compare_tables`.

    Returns
    -------
    tuple of Cell
        Measure ``shift``, effect ``interaction``; `before` and `after` hold the mean shift on the
        first and the second probe set. The p-value relabels probes (or groups) between the sets.

    Raises
    ------
    ValueError
        When there are no pairs, or probes, columns, groups or kinds do not fit.

    Examples
    --------
    >>> column = Column("corner")
    >>> def table(ids, *shares):
    ...     return ShareTable(tuple(ids), (column,), np.array([[share] for share in shares]))
    >>> cells = compare_interaction(
    ...     table("ab", 0.1, 0.2), table("ab", 0.1, 0.2), table("cd", 0.1, 0.1), table("cd", 0.2, 0.2)
    ... )
    >>> round(cells[0].value, 2)
    0.1
    """
    _require_pairs(before, after)
    _require_pairs(before_domain, after_domain)
    if not before.columns:
        return ()
    options = Options("interaction", None, alpha, resamples, seed)
    first = _values("before", before)
    second = _aligned("before_domain", before, before_domain, probes=False)
    domain = ShareTable(before_domain.probe_ids, before.columns, second)
    shifts = (
        _aligned("after", before, after) - first,
        _aligned("after_domain", domain, after_domain) - second,
    )
    codes = (encode_groups(groups, len(first)), encode_groups(domain_groups, len(second)))
    null = [
        (
            _aligned(f"replicates[{i}][0]", before, one) - first,
            _aligned(f"replicates[{i}][1]", domain, two) - second,
        )
        for i, (one, two) in enumerate(replicates)
    ]
    strong = strong_mask(replicate_kinds, len(null))
    estimates = two_sample_estimates(*shifts, codes, options)[:1]
    floor = {"shift": _interaction_floor(shifts, null, codes, strong)} if null else None
    return adjusted(build_cells(before.columns, estimates, count_numbers(shifts, codes), options, floor))


def _interaction_floor(
    shifts: tuple[Array, Array],
    null: Sequence[tuple[Array, Array]],
    codes: tuple[Codes | None, Codes | None],
    strong: NDArray[np.bool_],
) -> Replicates:
    """Return the replicates' interactions; v adds up over the two independent probe sets."""
    means = [[collapse(one, None).mean for one in pair] for pair in null]
    chosen = [pair for pair, deciding in zip(null, strong, strict=True) if deciding]
    excess = [shifts[side] - sum(pair[side] for pair in chosen) / len(chosen) for side in (0, 1)]
    units = [collapse(one, code) for one, code in zip(excess, codes, strict=True)]
    variance = variance_of_mean(units[0]) + variance_of_mean(units[1])
    df = np.minimum(units[0].present, units[1].present) - 1.0
    return Replicates(np.stack([two - one for one, two in means]), variance, df, strong)
