"""Maps over different positions (tokenizer, patch grid, length) → maps over common ones.

The common positions are made of all runs at once, so that every distance of a comparison, and its null,
is measured on the same ones:

- tokens: *words*, the finest pieces of the text that no token of any run crosses. Each token lies in one
  piece as a whole, so that nothing is estimated: a word's share is the sum of its tokens' shares;
- patches: a grid over all that any run sees, with patches as large as the largest of them; each patch's
  mass is spread evenly over its box;
- audio frames: the same along time.

Only content is carried over, and its mass is divided by its sum, as for regions: special tokens lie
nowhere in the input, and each architecture has its own.

What alignment cannot tell: anything finer than the common positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from audit.metrics.carry import equal_bands, overlap_share
from audit.records import FloatArray, Map, Positions

Array = NDArray[np.float64]

UNITS = {
    "token": "words that no token of any run crosses",
    "patch": "a common patch grid, by the area that patches share",
    "frame": "common time frames, by the time that frames share",
}
"""What maps of each kind of position are aligned on."""

_CLOSE = 1e-5  # fractions of an image and seconds are stored in float32


@dataclass(frozen=True)
class AlignedMap:
    """One map over common positions.

    Attributes
    ----------
    weights : float64 array (m,)
        Sums to 1; NaN where the map has no mass there, or where there is only one position, on which
        nothing can move.
    layers : float64 array (layer, m) or None
        The same for each layer.
    positions : Positions or None
        Where the common positions lie; all are content.
    """

    weights: Array
    layers: Array | None = None
    positions: Positions | None = None


def same_positions(one: Positions, other: Positions) -> bool:
    """Return whether two maps of one probe may be compared position by position.

    Places that only one of them knows (maps made elsewhere may have none) do not contradict.

    Examples
    --------
    >>> special = np.array([False, False])
    >>> words = Positions("token", special, np.array([0, 4]), np.array([3, 8]))
    >>> pieces = Positions("token", special, np.array([0, 6]), np.array([6, 8]))
    >>> same_positions(words, words), same_positions(words, pieces)
    (True, False)
    """
    if len(one) != len(other) or not np.array_equal(one.content, other.content):
        return False
    for name in ("starts", "ends", "parts", "boxes", "times"):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None and b is not None and not (np.abs(a - b) <= _CLOSE).all():
            return False
    return True


def align_maps(maps: Sequence[Map]) -> tuple[AlignedMap, ...]:
    """Return the maps of one probe, each from another run, over their common positions.

    Parameters
    ----------
    maps : sequence of Map
        Of one probe and stream.

    Returns
    -------
    tuple of AlignedMap
        In the same order.

    Raises
    ------
    ValueError
        When the positions are of different kinds, or do not know where they lie.

    Examples
    --------
    >>> def tokens(weights, *spans):
    ...     starts, ends = np.array(spans).T
    ...     return Map("p", np.array(weights), Positions("token", np.zeros(len(spans), bool), starts, ends))
    >>> one = tokens([0.2, 0.3, 0.5], (0, 2), (2, 5), (6, 9))
    >>> two = tokens([0.6, 0.4], (0, 5), (6, 9))
    >>> [each.weights.tolist() for each in align_maps([one, two])]
    [[0.5, 0.5], [0.6, 0.4]]
    """
    shares, places = common_positions([one.positions for one in maps])
    found = []
    for one, share in zip(maps, shares, strict=True):
        layers = None if one.layers is None else _carried(one.layers, share)
        found.append(AlignedMap(_carried(one.weights, share), layers, places))
    return tuple(found)


def align_pair(before: Map, after: Map) -> tuple[Map, Map]:
    """Return two maps of one probe that may be subtracted: as they are, or on their common positions.

    Parameters
    ----------
    before, after : Map

    Returns
    -------
    (Map, Map)
        The same objects where their positions are the same.

    Raises
    ------
    ValueError
        As for :func:`align_maps`, or when there is nothing in common to subtract.
    """
    if same_positions(before.positions, after.positions):
        return before, after
    one, two = align_maps([before, after])
    if not (np.isfinite(one.weights).all() and np.isfinite(two.weights).all()):
        raise ValueError("positions: expected mass on at least two common positions, got none")
    places = one.positions or before.positions
    return (
        replace(before, weights=one.weights, layers=one.layers, positions=places),
        replace(after, weights=two.weights, layers=two.layers, positions=places),
    )


def _carried(weights: FloatArray, share: Array) -> Array:
    """Return maps (..., n) over common positions (..., m); NaN where they have no mass there."""
    moved: Array = np.asarray(weights, dtype=np.float64) @ share
    total = moved.sum(-1, keepdims=True)
    whole = (total > 0) & (share.shape[1] > 1)
    carried: Array = np.divide(moved, total, out=np.full_like(moved, np.nan), where=whole)
    return carried


def common_positions(positions: Sequence[Positions]) -> tuple[list[Array], Positions]:
    """Return which share of each position's mass goes to each common position, and where these lie.

    Parameters
    ----------
    positions : sequence of Positions
        Of one probe and stream.

    Returns
    -------
    list of float64 arrays (n_i, m)
        Rows of positions without content, or that lie nowhere, are zero.
    Positions of m positions

    Raises
    ------
    ValueError
        As for :func:`align_maps`.
    """
    kinds = {one.kind for one in positions}
    if len(kinds) > 1:
        raise ValueError(f"positions: expected one kind, got {' and '.join(sorted(kinds))} positions")
    by_kind: dict[str, Callable[[Sequence[Positions]], tuple[list[Array], Positions]]] = {
        "token": _words,
        "patch": _grids,
        "frame": _frames,
    }
    return by_kind[kinds.pop()](positions)


def _words(positions: Sequence[Positions]) -> tuple[list[Array], Positions]:
    for one in positions:
        if one.starts is None or one.ends is None:
            raise ValueError("positions: expected character spans of the tokens, got none")
    longest = max((int(one.ends.max(initial=0)) for one in positions if one.ends is not None), default=0)
    spans = [_on_one_line(one, longest + 1) for one in positions]
    pieces = _pieces(np.concatenate([span[span[:, 1] > span[:, 0]] for span in spans]))
    parts = pieces[:, 0] // (longest + 1)
    starts, ends = (pieces - parts[:, None] * (longest + 1)).astype(np.int32).T
    places = Positions("token", np.zeros(len(pieces), bool), starts, ends, parts.astype(np.int8))
    return [overlap_share(span, pieces) for span in spans], places


def _on_one_line(positions: Positions, step: int) -> Array:
    """Return each token's span with the second text behind the first; empty without content."""
    parts = np.zeros(len(positions)) if positions.parts is None else positions.parts
    spans: Array = np.array([positions.starts, positions.ends], dtype=np.float64).T
    outside = ~positions.content | (spans[:, 0] < 0)
    spans += np.maximum(parts, 0)[:, None] * step
    spans[outside] = 0.0
    return spans


def _pieces(spans: Array) -> Array:
    """Return the finest intervals that no span crosses and that hold at least one, (m, 2)."""
    starts, ends = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    bounds = np.unique(spans)
    open_spans = np.searchsorted(starts, bounds, "left") - np.searchsorted(ends, bounds, "right")
    cuts = bounds[open_spans == 0]
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1) if len(cuts) else np.empty((0, 2))
    begun = np.searchsorted(starts, pieces[:, 1], "left") - np.searchsorted(starts, pieces[:, 0], "left")
    held: Array = pieces[begun > 0]
    return held


def _grids(positions: Sequence[Positions]) -> tuple[list[Array], Positions]:
    boxes = []
    for one in positions:
        if one.boxes is None:
            raise ValueError("positions: expected boxes of the patches, got none")
        boxes.append(np.where(one.content[:, None], one.boxes, 0.0).astype(np.float64))
    across, down = ([box[:, [side, side + 2]] for box in boxes] for side in (0, 1))
    columns, rows = _bands(across), _bands(down)
    shares = []
    for x, y in zip(across, down, strict=True):
        cells = overlap_share(y, rows)[:, :, None] * overlap_share(x, columns)[:, None, :]
        shares.append(cells.reshape(len(x), -1))
    left, top = np.tile(columns, (len(rows), 1)), np.repeat(rows, len(columns), axis=0)
    corners = np.stack([left[:, 0], top[:, 0], left[:, 1], top[:, 1]], axis=1).astype(np.float32)
    grid = (len(rows), len(columns))
    return shares, Positions("patch", np.zeros(len(corners), bool), boxes=corners, grid=grid)


def _frames(positions: Sequence[Positions]) -> tuple[list[Array], Positions]:
    times = []
    for one in positions:
        if one.times is None:
            raise ValueError("positions: expected start and end of the frames, got none")
        times.append(np.where(one.content[:, None], one.times, 0.0).astype(np.float64))
    bands = _bands(times)
    places = Positions("frame", np.zeros(len(bands), bool), times=bands.astype(np.float32))
    return [overlap_share(time, bands) for time in times], places


def _bands(intervals: Sequence[Array]) -> Array:
    """Return equal bands over all that the intervals cover, as many as the run with the largest cells."""
    real = [one[one[:, 1] > one[:, 0]] for one in intervals]
    real = [one for one in real if len(one)]
    if not real:
        return np.empty((0, 2))
    low, high = min(one[:, 0].min() for one in real), max(one[:, 1].max() for one in real)
    widest = max((one[:, 1].max() - one[:, 0].min()) / _distinct(one[:, 0]) for one in real)
    bands: Array = low + (high - low) * equal_bands(max(1, round((high - low) / widest)))
    return bands


def _distinct(starts: Array) -> int:
    return 1 + int((np.diff(np.sort(starts)) > _CLOSE).sum())
