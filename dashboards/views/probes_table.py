"""The probes of a comparison as a table, those that moved most first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import blocks, data, downloads, state
from dashboards.selection import Selected

if TYPE_CHECKING:
    import polars as pl

SHOWN = 200
COLUMNS = (
    "probe_id",
    "js_distance",
    "label",
    "predicted_before",
    "predicted_after",
    "confidence_before",
    "confidence_after",
    "change",
    "group",
)


def ranked(name: str, chosen: Selected) -> pl.DataFrame:
    """Return the selected probes with their JS distance, largest first; those without one last."""
    import polars as pl

    table = data.probe_rows(name)
    moved = table.group_by("probe_id").agg(pl.col("js_distance").max())
    joined = chosen.rows.join(moved, on="probe_id", how="left", maintain_order="left")
    return joined.sort("js_distance", "probe_id", descending=[True, False], nulls_last=True)


def draw(name: str, file: str, chosen: Selected) -> None:
    """Draw the table, saved under a name that begins with `file`; a click on a row leads to the probe."""
    if not len(chosen.rows):
        return
    with blocks.section(
        "Probes that moved most", "Sorted by the JS distance of the two maps. Click a row to see it."
    ):
        frame = ranked(name, chosen)
        shown = frame.select(COLUMNS)
        shown = shown[[column.name for column in shown if column.null_count() < len(column)]]
        largest = shown["js_distance"].max() if "js_distance" in shown.columns else None
        event = st.dataframe(
            shown.head(SHOWN),
            hide_index=True,
            height=min(316, 38 + 35 * min(SHOWN, len(shown))),
            on_select="rerun",
            selection_mode="single-row",
            key="probes",
            column_config=_columns(float(largest or 1.0)),
        )
        chosen_rows = event["selection"]["rows"]
        if chosen_rows:
            st.switch_page(
                state.page("probe"),
                query_params={"comparison": name, "probe": shown["probe_id"][chosen_rows[0]]},
            )
        if len(shown) > SHOWN:
            blocks.note(f"The first {SHOWN} of {len(shown):,}; the download holds all.")
        downloads.table(f"{file}-probes", shown)


def _columns(largest: float) -> dict[str, Any]:
    """Return how each column is drawn, with bars up to the `largest` distance."""
    return {
        "probe_id": st.column_config.TextColumn("probe"),
        "js_distance": st.column_config.ProgressColumn(
            "JS distance",
            help=blocks.GLOSSARY["JS distance"],
            format="%.3f",
            min_value=0.0,
            max_value=largest,
        ),
        "predicted_before": "predicted before",
        "predicted_after": "predicted after",
        "confidence_before": st.column_config.NumberColumn("confidence before", format="%.2f"),
        "confidence_after": st.column_config.NumberColumn("confidence after", format="%.2f"),
    }
