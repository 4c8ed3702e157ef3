"""What a person sees of models that are neither plain text nor plain images, and what they can try live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from audit.store import Store
from dashboards.theme import LIGHT
from tests.browser.conftest import screenshot, serving, settle
from tests.browser.test_dashboard import accessibility_faults, assert_whole, saved, visit
from tests.dashboard_store import Audited, Kind, build_kinds

pytestmark = pytest.mark.timeout(400)  # computes every generated token twice


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return build_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def address(kinds: dict[str, Kind], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = next(iter(kinds.values())).config.parent / "store"
    configs = os.pathsep.join(str(kind.config) for kind in kinds.values())
    with serving(store, tmp_path_factory.mktemp("log"), configs=configs) as found:
        yield found


def checked(page: Page, name: str) -> None:
    """Look at the page as it stands: whole, accessible, and kept as an image."""
    settle(page)
    assert_whole(page)
    assert accessibility_faults(page) == []
    screenshot(page, name)


def test_both_towers_show_their_words_and_their_picture(
    page: Page, address: str, kinds: dict[str, Kind]
) -> None:
    visit(page, f"{address}/probe?comparison={kinds['towers'].comparison}&probe=c-03")
    expect(page.get_by_role("heading", name="Stream: text")).to_be_visible()
    expect(page.get_by_role("heading", name="Stream: image")).to_be_visible()
    assert page.locator(".words").count() == 3
    assert page.locator(".picture").count() == 3
    assert page.locator(".picture .grid").first.locator("i").count() == 16
    assert page.locator(".original img").evaluate("image => image.naturalWidth") > 0
    checked(page, "dashboard-probe-towers")


def test_a_sound_lies_over_its_spectrogram_and_can_be_heard(
    page: Page, address: str, kinds: dict[str, Kind]
) -> None:
    visit(page, f"{address}/probe?comparison={kinds['sound'].comparison}&probe=a-03")
    assert page.locator(".panels.wide .picture").count() == 3
    assert page.locator(".picture img.below").first.evaluate("image => image.naturalWidth") > 100
    expect(page.locator("audio")).to_have_count(1)
    page.wait_for_function("document.querySelector('audio').duration > 0")
    assert page.locator("audio").evaluate("sound => sound.duration") == pytest.approx(0.2, abs=0.01)
    lines = page.locator("[data-testid=stVegaLiteChart] .mark-line path")
    assert {line.get_attribute("stroke") for line in lines.all()} == {LIGHT.down, LIGHT.up}
    checked(page, "dashboard-probe-sound")


def test_every_generated_token_is_drawn_part_by_part(
    page: Page, address: str, kinds: dict[str, Kind]
) -> None:
    kind = kinds["seq2seq"]
    visit(page, f"{address}/probe?comparison={kind.comparison}&probe=s-03")
    page.get_by_role("button", name="Compute single heads").click()
    page.get_by_text("Compute the row of every generated token").click(timeout=60_000)
    expect(page.get_by_text("Each row is one generated token")).to_be_visible(timeout=120_000)
    settle(page)
    matrix = page.locator("[data-testid=stVegaLiteChart]").last
    run = Store(kind.config.parent / "store").comparison(kind.comparison).before
    assert run is not None
    source = Store(kind.config.parent / "store").map_of(run.run_id, "s-03", "source")
    drawn = matrix.locator(".mark-rect.role-mark path").count()
    assert drawn >= 16 * len(source.weights)
    checked(page, "dashboard-probe-matrix")
    page.get_by_role("button", name="Later tokens").click()
    page.wait_for_url("**tokens=16**", timeout=120_000)
    expect(page.get_by_text("generated token (16 to")).to_be_visible(timeout=120_000)


def give(page: Page, path: Path) -> None:
    """Choose a file for the page's upload field."""
    page.locator("[data-testid=stFileUploader] input[type=file]").set_input_files(path)


def test_a_sound_of_ones_own_is_drawn_live(page: Page, address: str, kinds: dict[str, Kind]) -> None:
    visit(page, f"{address}/live?comparison={kinds['sound'].comparison}")
    page.get_by_role("button", name="Load both checkpoints").click()
    page.wait_for_selector("[data-testid=stFileUploader]", timeout=60_000)
    give(page, kinds["sound"].config.parent / "clips" / "05.wav")
    expect(page.locator(".panels.wide .picture")).to_have_count(3, timeout=60_000)
    expect(page.get_by_text("Both maps took")).to_be_visible()
    checked(page, "dashboard-live-sound")


def test_a_picture_and_a_text_of_ones_own_are_drawn_live(
    page: Page, address: str, kinds: dict[str, Kind]
) -> None:
    visit(page, f"{address}/live?comparison={kinds['towers'].comparison}")
    page.get_by_role("button", name="Load both checkpoints").click()
    page.wait_for_selector("[data-testid=stFileUploader]", timeout=60_000)
    give(page, kinds["towers"].config.parent / "pictures" / "05.png")
    expect(page.locator(".picture")).to_have_count(3, timeout=60_000)
    before = page.locator(".words").nth(1).inner_html()
    box = page.get_by_label("Text")
    box.fill("the dull film")
    box.press("Control+Enter")
    expect(page.locator(".words").first.locator("i", has_text="dull")).to_be_visible(timeout=60_000)
    settle(page)
    assert page.locator(".words").nth(1).inner_html() != before
    checked(page, "dashboard-live-towers")


def test_a_picture_of_ones_own_is_drawn_live(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/live?comparison={audited.vision_comparison}")
    page.get_by_role("button", name="Load both checkpoints").click()
    page.wait_for_selector("[data-testid=stFileUploader]", timeout=60_000)
    give(page, audited.store.parent / "images" / "003.png")
    expect(page.locator(".picture")).to_have_count(3, timeout=60_000)
    assert page.locator(".picture .grid").nth(1).locator("i").count() == 16
    assert ".png" in page.locator("[data-testid=stFileUploader]").inner_text()
    assert saved(page, "svg", "map-live-input").startswith(b"<svg")
    checked(page, "dashboard-live-image")
