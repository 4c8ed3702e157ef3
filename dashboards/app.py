"""The dashboard's entry: opens the store, sets the look, and leads to the pages."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from audit.errors import AuditError
from audit.report.wording import clip
from dashboards import state, theme
from dashboards.views import about, compare, live, log, overview, probe, runs, trends

LOG = logging.getLogger("rollout-audit.dashboard")


def main() -> None:
    """Draw the page that the address names."""
    icon = Path(__file__).with_name("icon.png")
    st.set_page_config(page_title="rollout-audit", page_icon=icon, layout="wide", initial_sidebar_state=228)
    theme.apply_style()
    state.read_address()
    pages = [
        st.Page(page, title=title, icon=f":material/{icon}:", url_path=path, default=path == "overview")
        for page, title, icon, path in (
            (overview.page, "Overview", "list_alt", "overview"),
            (compare.page, "Comparison", "compare_arrows", "compare"),
            (probe.page, "Probe", "search", "probe"),
            (live.page, "Live", "bolt", "live"),
            (trends.page, "Trends", "timeline", "trends"),
            (runs.page, "Runs & provenance", "database", "runs"),
            (log.page, "Approvals & log", "fact_check", "log"),
            (about.page, "Methods & limits", "menu_book", "methods"),
        )
    ]
    chosen = st.navigation(pages)
    state.remember(pages)
    try:
        chosen.run()
    except AuditError as error:
        st.warning(clip(str(error), 600), icon=":material/report:")
    except Exception:
        LOG.exception("the page %s could not be drawn", chosen.title)
        st.error(
            "This page could not be drawn. That is a fault of the dashboard, not of your audit; the "
            "details stand in the terminal that runs it.",
            icon=":material/error:",
        )


main()
