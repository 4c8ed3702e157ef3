"""Maps of one probe as HTML: words over their text, patches over their image.

Streamlit removes SVG from HTML, so that patches are a grid of elements above the picture.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.records import Positions, Probe
from audit.report.maps import box_name
from audit.report.wording import number
from dashboards.blocks import text

SHOWN = 1200
"""Tokens drawn at most; longer inputs are cut around the largest change."""

Weights = NDArray[np.float64]


@dataclass(frozen=True)
class Token:
    """One drawn piece of text: the positions it covers, its words, and what stands before it."""

    positions: tuple[int, ...]
    words: str
    special: bool
    gap: str = ""


def tokens(positions: Positions, probe: Probe | None, *, whole_words: bool) -> list[Token]:
    """Return the pieces of a text in order; without content, one numbered piece for each position."""
    single = [_token(i, positions, probe) for i in range(len(positions))]
    if not whole_words or probe is None:
        return single
    merged: list[Token] = []
    for token in single:
        last = merged[-1] if merged else None
        if last is not None and _one_word(last, token, positions):
            same = _span(positions, last.positions[-1]) == _span(positions, token.positions[0])
            words = last.words if same else last.words + token.words
            merged[-1] = Token(last.positions + token.positions, words, False, last.gap)
        else:
            merged.append(token)
    return merged


def _token(i: int, positions: Positions, probe: Probe | None) -> Token:
    special = bool(positions.special[i])
    start, end, part = _span(positions, i)
    if probe is None or start < 0 or part < 0:
        return Token((i,), "·" if special else "", special, " ")
    source = (probe.text or "", probe.text_pair or "")[part]
    before = max(
        (e for s, e, p in (_span(positions, j) for j in range(max(0, i - 3), i)) if p == part), default=0
    )
    return Token((i,), source[start:end], special, source[before:start] if start >= before else "")


def _span(positions: Positions, i: int) -> tuple[int, int, int]:
    if positions.starts is None or positions.ends is None:
        return -1, -1, -1
    part = int(positions.parts[i]) if positions.parts is not None else 0
    return int(positions.starts[i]), int(positions.ends[i]), part


def _one_word(last: Token, token: Token, positions: Positions) -> bool:
    if last.special or token.special or not last.words or not token.words:
        return False
    one, two = _span(positions, last.positions[-1]), _span(positions, token.positions[0])
    if one[0] < 0 or two[0] < 0 or one[2] != two[2]:
        return False
    if one[:2] == two[:2]:
        return True
    return one[1] == two[0] and last.words[-1].isalnum() and token.words[0].isalnum()


def summed(weights: Weights, pieces: Sequence[Token]) -> Weights:
    """Return the share of each piece: the sum over its positions."""
    return np.array([weights[list(piece.positions)].sum() for piece in pieces])


@dataclass(frozen=True)
class Line:
    """One map of several pieces: its title, shares, and the share that is drawn in full colour."""

    title: str
    shares: Weights
    scale: float
    signed: bool = False

    def kind(self, i: int) -> str:
        """Return the colour of a piece: ``m`` (mass), or ``u`` (up) and ``d`` (down) around zero."""
        return ("u" if self.shares[i] > 0 else "d") if self.signed else "m"

    def strength(self, i: int) -> float:
        """Return how strongly a piece is coloured, from 0 to 1."""
        return min(1.0, abs(float(self.shares[i])) / self.scale) if self.scale else 0.0


def pair_of_lines(before: Weights, after: Weights, peaks: tuple[float, float]) -> list[Line]:
    """Return before, after and their difference; `peaks` are the scales of the maps and the difference."""
    return [
        Line("Before", before, peaks[0]),
        Line("After", after, peaks[0]),
        Line("Difference", after - before, peaks[1], signed=True),
    ]


def words_html(pieces: Sequence[Token], line: Line, others: tuple[Weights, Weights]) -> str:
    """Return one line of words, coloured by share, or by difference on a symmetric scale.

    Parameters
    ----------
    pieces : sequence of Token
    line : Line
        One share for each piece.
    others : (before, after)
        Printed on hover, exact.
    """
    before, after = others
    parts = []
    for i, piece in enumerate(pieces):
        where = (
            f"position {piece.positions[0]}"
            if len(piece.positions) == 1
            else f"{len(piece.positions)} tokens"
        )
        gained = number(after[i] - before[i], 4, signed=True)
        title = f"{where}: {number(before[i], 4)} → {number(after[i], 4)} ({gained})"
        extra = " x" if piece.special else ""
        title += ", special token" if piece.special else ""
        shown = text(piece.words, 60) if piece.words.strip() or piece.special else str(piece.positions[0])
        gap = piece.gap[:1] if not piece.gap.strip() else f' <span class="soft">{text(piece.gap, 40)}</span> '
        style = f'class="{line.kind(i)}{extra}" style="--a:{line.strength(i):.3f}"'
        parts.append(f'{gap}<i {style} title="{title}">{shown}</i>')
    return "".join(parts)


def window(change: Weights, width: int = SHOWN) -> slice:
    """Return the `width` neighbouring pieces that changed most."""
    if len(change) <= width:
        return slice(0, len(change))
    sums = np.convolve(np.abs(change), np.ones(width), mode="valid")
    start = int(np.argmax(sums))
    return slice(start, start + width)


def strips(rows: Sequence[tuple[str, str]], *, blank: bool) -> str:
    """Return lines of words below each other, each with its title."""
    kind = "words blank" if blank else "words"
    lines = "".join(
        f'<span>{title}</span><div class="{kind}" dir="auto">{line}</div>' for title, line in rows
    )
    return f'<div class="strip">{lines}</div>'


def panels_html(
    panels: Sequence[Line],
    grid: tuple[int, int],
    png: bytes | None,
    *,
    smooth: bool,
    others: tuple[Weights, Weights],
    spans: Sequence[str] = (),
    ratio: float | None = None,
    boxes: Weights | None = None,
) -> str:
    """Return the maps side by side, each over the picture where there is one, which stands before them.

    With `spans`, the names of the columns, they stand below each other, for pictures as wide as a sound.
    With `boxes`, fractions of the picture (n, 4), patches lie there, and are no grid.
    """
    size = png_size(png)
    ratio = ratio or (size[0] / size[1] if size else grid[1] / grid[0])
    small = " pixelated" if size and max(size) <= 64 else ""
    picture = ""
    if png is not None:
        data = base64.b64encode(png).decode("ascii")
        picture = f'<img class="below{small}" alt="the probe" src="data:image/png;base64,{data}">'
    figures = [] if png is None or spans else [_original(png, ratio, small)]
    for panel in panels:
        if boxes is not None:
            above = _boxes(panel, boxes, others)
        else:
            above = _smooth(panel, grid) if smooth else _patches(panel, grid, others, spans)
        figures.append(
            f"<figure><figcaption>{panel.title}</figcaption>"
            f'<div class="picture" style="aspect-ratio:{ratio:.4f}">{picture}{above}</div></figure>'
        )
    wide = " wide" if spans else ""
    return f'<div class="panels{wide}">{"".join(figures)}</div>'


def _original(png: bytes, ratio: float, small: str) -> str:
    """Return the picture alone, as the model gets it."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><figcaption>Input</figcaption><div class="original" style="aspect-ratio:{ratio:.4f}">'
        f'<img class="{small.strip()}" alt="the probe, without a map" src="data:image/png;base64,{data}">'
        "</div></figure>"
    )


def _patches(
    panel: Line, grid: tuple[int, int], others: tuple[Weights, Weights], spans: Sequence[str]
) -> str:
    cells = []
    for i in range(len(panel.shares)):
        where = spans[i % grid[1]] if spans else f"row {i // grid[1]}, column {i % grid[1]}"
        cells.append(_cell(panel, i, where, others))
    return f'<div class="grid" style="grid-template-columns:repeat({grid[1]},1fr)">{"".join(cells)}</div>'


def _boxes(panel: Line, boxes: Weights, others: tuple[Weights, Weights]) -> str:
    cells = []
    for i, (left, top, right, bottom) in enumerate(100 * np.asarray(boxes, dtype=np.float64)):
        place = f"position:absolute;left:{left:.2f}%;top:{top:.2f}%"
        place += f";width:{right - left:.2f}%;height:{bottom - top:.2f}%"
        cells.append(_cell(panel, i, box_name(boxes, i), others, place))
    return f'<div class="grid">{"".join(cells)}</div>'


def _cell(panel: Line, i: int, where: str, others: tuple[Weights, Weights], place: str = "") -> str:
    title = f"{where}: {number(others[0][i], 4)} → {number(others[1][i], 4)}"
    style = f'class="{panel.kind(i)}" style="--a:{panel.strength(i):.3f}{place and f";{place}"}"'
    return f'<i {style} title="{title}"></i>'


RISE, FALL, MASS = (214, 96, 16), (36, 104, 190), (13, 148, 136)


def _smooth(panel: Line, grid: tuple[int, int]) -> str:
    data = base64.b64encode(smooth_png(panel, grid)).decode("ascii")
    return f'<img class="above" alt="{text(panel.title)}" src="data:image/png;base64,{data}">'


def smooth_png(panel: Line, grid: tuple[int, int], width: int = 240) -> bytes:
    """Return the map as one picture with soft borders, half transparent."""
    from PIL import Image

    relative = (panel.shares / panel.scale if panel.scale else panel.shares).reshape(grid).astype(np.float32)
    height = max(1, round(width * grid[0] / grid[1]))
    large = np.asarray(Image.fromarray(relative).resize((width, height), Image.Resampling.BICUBIC))
    pixels = np.zeros((height, width, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(large[..., None] >= 0, RISE if panel.signed else MASS, FALL)
    pixels[..., 3] = np.clip(np.abs(large) if panel.signed else large, 0, 1) * 205
    return as_png(pixels)


def as_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels (grey, RGB or RGBA) as a PNG file."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def png_size(png: bytes | None) -> tuple[int, int] | None:
    """Return (width, height) of a PNG file."""
    if png is None or len(png) < 24:
        return None
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def peak(*arrays: Any) -> float:
    """Return the largest absolute value of several arrays; 0 for none."""
    return max((float(np.abs(array).max(initial=0.0)) for array in arrays), default=0.0)
