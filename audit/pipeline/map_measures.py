"""Measures of whole maps, probe by probe, between one run and each of several others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit import metrics
from audit.alignment import UNITS, AlignedMap, align_maps, same_positions
from audit.errors import ProbeError
from audit.pipeline.runs import RunData
from audit.records import Column, Map

Array = NDArray[np.float64]
Key = tuple[str, Column]
Rows = dict[Key, list[float]]

GENERATED = "prefix"
"""The stream whose positions each checkpoint makes itself."""
TOP_K = 5
"""How many positions ``top_k_overlap`` compares."""


def _top_k(p: Array, q: Array) -> Any:
    return metrics.top_k_overlap(p, q, min(TOP_K, p.shape[-1]))


def _spearman(p: Array, q: Array) -> Any:
    found = metrics.spearman(p, q)
    return np.nan if found is None else np.ma.filled(found, np.nan)


PAIRED: Mapping[str, Callable[[Array, Array], Any]] = {
    "js_distance": metrics.js_distance,
    "js_divergence": metrics.js_divergence,
    "kl_divergence": metrics.kl_divergence,
    "total_variation": metrics.total_variation,
    "hellinger": metrics.hellinger,
    "wasserstein": metrics.wasserstein,
    "energy_distance": metrics.energy_distance,
    "cosine_similarity": metrics.cosine_similarity,
    "spearman": _spearman,
    "top_k_overlap": _top_k,
}
"""Measures of two maps, by the name that rules use."""

SINGLE: Mapping[str, Callable[[Array], Any]] = {
    "center_of_mass_shift": metrics.center_of_mass,
    "entropy_change": metrics.entropy,
    "sink_change": metrics.sink_share,
}
"""Measures of one map, of which the signed change is told."""

GRID = "earth_mover_distance"
"""The measure that only patch grids have."""

MEASURES = (*PAIRED, GRID, *SINGLE)


@dataclass(frozen=True)
class MapMeasures:
    """What each of several runs differs by from the first.

    Attributes
    ----------
    paired : sequence, one for each other run, of (measure, column) to (probe,)
        NaN where a map has no mass or the measure is undefined.
    single : sequence, one for each run, the first included, of (measure, column) to (probe,)
    alignment : tuple of str
        One line for each stream whose maps had to be brought to common positions.
    """

    paired: tuple[Mapping[Key, Array], ...]
    single: tuple[Mapping[Key, Array], ...]
    alignment: tuple[str, ...]


class _DifferError(Exception):
    """Says in which stream the runs were first seen to have other positions."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.stream = stream


def map_measures(runs: Sequence[RunData], names: Sequence[str]) -> MapMeasures:
    """Measure the maps of runs on the same probes against those of the first run.

    Where the runs cut one probe into other positions, the maps of that stream are aligned for every
    probe and run; see :mod:`audit.alignment`. Where they generated other tokens, their prefixes have no
    position in common and the measures of that probe's prefix are missing. Layers are measured where all
    runs have equally many.

    Parameters
    ----------
    runs : sequence of RunData
        The first is before.
    names : sequence of str
        Of :data:`MEASURES`.

    Raises
    ------
    ProbeError
        When positions differ and do not know where they lie, or the runs have no stream in common.
    """
    aligned: set[str] = set()
    while True:
        try:
            return _measured(runs, names, aligned)
        except _DifferError as found:
            aligned.add(found.stream)


def _measured(runs: Sequence[RunData], names: Sequence[str], aligned: set[str]) -> MapMeasures:
    paired: list[Rows] = [{} for _ in runs[1:]]
    single: list[Rows] = [{} for _ in runs]
    kinds: dict[str, str] = {}
    unlike = 0
    for maps in _by_probe(runs):
        stream, kind = maps[0].stream, maps[0].positions.kind
        if stream in aligned:
            kinds[stream] = kind
            ready = _aligned(runs, maps)
        elif all(same_positions(maps[0].positions, one.positions) for one in maps[1:]):
            ready = tuple(_plain(one) for one in maps)
        elif stream == GENERATED:
            ready, unlike = tuple(map(_missing, maps)), unlike + 1
        else:
            raise _DifferError(stream)
        _add(_of_equal_depth(ready), stream, names, paired, single)
        if GRID in names and kind == "patch":
            patches = ready if stream in aligned else _aligned(runs, maps)  # content on its grid
            for rows, other in zip(paired, patches[1:], strict=True):
                _put(rows, GRID, stream, _earth_mover(patches[0], other), _NO_LAYERS)
    lines = [_alignment_note(stream, kinds[stream]) for stream in kinds]
    if unlike:
        lines.append(
            f"maps of the prefix are left out where the runs generated other tokens (probes: {unlike})"
        )
    return MapMeasures(tuple(map(_arrays, paired)), tuple(map(_arrays, single)), tuple(lines))


def _arrays(rows: Mapping[Key, list[float]]) -> dict[Key, Array]:
    return {key: np.array(values, dtype=np.float64) for key, values in rows.items()}


def _alignment_note(stream: str, kind: str) -> str:
    where = "" if stream == "input" else f" of the stream {stream}"
    return (
        f"the runs cut their inputs into different positions, so that the maps{where} were aligned on "
        f"{UNITS[kind]}; special positions are left out of their distances"
    )


def _by_probe(runs: Sequence[RunData]) -> Iterator[tuple[Map, ...]]:
    """Yield the maps of one probe and stream, one of each run; streams that not all have are left out."""
    with ExitStack() as stack:
        readers = [_probes(run.maps()) for run in runs]
        for reader in readers:
            stack.callback(reader.close)
        for probe in zip(*readers, strict=True):
            ids = {next(iter(streams.values())).probe_id for streams in probe}
            common = [name for name in probe[0] if all(name in streams for streams in probe)]
            if len(ids) > 1 or not common:
                given = " and ".join(sorted({", ".join(streams) for streams in probe}))
                raise ProbeError(
                    f"the runs have no maps in common for probe {sorted(ids)[0]} (streams {given}); "
                    "compare checkpoints that read their inputs alike"
                )
            for name in common:
                yield tuple(streams[name] for streams in probe)


def _probes(maps: Iterator[Map]) -> Any:
    """Yield the maps of one probe after the other, by stream."""
    current: dict[str, Map] = {}
    for one in maps:
        if current and next(iter(current.values())).probe_id != one.probe_id:
            yield current
            current = {}
        current[one.stream] = one
    if current:
        yield current


def _plain(one: Map) -> AlignedMap:
    layers = None if one.layers is None else np.asarray(one.layers, dtype=np.float64)
    return AlignedMap(np.asarray(one.weights, dtype=np.float64), layers)


def _missing(one: Map) -> AlignedMap:
    """Return a map of which every measure is undefined."""
    layers = None if one.layers is None else np.full((len(one.layers), 1), np.nan)
    return AlignedMap(np.full(1, np.nan), layers)


def _aligned(runs: Sequence[RunData], maps: Sequence[Map]) -> tuple[AlignedMap, ...]:
    try:
        return align_maps(maps)
    except ValueError as error:
        names = ", ".join(dict.fromkeys(run.ref.run_id for run in runs))
        raise ProbeError(
            f"{names} cut probe {maps[0].probe_id} into {', '.join(str(len(one.weights)) for one in maps)} "
            f"positions and their maps cannot be aligned ({error}); use tokenizers with offsets "
            "(tokenizer.json), or import maps with starts and ends, a grid or times"
        ) from None


def _of_equal_depth(maps: Sequence[AlignedMap]) -> Sequence[AlignedMap]:
    """Return the maps, without their layers where the runs have different numbers of them."""
    depths = {0 if one.layers is None else len(one.layers) for one in maps}
    return maps if len(depths) == 1 else [replace(one, layers=None) for one in maps]


def _add(
    maps: Sequence[AlignedMap],
    stream: str,
    names: Sequence[str],
    paired: Sequence[Rows],
    single: Sequence[Rows],
) -> None:
    """Append the measures of one probe's maps."""
    for name in names:
        if name in SINGLE:
            for rows, one in zip(single, maps, strict=True):
                layers = _NO_LAYERS if one.layers is None else _each(SINGLE[name], one.layers)
                _put(rows, name, stream, float(_each(SINGLE[name], one.weights[None])[0]), layers)
        elif name in PAIRED:
            for rows, other in zip(paired, maps[1:], strict=True):
                _put(rows, name, stream, *_together(PAIRED[name], maps[0], other))


def _put(rows: Rows, name: str, stream: str, value: float, layers: Array) -> None:
    rows.setdefault((name, Column("*", stream)), []).append(value)
    for layer, one in enumerate(layers):
        rows.setdefault((name, Column("*", stream, layer)), []).append(float(one))


_NO_LAYERS: Array = np.empty(0)


def _together(
    measure: Callable[[Array, Array], Any], one: AlignedMap, other: AlignedMap
) -> tuple[float, Array]:
    value = float(_each(measure, one.weights[None], other.weights[None])[0])
    if one.layers is None or other.layers is None:
        return value, _NO_LAYERS
    return value, _each(measure, one.layers, other.layers)


def _each(measure: Callable[..., Any], *maps: Array) -> Array:
    """Return a measure of each row of maps (row, n); NaN where one of them has no mass."""
    defined = np.logical_and.reduce([np.isfinite(one).all(-1) & one.any(-1) for one in maps])
    values = np.full(len(maps[0]), np.nan)
    if defined.any():
        values[defined] = measure(*(one[defined] for one in maps))
    return values


def _earth_mover(one: AlignedMap, other: AlignedMap) -> float:
    grid = None if one.positions is None else one.positions.grid
    if grid is None or not (np.isfinite(one.weights).all() and np.isfinite(other.weights).all()):
        return float("nan")
    return float(metrics.earth_mover_distance(one.weights, other.weights, grid))
