"""Altair charts: numbers come ready from cells and tables; nothing is estimated here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from audit.records import Cell
from audit.report import rows
from audit.report.wording import change, clip, quantity, span
from dashboards.theme import OUTCOMES, SHAPES, Palette

AXIS = 52
"""Pixels that the axis and its title take below a plot."""
LABEL_WIDTH = 22
SIGNED = "datum.value == 0 ? '0' : replace(format(datum.value, '+.2~r'), '0.', '.')"
"""Tick labels as the sentences print numbers: +.05."""


def heat_map(cells: Sequence[Cell], order: Sequence[str], colours: Palette) -> alt.LayerChart:
    """Return the shift by region (row) and layer (column), on one symmetric scale around zero.

    Parameters
    ----------
    cells : sequence of Cell
        One for each region × layer; drawn with a dash where there is no value.
    order : sequence of str
        Names of the rows from top to bottom.
    """
    values = [
        {
            "name": rows.where(cell.region, stream=cell.stream),
            "layer": cell.layer,
            "value": cell.value,
            "shown": quantity(cell.measure, cell.value, like=cell.interval)
            if cell.value is not None
            else "–",
            "interval": span(cell.measure, cell.interval) or (cell.reason or "not defined"),
            "levels": change(cell.before, cell.after),
        }
        for cell in cells
    ]
    largest = max((abs(row["value"]) for row in values if row["value"] is not None), default=0.0) or 1e-9
    for row in values:
        row["strong"] = row["value"] is not None and abs(row["value"]) > 0.62 * largest
    layers = sorted({row["layer"] for row in values})
    x = alt.X(
        "layer:O",
        title="layer (0 is nearest the input)",
        axis=alt.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap=True),
    )
    y = alt.Y(
        "name:N",
        sort=list(order),
        title=None,
        axis=alt.Axis(labelLimit=190, ticks=False, domain=False, labelPadding=10),
    )
    base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y)
    tiles = base.mark_rect(stroke=colours.page, strokeWidth=2, cornerRadius=3).encode(
        color=alt.Color(
            "value:Q",
            scale=alt.Scale(
                domain=[-largest, 0, largest],
                range=[colours.down, colours.middle, colours.up],
                interpolate="lab",
            ),
            legend=alt.Legend(
                title="shift",
                orient="right",
                gradientLength=110,
                labelExpr=SIGNED,
                values=[-largest, 0, largest],
            ),
        ),
        tooltip=[
            alt.Tooltip("name:N", title="region"),
            alt.Tooltip("layer:O"),
            alt.Tooltip("shown:N", title="shift"),
            alt.Tooltip("interval:N"),
            alt.Tooltip("levels:N", title="share"),
        ],
    )
    parts = [tiles]
    if len(layers) <= 13:
        parts.append(
            base.mark_text(fontSize=12).encode(
                text="shown:N",
                color=alt.condition("datum.strong", alt.value(colours.page), alt.value(colours.ink)),
            )
        )
    return finish(alt.layer(*parts), max(2, len(order)) * 34, colours)


def histogram(
    values: np.ndarray[Any, Any], mean: float | None, colours: Palette, *, title: str
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
    bins = int(np.clip(2 * np.sqrt(len(values)), 11, 51)) | 1  # odd: one bar stands around zero
    counts, edges = np.histogram(values, bins=bins, range=(-reach, reach))
    bars = [
        {
            "low": float(edges[i]),
            "high": float(edges[i + 1]),
            "count": int(n),
            "side": _side(edges[i], edges[i + 1]),
        }
        for i, n in enumerate(counts)
        if n
    ]
    x = alt.X(
        "low:Q",
        bin="binned",
        title=title,
        scale=alt.Scale(domain=[-reach, reach], nice=False),
        axis=alt.Axis(labelExpr=SIGNED, grid=False, tickCount=7),
    )
    columns = (
        alt.Chart(alt.Data(values=bars))
        .mark_bar(binSpacing=1)
        .encode(
            x=x,
            x2="high:Q",
            y=alt.Y(
                "count:Q", title="probes", axis=alt.Axis(tickMinStep=1, tickCount=4, gridColor=colours.line)
            ),
            color=alt.Color(
                "side:N",
                scale=alt.Scale(
                    domain=["fell", "about zero", "rose"], range=[colours.down, colours.dot, colours.up]
                ),
                legend=None,
            ),
            tooltip=[
                alt.Tooltip("low:Q", format="+.4f", title="from"),
                alt.Tooltip("high:Q", format="+.4f", title="to"),
                alt.Tooltip("count:Q", title="probes"),
            ],
        )
    )
    marks = [{"at": 0.0, "what": "zero"}] + ([{"at": mean, "what": "mean"}] if mean is not None else [])
    rules = (
        alt.Chart(alt.Data(values=marks))
        .mark_rule(strokeWidth=1.8)
        .encode(
            x=alt.X("at:Q"),
            color=alt.condition("datum.what == 'mean'", alt.value(colours.ink), alt.value(colours.soft)),
            strokeDash=alt.condition("datum.what == 'mean'", alt.value([1, 0]), alt.value([4, 3])),
            tooltip=[alt.Tooltip("what:N", title="line"), alt.Tooltip("at:Q", format="+.4f")],
        )
    )
    return finish(alt.layer(columns, rules), 190, colours)


def _side(low: float, high: float) -> str:
    return "fell" if high <= 0 else "rose" if low >= 0 else "about zero"


def layer_matrix(cells: Sequence[dict[str, Any]], colours: Palette) -> alt.LayerChart:
    """Return the difference of a row by layer and position, streams beside each other.

    Parameters
    ----------
    cells : sequence of dict
        Keys ``stream``, ``position``, ``layer``, ``before``, ``after``, ``value``.
    """
    largest = max((abs(cell["value"]) for cell in cells), default=0.0) or 1e-9
    several = len({cell["stream"] for cell in cells}) > 1
    rows_ = [
        {**cell, "place": f"{cell['stream']} {cell['position']}" if several else str(cell["position"])}
        for cell in cells
    ]
    tiles = (
        alt.Chart(alt.Data(values=rows_))
        .mark_rect()
        .encode(
            x=alt.X(
                "place:N",
                sort=list(dict.fromkeys(row["place"] for row in rows_)),
                title="position",
                axis=alt.Axis(labelAngle=-60, labelOverlap=True, ticks=False, domain=False),
            ),
            y=alt.Y("layer:O", sort="descending", axis=alt.Axis(ticks=False, domain=False)),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(
                    domain=[-largest, 0, largest],
                    range=[colours.down, colours.middle, colours.up],
                    interpolate="lab",
                ),
                legend=alt.Legend(title="difference", gradientLength=110, labelExpr=SIGNED),
            ),
            tooltip=[
                alt.Tooltip("stream:N"),
                alt.Tooltip("position:O"),
                alt.Tooltip("layer:O"),
                alt.Tooltip("before:Q", format=".4f"),
                alt.Tooltip("after:Q", format=".4f"),
                alt.Tooltip("value:Q", format="+.4f", title="difference"),
            ],
        )
    )
    return finish(alt.layer(tiles), max(80, 26 * len({cell["layer"] for cell in cells})) + 30, colours)


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
    rows_ = [
        {"start": float(start), "end": float(end), "share": float(value), "when": when}
        for when, weights in (("before", before), ("after", after))
        for (start, end), value in zip(times, weights, strict=True)
    ]
    lines = (
        alt.Chart(alt.Data(values=rows_))
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            x=alt.X("start:Q", title="seconds"),
            y=alt.Y("share:Q", title="share of the map"),
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


def trend(
    found: Sequence[dict[str, Any]],
    limits: Sequence[float],
    control: tuple[float, float] | None,
    approvals: Sequence[dict[str, Any]],
    colours: Palette,
) -> alt.LayerChart:
    """Return a shift over the audits of one model.

    Parameters
    ----------
    found : sequence of dict
        Keys ``look``, ``time``, ``value``, ``low``, ``high``, ``outcome``, ``comparison``, ``after``.
    limits : sequence of float
        Of the policy, drawn as dashed lines.
    control : (low, high) or None
        Where harmless re-trainings lie, drawn as a band.
    approvals : sequence of dict
        Keys ``look``, ``by``, ``what``; drawn as vertical lines with a flag.
    """
    x = _looks(found)
    y = alt.Y(
        "value:Q",
        title="shift",
        axis=alt.Axis(labelExpr=SIGNED, gridColor=colours.line, tickCount=6),
        scale=alt.Scale(zero=True),
    )
    colour = alt.Color(
        "outcome:N", scale=alt.Scale(domain=list(OUTCOMES), range=list(colours.outcomes)), legend=None
    )
    shape = alt.Shape("outcome:N", scale=alt.Scale(domain=list(OUTCOMES), range=list(SHAPES)), legend=None)
    base = alt.Chart(alt.Data(values=list(found))).encode(x=x)
    band = [{"low": control[0], "high": control[1]}] if control else []
    layers = [
        alt.Chart(alt.Data(values=band))
        .mark_rect(color=colours.noise, opacity=0.45)
        .encode(y=alt.Y("low:Q"), y2="high:Q"),
        alt.Chart(alt.Data(values=[{"value": end} for end in limits]))
        .mark_rule(strokeDash=[5, 4], color=colours.edge, strokeWidth=1.6)
        .encode(y=alt.Y("value:Q")),
        *_flags(approvals, colours),
        base.mark_line(color=colours.dot, strokeWidth=1.5).encode(y=y),
        base.transform_filter("datum.low != null")
        .mark_rule(strokeWidth=2)
        .encode(y=alt.Y("low:Q"), y2="high:Q", color=colour),
        base.mark_point(filled=True, size=90, opacity=1, stroke=colours.page).encode(
            y=y,
            color=colour,
            shape=shape,
            tooltip=[
                alt.Tooltip("time:T", format="%d %b %Y, %H:%M"),
                alt.Tooltip("value:Q", format="+.4f", title="shift"),
                alt.Tooltip("outcome:N"),
                alt.Tooltip("after:N", title="checkpoint"),
                alt.Tooltip("comparison:N"),
            ],
        ),
    ]
    return finish(alt.layer(*layers), 260, colours)


def _looks(found: Sequence[dict[str, Any]]) -> alt.X:
    """Return an axis of audits one after another, with their days: two may follow within a minute."""
    days = {str(row["look"]): f"{row['time'][8:10]}.{row['time'][5:7]}." for row in found}
    return alt.X(
        "look:O",
        title="audits, oldest first (day.month.)",
        scale=alt.Scale(type="point", padding=0.5),
        axis=alt.Axis(labelExpr=f"{json.dumps(days)}[datum.value]", labelAngle=0, labelOverlap=True),
    )


def _flags(approvals: Sequence[dict[str, Any]], colours: Palette) -> list[alt.Chart]:
    base = alt.Chart(alt.Data(values=list(approvals))).encode(
        x=alt.X("look:O"),
        tooltip=[alt.Tooltip("by:N", title="approved by"), alt.Tooltip("what:N", title="accepted")],
    )
    flag = base.mark_text(text="⚑", fontSize=17, baseline="top", align="left", color=colours.mass)
    return [base.mark_rule(color=colours.mass, strokeWidth=1.4), flag.encode(y=alt.value(0))]


def evidence(found: Sequence[dict[str, Any]], alarm: float, colours: Palette) -> alt.LayerChart:
    """Return the evidence of a drift after each audit, and the line from which on it is told.

    Parameters
    ----------
    found : sequence of dict
        Keys ``look``, ``time``, ``evidence`` (> 0), ``share``, ``comparison``.
    alarm : float
    """
    highest = max([alarm, *(row["evidence"] for row in found)])
    lowest = min([0.5, *(row["evidence"] for row in found)])
    y = alt.Y(
        "evidence:Q",
        title="evidence (log)",
        scale=alt.Scale(type="log", domain=[lowest * 0.8, highest * 1.6], nice=False),
        axis=alt.Axis(gridColor=colours.line, values=[10.0**k for k in range(-6, 13)], format="~g"),
    )
    base = alt.Chart(alt.Data(values=list(found))).encode(x=_looks(found))
    told = alt.condition(f"datum.evidence >= {alarm}", alt.value(colours.up), alt.value(colours.dot))
    line = alt.Chart(alt.Data(values=[{"evidence": alarm}])).mark_rule(
        strokeDash=[5, 4], color=colours.up, strokeWidth=1.6
    )
    marks = base.mark_point(filled=True, size=80, opacity=1).encode(
        y=y,
        color=told,
        tooltip=[
            alt.Tooltip("time:T", format="%d %b %Y, %H:%M"),
            alt.Tooltip("evidence:Q", format=".3g"),
            alt.Tooltip("share:Q", format=".4f", title="share"),
            alt.Tooltip("comparison:N"),
        ],
    )
    path = base.mark_line(color=colours.dot, strokeWidth=1.5).encode(y=y)
    return finish(alt.layer(line.encode(y=y), path, marks), 150, colours)


def finish(chart: alt.LayerChart, height: int, colours: Palette) -> alt.LayerChart:
    """Set size and letters."""
    return (
        chart.properties(width="container", height=height + AXIS)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=colours.ink, titleColor=colours.soft, titleFontWeight="normal", labelFontSize=12.5
        )
        .configure_legend(labelColor=colours.soft, titleColor=colours.soft, titleFontWeight="normal")
        .configure(background="transparent", aria=False)
        .configure_mark(aria=False)
    )


def name_of(cell: Cell) -> str:
    """Return the name under which a cell's region is drawn."""
    return clip(rows.where(cell.region, stream=cell.stream), LABEL_WIDTH + 18)
