"""Which probes are looked at: one set of filters for the comparison and the probe page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import streamlit as st

from audit.records import Comparison
from dashboards import blocks, data, state

if TYPE_CHECKING:
    import polars as pl

EVERY = "all"
CHANGES = {
    EVERY: "all probes",
    "flipped": "changed class",
    "newly wrong": "became wrong",
    "fixed": "became right",
}
KEYS = ("changed", "segment", "label")


@dataclass(frozen=True)
class Selected:
    """Probes that pass the filters, one row each, and how many there are in all."""

    rows: pl.DataFrame
    total: int

    @property
    def filtered(self) -> bool:
        """Return whether a filter leaves probes out."""
        return len(self.rows) < self.total


def answers_of(comparison: Comparison) -> pl.DataFrame | None:
    """Return what both checkpoints answered, None where their runs are no longer in the store."""
    one, two = comparison.before, comparison.after
    where = data.store()
    if comparison.kind != "paired" or one is None or two is None:
        return None
    if not (where.has_run(one.run_id) and where.has_run(two.run_id)):
        return None
    return data.answers(one.run_id, two.run_id)


def choose(answers: pl.DataFrame) -> Selected:
    """Draw the filters and return the probes that pass them."""
    segments = sorted({value for row in answers["segments"].to_list() for value in row})
    labels = sorted({str(label) for label in answers["label"].drop_nulls().to_list()})
    counts = _counts(answers)
    with st.container(horizontal=True, gap="small"):
        if answers["change"].null_count() < len(answers):
            state.pick(
                st.segmented_control,
                "Predictions",
                "changed",
                list(CHANGES),
                default=EVERY,
                format_func=lambda key: f"{CHANGES[key]} ({counts[key]:,})",
                required=True,
                wrap=True,
            )
        if segments:
            _narrow("Segment", "segment", segments)
        if len(labels) > 1:
            _narrow("Label", "label", labels)
    return apply(answers)


def _narrow(label: str, key: str, options: list[str]) -> None:
    state.pick(
        st.selectbox,
        label,
        key,
        [EVERY, *options],
        default=EVERY,
        format_func=lambda value: f"every {key}" if value == EVERY else blocks.clip(value, 60),
        width=158,
    )


def apply(answers: pl.DataFrame) -> Selected:
    """Return the probes that pass the filters of the selection; unknown values filter nothing."""
    import polars as pl

    rows = answers
    changed, segment, label = (state.get(key) for key in KEYS)
    if changed == "flipped":
        rows = rows.filter(pl.col("predicted_before") != pl.col("predicted_after"))
    elif changed in CHANGES and changed != EVERY:
        rows = rows.filter(pl.col("change") == changed)
    if segment and answers["segments"].list.contains(segment).any():
        rows = rows.filter(pl.col("segments").list.contains(segment))
    if label and (answers["label"] == label).any():
        rows = rows.filter(pl.col("label") == label)
    return Selected(rows, len(answers))


def _counts(answers: pl.DataFrame) -> dict[str, int]:
    flipped = int((answers["predicted_before"] != answers["predicted_after"]).sum() or 0)
    wrong, fixed = (int((answers["change"] == kind).sum() or 0) for kind in ("newly wrong", "fixed"))
    return {EVERY: len(answers), "flipped": flipped, "newly wrong": wrong, "fixed": fixed}
