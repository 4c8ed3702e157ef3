"""What every format says about a verdict, and that hostile or extreme records cannot break it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.records import Cell, Outcome, ReplicateTest, Rule
from audit.report import (
    JSON_SCHEMA_VERSION,
    SIZE_LIMIT,
    Example,
    ReportContext,
    VerdictRow,
    compare_table,
    facts,
    list_table,
    to_html,
    to_json,
    to_junit,
    to_markdown,
    to_text,
    verdict_row,
    wording,
)
from audit.report.forest import LEFT, RIGHT, forests, nice_step
from audit.report.heat import heat_map
from audit.report.maps import PANEL, drawing, patch_paths, window
from audit.report.rows import to_settle
from tests.report_cases import (
    HOSTILE,
    REGIONS,
    REPLICATES,
    comparison,
    digits_case,
    excess_verdict,
    image_example,
    layer_cells,
    rule_verdict,
    run_ref,
    shift_cell,
    text_example,
    verdict,
)

OUTCOMES = list(Outcome)
RENDERERS = [to_text, to_markdown, to_json, to_junit, to_html]
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads HTML, refuses tags that are not closed in order, and collects what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, css: str) -> int:
        return sum(name == tag and css in (attrs.get("class") or "").split() for name, attrs in self.tags)


def case(outcome: Outcome):
    return comparison((shift_cell("corner", 0.0512),)), verdict(rule_verdict("corner", outcome))


# --- numbers and untrusted text -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "value", "expected"),
    [
        ("shift", 0.0, ".000"),
        ("shift", -0.0182, "−.018"),
        ("shift", 0.00041, "+.00041"),
        ("shift", 1.0, "+1.00"),
        ("level", 0.25, ".250"),
        ("js_distance", 0.0312, ".031"),
        ("ratio", 12345.678, "×12,345.68"),
        ("shift", math.inf, "+∞"),
        ("shift", math.nan, "–"),
        ("shift", None, "–"),
    ],
)
def test_quantity_prints_every_number(measure, value, expected):
    assert wording.quantity(measure, value) == expected


@pytest.mark.parametrize(
    ("ends", "value", "expected"),
    [
        ((0.0021, 0.0132), 0.0071, "+.007 [+.002, +.013]"),
        ((-0.0004, 0.5), 0.25, "+.2500 [−.0004, +.5000]"),
        ((0.4, 1.25), 0.8, "+.80 [+.40, +1.25]"),
        ((0.0, 0.5), 0.25, "+.25 [.00, +.50]"),
    ],
)
def test_an_interval_of_logits_that_leaves_0_out_is_printed_so(ends, value, expected):
    assert f"{wording.quantity('logit', value, like=ends)} {wording.span('logit', ends)}" == expected


@pytest.mark.parametrize(
    ("rule", "bound", "expected"),
    [
        (Rule("r", "limit", fail=0.02), 0.02, "±.02"),
        (Rule("r", "limit", fail=0.02, direction="increase"), 0.02, "≤ +.02"),
        (Rule("r", "limit", fail=0.02, direction="decrease"), -0.02, "≥ −.02"),
        (Rule("r", "limit", "level", direction="increase", fail=0.3), None, "≤ .3"),
        (Rule("r", "limit", "level", direction="decrease", fail=0.3), 0.3, "≥ .3"),
        (Rule("r", "limit", "ratio", direction="increase", fail=1.5), 1.5, "≤ ×1.5"),
        (Rule("r", "limit"), None, "–"),
        (Rule("r", "excess", within="3 sd"), 0.0069, "±3 sd (.0069)"),
        (Rule("r", "excess", within="3 sd"), None, "±3 sd"),
        (Rule("r", "excess", within=0.02), None, "±.02"),
        (Rule("r", "excess"), None, "noise floor"),
    ],
)
def test_limit_is_named_for_every_kind_of_rule(rule, bound, expected):
    found = rule_verdict("r", Outcome.PASS, rule=rule, limit=bound)
    assert wording.limit(found) == expected


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_clean_leaves_nothing_invisible(text):
    cleaned = wording.clean(text)
    hidden = {c for c in cleaned if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}}
    assert hidden <= set(wording.JOINERS)
    assert wording.clean(cleaned) == cleaned
    cleaned.encode()


def test_clean_keeps_emoji_and_foreign_scripts():
    for text in ("👩‍🔬 naïve café", "می‌خواهم", "角 कोना угол", "tab-free"):
        assert wording.clean(text) == text


def test_clip_counts_wide_characters_twice():
    clipped = wording.clip("角" * 30, 11)
    assert wording.columns(clipped) <= 11
    assert clipped == "角" * 5 + "…"


# --- all formats, all outcomes ------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_names_outcome_and_sentence(render, outcome):
    compared, found = case(outcome)
    text = render(compared, found)
    assert outcome.value in text
    assert found.rules[0].sentence in (Page(text).text if render is to_html else text.replace("\n  ", " "))


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_accepts_missing_numbers(render):
    bare = Cell("shift", "corner", reason="one probe")
    odd = Cell("shift", "odd", value=math.nan, interval=(math.nan, math.inf), replicates=(math.nan, 0.1))
    rule = rule_verdict("corner", Outcome.INCONCLUSIVE, None, floor=None, minimum_detectable_shift=None)
    undefined = excess_verdict("odd", Outcome.INCONCLUSIVE)
    undefined = replace(undefined, excess=ReplicateTest(None, None, None, None, None, 1, reason="k < 2"))
    text = render(comparison((bare, odd), before=None, after=None), verdict(rule, undefined))
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None)\b", text)


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_accepts_no_rules_no_comparison_and_no_verdict(render):
    error = verdict(outcome=Outcome.ERROR, sentence="two identical passes disagree; switch off dropout")
    assert "switch off dropout" in render(None, error)
    assert render(comparison(()), None)
    assert render(comparison((shift_cell("corner", 0.05),)), None)


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_is_stable(render):
    compared, found, _, context = digits_case()
    assert render(compared, found, context=context) == render(compared, found, context=context)


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_says_the_map_moved_and_never_that_the_model_relies(render):
    compared, found, _, context = digits_case()
    text = render(compared, found, context=context)
    assert "attention map moved" in text
    assert "relies on" not in text


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_makes_hostile_text_harmless(render):
    compared = comparison(
        (shift_cell(HOSTILE, 0.0512), shift_cell("other" + HOSTILE, -0.01)),
        before=run_ref(HOSTILE),
        predictions={"n": 4, HOSTILE: HOSTILE, "changes": [{"probe_id": HOSTILE}]},
        settings={HOSTILE: HOSTILE},
        mismatches=(HOSTILE,),
    )
    found = rule_verdict(HOSTILE, Outcome.FAIL, rule=Rule("*", "limit", fail=0.02), reason=HOSTILE)
    context = ReportContext(title=HOSTILE, log_head=HOSTILE, notes=(HOSTILE,), report=HOSTILE)
    text = render(compared, replace(verdict(found), sentence=HOSTILE), context=context)
    assert not set("\x00\x1b\u202e\ud800") & set(text)
    if render is not to_json:
        assert "␛" in text
        assert "⟨U+202E⟩" in text
        assert "🙂" in text
    if render in (to_html, to_junit, to_markdown):
        assert "<script" not in text


# --- terminal -----------------------------------------------------------------------------------


def test_text_starts_with_the_verdict_in_one_sentence():
    compared, found, _, context = digits_case()
    text = to_text(compared, found, context=context)
    assert text.startswith("FAIL  The attention map moved 5.12 pp of its mass to the corner")
    assert ".053 → .104" in text
    assert "[+.047, +.055]" in text
    assert "+.0001 ± .0022" in text
    assert "detects .0091" in text
    assert "excess +.051" in text


def test_text_lists_unjudged_regions_what_would_settle_it_and_the_log():
    compared, found, _, context = digits_case()
    text = to_text(compared, found, context=context)
    after_rules = text[text.index("Regions that no rule judges") :]
    assert after_rules.index("centre") < after_rules.index("rest") < after_rules.index("hair")
    assert "border: about 1,200 probes instead of 400" in text
    for line in ("Attempt 3", "Policy loosened since 2025-05-20", "Log head 9f9f"):
        assert line in text
    assert "61 of 400 predictions changed class, 9 became wrong, 21 became right." in text
    assert "Occlusion of corner (mean patch)" in text
    assert text.rstrip().endswith("Report: data/store/comparisons/cmp-0123456789ab/report.html")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_text_fits_the_terminal(width):
    compared, found, _, context = digits_case()
    lines = to_text(compared, found, width=width, context=replace(context, report=None)).splitlines()
    assert max(wording.columns(line) for line in lines) <= width


def test_text_is_coloured_only_when_asked():
    compared, found = case(Outcome.FAIL)
    assert "\x1b[" not in to_text(compared, found)
    assert "\x1b[" in to_text(compared, found, color=True)


def test_text_of_200_regions_lists_the_largest_and_counts_the_rest():
    cells = tuple(shift_cell(f"cell-{i:03}", 0.001 * i) for i in range(200))
    text = to_text(comparison(cells), verdict(rule_verdict("cell-199", Outcome.FAIL, 0.199)))
    assert "cell-198" in text
    assert "cell-001" not in text
    assert "… and 159 smaller shifts" in text


def test_the_same_need_of_two_rules_is_listed_once():
    needs = [
        replace(rule_verdict(name, Outcome.INCONCLUSIVE, 0.015), needed="3 replicates")
        for name in ("corner", "corner", "rest")
    ]
    assert to_settle(verdict(*needs)) == [("corner", "3 replicates"), ("rest", "3 replicates")]


def test_warning_passes_and_is_called_a_warning():
    compared = comparison((shift_cell("corner", 0.015),))
    found = verdict(rule_verdict("corner", Outcome.PASS, 0.015, warned=True))
    assert "WARN" in to_text(compared, found)
    assert "hero WARN" in to_html(compared, found)
    assert ElementTree.fromstring(to_junit(compared, found)).get("failures") == "0"


def test_weak_replicates_and_mismatches_are_named():
    compared = comparison((), replicate_kinds=("tail", "numeric"), replicates=(), mismatches=("dtype",))
    text = to_text(compared, verdict(rule_verdict("corner", Outcome.INCONCLUSIVE)))
    assert "tail, numeric understate the spread" in " ".join(text.split())
    assert "The runs differ in dtype." in text


def test_identical_maps_are_said_to_be_identical():
    found = verdict(rule_verdict("corner", Outcome.INCONCLUSIVE, 0.0))
    text = to_text(comparison((shift_cell("corner", 0.0),), identical_maps=True), found)
    assert "invisible to attention" in " ".join(text.split())


# --- tables -------------------------------------------------------------------------------------


def test_compare_table_shows_the_worst_rule_of_each_verdict_and_copyable_paths():
    path = "data/demo/reports/" + "long-" * 30 + "vision.html"
    bad = verdict(rule_verdict("border", Outcome.PASS, 0.0021), rule_verdict("corner", Outcome.FAIL))
    table = compare_table([{"name": "vision", "verdict": bad, "report": path}, VerdictRow("text", "PASS")])
    row = next(line for line in table.splitlines() if line.startswith("vision"))
    for value in ("FAIL", "corner", "+.051", "[+.047, +.055]", "+.0001 ± .0022 (5)", ".0091"):
        assert value in row
    assert f"  vision: {path}\n" in table


def test_verdict_row_takes_the_policys_first_rule_among_equals():
    found = verdict(rule_verdict("a", Outcome.FAIL, 0.03), rule_verdict("b", Outcome.FAIL, -0.09))
    assert verdict_row("x", found).region == "a"


def test_list_table_shows_manifests_and_names_an_empty_store():
    run = {
        "run_id": "run-0123456789ab",
        "spec": {"checkpoint": {"ref": "models/base"}, "method": {"name": "rollout"}},
        "n_probes": 400,
        "provenance": {"time": "2025-06-01T12:00:00.123+00:00"},
    }
    pair = {
        "comparison_id": "cmp-0123456789ab",
        "before": {"checkpoint": "models/base"},
        "after": None,
        "outcome": None,
        "n_probes": 400,
    }
    table = list_table([run], [pair, {**pair, "outcome": "FAIL"}])
    assert "run-0123456789ab" in table
    assert "2025-06-01T12:00:00\n" in table
    assert "COMPARED" in table
    assert "FAIL" in table
    assert list_table([], []) == "Nothing is stored yet.\n"


# --- Markdown -----------------------------------------------------------------------------------


def cells_of(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line))


def test_markdown_rows_have_as_many_cells_as_their_header():
    found = verdict(rule_verdict("a|b\nc`*_<b>", Outcome.FAIL), rule_verdict("x", Outcome.PASS))
    lines = to_markdown(comparison((shift_cell("p|q", 0.01),)), found).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert {cells_of(line) for line in tables} == {10, 7}
    assert any("a\\|b␊c" in line for line in tables)


def test_markdown_links_and_mentions_are_not_live():
    text = to_markdown(comparison(()), verdict(rule_verdict("@user https://x.example [a](b)", Outcome.PASS)))
    assert "@user" not in text
    assert "https://" not in text
    assert "[a](b)" not in text


def test_markdown_fits_a_job_summary():
    cells = tuple(shift_cell(f"{'<' * 60}{i}", 0.001 * i) for i in range(400))
    rules = [rule_verdict(f"{'|' * 60}{i}", Outcome.FAIL, sentence="<" * 5000) for i in range(400)]
    text = to_markdown(comparison(cells), verdict(*rules))
    assert len(text.encode()) < 2**20
    assert "300 more rules" in text


# --- JSON ---------------------------------------------------------------------------------------


def test_json_holds_every_cell_and_number_unrounded():
    compared, found, _, context = digits_case()
    data = json.loads(to_json(compared, found, context=context))
    assert data["schema_version"] == JSON_SCHEMA_VERSION
    expected = {"schema_version", "verdict", "policy", "false_alarms", "rules", "comparison", "context"}
    assert set(data) == expected
    assert data["verdict"]["outcome"] == "FAIL"
    assert data["verdict"]["exit_code"] == 3
    assert data["verdict"]["policy_digest"] == found.policy.digest
    assert len(data["comparison"]["cells"]) == len(compared.cells)
    assert data["comparison"]["cells"][0]["value"] == 0.0512
    assert data["rules"][1]["excess"]["excess"] == found.rules[1].excess.excess
    assert data["rules"][0]["label"] == "limit shift corner"
    assert data["context"]["attempt"] == 3


def test_json_takes_numpy_and_turns_what_is_not_finite_into_null():
    odd = Cell(
        "shift", "corner", value=np.float64("nan"), interval=(np.float64(0.1), np.inf), n_probes=np.int64(3)
    )
    cell = json.loads(to_json(comparison((odd,)), None))["comparison"]["cells"][0]
    assert (cell["value"], cell["interval"], cell["n_probes"]) == (None, [0.1, None], 3)


# --- JUnit --------------------------------------------------------------------------------------


def test_junit_maps_outcomes_to_elements_and_counts_them():
    rules = [rule_verdict(f"region-{outcome}", outcome) for outcome in OUTCOMES]
    root = ElementTree.fromstring(to_junit(comparison(()), verdict(*rules)))
    cases = root.findall("testsuite/testcase")
    assert [[child.tag for child in found] for found in cases] == [
        ["system-out"],
        ["skipped", "system-out"],
        ["failure", "system-out"],
        ["error", "system-out"],
    ]
    for element in (root, root.find("testsuite")):
        counts = {key: element.get(key) for key in ("tests", "failures", "errors", "skipped")}
        assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    assert rules[2].sentence in cases[2].find("failure").get("message")
    assert "+.051" in cases[2].find("system-out").text


def test_junit_names_are_unique():
    twice = rule_verdict("corner", Outcome.FAIL)
    root = ElementTree.fromstring(to_junit(comparison(()), verdict(twice, twice, twice)))
    assert len({found.get("name") for found in root.iter("testcase")}) == 3


@pytest.mark.parametrize(
    ("found", "element"),
    [
        (verdict(outcome=Outcome.ERROR, sentence="no rule"), "error"),
        (verdict(rule_verdict("corner", Outcome.PASS), outcome=Outcome.INCONCLUSIVE), "skipped"),
        (None, "skipped"),
    ],
)
def test_junit_adds_a_case_when_the_verdict_is_worse_than_its_rules(found, element):
    root = ElementTree.fromstring(to_junit(comparison(()), found))
    own = [one for one in root.iter("testcase") if one.get("name") == "verdict"]
    assert len(own) == 1
    assert own[0].find(element) is not None


# --- HTML ---------------------------------------------------------------------------------------


def test_html_is_well_formed_self_contained_and_small():
    compared, found, examples, context = digits_case()
    html = to_html(compared, found, examples, context=context)
    page = Page(html)
    assert len(html.encode()) < 100_000
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "link", "object", "embed", "form"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_html_anchors_and_labels_point_at_something():
    compared, found, examples, context = digits_case()
    page = Page(to_html(compared, found, examples, context=context))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        targets = (attributes.get("aria-labelledby") or "").split()
        targets += [attributes["href"][1:]] if (attributes.get("href") or "").startswith("#") else []
        assert set(targets) <= set(ids)


def test_html_shows_every_section_of_a_full_case():
    compared, found, examples, context = digits_case()
    page = Page(to_html(compared, found, examples, context=context))
    for words in (
        "The attention map moved 5.12 pp of its mass to the corner",
        "Where the attention map moved",
        "Confirmation by occlusion",
        "At which depth it moved",
        "61 of 400 predictions changed class",
        "What this map can and cannot tell",
        "data/probes/digits.jsonl",
        "the region is empty in every probe",
        "Attempt 3 for this pair.",
        "9f" * 32,
        "“Emily” (position 1)",
        "Positions only: the report holds no content.",
        "about 1,200 probes instead of 400",
    ):
        assert words in page.text
    assert page.count("circle", "dot") >= 5 * len(REGIONS)
    assert page.count("svg", "forest") == 1
    assert page.count("rect", "cellbed") == 4 * len(REGIONS)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_html_has_one_accent_for_its_outcome(outcome):
    page = Page(to_html(*case(outcome)))
    assert page.count("div", "hero") == page.count("div", outcome.value) == 1


def test_html_keeps_passing_values_beside_failing_ones():
    cells = tuple(shift_cell(f"cell-{i:03}", 0.0001 * i) for i in range(200))
    rules = [rule_verdict(f"cell-{i:03}", Outcome.PASS, 0.0001 * i) for i in range(200)]
    page = Page(to_html(comparison(cells), verdict(*rules)))
    assert all(page.text.count(f"cell-{i:03}") >= 2 for i in range(200))
    assert "140 regions with smaller shifts are in the table of all values." in page.text


def test_html_draws_one_plot_for_each_effect():
    effects = ("model", "data", "interaction")
    cells = tuple(shift_cell("corner", 0.02, effect=effect) for effect in effects)
    page = Page(to_html(comparison(cells, kind="unpaired"), verdict(rule_verdict("corner", Outcome.PASS))))
    assert page.count("svg", "forest") == 3
    assert "Interaction effect" in page.text


def test_html_of_extreme_records_stays_under_the_limit_and_says_what_is_missing():
    regions = {f"{HOSTILE[:40]}{'<&' * 40}{i}": 0.001 * i for i in range(200)}
    cells = tuple(shift_cell(region, value) for region, value in regions.items())
    rules = [rule_verdict(r, Outcome.FAIL, v, sentence="<\u202e" * 2000) for r, v in regions.items()]
    rules = [replace(found, rule=Rule("*", "limit", fail=0.02)) for found in rules] * 2
    compared = comparison(cells + layer_cells(regions, 12), settings={f"k{i}": "<" * 9999 for i in range(99)})
    html = to_html(compared, verdict(*rules), [image_example(name=f"d-{i}") for i in range(400)])
    assert len(html.encode()) < SIZE_LIMIT
    text = Page(html).text
    assert re.search(r"\d+ more rules, none of them worse", text)
    assert re.search(r"\d+ more values were left out", text)
    assert re.search(r"\d+ more examples were left out", text)


def test_html_drops_examples_that_do_not_fit_and_keeps_their_order():
    compared, found = case(Outcome.FAIL)
    noise = np.random.default_rng(0).bytes(90_000)
    examples = [replace(image_example(name=f"digit-{i}"), png=image_example().png + noise) for i in range(12)]
    html = to_html(compared, found, examples)
    shown = [i for i in range(12) if f"digit-{i}<" in html]
    assert shown == list(range(len(shown)))
    assert 6 <= len(shown) < 12
    assert f"{12 - len(shown)} more examples were left out" in html
    assert len(html.encode()) < SIZE_LIMIT


# --- geometry -----------------------------------------------------------------------------------


def test_forest_places_values_on_one_linear_scale():
    compared, found, _, _ = digits_case()
    plot = forests(compared, found)[0]
    rows = {row.full: row for row in plot.rows}
    ticks = [(x, float(text.replace("−", "-"))) for x, text in plot.ticks]
    slope, origin = np.polyfit([v for _, v in ticks], [x for x, _ in ticks], 1)
    for region, value in REGIONS.items():
        row = rows[region]
        assert row.point == pytest.approx(origin + slope * value, abs=0.2)
        assert row.interval == pytest.approx(
            (origin + slope * (value - 0.004), origin + slope * (value + 0.004)), abs=0.2
        )
        assert row.replicates == pytest.approx([origin + slope * s for s in REPLICATES], abs=0.2)
        middle, sd = np.mean(REPLICATES), np.std(REPLICATES, ddof=1)
        ends = (origin + slope * (middle - 2 * sd), origin + slope * (middle + 2 * sd))
        assert row.band == pytest.approx(ends, abs=0.2)
    assert plot.zero == pytest.approx(origin, abs=0.2)
    limit = next(bound for bound in rows["corner"].bounds if bound.kind == "limit")
    assert limit.ticks == pytest.approx((origin - slope * 0.02, origin + slope * 0.02), abs=0.2)
    excess = next(bound for bound in rows["corner"].bounds if bound.kind == "excess")
    middle = float(np.mean(REPLICATES))
    assert excess.ticks == pytest.approx(
        (origin + slope * (middle - 0.02), origin + slope * (middle + 0.02)), abs=0.2
    )
    assert rows["hair"].point is None


def test_forest_orders_judged_regions_worst_first_then_by_size():
    compared, found, _, _ = digits_case()
    names = [row.full for row in forests(compared, found)[0].rows]
    assert names == ["corner", "border", "special", "centre", "rest", "hair"]


@pytest.mark.parametrize(("direction", "open_end"), [("increase", LEFT), ("decrease", RIGHT)])
def test_forest_leaves_the_free_side_of_a_one_sided_limit_open(direction, open_end):
    rule = Rule("corner", "limit", fail=0.02, direction=direction)
    found = verdict(rule_verdict("corner", Outcome.PASS, 0.001, rule=rule))
    bound = forests(comparison((shift_cell("corner", 0.001),)), found)[0].rows[0].bounds[0]
    assert len(bound.ticks) == 1
    assert open_end in (bound.left, bound.right)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0])
def test_forest_copes_with_no_change_and_with_extremes(value):
    cell = shift_cell("corner", value, interval=(value, value), replicates=())
    plot = forests(comparison((cell,)), verdict(rule_verdict("x", Outcome.PASS)))[0]
    assert LEFT <= plot.rows[0].point <= RIGHT
    assert len(plot.ticks) >= 2


def test_nice_step_is_one_two_or_five():
    for width in np.logspace(-6, 3, 200):
        step = nice_step(width)
        assert 2 <= width / step <= 6.1
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


def test_heat_map_is_symmetric_and_proportional():
    gone = shift_cell("gone", None, layer=3)
    heat = heat_map(comparison((*layer_cells({"up": 0.04, "down": -0.02}, 4), gone)))
    cells = {cell.full.split(":")[0]: cell for cell in heat.cells}
    assert cells["up · layer 3"].opacity == 1
    assert cells["down · layer 3"].opacity == 0.5
    assert (cells["up · layer 3"].sign, cells["down · layer 3"].sign) == ("up", "down")
    assert [text for _, text in heat.layers] == ["0", "1", "2", "3"]
    assert [label for _, label, _ in heat.labels] == ["up", "down", "gone"]
    assert sum(cell.sign == "none" for cell in heat.cells) == 4


def test_heat_map_needs_layers_and_survives_many():
    assert heat_map(comparison((shift_cell("corner", 0.1),))) is None
    heat = heat_map(comparison(layer_cells({f"r{i}": 0.01 for i in range(50)}, 60)))
    assert len(heat.cells) == 40 * 60
    assert heat.left_out == 10
    assert all(cell.text == "" for cell in heat.cells)
    assert len(heat.layers) < 60


@pytest.mark.parametrize(("value", "layers"), [(0.06, 12), (0.006, 12), (0.0006, 12), (0.6, 12), (0.06, 24)])
def test_heat_map_prints_numbers_only_where_they_fit(value, layers):
    heat = heat_map(comparison(layer_cells({"up": value, "down": -value}, layers)))
    longest = max(len(cell.text) for cell in heat.cells)
    assert 8 * longest <= heat.cell_width
    assert (longest > 0) == (layers == 12 and value > 0.001)


def test_window_finds_the_neighbours_that_changed_most():
    rng = np.random.default_rng(5)
    for _ in range(20):
        difference = rng.normal(size=rng.integers(1, 60))
        width = int(rng.integers(1, 30))
        start, end = window(difference, width)
        sums = [np.abs(difference[i : i + width]).sum() for i in range(max(1, len(difference) - width + 1))]
        assert np.abs(difference[start:end]).sum() == pytest.approx(max(sums))


def test_patch_paths_draw_each_visible_patch_once_at_its_place():
    values = np.array([0.0, 0.5, 1.0, 0.01, 0.5, 0.25])
    paths = patch_paths(values, (2, 3), 160.0, "up")
    drawn = {}
    for patches in paths:
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", patches.path):
            drawn[float(x) / (PANEL / 3), float(y) / 80.0] = patches.opacity
    assert drawn == {(1, 0): 0.5, (2, 0): 1.0, (1, 1): 0.5, (2, 1): 0.25}


def test_drawing_scales_before_and_after_alike():
    drawn = drawing(Example("p", "c", "text", np.array([0.2, 0.8]), np.array([0.6, 0.4]), words=("a", "b")))
    assert [(w.before, w.after) for w in drawn.words] == [(0.25, 0.75), (1.0, 0.5)]
    assert [(w.difference, w.sign) for w in drawn.words] == [(1.0, "up"), (1.0, "down")]


def test_drawing_of_a_long_text_shows_where_it_changed():
    before = np.full(1000, 0.001)
    after = before.copy()
    after[700] += 0.2
    drawn = drawing(Example("p", "c", "text", before, after, words=tuple(map(str, range(1000)))))
    assert "700" in {word.text for word in drawn.words}
    assert drawn.notes == ("160 of 1000 positions, where the change is largest.",)
    assert drawn.movers == ("“700” (position 700): .001 → .201",)


def test_drawing_leaves_out_an_image_that_is_too_large():
    example = replace(image_example(), png=image_example().png + bytes(200_000))
    drawn = drawing(example)
    assert drawn.image == ""
    assert "was left out" in drawn.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": np.ones((2, 2))}, "before: expected a non-empty array"),
        ({"before": np.array([])}, "before: expected a non-empty array"),
        ({"after": np.array([np.nan, 1.0])}, "after: expected finite non-negative weights"),
        ({"after": np.array([-0.1, 1.1])}, "after: expected finite non-negative weights"),
        ({"after": np.ones(3)}, "after: expected shape"),
        ({"words": ("one",)}, "words: expected 2"),
        ({"kind": "image"}, "grid: expected"),
        ({"kind": "image", "grid": (3, 1)}, "grid: expected"),
        ({"png": b"<svg onload=alert(1)>"}, "png: expected the bytes of a PNG"),
    ],
)
def test_example_refuses_what_cannot_be_drawn(changes, message):
    arguments = {"kind": "text", "before": np.array([0.5, 0.5]), "after": np.array([0.1, 0.9]), **changes}
    with pytest.raises(ValueError, match=message):
        Example("p", "c", **arguments)


def test_example_without_content_shows_no_words():
    html = to_html(*case(Outcome.FAIL), [text_example(words=False)])
    assert "Emily" not in html
    assert "position 1: " in html


# --- imports ------------------------------------------------------------------------------------


def test_report_renders_without_torch_or_stores_and_imports_its_libraries_late():
    code = """
import sys
for name in ("torch", "duckdb", "pyarrow", "polars", "transformers"):
    sys.modules[name] = None
from tests.report_cases import digits_case
from audit.report import to_html, to_text
assert not {"jinja2", "rich", "scipy"} & set(sys.modules)
compared, found, examples, context = digits_case()
assert "<svg" in to_html(compared, found, context=context)
assert "FAIL" in to_text(compared, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- what no rule judges ------------------------------------------------------------------------


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html])
def test_pass_tells_which_unjudged_region_moved_beyond_retraining(render):
    surer = ReplicateTest(0.03, 40.0, 1e-7, None, 0.0091, 5)
    cells = (
        shift_cell("corner", 0.001),
        shift_cell("rest", 0.03, excess=surer),
        shift_cell("stamp", 0.072),
        shift_cell("small", 0.004),
    )
    judged = verdict(rule_verdict("corner", Outcome.PASS, 0.001))
    told = " ".join(unescape(render(comparison(cells), judged)).split())
    assert "No rule judges 'stamp' (+.072), 'rest' (+.030), which moved by more than harmless" in told
    assert "'small' (" not in told


@pytest.mark.parametrize(
    "changes",
    [
        {"replicate_kinds": ("seed", "seed")},
        {"replicate_kinds": ("tail",) * 5},
        {"mismatches": ("dtype",)},
        {"cells": (shift_cell("corner", 0.07),)},
        {"cells": (shift_cell("stamp", 0.07, excess=None),)},
        {"cells": (shift_cell("stamp", 0.07, excess=ReplicateTest(0.07, 2.0, 0.06, None, 0.1, 5)),)},
    ],
)
def test_unjudged_regions_are_told_only_where_an_excess_rule_could_fail(changes: dict[str, object]) -> None:
    judged = verdict(rule_verdict("corner", Outcome.PASS, 0.001))
    made = comparison((shift_cell("stamp", 0.07),))
    assert facts.unjudged(made, judged)
    assert facts.unjudged(replace(made, **changes), judged) == ""  # type: ignore[arg-type]
