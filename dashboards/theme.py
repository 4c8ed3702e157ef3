"""Colours of both themes: one palette each, for the charts, the files and the style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import streamlit as st


@dataclass(frozen=True)
class Palette:
    """Colours of one theme; `down`–`middle`–`up` is a colour-blind-safe diverging scale.

    Attributes
    ----------
    outcomes, washes : tuple of str
        Of each outcome: its colour, and the ground of its label.
    word : float
        Opacity of the strongest colour behind a word, so that the word stays readable.
    """

    page: str
    ink: str
    soft: str
    line: str
    wash: str
    card: str
    up: str
    middle: str
    down: str
    mass: str
    edge: str
    noise: str
    dot: str
    outcomes: tuple[str, ...]
    washes: tuple[str, ...]
    word: float


OUTCOMES = ("PASS", "WARN", "FAIL", "INCONCLUSIVE", "ERROR", "COMPARED")
SHAPES = ("circle", "triangle-up", "diamond", "square", "cross", "circle")
SANS = "Source Sans, Source Sans Pro, Helvetica, Arial, sans-serif"
"""Letters of charts and files."""
PATCH = 0.82
"""Opacity of the strongest colour over a picture."""

LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f27",
    soft="#59616e",
    line="#e1e5ea",
    wash="#f1f3f6",
    card="#ffffff",
    up="#c2560a",
    middle="#f4f5f7",
    down="#1f63b0",
    mass="#0f766e",
    edge="#5b6a80",
    noise="#c3ccd8",
    dot="#77818f",
    outcomes=("#17734d", "#996100", "#99001a", "#996100", "#6d3fc0", "#44505f"),
    washes=("#e6f4ec", "#fbf1dc", "#fbe9ea", "#fbf1dc", "#f0eafb", "#f1f3f6"),
    word=0.74,
)
DARK = Palette(
    page="#101318",
    ink="#e8ebf0",
    soft="#a3acba",
    line="#2b313b",
    wash="#20252e",
    card="#151920",
    up="#ff9d4d",
    middle="#232831",
    down="#6fb1ff",
    mass="#4fd1c5",
    edge="#94a3b8",
    noise="#434f60",
    dot="#a7b1bf",
    outcomes=("#52cca3", "#e6b545", "#ff6673", "#e6b545", "#b79bff", "#b8c1cf"),
    washes=("#15301f", "#33280f", "#3a1a1d", "#33280f", "#271f3d", "#20252e"),
    word=0.5,
)
SINGLE = ("page", "ink", "soft", "line", "wash", "card", "up", "down", "mass", "edge", "noise", "dot")
TINTS = ("up", "down", "mass")
"""Colours that lie behind words and over pictures."""

FOLLOW = st.components.v2.component(
    "rollout-audit.theme",
    js="""
    export default function ({ setTriggerValue }) {
      const dark = matchMedia("(prefers-color-scheme: dark)")
      const draw = () => setTriggerValue("changed", true)
      dark.addEventListener("change", draw)
      return () => dark.removeEventListener("change", draw)
    }
    """,
)
"""Draws the page again when the system's theme changes: charts are made in the colours of one theme."""


def palette() -> Palette:
    """Return the colours of the theme that the reader has chosen."""
    return DARK if getattr(st.context.theme, "type", None) == "dark" else LIGHT


def apply_style() -> None:
    """Add the style sheet of the dashboard's own HTML to the page, with the colours of both themes."""
    sheet = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    st.html(f"<style>{variables()}\n{sheet}</style>")


def follow() -> None:
    """Let charts follow a change of the system's theme at once."""
    FOLLOW(key="theme", on_changed_change=lambda: None)


def variables() -> str:
    """Return the palettes as CSS: each variable has its light and its dark colour."""
    lines = [f"--ra-{name}: {_both(getattr(LIGHT, name), getattr(DARK, name))};" for name in SINGLE]
    for name in TINTS:
        light, dark = getattr(LIGHT, name), getattr(DARK, name)
        words = _both(_faded(light, LIGHT.word), _faded(dark, DARK.word))
        lines += [f"--ra-{name}-word: {words};"]
        lines += [f"--ra-{name}-patch: {_both(_faded(light, PATCH), _faded(dark, PATCH))};"]
    rules = [f".stApp {{ {' '.join(lines)} }}"]
    for i, outcome in enumerate(OUTCOMES):
        accent, wash = (_both(getattr(LIGHT, f)[i], getattr(DARK, f)[i]) for f in ("outcomes", "washes"))
        rules.append(f".{outcome} {{ --accent: {accent}; --accent-wash: {wash}; }}")
    return "\n".join(rules)


def _both(light: str, dark: str) -> str:
    return f"light-dark({light}, {dark})"


def _faded(colour: str, opacity: float) -> str:
    return f"{colour}{round(255 * opacity):02x}"
