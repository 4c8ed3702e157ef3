"""What `streamlit run` serves: the dashboard, made ready before the first visitor comes."""

from __future__ import annotations

import gc
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path

import streamlit as st

from dashboards import data, navigation

LIBRARIES = ("audit.pipeline", "pandas", "polars", "pyarrow", "PIL.PngImagePlugin")
"""Imported inside functions, by the pages or by Streamlit when it draws a table or the icon."""


@asynccontextmanager
async def ready(_: st.App) -> AsyncIterator[None]:
    """Do once, before the server answers, what the first visitor would wait for."""
    for module in (*navigation.modules(), *LIBRARIES):
        import_module(module)
    with suppress(Exception):  # what is wrong with a store is said on the pages
        data.comparisons()
        data.runs()
    inspect.stack()  # Streamlit calls it at the first element drawn; it looks up the file of every module
    gc.collect()
    gc.freeze()  # Streamlit collects garbage after each run of a page; what is kept for good is spared
    yield


app = st.App(Path(__file__).with_name("main.py"), lifespan=ready)
