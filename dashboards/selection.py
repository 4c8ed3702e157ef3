"""Which probes are looked at: one set of filters for the comparison and the probe page."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import streamlit as st

from audit.records import Comparison
from dashboards import blocks, data, downloads, state

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
    """Probes that pass the filters, one row each, how many there are in all, and the filters."""

    rows: pl.DataFrame
    total: int
    filters: tuple[str | None, str | None, str | None] = (None, None, None)

    @property
    def filtered(self) -> bool:
        """Return whether a filter leaves probes out."""
        return len(self.rows) < self.total

    @property
    def ids(self) -> list[str]:
        """Return the ids of the probes."""
        return [str(one) for one in self.rows["probe_id"].to_list()]

    @property
    def words(self) -> tuple[str, ...]:
        """Return the filters as they are read: became wrong, source=mail, label negative."""
        changed, segment, label = self.filters
        found = (CHANGES[changed] if changed else "", segment or "", f"label {label}" if label else "")
        return tuple(one for one in found if one)


def source(comparison: Comparison, chosen: Selected | None) -> downloads.Source:
    """Return what files of these probes are called, and what their charts say they are made from."""
    name = str(comparison.id)
    if chosen is None or not chosen.filtered:
        return downloads.Source(name, f"{name} · all {comparison.n_probes:,} probes")
    slug = "-".join(re.sub(r"[^\w.]+", "-", one).strip("-")[:40] for one in chosen.words)
    number = len(chosen.rows)
    about = f"{name} · {number:,} of {chosen.total:,} probes: {', '.join(chosen.words)}"
    return downloads.Source(f"{name}-{slug}-{number}-probes", about)


def answers_of(comparison: Comparison) -> pl.DataFrame | None:
    """Return what both checkpoints answered, None where their runs are no longer in the store."""
    one, two = comparison.before, comparison.after
    if comparison.kind != "paired" or one is None or two is None:
        return None
    return _answers(one.run_id, two.run_id)


def crossed(comparison: Comparison, chosen: Selected) -> Selected | None:
    """Return what the same filters leave of the second probe set of a 2×2, None where there is none."""
    runs = [str(one) for one in comparison.settings.get("domain") or ()][:2]
    answers = _answers(*runs) if len(runs) == 2 else None
    if answers is None:
        return None
    return Selected(_narrowed(answers, *chosen.filters), len(answers), chosen.filters)


def _answers(before: str, after: str) -> pl.DataFrame | None:
    where = data.store()
    if not (where.has_run(before) and where.has_run(after)):
        return None
    return data.answers(before, after)


def options(answers: pl.DataFrame) -> dict[str, list[str]]:
    """Return what each filter can be set to, beside `EVERY`."""
    known = answers["change"].null_count() < len(answers)
    return {
        "changed": [one for one in CHANGES if one != EVERY] if known else [],
        "segment": sorted({value for row in answers["segments"].to_list() for value in row}),
        "label": sorted({str(label) for label in answers["label"].drop_nulls().to_list()}),
    }


def drop_unknown(known: Mapping[str, Collection[str]]) -> None:
    """Say which asked-for values are not there, and take them out of the selection and the address.

    Parameters
    ----------
    known : mapping
        Key of the selection → its possible values.
    """
    asked = {key: state.get(key) for key in known}
    unknown = {
        key: value
        for key, value in asked.items()
        if value is not None and value != EVERY and value not in known[key]
    }
    if not unknown:
        return
    named = ", ".join(f"{key} “{blocks.plain(value, 40)}”" for key, value in unknown.items())
    st.warning(
        f"The link asks for what this comparison does not have, which is left out: {named}.",
        icon=":material/link_off:",
    )
    state.put(**dict.fromkeys(unknown))


def choose(answers: pl.DataFrame) -> Selected:
    """Draw the filters and return the probes that pass them."""
    _, segments, labels = options(answers).values()
    counts = _counts(answers)
    with st.container(horizontal=True, gap="small", vertical_alignment="top"):
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
    changed, segment, label = (state.get(key) for key in KEYS)
    changed = changed if changed in CHANGES and changed != EVERY else None
    segment = segment if segment and answers["segments"].list.contains(segment).any() else None
    label = label if label and (answers["label"] == label).any() else None
    return Selected(_narrowed(answers, changed, segment, label), len(answers), (changed, segment, label))


def _narrowed(
    answers: pl.DataFrame, changed: str | None, segment: str | None, label: str | None
) -> pl.DataFrame:
    import polars as pl

    rows = answers
    if changed == "flipped":
        rows = rows.filter(pl.col("predicted_before") != pl.col("predicted_after"))
    elif changed is not None:
        rows = rows.filter(pl.col("change") == changed)
    if segment is not None:
        rows = rows.filter(pl.col("segments").list.contains(segment))
    return rows if label is None else rows.filter(pl.col("label") == label)


def _counts(answers: pl.DataFrame) -> dict[str, int]:
    flipped = int((answers["predicted_before"] != answers["predicted_after"]).sum() or 0)
    wrong, fixed = (int((answers["change"] == kind).sum() or 0) for kind in ("newly wrong", "fixed"))
    return {EVERY: len(answers), "flipped": flipped, "newly wrong": wrong, "fixed": fixed}
