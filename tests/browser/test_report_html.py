"""The HTML report as a person sees it: real Chromium, light and dark, wide and narrow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from audit.records import Outcome, Rule
from audit.report import to_html
from tests.report_cases import (
    HOSTILE,
    REGIONS,
    comparison,
    digits_case,
    layer_cells,
    rule_verdict,
    shift_cell,
    text_example,
    verdict,
)

SCREENSHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "screenshots"
SCHEMES = ["light", "dark"]

CONTRAST = """
selector => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => {
    const [r, g, b] = rgb.slice(0, 3).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(selector)].map(node => {
    const style = getComputedStyle(node);
    const ink = node.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(background(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
}
"""
BOXES = """
selector => [...document.querySelectorAll(selector)].map(node => {
  const box = node.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
})
"""


def show(browser: Browser, html: str, path: Path, *, width: int = 1100, scheme: str = "light") -> Page:
    """Open a report from a file; any message, dialog or request beyond the file fails the test."""
    path.write_text(html, encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.troubles = []
    page.on("console", lambda message: page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("dialog", lambda dialog: page.troubles.append(dialog.message) or dialog.dismiss())
    page.on(
        "request", lambda request: page.troubles.append(request.url) if asks_network(request.url) else None
    )
    page.goto(path.as_uri())
    return page


def asks_network(url: str) -> bool:
    return not url.startswith(("file:", "data:"))


def overflow(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def shoot(page: Page, name: str, *, whole: bool = True) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report-{name}.png", full_page=whole)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_report_reads_well_in_both_schemes(browser, tmp_path, scheme):
    compared, found, examples, context = digits_case()
    html = to_html(compared, found, examples, context=context)
    page = show(browser, html, tmp_path / "report.html", scheme=scheme)
    shoot(page, f"fail-{scheme}")
    assert page.locator("h1").inner_text().startswith("The attention map moved 5.12 pp")
    assert page.locator(".hero .badge").inner_text() == "✗ FAIL"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 24)"
    assert dark == (scheme == "dark")
    for selector in ("h1", ".badge", ".lead", ".note", "thead th", "nav a", "svg.forest text", ".legend li"):
        ratios = page.evaluate(CONTRAST, selector)
        assert ratios, selector
        assert min(ratios) >= 4.5, selector
    assert page.troubles == []
    page.close()


@pytest.mark.parametrize("width", [400, 800, 1100])
def test_report_has_no_horizontal_overflow(browser, tmp_path, width):
    compared, found, examples, context = digits_case()
    html = to_html(compared, found, examples, context=context)
    page = show(browser, html, tmp_path / "report.html", width=width)
    page.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true })")
    shoot(page, f"fail-{width}")
    assert overflow(page) == 0
    page.close()


def test_report_marks_are_drawn_inside_their_plot_and_labels_do_not_collide(browser, tmp_path):
    compared, found, _, context = digits_case()
    page = show(browser, to_html(compared, found, context=context), tmp_path / "report.html", width=800)
    left, top, right, bottom = page.evaluate(BOXES, "svg.forest")[0]
    marks = page.evaluate(BOXES, "svg.forest .mark")
    assert len(marks) == len(REGIONS)
    for selector in (".mark", ".dot", ".noise", ".zone", ".edge", ".ci", "text"):
        boxes = page.evaluate(BOXES, f"svg.forest {selector}")
        assert boxes, selector
        for box in boxes:
            assert left <= box[0], selector
            assert top <= box[1], selector
            assert box[2] <= right + 0.5, selector
            assert box[3] <= bottom, selector
    texts = page.evaluate(BOXES, "svg.forest text")
    assert all(box[3] - box[1] >= 10 for box in texts)
    overlaps = [(a, b) for i, a in enumerate(texts) for b in texts[:i] if _overlap(a, b)]
    assert overlaps == []
    page.close()


def _overlap(a: list[float], b: list[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] - 1 and b[1] < a[3] - 1


def test_report_shows_heat_map_patches_and_words(browser, tmp_path):
    compared, found, examples, context = digits_case()
    page = show(browser, to_html(compared, found, examples, context=context), tmp_path / "report.html")
    assert page.locator("svg.heat .cell").count() == 4 * len(REGIONS)
    strongest = page.locator("svg.heat .cell[fill-opacity='1.0']")
    assert strongest.count() == 1
    panels = page.evaluate(BOXES, "svg.overlay .panel")
    assert len(panels) == 3
    assert all(box[2] - box[0] > 150 for box in panels)
    pictures = page.evaluate(BOXES, "svg.overlay use")
    assert [round(box[0]) for box in pictures] == [round(box[0]) for box in panels]
    words = page.locator(".example .words").nth(1).locator("i")
    alphas = words.evaluate_all(
        "nodes => nodes.map(n => [n.textContent, Number(n.style.getPropertyValue('--a'))])"
    )
    assert max(alphas, key=lambda pair: pair[1]) == ["Emily", 1]
    assert page.troubles == []
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.ERROR])
def test_report_of_every_outcome(browser, tmp_path, outcome, scheme):
    regions = {"names": 0.004, "sentiment words": -0.006, "function words": 0.001}
    cells = tuple(shift_cell(region, value) for region, value in regions.items()) + layer_cells(regions, 12)
    found = verdict(
        rule_verdict("names", outcome, 0.004), rule_verdict("sentiment words", Outcome.PASS, -0.006)
    )
    html = to_html(comparison(cells, confirmations=()), found, [text_example()])
    page = show(browser, html, tmp_path / "report.html", width=800, scheme=scheme)
    shoot(page, f"{outcome.lower()}-{scheme}")
    assert outcome.value in page.locator(".hero .badge").inner_text()
    assert overflow(page) == 0
    assert min(page.evaluate(CONTRAST, ".hero .badge, .rule .badge")) >= 4.5
    page.close()


def test_report_of_hostile_text_shows_it_and_runs_nothing(browser, tmp_path):
    region = HOSTILE + "W" * 300
    example = replace(text_example(name=HOSTILE), words=(HOSTILE,) * 17)
    found = rule_verdict(region, Outcome.FAIL, rule=Rule("*", "limit", fail=0.02))
    compared = comparison(
        (shift_cell(region, 0.05), *layer_cells({region: 0.05}, 60)), settings={HOSTILE: "W" * 500}
    )
    page = show(browser, to_html(compared, verdict(found), [example]), tmp_path / "report.html", width=800)
    shoot(page, "hostile")
    assert page.troubles == []
    assert overflow(page) == 0
    assert page.locator("script").count() == 0
    assert "<script>alert(1)</script>|⟨U+202E⟩gnp.exe␛[31m␀␊🙂" in page.locator("body").inner_text()
    page.close()


def test_report_of_200_regions_is_usable(browser, tmp_path):
    regions = {f"cell {i // 20}·{i % 20}": 0.0005 * (i - 100) for i in range(200)}
    cells = tuple(shift_cell(region, value) for region, value in regions.items())
    rules = [rule_verdict(r, Outcome.FAIL if abs(v) > 0.04 else Outcome.PASS, v) for r, v in regions.items()]
    html = to_html(comparison(cells + layer_cells(regions, 12)), verdict(*rules))
    page = show(browser, html, tmp_path / "report.html", width=800)
    shoot(page, "200-regions", whole=False)
    assert page.locator("svg.forest g.row").count() == 60
    assert overflow(page) == 0
    page.close()
