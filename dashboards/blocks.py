"""Pieces of HTML that several pages draw; every text from outside is cleaned and escaped here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import streamlit as st

from audit.errors import AuditError
from audit.records import RunRef
from audit.report.wording import clip
from dashboards import state

GLOSSARY = {
    "share": "The part of the map's mass that falls into a region. All content together is 1.",
    "shift": "Share after minus share before, paired probe by probe, then averaged.",
    "region": "A set of input positions that was fixed before looking: names, a corner, special tokens.",
    "interval": "Where the mean shift over probes like these would lie; its level stands beside the plot.",
    "noise floor": "What harmless re-trainings of the same base (other seeds) move by: mean ± SD.",
    "limit": "The largest shift that the policy allows.",
    "excess": "The shift minus the mean shift of the harmless re-trainings.",
    "detectable": "The smallest excess shift that these replicates would reveal with the wanted power.",
    "replicate": "A harmless re-training of the same base: same recipe, another seed.",
    "probe": "One fixed input on which every checkpoint is looked at.",
    "JS distance": "How far two maps lie apart: 0 is identical, 1 is no overlap at all.",
    "layer": "Layers count from 0, nearest the input; a layer's value includes all layers below it.",
    "rollout": "Attention of all layers multiplied together: which inputs the output draws on.",
}


TIME = st.column_config.DatetimeColumn(format="D MMM YYYY, HH:mm")
"""How tables show the column `time`."""


def text(value: object, width: int = 400) -> str:
    """Return untrusted text, made visible, cut and escaped for HTML."""
    return escape(clip(str(value), width))


def plain(message: object, width: int = 500) -> str:
    """Return untrusted text for an element that reads Markdown: cut, and with every mark escaped."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>~$:])", r"\\\1", clip(str(message), width))


def warn(message: object, *, icon: str = "report") -> None:
    """Draw a warning of untrusted text."""
    st.warning(plain(message), icon=f":material/{icon}:")


def html(content: str) -> None:
    """Draw HTML of the dashboard's own style."""
    st.html(f'<div class="ra">{content}</div>')


def term(word: str, shown: str | None = None) -> str:
    """Return a word of the field with its meaning on hover."""
    return f'<abbr title="{escape(GLOSSARY[word])}" tabindex="0">{escape(shown or word)}</abbr>'


def badge(outcome: str) -> str:
    """Return the outcome as a coloured label."""
    return f'<span class="badge {escape(outcome)}">{escape(outcome)}</span>'


def note(content: str) -> None:
    """Draw a quiet line of explanation; `content` is HTML."""
    html(f'<p class="note">{content}</p>')


def figures(items: Iterable[tuple[str, str, str]]) -> str:
    """Return (name, value, remark) as a row of figures; all three are HTML."""
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{remark}</small>' if remark else ''}</dd></div>"
        for name, value, remark in items
    )
    return f'<dl class="figures">{cells}</dl>'


def facts(items: Iterable[tuple[str, object]]) -> str:
    """Return (name, value) pairs as a list of facts; values are plain text."""
    rows = "".join(
        f"<dt>{text(name)}</dt><dd{_mono(value)}>{text(value)}</dd>" for name, value in items if value
    )
    return f'<dl class="facts">{rows}</dl>'


def _mono(value: object) -> str:
    long = isinstance(value, str) and len(value) >= 12 and all(c in "0123456789abcdef" for c in value)
    return ' class="mono"' if long else ""


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table; head and body are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body)
    table_html = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table_html}</div>'


def short_name(ref: RunRef | str | None) -> str:
    """Return the last part of a checkpoint's path, or a hub id as it is."""
    name = ref.checkpoint if isinstance(ref, RunRef) else ref
    if not name:
        return "unknown"
    path = Path(name)
    return clip(path.name if path.is_absolute() or len(path.parts) > 2 else str(name), 60)


def pair_name(before: str | None, after: str | None) -> str:
    """Return both checkpoints, with their folders where the last parts alone are equal."""
    names = [short_name(before), short_name(after)]
    if names[0] == names[1] and before and after and before != after:
        names = [clip("/".join(Path(one).parts[-2:]), 60) for one in (before, after)]
    return " → ".join(names)


def moment(time: Any) -> datetime | None:
    """Return a stored time, None where it is not one."""
    try:
        return datetime.fromisoformat(str(time)).astimezone(UTC)
    except ValueError:
        return None


def when(time: Any) -> str:
    """Return a stored time as it is printed: 30 Nov 2026, 09:46 UTC."""
    found = time if isinstance(time, datetime) else moment(time)
    return clip(str(time), 40) if found is None else f"{found.day} {found:%b %Y, %H:%M} UTC"


def link(name: str, label: str, icon: str | None = None, **selected: str) -> None:
    """Draw a link to a page with this selection."""
    st.page_link(state.page(name), label=plain(label, 120), icon=icon, query_params=selected)


def share_link() -> None:
    """Say that the address is the link to this view."""
    note("The address in your browser is the link to exactly this view.")


@contextlib.contextmanager
def section(title: str | None = None, explanation: str | None = None) -> Iterator[None]:
    """Draw one part of a page; what cannot be read is said in its place, the rest still stands."""
    if title:
        st.header(title, help=explanation, anchor=False)
    try:
        yield
    except AuditError as error:
        warn(error)


def downloads(name: str, frame: Any) -> None:
    """Offer a polars table as CSV and Parquet."""
    import io

    def parquet() -> bytes:
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        return buffer.getvalue()

    flat = [column for column, kind in frame.schema.items() if not kind.is_nested()]
    with st.container(horizontal=True, gap="small"):
        st.download_button(
            "CSV",
            lambda: frame.select(flat).write_csv().encode(),
            f"{name}.csv",
            "text/csv",
            key=f"csv {name}",
            icon=":material/download:",
            type="tertiary",
            on_click="ignore",
        )
        st.download_button(
            "Parquet",
            parquet,
            f"{name}.parquet",
            "application/vnd.apache.parquet",
            key=f"parquet {name}",
            icon=":material/download:",
            type="tertiary",
            on_click="ignore",
        )
