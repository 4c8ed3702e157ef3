"""Statistics over probes: what moved between two runs, by how much, and how surely.

The p-values answer "did the maps on these probes change?"; they are shown and never gate. Only NumPy
and ``scipy.special`` are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.alignment import same_positions
from audit.records import Cell, Column, Comparison, Map, Positions, ShareTable
from audit.statistics.distances import compare_distances
from audit.statistics.tables import compare_interaction, compare_tables

__all__ = ["compare_distances", "compare_interaction", "compare_maps", "compare_tables"]

Array = NDArray[np.float64]
Maps = Sequence[ArrayLike] | Sequence[Map]
Key = tuple[str, str]

_MEASURES = (
    "js_distance",
    "wasserstein",
    "total_variation",
    "hellinger",
    "cosine_similarity",
    "center_of_mass_shift",
)
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Entry:
    """One map with what is needed to join and to weigh it."""

    weights: Array
    content: NDArray[np.bool_]
    layers: Array | None = None
    positions: Positions | None = None


def _entries(name: str, maps: Maps) -> dict[Key, _Entry]:
    """Return maps by (probe id, stream); plain arrays are numbered."""
    entries: dict[Key, _Entry] = {}
    for i, one in enumerate(maps):
        key = (one.probe_id, one.stream) if isinstance(one, Map) else (str(i), "input")
        where = f"{name}[{i}]"
        if key in entries:
            raise ValueError(f"{where}: expected every probe once a stream, got probe {key[0]!r} twice")
        if isinstance(one, Map):
            layers = None if one.layers is None else np.asarray(one.layers, dtype=np.float64)
            entries[key] = _Entry(_checked(where, one.weights), one.positions.content, layers, one.positions)
        else:
            weights = _checked(where, one)
            entries[key] = _Entry(weights, np.ones(len(weights), dtype=bool))
    if not entries:
        raise ValueError(f"{name}: expected at least one map, got none, so that there are no pairs")
    return entries


def _checked(where: str, weights: ArrayLike) -> Array:
    array = np.asarray(weights, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{where}: expected a 1-D map over positions, got shape {array.shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{where}: expected finite weights >= 0, got others")
    if abs(array.sum() - 1) > _SUM_TOLERANCE:
        raise ValueError(f"{where}: expected weights that sum to 1, got {array.sum():.4g}")
    return array


ROUNDING = 1e-6
"""Largest difference of equal maps: kernels and numbers of threads add up in another order, in float32."""


def compare_maps(
    before: Maps,
    after: Maps,
    *,
    regions: Mapping[str, ArrayLike | Sequence[ArrayLike | None]] | None = None,
    replicates: Sequence[Maps] = (),
    groups: Sequence[str | None] | tuple[Sequence[str | None], Sequence[str | None]] | None = None,
    paired: bool = True,
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
) -> Comparison:
    """Compare maps that were made anywhere: distances of the whole map and shifts of its regions.

    Parameters
    ----------
    before, after : sequences of 1-D arrays or of Map
        Distributions over positions. Arrays are paired in order, Maps by probe id (and stream).
    regions : mapping of name to weights, optional
        Weights in [0, 1] over positions: one array (n,) for all maps, or one array for each entry of
        `before` (for unpaired maps: of `before`, then of `after`), None where the region is missing.
        Shares are of the content mass; a region wholly outside the content is a share of the whole.
    replicates : sequence of such sequences
        Maps of harmless re-trainings on the same probes, all of kind ``seed``.
    groups : sequence of str, optional
        Group of each entry of `before`; a pair of sequences when unpaired.
    paired : bool
        False for two different probe sets: regions only.
    alpha, resamples, seed
        Intervals have level 1 − 2 alpha.

    Returns
    -------
    Comparison
        ``js_distance`` and ``wasserstein`` (also by layer, where both sides have layers) and others on
        region ``*``; ``shift``, ``level`` and ``ratio`` of each region. `same_weights` is unknown.

    Raises
    ------
    ValueError
        When there are no pairs, probe ids do not match, maps of one probe have different lengths, or
        a map is not a distribution.

    Examples
    --------
    >>> before = [[0.5, 0.5], [0.4, 0.6], [0.6, 0.4]]
    >>> after = [[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]
    >>> comparison = compare_maps(before, after, regions={"first": [1.0, 0.0]})
    >>> round(next(comparison.find("first")).value, 2)
    0.2
    """
    old, new = _entries("before", before), _entries("after", after)
    others = [_entries(f"replicates[{i}]", one) for i, one in enumerate(replicates)]
    statistics = {"alpha": alpha, "resamples": resamples, "seed": seed}
    weights = _region_weights(regions or {}, list(old) if paired else [*old, *new])
    if paired:
        for i, other in enumerate([new, *others]):
            _require_same("after" if i == 0 else f"replicates[{i - 1}]", old, other)
        cells = _paired_maps(old, new, others, weights, groups=groups, statistics=statistics)
    else:
        cells = _unpaired_maps(old, new, others, weights, groups=groups, statistics=statistics)
    return Comparison(
        kind="paired" if paired else "unpaired",
        cells=tuple(cells),
        alpha=alpha,
        n_probes=len({probe for probe, _ in old}),
        n_clusters=next((cell.n_clusters for cell in cells if cell.n_clusters is not None), None),
        replicate_kinds=("seed",) * len(others),
        identical_maps=paired and all(_same(old[key].weights, new[key].weights) for key in old),
        method="given maps",
        settings=statistics,
    )


def _require_same(name: str, old: Mapping[Key, _Entry], other: Mapping[Key, _Entry]) -> None:
    """Refuse a set of maps that does not hold the same probes with the same numbers of positions."""
    for lacking, kind in (
        (list(old.keys() - other.keys()), "lacks"),
        (list(other.keys() - old.keys()), "adds"),
    ):
        if lacking:
            ids = sorted({probe for probe, _ in lacking})
            shown = ", ".join(repr(probe) for probe in ids[:3]) + (
                f" and {len(ids) - 3} more" if ids[3:] else ""
            )
            raise ValueError(f"{name}: expected the probes of before ({len(old)}), but it {kind} {shown}")
    for (probe, stream), entry in old.items():
        if not _same_places(entry, other[probe, stream]):
            raise ValueError(
                f"{name}: expected the {len(entry.weights)} positions of before for probe {probe!r}, got "
                f"{len(other[probe, stream].weights)} (another tokenizer or patch grid); bring the maps to "
                "common positions with audit.align_maps first"
            )


def _same_places(one: _Entry, other: _Entry) -> bool:
    if one.positions is None or other.positions is None:
        return len(one.weights) == len(other.weights)
    return same_positions(one.positions, other.positions)


def _region_weights(
    regions: Mapping[str, ArrayLike | Sequence[ArrayLike | None]], keys: Sequence[Key]
) -> dict[str, list[Array | None]]:
    """Return each region's weights for each entry."""
    found: dict[str, list[Array | None]] = {}
    for name, given in regions.items():
        if name == "*":
            raise ValueError("regions: '*' stands for the whole map; expected another name")
        items = list(given)  # type: ignore[arg-type]
        if items and all(item is not None and np.ndim(item) == 0 for item in items):
            found[name] = [np.asarray(items, dtype=np.float64)] * len(keys)
            continue
        if len(items) != len(keys):
            raise ValueError(
                f"regions[{name!r}]: expected weights for each of {len(keys)} maps, got {len(items)}"
            )
        found[name] = [None if item is None else np.asarray(item, dtype=np.float64) for item in items]
    for name, weights in found.items():
        if any(w is not None and not ((w >= 0) & (w <= 1)).all() for w in weights):
            raise ValueError(f"regions[{name!r}]: expected weights in [0, 1], got others")
    return found


def _share(maps: Array, content: NDArray[np.bool_], region: Array | None, where: str) -> Array:
    """Return the share of each row of `maps` (row, position) in a region; NaN where it is missing."""
    if region is None or not region.any():
        return np.full(len(maps), np.nan)
    if region.shape != content.shape:
        raise ValueError(f"{where}: expected weights of {len(content)} positions, got {region.shape}")
    inside = region * content
    if not inside.any():
        return np.asarray(maps @ region / maps.sum(axis=1))
    mass = maps @ content
    shares = np.full(len(maps), np.nan)
    np.divide(maps @ inside, mass, out=shares, where=mass > 0)
    return shares


def _table(
    entries: Mapping[Key, _Entry],
    keys: Sequence[Key],
    weights: Mapping[str, Sequence[Array | None]],
    layers: int,
) -> ShareTable:
    """Return the shares of `keys` in every region; `layers` 0 is the whole stack."""
    stream = keys[0][1]
    columns = [
        Column(name, stream, layer) for name in weights for layer in (range(layers) if layers else (None,))
    ]
    values = np.empty((len(keys), len(columns)))
    for i, key in enumerate(keys):
        entry = entries[key]
        maps = entry.layers if layers and entry.layers is not None else entry.weights[None]
        rows = [
            _share(maps, entry.content, weights[name][i], f"regions[{name!r}], probe {key[0]!r}")
            for name in weights
        ]
        values[i] = np.concatenate(rows)
    return ShareTable(tuple(probe for probe, _ in keys), tuple(columns), values)


def _common_layers(sets: Sequence[Mapping[Key, _Entry]], keys: Sequence[Key]) -> int:
    """Return how many layers every map has, 0 when they differ or some have none."""
    counts = {0 if one[key].layers is None else len(one[key].layers) for one in sets for key in keys}  # type: ignore[arg-type]
    return counts.pop() if len(counts) == 1 else 0


def _by_length(
    measure: Callable[[Array, Array], ArrayLike],
    one: Mapping[Key, _Entry],
    two: Mapping[Key, _Entry],
    keys: Sequence[Key],
    *,
    layers: bool,
) -> Array:
    """Return a measure for each key, (probe,) or (probe, layer), maps of one length at a time."""
    lengths: dict[int, list[int]] = {}
    for i, key in enumerate(keys):
        lengths.setdefault(len(one[key].weights), []).append(i)
    parts: list[tuple[list[int], Array]] = []
    for rows in lengths.values():
        chosen = [keys[i] for i in rows]
        p, q = (np.stack([s[k].layers if layers else s[k].weights for k in chosen]) for s in (one, two))  # type: ignore[misc]
        parts.append((rows, np.asarray(measure(p, q), dtype=np.float64)))
    values = np.empty((len(keys), *parts[0][1].shape[1:]))
    for rows, part in parts:
        values[rows] = part
    return values


def _distance_cells(
    old: Mapping[Key, _Entry],
    new: Mapping[Key, _Entry],
    others: Sequence[Mapping[Key, _Entry]],
    keys: Sequence[Key],
    *,
    groups: Sequence[str | None] | None,
    statistics: Mapping[str, float],
) -> list[Cell]:
    from audit import metrics

    stream, cells = keys[0][1], []
    layers = _common_layers([old, new, *others], keys)
    wanted: list[tuple[str, bool]] = [(name, False) for name in _MEASURES]
    wanted += [(name, True) for name in _MEASURES[:2] if layers]
    for name, by_layer in wanted:
        measure = getattr(metrics, name)
        found, *null = (_by_length(measure, old, one, keys, layers=by_layer) for one in (new, *others))
        for layer in range(layers) if by_layer else (None,):
            cells.append(
                compare_distances(
                    name,
                    found if layer is None else found[:, layer],
                    [one if layer is None else one[:, layer] for one in null],
                    column=Column("*", stream, layer),
                    groups=groups,
                    **statistics,  # type: ignore[arg-type]
                )
            )
    return cells


def _paired_maps(
    old: Mapping[Key, _Entry],
    new: Mapping[Key, _Entry],
    others: Sequence[Mapping[Key, _Entry]],
    weights: Mapping[str, Sequence[Array | None]],
    *,
    groups: object,
    statistics: Mapping[str, float],
) -> list[Cell]:
    cells: list[Cell] = []
    order = list(old)
    for stream in dict.fromkeys(stream for _, stream in order):
        rows = [i for i, key in enumerate(order) if key[1] == stream]
        keys, chosen = [order[i] for i in rows], _take_groups(groups, rows, len(order))
        cells += _distance_cells(old, new, others, keys, groups=chosen, statistics=statistics)
        regions = {name: [given[i] for i in rows] for name, given in weights.items()}
        layers = _common_layers([old, new, *others], keys)
        for depth in dict.fromkeys((0, layers)) if regions else ():
            tables = [_table(one, keys, regions, depth) for one in (old, new, *others)]
            cells += compare_tables(tables[0], tables[1], tables[2:], groups=chosen, **statistics)  # type: ignore[arg-type]
    return cells


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.abs(one - other).max(initial=0.0) <= ROUNDING)


def _take_groups(groups: object, rows: Sequence[int], n: int) -> list[str | None] | None:
    if groups is None:
        return None
    items = list(groups)  # type: ignore[call-overload]
    if len(items) != n:
        raise ValueError(f"groups: expected one entry for each of {n} maps, got {len(items)}")
    return [items[i] for i in rows]


def _unpaired_maps(
    old: Mapping[Key, _Entry],
    new: Mapping[Key, _Entry],
    others: Sequence[object],
    weights: Mapping[str, Sequence[Array | None]],
    *,
    groups: object,
    statistics: Mapping[str, float],
) -> list[Cell]:
    if others:
        raise ValueError("replicates: expected none for unpaired maps, got some")
    if not weights:
        raise ValueError("regions: expected at least one, since unpaired maps have no distance, got none")
    if len({stream for _, stream in (*old, *new)}) > 1:
        raise ValueError("before, after: expected maps of one stream when unpaired, got several")
    first = {name: given[: len(old)] for name, given in weights.items()}
    second = {name: given[len(old) :] for name, given in weights.items()}
    tables = (_table(old, list(old), first, 0), _table(new, list(new), second, 0))
    options = {"groups": groups, "paired": False, "effect": "data", **statistics}
    return list(compare_tables(*tables, **options))  # type: ignore[arg-type]
