"""How a shift is spread: over single probes, and over the segments of the probe set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from audit.records import Cell
from audit.report import rows
from audit.report.wording import count
from dashboards import blocks, charts, data, downloads, forest, frames, state
from dashboards.selection import Selected
from dashboards.views import effects

if TYPE_CHECKING:
    import polars as pl

SEGMENTS = 30
"""Segments drawn at most; the download holds all."""


def choose_region(cells: Sequence[Cell]) -> str | None:
    """Draw the choice of one region; the one that moved most comes first."""
    names = list(dict.fromkeys(cell.region for cell in rows.by_size(cells)))
    if not names:
        return None
    return state.pick(
        st.selectbox,
        "Region",
        "region",
        names,
        default=names[0],
        format_func=lambda name: blocks.clip(name, 60),
        width=260,
    )


def distribution(name: str, effect: str, cells: Sequence[Cell], chosen: Selected | None) -> None:
    """Draw the shifts of single probes in one region."""
    if chosen is None or not len(chosen.rows):
        return
    with blocks.section(
        "How it is spread over the probes", "One probe, one shift: does a mean hide two groups?"
    ):
        import polars as pl

        found = effects.shifts(cells, effect)
        region = choose_region(found)
        table = data.probe_rows(name)
        if region is None or table.is_empty():
            blocks.note("This comparison holds no table of probes.")
            return
        if effect != "model":
            blocks.note(
                "One probe has a shift between the two checkpoints alone: what follows is the effect of the "
                "checkpoint on the first probe set."
            )
        wanted = table.filter(pl.col("region") == region)
        wanted = wanted.join(chosen.rows.select("probe_id"), on="probe_id", how="semi")
        _histogram(name, region, wanted["shift"], effects.shifts(cells, "model"))


def _histogram(name: str, region: str, shift: pl.Series, cells: Sequence[Cell]) -> None:
    values, missing = shift.drop_nulls().to_numpy(), shift.null_count()
    if not len(values):
        st.info(f"{blocks.plain(region, 60)} has no position in any of these probes.")
        return
    mean = next((cell.value for cell in cells if cell.region == region), None)
    shown = blocks.clip(region, 40)
    title = f"shift of {shown} in one probe (share)"
    what = f"Distribution of the shift of {shown} over probes"
    downloads.chart(f"{name}-distribution", charts.histogram, values, mean, title, alt=what)
    rose, fell = int((values > 0).sum()), int((values < 0).sum())
    gone = f"; {count(missing, 'probe')} without this region" if missing else ""
    blocks.note(
        f"Rose in {rose:,} and fell in {fell:,} of {count(len(values), 'probe')}{gone}. "
        "Solid line: the mean; dashed: no change."
    )


def segments(name: str, effect: str, cells: Sequence[Cell]) -> None:
    """Draw the shift of the chosen region in each segment of the selected probes."""
    found = [
        c for c in cells if c.measure == "shift" and c.segment and c.layer is None and c.effect == effect
    ]
    if not found:
        return
    with blocks.section("By segment", "The same shift, in each part of the probe set."):
        regions = list(dict.fromkeys(cell.region for cell in found))
        ranked = [cell.region for cell in rows.by_size(effects.shifts(cells, effect))]
        region = state.get("region")
        if region not in regions:
            region = next((one for one in ranked if one in regions), regions[0])
        lines = [
            forest.Line(blocks.clip(str(cell.segment), 40), cell) for cell in found if cell.region == region
        ]
        blocks.note(f"Region: <b>{blocks.text(region)}</b>, as chosen above.")
        what = f"Shift of {region} by segment"
        downloads.chart(f"{name}-segments", forest.forest, lines[:SEGMENTS], alt=what)
        if len(lines) > SEGMENTS:
            blocks.note(f"The first {SEGMENTS} of {len(lines)} segments; the download holds all.")
        downloads.table(f"{name}-segments", frames.cells(found))
