"""Charts of one model over time: its shifts, its share with change points, and the evidence of a drift."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from dashboards.chart_style import PLAIN, SIGNED, finish, outcome_colour, outcome_shape
from dashboards.theme import Palette

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """What the shifts of a history are held against.

    Attributes
    ----------
    limits : tuple of float
        Of the policy, drawn as dashed lines.
    control : (low, high) or None
        Where harmless re-trainings lie, drawn as a band.
    approvals : tuple of dict
        Keys ``look``, ``by``, ``what``; drawn as vertical lines with a flag.
    """

    limits: tuple[float, ...] = ()
    control: tuple[float, float] | None = None
    approvals: tuple[dict[str, Any], ...] = ()


def trend(found: Rows, held: Reference, colours: Palette) -> alt.LayerChart:
    """Return a shift over the audits of one model.

    Parameters
    ----------
    found : sequence of dict
        Keys ``look``, ``time``, ``value``, ``low``, ``high``, ``outcome``, ``comparison``, ``after``.
    held : Reference
    colours : Palette
    """
    y = alt.Y(
        "value:Q",
        title="shift (share of the content)",
        axis=alt.Axis(labelExpr=SIGNED, gridColor=colours.line, tickCount=6),
        scale=alt.Scale(zero=True),
    )
    base = alt.Chart(alt.Data(values=list(found))).encode(x=_looks(found))
    intervals = (
        base.transform_filter("datum.low != null")
        .mark_rule(strokeWidth=2)
        .encode(y=alt.Y("low:Q"), y2="high:Q", color=outcome_colour(colours))
    )
    marks = base.mark_point(filled=True, size=90, opacity=1, stroke=colours.page).encode(
        y=y,
        color=outcome_colour(colours),
        shape=outcome_shape(),
        tooltip=[
            alt.Tooltip("time:T", format="%d %b %Y, %H:%M"),
            alt.Tooltip("value:Q", format="+.4f", title="shift"),
            alt.Tooltip("outcome:N"),
            alt.Tooltip("after:N", title="checkpoint"),
            alt.Tooltip("comparison:N"),
        ],
    )
    line = base.mark_line(color=colours.dot, strokeWidth=1.5).encode(y=y)
    layers = [*_references(held, colours), *_flags(held.approvals, colours), line, intervals, marks]
    return finish(alt.layer(*layers), 260, colours)


def _references(held: Reference, colours: Palette) -> list[alt.Chart]:
    band = [{"low": held.control[0], "high": held.control[1]}] if held.control else []
    return [
        alt.Chart(alt.Data(values=band))
        .mark_rect(color=colours.noise, opacity=0.45)
        .encode(y=alt.Y("low:Q"), y2="high:Q"),
        alt.Chart(alt.Data(values=[{"value": end} for end in held.limits]))
        .mark_rule(strokeDash=[5, 4], color=colours.edge, strokeWidth=1.6)
        .encode(y=alt.Y("value:Q")),
    ]


def _looks(found: Rows) -> alt.X:
    """Return an axis of audits one after another, with their days, or the hours of a single day."""
    days = {str(row["look"]): f"{row['time'][8:10]}.{row['time'][5:7]}." for row in found}
    title = "audits, oldest first (day.month.)"
    if len(found) > 1 and len(set(days.values())) == 1:
        title = f"audits of {next(iter(days.values()))}, oldest first (UTC)"
        days = {str(row["look"]): row["time"][11:16] for row in found}
    return alt.X(
        "look:O",
        title=title,
        scale=alt.Scale(type="point", padding=0.5),
        axis=alt.Axis(labelExpr=f"{json.dumps(days)}[datum.value]", labelAngle=0, labelOverlap=True),
    )


def _flags(approvals: Rows, colours: Palette) -> list[alt.Chart]:
    base = alt.Chart(alt.Data(values=list(approvals))).encode(
        x=alt.X("look:O"),
        tooltip=[alt.Tooltip("by:N", title="approved by"), alt.Tooltip("what:N", title="accepted")],
    )
    flag = base.mark_text(text="⚑", fontSize=17, baseline="top", align="left", color=colours.mass)
    return [base.mark_rule(color=colours.mass, strokeWidth=1.4), flag.encode(y=alt.value(0))]


def share(found: Rows, changes: Sequence[int], colours: Palette) -> alt.LayerChart:
    """Return the share of a region after each audit, with the mean of each stretch between change points.

    Parameters
    ----------
    found : sequence of dict
        Keys ``look``, ``time``, ``share``, ``mean`` (of its stretch), ``stretch``, ``comparison``.
    changes : sequence of int
        Looks from which on the share is another; drawn as dashed vertical lines.
    colours : Palette
    """
    y = alt.Y("share:Q", title="share", axis=alt.Axis(labelExpr=PLAIN, gridColor=colours.line, tickCount=5))
    y.scale = alt.Scale(zero=False, padding=14)
    base = alt.Chart(alt.Data(values=list(found))).encode(x=_looks(found))
    tooltip = [
        alt.Tooltip("time:T", format="%d %b %Y, %H:%M"),
        alt.Tooltip("share:Q", format=".4f"),
        alt.Tooltip("mean:Q", format=".4f", title="mean of this stretch"),
        alt.Tooltip("comparison:N"),
    ]
    turns = (
        alt.Chart(alt.Data(values=[{"look": look} for look in changes]))
        .mark_rule(strokeDash=[3, 3], color=colours.up, strokeWidth=1.8)
        .encode(x=alt.X("look:O"))
    )
    means = base.mark_line(color=colours.ink, strokeWidth=2.4).encode(y=alt.Y("mean:Q"), detail="stretch:N")
    marks = base.mark_point(filled=True, size=60, opacity=1, color=colours.dot).encode(y=y, tooltip=tooltip)
    return finish(alt.layer(turns, means, marks), 150, colours)


def evidence(found: Rows, alarm: float, colours: Palette) -> alt.LayerChart:
    """Return the evidence of a drift after each audit, and the line from which on it is told.

    Parameters
    ----------
    found : sequence of dict
        Keys ``look``, ``time``, ``evidence`` (> 0), ``share``, ``comparison``.
    alarm : float
    colours : Palette
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
