"""One selection for all pages, mirrored in the address, so that every view can be linked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

KEYS = (
    "comparison",
    "run",
    "effect",
    "changed",
    "segment",
    "label",
    "region",
    "probe",
    "stream",
    "layer",
    "unit",
    "overlay",
    "order",
    "outcome",
    "find",
    "model",
    "head",
    "row",
    "method",
    "tokens",
)
"""What may be selected, and what an address may carry."""


OF_COMPARISON = (
    *("effect", "changed", "segment", "label", "region", "probe"),
    *("stream", "layer", "head", "row", "method", "tokens"),
)
"""What is meant of one comparison alone: a link to another one does not take it along."""


def read_address() -> None:
    """Take what the address names into the selection.

    Other keys keep their value, but not those of another comparison, nor those that an address which was
    published earlier did not name: the browser went back to it.
    """
    chosen = _selection()
    now = st.query_params.to_dict()
    if now and now != st.session_state.get("address", now):
        for key in _published().get(frozenset(now.items()), ()):
            chosen.pop(key, None)
    asked = st.query_params.get("comparison")
    if asked is not None and asked != chosen.get("comparison", asked):
        for key in OF_COMPARISON:
            chosen.pop(key, None)
    for key in KEYS:
        if key in st.query_params:
            chosen[key] = st.query_params[key]


def get(key: str) -> str | None:
    """Return what is selected, None for nothing."""
    return _selection().get(key)


def put(**changes: str | None) -> None:
    """Change the selection and, where the address names these keys, the address."""
    chosen = _selection()
    for key, value in changes.items():
        if value is None:
            chosen.pop(key, None)
            if key in st.query_params:
                del st.query_params[key]
        else:
            chosen[key] = value
            if key in st.query_params:
                st.query_params[key] = value
    st.session_state["address"] = st.query_params.to_dict()


def publish(*keys: str) -> None:
    """Write these keys of the selection to the address: the link to the page as it is."""
    chosen = _selection()
    wanted = {key: chosen[key] for key in keys if key in chosen}
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)
    st.session_state["address"] = wanted
    _published()[frozenset(wanted.items())] = keys


def _published() -> dict[frozenset[tuple[str, str]], tuple[str, ...]]:
    """Return the addresses of this session so far, each with the keys that its page may name."""
    found: dict[frozenset[tuple[str, str]], tuple[str, ...]] = st.session_state.setdefault("published", {})
    return found


def pick(
    widget: Callable[..., Any],
    label: str,
    key: str,
    options: Sequence[str],
    *,
    default: str | None = None,
    **settings: Any,
) -> str | None:
    """Draw a widget that shows and changes one key of the selection; return its value.

    A value that is not among the options (an old link) falls back to `default`.
    """
    chosen = get(key)
    if chosen not in options:
        chosen = default
    name = f"pick {key}"
    st.session_state[name] = chosen
    value = widget(label, options, key=name, on_change=_take, args=(key, name, default), **settings)
    return chosen if value is None else str(value)


def _take(key: str, name: str, default: str | None) -> None:
    value = st.session_state[name]
    put(**{key: None if value is None or value == default else str(value)})


def _selection() -> dict[str, str]:
    chosen: dict[str, str] = st.session_state.setdefault("selection", {})
    return chosen


def remember(pages: dict[str, Any]) -> None:
    """Keep the pages of this session by their address, so that one page can lead to another."""
    st.session_state["pages"] = pages


def page(name: str) -> Any:
    """Return the page of that address."""
    return st.session_state["pages"][name]
