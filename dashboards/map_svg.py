"""Maps of one probe as SVG files: the words, patches and colour scales of the page, without a browser."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Sequence
from html import escape

from audit.report.wording import clip, number
from dashboards.downloads import WIDTH
from dashboards.probe_view import Line, Token, Weights, png_size, smooth_png
from dashboards.theme import PATCH, SANS, Palette

LETTER = 15
LINE = 30
MARGIN = 16
TITLE = 96
RAMP = 84
"""Pixels of a colour scale."""
NARROW, WIDE = frozenset(" .,:;'|!()[]‘’`ijltfrI-"), frozenset("mwMW@%—…")
"""Letters about half, and about one and a half times, as wide as most in a sans-serif font."""

Place = tuple[float, float, float, float]
"""Left, top, width and height in pixels."""


def words_svg(rows: Sequence[tuple[Sequence[Token], Line]], colours: Palette) -> str:
    """Return lines of words below each other, coloured as on the page.

    Parameters
    ----------
    rows : sequence of (tokens, Line)
        Each line with its own words, one share for each.
    colours : Palette
    """
    drawn, y = [], float(MARGIN)
    for pieces, line in rows:
        drawn.append(_text(MARGIN, y + LINE / 2, line.title, colours.soft, size=13))
        x = float(MARGIN + TITLE)
        for i, piece in enumerate(pieces):
            words = clip(piece.words, 60) if piece.words.strip() else ("·" if piece.special else str(i))
            width = _width(words) + 10
            if x + width > WIDTH - MARGIN and x > MARGIN + TITLE:
                x, y = float(MARGIN + TITLE), y + LINE
            drawn.append(_box(line, i, colours, (x, y + 3, width, LINE - 6), colours.word))
            drawn.append(_text(x + width / 2, y + LINE / 2, words, colours.ink, anchor="middle"))
            x += width + 4
        y += LINE + 12
    drawn += _scales([line for _, line in rows], y + LINE / 2, colours, colours.word)
    return _svg(WIDTH, y + LINE + MARGIN, drawn, colours)


def _width(words: str) -> float:
    """Return about how many pixels a text takes."""
    return LETTER * sum(map(_letter_width, words))


def _letter_width(letter: str) -> float:
    """Return about how wide a letter is, in font sizes."""
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in NARROW:
        return 0.31
    return 0.85 if letter in WIDE else 0.68 if letter.isupper() else 0.56


def _scales(lines: Sequence[Line], y: float, colours: Palette, opacity: float) -> list[str]:
    """Return the colour scales of the maps, then of differences, beside each other."""
    drawn, x = [], float(MARGIN)
    for signed, scale in sorted({(line.signed, line.scale) for line in lines}):
        size = number(scale)
        low, high = (f"lost {size}", f"gained {size}") if signed else ("0", f"{size} of the map")
        drawn.append(_text(x, y, low, colours.soft, size=13))
        x += _width(low) + 6
        drawn.append(_ramp((x, y - 6, RAMP, 12), colours, opacity, signed=signed))
        x += RAMP + 6
        drawn.append(_text(x, y, high, colours.soft, size=13))
        x += _width(high) + 2 * MARGIN
    return drawn


def _ramp(place: Place, colours: Palette, opacity: float, *, signed: bool) -> str:
    """Return a scale from transparent at the left, or in the middle, to full colour at the ends."""
    x, y, width, height = place
    name = f"ramp{x:.0f}"
    stops = [(0.0, colours.mass, 0.0), (1.0, colours.mass, opacity)]
    if signed:
        down, up = colours.down, colours.up
        stops = [(0.0, down, opacity), (0.5, down, 0.0), (0.5, up, 0.0), (1.0, up, opacity)]
    drawn = "".join(
        f'<stop offset="{at}" stop-color="{colour}" stop-opacity="{strength:.3f}"/>'
        for at, colour, strength in stops
    )
    return (
        f'<linearGradient id="{name}">{drawn}</linearGradient><rect x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}" rx="3" fill="url(#{name})" stroke="{colours.line}"/>'
    )


def panels_svg(
    panels: Sequence[Line],
    grid: tuple[int, int],
    png: bytes | None,
    colours: Palette,
    *,
    smooth: bool,
    ratio: float | None = None,
    boxes: Weights | None = None,
) -> str:
    """Return the maps over their picture: beside each other, or below each other where `ratio` is given.

    Parameters
    ----------
    panels : sequence of Line
    grid : (rows, columns)
    png : bytes or None
        The picture below.
    colours : Palette
    smooth : bool
    ratio : float or None
        Width by height of pictures as wide as a sound.
    boxes : float array (n, 4) or None
        Where patches lie that are no grid, as fractions of the picture.
    """
    size = png_size(png)
    stacked = ratio is not None
    shape = ratio or (size[0] / size[1] if size else grid[1] / grid[0])
    width = WIDTH - 2 * MARGIN if stacked else (WIDTH - 4 * MARGIN) / 3
    height, drawn = width / shape, []
    for i, panel in enumerate(panels):
        x = MARGIN if stacked else MARGIN + i * (width + MARGIN)
        y = MARGIN + 24 + (i * (height + 24 + MARGIN) if stacked else 0)
        place = (x, y, width, height)
        drawn.append(_text(x, y - 12, panel.title, colours.soft, size=13))
        drawn.append(_frame(place, colours))
        if png is not None:
            drawn.append(_image(png, place, 'opacity="0.4" filter="url(#grey)"'))
        if boxes is not None:
            drawn += _boxes(panel, boxes, place, colours)
        elif smooth:
            drawn.append(_image(smooth_png(panel, grid), place))
        else:
            drawn += _patches(panel, grid, place, colours)
    rows = len(panels) if stacked else 1
    end = MARGIN + rows * (height + 24 + MARGIN)
    drawn += _scales(panels, end + LINE / 2, colours, PATCH)
    return _svg(WIDTH, end + LINE + MARGIN, drawn, colours)


def _patches(panel: Line, grid: tuple[int, int], place: Place, colours: Palette) -> list[str]:
    left, top, width, height = place
    wide, high = width / grid[1], height / grid[0]
    return [
        _box(
            panel,
            i,
            colours,
            (left + wide * (i % grid[1]), top + high * (i // grid[1]), wide, high),
            PATCH,
            radius=0,
        )
        for i in range(len(panel.shares))
    ]


def _boxes(panel: Line, boxes: Weights, place: Place, colours: Palette) -> list[str]:
    x, y, width, height = place
    return [
        _box(
            panel,
            i,
            colours,
            (x + left * width, y + top * height, (right - left) * width, (bottom - top) * height),
            PATCH,
            radius=0,
        )
        for i, (left, top, right, bottom) in enumerate(boxes.tolist())
    ]


def _box(line: Line, i: int, colours: Palette, place: Place, opacity: float, *, radius: int = 4) -> str:
    fill = {"m": colours.mass, "u": colours.up, "d": colours.down}[line.kind(i)]
    x, y, width, height = place
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{fill}" fill-opacity="{opacity * line.strength(i):.3f}"/>'
    )


def _frame(place: Place, colours: Palette) -> str:
    x, y, width, height = place
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colours.wash}" '
        f'stroke="{colours.line}"/>'
    )


def _image(png: bytes, place: Place, extra: str = "") -> str:
    x, y, width, height = place
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'preserveAspectRatio="none" {extra} href="data:image/png;base64,{data}"/>'
    )


def _text(x: float, y: float, words: str, colour: str, *, size: int = LETTER, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{escape(clip(words, 80))}</text>'
    )


def _svg(width: float, height: float, drawn: Sequence[str], colours: Palette) -> str:
    grey = '<filter id="grey"><feColorMatrix type="saturate" values="0.15"/></filter>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{SANS}"><defs>{grey}</defs>'
        f'<rect width="100%" height="100%" fill="{colours.page}"/>{"".join(drawn)}</svg>'
    )
