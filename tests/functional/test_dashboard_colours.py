"""Colours of the dashboard: told apart by everyone, readable, the same in charts, files and style sheet."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from audit import report
from dashboards import theme
from dashboards.theme import DARK, LIGHT, OUTCOMES, SHAPES, Palette
from tests.colour_vision import DEFICIENCIES, ciede2000, contrast, difference, linear

THEMES = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
VISIONS = pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES], ids=str)
STYLE = Path(theme.__file__).with_name("style.css").read_text()
REPORT = Path(report.__file__).with_name("templates").joinpath("style.css").read_text()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
    ],
)
def test_difference_is_that_of_the_published_pairs(one, other, expected):  # Sharma et al. 2005, table 1
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=5e-5)


def test_a_red_and_a_green_of_one_lightness_look_alike_without_red_cones():
    assert difference("#b06000", "#6e7800") > 25
    assert difference("#b06000", "#6e7800", "deuteranopia") < 10


@THEMES
@VISIONS
def test_rise_and_fall_are_told_apart_by_everyone(colours: Palette, deficiency: str | None) -> None:
    for one, other in combinations((colours.down, colours.middle, colours.up), 2):
        assert difference(one, other, deficiency) > 30
    for end in (colours.down, colours.up):  # bars of a histogram beside those around zero
        assert difference(end, colours.dot, deficiency) > 15


@THEMES
@VISIONS
def test_verdicts_are_told_apart_by_everyone(colours: Palette, deficiency: str | None) -> None:
    found = dict(zip(OUTCOMES, colours.outcomes, strict=True))
    assert found.pop("WARN") == found["INCONCLUSIVE"]  # on purpose: both ask for a look; shapes differ
    for one, other in combinations(found.values(), 2):
        assert difference(one, other, deficiency) > 10


def test_no_two_verdicts_of_a_policy_share_colour_and_shape() -> None:
    judged = [one for one in zip(LIGHT.outcomes, SHAPES, OUTCOMES, strict=True) if one[2] != "COMPARED"]
    assert len({(colour, shape) for colour, shape, _ in judged}) == len(judged)


def over(colour: str, opacity: float, ground: str) -> np.ndarray:
    """Return the linear colour of a half-transparent one over its ground (mixed in sRGB, as browsers do)."""
    parts = [
        round(opacity * int(colour[i : i + 2], 16) + (1 - opacity) * int(ground[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return linear("#" + "".join(f"{part:02x}" for part in parts))


@THEMES
def test_words_stay_readable_on_the_strongest_colour(colours: Palette) -> None:
    for tint in (colours.up, colours.down, colours.mass):
        assert contrast(over(tint, colours.word, colours.page), linear(colours.ink)) >= 4.5


@THEMES
def test_labels_of_verdicts_are_readable(colours: Palette) -> None:
    for accent, wash in zip(colours.outcomes, colours.washes, strict=True):
        assert contrast(linear(accent), linear(wash)) >= 4.5
        assert contrast(linear(accent), linear(colours.page)) >= 4.5  # white on the accent, and text in it


def test_style_sheet_takes_every_colour_from_the_palettes() -> None:
    assert "#" not in re.sub(r"/\*.*?\*/", "", STYLE)
    defined = set(re.findall(r"(--[\w-]+):", theme.variables()))
    used = set(re.findall(r"var\((--(?:ra|accent)[\w-]*)\)", STYLE))
    assert used <= defined
    assert f"--ra-up: light-dark({LIGHT.up}, {DARK.up});" in theme.variables()


def test_reports_show_verdicts_in_the_same_colours() -> None:
    light, _, dark = REPORT.partition("prefers-color-scheme: dark")
    for colours, sheet in ((LIGHT, light), (DARK, dark)):
        for name, colour in zip(OUTCOMES, colours.outcomes, strict=True):
            if name != "COMPARED":  # a report without a policy has no verdict to colour
                assert f"--{name.lower()}: {colour};" in sheet
