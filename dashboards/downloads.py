"""Tables and figures as files, made only when somebody asks for them."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from audit.report.wording import clip
from dashboards import theme

if TYPE_CHECKING:
    import altair as alt
    import polars as pl

    from dashboards.theme import Palette

WIDTH = 900
"""Pixels of a downloaded chart; on the page a chart is as wide as its place."""
LINE = 170
"""Letters of a title in a downloaded chart, so that it is not wider than the chart."""
SCALE = 2
"""Pixels of a PNG for each pixel of the drawing."""


@dataclass(frozen=True)
class Source:
    """What files are made from: the start of their names, and what a chart says of it below its title."""

    file: str
    about: str


def table(name: str, frame: pl.DataFrame) -> None:
    """Offer a table as CSV and Parquet; in CSV, lists stand as JSON."""
    files(name, {"CSV": ("text/csv", lambda: csv(frame)), "Parquet": (PARQUET, lambda: parquet(frame))})


PARQUET = "application/vnd.apache.parquet"


def csv(frame: pl.DataFrame) -> bytes:
    """Return a table as CSV, lists and mappings as JSON."""
    import polars as pl

    nested = [column for column, kind in frame.schema.items() if kind.is_nested()]
    flat = [
        pl.Series(column, [_json(one) for one in frame[column].to_list()], pl.String) for column in nested
    ]
    return frame.with_columns(flat).write_csv().encode()


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def parquet(frame: pl.DataFrame) -> bytes:
    """Return a table as Parquet."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def chart(
    name: str, make: Callable[..., alt.LayerChart], *inputs: Any, alt: str, notes: Sequence[str] = ()
) -> None:
    """Draw a chart, and offer it as SVG and PNG; what was drawn from the same inputs is kept.

    Parameters
    ----------
    name : str
        Of the files.
    make : callable
        Takes the inputs and then the colours.
    inputs : any
        Numbers, texts, records, arrays, and lists of these.
    alt : str
        What the chart shows, in words; in the files it is the title.
    notes : sequence of str
        Lines below the title in the files: what it is made from, and the legend. By default the name.
    """
    colours = theme.palette()
    spec = _spec((make.__module__, make.__name__, colours.page, *map(_key, inputs)), make, inputs, colours)
    st.vega_lite_chart(copy.deepcopy(spec), alt=alt, theme=None)  # its own theme has labels too pale to read
    figure(name, lambda: chart_svg(spec, colours, alt, notes or (name,)))


@st.cache_data(max_entries=256, show_spinner=False)
def _spec(
    key: tuple[str, ...],  # noqa: ARG001 (stands for the rest)
    _make: Callable[..., alt.LayerChart],
    _inputs: tuple[Any, ...],
    _colours: Palette,
) -> dict[str, Any]:
    found: dict[str, Any] = _make(*_inputs, _colours).to_dict()
    return found


def _key(value: Any) -> str:
    shown = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return hashlib.sha256(shown).hexdigest()


def figure(name: str, svg: Callable[[], str]) -> None:
    """Offer a drawing as SVG and PNG; `svg` is called when a file is wanted."""
    files(
        name,
        {
            "SVG": ("image/svg+xml", lambda: svg().encode()),
            "PNG": ("image/png", lambda: png(svg())),
        },
    )


def chart_svg(spec: Mapping[str, Any], colours: Palette, title: str, notes: Sequence[str]) -> str:
    """Return a chart's specification as SVG, titled, in the colours of the reader's theme."""
    import vl_convert

    config = {**spec.get("config", {}), "background": colours.page}
    head = {
        "text": clip(title, LINE),
        "subtitle": [clip(note, LINE) for note in notes],
        "anchor": "start",
        "color": colours.ink,
        "subtitleColor": colours.soft,
        "offset": 14,
    }
    found: str = vl_convert.vegalite_to_svg({**spec, "title": head, "width": WIDTH, "config": config})
    return found


def png(svg: str) -> bytes:
    """Return an SVG as PNG."""
    import vl_convert

    found: bytes = vl_convert.svg_to_png(svg, scale=SCALE)
    return found


def files(name: str, offered: Mapping[str, tuple[str, Callable[[], bytes]]]) -> None:
    """Offer one thing in several formats: label → (media type, how to make it)."""
    with st.container(horizontal=True, gap="small", key=f"files {name} {min(offered)}"):
        for label, (kind, make) in offered.items():
            ending = label.casefold()
            st.download_button(
                label,
                make,
                f"{name}.{ending}",
                kind,
                key=f"{ending} {name}",
                icon=":material/download:",
                type="tertiary",
                on_click="ignore",
            )
