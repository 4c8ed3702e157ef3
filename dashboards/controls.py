"""What can be switched about a map: layer and view, and on loaded checkpoints head, row and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.records import Map, Method, Positions, Probe, RunSpec
from dashboards import blocks, probe_view, state

WHOLE = "whole stack"
AVERAGED = "averaged"
FIXED_ROWS = ("cls", "mean", "last")
WIDEST = 256
"""Positions whose rows can be chosen."""
LAYER_HELP = "The map as it stands after this layer; the whole stack is what the verdict is about."
NO_LAYERS = "No map of single layers is at hand: the runs were captured without them, or the method has none."


def view(*maps: Sequence[Map]) -> int | None:
    """Draw the layer slider and how a map is shown; return the layer, None for the whole stack."""
    every = [one for side in maps for one in side]
    with st.container(horizontal=True, vertical_alignment="top", gap="medium"):
        chosen = _layer(min((_depth(one) for one in every), default=0))
        kinds = {one.positions.kind for one in every}
        if "token" in kinds:
            state.pick(
                st.segmented_control,
                "Show",
                "unit",
                ["words", "tokens"],
                default="words",
                required=True,
                help="Words: the shares of a word's tokens are added up.",
            )
        if kinds - {"token"}:
            state.pick(
                st.segmented_control,
                "Overlay",
                "overlay",
                ["patches", "smooth"],
                default="patches",
                required=True,
                help="Smooth is easier on the eye; patches are what the model really has.",
            )
    return chosen


def _depth(one: Map) -> int:
    return 0 if one.layers is None else len(one.layers)


def _layer(depth: int) -> int | None:
    if not depth:
        st.select_slider("Up to layer", [WHOLE, " "], disabled=True, width=180, help=NO_LAYERS)
        return None
    options = [*map(str, range(depth)), WHOLE]
    value = state.pick(
        st.select_slider, "Up to layer", "layer", options, default=WHOLE, width=180, help=LAYER_HELP
    )
    return int(value) if value is not None and value != WHOLE else None


def live_method(spec: RunSpec, checkpoint: Any, rows: Sequence[tuple[str, str]]) -> Method | None:
    """Draw head, output row and method, to be computed now; return None for what the run stored.

    Parameters
    ----------
    spec : RunSpec
    checkpoint : Checkpoint
        Loaded; it says how many heads there are.
    rows : sequence of (row, label)
        Output rows that this input has beside the usual ones.
    """
    from audit.pipeline import LIVE_METHODS, head_count, method_on_demand

    labels = {"": f"as stored ({spec.method.row})", **{row: row for row in FIXED_ROWS}, **dict(rows)}
    methods = {"": f"as stored ({spec.method.name})"}
    methods |= {name: name for name in LIVE_METHODS if name != spec.method.name}
    heads = {"": AVERAGED, **{str(i): f"head {i}" for i in range(head_count(checkpoint))}}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        head = _choose(
            "Heads",
            "head",
            heads,
            150,
            "One head of the last layer over the averaged layers below (per-head rollout), or all averaged.",
        )
        row = _choose(
            "Output row",
            "row",
            labels,
            240,
            "Which position's attention is followed back to the input: what the head of the model reads, or "
            "any other.",
        )
        name = _choose(
            "Method, computed now",
            "method",
            methods,
            240,
            "How the map is made. With a single head it is always per-head rollout.",
        )
    if not (head or row or name):
        return None
    return method_on_demand(spec.method, name=name or None, row=row or None, head=int(head) if head else None)


def _choose(label: str, key: str, options: Mapping[str, str], width: int, explanation: str) -> str:
    value = state.pick(
        st.selectbox,
        label,
        key,
        list(options),
        default="",
        format_func=options.__getitem__,
        width=width,
        help=explanation,
    )
    return value or ""


def rows_of(maps: Sequence[Map], probe: Probe | None) -> list[tuple[str, str]]:
    """Return the output rows that an input has, each with what stands there.

    Generated tokens of an encoder-decoder, positions of a single stream, and none of two towers, whose rows
    the similarity reads.
    """
    prefix = next((one for one in maps if one.stream == "prefix"), None)
    if prefix is not None:
        return [(f"decoder:{i}", f"generated token {i}") for i in range(min(len(prefix.weights), WIDEST))]
    return _positions(maps[0].positions, probe) if len(maps) == 1 else []


def _positions(positions: Positions, probe: Probe | None) -> list[tuple[str, str]]:
    count = min(len(positions), WIDEST)
    if positions.kind == "token":
        pieces = probe_view.tokens(positions, probe, whole_words=False)[:count]
        return [(f"token:{i}", f"{i} · {blocks.clip(one.words or '·', 24)}") for i, one in enumerate(pieces)]
    if positions.grid is None:
        return [(f"token:{i}", f"position {i}") for i in range(count)]
    patch, width = (~positions.special).cumsum() - 1, positions.grid[1]
    names = [f"patch row {i // width}, column {i % width}" for i in patch]
    return [(f"token:{i}", "special" if positions.special[i] else names[i]) for i in range(count)]
