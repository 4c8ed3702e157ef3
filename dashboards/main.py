"""What runs for every visitor: sets the look, and leads to the pages."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import navigation, state, theme


def main() -> None:
    """Draw the page that the address names."""
    icon = Path(__file__).with_name("icon.png")
    st.set_page_config(page_title="rollout-audit", page_icon=icon, layout="wide", initial_sidebar_state=228)
    theme.apply_style()
    chosen = navigation.choose_page()
    state.read_address()
    navigation.guarded(chosen.run, chosen.title)
    navigation.share()
    theme.follow()


main()
