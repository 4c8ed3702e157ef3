"""How a shift is spread: over single probes, and over the segments of the probe set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from audit.records import Cell, Comparison
from audit.report import rows
from audit.report.wording import count
from dashboards import blocks, charts, data, downloads, forest, frames, state
from dashboards.selection import Selected, source
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


def distribution(comparison: Comparison, effect: str, cells: Sequence[Cell], chosen: Selected | None) -> None:
    """Draw the shifts of single probes in one region."""
    if chosen is None or not len(chosen.rows):
        return
    with blocks.section(
        "How it is spread over the probes", "One probe, one shift: does a mean hide two groups?"
    ):
        import polars as pl

        found = effects.shifts(cells, effect)
        region = choose_region(found)
        table = data.probe_rows(str(comparison.id))
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
        _histogram(source(comparison, chosen), region, wanted["shift"], effects.shifts(cells, "model"))


def _histogram(files: downloads.Source, region: str, shift: pl.Series, cells: Sequence[Cell]) -> None:
    values, missing = shift.drop_nulls().to_numpy(), shift.null_count()
    if not len(values):
        st.info(f"{blocks.plain(region, 60)} has no position in any of these probes.")
        return
    mean = next((cell.value for cell in cells if cell.region == region), None)
    shown = blocks.clip(region, 40)
    title = f"shift of {shown} in one probe (share)"
    what = f"Distribution of the shift of {shown} over probes"
    legend = "Solid line: the mean; dashed: no change."
    downloads.chart(
        f"{files.file}-distribution",
        charts.histogram,
        values,
        mean,
        title,
        alt=what,
        notes=(files.about, legend),
    )
    rose, fell = int((values > 0).sum()), int((values < 0).sum())
    gone = f"; {count(missing, 'probe')} without this region" if missing else ""
    blocks.note(f"Rose in {rose:,} and fell in {fell:,} of {count(len(values), 'probe')}{gone}. {legend}")


def segments(files: downloads.Source, effect: str, cells: Sequence[Cell], level: str) -> None:
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
        chosen = ", as chosen above" if state.get("region") == region else ""
        blocks.note(f"Region: <b>{blocks.text(region)}</b>{chosen}.")
        what = f"Shift of {region} by segment"
        notes = (files.about, *forest.legend(level))
        downloads.chart(f"{files.file}-segments", forest.forest, lines[:SEGMENTS], alt=what, notes=notes)
        if len(lines) > SEGMENTS:
            blocks.note(f"The first {SEGMENTS} of {len(lines)} segments; the download holds all.")
        downloads.table(f"{files.file}-segments", frames.cells(found))
