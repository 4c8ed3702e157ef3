"""Geometry of the example maps: weighted words, and patches over an image."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.records import FloatArray
from audit.report.examples import Example
from audit.report.wording import clip, number

LEVELS = 16
WORDS_SHOWN = 160
PANEL = 240.0
PNG_LIMIT = 150_000
MOVERS = 3


@dataclass(frozen=True)
class Word:
    """One position of a text: its word, opacity before, after and of the difference."""

    text: str
    before: float
    after: float
    difference: float
    sign: str
    title: str


@dataclass(frozen=True)
class Patches:
    """Patches of one opacity as one SVG path."""

    path: str
    opacity: float
    sign: str


@dataclass(frozen=True)
class Panel:
    """One map of an image: its title and patches."""

    title: str
    patches: tuple[Patches, ...]
    kind: str


@dataclass(frozen=True)
class Drawing:
    """One example, ready for the template."""

    probe_id: str
    caption: str
    kind: str
    words: tuple[Word, ...]
    has_words: bool
    panels: tuple[Panel, ...]
    image: str
    pixelated: bool
    height: float
    notes: tuple[str, ...]
    movers: tuple[str, ...]
    peak: str
    peak_difference: str


def window(difference: FloatArray, width: int = WORDS_SHOWN) -> tuple[int, int]:
    """Return [start, end) of the `width` neighbouring positions that changed most.

    Examples
    --------
    >>> window(np.array([0.0, 0.0, 0.3, -0.3, 0.0]), 2)
    (2, 4)
    """
    if len(difference) <= width:
        return 0, len(difference)
    sums = np.convolve(np.abs(difference), np.ones(width), mode="valid")
    start = int(np.argmax(sums))
    return start, start + width


def _share(value: float) -> str:
    return number(value)


def _relative(values: FloatArray) -> NDArray[np.float64]:
    largest = float(np.max(values))
    return np.asarray(values, dtype=np.float64) / largest if largest else np.zeros(len(values))


def _words(example: Example) -> tuple[Word, ...]:
    peak = np.concatenate([example.before, example.after])
    both = _relative(peak)
    before, after = both[: example.size], both[example.size :]
    difference = _relative(np.abs(example.difference))
    start, end = window(example.difference)
    return tuple(
        Word(
            text=clip(example.words[i], 40) or "␣" if example.words is not None else "",
            before=round(float(before[i]), 2),
            after=round(float(after[i]), 2),
            difference=round(float(difference[i]), 2),
            sign="down" if example.difference[i] < 0 else "up",
            title=f"position {i}: {_share(example.before[i])} → {_share(example.after[i])}",
        )
        for i in range(start, end)
    )


def patch_paths(values: FloatArray, grid: tuple[int, int], height: float, sign: str) -> tuple[Patches, ...]:
    """Return patches with equal opacity as one path each, in a box PANEL wide.

    Parameters
    ----------
    values : float array (rows * columns,)
        Opacity in [0, 1]; rounded to 1/16, patches under 1/32 are left out.
    grid : (rows, columns)
    height : float
        Height of the box.
    sign : str
        Class of the colour.
    """
    rows, columns = grid
    wide, high = PANEL / columns, height / rows
    places = [(wide * (i % columns), high * (i // columns), wide, high) for i in range(rows * columns)]
    return _paths(values, places, sign)


def box_paths(values: FloatArray, boxes: FloatArray, height: float, sign: str) -> tuple[Patches, ...]:
    """Return the same of patches that lie anywhere, and over each other: left, top, right, bottom (n, 4)."""
    corners = np.asarray(boxes, np.float64) * (PANEL, height, PANEL, height)
    sizes = corners[:, 2:] - corners[:, :2]
    return _paths(values, np.concatenate([corners[:, :2], sizes], axis=1).tolist(), sign)


def _paths(values: FloatArray, places: Sequence[Sequence[float]], sign: str) -> tuple[Patches, ...]:
    steps = np.rint(np.asarray(values) * LEVELS).astype(int)
    found = []
    for step in range(1, LEVELS + 1):
        drawn = (places[i] for i in np.flatnonzero(steps == step).tolist())
        path = "".join(f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z" for x, y, wide, high in drawn)
        if path:
            found.append(Patches(path, step / LEVELS, sign))
    return tuple(found)


def _panels(example: Example, height: float) -> tuple[Panel, ...]:
    def paths(values: FloatArray, sign: str) -> tuple[Patches, ...]:
        if example.grid is None and example.boxes is not None:
            return box_paths(values, example.boxes, height, sign)
        return patch_paths(values, example.grid or (1, 1), height, sign)

    both = _relative(np.concatenate([example.before, example.after]))
    difference = example.difference
    largest = float(np.abs(difference).max()) or 1.0
    rise, fall = np.clip(difference, 0, None) / largest, np.clip(-difference, 0, None) / largest
    changed = paths(rise, "up") + paths(fall, "down")
    return (
        Panel("Before", paths(both[: example.size], "mass"), "map"),
        Panel("After", paths(both[example.size :], "mass"), "map"),
        Panel("Difference", changed, "difference"),
    )


def png_size(png: bytes) -> tuple[int, int] | None:
    """Return (width, height) from the header of a PNG file; None when it is cut short."""
    if len(png) < 24:
        return None
    width, height = struct.unpack(">II", png[16:24])
    return (width, height) if width and height else None


def box_name(boxes: FloatArray, i: int) -> str:
    """Return where one of several boxes (n, 4) lies, in per cent of the image.

    >>> box_name(np.array([[0.0, 0.25, 0.5, 1.0]]), 0)
    'box 0 to 50 % across, 25 to 100 % down'
    """
    left, top, right, bottom = (f"{100 * edge:.0f}" for edge in boxes[i])
    return f"box {left} to {right} % across, {top} to {bottom} % down"


def _place(example: Example) -> Callable[[int], str]:
    grid = example.grid
    if example.kind == "image" and grid is not None:
        columns = grid[1]
        return lambda i: f"patch row {i // columns}, column {i % columns}"
    if example.boxes is not None:
        return partial(box_name, example.boxes)
    words = example.words
    if words is None:
        return lambda i: f"position {i}"
    return lambda i: f"“{clip(words[i], 40)}” (position {i})"


def _movers(example: Example) -> tuple[str, ...]:
    order = np.argsort(-np.abs(example.difference), kind="stable")[:MOVERS].tolist()
    place = _place(example)
    return tuple(
        f"{place(i)}: {_share(example.before[i])} → {_share(example.after[i])}"
        for i in order
        if example.difference[i] != 0
    )


def _image(example: Example) -> dict[str, Any]:
    rows, columns = example.grid or (1, 1)
    ratio, notes, image, size = rows / columns, [], "", None
    if example.png is not None and len(example.png) > PNG_LIMIT:
        notes.append(f"The image takes {len(example.png) // 1000} kB and was left out; the patches remain.")
    elif example.png is not None:
        image, size = base64.b64encode(example.png).decode("ascii"), png_size(example.png)
    if size is not None:
        ratio = size[1] / size[0]
    elif example.grid is None:
        notes.append("Boxes on a square: no image is shown.")
    height = round(PANEL * min(max(ratio, 0.25), 4.0), 1)
    return {
        "panels": _panels(example, height),
        "image": image,
        "pixelated": size is not None and max(size) <= 64,
        "height": height,
        "notes": tuple(notes),
    }


def _text(example: Example) -> dict[str, Any]:
    words = _words(example)
    notes = []
    if len(words) < example.size:
        notes.append(f"{len(words)} of {example.size} positions, where the change is largest.")
    if example.words is None:
        notes.append("Positions only: the report holds no content.")
    return {"words": words, "notes": tuple(notes)}


def drawing(example: Example) -> Drawing:
    """Return an example as the template draws it.

    Before and after share one scale, from zero to the larger of their two peaks; the difference has a
    symmetric scale of its own.
    """
    empty: dict[str, Any] = {
        "words": (),
        "panels": (),
        "image": "",
        "pixelated": False,
        "height": 0.0,
        "notes": (),
    }
    parts = empty | (_image(example) if example.kind == "image" else _text(example))
    return Drawing(
        probe_id=clip(example.probe_id, 80),
        caption=clip(example.caption, 200),
        kind=example.kind,
        has_words=example.words is not None,
        movers=_movers(example),
        peak=_share(float(max(example.before.max(), example.after.max()))),
        peak_difference=_share(float(np.abs(example.difference).max())),
        **parts,
    )
