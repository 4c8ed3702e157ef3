"""Probe: one input, its map before and after, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from audit.records import Comparison, Map
from audit.report.wording import change, clip, number, quantity
from dashboards import blocks, content, data, selection, state
from dashboards.views import compare, effects, probes_table
from dashboards.views.maps import draw_layers, draw_pair, weights_at

if TYPE_CHECKING:
    import polars as pl

WHOLE = "whole stack"
ORDERS = {"moved": "map moved most", "region": "region moved most", "file": "order of the file"}
KEYS = ("comparison", *selection.KEYS, "order", "region", "probe", "layer", "unit", "overlay")


def page() -> None:
    """Draw one probe of the chosen comparison."""
    st.title("Probe", anchor=False)
    manifests = list(reversed(data.comparisons().manifests))
    if not manifests:
        st.info(
            "There is no comparison in this store yet; `audit run audit.toml` makes one.",
            icon=":material/inbox:",
        )
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
    with st.expander("Filter the probes", expanded=selection.apply(answers).filtered):
        chosen = selection.choose(answers)
    if not len(chosen.rows):
        st.info("No probe fits these filters; widen them.", icon=":material/filter_alt_off:")
        return
    row = _choose_probe(name, _ordered(name, chosen), answers)
    _answers(row)
    _controls_and_maps(name, comparison, manifests, str(row["probe_id"]))
    state.publish(*KEYS)
    blocks.share_link()


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
        kwargs={"probe": ids[index]} if inside else {},
    )


def _answers(row: Mapping[str, Any]) -> None:
    def answer(side: str) -> tuple[str, str]:
        confidence = row[f"confidence_{side}"]
        sure = f"confidence {number(confidence, 2)}" if confidence is not None else ""
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
    blocks.html(f'<div class="bare">{blocks.figures(items)}</div><p class="note">{blocks.text(extra)}</p>')


def _controls_and_maps(
    name: str, comparison: Comparison, manifests: Sequence[Mapping[str, Any]], probe_id: str
) -> None:
    assert comparison.before is not None
    assert comparison.after is not None
    rows_of_probe = data.probe_rows(name)
    streams = list(
        dict.fromkeys(rows_of_probe.filter(rows_of_probe["probe_id"] == probe_id)["stream"].to_list())
    )
    found = content.Content(None)
    with blocks.section():
        digest = data.store().spec(comparison.before.run_id).inputs_digest
        found = content.of_probe(probe_id, digest)
    pairs: list[tuple[Map, Map]] = []
    with blocks.section():
        for stream in streams or ["input"]:
            pairs.append(
                (
                    data.map_of(comparison.before.run_id, probe_id, stream),
                    data.map_of(comparison.after.run_id, probe_id, stream),
                )
            )
    if not pairs:
        return
    layer = _controls(comparison, manifests, pairs)
    if found.probe is None and found.reason:
        blocks.note(blocks.text(found.reason, 400))
    for before, after in pairs:
        with blocks.section(None if len(pairs) == 1 else f"Stream: {before.stream}"):
            draw_pair(before, after, found, layer)
    if pairs[0][0].positions.kind == "token":
        with st.expander("Layer by layer", expanded=len(pairs) > 1), blocks.section():
            draw_layers(pairs)
    _shares(rows_of_probe, probe_id)
    with st.expander("Every position"), blocks.section():
        frame = _positions_frame(pairs, layer)
        st.dataframe(frame, hide_index=True, height=300)
        blocks.downloads(f"{clip(probe_id, 60)}-positions", frame)


def _controls(
    comparison: Comparison,
    manifests: Sequence[Mapping[str, Any]],
    pairs: Sequence[tuple[Map, Map]],
) -> int | None:
    """Draw what can be switched; what the store does not hold is there, but switched off, with the reason."""
    st.header("The map, before and after", anchor=False, help=blocks.GLOSSARY["rollout"])
    first = pairs[0][0]
    depth = min((len(one.layers) if one.layers is not None else 0) for pair in pairs for one in pair)
    chosen: int | None = None
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        if depth:
            options = [*map(str, range(depth)), WHOLE]
            value = state.pick(
                st.select_slider,
                "Up to layer",
                "layer",
                options,
                default=WHOLE,
                width=180,
                help="The map as it stands after this layer; the whole stack is what the verdict is about.",
            )
            chosen = int(value) if value is not None and value != WHOLE else None
        else:
            st.select_slider(
                "Up to layer",
                [WHOLE, " "],
                disabled=True,
                width=180,
                help="The runs were captured without maps of the layers (capture.layer_maps = false).",
            )
        if first.positions.kind == "token":
            state.pick(
                st.segmented_control,
                "Show",
                "unit",
                ["words", "tokens"],
                default="words",
                required=True,
                help="Words: the shares of a word's tokens are added up.",
            )
        else:
            state.pick(
                st.segmented_control,
                "Overlay",
                "overlay",
                ["patches", "smooth"],
                default="patches",
                required=True,
                help="Smooth is easier on the eye; patches are what the model really has.",
            )
        _method_switch(comparison, manifests)
        st.selectbox(
            "Heads",
            ["averaged"],
            disabled=True,
            width=120,
            help="The store keeps one map per probe, heads averaged; single heads need the checkpoint.",
        )
        st.selectbox(
            "Output row",
            [_row_name(comparison)],
            disabled=True,
            width=120,
            help="The row of the rollout matrix that was read at capture; another row needs a new capture.",
        )
    return chosen


def _row_name(comparison: Comparison) -> str:
    try:
        assert comparison.after is not None
        return data.store().spec(comparison.after.run_id).method.row
    except (AssertionError, KeyError):
        return "auto"


def _method_switch(comparison: Comparison, manifests: Sequence[Mapping[str, Any]]) -> None:
    methods = effects.same_pair(comparison, manifests)
    names = list(methods) or [comparison.method]
    alone = len(names) < 2
    st.selectbox(
        "Method",
        names,
        index=names.index(comparison.method) if comparison.method in names else 0,
        disabled=alone,
        key="method of probe",
        width=130,
        on_change=_switch,
        args=(methods,),
        help="Only this method was run on these two checkpoints."
        if alone
        else "Other audits of the same pair.",
    )


def _switch(methods: Mapping[str, str]) -> None:
    state.put(comparison=methods[st.session_state["method of probe"]])


def _shares(table: pl.DataFrame, probe_id: str) -> None:
    with blocks.section("Shares of the regions in this probe", blocks.GLOSSARY["share"]):
        body = []
        for row in table.filter(table["probe_id"] == probe_id).to_dicts():
            stream = "" if row["stream"] == "input" else f" · {row['stream']}"
            missing = row["shift"] is None
            body.append(
                (
                    f"<b>{blocks.text(row['region'], 60)}</b>{blocks.text(stream)}",
                    "no position in this probe" if missing else change(row["before"], row["after"]),
                    "" if missing else quantity("shift", row["shift"]),
                )
            )
        blocks.html(blocks.table((blocks.term("region"), "before → after", blocks.term("shift")), body))


def _positions_frame(pairs: Sequence[tuple[Map, Map]], layer: int | None) -> Any:
    import polars as pl

    frames = []
    for before, after in pairs:
        old, new = weights_at(before, layer), weights_at(after, layer)
        if len(old) != len(new):
            continue
        frames.append(
            pl.DataFrame(
                {
                    "stream": [before.stream] * len(old),
                    "position": np.arange(len(old)),
                    "special": before.positions.special,
                    "before": old,
                    "after": new,
                    "difference": new - old,
                }
            )
        )
    return pl.concat(frames) if frames else pl.DataFrame({"stream": [], "position": []})
