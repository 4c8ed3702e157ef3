"""The dashboard without a browser: one page on a store, and everything that it says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboards.content import CONFIGS_VARIABLE
from dashboards.data import STORE_VARIABLE
from dashboards.loaded import LIMIT_VARIABLE

APP = Path(__file__).parents[1] / "dashboards" / "main.py"


def fresh() -> Iterator[None]:
    """Forget what earlier pages kept, and afterwards which store they were on."""
    st.cache_resource.clear()
    yield
    for name in (STORE_VARIABLE, CONFIGS_VARIABLE, LIMIT_VARIABLE):
        os.environ.pop(name, None)


def _draw(page: str) -> None:
    from importlib import import_module

    from dashboards import navigation, state

    state.read_address()
    navigation.choose_page()
    navigation.guarded(import_module(f"dashboards.views.{page}").page, page)


def open_page(page: str, store: Path, *, config: Path | None = None, **address: str) -> AppTest:
    os.environ[STORE_VARIABLE] = str(store)
    os.environ[CONFIGS_VARIABLE] = str(config) if config else ""
    app = AppTest.from_function(_draw, kwargs={"page": page}, default_timeout=60)
    for key, value in address.items():
        app.query_params[key] = value
    return app.run()


def said(app: AppTest) -> str:
    """Return everything that is written on the page, HTML included."""
    parts = [*app.warning, *app.info, *app.error, *app.success, *app.caption, *app.markdown]
    bodies = [one.value for one in parts] + [one.proto.body for one in app.get("html")]
    assert not app.exception, app.exception
    assert not any("could not be drawn" in one for one in bodies)
    return "\n".join(bodies)
