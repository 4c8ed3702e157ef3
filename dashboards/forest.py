"""The forest plot: shifts with intervals, limits and the noise floor, one row a region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from audit.records import Cell, RuleVerdict
from audit.report import rows
from audit.report.wording import change, quantity, span
from dashboards.chart_style import SIGNED, finish, names, outcome_colour, outcome_shape
from dashboards.theme import OUTCOMES, SHAPES, Palette

Rows = list[dict[str, Any]]

ROW = 40
FAR = 6
"""A limit so many times the largest shift is named below the plot instead of drawn."""


@dataclass(frozen=True)
class Line:
    """One row of the forest plot: a cell, what judged it, and the name that it is drawn under."""

    name: str
    cell: Cell
    judged: tuple[RuleVerdict, ...] = ()

    @property
    def outcome(self) -> str:
        """Return the worst outcome of its rules, COMPARED without any."""
        return rows.shown_outcome(self.judged[0]) if self.judged else "COMPARED"


def zone(found: RuleVerdict, center: float) -> tuple[float, float] | None:
    """Return the shifts that a rule allows; infinite where one side is free, None where it cannot be said."""
    rule = found.rule
    if rule.kind == "excess":
        within = found.limit if found.limit is not None else rule.within
        return (center - abs(within), center + abs(within)) if isinstance(within, int | float) else None
    bound = found.limit if found.limit is not None else rule.fail
    if bound is None:
        return None
    return (
        -math.inf if rule.direction == "increase" else -abs(bound),
        math.inf if rule.direction == "decrease" else abs(bound),
    )


def forest(lines: Sequence[Line], colours: Palette, *, measure: str = "shift") -> alt.LayerChart:
    """Return shifts with intervals, limits, and the noise floor: one row a region.

    Parameters
    ----------
    lines : sequence of Line
        Drawn from top to bottom.
    colours : Palette
    measure : str
        Names the axis.
    """
    points = [_point(line) for line in lines]
    limits = [limit for line in lines for limit in _limits(line) if not _far(limit, lines)]
    dots = [
        {"name": line.name, "value": value, "text": quantity(measure, value)}
        for line in lines
        for value in line.cell.replicates
    ]
    x = alt.X(
        "value:Q",
        title=f"{measure.replace('_', ' ')} (after − before, share of the content)",
        scale=alt.Scale(domain=list(_extent(points, limits, dots)), nice=False),
        axis=alt.Axis(grid=True, gridColor=colours.line, tickCount=7, labelExpr=SIGNED, domain=False),
    )
    y = names([line.name for line in lines])
    behind = [*_background(points, limits, x, y, colours), _replicates(dots, x, y, colours)]
    front = _estimates(alt.Chart(alt.Data(values=points)).encode(y=y), x, measure, colours)
    return finish(alt.layer(*behind, *front), max(2, len(lines)) * ROW, colours)


def _background(points: Rows, limits: Rows, x: alt.X, y: alt.Y, colours: Palette) -> list[alt.Chart]:
    """Return what the shifts are held against: noise floor, zero, and limits."""
    band = (
        alt.Chart(alt.Data(values=points))
        .encode(y=y)
        .transform_filter("datum.band_low != null")
        .mark_bar(height=18, cornerRadius=3, color=colours.noise, opacity=0.75)
        .encode(x=_same(x, "band_low:Q"), x2="band_high:Q")
    )
    zero = alt.Chart(alt.Data(values=[{"value": 0}])).mark_rule(color=colours.soft).encode(x=x)
    ticks = [
        alt.Chart(alt.Data(values=[limit for limit in limits if limit["kind"] == kind]))
        .mark_tick(thickness=thickness, size=26, color=colours.edge)
        .encode(x=x, y=y, tooltip=[alt.Tooltip("text:N", title="policy allows")])
        for kind, thickness in (("excess", 1.2), ("limit", 3))
    ]
    return [band, zero, *ticks]


def _replicates(dots: Rows, x: alt.X, y: alt.Y, colours: Palette) -> alt.Chart:
    """Return one dot for each harmless re-training."""
    return (
        alt.Chart(alt.Data(values=dots))
        .mark_point(size=34, filled=False, color=colours.dot, strokeWidth=1.3)
        .encode(x=x, y=y, tooltip=[alt.Tooltip("text:N", title="one harmless re-training")])
    )


def _estimates(base: alt.Chart, x: alt.X, measure: str, colours: Palette) -> list[alt.Chart]:
    """Return the shifts themselves: intervals, marks, and numbers at the right edge."""
    bars = (
        base.transform_filter("datum.low != null")
        .mark_rule(strokeWidth=3, strokeCap="round")
        .encode(x=_same(x, "low:Q"), x2="high:Q", color=outcome_colour(colours))
    )
    marks = (
        base.transform_filter("datum.value != null")
        .mark_point(size=110, filled=True, opacity=1, stroke=colours.page, strokeWidth=1.2)
        .encode(
            x=x,
            color=outcome_colour(colours),
            shape=outcome_shape(),
            tooltip=[
                alt.Tooltip("name:N", title="region"),
                alt.Tooltip("shown:N", title=measure),
                alt.Tooltip("interval:N"),
                alt.Tooltip("levels:N", title="share"),
                alt.Tooltip("floor:N", title="noise floor"),
                alt.Tooltip("probes:N"),
                alt.Tooltip("outcome:N", title="verdict"),
            ],
        )
    )
    numbers = base.mark_text(
        align="right", baseline="middle", fontSize=12, fontWeight=600, color=colours.ink
    ).encode(x=alt.value("width"), text="shown:N")
    return [bars, marks, numbers]


def legend(level: str) -> tuple[str, str]:
    """Return the lines that explain the plot where it stands alone; `level` is that of the intervals."""
    shapes = ", ".join(
        f"{outcome} {shape.replace('-up', '')}" for outcome, shape in zip(OUTCOMES, SHAPES, strict=True)
    )
    return (
        f"Mark and line: mean shift with {level} interval. Thick tick: limit. Thin tick: allowed beyond "
        "re-training. Ring: one harmless re-training. Band: noise floor (mean ± 2 SD).",
        f"Marks: {shapes}.",
    )


def far_limits(lines: Sequence[Line]) -> list[str]:
    """Return the limits that the forest plot leaves out, because the shifts beside them would vanish."""
    far = [limit for line in lines for limit in _limits(line) if _far(limit, lines)]
    return list(dict.fromkeys(f"{limit['name']} {limit['text']}" for limit in far))


def _far(limit: dict[str, Any], lines: Sequence[Line]) -> bool:
    values = [line.cell.value for line in lines] + [end for line in lines for end in line.cell.interval or ()]
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return bool(largest and abs(limit["value"]) > FAR * largest)


def _same(channel: alt.X, field: str) -> alt.X:
    other = channel.copy()
    other.shorthand = field
    return other


def _point(line: Line) -> dict[str, Any]:
    cell, floor = line.cell, rows.cell_floor(line.cell)
    low, high = cell.interval or (None, None)
    return {
        "name": line.name,
        "value": cell.value,
        "low": low,
        "high": high,
        "band_low": floor[0] - 2 * floor[1] if floor else None,
        "band_high": floor[0] + 2 * floor[1] if floor else None,
        "outcome": line.outcome,
        "shown": quantity(cell.measure, cell.value, like=cell.interval),
        "interval": span(cell.measure, cell.interval),
        "levels": change(cell.before, cell.after),
        "floor": rows.cell_row(cell).floor,
        "probes": rows.probes(cell.n_probes, cell.n_missing, cell.n_clusters),
    }


def _limits(line: Line) -> list[dict[str, Any]]:
    floor = rows.cell_floor(line.cell)
    found = []
    for judged in line.judged:
        allowed = zone(judged, floor[0] if floor else 0.0)
        text = f"{rows.rule_row(judged).limit} ({judged.rule.kind})"
        found += [
            {"name": line.name, "value": end, "text": text, "kind": judged.rule.kind}
            for end in allowed or ()
            if math.isfinite(end)
        ]
    return found


def _extent(*tables: list[dict[str, Any]]) -> tuple[float, float]:
    keys = ("value", "low", "high", "band_low", "band_high")
    values = [row[key] for table in tables for row in table for key in keys if row.get(key) is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    width = (high - low) or 0.02
    return low - 0.06 * width, high + 0.2 * width
