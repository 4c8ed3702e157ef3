"""What the dashboard draws, without a browser: charts, overlays, and the files that they are saved as."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
from PIL import Image

from audit.pipeline.trend import Trend
from audit.records import Cell, Outcome, Positions, Probe, ReplicateTest, Rule, RuleVerdict
from audit.report import rows
from audit.report.wording import span
from dashboards import (
    charts,
    downloads,
    forest,
    frames,
    map_svg,
    naming,
    probe_view,
    sound_view,
    theme,
    trend_charts,
)
from dashboards.theme import DARK, LIGHT
from dashboards.views import trends, verdict

CELLS = [
    Cell(
        "shift",
        "corner",
        layer=i,
        value=0.01 * i,
        interval=(0.0, 0.02),
        replicates=(0.001, 0.002),
        n_probes=3,
    )
    for i in range(3)
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("r", "limit", fail=0.02), (-0.02, 0.02)),
        (Rule("r", "limit", fail=0.02, direction="increase"), (-np.inf, 0.02)),
        (Rule("r", "limit", fail=0.02, direction="decrease"), (-0.02, np.inf)),
        (Rule("r", "excess", within=0.02), (-0.01, 0.03)),
        (Rule("r", "excess", within="3 sd"), None),
    ],
)
def test_zone_is_what_the_rule_allows(rule: Rule, expected: tuple[float, float] | None) -> None:
    zone = forest.zone(RuleVerdict(rule, "r", Outcome.PASS, ""), 0.01)
    assert zone == (None if expected is None else pytest.approx(expected))


def test_heat_map_has_a_symmetric_domain_for_one_signed_shifts() -> None:
    cells = [Cell("shift", "corner", layer=i, value=0.01 * i, n_probes=3) for i in range(3)]
    chart = charts.heat_map(cells, ["corner"], LIGHT).to_dict()
    scale = chart["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == [-0.02, 0, 0.02]
    assert scale["range"] == [LIGHT.down, LIGHT.middle, LIGHT.up]


def test_letters_and_lines_of_a_chart_have_the_colours_of_its_theme() -> None:
    config = charts.heat_map(CELLS, ["corner"], DARK).to_dict()["config"]
    assert config["axis"]["labelColor"] == DARK.ink
    assert config["legend"]["titleColor"] == DARK.soft
    assert config["font"] == theme.SANS
    assert config["background"] == "transparent"


def test_histogram_counts_every_probe_once() -> None:
    values = np.random.default_rng(0).normal(size=500)
    chart = charts.histogram(values, 0.0, "t", LIGHT).to_dict()
    bars = chart["layer"][0]["data"]["values"]
    assert sum(bar["count"] for bar in bars) == 500
    assert min(bar["low"] for bar in bars) == -max(abs(values))


def test_smooth_overlay_is_opaque_where_the_map_is_large() -> None:
    import base64
    import io

    from PIL import Image

    shares = np.array([0.0, 0.0, 0.0, 1.0])
    drawn = probe_view.panels_html(
        [probe_view.Line("After", shares, 1.0)], (2, 2), None, smooth=True, others=(shares, shares)
    )
    data = base64.b64decode(drawn.split("base64,")[1].split('"')[0])
    alpha = np.asarray(Image.open(io.BytesIO(data)))[..., 3]
    assert alpha[-1, -1] > 150
    assert alpha[0, 0] < 10


def test_spans_of_a_sound_keep_the_whole_map_and_put_low_frequencies_below() -> None:
    starts = np.tile(np.arange(300) * 0.01, 2)
    times = np.stack([starts, starts + 0.02], axis=1)
    grid = sound_view.spans(times, np.zeros(600, dtype=bool))
    weights = np.r_[np.ones(300), np.zeros(300)] / 300
    shares = grid.summed(weights).reshape(grid.shape)
    assert grid.shape == (2, 100)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[0].sum() == 0.0
    assert grid.times[[0, -1]] == pytest.approx(np.array([[0.0, 0.04], [2.97, 3.01]]))


def test_spectrogram_is_bright_where_the_tone_is() -> None:
    import io

    from PIL import Image

    tone = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    png = sound_view.spectrogram_png(tone, 16000)
    pixels = np.asarray(Image.open(io.BytesIO(png)), dtype=float)
    brightest = int(pixels.mean(axis=1).argmax())
    assert 1 - brightest / pixels.shape[0] == pytest.approx(1000 / 8000, abs=0.03)


# --- files --------------------------------------------------------------------------------------


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_a_chart_is_saved_with_every_mark(colours):
    spec = charts.heat_map(CELLS, ["corner"], colours).to_dict()
    svg = downloads.chart_svg(
        spec, colours, "Shift of 3 <regions>", ("cmp-1 · 7 of 9 probes: fixed", "Legend.")
    )
    said = {part for one in elements(svg, "text") for part in one.itertext()}
    assert {"Shift of 3 <regions>", "cmp-1 · 7 of 9 probes: fixed", "Legend."} <= said
    tiles = [one for one in elements(svg, "path") if (one.get("fill") or "").startswith("rgb")]
    assert len(tiles) == 3
    assert "+.020" in said
    assert colours.page in svg
    picture = Image.open(io.BytesIO(downloads.png(svg)))
    assert picture.width >= downloads.SCALE * downloads.WIDTH


def test_words_are_saved_as_text_and_hostile_ones_stay_text():
    text = "good <script>x</script> \u202eשלום 🙂 \x07bad"
    ends = [4, 24, 30, 32, 37]
    starts = [0, 5, 25, 31, 33]
    positions = Positions(
        "token", np.zeros(5, dtype=bool), starts=np.array(starts, np.int32), ends=np.array(ends, np.int32)
    )
    pieces = probe_view.tokens(positions, Probe("p", text=text), whole_words=False)
    before, after = np.array([0.5, 0.2, 0.1, 0.1, 0.1]), np.array([0.1, 0.6, 0.1, 0.1, 0.1])
    lines = probe_view.pair_of_lines(before, after, (0.6, 0.4))
    svg = map_svg.words_svg([(pieces, line) for line in lines], LIGHT)
    assert "<script" not in svg
    assert "\u202e" not in svg
    assert "\x07" not in svg
    boxes = [one for one in elements(svg, "rect") if one.get("fill-opacity")]
    assert len(boxes) == 15
    strengths = [float(one.get("fill-opacity") or 0) for one in boxes]
    assert strengths[6] == pytest.approx(LIGHT.word)  # after: the second word is the strongest
    assert [one.get("fill") for one in boxes[10:12]] == [LIGHT.down, LIGHT.up]
    said = [one.text for one in elements(svg, "text")]
    assert said[-4:] == ["0", ".600 of the map", "lost .400", "gained .400"]  # the colour scales
    ramps = [one.get("fill") for one in elements(svg, "rect") if "url" in (one.get("fill") or "")]
    assert len(elements(svg, "linearGradient")) == len(set(ramps)) == 2
    assert Image.open(io.BytesIO(downloads.png(svg))).width == 2 * downloads.WIDTH


@pytest.mark.parametrize("smooth", [False, True])
def test_patches_are_saved_over_their_picture(smooth):
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    panels = probe_view.pair_of_lines(shares, shares[::-1], (0.4, 0.3))
    png = probe_view.as_png(np.full((8, 8, 3), 200, np.uint8))
    svg = map_svg.panels_svg(panels, (2, 2), png, LIGHT, smooth=smooth)
    assert len(elements(svg, "image")) == (6 if smooth else 3)
    drawn = np.asarray(Image.open(io.BytesIO(downloads.png(svg))).convert("RGB"), dtype=float)
    left = 2 * map_svg.MARGIN
    size = (2 * downloads.WIDTH - 8 * map_svg.MARGIN) // 3
    top = 2 * (map_svg.MARGIN + 24)
    panel = drawn[top : top + size, left : left + size]
    half = size // 2
    weak, strong = panel[4 : half - 4, 4 : half - 4], panel[half + 4 : -4, half + 4 : -4]
    assert weak.mean() > strong.mean() + 20


def test_csv_holds_lists_as_json_and_parquet_as_lists():
    frame = frames.cells(CELLS)
    read = pl.read_csv(downloads.csv(frame))
    assert json.loads(read["replicates"][0]) == [0.001, 0.002]
    assert read.columns == frame.columns
    assert pl.read_parquet(downloads.parquet(frame)).equals(frame)


def test_rules_are_a_table_with_every_number():
    rule = Rule("corner", "limit", fail=0.02)
    found = RuleVerdict(
        rule, "corner", Outcome.FAIL, "moved", value=0.1, interval=(0.05, 0.15), floor=(0.0, 0.01)
    )
    row = frames.rules([found]).row(0, named=True)
    assert (row["outcome"], row["value"], row["low"], row["floor_sd"]) == ("FAIL", 0.1, 0.05, 0.01)
    assert (row["allowed"], row["judged"], row["effect_floor"]) == ("±.02", "shift", None)


EXCESS = RuleVerdict(
    Rule("corner", "excess", within=0.03),
    "corner",
    Outcome.FAIL,
    "moved",
    value=0.025,
    interval=(0.02, 0.03),
    limit=0.03,
    excess=ReplicateTest(0.02, 9.0, 0.001, (0.012, 0.024), 0.01, 3),
    adjusted_pvalue=0.002,
    n_clusters=7,
)


def test_rules_as_a_file_hold_what_was_judged_as_the_page_shows_it():
    row = frames.rules([EXCESS], 0.01).row(0, named=True)
    shown = rows.rule_row(EXCESS)
    assert (row["judged"], row["value"], row["observed"]) == ("excess", 0.02, 0.025)
    assert span("shift", (row["low"], row["high"])) == shown.interval == "[+.012, +.024]"
    assert row["allowed"] == shown.limit
    assert (row["limit"], row["effect_floor"], row["adjusted_pvalue"]) == (0.03, 0.01, 0.002)
    assert (row["n_groups"], row["outcome"], row["sentence"]) == (7, "FAIL", "moved")


def test_rules_as_a_file_hold_the_warn_limit_and_that_it_warned():
    found = RuleVerdict(
        Rule("corner", "limit", fail=0.02, warn=0.01), "corner", Outcome.PASS, "moved", warned=True
    )
    row = frames.rules([found], 0.01).row(0, named=True)
    assert (row["outcome"], row["warn_limit"]) == ("WARN", 0.01)


def test_a_rule_on_the_page_names_the_effect_floor_that_fails_it():
    page = verdict._rule(EXCESS, 0.01)
    assert "±.03" in page
    assert "fails from .01 (effect floor)" in page


# --- names --------------------------------------------------------------------------------------


def manifest(before: str, after: str) -> dict[str, object]:
    return {"before": {"checkpoint": before}, "after": {"checkpoint": after}}


def test_pairs_of_one_name_are_told_apart_by_their_folder():
    pairs = [
        ("/m/text/base", "/m/text/new"),
        ("/m/vision/base", "/m/vision/new"),
        ("/m/text/base", "/m/text/old"),
    ]
    found = naming.pair_names([manifest(*pair) for pair in pairs])
    assert list(found.values()) == ["text: base → new", "vision: base → new", "base → old"]


def test_checkpoints_of_one_name_are_told_apart_by_their_folder():
    found = naming.checkpoint_names(["/m/text/seed-1", "/m/vision/seed-1", "/m/text/seed-2", "org/model"])
    assert list(found.values()) == ["text/seed-1", "vision/seed-1", "seed-2", "org/model"]


# --- trends -------------------------------------------------------------------------------------


def test_stretches_between_change_points_have_their_means():
    levels = (0.1, 0.2, 0.2, 0.2, 0.4, 0.4)
    trend = Trend(
        "r", "input", "model", ("a", "b", "c", "d", "e"), levels, 1.0, 1.0, 0.01, None, "", (1.0,) * 5, (3,)
    )
    history = [{"provenance": {"time": f"2026-01-0{i}T00:00:00+00:00"}} for i in range(1, 6)]
    found = trends.looks_of(trend, history)
    assert [row["mean"] for row in found] == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.4])
    assert [row["look"] for row in found] == [1, 2, 3, 4, 5]
    shorter = trends.looks_of(trend, history[2:])  # the page shows the newest audits alone
    assert [(row["look"], row["share"]) for row in shorter] == [(1, 0.2), (2, 0.4), (3, 0.4)]
    drawn = trend_charts.share(found, [4], LIGHT).to_dict()
    assert drawn["layer"][0]["data"]["values"] == [{"look": 4}]


def test_a_trend_draws_limits_control_limits_and_approvals():
    found = [
        {"look": 1, "time": "2026-01-01", "value": 0.1, "low": 0.0, "high": 0.2, "outcome": "PASS",
         "comparison": "cmp-1", "after": "new"}
    ]  # fmt: skip
    held = trend_charts.Reference((-0.02, 0.02), (-0.01, 0.03), ({"look": 1, "by": "bob", "what": "all"},))
    layers = trend_charts.trend(found, held, LIGHT).to_dict()["layer"]
    values = [layer.get("data", {}).get("values") for layer in layers]
    assert [{"low": -0.01, "high": 0.03}] in values
    assert [{"value": -0.02}, {"value": 0.02}] in values
    assert [{"look": 1, "by": "bob", "what": "all"}] in values


@pytest.mark.parametrize(
    ("times", "title", "label"),
    [
        (
            ("2026-11-30T09:05:00", "2026-11-30T17:30:00"),
            "audits of 30.11., oldest first (UTC)",
            '"1": "17:30"',
        ),
        (
            ("2026-11-30T09:05:00", "2026-12-01T09:05:00"),
            "audits, oldest first (day.month.)",
            '"1": "01.12."',
        ),
    ],
)
def test_audits_of_one_day_are_told_apart_by_their_hours(
    times: tuple[str, str], title: str, label: str
) -> None:
    rows = [{"look": look, "time": time} for look, time in enumerate(times)]
    axis = trend_charts._looks(rows).to_dict()
    assert axis["title"] == title
    assert label in axis["axis"]["labelExpr"]
