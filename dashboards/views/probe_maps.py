"""The maps of one probe of a comparison: as stored, or computed now for another head, row or method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from audit.errors import AuditError
from audit.records import Comparison, Map, Method, RunSpec
from audit.report.wording import change, clip, quantity
from dashboards import blocks, content, controls, data, downloads, loaded, state
from dashboards.content import Content
from dashboards.views import effects, matrix
from dashboards.views.maps import draw_layers, draw_pair, on_common_positions, weights_at

if TYPE_CHECKING:
    import polars as pl

KEYS = ("layer", "unit", "overlay", "head", "row", "method", matrix.KEY)
Pairs = list[tuple[Map, Map]]
"""For each stream, the map before and after."""


def draw(name: str, comparison: Comparison, manifests: Sequence[Mapping[str, Any]], probe_id: str) -> None:
    """Draw both maps of one probe, their difference, and the shares of its regions."""
    specs = loaded.specs_of(comparison)
    if specs is None:
        return
    table = data.probe_rows(name)
    table = table.filter(table["probe_id"] == probe_id)
    found = Content(None)
    with blocks.section():
        found = content.of_probe(probe_id, specs[0].inputs_digest)
    pairs: Pairs = []
    with blocks.section():
        for stream in list(dict.fromkeys(table["stream"].to_list())) or ["input"]:
            pairs.append(
                (data.map_of(specs[0].id, probe_id, stream), data.map_of(specs[1].id, probe_id, stream))
            )
    if not pairs:
        return
    st.header("The map, before and after", anchor=False, help=blocks.GLOSSARY["rollout"])
    blocks.meaning()
    _method_switch(comparison, manifests)
    above = st.container()
    pairs, computed = _on_demand(specs, pairs, found)
    pairs = [on_common_positions(*pair) for pair in pairs]
    with above:
        layer = controls.view(*pairs)
    if found.probe is None and found.reason:
        blocks.note(blocks.text(found.reason, 400))
    for before, after in pairs:
        with blocks.section(None if len(pairs) == 1 else f"Stream: {before.stream}"):
            draw_pair(before, after, found, layer)
    _more(specs, pairs, found)
    if computed is None:
        _shares(probe_id, table)
    else:
        blocks.note("The shares of the regions, and every verdict, are those of the stored map.")
    with blocks.folded("Every position", "positions") as opened:
        if opened:
            frame = positions_frame(pairs, layer)
            st.dataframe(frame, hide_index=True, height=300)
            downloads.table(f"{clip(probe_id, 60)}-positions", frame)


def _more(specs: Sequence[RunSpec], pairs: Pairs, found: Content) -> None:
    if pairs[0][0].positions.kind != "token":
        return
    with st.expander("Layer by layer", expanded=len(pairs) > 1), blocks.section():
        draw_layers(pairs)
    if any(before.stream == "prefix" for before, _ in pairs):
        with blocks.section("Every generated token", "Source and prefix shares of each row of the decoder."):
            matrix.draw(specs, found)


# --- stored or computed now --------------------------------------------------------------------


def _method_switch(comparison: Comparison, manifests: Sequence[Mapping[str, Any]]) -> None:
    methods = effects.same_pair(comparison, manifests)
    if len(methods) < 2:
        return
    names = list(methods)
    st.segmented_control(
        "Audited with",
        names,
        default=comparison.method if comparison.method in names else names[0],
        key=f"method of {comparison.id}",
        on_change=_switch,
        args=(f"method of {comparison.id}", methods),
        required=True,
        help="Other audits of the same two checkpoints, with their own verdicts.",
    )


def _switch(key: str, methods: Mapping[str, str]) -> None:
    state.put(comparison=methods[st.session_state[key]])


def _on_demand(specs: tuple[RunSpec, RunSpec], pairs: Pairs, found: Content) -> tuple[Pairs, Method | None]:
    """Return the maps of the chosen head, row and method, and how they were made; None for the stored."""
    reason = found.reason if found.probe is None else loaded.obstacle(specs)
    if found.probe is None or reason:
        _switched_off(specs[0], reason or "The content of this probe is not at hand.")
        return pairs, None
    if not loaded.asked():
        _switched_off(specs[0], "Not stored: they are computed from the checkpoints.")
    if not loaded.ask(specs, "Compute single heads, other rows and methods"):
        return pairs, None
    try:
        checkpoint = loaded.pair(specs)[0]
        rows = controls.rows_of([one for one, _ in pairs], found.probe)
        method = controls.live_method(specs[0], checkpoint, rows)
        if method is None:
            return pairs, None
        before, after = loaded.capture(specs, found.probe, method)
    except AuditError as error:
        blocks.warn(error)
        return pairs, None
    given = " ".join([method.name, *(f"{key}={value}" for key, value in method.params.items())])
    blocks.note(f"Computed now, not stored: {blocks.text(given)}, output row {blocks.text(method.row)}.")
    return list(zip(before.maps, after.maps, strict=False)), method


def _switched_off(spec: RunSpec, reason: str) -> None:
    """Draw what cannot be switched, with the reason."""
    with st.container(horizontal=True, vertical_alignment="top", gap="medium"):
        for label, value in (
            ("Heads", controls.AVERAGED),
            ("Output row", spec.method.row),
            ("Method", spec.method.name),
        ):
            st.selectbox(label, [value], disabled=True, width=170, help=blocks.plain(reason))


# --- tables ------------------------------------------------------------------------------------


def _shares(probe_id: str, table: pl.DataFrame) -> None:
    with blocks.section("Shares of the regions in this probe", blocks.GLOSSARY["share"]):
        body = []
        for row in table.to_dicts():
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
        downloads.table(f"{clip(probe_id, 60)}-regions", table)


def positions_frame(pairs: Pairs, layer: int | None) -> pl.DataFrame:
    """Return both maps as a table, one row for each position; streams that differ in length are left out."""
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
