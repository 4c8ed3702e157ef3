"""Whether two probe sets differ in the distribution of reliance, not only in its mean.

Kolmogorov–Smirnov and energy distance for each region, maximum mean discrepancy for all regions of a
stream together; each with a p-value by relabelling probes (or whole groups). For exploring: a gate asks
for a limit on the shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from audit.records import Cell, Column, Effect, ShareTable
from audit.statistics.multiplicity import benjamini_hochberg
from audit.statistics.resampling import Array, Codes, encode_groups

Groups = Sequence[str | None]

FOR_EXPLORING = "it has no interval, only a p-value for exploring; judge the shift by a limit instead"

_MOST_LABELS = 20_000_000
_RELABELLINGS = (199, 1999)
_KERNEL_ROWS = 1000
_CHUNK = 256
_ROUNDING = 1e-12


def compare_distributions(
    before: ShareTable,
    after: ShareTable,
    *,
    groups: tuple[Groups, Groups] | None = None,
    effect: Effect = "data",
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[Cell, ...]:
    """Compare the distributions of reliance on two different probe sets.

    Parameters
    ----------
    before, after : ShareTable
        Tables with the same columns; NaN is a missing region.
    groups : pair of sequences of str, optional
        Group of each probe on either side: groups are relabelled whole.
    effect : str
        Written into the cells.
    resamples : int
        Most relabellings; between 199 and 1999 are made, fewer for many probes.
    seed : int

    Returns
    -------
    tuple of Cell
        ``ks`` (largest difference of the distribution functions, 0 to 1) and ``energy_distance``
        (√(2∫(F−G)²), in √share) of each column; ``mmd`` on region ``*`` of each stream: the maximum mean
        discrepancy (Gaussian kernel, median distance as bandwidth; Gretton et al., JMLR 13 (2012) 723,
        eq. 5) of all its regions' shares, of at most 1,000 probes a side. `adjusted_pvalue` is
        Benjamini–Hochberg's over the columns of a measure.

    Examples
    --------
    >>> column = Column("corner")
    >>> def table(*shares):
    ...     ids = tuple(str(i) for i in range(len(shares)))
    ...     return ShareTable(ids, (column,), np.array([[share] for share in shares]))
    >>> cells = compare_distributions(table(0.1, 0.2, 0.3), table(0.7, 0.8, 0.9))
    >>> [(cell.measure, round(cell.value, 2)) for cell in cells]
    [('ks', 1.0), ('energy_distance', 1.01), ('mmd', 0.98)]
    """
    place = {column: i for i, column in enumerate(after.columns)}
    first = np.asarray(before.values, dtype=np.float64)
    second = np.asarray(after.values, dtype=np.float64)[:, [place[column] for column in before.columns]]
    sides = [
        encode_groups(g, len(t.probe_ids))
        for g, t in zip(groups or (None, None), (before, after), strict=True)
    ]
    codes = _joint_codes(sides, (len(before.probe_ids), len(after.probe_ids)))
    found: list[Cell] = []
    for i, column in enumerate(before.columns):
        found += _column_cells(column, first[:, i], second[:, i], codes, resamples=resamples, seed=seed)
    for stream in dict.fromkeys(column.stream for column in before.columns):
        rows = [i for i, c in enumerate(before.columns) if c.stream == stream and c.layer is None]
        cell = _mmd_cell(stream, first[:, rows], second[:, rows], codes, resamples=resamples, seed=seed)
        found += [] if cell is None else [cell]
    grouped = any(side is not None for side in sides)
    return tuple(
        replace(cell, effect=effect, n_clusters=cell.n_clusters if grouped else None)
        for cell in _adjusted(found)
    )


def _joint_codes(sides: Sequence[Codes | None], sizes: tuple[int, int]) -> tuple[Codes, Codes]:
    """Return a unit for each probe of both sides; no unit belongs to both."""
    one, two = (np.arange(n) if side is None else side for side, n in zip(sides, sizes, strict=True))
    return one, two + (int(one.max()) + 1 if len(one) else 0)


def _adjusted(cells: Sequence[Cell]) -> list[Cell]:
    found = list(cells)
    for measure in dict.fromkeys(cell.measure for cell in cells):
        rows = [i for i, cell in enumerate(cells) if cell.measure == measure and cell.pvalue is not None]
        adjusted = benjamini_hochberg([cells[i].pvalue or 0.0 for i in rows])
        for i, value in zip(rows, adjusted, strict=True):
            found[i] = replace(found[i], adjusted_pvalue=float(value))
    return found


def _labels(codes: Codes, first: int, draws: int, seed: Sequence[int]) -> NDArray[np.bool_]:
    """Return relabellings (draw, probe), True on the second side; the first row is the true one.

    `first` probes are on the first side; as many units as there change to the second.
    """
    units = np.unique(codes, return_inverse=True)[1]
    n_units, n_second = int(units.max()) + 1, len(np.unique(units[first:]))
    generator = np.random.default_rng(list(seed))
    labels = np.zeros((draws + 1, n_units), dtype=bool)
    labels[0, units[first:]] = True
    for row in labels[1:]:
        row[generator.permutation(n_units)[:n_second]] = True
    return labels[:, units]


def _draws(n: int, resamples: int) -> int:
    least, most = _RELABELLINGS
    return min(resamples, max(least, min(most, _MOST_LABELS // max(n, 1))))


def _pvalue(drawn: Array) -> float:
    """Return (k+1)/(N+1) for the first of `drawn` among the others; ties count as reached."""
    reached = int((drawn[1:] >= drawn[0] * (1 - 1e-10)).sum())
    return (reached + 1) / len(drawn)


# --- one region -------------------------------------------------------------------------------


def _column_cells(
    column: Column, first: Array, second: Array, codes: tuple[Codes, Codes], *, resamples: int, seed: int
) -> list[Cell]:
    kept = [~np.isnan(side) for side in (first, second)]
    one, two = first[kept[0]], second[kept[1]]
    own = np.concatenate([code[keep] for code, keep in zip(codes, kept, strict=True)])
    missing = [int((~keep).sum()) for keep in kept]
    side = 0 if len(one) <= len(two) else 1
    facts = {
        "region": column.region,
        "stream": column.stream,
        "layer": column.layer,
        "n_probes": min(len(one), len(two)),
        "n_missing": missing[side],
        "n_clusters": min(len(np.unique(own[: len(one)])), len(np.unique(own[len(one) :]))),
    }
    if not len(one) or not len(two):
        reason = "the region is missing in every probe of one side"
        return [Cell(name, reason=reason, **facts) for name in ("ks", "energy_distance")]  # type: ignore[arg-type]
    labels = _labels(own, len(one), _draws(len(own), resamples), [seed, 4])
    ks, energy = distances_of_labels(np.concatenate([one, two]), labels)
    return [
        Cell(name, value=float(drawn[0]), pvalue=_pvalue(drawn), reason=FOR_EXPLORING, **facts)  # type: ignore[arg-type]
        for name, drawn in (("ks", ks), ("energy_distance", energy))
    ]


def distances_of_labels(values: Array, labels: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return Kolmogorov–Smirnov and energy distance of the two sides of each labelling.

    Parameters
    ----------
    values : float64 array (probe,)
    labels : bool array (draw, probe)
        True on the second side.

    Returns
    -------
    ks, energy : float64 arrays (draw,)
        NaN-free; 0 where a side is empty.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    last = np.append(np.diff(ordered) > 0, True)  # the distribution function jumps after the last tie
    gaps = np.diff(ordered)
    ks, energy = np.zeros(len(labels)), np.zeros(len(labels))
    for start in range(0, len(labels), _CHUNK):
        block = labels[start : start + _CHUNK, order]
        n_second = block.sum(axis=1, keepdims=True)
        n_first = block.shape[1] - n_second
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(block, -1.0 / n_second, 1.0 / n_first)
        difference = np.cumsum(steps, axis=1)
        difference[np.abs(difference) < _ROUNDING] = 0.0
        difference[((n_first == 0) | (n_second == 0))[:, 0]] = 0.0
        ks[start : start + len(block)] = np.minimum(np.abs(difference[:, last]).max(axis=1), 1.0)
        energy[start : start + len(block)] = np.sqrt(2 * (difference[:, :-1] ** 2 @ gaps))
    return ks, energy


# --- all regions of a stream ------------------------------------------------------------------


def _mmd_cell(
    stream: str, first: Array, second: Array, codes: tuple[Codes, Codes], *, resamples: int, seed: int
) -> Cell | None:
    """Return the cell of the maximum mean discrepancy, None where no probe has every region."""
    used = [column for column in range(first.shape[1]) if _mostly_there(first, second, column)]
    sides, units, missing = [], [], 0
    generator = np.random.default_rng([seed, 5])
    for values, code in ((first[:, used], codes[0]), (second[:, used], codes[1])):
        kept = np.flatnonzero(~np.isnan(values).any(axis=1))
        missing = max(missing, len(values) - len(kept))
        if len(kept) > _KERNEL_ROWS:
            kept = np.sort(generator.choice(kept, _KERNEL_ROWS, replace=False))
        sides.append(values[kept])
        units.append(code[kept])
    if not used or min(map(len, sides)) < 2:
        return None
    labels = _labels(np.concatenate(units), len(sides[0]), min(999, _draws(1, resamples)), [seed, 6])
    drawn = mmd_of_labels(np.concatenate(sides), labels)
    return Cell(
        "mmd",
        "*",
        stream=stream,
        value=float(drawn[0]),
        pvalue=_pvalue(drawn),
        n_probes=min(map(len, sides)),
        n_missing=missing,
        n_clusters=min(len(np.unique(unit)) for unit in units),
        reason=FOR_EXPLORING,
    )


def _mostly_there(first: Array, second: Array, column: int) -> bool:
    return all(np.isnan(side[:, column]).mean() < 0.5 for side in (first, second) if len(side))


def mmd_of_labels(points: Array, labels: NDArray[np.bool_]) -> Array:
    """Return the maximum mean discrepancy (biased estimate) of the two sides of each labelling.

    Parameters
    ----------
    points : float64 array (probe, region)
    labels : bool array (draw, probe)

    Returns
    -------
    float64 array (draw,)
        0 where all points are equal.
    """
    squares = (points**2).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares[None] - 2 * points @ points.T, 0.0)
    apart = distances[distances > 1e-20]
    if not len(apart):
        return np.zeros(len(labels))
    kernel = np.exp(-distances / (2 * float(np.median(apart))))
    n_second = labels.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        weights = np.where(labels, -1.0 / n_second, 1.0 / (labels.shape[1] - n_second))
    weights[~np.isfinite(weights)] = 0.0
    return np.asarray(np.sqrt(np.maximum(((weights @ kernel) * weights).sum(axis=1), 0.0)))
