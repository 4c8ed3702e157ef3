"""What a person sees on each page of the dashboard."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from audit.store import Store
from tests.browser.conftest import screenshot, settle
from tests.dashboard_store import Audited


def visit(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("h1", timeout=60_000)
    settle(page)


def assert_whole(page: Page) -> None:
    """No traceback, no error box, nothing wider than the window."""
    text = page.locator("[data-testid=stApp]").inner_text()
    assert "Traceback" not in text
    assert "could not be drawn" not in text
    expect(page.locator("[data-testid=stException]")).to_have_count(0)
    overflow = page.evaluate(
        "document.querySelector('[data-testid=stMain]').scrollWidth - document.querySelector('[data-testid=stMain]').clientWidth"
    )
    assert overflow <= 0


def test_overview_shows_each_models_verdict(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, dashboard)
    cards = page.locator(".ra .badge")
    assert cards.count() == 2
    stored = {str(one["outcome"]) for one in Store(audited.store).comparisons()}
    assert {cards.nth(i).inner_text() for i in range(2)} == stored
    expect(page.get_by_text("the attention map moved").first).to_be_visible()
    assert_whole(page)
    page.get_by_role("link", name="Open the comparison").first.click()
    page.wait_for_url("**/compare?comparison=cmp-*")
    settle(page)
    expect(page.locator(".ra .hero .headline")).to_be_visible()


def test_comparison_draws_verdict_forest_and_layers(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    expect(page.locator(".hero .badge")).to_have_text("FAIL")
    expect(page.locator(".hero .headline")).to_contain_text("conditions failed")
    regions = {"name", "special", "rest"}
    forest, heat = (page.locator("[data-testid=stVegaLiteChart]").nth(i) for i in (0, 1))
    assert forest.locator(".mark-symbol.role-mark path").count() >= len(regions)
    assert heat.locator(".mark-rect.role-mark path").count() == len(regions) * 3  # layers
    for region in regions:
        assert forest.get_by_text(region, exact=True).count() == 1
    assert_whole(page)


@pytest.mark.parametrize("path", ["", "compare"])
def test_pages_look_right_in_both_themes_and_widths(
    any_page: Page, dashboard: str, audited: Audited, path: str, request: pytest.FixtureRequest
) -> None:
    visit(any_page, f"{dashboard}/{path}")
    assert_whole(any_page)
    width, theme = request.node.callspec.params["any_page"]
    dark = any_page.evaluate(
        "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    )
    assert (sum(int(part) for part in dark.strip("rgb()").split(",")) < 200) == (theme == "dark")
    screenshot(any_page, f"{path or 'overview'}-{width}-{theme}")
