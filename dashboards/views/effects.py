"""Beside the forest plot: the corners of a 2×2, and what other methods found for the same pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from audit.records import Cell, Comparison
from audit.report import rows
from audit.report.wording import change, number, quantity, span
from dashboards import blocks, charts, data, downloads, frames
from dashboards.selection import Selected, source

EFFECTS = {
    "model": "the checkpoint",
    "data": "the data",
    "model_on_domain": "the checkpoint, on the new data",
    "interaction": "both together",
}
MEANING = {
    "model": "Checkpoint after minus checkpoint before, on the same probes.",
    "data": "The checkpoint before on the second probe set, minus the same checkpoint on the first.",
    "model_on_domain": "Checkpoint after minus checkpoint before, both on the second probe set.",
    "interaction": "By how much the checkpoint moves the map otherwise on the second probe set than on the "
    "first.",
}


def shifts(cells: Sequence[Cell], effect: str, *, layers: bool = False) -> list[Cell]:
    """Return the shift cells of one effect over all segments: of the whole stack, or of each layer."""
    return [
        cell
        for cell in cells
        if cell.measure == "shift"
        and cell.effect == effect
        and cell.segment is None
        and (cell.layer is not None) == layers
    ]


def crossing(file: str, cells: Sequence[Cell]) -> None:
    """Draw the shares of each region in all four corners of a 2×2."""
    corners = {effect: {(c.region, c.stream): c for c in shifts(cells, effect)} for effect in EFFECTS}
    if not corners["model_on_domain"]:
        return
    with blocks.section(
        "The checkpoint or the data",
        "Shares of each region with both checkpoints on both probe sets.",
    ):
        body = []
        for cell in rows.by_size(list(corners["model"].values())):
            key = (cell.region, cell.stream)
            new = corners["model_on_domain"].get(key)
            moved = [_short(corners[e].get(key)) for e in ("model", "data", "interaction")]
            levels = [change(one.before, one.after) if one else "–" for one in (cell, new)]
            body.append([f"<b>{blocks.text(charts.name_of(cell))}</b>", *levels, *moved])
        head = ("region", "on these probes", "on the new data", *(EFFECTS[e] for e in ("model", "data")))
        blocks.html(blocks.table((*head, EFFECTS["interaction"]), body))
        blocks.note(
            "First two columns: share before → after. Then what moved it: the checkpoint (same probes), the "
            "data (same checkpoint), and by how much both together differ from their sum."
        )
        flat = [cell for found in corners.values() for cell in found.values()]
        downloads.table(f"{file}-corners", frames.cells(flat))


def same_pair(comparison: Comparison, manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return method → newest comparison of the same two checkpoints; empty where runs are unknown."""
    one, two = comparison.before, comparison.after
    if one is None or two is None:
        return {}
    found = {
        str(m["method"]): str(m["comparison_id"])
        for m in reversed(manifests)
        if m["before"] and m["after"] and m["kind"] == comparison.kind
        if m["n_probes"] == comparison.n_probes
        if (m["before"]["digest"], m["after"]["digest"]) == (one.digest, two.digest)
    }
    return {**found, comparison.method: str(comparison.id)} if comparison.id else found


def methods(
    comparison: Comparison,
    manifests: Sequence[Mapping[str, Any]],
    region: str | None,
    chosen: Selected | None,
) -> None:
    """Draw what other methods found between the same two checkpoints, and how far they agree.

    Parameters
    ----------
    comparison : Comparison
    manifests : sequence of mapping
        Of all comparisons, newest first.
    region : str or None
        Whose shifts are compared probe by probe; None for the one that moved most.
    chosen : Selected or None
        The probes that are looked at; None for all.
    """
    names, file = same_pair(comparison, manifests), source(comparison, chosen).file
    if len(names) < 2 or (chosen is not None and not len(chosen.rows)):
        return
    with blocks.section("Do other methods agree", "The same two checkpoints, maps made in another way."):
        found = {method: _by_region(name, chosen) for method, name in names.items()}
        ranked = [cell.region for cell in rows.by_size(list(found[comparison.method].values()))]
        body = [
            [
                f"<b>{blocks.text(one)}</b>",
                *(_short(cells.get(one)) for cells in found.values()),
                _direction([cells.get(one) for cells in found.values()]),
            ]
            for one in ranked
        ]
        blocks.html(blocks.table(("region", *map(blocks.text, names), "direction"), body))
        region = region if region in ranked else next(iter(ranked), None)
        flat = [(method, cell) for method, cells in found.items() for cell in cells.values()]
        downloads.table(f"{file}-methods", frames.cells_by("method", flat))
        if region is not None:
            _matrix(f"{file}-agreement", region, names, chosen)


def _by_region(name: str, chosen: Selected | None) -> dict[str, Cell]:
    cells = data.comparison(name).cells
    if chosen is not None and chosen.filtered:
        cells = data.subset(name, chosen)
    return {cell.region: cell for cell in shifts(cells, "model")}


def _direction(cells: Sequence[Cell | None]) -> str:
    """Return whether the intervals that leave zero out lie on one side of it."""
    ends = [one.interval for one in cells if one is not None and one.interval is not None]
    signs = {1 if low > 0 else -1 for low, high in ends if low > 0 or high < 0}
    if not signs:
        return '<span class="soft">none moved</span>'
    return "agree" if len(signs) == 1 else "<b>disagree</b>"


def _matrix(file: str, region: str, names: Mapping[str, str], chosen: Selected | None) -> None:
    """Draw the rank correlation of one region's shifts over the probes, for each two methods."""
    found = agreement(region, names, chosen.ids if chosen is not None and chosen.filtered else None)
    if found is None:
        return
    body = [
        [f"<b>{blocks.text(one)}</b>", *(_correlation(found[one, other]) for other in names)] for one in names
    ]
    blocks.html(blocks.table(("", *map(blocks.text, names)), body))
    downloads.table(file, frames.agreement(region, found))
    blocks.note(
        f"Rank correlation, over the probes, of the shift of <b>{blocks.text(region, 60)}</b>: +1.00 means "
        "that two methods see the map move on the same probes, 0 that they do not."
    )


def _correlation(value: float | None) -> str:
    return "–" if value is None else number(value, 2, signed=True)


def agreement(
    region: str, names: Mapping[str, str], ids: Sequence[str] | None = None
) -> dict[tuple[str, str], float | None] | None:
    """Return Spearman's correlation of a region's shifts for each two methods, None without probes."""
    import polars as pl

    joined: pl.DataFrame | None = None
    for method, name in names.items():
        table = data.probe_rows(name)
        if table.is_empty():
            return None
        one = table.filter(pl.col("region") == region).unique(["probe_id"], keep="first")
        one = one if ids is None else one.filter(pl.col("probe_id").is_in(ids))
        one = one.select("probe_id", pl.col("shift").alias(method))
        joined = one if joined is None else joined.join(one, on="probe_id")
    assert joined is not None
    whole = joined.drop_nulls()

    def correlation(one: str, other: str) -> float | None:
        if len(whole) < 3:
            return None
        value = whole.select(pl.corr(one, other, method="spearman")).item()
        return None if value is None or np.isnan(value) else float(value)

    return {(one, other): correlation(one, other) for one in names for other in names}


def _short(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return "–"
    return f"{quantity('shift', cell.value, like=cell.interval)}<small>{span('shift', cell.interval)}</small>"
