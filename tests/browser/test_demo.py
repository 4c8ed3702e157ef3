"""`audit demo` as a new user runs it, its audits by hand, and what a person then sees on the dashboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import screenshot, serving
from tests.browser.test_dashboard import assert_whole, visit

pytestmark = pytest.mark.timeout(1200)  # trains sixteen checkpoints and runs six audits


@dataclass(frozen=True)
class Demo:
    """Where the demo ran, and what it printed."""

    root: Path
    text: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command below the demo's folder."""
        return subprocess.run(
            [sys.executable, "-m", "audit", *arguments], cwd=self.root.parent, capture_output=True, text=True,
            check=False, timeout=900,
        )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    root = tmp_path_factory.mktemp("new-user") / "data"
    begun = Demo(root, "")
    done = begun.run("demo", "--root", "data")
    assert done.returncode == 0, done.stderr[-3000:]
    return Demo(root, done.stdout)


@pytest.fixture(scope="module")
def dashboard(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    configs = os.pathsep.join(str(demo.root / "demo" / f"{name}.toml") for name in ("vision", "text"))
    with serving(demo.root / "store", tmp_path_factory.mktemp("log"), configs=configs) as address:
        yield address


def test_demo_tells_both_shortcuts_from_both_benign_candidates(demo: Demo) -> None:
    verdicts = dict(re.findall(r"^(\S+)\s+(PASS|FAIL|INCONCLUSIVE|ERROR)\s", demo.text, re.MULTILINE))
    assert verdicts == {
        "vision": "FAIL",
        "vision-benign": "PASS",
        "vision-domain": "FAIL",
        "text": "FAIL",
        "text-benign": "PASS",
        "text-domain": "FAIL",
    }
    better = re.findall(r"shortcut candidate: validation accuracy in production (\d+)% → (\d+)%", demo.text)
    assert len(better) == 2
    assert all(int(after) > int(before) for before, after in better)
    assert "audit dashboard --store" in demo.text


@pytest.mark.parametrize(
    ("name", "code", "region"),
    [("vision", 3, "corner"), ("vision-benign", 0, None), ("text", 3, "name"), ("text-benign", 0, None)],
)
def test_audits_of_the_demo_by_hand(demo: Demo, name: str, code: int, region: str | None) -> None:
    runs = sorted(path.name for path in (demo.root / "store" / "runs").iterdir())
    done = demo.run("run", f"data/demo/{name}.toml", "--json")
    assert done.returncode == code, done.stderr
    assert sorted(path.name for path in (demo.root / "store" / "runs").iterdir()) == runs
    rules = json.loads(done.stdout)["rules"]
    failed = {rule["region"] for rule in rules if rule["outcome"] == "FAIL"}
    assert (region in failed) if region else not failed
    if region:
        confirmed = [rule["confirmation"]["confirmed"] for rule in rules if rule["region"] == region]
        assert all(confirmed)


def test_demo_reports_are_small_and_show_the_probes(demo: Demo) -> None:
    reports = sorted((demo.root / "demo" / "reports").glob("*.html"))
    assert len(reports) == 6
    assert all(path.stat().st_size < 1_000_000 for path in reports)
    assert "data:image/png" in (demo.root / "demo" / "reports" / "vision.html").read_text()


def test_second_demo_reuses_everything_and_says_so(demo: Demo) -> None:
    done = demo.run("demo", "--root", "data", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {one["name"]: one["outcome"] for one in json.loads(done.stdout)["audits"]}["text"] == "FAIL"
    assert "train" not in done.stderr
    assert "capture" not in done.stderr


def test_dashboard_on_the_demos_store_shows_where_the_map_moved(
    demo: Demo, dashboard: str, page: Page
) -> None:
    visit(page, dashboard)
    assert_whole(page)
    expect(page.locator(".ra .badge", has_text="FAIL").first).to_be_visible()
    expect(page.get_by_text("the attention map moved").first).to_be_visible()
    screenshot(page, "demo-overview")
    listed = json.loads(demo.run("list", "--store", "data/store", "--json").stdout)["comparisons"]
    vision = next(one for one in listed if one["outcome"] == "FAIL" and "'corner'" in one["sentence"])
    visit(page, f"{dashboard}/compare?comparison={vision['comparison_id']}")
    assert_whole(page)
    expect(page.get_by_text("moved towards 'corner'").first).to_be_visible()
    assert page.locator("[data-testid=stVegaLiteChart] svg .mark-rect.role-mark path").count() > 0
    screenshot(page, "demo-compare")
    visit(page, f"{dashboard}/probe?comparison={vision['comparison_id']}")
    assert_whole(page)
    screenshot(page, "demo-probe")
