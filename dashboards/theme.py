"""Colours of both themes, the same as in the HTML report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import streamlit as st


@dataclass(frozen=True)
class Palette:
    """Colours of one theme; `down`–`middle`–`up` is a colour-blind-safe diverging scale."""

    page: str
    ink: str
    soft: str
    line: str
    wash: str
    up: str
    middle: str
    down: str
    mass: str
    zone: str
    edge: str
    noise: str
    dot: str
    outcomes: tuple[str, ...]


OUTCOMES = ("PASS", "WARN", "FAIL", "INCONCLUSIVE", "ERROR", "COMPARED")
SHAPES = ("circle", "triangle-up", "diamond", "square", "cross", "circle")

LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f27",
    soft="#59616e",
    line="#e1e5ea",
    wash="#f1f3f6",
    up="#c2560a",
    middle="#f4f5f7",
    down="#1f63b0",
    mass="#0f766e",
    zone="#e9eef4",
    edge="#5b6a80",
    noise="#c3ccd8",
    dot="#77818f",
    outcomes=("#1a7444", "#8f5b00", "#b4232c", "#8a5a00", "#6d3fc0", "#44505f"),
)
DARK = Palette(
    page="#101318",
    ink="#e8ebf0",
    soft="#a3acba",
    line="#2b313b",
    wash="#20252e",
    up="#ff9d4d",
    middle="#232831",
    down="#6fb1ff",
    mass="#4fd1c5",
    zone="#1f2630",
    edge="#94a3b8",
    noise="#434f60",
    dot="#a7b1bf",
    outcomes=("#5cc98b", "#e3b04b", "#ff7f82", "#e3b04b", "#b79bff", "#b8c1cf"),
)


def palette() -> Palette:
    """Return the colours of the theme that the reader has chosen."""
    return DARK if getattr(st.context.theme, "type", None) == "dark" else LIGHT


def apply_style() -> None:
    """Add the style sheet of the dashboard's own HTML to the page."""
    st.html(Path(__file__).with_name("style.css"))
