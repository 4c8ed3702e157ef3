"""Measures of whole maps, probe by probe → cells: for all probes, each layer and each segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.compare import compare_distances, compare_tables
from audit.pipeline.map_measures import Key, MapMeasures
from audit.records import Cell, Column, ShareTable
from audit.statistics.tables import segment_rows

Array = NDArray[np.float64]
Segments = Mapping[str, Sequence[str | None]]


def map_cells(found: MapMeasures, *, segments: Segments, options: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of measures of whole maps.

    Parameters
    ----------
    found : MapMeasures
        Of before, after and the replicates, in this order.
    segments : mapping of key to the value of each probe
        Told for the whole stack only.
    options : mapping
        ``groups``, ``replicate_kinds`` and the settings of the statistics, as for
        :func:`audit.statistics.tables.compare_tables`.
    """
    after, *others = found.paired
    cells = []
    for (measure, column), values in after.items():
        null = [one[measure, column] for one in others]
        cells.append(compare_distances(measure, values, null, column=column, **options))
        cells += _segmented(measure, column, values, null, segments=segments, options=options)
    return cells + list(_change_cells(found.single, segments, options))


def _segmented(
    measure: str,
    column: Column,
    values: Array,
    null: Sequence[Array],
    *,
    segments: Segments,
    options: Mapping[str, Any],
) -> Iterator[Cell]:
    if column.layer is not None:
        return
    groups = options["groups"]
    for segment, rows in segment_rows(segments, len(values)).items():
        own = {**options, "groups": None if groups is None else [groups[i] for i in rows]}
        part = [one[rows] for one in null]
        yield compare_distances(measure, values[rows], part, column=column, segment=segment, **own)


def _change_cells(
    runs: Sequence[Mapping[Key, Array]], segments: Segments, options: Mapping[str, Any]
) -> Iterator[Cell]:
    """Yield the signed changes of measures of one map, with the tests that shifts have."""
    common = [key for key in runs[0] if all(key in run for run in runs)]
    for measure in dict.fromkeys(name for name, _ in common):
        for deep in (False, True):
            columns = tuple(c for name, c in common if name == measure and (c.layer is not None) is deep)
            if not columns:
                continue
            before, after, *others = (_table(run, measure, columns) for run in runs)
            given = segments if not deep else None
            for cell in compare_tables(before, after, others, segments=given, **options):
                if cell.measure == "shift":
                    yield replace(cell, measure=measure, size=None)


def _table(run: Mapping[Key, Array], measure: str, columns: tuple[Column, ...]) -> ShareTable:
    values = np.stack([run[measure, column] for column in columns], axis=1)
    return ShareTable(tuple(map(str, range(len(values)))), columns, values)
