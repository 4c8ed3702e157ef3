"""The pages of the dashboard, in the order of the menu."""

from __future__ import annotations

import streamlit as st

from dashboards import state
from dashboards.views import about, compare, live, log, overview, probe, runs, trends

PAGES = (
    (overview.page, "Overview", "list_alt", "overview"),
    (compare.page, "Comparison", "compare_arrows", "compare"),
    (probe.page, "Probe", "search", "probe"),
    (live.page, "Live", "bolt", "live"),
    (trends.page, "Trends", "timeline", "trends"),
    (runs.page, "Runs & provenance", "database", "runs"),
    (log.page, "Approvals & log", "fact_check", "log"),
    (about.page, "Methods & limits", "menu_book", "methods"),
)


def choose_page() -> st.Page:
    """Draw the menu and return the page that the address names."""
    pages = [
        st.Page(page, title=title, icon=f":material/{icon}:", url_path=path, default=path == "overview")
        for page, title, icon, path in PAGES
    ]
    state.remember(dict(zip([path for *_, path in PAGES], pages, strict=True)))
    return st.navigation(pages)
