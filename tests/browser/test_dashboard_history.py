"""What a person sees over time: trends with their marks, approvals, the log, and the line on the overview."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Locator, Page, expect

from audit.config import load_config
from audit.pipeline import approve, gate_runs
from tests.browser.conftest import screenshot, serving, settle
from tests.browser.test_dashboard import accessibility_faults, assert_whole, saved, visit
from tests.synthetic import World

LEVELS = (0.25, 0.251, 0.249, 0.25, 0.31, 0.309, 0.31)


@dataclass(frozen=True)
class History:
    """A dashboard on the audits of seven releases, of which the fifth changed and was approved."""

    address: str
    names: list[str]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    world = World(tmp_path_factory.mktemp("history"), n=24)
    seeds = [world.run(f"seed-{i}", 0.25 + 0.002 * i) for i in range(-1, 2)]
    base = world.run("base", 0.25, noise=0.001)
    names = []
    for i, share in enumerate(LEVELS):
        run = world.run(f"release-{i}", share, noise=0.001)
        names.append(str(gate_runs(load_config(world.config(base, run, seeds))).comparison_id))
    approve(
        world.store, names[4], rule="limit shift opening", reason="wanted", by="bob@example.org",
        expires="2999-01-01",
    )  # fmt: skip
    with serving(world.store.root, tmp_path_factory.mktemp("log")) as address:
        yield History(address, names)


def marks(chart: Locator, kind: str) -> int:
    return chart.locator(f".mark-{kind}.role-mark path, .mark-{kind}.role-mark line").count()


def test_trend_draws_every_audit_its_limits_its_approval_and_its_change(page: Page, history: History) -> None:
    visit(page, f"{history.address}/trends?model=base+→+release-6+·+rollout&region=opening")
    shifts, shares, evidence = page.locator("[data-testid=stVegaLiteChart]").all()
    assert marks(shifts, "symbol") == len(LEVELS)
    expect(shifts.get_by_text("⚑")).to_have_count(1)
    assert marks(shifts, "rect") == 1  # control limits
    assert marks(shifts, "rule") >= 2 + 1 + len(LEVELS)  # the policy's limits, the approval, intervals
    assert marks(shares, "symbol") == len(LEVELS)
    assert marks(shares, "rule") == 1  # it changed once
    assert marks(evidence, "symbol") == len(LEVELS)
    expect(page.get_by_text(".250 → .310 on average")).to_be_visible()
    svg = saved(page, "svg", f"trend-{history.names[-1]}-share").decode()
    assert svg.startswith("<svg")
    page.get_by_text("As a table").click()
    page.wait_for_selector("[data-testid=stDataFrame]")
    rows = saved(page, "csv", f"trend-{history.names[-1]}").decode().splitlines()
    assert len(rows) == 1 + len(LEVELS)
    assert accessibility_faults(page) == []
    screenshot(page, "dashboard-trends-drawn")


def test_log_says_who_accepted_what_and_until_when(page: Page, history: History) -> None:
    visit(page, f"{history.address}/log")
    row = page.locator(".ra table tbody tr").first
    for part in ("bob@example.org", "limit shift opening on opening", "2999-01-01", "wanted"):
        expect(row).to_contain_text(part)
    assert b"bob@example.org" in saved(page, "csv", "approvals")
    assert_whole(page)
    assert accessibility_faults(page) == []
    screenshot(page, "dashboard-log-approved")


def test_overview_finds_a_model_and_says_what_is_new_since_the_approval(page: Page, history: History) -> None:
    visit(page, history.address)
    expect(page.get_by_text("Since the last approval")).to_be_visible()
    expect(page.get_by_text("accepted by bob@example.org")).to_be_visible()
    page.get_by_label("Find a model").fill("release-3")
    page.get_by_label("Find a model").press("Enter")
    page.wait_for_url("**find=release-3**")
    settle(page)
    expect(page.locator(".ra .pair", has_text="→")).to_have_count(1)
