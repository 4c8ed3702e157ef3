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
        _example(probe_id, store.map_of(one.run_id, probe_id), store.map_of(two.run_id, probe_id), contents)
        for probe_id in moved_most(store, comparison.id, count)
    )


def moved_most(store: Store, comparison_id: str, count: int) -> list[str]:
    """Return the ids of the probes with the largest JS distance, largest first."""
    import polars as pl

    table = store.comparison_probes(comparison_id)
    if table.is_empty():
        return []
    per_probe = table.group_by("probe_id").agg(pl.col("js_distance").max())
    ranked = per_probe.drop_nulls().sort("js_distance", "probe_id", descending=[True, False])
    return list(ranked["probe_id"].head(count))


def _contents(config: AuditConfig | None) -> dict[str, Probe]:
    if config is None or config.report.content == "none":
        return {}
    try:
        return {probe.id: probe for probe in load_probes(probe_source(config))}
    except AuditError:
        return {}  # the report is still drawn, without content


def _example(probe_id: str, before: Map, after: Map, contents: dict[str, Probe]) -> Example:
    probe = contents.get(probe_id)
    before, after = align_pair(before, after)
    positions = before.positions
    if positions.kind == "patch" and positions.grid is not None:
        patches = positions.boxes is not None and ~positions.special
        return Example(
            probe_id,
            _caption(before, after),
            "image",
            _content_share(before.weights[patches]),
            _content_share(after.weights[patches]),
            grid=positions.grid,
            png=None if probe is None or probe.image is None else probe_png(probe, positions),
        )
    words = None if probe is None else token_texts(probe, positions)
    return Example(probe_id, _caption(before, after), "text", before.weights, after.weights, words=words)


def _caption(before: Map, after: Map) -> str:
    from audit.metrics import js_distance

    return f"JS distance of the maps {float(js_distance(before.weights, after.weights)):.3f}"


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
    """Return the part of the stored image that the patches cover."""
    from PIL import Image

    if probe.image is None or positions.boxes is None:
        return None
    boxes = positions.boxes[~positions.special]
    pixels = load_image(probe.image)
    height, width = pixels.shape[:2]
    left, top = boxes[:, 0].min() * width, boxes[:, 1].min() * height
    right, bottom = boxes[:, 2].max() * width, boxes[:, 3].max() * height
    image = Image.fromarray(pixels).crop((round(left), round(top), round(right), round(bottom)))
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
