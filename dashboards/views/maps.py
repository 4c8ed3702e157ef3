"""One stream of one probe: its map before, after, and the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from audit.records import Map
from audit.report.wording import change, number
from dashboards import blocks, charts, probe_view, state, theme
from dashboards.content import Content


def weights_at(one: Map, layer: int | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the map of the whole stack, or as it stands after a layer."""
    values = one.weights if layer is None or one.layers is None else one.layers[layer]
    return np.asarray(values, dtype=np.float64)


def draw_pair(before: Map, after: Map, found: Content, layer: int | None) -> None:
    """Draw the maps of one stream, before, after and their difference."""
    old, new = weights_at(before, layer), weights_at(after, layer)
    if len(old) != len(new):
        st.info(
            f"The two checkpoints cut this input into {len(old)} and {len(new)} positions (another "
            "tokenizer or "
            "patch grid), so that their maps cannot be subtracted position by position.",
            icon=":material/info:",
        )
        return
    if before.share < 1 or after.share < 1:
        blocks.note(f"Part of the whole map on this stream: {change(before.share, after.share)}")
    kind = before.positions.kind
    if kind == "patch" and before.positions.grid is not None:
        _draw_patches(before, old, new, found)
    elif kind == "frame" and before.positions.times is not None:
        _draw_frames(before, old, new)
    else:
        _draw_words(before, old, new, found)


def _draw_words(one: Map, old: Any, new: Any, found: Content) -> None:
    probe = found.probe if found.probe is not None and found.probe.text is not None else None
    pieces = probe_view.tokens(one.positions, probe, whole_words=state.get("unit") != "tokens")
    before, after = probe_view.summed(old, pieces), probe_view.summed(new, pieces)
    part = probe_view.window(after - before)
    shown, before, after = pieces[part], before[part], after[part]
    difference = after - before
    content_only = np.array([not piece.special for piece in shown])
    scale = probe_view.peak(before[content_only], after[content_only])
    spread = probe_view.peak(difference[content_only])
    both = (before, after)
    lines = [
        ("Before", probe_view.words_html(shown, before, scale=scale, signed=False, others=both)),
        ("After", probe_view.words_html(shown, after, scale=scale, signed=False, others=both)),
        ("Difference", probe_view.words_html(shown, difference, scale=spread, signed=True, others=both)),
    ]
    blocks.html(probe_view.strips(lines, blank=probe is None) + _scale(scale, spread))
    if len(shown) < len(pieces):
        blocks.note(f"{len(shown):,} of {len(pieces):,} positions, where the change is largest.")
    blocks.note(
        "Hover over a word for its exact shares. “·” is a special token: part of the map, outside the "
        "content."
    )


def _draw_patches(one: Map, old: Any, new: Any, found: Content) -> None:
    from audit.pipeline.examples import probe_png

    assert one.positions.grid is not None
    patches = ~one.positions.special
    png = None
    if found.probe is not None:
        png = probe_png(found.probe, one.positions)
    before, after = old[patches], new[patches]
    difference = after - before
    scale, spread = probe_view.peak(before, after), probe_view.peak(difference)
    panels = [
        probe_view.Panel("Before", before, scale),
        probe_view.Panel("After", after, scale),
        probe_view.Panel("Difference", difference, spread, signed=True),
    ]
    grid = one.positions.grid
    smooth = state.get("overlay") == "smooth"
    blocks.html(
        probe_view.panels_html(panels, grid, png, smooth=smooth, others=(before, after))
        + _scale(scale, spread)
    )
    special = one.positions.special
    if special.any():
        blocks.note(
            f"{grid[0]} × {grid[1]} patches; special tokens hold "
            f"{change(old[special].sum(), new[special].sum())} "
            "of the map and are not drawn."
        )


def _draw_frames(one: Map, old: Any, new: Any) -> None:
    assert one.positions.times is not None
    chart = charts.over_time(one.positions.times, old, new, theme.palette())
    st.altair_chart(chart, alt="Share of each time span, before and after")


def _scale(scale: float, spread: float) -> str:
    return (
        f'<ul class="legend top"><li>0 <span class="ramp mass"></span> {number(scale)} of the map</li>'
        f'<li>lost {number(spread)} <span class="ramp"></span> gained {number(spread)}</li></ul>'
    )
