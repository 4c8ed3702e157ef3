"""One stream of one probe: its map before, after, and the difference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from audit.alignment import align_pair, same_positions
from audit.records import Map
from audit.report.wording import change, number
from dashboards import blocks, charts, controls, downloads, map_svg, probe_view, sound_view, state, theme
from dashboards.content import Content
from dashboards.probe_view import Weights

SOUND = 5.0
"""Width by height of a sound's picture."""
ONE_ROW = (
    "The store holds the output row that predicts one token; other generated tokens are computed below, or "
    'captured for themselves (<code>[method] row = "decoder:&lt;i&gt;"</code>).'
)
WIDEST = 200
"""Positions of a matrix of layers at most."""


def weights_at(one: Map, layer: int | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the map of the whole stack, or as it stands after a layer."""
    values = one.weights if layer is None or one.layers is None else one.layers[layer]
    return np.asarray(values, dtype=np.float64)


def on_common_positions(before: Map, after: Map) -> tuple[Map, Map]:
    """Return both maps so that they can be subtracted, and say so where this took an alignment."""
    try:
        pair = align_pair(before, after)
    except ValueError:
        return before, after  # told where it is drawn
    if pair[0] is not before:
        blocks.note(
            "The checkpoints cut this input into other positions (tokenizer or patch grid): both maps are "
            "drawn on common ones, special positions left out."
        )
    return pair


def draw_pair(before: Map, after: Map, found: Content, layer: int | None) -> None:
    """Draw the maps of one stream, before, after and their difference."""
    old, new = weights_at(before, layer), weights_at(after, layer)
    if before.stream == "prefix" and not same_positions(before.positions, after.positions):
        st.info(
            "The two checkpoints generated other tokens up to this one, so that their maps of the prefix "
            "cannot be subtracted position by position.",
            icon=":material/info:",
        )
        return
    if not same_positions(before.positions, after.positions):
        st.info(
            f"The two checkpoints cut this input into {len(old)} and {len(new)} other positions (another "
            "tokenizer or patch grid) that do not know where they lie, so that their maps cannot be "
            "subtracted.",
            icon=":material/info:",
        )
        return
    if min(before.share, after.share) < 1 - 1e-6:  # towers have a whole map each, to the last digits
        blocks.note(f"Part of the whole map on this stream: {change(before.share, after.share)}")
    kind = before.positions.kind
    if kind == "patch" and (before.positions.grid is not None or before.positions.boxes is not None):
        _draw_patches(before, old, new, found)
    elif kind == "frame" and before.positions.times is not None:
        _draw_frames(before, old, new, found)
    else:
        _draw_words(before, old, new, found)


def _draw_words(one: Map, old: Any, new: Any, found: Content) -> None:
    probe = found.probe if found.probe is not None and found.probe.text is not None else None
    pieces = probe_view.tokens(one.positions, probe, whole_words=state.get("unit") != "tokens")
    before, after = probe_view.summed(old, pieces), probe_view.summed(new, pieces)
    part = probe_view.window(after - before)
    shown, before, after = pieces[part], before[part], after[part]
    content_only = np.array([not piece.special for piece in shown])
    peaks = _peaks(before[content_only], after[content_only])
    lines = probe_view.pair_of_lines(before, after, peaks)
    drawn = [(line.title, probe_view.words_html(shown, line, (before, after))) for line in lines]
    blocks.html(probe_view.strips(drawn, blank=probe is None) + _scale(*peaks))
    colours = theme.palette()
    downloads.figure(_name(one), lambda: map_svg.words_svg([(shown, line) for line in lines], colours))
    if len(shown) < len(pieces):
        blocks.note(f"{len(shown):,} of {len(pieces):,} positions, where the change is largest.")
    blocks.note(
        "Numbers are generated tokens, whose text is not stored."
        if one.stream == "prefix"
        else "Hover over a word for its exact shares. “·” is a special token: part of the map, outside the "
        "content."
    )


def _draw_patches(one: Map, old: Any, new: Any, found: Content) -> None:
    from audit.pipeline.examples import probe_png

    patches = ~one.positions.special
    png = None
    if found.probe is not None:
        png = probe_png(found.probe, one.positions)
    before, after = old[patches], new[patches]
    grid, boxes = one.positions.grid or (1, 1), None
    if one.positions.grid is None and one.positions.boxes is not None:
        boxes = one.positions.boxes[patches].astype(np.float64)
    peaks, smooth = _peaks(before, after), state.get("overlay") == "smooth" and boxes is None
    panels = probe_view.pair_of_lines(before, after, peaks)
    both = (before, after)
    drawn = probe_view.panels_html(panels, grid, png, smooth=smooth, others=both, boxes=boxes)
    blocks.html(drawn + _scale(*peaks, kind="patch"))
    colours = theme.palette()
    downloads.figure(
        _name(one), lambda: map_svg.panels_svg(panels, grid, png, colours, smooth=smooth, boxes=boxes)
    )
    if boxes is not None and png is None:
        blocks.note("Boxes on a square: the probe file has no image to show behind them.")
    special = one.positions.special
    if special.any():
        parts = f"{len(before)} boxes" if boxes is not None else f"{grid[0]} × {grid[1]} patches"
        blocks.note(
            f"{parts}; special tokens hold "
            f"{change(old[special].sum(), new[special].sum())} "
            "of the map and are not drawn."
        )


def _draw_frames(one: Map, old: Any, new: Any, found: Content) -> None:
    assert one.positions.times is not None
    grid = sound_view.spans(one.positions.times, one.positions.special)
    sound = _sound(found)
    png = None
    if sound is not None:
        samples, rate = sound
        st.audio(samples, sample_rate=rate)
        seconds = float(grid.times[-1, 1]) if len(grid.times) else 0.0
        png = sound_view.spectrogram_png(samples[: int(seconds * rate)], rate)
    before, after = grid.summed(old), grid.summed(new)
    peaks, smooth = _peaks(before, after), state.get("overlay") == "smooth"
    panels = probe_view.pair_of_lines(before, after, peaks)
    names = [f"{number(start, 2)}–{number(end, 2)} s" for start, end in grid.times]
    drawn = probe_view.panels_html(
        panels, grid.shape, png, smooth=smooth, others=(before, after), spans=names, ratio=SOUND
    )
    blocks.html(drawn + _scale(*peaks, kind="patch"))
    colours, name = theme.palette(), _name(one)
    downloads.figure(
        name, lambda: map_svg.panels_svg(panels, grid.shape, png, colours, smooth=smooth, ratio=SOUND)
    )
    if grid.shape[0] == 1:
        what = "Share of each time span, before and after"
        downloads.chart(f"{name}-time", charts.over_time, grid.times, before, after, alt=what)
    special = one.positions.special
    if special.any():
        blocks.note(
            f"Special positions, and those after the end of the sound, hold "
            f"{change(old[special].sum(), new[special].sum())} of the map and are not drawn."
        )


def _sound(found: Content) -> tuple[np.ndarray[Any, Any], int] | None:
    """Return the samples and the sampling rate of the probe's sound, None where it is not at hand."""
    from audit.media import load_audio

    if found.probe is None or found.probe.audio is None:
        return None
    sound, rate = found.probe.audio, found.probe.sampling_rate
    if isinstance(sound, str):
        sound, rate = load_audio(sound)
    return (sound, int(rate)) if rate else None


def draw_layers(pairs: Sequence[tuple[Map, Map]]) -> None:
    """Draw how the row grows layer by layer, streams beside each other, where the store holds it."""
    stored = [(one, two) for one, two in pairs if one.layers is not None and two.layers is not None]
    if not stored:
        blocks.note(controls.NO_LAYERS)
        return
    streams = [(one, two) for one, two in stored if same_positions(one.positions, two.positions)]
    if len(streams) < len(pairs):
        drawn = {one.stream for one, _ in streams}
        left = ", ".join(one.stream for one, _ in pairs if one.stream not in drawn)
        blocks.note(f"Left out: {blocks.text(left)}, which has other positions before than after.")
    width = sum(len(one.weights) for one, _ in streams)
    if width > WIDEST:
        blocks.note(f"{width} positions are too many to draw; the layer slider shows one layer at a time.")
    if not streams or width > WIDEST:
        return
    name, what = f"{_name(streams[0][0])}-layers", "Difference by layer and position"
    generated = any(one.stream == "prefix" for one, _ in pairs)
    legend = "Each row is the difference as it stands after that layer." + (
        f" {ONE_ROW}" if generated else ""
    )
    downloads.chart(name, charts.layer_matrix, _layer_cells(streams), alt=what, notes=(name, legend))
    blocks.note(legend)


def _layer_cells(streams: Sequence[tuple[Map, Map]]) -> list[dict[str, Any]]:
    """Return one cell for each layer and position of the streams."""
    return [
        {
            "stream": one.stream,
            "position": i,
            "layer": layer,
            "before": float(old[i]),
            "after": float(new[i]),
            "value": float(new[i] - old[i]),
        }
        for one, two in streams
        if one.layers is not None and two.layers is not None
        for layer, (old, new) in enumerate(zip(one.layers, two.layers, strict=False))
        for i in range(len(one.weights))
    ]


def _peaks(before: Weights, after: Weights) -> tuple[float, float]:
    """Return the scales of the two maps and of their difference."""
    return probe_view.peak(before, after), probe_view.peak(after - before)


def _name(one: Map) -> str:
    """Return the name of the file that a map is saved as."""
    return re.sub(r"[^\w.-]+", "_", f"map-{one.probe_id[:60]}-{one.stream}")


def _scale(scale: float, spread: float, *, kind: str = "word") -> str:
    """Return the legend of words, or of patches, which are coloured more strongly."""
    return (
        f'<ul class="legend top"><li>0 <span class="ramp mass {kind}"></span> {number(scale)} of the map</li>'
        f'<li>lost {number(spread)} <span class="ramp {kind}"></span> gained {number(spread)}</li></ul>'
    )
