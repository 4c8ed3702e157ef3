"""Probe: one input, its map before and after, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from audit.report.wording import number, quantity
from dashboards import blocks, data, selection, state
from dashboards.views import compare, probe_maps, probes_table

if TYPE_CHECKING:
    import polars as pl

ORDERS = {"moved": "map moved most", "region": "region moved most", "file": "order of the file"}
KEYS = (
    "comparison",
    *selection.KEYS,
    "order",
    "region",
    "probe",
    *probe_maps.KEYS,
)


def page() -> None:
    """Draw one probe of the chosen comparison."""
    st.title("Probe", anchor=False)
    manifests = list(reversed(data.comparisons().manifests))
    if not manifests:
        blocks.no_comparison()
        return
    name = compare.choose_comparison(manifests)
    comparison = data.comparison(name)
    answers = selection.answers_of(comparison)
    if answers is None:
        st.info(
            "This comparison cannot be shown probe by probe: it compares two probe sets, or its runs are no "
            "longer in the store.",
            icon=":material/info:",
        )
        return
    selection.drop_unknown(selection.options(answers))
    with st.expander("Filter the probes", expanded=selection.apply(answers).filtered):
        chosen = selection.choose(answers)
    if not len(chosen.rows):
        st.info("No probe fits these filters; widen them.", icon=":material/filter_alt_off:")
        return
    row = _choose_probe(name, _ordered(name, chosen), answers)
    _answers(row)
    probe_maps.draw(name, comparison, manifests, str(row["probe_id"]))
    state.publish(*KEYS)


def _ordered(name: str, chosen: selection.Selected) -> pl.DataFrame:
    import polars as pl

    frame = probes_table.ranked(name, chosen)
    order = state.get("order")
    if order == "file":
        return chosen.rows.select("probe_id").join(frame, on="probe_id", how="left", maintain_order="left")
    region = state.get("region")
    table = data.probe_rows(name)
    if order == "region" and region and (table["region"] == region).any():
        shift = table.filter(pl.col("region") == region).select("probe_id", pl.col("shift").abs())
        frame = frame.join(shift.unique("probe_id"), on="probe_id", how="left", maintain_order="left")
        return frame.sort("shift", descending=True, nulls_last=True, maintain_order=True)
    return frame


def _choose_probe(name: str, frame: pl.DataFrame, answers: pl.DataFrame) -> Mapping[str, Any]:
    ids = [str(one) for one in frame["probe_id"].to_list()]
    asked = state.get("probe")
    if asked is not None and asked not in ids:
        known = asked in set(answers["probe_id"].to_list())
        why = "is left out by the filters" if known else "is not in this comparison"
        st.warning(
            f"Probe {blocks.plain(asked, 40)} {why}; another one is shown.", icon=":material/link_off:"
        )
        state.put(probe=None)
    current = ids.index(asked) if asked in ids else 0
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _step("Previous", ids, current - 1, "Left", ":material/chevron_left:")
        state.pick(
            st.selectbox, f"Probe ({current + 1:,} of {len(ids):,})", "probe", ids, default=ids[0], width=230
        )
        _step("Next", ids, current + 1, "Right", ":material/chevron_right:")
        state.pick(
            st.selectbox,
            "Sorted by",
            "order",
            list(ORDERS),
            default="moved",
            format_func=ORDERS.__getitem__,
            width=190,
        )
        if state.get("order") == "region":
            regions = sorted(set(data.probe_rows(name)["region"].to_list()))
            state.pick(
                st.selectbox, "Region", "region", regions, default=regions[0] if regions else None, width=180
            )
    return frame.row(current, named=True)


def _step(label: str, ids: Sequence[str], index: int, key: str, icon: str) -> None:
    inside = 0 <= index < len(ids)
    st.button(
        label,
        icon=icon,
        shortcut=key,
        disabled=not inside,
        key=f"step {label}",
        on_click=state.put,
        kwargs={"probe": ids[index], "tokens": None} if inside else {},
    )


def _answers(row: Mapping[str, Any]) -> None:
    def answer(side: str) -> tuple[str, str]:
        confidence = row[f"confidence_{side}"]
        sure = f"{blocks.term('confidence')} {number(confidence, 2)}" if confidence is not None else ""
        return blocks.text(row[f"predicted_{side}"] or "no prediction", 60), sure

    distance = quantity("js_distance", row["js_distance"])
    items = [
        ("Right answer", blocks.text(row["label"] if row["label"] is not None else "unknown", 60), ""),
        ("Predicted before", *answer("before")),
        ("Predicted after", *answer("after")),
        ("Change", blocks.text(row["change"] or "–"), ""),
        (blocks.term("JS distance"), distance, "of the two maps"),
    ]
    extra = " · ".join([f"group {row['group']}"] * bool(row["group"]) + list(row["segments"] or ()))
    blocks.html(
        f'<div class="bare">{blocks.figures(items)}</div><p class="note under">{blocks.text(extra)}</p>'
    )
