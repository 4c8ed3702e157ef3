"""The dashboard's entry: opens the store, sets the look, and leads to the pages."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from audit.errors import AuditError
from audit.report.wording import clip
from dashboards import state, theme
from dashboards.views import compare, overview, probe

LOG = logging.getLogger("rollout-audit.dashboard")


def main() -> None:
    """Draw the page that the address names."""
    icon = Path(__file__).with_name("icon.png")
    st.set_page_config(page_title="rollout-audit", page_icon=icon, layout="wide", initial_sidebar_state=215)
    theme.apply_style()
    state.read_address()
    pages = [
        st.Page(
            overview.page, title="Overview", icon=":material/list_alt:", url_path="overview", default=True
        ),
        st.Page(compare.page, title="Comparison", icon=":material/compare_arrows:", url_path="compare"),
        st.Page(probe.page, title="Probe", icon=":material/search:", url_path="probe"),
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
