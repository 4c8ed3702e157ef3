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
    "confidence": "The part of 1 that the model gives to its answer (softmax over its classes).",
    "digest": "A fingerprint (SHA-256) of bytes: equal digests mean equal content.",
    "weights": "The digest of the weights and the adapter alone.",
    "tokenizer": "The digest of the files that cut an input into pieces.",
    "revision": "Which version of a model on the hub it was.",
    "adapter": "A small set of weights on top of a base model (PEFT).",
    "output row": "Whose attention is followed back to the input; auto is what the model's head reads.",
    "inputs digest": "The digest of all probe ids and contents, in order.",
    "annotations": "The digest of labels, groups, segments and annotated regions.",
    "dtype": "With how many bits the model calculates.",
    "attention": "Which implementation of attention calculated; auto is the model's own.",
    "rollout": "Attention of all layers multiplied together: which inputs the output draws on.",
    "policy": "The conditions that were written down before the audit; each is one rule of the report.",
    "occlusion": "The region is hidden and both checkpoints answer again: does the answer depend on it?",
    "logit": "The number from which the model's answer is made, before it is turned into a confidence.",
    "method": "How attention becomes a map; the page Methods & limits says what each looks at.",
    "2×2": "Both checkpoints on both probe sets: tells a changed model from changed data.",
    "p": "How often a harmless re-training alone would move the map at least as far.",
    "Holm": "The p of several regions, each made stricter so that together they raise few false alarms.",
    "architecture": "The class of the model, as its configuration names it.",
    "device": "What calculated: the processor (cpu) or a graphics card (cuda).",
    "stream": "Which of several inputs a map lies on: source and prefix, or image and text.",
    "log head": "The digest of the newest entry of the log, which hangs on all entries before it.",
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


def no_comparison() -> None:
    """Say that the store holds no comparison yet, and what makes one."""
    st.info(
        "There is no comparison in this store yet; `audit run audit.toml` makes one.",
        icon=":material/inbox:",
    )


def html(content: str) -> None:
    """Draw HTML of the dashboard's own style."""
    st.html(f'<div class="ra">{content}</div>')


def term(word: str, shown: str | None = None) -> str:
    """Return a word of the field with its meaning on hover."""
    return f'<abbr title="{escape(GLOSSARY[word])}" tabindex="0">{escape(shown or word)}</abbr>'


def column(word: str, shown: str | None = None) -> Any:
    """Return a column of a table whose heading has the meaning of a word on hover."""
    return st.column_config.Column(shown or word, help=GLOSSARY[word])


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
        f"<dt>{term(name) if name in GLOSSARY else text(name)}</dt><dd{_mono(value)}>{text(value)}</dd>"
        for name, value in items
        if value
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


def page_text(name: str) -> str:
    """Return one of the texts that explain a map."""
    return Path(__file__).with_name(f"{name}.html").read_text(encoding="utf-8")


def meaning() -> None:
    """Offer what a map means and does not mean, beside the map."""
    with st.popover("What a map means, and what not", icon=":material/help:", type="tertiary"):
        said, not_said = page_text("about_map"), page_text("about_limits")
        html(f'<div class="plain">{said}<h2>What it cannot tell</h2>{not_said}</div>')


@contextlib.contextmanager
def folded(label: str, key: str) -> Iterator[bool]:
    """Draw a part that is folded away, and made when a reader opens it; gives whether it is open."""
    with st.expander(label, key=f"fold {key}", on_change="rerun") as part, section():
        yield bool(part.open)


@contextlib.contextmanager
def section(title: str | None = None, explanation: str | None = None) -> Iterator[None]:
    """Draw one part of a page; what cannot be read is said in its place, the rest still stands."""
    if title:
        st.header(title, help=explanation, anchor=False)
    try:
        yield
    except AuditError as error:
        warn(error)
