"""Geometry of the layer × region heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audit.records import Cell, Comparison
from audit.report import rows
from audit.report.forest import LABEL_WIDTH
from audit.report.wording import clip, decimals, finite, number, quantity

WIDTH, LEFT, TOP, ROW = 740.0, 164.0, 30.0, 30.0
WIDEST, CHARACTER = 72.0, 8.2
ROWS_SHOWN, LAYERS_SHOWN = 40, 96
STRONG = 0.7


@dataclass(frozen=True)
class HeatCell:
    """One cell: position, sign class, opacity in [0, 1], text inside and its full description."""

    x: float
    y: float
    sign: str
    opacity: float
    strong: bool
    text: str
    full: str


@dataclass(frozen=True)
class Heat:
    """The whole map; `largest` is the symmetric end of the scale, as printed."""

    labels: tuple[tuple[float, str, str], ...]
    layers: tuple[tuple[float, str], ...]
    cells: tuple[HeatCell, ...]
    cell_width: float
    height: float
    largest: str
    left_out: int


def _layer_cells(comparison: Comparison) -> list[Cell]:
    found = [
        c for c in comparison.cells if c.measure == "shift" and c.layer is not None and c.segment is None
    ]
    if not found:
        return []
    effect = "model" if any(c.effect == "model" for c in found) else found[0].effect
    return [c for c in found if c.effect == effect]


def _rows(cells: Sequence[Cell]) -> dict[tuple[str, str], dict[int, Cell]]:
    """Return the cells by (region, stream) and layer, the row with the largest shift first."""
    table: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        table.setdefault((cell.region, cell.stream), {})[cell.layer or 0] = cell
    return dict(sorted(table.items(), key=lambda row: -max(_size(cell) for cell in row[1].values())))


def _size(cell: Cell | None) -> float:
    return abs(cell.value) if cell is not None and cell.value is not None and finite(cell.value) else 0.0


def _places(largest: float, width: float) -> int | None:
    """Return as many decimals as a cell has room for; None where not even one figure fits."""
    wanted = decimals(largest)
    least = wanted - 1 if largest < 0.1 else 1
    fits = [places for places in range(wanted, least - 1, -1) if CHARACTER * (places + 2) <= width]
    return fits[0] if fits else None


def _heat_cell(cell: Cell | None, x: float, y: float, largest: float, places: int | None) -> HeatCell:
    if cell is None or cell.value is None or not finite(cell.value):
        reason = clip(cell.reason or "no number", 120) if cell is not None else "not computed"
        return HeatCell(x, y, "none", 0.0, False, "–" if places is not None else "", reason)
    opacity = abs(cell.value) / largest if largest else 0.0
    return HeatCell(
        x=x,
        y=y,
        sign="down" if cell.value < 0 else "up",
        opacity=round(opacity, 3),
        strong=opacity > STRONG,
        text=number(cell.value, places, signed=True) if places is not None else "",
        full=f"{rows.where_cell(cell)}: {quantity(cell.measure, cell.value)}",
    )


def heat_map(comparison: Comparison) -> Heat | None:
    """Return the shift by region (row) and layer (column); None without cells of layers.

    Colours run from the most negative to the most positive shift on one symmetric scale: the opacity
    of a cell is its absolute shift divided by the largest one shown.
    """
    table = _rows(_layer_cells(comparison))
    if not table:
        return None
    shown = list(table.items())[:ROWS_SHOWN]
    layers = sorted({layer for _, row in shown for layer in row})[:LAYERS_SHOWN]
    width = min(WIDEST, (WIDTH - LEFT - 2) / len(layers))
    largest = max(_size(cell) for _, row in shown for cell in row.values())
    places = _places(largest, width)
    names = [(rows.where(region, stream=stream), row) for (region, stream), row in shown]
    step = max(1, -(-22 // int(max(width, 1.0)))) if width < 22 else 1
    return Heat(
        labels=tuple(
            (TOP + ROW * (i + 0.5), clip(name, LABEL_WIDTH), name) for i, (name, _) in enumerate(names)
        ),
        layers=tuple(
            (round(LEFT + width * (j + 0.5), 1), str(layer))
            for j, layer in enumerate(layers)
            if j % step == 0
        ),
        cells=tuple(
            _heat_cell(row.get(layer), round(LEFT + width * j, 1), TOP + ROW * i, largest, places)
            for i, (_, row) in enumerate(names)
            for j, layer in enumerate(layers)
        ),
        cell_width=round(width, 2),
        height=TOP + ROW * len(shown) + 6,
        largest=quantity("shift", largest, signed=False),
        left_out=len(table) - len(shown),
    )
