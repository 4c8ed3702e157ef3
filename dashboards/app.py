"""The dashboard's entry: opens the store, sets the look, and leads to the pages."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from audit.errors import AuditError
from dashboards import blocks, state, theme
from dashboards.navigation import choose_page, prepare, share

LOG = logging.getLogger("rollout-audit.dashboard")


def main() -> None:
    """Draw the page that the address names."""
    icon = Path(__file__).with_name("icon.png")
    st.set_page_config(page_title="rollout-audit", page_icon=icon, layout="wide", initial_sidebar_state=228)
    theme.apply_style()
    state.read_address()
    chosen = choose_page()
    try:
        chosen.run()
    except AuditError as error:
        blocks.warn(error)
    except Exception:
        LOG.exception("the page %s could not be drawn", chosen.title)
        st.error(
            "This page could not be drawn. That is a fault of the dashboard, not of your audit; the "
            "details stand in the terminal that runs it.",
            icon=":material/error:",
        )
    share()
    prepare()


main()
