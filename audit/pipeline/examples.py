"""Example maps for a report: the probes whose map moved most, before and after."""

from __future__ import annotations

import io

import numpy as np

from audit.alignment import align_pair
from audit.config import AuditConfig
from audit.errors import AuditError
from audit.media import load_image
from audit.pipeline.sources import load_probes, probe_source
from audit.records import Comparison, Map, Positions, Probe
from audit.report import Example
from audit.store import Store

_WHOLE = np.array([[0.0, 0.0, 1.0, 1.0]])
LARGEST_SIDE = 224
"""Pixels of the longer side of an example image; a report stays small."""


def example_maps(
    store: Store, comparison: Comparison, config: AuditConfig | None = None, *, count: int = 6
) -> tuple[Example, ...]:
    """Return the probes that moved most (largest JS distance), ready to be drawn.

    Content is read from the probe file, and only where the configuration says
    ``report.content = "excerpt"``; otherwise positions are shown without it.

    Parameters
    ----------
    store : Store
    comparison : Comparison
        A stored one.
    config : AuditConfig, optional
        Names the probe file.
    count : int
        How many examples at most.

    Returns
    -------
    tuple of Example
        Empty for a comparison without stored maps.
    """
    one, two = comparison.before, comparison.after
    if comparison.kind != "paired" or comparison.id is None or one is None or two is None:
        return ()
    if not (store.has_run(one.run_id) and store.has_run(two.run_id)):
        return ()
    contents = _contents(config)
    return tuple(
        _example(
            store.map_of(one.run_id, probe_id, stream), store.map_of(two.run_id, probe_id, stream), contents
        )
        for probe_id, stream in moved_most(store, comparison.id, count)
    )


def moved_most(store: Store, comparison_id: str, count: int) -> list[tuple[str, str]]:
    """Return the probes with the largest JS distance, largest first, each with every stream that moved."""
    import polars as pl

    table = store.comparison_probes(comparison_id)
    if table.is_empty():
        return []
    moved = table.drop_nulls("js_distance").group_by("probe_id", "stream").agg(pl.col("js_distance").max())
    per_probe = moved.sort("stream").group_by("probe_id").agg(pl.col("js_distance").max(), pl.col("stream"))
    ranked = per_probe.sort("js_distance", "probe_id", descending=[True, False]).head(count)
    return [(row["probe_id"], stream) for row in ranked.to_dicts() for stream in row["stream"]]


def _contents(config: AuditConfig | None) -> dict[str, Probe]:
    if config is None or config.report.content == "none":
        return {}
    try:
        return {probe.id: probe for probe in load_probes(probe_source(config))}
    except AuditError:
        return {}  # the report is still drawn, without content


def _example(before: Map, after: Map, contents: dict[str, Probe]) -> Example:
    probe_id = before.probe_id
    probe = contents.get(probe_id)
    before, after = align_pair(before, after)
    positions = before.positions
    if positions.kind == "patch" and (positions.grid is not None or positions.boxes is not None):
        patches, by_box = ~positions.special, positions.grid is None
        return Example(
            probe_id,
            _caption(before, after),
            "image",
            _content_share(before.weights[patches]),
            _content_share(after.weights[patches]),
            grid=positions.grid,
            boxes=positions.boxes[patches] if by_box and positions.boxes is not None else None,
            png=None if probe is None or probe.image is None else probe_png(probe, positions),
        )
    words = None if probe is None else token_texts(probe, positions)
    return Example(probe_id, _caption(before, after), "text", before.weights, after.weights, words=words)


def _caption(before: Map, after: Map) -> str:
    from audit.metrics import js_distance

    which = "the maps" if before.stream == "input" else f"the maps of the {before.stream}"
    return f"JS distance of {which} {float(js_distance(before.weights, after.weights)):.3f}"


def _content_share(weights: np.ndarray) -> np.ndarray:
    total = weights.sum()
    return weights / total if total > 0 else weights


def token_texts(probe: Probe, positions: Positions) -> tuple[str, ...]:
    """Return the text under each position; special positions are shown as a middle dot."""
    if positions.starts is None or positions.ends is None:
        return tuple("·" for _ in range(len(positions)))
    parts = positions.parts if positions.parts is not None else np.zeros(len(positions), np.int8)
    sources = (probe.text or "", probe.text_pair or "")
    return tuple(
        "·" if start < 0 or part < 0 else sources[part][start:end]
        for start, end, part in zip(positions.starts, positions.ends, parts, strict=True)
    )


def probe_png(probe: Probe, positions: Positions) -> bytes | None:
    """Return the part of the stored image that the grid of patches covers, all of it where there is none."""
    from PIL import Image

    if probe.image is None or positions.boxes is None:
        return None
    boxes = positions.boxes[~positions.special] if positions.grid is not None else _WHOLE
    pixels = load_image(probe.image)
    height, width = pixels.shape[:2]
    left, top = boxes[:, 0].min() * width, boxes[:, 1].min() * height
    right, bottom = boxes[:, 2].max() * width, boxes[:, 3].max() * height
    image = Image.fromarray(pixels).crop((round(left), round(top), round(right), round(bottom)))
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
