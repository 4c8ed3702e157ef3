"""Verdicts print how often the replicate test alarms on harmless re-trainings, as it was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from audit.records import Comparison, Outcome, Rule
from audit.report import measured, to_html, to_json, to_markdown, to_text
from audit.report.measured import FalseAlarms, false_alarm_lines, read_false_alarms
from tests.report_cases import comparison, excess_verdict, rule_verdict, shift_cell, verdict

ROLLOUT = FalseAlarms("rollout", "seed", 0.049, 0.041, 0.058, 0.05, 5, 40)
SENTENCE = "Measured false-alarm rate of this test: .049 [.041, .058] at nominal .05"
RENDERERS = [to_text, to_markdown, to_html, to_json]


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(measured, "read_false_alarms", lambda: (ROLLOUT,))


def compared(**changes) -> Comparison:
    seeds = {"replicate_kinds": ("seed",) * 5, "method": "rollout"}
    return replace(comparison((shift_cell("corner", 0.0512),)), **(seeds | changes))


EXCESS = verdict(excess_verdict("corner", Outcome.FAIL))


@pytest.mark.parametrize("render", RENDERERS)
def test_every_format_prints_the_rate_of_an_excess_rule_once(render):
    found = verdict(*(excess_verdict(region, Outcome.FAIL) for region in ("corner", "centre")))
    text = " ".join(render(compared(), found).replace("\\[", "[").replace("\\]", "]").split())
    assert text.count(SENTENCE) == 1
    assert "planted-shift benchmark, rollout at its defaults, seed floor of 5 replicates, 40 bases" in text


@pytest.mark.parametrize("render", RENDERERS)
def test_limit_rules_have_no_rate(render):
    assert "false-alarm rate" not in render(compared(), verdict(rule_verdict("corner", Outcome.FAIL)))
    assert "false-alarm rate" not in render(compared(), None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "alti"}, "for alti with a floor of kind seed"),
        ({"replicate_kinds": ("release",) * 5}, "for rollout with a floor of kind release"),
        ({"replicate_kinds": ("seed", "release", "tail")}, "with a floor of kind release and seed"),
    ],
)
def test_what_was_not_measured_is_said(changes, expected):
    (line,) = false_alarm_lines(compared(**changes), EXCESS)
    assert line.startswith("No false-alarm rate was measured")
    assert expected in line


def test_distances_and_the_two_by_two_have_no_rate():
    shift = excess_verdict("corner", Outcome.PASS)
    distance = replace(shift, rule=Rule("*", "excess", measure="js_distance", within=0.1))
    lines = false_alarm_lines(compared(), verdict(distance, replace(shift, effect="interaction"), shift))
    assert lines[0] == "No false-alarm rate was measured for excess rules on js distance."
    assert lines[1] == "No false-alarm rate was measured for excess rules on shift, interaction."
    assert lines[2] == ROLLOUT.sentence


def test_rules_without_a_test_have_no_rate():
    untested = replace(excess_verdict("corner", Outcome.INCONCLUSIVE), excess=None)
    assert false_alarm_lines(compared(), verdict(untested)) == []


def test_json_holds_the_rate_as_numbers():
    found = json.loads(to_json(compared(), EXCESS))["false_alarms"]
    assert (found["measured"]["rate"], found["measured"]["bases"]) == (0.049, 40)
    assert json.loads(to_json(compared(method="alti"), EXCESS))["false_alarms"]["measured"] is None
    assert (
        json.loads(to_json(compared(), verdict(rule_verdict("corner", Outcome.FAIL))))["false_alarms"] is None
    )


def test_a_package_without_rates_says_that_none_was_measured(tmp_path):
    assert read_false_alarms.__wrapped__(tmp_path / "none.json") == ()


def test_shipped_rates_are_those_of_the_benchmark():
    shipped = {(one.method, one.floor): one for one in read_false_alarms.__wrapped__(measured.RATES)}
    rollout = shipped["rollout", "seed"]
    assert rollout.bases >= 20
    assert rollout.low <= rollout.rate <= rollout.high
    assert rollout.level == 0.05
