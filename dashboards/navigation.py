"""The pages of the dashboard, in the order of the menu; each is imported when it is first drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from urllib.parse import urlencode

import streamlit as st

from audit.errors import AuditError
from dashboards import blocks, state

LOG = logging.getLogger("rollout-audit.dashboard")
PAGES = (
    ("Overview", "list_alt", "overview", "overview"),
    ("Comparison", "compare_arrows", "compare", "compare"),
    ("Probe", "search", "probe", "probe"),
    ("Live", "bolt", "live", "live"),
    ("Trends", "timeline", "trends", "trends"),
    ("Runs & provenance", "database", "runs", "runs"),
    ("Approvals & log", "fact_check", "log", "log"),
    ("Methods & limits", "menu_book", "methods", "about"),
)
"""Title, icon, address and module of each page."""


def choose_page() -> st.Page:
    """Draw the menu and return the page that the address names."""
    pages = [
        st.Page(
            _drawing(module),
            title=title,
            icon=f":material/{icon}:",
            url_path=path,
            default=path == "overview",
        )
        for title, icon, path, module in PAGES
    ]
    state.remember(dict(zip([path for *_, path, _ in PAGES], pages, strict=True)))
    return st.navigation(pages)


def _drawing(module: str) -> Callable[[], None]:
    def page() -> None:
        import_module(f"dashboards.views.{module}").page()

    page.__name__ = module
    return page


def guarded(draw: Callable[[], None], title: str) -> None:
    """Draw a page; what cannot be read or drawn is said in its place, never as a traceback."""
    try:
        draw()
    except AuditError as error:
        blocks.warn(error)
    except Exception:
        LOG.exception("the page %s could not be drawn", title)
        st.error(
            "This page could not be drawn. That is a fault of the dashboard, not of your audit; the "
            "details stand in the terminal that runs it.",
            icon=":material/error:",
        )


def modules() -> list[str]:
    """Return the names of the pages' modules."""
    return [f"dashboards.views.{module}" for *_, module in PAGES]


def share() -> None:
    """Offer the address that leads to exactly this view: page, selection and filters."""
    address = st.context.url or ""
    query = urlencode(st.query_params.to_dict())
    with st.popover("Link to this view", icon=":material/link:", type="tertiary"):
        blocks.note("Who opens it on this dashboard sees the same page with the same selection and filters.")
        st.code(f"{address}?{query}" if query else address, language=None, wrap_lines=True)
