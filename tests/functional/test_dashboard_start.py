"""What the dashboard does before its first visitor comes, and what it leaves for later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.web.server.app_discovery import discover_asgi_app

from dashboards import navigation
from tests.dashboard_app import APP, fresh, open_page, said
from tests.synthetic import World, release

ENTRY = APP.with_name("app.py")
START = """
import asyncio, gc, json, sys
from dashboards.app import app, ready

async def main():
    async with ready(app):
        print(json.dumps({"modules": sorted(sys.modules), "frozen": gc.get_freeze_count()}))

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield from fresh()


def test_streamlit_finds_the_dashboard_that_prepares_itself() -> None:
    found = discover_asgi_app(ENTRY)
    assert (found.is_asgi_app, found.import_string) == (True, "app:app")


def test_all_pages_are_imported_before_the_first_visitor_even_on_a_broken_store(tmp_path: Path) -> None:
    manifest = tmp_path / "runs" / "run-000000000000" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "ROLLOUT_AUDIT_STORE": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    wanted = {*navigation.modules(), "altair", "pandas", "polars", "pyarrow", "audit.pipeline"}
    assert wanted <= set(found["modules"])
    assert "torch" not in found["modules"]
    assert found["frozen"] > 100_000


@pytest.mark.parametrize(
    ("page", "key", "columns"),
    [("overview", "audits", {"model", "sentence"}), ("compare", "cells", {"measure", "replicates"})],
)
def test_a_folded_table_is_made_when_it_is_opened(
    tmp_path: Path, page: str, key: str, columns: set[str]
) -> None:
    from audit.config import load_config
    from audit.pipeline import gate_runs

    world = World(tmp_path)
    gate_runs(load_config(world.config(*release(world))))
    app = open_page(page, world.store.root)
    tables = len(app.dataframe)
    app.session_state[f"fold {key}"] = True
    app.run()
    said(app)
    assert len(app.dataframe) == tables + 1
    assert columns <= set(app.dataframe[tables].value.columns)
