"""Altair charts: numbers come ready from cells and tables; nothing is estimated here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from audit.records import Cell
from audit.report import rows
from audit.report.wording import change, clip, quantity, span
from dashboards.chart_style import PLAIN, SIGNED, diverging, finish, names
from dashboards.theme import Palette

LABEL_WIDTH = 40
LABELS = 36
"""Positions below a matrix that have a label each."""
STRONG = 0.62
"""Part of the largest value from which on the number inside a tile takes the colour of the page."""


def heat_map(cells: Sequence[Cell], order: Sequence[str], colours: Palette) -> alt.LayerChart:
    """Return the shift by region (row) and layer (column), on one symmetric scale around zero.

    Parameters
    ----------
    cells : sequence of Cell
        One for each region × layer; drawn with a dash where there is no value.
    order : sequence of str
        Names of the rows from top to bottom.
    """
    largest = max((abs(c.value) for c in cells if c.value is not None), default=0.0) or 1e-9
    x = alt.X(
        "layer:O",
        title="layer (0 is nearest the input)",
        axis=alt.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap=True),
    )
    data = alt.Data(values=[_tile(cell, largest) for cell in cells])
    base = alt.Chart(data).encode(x=x, y=names(tuple(order)))
    parts = [
        base.mark_rect(stroke=colours.page, strokeWidth=2, cornerRadius=3).encode(
            color=diverging(largest, colours, title="shift", orient="right", values=[-largest, 0, largest]),
            tooltip=[
                alt.Tooltip("name:N", title="region"),
                alt.Tooltip("layer:O"),
                alt.Tooltip("shown:N", title="shift"),
                alt.Tooltip("interval:N"),
                alt.Tooltip("levels:N", title="share"),
            ],
        )
    ]
    if len({cell.layer for cell in cells}) <= 13:
        inside = alt.condition("datum.strong", alt.value(colours.page), alt.value(colours.ink))
        parts.append(base.mark_text(fontSize=12).encode(text="shown:N", color=inside))
    return finish(alt.layer(*parts), max(2, len(order)) * 34, colours)


def _tile(cell: Cell, largest: float) -> dict[str, Any]:
    known = cell.value is not None
    return {
        "name": name_of(cell),
        "layer": cell.layer,
        "value": cell.value,
        "shown": quantity(cell.measure, cell.value, like=cell.interval) if known else "–",
        "interval": span(cell.measure, cell.interval) or (cell.reason or "not defined"),
        "levels": change(cell.before, cell.after),
        "strong": known and abs(cell.value or 0.0) > STRONG * largest,
    }


def histogram(
    values: np.ndarray[Any, Any], mean: float | None, title: str, colours: Palette
) -> alt.LayerChart:
    """Return how a shift is distributed over probes; zero and the mean are marked.

    Parameters
    ----------
    values : float array (probe,)
        Finite.
    mean : float or None
        The cell's own value.
    """
    reach = float(np.abs(values).max(initial=0.0)) or 0.01
    x = alt.X(
        "low:Q",
        bin="binned",
        title=title,
        scale=alt.Scale(domain=[-reach, reach], nice=False),
        axis=alt.Axis(labelExpr=SIGNED, grid=False, tickCount=7),
    )
    y = alt.Y("count:Q", title="probes", axis=alt.Axis(tickMinStep=1, tickCount=4, gridColor=colours.line))
    sides = alt.Scale(domain=list(SIDES), range=[colours.down, colours.dot, colours.up])
    columns = (
        alt.Chart(alt.Data(values=_bars(values, reach)))
        .mark_bar(binSpacing=1)
        .encode(
            x=x,
            x2="high:Q",
            y=y,
            color=alt.Color("side:N", scale=sides, legend=None),
            tooltip=[
                alt.Tooltip("low:Q", format="+.4f", title="from"),
                alt.Tooltip("high:Q", format="+.4f", title="to"),
                alt.Tooltip("count:Q", title="probes"),
            ],
        )
    )
    return finish(alt.layer(columns, _lines(mean, colours)), 190, colours)


SIDES = ("fell", "about zero", "rose")


def _bars(values: np.ndarray[Any, Any], reach: float) -> list[dict[str, Any]]:
    bins = int(np.clip(2 * np.sqrt(len(values)), 11, 51)) | 1  # odd: one bar stands around zero
    counts, edges = np.histogram(values, bins=bins, range=(-reach, reach))
    return [
        {"low": float(low), "high": float(high), "count": int(n), "side": _side(low, high)}
        for n, low, high in zip(counts, edges, edges[1:], strict=False)
        if n
    ]


def _side(low: float, high: float) -> str:
    return SIDES[0] if high <= 0 else SIDES[2] if low >= 0 else SIDES[1]


def _lines(mean: float | None, colours: Palette) -> alt.Chart:
    """Return the lines at zero and at the mean."""
    marks = [{"at": 0.0, "what": "zero"}] + ([{"at": mean, "what": "mean"}] if mean is not None else [])
    return (
        alt.Chart(alt.Data(values=marks))
        .mark_rule(strokeWidth=1.8)
        .encode(
            x=alt.X("at:Q"),
            color=alt.condition("datum.what == 'mean'", alt.value(colours.ink), alt.value(colours.soft)),
            strokeDash=alt.condition("datum.what == 'mean'", alt.value([1, 0]), alt.value([4, 3])),
            tooltip=[alt.Tooltip("what:N", title="line"), alt.Tooltip("at:Q", format="+.4f")],
        )
    )


def layer_matrix(cells: Sequence[dict[str, Any]], colours: Palette) -> alt.LayerChart:
    """Return the difference of a row by layer and position, streams beside each other.

    Parameters
    ----------
    cells : sequence of dict
        Keys ``stream``, ``position``, ``layer``, ``before``, ``after``, ``value``.
    colours : Palette
    """
    several = len({cell["stream"] for cell in cells}) > 1
    placed = [
        {**cell, "place": f"{cell['stream']} {cell['position']}" if several else str(cell["position"])}
        for cell in cells
    ]
    y = alt.Y("layer:O", sort="descending", axis=alt.Axis(ticks=False, domain=False))
    return _matrix(placed, y, colours)


def row_matrix(cells: Sequence[dict[str, Any]], colours: Palette) -> alt.LayerChart:
    """Return the difference of every generated token's row, by position of source and prefix.

    Parameters
    ----------
    cells : sequence of dict
        Keys ``stream``, ``position``, ``place``, ``row``, ``before``, ``after``, ``value``.
    colours : Palette
    """
    y = alt.Y("row:O", title="generated token", axis=alt.Axis(ticks=False, domain=False))
    return _matrix(cells, y, colours)


def _matrix(cells: Sequence[dict[str, Any]], y: alt.Y, colours: Palette) -> alt.LayerChart:
    largest = max((abs(cell["value"]) for cell in cells), default=0.0) or 1e-9
    field = y.shorthand.partition(":")[0]
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    crowded = len(places) > LABELS
    x = alt.X(
        "place:N",
        sort=places,
        title="position",
        axis=alt.Axis(labelAngle=-60, labelOverlap=crowded, ticks=False, domain=False),
    )
    tiles = (
        alt.Chart(alt.Data(values=list(cells)))
        .mark_rect()
        .encode(
            x=x,
            y=y,
            color=diverging(largest, colours, title="difference"),
            tooltip=[
                alt.Tooltip("stream:N"),
                alt.Tooltip("position:O"),
                alt.Tooltip(y.shorthand),
                alt.Tooltip("before:Q", format=".4f"),
                alt.Tooltip("after:Q", format=".4f"),
                alt.Tooltip("value:Q", format="+.4f", title="difference"),
            ],
        )
    )
    return finish(alt.layer(tiles), max(80, 26 * len({cell[field] for cell in cells})) + 30, colours)


def over_time(
    times: np.ndarray[Any, Any], before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], colours: Palette
) -> alt.LayerChart:
    """Return the share of each time span before and after.

    Parameters
    ----------
    times : float array (frame, 2)
        Start and end in seconds.
    before, after : float array (frame,)
    """
    steps = [*times.tolist(), [times[-1, 1]] * 2]  # the last span gets its width, too
    rows_ = [
        {"start": float(start), "end": float(end), "share": float(value), "when": when}
        for when, weights in (("before", before), ("after", after))
        for (start, end), value in zip(steps, [*weights, weights[-1]], strict=True)
    ]
    lines = (
        alt.Chart(alt.Data(values=rows_))
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            x=alt.X("start:Q", title="seconds", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=10)),
            y=alt.Y("share:Q", title="share of the map", axis=alt.Axis(labelExpr=PLAIN)),
            color=alt.Color(
                "when:N",
                scale=alt.Scale(domain=["before", "after"], range=[colours.down, colours.up]),
                legend=alt.Legend(title=None, orient="top"),
            ),
            tooltip=[
                alt.Tooltip("start:Q", format=".3f"),
                alt.Tooltip("end:Q", format=".3f"),
                alt.Tooltip("share:Q", format=".4f"),
                alt.Tooltip("when:N"),
            ],
        )
    )
    return finish(alt.layer(lines), 200, colours)


def name_of(cell: Cell) -> str:
    """Return the name under which a cell's region is drawn."""
    return clip(rows.where(cell.region, stream=cell.stream), LABEL_WIDTH)
