"""How much of each position belongs to a region."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.records import Positions, Probe, Region
from audit.regions.parse import carrier
from audit.regions.text import Span, find_pattern, find_terms, index_terms

Weights = NDArray[np.float64]
OUTSIDE_CONTENT = frozenset({"special", "first"})
_LEAST = 1e-3  # a region that covers less than this of every position is cropped away


def part_texts(probe: Probe) -> tuple[str, ...]:
    """Return the texts that spans refer to, in the order of ``Positions.parts``.

    For ``messages`` it is one text: the contents, joined by line breaks.
    """
    if probe.messages is not None:
        return ("\n".join(_content_text(message.get("content")) for message in probe.messages),)
    if probe.text is None:
        return ()
    return (probe.text,) if probe.text_pair is None else (probe.text, probe.text_pair)


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def region_weights(
    region: Region, positions: Positions, probe: Probe, *, others: Sequence[Region] = ()
) -> Weights:
    """Return how much of each position belongs to a region.

    Parameters
    ----------
    region : Region
    positions : Positions of n positions
    probe : Probe
        With its masks loaded (:func:`audit.probes.load_annotations`).
    others : sequence of Region
        What ``rest`` is the rest of; not used by other kinds.

    Returns
    -------
    float64 array (n,)
        In [0, 1]; 0 outside content, except for ``special`` and ``first``. All zeros where the
        region has no position in this probe.

    Raises
    ------
    ValueError
        When a mask has not been loaded.

    Examples
    --------
    >>> starts, ends = np.array([0, 4, 7]), np.array([3, 6, 9])
    >>> positions = Positions("token", np.zeros(3, bool), starts, ends)
    >>> she = Region("she", "terms", {"terms": ["she"]})
    >>> region_weights(she, positions, Probe("p", text="She is up"))
    array([1., 0., 0.])
    """
    if region.kind == "special":
        return positions.special.astype(np.float64)
    if region.kind == "first":
        return (~positions.special & ~positions.content).astype(np.float64)
    if region.kind == "rest":
        inner = [other for other in others if other.kind not in {"rest", *OUTSIDE_CONTENT}]
        return rest_weights([region_weights(other, positions, probe) for other in inner], positions)
    return np.where(positions.content, _content_weights(region, positions, probe), 0.0)


def rest_weights(inner: Sequence[Weights], positions: Positions) -> Weights:
    """Return 1 - min(1, sum of the weights of the other content regions) at each content position."""
    covered = sum(inner, np.zeros(len(positions)))
    return np.where(positions.content, 1.0 - np.minimum(covered, 1.0), 0.0)


def _content_weights(region: Region, positions: Positions, probe: Probe) -> Weights:
    if region.kind in {"terms", "pattern"}:
        return _text_weights(find_spans(region, probe), positions, probe)
    if region.kind == "box":
        return _box_weights(region.params["box"], positions)
    if region.kind == "grid":
        return _box_weights(_cell_box(region), positions)
    if region.kind == "quantile":
        return _quantile_weights(region.params["quantile"], positions)
    annotation = probe.regions.get(region.params["annotated"])
    return (
        np.zeros(len(positions)) if annotation is None else _annotation_weights(annotation, positions, probe)
    )


def _annotation_weights(annotation: Any, positions: Positions, probe: Probe) -> Weights:
    if isinstance(annotation, Mapping):
        if "box" in annotation:
            return _box_weights(annotation["box"], positions)
        if "mask" in annotation:
            return _mask_weights(annotation["mask"], positions)
    if carrier(annotation, probe) == "audio":
        return _time_weights(annotation, positions)
    return _text_weights(_annotated_spans(annotation), positions, probe)


def _annotated_spans(annotation: Any) -> list[list[Span]]:
    """Return annotated spans for each part of a text probe."""
    if isinstance(annotation, Mapping):
        return [annotation.get("text") or [], annotation.get("text_pair") or []]
    return [annotation]


def find_spans(region: Region, probe: Probe) -> list[list[Span]]:
    """Return the spans of a term list or a pattern in each part of a probe."""
    texts = part_texts(probe)
    if region.kind == "pattern":
        pattern = re.compile(region.params["pattern"])
        return [find_pattern(text, pattern) for text in texts]
    case_sensitive = bool(region.params.get("case_sensitive", False))
    index = _index(tuple(region.params["terms"]), case_sensitive)
    return [find_terms(text, index, case_sensitive=case_sensitive) for text in texts]


@lru_cache(maxsize=64)
def _index(terms: tuple[str, ...], case_sensitive: bool) -> Mapping[str, list[tuple[str, ...]]]:
    return index_terms(terms, case_sensitive=case_sensitive)


def _text_weights(spans: Sequence[Sequence[Span]], positions: Positions, probe: Probe) -> Weights:
    """Return 1 for each token that shares a visible character with a span, else 0."""
    weights = np.zeros(len(positions))
    if not any(len(part) for part in spans):
        return weights
    if positions.starts is None or positions.ends is None:
        return weights
    parts = np.zeros(len(positions), np.int8) if positions.parts is None else positions.parts
    for part, (text, part_spans) in enumerate(zip(part_texts(probe), spans, strict=False)):
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        for start, end in part_spans:
            covered[start + 1 : end + 1] = 1
        covered[1:] *= _visible(text)  # spans and tokens are trimmed of white space alike
        counts = covered.cumsum()
        here = (parts == part) & (positions.starts >= 0)
        starts, ends = (np.clip(edge[here], 0, len(text)) for edge in (positions.starts, positions.ends))
        weights[here] = counts[np.maximum(starts, ends)] > counts[starts]
    return weights


@lru_cache(maxsize=256)
def _visible(text: str) -> NDArray[np.bool_]:
    return np.fromiter((not character.isspace() for character in text), dtype=bool, count=len(text))


def _box_weights(box: Sequence[float], positions: Positions) -> Weights:
    """Return the fraction of each patch's area that lies inside the box."""
    if positions.boxes is None:
        return np.zeros(len(positions))
    patches = positions.boxes.astype(np.float64)
    left, top, right, bottom = (np.asarray(edge, np.float64) for edge in box)
    width = np.clip(np.minimum(patches[:, 2], right) - np.maximum(patches[:, 0], left), 0.0, None)
    height = np.clip(np.minimum(patches[:, 3], bottom) - np.maximum(patches[:, 1], top), 0.0, None)
    return _fraction(width * height, _areas(patches))


def _areas(patches: Weights) -> Weights:
    return (patches[:, 2] - patches[:, 0]) * (patches[:, 3] - patches[:, 1])


def _fraction(part: Weights, whole: Weights) -> Weights:
    """Return part / whole within [0, 1], and 0 where the whole is nothing."""
    fraction = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    if not (fraction > _LEAST).any():
        return np.zeros_like(fraction)
    return np.clip(fraction, 0.0, 1.0)


def _cell_box(region: Region) -> tuple[float, float, float, float]:
    (rows, columns), (row, column) = region.params["grid"], region.params["cell"]
    return column / columns, row / rows, (column + 1) / columns, (row + 1) / rows


def _mask_weights(mask: Any, positions: Positions) -> Weights:
    """Return the mean of the mask inside each patch, from its integral image.

    The integral of a piecewise constant image is bilinear inside each pixel, so that linear
    interpolation between pixel corners is exact for patches that cut through pixels.
    """
    if isinstance(mask, str):
        raise ValueError(f"mask must be loaded before weights are taken, got the path {mask!r}")
    if positions.boxes is None:
        return np.zeros(len(positions))
    values = np.asarray(mask, dtype=np.float64)
    height, width = values.shape
    integral = np.zeros((height + 1, width + 1))
    values.cumsum(axis=0).cumsum(axis=1, out=integral[1:, 1:])
    patches = positions.boxes.astype(np.float64)
    left, top, right, bottom = (np.clip(patches[:, i], 0.0, 1.0) * (width, height)[i % 2] for i in range(4))
    inside = _bilinear(integral, bottom, right) - _bilinear(integral, top, right)
    inside -= _bilinear(integral, bottom, left) - _bilinear(integral, top, left)
    return _fraction(inside, _areas(patches) * width * height)


def _bilinear(grid: Weights, y: Weights, x: Weights) -> Weights:
    row = np.minimum(y.astype(np.int64), grid.shape[0] - 2)
    column = np.minimum(x.astype(np.int64), grid.shape[1] - 2)
    down, along = y - row, x - column
    upper = grid[row, column] * (1 - along) + grid[row, column + 1] * along
    lower = grid[row + 1, column] * (1 - along) + grid[row + 1, column + 1] * along
    return np.asarray(upper * (1 - down) + lower * down)


def _time_weights(spans: Sequence[Sequence[float]], positions: Positions) -> Weights:
    """Return the fraction of each frame's duration that lies inside the spans."""
    if positions.times is None:
        return np.zeros(len(positions))
    times = positions.times.astype(np.float64)
    covered = np.zeros(len(positions))
    for start, end in _merged(spans):
        covered += np.clip(np.minimum(times[:, 1], end) - np.maximum(times[:, 0], start), 0.0, None)
    return _fraction(covered, times[:, 1] - times[:, 0])


def _merged(spans: Sequence[Sequence[float]]) -> list[list[float]]:
    merged: list[list[float]] = []
    for start, end in sorted(map(tuple, spans)):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _quantile_weights(band: Sequence[float], positions: Positions) -> Weights:
    """Return how much of each content position lies in a band of the relative position.

    The k-th of m content positions takes up [k/m, (k+1)/m].
    """
    content, weights = positions.content, np.zeros(len(positions))
    count = int(content.sum())
    edges = np.linspace(0.0, 1.0, count + 1)
    inside = np.minimum(edges[1:], band[1]) - np.maximum(edges[:-1], band[0])
    weights[content] = _fraction(np.clip(inside, 0.0, None), np.diff(edges))
    return weights
