"""Geometry of the region-shift plot: one row a region, shift against limit and noise floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from audit.records import Cell, Comparison, RuleVerdict, Verdict
from audit.report import rows
from audit.report.wording import clip, finite, number, quantity, span

WIDTH, LEFT, RIGHT = 740.0, 164.0, 538.0
TOP, ROW, BOTTOM = 14.0, 38.0, 34.0
ROWS_SHOWN = 60
LABEL_WIDTH = 20


@dataclass(frozen=True)
class Bound:
    """Allowed zone of one rule: left and right edge, and which edges are limits."""

    left: float
    right: float
    ticks: tuple[float, ...]
    kind: str


@dataclass(frozen=True)
class ForestRow:
    """Coordinates of one region's row; None or empty where the cell holds no number."""

    label: str
    full: str
    y: float
    outcome: str
    point: float | None
    interval: tuple[float, float] | None
    replicates: tuple[float, ...]
    band: tuple[float, float] | None
    bounds: tuple[Bound, ...]
    value: str
    spread: str


@dataclass(frozen=True)
class Forest:
    """One plot: its rows, ticks (x, text), zero line and size."""

    title: str
    rows: tuple[ForestRow, ...]
    ticks: tuple[tuple[float, str], ...]
    zero: float
    height: float
    left_out: int
    description: str


def nice_step(width: float, wanted: int = 6) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that cuts `width` in about `wanted` parts.

    Examples
    --------
    >>> nice_step(11.0), nice_step(0.9)
    (2.0, 0.2)
    """
    raw = width / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    return float(next((m * power for m in (1.0, 2.0, 5.0) if raw <= m * power * 1.0001), 10 * power))


def _bounds(found: RuleVerdict, center: float) -> tuple[float, float] | None:
    """Return the allowed zone in shares; infinite where one side is free."""
    rule = found.rule
    bound = found.limit if found.limit is not None else rule.fail
    if rule.kind == "excess":
        within = found.limit if found.limit is not None else rule.within
        if not isinstance(within, int | float):
            return None
        return center - abs(within), center + abs(within)
    if bound is None:
        return None
    size = abs(bound)
    return (
        -math.inf if rule.direction == "increase" else -size,
        math.inf if rule.direction == "decrease" else size,
    )


def _extent(cells: Sequence[Cell], zones: Iterable[tuple[float, float] | None]) -> tuple[float, float]:
    values = [0.0]
    for cell in cells:
        floor = rows.cell_floor(cell)
        band = (floor[0] - 2 * floor[1], floor[0] + 2 * floor[1]) if floor else ()
        values += [v for v in (cell.value, *(cell.interval or ()), *cell.replicates, *band) if v is not None]
    for zone in zones:
        values += zone or ()
    values = [value for value in values if finite(value)]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    step = nice_step(high - low)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick_text(value: float, step: float) -> str:
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return "0" if value == 0 else number(value, places, signed=True)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float

    def x(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(LEFT + (RIGHT - LEFT) * (inside - self.low) / (self.high - self.low), 1)


def _row(cell: Cell, judged: Sequence[RuleVerdict], y: float, scale: _Scale) -> ForestRow:
    floor = rows.cell_floor(cell)
    center = floor[0] if floor else 0.0
    bounds = []
    for found in judged:
        zone = _bounds(found, center)
        if zone is not None:
            ticks = tuple(scale.x(end) for end in zone if math.isfinite(end))
            bounds.append(Bound(scale.x(zone[0]), scale.x(zone[1]), ticks, found.rule.kind))
    name = rows.where(cell.region, stream=cell.stream)
    return ForestRow(
        label=clip(name, LABEL_WIDTH),
        full=name,
        y=y,
        outcome=rows.shown_outcome(judged[0]) if judged else "",
        point=scale.x(cell.value) if cell.value is not None and finite(cell.value) else None,
        interval=_pair(cell.interval, scale),
        replicates=tuple(scale.x(value) for value in cell.replicates if finite(value)),
        band=_pair((floor[0] - 2 * floor[1], floor[0] + 2 * floor[1]) if floor else None, scale),
        bounds=tuple(bounds),
        value=quantity(cell.measure, cell.value, like=cell.interval)
        if cell.value is not None
        else "undefined",
        spread=span(cell.measure, cell.interval) or clip(cell.reason or "", 30),
    )


def _pair(interval: tuple[float, float] | None, scale: _Scale) -> tuple[float, float] | None:
    if interval is None or any(math.isnan(end) for end in interval):
        return None
    return scale.x(interval[0]), scale.x(interval[1])


def _order(cells: Iterable[Cell], judged: dict[rows.Key, list[RuleVerdict]]) -> list[Cell]:
    rank = {"ERROR": 0, "FAIL": 1, "INCONCLUSIVE": 2, "WARN": 3, "PASS": 4}

    def key(cell: Cell) -> int:
        found = judged.get(rows.cell_key(cell))
        return rank[rows.shown_outcome(found[0])] if found else 5

    return sorted(rows.by_size(cells), key=key)


def _forest(effect: str, cells: Sequence[Cell], verdict: Verdict | None) -> Forest:
    judged = rows.judged_by(verdict)
    ordered = _order(cells, judged)
    shown = ordered[:ROWS_SHOWN]
    rules = [judged.get(rows.cell_key(cell), []) for cell in shown]
    zones = []
    for cell, founds in zip(shown, rules, strict=True):
        center = (rows.cell_floor(cell) or (0.0, 0.0))[0]
        zones += [_bounds(found, center) for found in founds]
    scale = _Scale(*_extent(shown, zones))
    ticks = _ticks(scale.low, scale.high)
    step = nice_step(scale.high - scale.low)
    return Forest(
        title="" if effect == "model" else f"{effect.replace('_', ' ').capitalize()} effect",
        rows=tuple(
            _row(cell, founds, TOP + ROW * (i + 0.5), scale)
            for i, (cell, founds) in enumerate(zip(shown, rules, strict=True))
        ),
        ticks=tuple((scale.x(tick), _tick_text(tick, step)) for tick in ticks),
        zero=scale.x(0.0),
        height=TOP + ROW * len(shown) + BOTTOM,
        left_out=len(ordered) - len(shown),
        description="; ".join(f"{rows.where_cell(c)} {quantity(c.measure, c.value)}" for c in shown[:12]),
    )


def forests(comparison: Comparison, verdict: Verdict | None) -> list[Forest]:
    """Return one plot for each effect (model, data, …) that has whole-stack shifts.

    Judged regions come first, worst outcome on top; then the others by the size of their shift. Zones
    and bands: a ``limit`` rule allows ±limit around zero, an ``excess`` rule ±within around the mean
    of the replicates; the noise band is the replicates' mean ± 2 SD.
    """
    whole = [c for c in comparison.cells if c.measure == "shift" and c.layer is None and c.segment is None]
    effects = dict.fromkeys(cell.effect for cell in whole)
    return [_forest(effect, [cell for cell in whole if cell.effect == effect], verdict) for effect in effects]
