"""What a person sees and does on each page of the dashboard, in a real browser."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Page, expect

from audit.store import Store
from dashboards.theme import DARK, LIGHT
from tests.browser.conftest import screenshot, serving, settle
from tests.dashboard_store import Audited

PAGES = ("", "compare", "probe", "live", "trends", "runs", "log", "methods")
TEXT_REGIONS = ("name", "special", "rest")
LAYERS = 3


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
    main = page.locator("[data-testid=stMain]")
    assert main.evaluate("element => element.scrollWidth - element.clientWidth") <= 0


def background(page: Page) -> int:
    """Return the sum of red, green and blue of the page's background."""
    colour = page.locator("[data-testid=stApp]").evaluate("e => getComputedStyle(e).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


# --- every page ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_page_is_whole_and_accessible_in_both_themes_and_widths(
    any_page: Page, dashboard: str, path: str, request: pytest.FixtureRequest
) -> None:
    outside = []
    any_page.on("request", lambda sent: outside.append(sent.url) if dashboard not in sent.url else None)
    visit(any_page, f"{dashboard}/{path}")
    assert_whole(any_page)
    width, theme = request.node.callspec.params["any_page"]
    assert (background(any_page) < 200) == (theme == "dark")
    screenshot(any_page, f"dashboard-{path or 'overview'}-{width}-{theme}")
    assert [url for url in outside if url.startswith("http")] == []
    assert accessibility_faults(any_page) == []
    other = {1280: 800, 800: 1280}[width]
    any_page.set_viewport_size({"width": other, "height": 900})
    settle(any_page)
    assert_whole(any_page)
    screenshot(any_page, f"dashboard-{path or 'overview'}-{other}-{theme}")
    any_page.get_by_role("button", name="Link to this view").click()
    link = any_page.get_by_test_id("stPopoverBody").get_by_test_id("stCode").inner_text().strip()
    assert link == any_page.url.rstrip("/") or link == any_page.url


def accessibility_faults(page: Page) -> list[tuple[str, list[str]]]:
    """Return what axe finds serious in what is ours to mend."""
    not_ours = ["[data-testid=stDataFrame]", "[data-testid=stHeader]", ".stSelectbox:has(input:disabled)"]
    found = Axe().run(page, context={"exclude": [[selector] for selector in not_ours]}).response["violations"]
    return [
        (one["id"], [node["html"][:160] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical") or one["id"] == "heading-order"
    ]


# --- overview -----------------------------------------------------------------------------------


def test_overview_shows_each_models_verdict_and_leads_to_it(
    page: Page, dashboard: str, audited: Audited
) -> None:
    visit(page, dashboard)
    badges = page.locator(".ra .badge")
    stored = sorted(str(one["outcome"]) for one in Store(audited.store).comparisons())
    assert sorted(badges.all_inner_texts()) == stored
    expect(page.get_by_text("the attention map moved").first).to_be_visible()
    expect(page.get_by_text("What would settle it")).to_have_count(stored.count("INCONCLUSIVE"))
    page.get_by_role("link", name="Open").first.click()
    page.wait_for_url("**/compare?comparison=cmp-*")
    settle(page)
    expect(page.locator(".ra .hero .headline")).to_be_visible()


# --- comparison ---------------------------------------------------------------------------------


def test_comparison_draws_verdict_forest_and_layers(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    expect(page.locator(".hero .badge")).to_have_text("FAIL")
    expect(page.locator(".hero .headline")).to_contain_text("conditions failed")
    forest, heat, histogram = (page.locator("[data-testid=stVegaLiteChart]").nth(i) for i in range(3))
    assert forest.locator(".mark-symbol.role-mark path").count() >= 4 * len(TEXT_REGIONS)  # with replicates
    assert heat.locator(".mark-rect.role-mark path").count() == len(TEXT_REGIONS) * LAYERS
    assert histogram.locator(".mark-rect.role-mark path").count() > 3
    for region in TEXT_REGIONS:
        assert forest.get_by_text(region, exact=True).count() == 1
    cells = Store(audited.store).comparison(audited.text_comparison).find("special")
    assert next(cells).value < 0  # type: ignore[operator]
    fills = heat.locator(".mark-rect.role-mark path").evaluate_all(
        "all => all.map(e => e.getAttribute('fill'))"
    )
    assert len(set(fills)) > 3
    expect(page.get_by_test_id("stCode").first).to_contain_text(
        f"audit approve {audited.text_comparison} --rule"
    )
    expect(page.get_by_role("heading", name="Do other methods agree")).to_be_visible()


def test_filter_makes_every_plot_follow(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    charts = page.locator("[data-testid=stVegaLiteChart]")
    expect(charts).to_have_count(4)  # regions, layers, distribution, segments
    before = [chart.locator("svg").inner_html() for chart in charts.all()]
    value = charts.first.locator(".mark-text.role-mark text").first
    shown = str(value.text_content())
    page.get_by_role("radio", name=re.compile("became wrong")).click()
    page.wait_for_url("**changed=newly+wrong**")
    expect(page.get_by_text(re.compile(r"\d+ of 48 probes\."))).to_be_visible()
    settle(page)
    expect(value).not_to_have_text(shown)
    after = [chart.locator("svg").inner_html() for chart in charts.all()]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] * 4
    filtered = page.get_by_text(re.compile(r"^\d+ of 48 probes\."))
    page.go_back()
    expect(filtered).to_have_count(0)
    expect(page.get_by_role("radio", checked=True).first).to_have_text(re.compile("all probes"))
    expect(value).to_have_text(shown)
    page.go_forward()
    expect(filtered).to_be_visible()
    visit(page, page.url)
    expect(filtered).to_be_visible()


def test_downloads_hold_the_whole_table(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    for name, read in (("csv", pl.read_csv), ("parquet", pl.read_parquet)):
        with page.expect_download() as waiting:
            page.locator(f".st-key-{name}-{audited.text_comparison}-probes button").click()
        frame = read(Path(waiting.value.path()))
        assert len(frame) == 48
        assert set(frame["probe_id"]) == {f"t-{i:03d}" for i in range(48)}


@pytest.mark.parametrize("path", ["", "compare", "probe", "trends", "runs", "log", "methods"])
def test_every_table_and_every_figure_can_be_saved(
    page: Page, dashboard: str, audited: Audited, path: str
) -> None:
    visit(page, f"{dashboard}/{path}?comparison={audited.text_comparison}")
    for folded in page.locator("[data-testid=stExpander] summary").all():
        if "Filter" not in folded.inner_text() and folded.locator("..").get_attribute("open") is None:
            folded.click()
            settle(page)
    tables = page.locator("[data-testid=stDataFrame], .ra table").count()
    figures = page.locator("[data-testid=stVegaLiteChart], .ra .strip, .ra .panels").count()
    count = {
        label: page.get_by_role("button", name=label, exact=True).count()
        for label in ("CSV", "Parquet", "SVG", "PNG")
    }
    assert (
        count["CSV"] == count["Parquet"] >= tables
    )  # rules and segments are drawn, and saved as tables, too
    assert count["SVG"] == count["PNG"] == figures
    assert path == "" or tables or figures or path == "trends"


def saved(page: Page, kind: str, name: str) -> bytes:
    """Return the file that a download button gives."""
    with page.expect_download() as waiting:
        page.locator(f".st-key-{kind}-{name} button").click()
    return Path(waiting.value.path()).read_bytes()


def test_figures_can_be_saved(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    for figure in ("regions", "layers", "distribution", "segments"):
        svg = saved(page, "svg", f"{audited.text_comparison}-{figure}").decode()
        assert svg.startswith("<svg")
        assert svg.count("<path") > 3
    png = saved(page, "png", f"{audited.text_comparison}-regions")
    assert Image.open(io.BytesIO(png)).width > 1500
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&probe=t-001")
    assert ">Nils</text>" in saved(page, "svg", "map-t-001-input").decode()


def test_link_to_what_is_gone_is_explained(page: Page, dashboard: str) -> None:
    visit(page, f"{dashboard}/compare?comparison=cmp-0123456789ab&segment=no=where")
    expect(page.get_by_text("which is not in this store")).to_be_visible()
    expect(page.locator(".hero .headline")).to_be_visible()
    assert_whole(page)


@pytest.mark.parametrize("path", ["compare", "probe"])
def test_what_a_map_means_stands_beside_it(page: Page, dashboard: str, path: str) -> None:
    visit(page, f"{dashboard}/{path}")
    page.get_by_role("button", name="What a map means, and what not").click()
    expect(page.get_by_test_id("stPopoverBody").get_by_text("A map is not a cause.")).to_be_visible()


# --- probe --------------------------------------------------------------------------------------


def test_single_heads_are_computed_when_asked_for(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&probe=t-001&head=2")
    stored = page.locator(".words").nth(1).inner_html()
    page.get_by_role("button", name="Compute single heads").click()
    expect(page.get_by_text("Computed now, not stored: per_head_rollout head=2")).to_be_visible(
        timeout=60_000
    )
    settle(page)
    assert page.locator(".words").nth(1).inner_html() != stored
    assert accessibility_faults(page) == []
    screenshot(page, "dashboard-probe-head")


def test_probe_shows_words_before_after_and_difference(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&probe=t-001")
    lines = page.locator(".words")
    assert lines.count() == 3
    assert lines.nth(0).inner_text().strip(" ·\n") == "The film that Nils liked was bad."
    word = lines.nth(2).locator("i", has_text="Nils")
    comparison = Store(audited.store).comparison(audited.text_comparison)
    assert comparison.before is not None
    assert comparison.after is not None
    shares = [
        Store(audited.store).map_of(run.run_id, "t-001").weights[4]
        for run in (comparison.before, comparison.after)
    ]
    title = str(word.get_attribute("title")).replace("−", "-")
    found = [float(number) for number in re.findall(r"\.\d+", title)[:2]]
    assert found == pytest.approx(shares, abs=6e-5)
    rose = shares[1] > shares[0]
    assert word.get_attribute("class") == ("u" if rose else "d")


def test_keys_lead_through_the_probes(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&order=file")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**probe=t-001**")
    settle(page)
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**probe=t-002**")
    settle(page)
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**probe=t-001**")


def test_hostile_text_stays_text(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&probe=t-000&unit=tokens")
    assert page.title() != "owned"
    shown = page.locator(".words").first.inner_text()
    assert "script" in shown
    assert "⟨U+202E⟩" in shown
    assert page.locator(".words b, .words script").count() == 0
    screenshot(page, "dashboard-probe-hostile")


@pytest.mark.parametrize("overlay", ["patches", "smooth"])
def test_patches_lie_over_the_image(page: Page, dashboard: str, audited: Audited, overlay: str) -> None:
    address = f"{dashboard}/probe?comparison={audited.vision_comparison}&probe=v-000&overlay={overlay}"
    visit(page, address)
    pictures = page.locator(".picture")
    assert pictures.count() == 3
    after = pictures.nth(1)
    if overlay == "patches":
        assert after.locator(".grid i").count() == 16
    comparison = Store(audited.store).comparison(audited.vision_comparison)
    assert comparison.after is not None
    one = Store(audited.store).map_of(comparison.after.run_id, "v-000")
    weights = one.weights[~one.positions.special]
    strongest, weakest = int(np.argmax(weights)), int(np.argmin(weights))
    with_map = np.asarray(Image.open(io.BytesIO(after.screenshot())).convert("RGB"), dtype=float)
    after.locator(".grid, .above").evaluate("element => { element.style.display = 'none' }")
    without = np.asarray(Image.open(io.BytesIO(after.screenshot())).convert("RGB"), dtype=float)
    change = np.abs(with_map - without).mean(axis=2)
    side = min(change.shape) // 4
    tiles = change[: 4 * side, : 4 * side].reshape(4, side, 4, side).mean(axis=(1, 3)).ravel()
    assert tiles[strongest] > 10 * max(0.1, tiles[weakest]) or tiles[strongest] > tiles[weakest] + 8


def test_layer_slider_changes_the_map(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/probe?comparison={audited.text_comparison}&probe=t-001&layer=0")
    first = page.locator(".words").first.inner_html()
    page.get_by_role("slider").press("ArrowRight")
    page.wait_for_url("**layer=1**")
    settle(page)
    expect(page.locator(".words").first.locator("i").first).to_be_visible()
    assert page.locator(".words").first.inner_html() != first


# --- live, runs, log ----------------------------------------------------------------------------


def test_live_draws_what_is_typed(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/live?comparison={audited.text_comparison}")
    page.get_by_role("button", name="Load both checkpoints").click()
    page.wait_for_selector(".words", timeout=60_000)
    box = page.get_by_label("Text")
    box.fill("Omar liked the dull film.")
    box.press("Control+Enter")
    expect(page.locator(".words").first.locator("i", has_text="Omar")).to_be_visible()
    expect(page.get_by_text("Since your last edit")).to_be_visible()
    settle(page)
    assert_whole(page)
    screenshot(page, "dashboard-live-typed")


def test_runs_verify_a_run(page: Page, dashboard: str, audited: Audited) -> None:
    name = Store(audited.store).run_ids()[0]
    visit(page, f"{dashboard}/runs?run={name}")
    page.get_by_role("button", name="Verify now").click()
    expect(page.get_by_text("Every file is as it was written.")).to_be_visible(timeout=30_000)


def test_log_shows_the_chain_and_leads_to_the_failure(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/log")
    expect(page.get_by_text(Store(audited.store).log_head())).to_be_visible()
    page.get_by_role("link", name=f"Open the failed comparison {audited.text_comparison}").click()
    page.wait_for_url(f"**comparison={audited.text_comparison}**")
    settle(page)
    expect(page.locator(".hero .badge")).to_have_text("FAIL")


# --- other stores -------------------------------------------------------------------------------


def test_empty_store_is_no_error(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path) as address:
        for path in PAGES:
            visit(page, f"{address}/{path}")
            assert_whole(page)
        visit(page, address)
        expect(page.get_by_text("audit run audit.toml")).to_be_visible()
        screenshot(page, "dashboard-empty")


def test_an_audit_that_lands_is_seen_without_a_restart(page: Page, audited: Audited, tmp_path: Path) -> None:
    source, target = Store(audited.store), Store(tmp_path / "store")
    comparison = source.comparison(audited.text_comparison)
    rows = source.comparison_probes(audited.text_comparison)
    with serving(target.root, tmp_path) as address:
        visit(page, address)
        expect(page.locator(".hero, .badge")).to_have_count(0)
        name = target.write_comparison(comparison, source.verdict(audited.text_comparison), rows)
        visit(page, address)
        assert page.locator(".badge").all_inner_texts() == ["FAIL"]
        visit(page, f"{address}/compare?comparison={name}")
        expect(page.locator(".hero .badge")).to_have_text("FAIL")


# --- themes -------------------------------------------------------------------------------------


def test_charts_follow_the_systems_theme_at_once(page: Page, dashboard: str, audited: Audited) -> None:
    visit(page, f"{dashboard}/compare?comparison={audited.text_comparison}")
    labels = page.locator("[data-testid=stVegaLiteChart]").first.locator(".role-axis-label text").first
    expect(labels).to_have_attribute("fill", LIGHT.ink)
    page.emulate_media(color_scheme="dark")
    expect(labels).to_have_attribute("fill", DARK.ink)
    page.emulate_media(color_scheme="light")
    expect(labels).to_have_attribute("fill", LIGHT.ink)
    assert page.url.endswith(f"comparison={audited.text_comparison}")
