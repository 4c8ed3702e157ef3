"""The verdict truth table: one test per cell, with the exit code."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from audit.errors import NothingEvaluatedError
from audit.gate import evaluate_gate
from audit.records import Cell, Comparison, Confirmation, Outcome, Policy, Rule, RunRef, Verdict
from audit.report.measured import false_alarm_lines

FLOOR = (-0.002, 0.001, 0.0005, -0.0015, 0.002)


def cell(value=0.052, half=0.003, **fields):
    facts = {
        "measure": "shift",
        "region": "corner",
        "value": value,
        "interval": None if value is None else (value - half, value + half),
        "before": 0.051,
        "after": None if value is None else 0.051 + value,
        "n_probes": 400,
        "replicates": FLOOR,
        "probe_variance": 1e-7,
    }
    return Cell(**{**facts, **fields})


def distance(value=0.2, half=0.01, **fields):
    given = {"replicates": (0.05, 0.06, 0.045, 0.055, 0.05), "probe_variance": 1e-3}
    facts = {"before": None, "after": None, "measure": "js_distance", "region": "*", **given}
    return cell(value, half, **{**facts, **fields})


def comparison(*cells, **fields):
    facts = {
        "kind": "paired",
        "cells": cells,
        "alpha": 0.05,
        "n_probes": 400,
        "replicate_kinds": ("seed",) * 5,
        "same_weights": False,
        "id": "cmp-0123456789ab",
    }
    return Comparison(**{**facts, **fields})


def limit(**fields):
    return Rule(**{"region": "corner", "kind": "limit", "fail": 0.02, **fields})


def excess(**fields):
    return Rule(**{"region": "corner", "kind": "excess", "within": 0.02, **fields})


def judge(compared, *rules, **policy) -> Verdict:
    return evaluate_gate(compared, Policy(tuple(rules), **policy))


def expect(verdict: Verdict, outcome: str, exit_code: int) -> None:
    assert (verdict.status, verdict.exit_code) == (outcome, exit_code)
    assert all(rule.sentence and "\n" not in rule.sentence for rule in verdict.rules)
    assert "nan" not in repr(verdict).lower()


# --- kind = limit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "direction", "outcome", "code"),
    [
        (0.010, "both", "PASS", 0),
        (0.052, "both", "FAIL", 3),
        (-0.052, "both", "FAIL", 3),
        (0.019, "both", "INCONCLUSIVE", 4),
        (-0.019, "both", "INCONCLUSIVE", 4),
        (0.021, "both", "INCONCLUSIVE", 4),
        (0.052, "increase", "FAIL", 3),
        (-0.052, "increase", "PASS", 0),
        (0.019, "increase", "INCONCLUSIVE", 4),
        (-0.052, "decrease", "FAIL", 3),
        (0.052, "decrease", "PASS", 0),
        (-0.019, "decrease", "INCONCLUSIVE", 4),
    ],
)
def test_limit_judges_the_interval_by_direction(value, direction, outcome, code):
    expect(judge(comparison(cell(value)), limit(direction=direction)), outcome, code)


@pytest.mark.parametrize(
    ("measure", "value", "fields", "outcome", "code"),
    [
        ("level", 0.103, {"fail": 0.2}, "PASS", 0),
        ("level", 0.303, {"fail": 0.2}, "FAIL", 3),
        ("level", 0.201, {"fail": 0.2}, "INCONCLUSIVE", 4),
        ("level", 0.103, {"fail": 0.2, "direction": "decrease"}, "FAIL", 3),
        ("level", 0.303, {"fail": 0.2, "direction": "decrease"}, "PASS", 0),
        ("ratio", 1.2, {"fail": 1.5}, "PASS", 0),
        ("ratio", 2.0, {"fail": 1.5}, "FAIL", 3),
        ("ratio", 0.5, {"fail": 1.5}, "FAIL", 3),
        ("ratio", 0.5, {"fail": 1.5, "direction": "increase"}, "PASS", 0),
        ("ratio", 2.0, {"fail": 0.7, "direction": "decrease"}, "PASS", 0),
        ("ratio", 0.6, {"fail": 0.7, "direction": "decrease"}, "FAIL", 3),
        ("ratio", 1.5, {"fail": 1.5}, "INCONCLUSIVE", 4),
        ("cosine_similarity", 0.99, {"fail": 0.9}, "PASS", 0),
        ("cosine_similarity", 0.80, {"fail": 0.9}, "FAIL", 3),
        ("center_of_mass_shift", -0.1, {"fail": 0.05}, "FAIL", 3),
    ],
)
def test_limit_of_other_measures(measure, value, fields, outcome, code):
    compared = comparison(cell(value, measure=measure, replicates=()))
    expect(judge(compared, limit(measure=measure, **fields)), outcome, code)


@pytest.mark.parametrize("measure", ["js_distance", "wasserstein", "total_variation"])
@pytest.mark.parametrize(
    ("value", "outcome", "code"), [(0.05, "PASS", 0), (0.2, "FAIL", 3), (0.1, "INCONCLUSIVE", 4)]
)
def test_limit_of_a_distance_is_one_sided(measure, value, outcome, code):
    compared = comparison(distance(value, measure=measure))
    expect(judge(compared, limit(region="*", measure=measure, fail=0.1)), outcome, code)


def test_limit_of_a_distance_refuses_a_decrease():
    verdict = judge(comparison(distance()), limit(region="*", measure="js_distance", direction="decrease"))
    expect(verdict, "ERROR", 10)
    assert "cannot fall below 0" in verdict.sentence


@pytest.mark.parametrize(("value", "warned"), [(0.004, False), (0.009, True), (0.015, True)])
def test_limit_passes_with_a_warning_beyond_warn(value, warned):
    verdict = judge(comparison(cell(value)), limit(warn=0.01))
    expect(verdict, "PASS", 0)
    assert verdict.rules[0].warned is warned
    assert ("warn limit ±.01" in verdict.rules[0].sentence) is warned


def test_warning_says_whether_the_interval_crosses_the_warn_limit_or_lies_beyond_it():
    crossing, beyond = (judge(comparison(cell(v)), limit(warn=0.01)).rules[0] for v in (0.009, 0.015))
    assert "limit ±.02, warn limit ±.01, which the interval crosses" in crossing.sentence
    assert "limit ±.02, warn limit ±.01, beyond which the interval lies" in beyond.sentence


def test_limit_that_only_warns_is_called_a_warn_limit():
    warned, quiet = (judge(comparison(cell(v)), limit(fail=None, warn=0.01)).rules[0] for v in (0.052, 0.004))
    assert "within" not in warned.sentence
    assert "warn limit ±.01, beyond which the interval lies" in warned.sentence
    assert "within the warn limit: " in quiet.sentence


def test_limit_that_only_warns_never_fails():
    verdict = judge(comparison(cell()), limit(fail=None, warn=0.01))
    expect(verdict, "PASS", 0)
    assert verdict.rules[0].warned


def test_limit_without_limit_is_a_config_error():
    expect(judge(comparison(cell()), limit(fail=None)), "ERROR", 10)


@pytest.mark.parametrize("replicates", [(), FLOOR, FLOOR[:2]])
@pytest.mark.parametrize(("value", "outcome", "code"), [(0.052, "FAIL", 3), (0.01, "PASS", 0)])
def test_limit_is_not_changed_by_replicates(replicates, value, outcome, code):
    compared = comparison(cell(value, replicates=replicates), replicate_kinds=("seed",) * len(replicates))
    expect(judge(compared, limit()), outcome, code)


def test_limit_says_whether_retraining_explains_the_value():
    moved = judge(comparison(cell()), limit()).rules[0]
    assert moved.explained is False
    assert moved.sentence == (
        "the attention map moved towards 'corner', beyond the limit: share .051 → .103, shift +.052 "
        "[+.049, +.055], limit ±.02; harmless re-training moves it by .0000 ± .0017, "
        "so re-training does not explain it"
    )
    wide = judge(comparison(cell(replicates=(0.03, -0.04, 0.05, -0.02, 0.01))), limit()).rules[0]
    assert wide.explained is True
    assert wide.sentence.endswith(
        "so re-training alone could explain it, the limit lies inside the noise floor"
    )


def test_limit_to_one_side_asks_both_sides_whether_retraining_explains_it():
    found = judge(comparison(cell(-0.052)), limit(direction="increase")).rules[0]
    assert (found.outcome, found.explained) == (Outcome.PASS, False)


def test_limit_cannot_say_whether_weak_replicates_explain_the_value():
    assert judge(comparison(cell(), replicate_kinds=("tail",) * 5), limit()).rules[0].explained is None


def test_inconclusive_limit_names_the_probes_that_would_settle_it():
    # Half-width .003, distance to the limit .001: nine times as many probes.
    found = judge(comparison(cell(0.019)), limit()).rules[0]
    assert found.needed == "about 3,600 probes instead of 400"
    grouped = judge(comparison(cell(0.019, n_clusters=20)), limit()).rules[0]
    assert grouped.needed == "about 180 groups instead of 20"
    on_it = judge(comparison(cell(0.02)), limit()).rules[0]
    assert "more than 1,000,000 probes" in on_it.needed


# --- kind = excess ----------------------------------------------------------------------------


def test_excess_fails_when_the_test_rejects_above_the_effect_floor():
    verdict = judge(comparison(cell()), excess())
    expect(verdict, "FAIL", 3)
    found = verdict.rules[0]
    assert found.adjusted_pvalue < 0.001
    assert found.explained is False
    assert "by more than harmless re-training explains" in found.sentence


def test_excess_passes_when_the_interval_is_inside_the_margin():
    verdict = judge(comparison(cell(0.001)), excess())
    expect(verdict, "PASS", 0)
    assert verdict.rules[0].limit == 0.02
    assert verdict.rules[0].excess.interval[1] < 0.02


def test_excess_below_the_effect_floor_does_not_fail():
    small = cell(0.009)
    expect(judge(comparison(small), excess(within=0.05)), "PASS", 0)
    verdict = judge(comparison(small), excess(within=0.005))
    expect(verdict, "INCONCLUSIVE", 4)
    assert "effect floor" in verdict.rules[0].reason
    expect(judge(comparison(small), excess(within=0.005), effect_floor=0.002), "FAIL", 3)


@pytest.mark.parametrize("within", [0.05, 0.005])
def test_a_rejected_shift_is_never_said_to_be_harmless(within):
    found = judge(comparison(cell(0.009)), excess(within=within)).rules[0]
    assert found.explained is False
    assert found.sentence.startswith("the attention map moved towards 'corner', by more than harmless")
    allowed = "yet within what the policy allows" in found.sentence
    assert allowed is (found.outcome is Outcome.PASS)


def test_a_move_against_the_rules_direction_is_not_said_to_be_harmless():
    found = judge(comparison(cell(-0.052)), excess(direction="increase")).rules[0]
    assert (found.outcome, found.explained) == (Outcome.PASS, False)
    assert "by more than harmless re-training explains, yet within what the policy allows" in found.sentence


def test_a_harmless_move_is_told_by_the_rules_direction():
    found = judge(comparison(cell(0.001)), excess(direction="increase")).rules[0]
    assert "moved no further towards 'corner' than harmless re-training does" in found.sentence


@pytest.mark.parametrize(
    ("value", "replicates", "said"),
    [
        (0.02, (0.05, 0.051, 0.049, 0.05, 0.052), "but not as far as harmless re-training moves it"),
        (0.0, (0.05, 0.051, 0.049, 0.05, 0.052), "shift on 'corner' differs from that of harmless"),
    ],
)
def test_a_shift_smaller_than_the_replicates_is_told_as_such(value, replicates, said):
    found = judge(comparison(cell(value, replicates=replicates)), excess()).rules[0]
    assert found.outcome is Outcome.FAIL
    assert said in found.sentence
    assert "by more than harmless re-training explains" not in found.sentence


@pytest.mark.parametrize("value", [0.0, 0.0065, 0.009, 0.015, 0.052, -0.052])
@pytest.mark.parametrize("direction", ["both", "increase", "decrease"])
def test_every_rule_on_a_cell_tells_the_same_about_retraining(value, direction):
    others = [cell(0.0, region=f"r{i}") for i in range(9)]
    compared = comparison(cell(value), *others)
    rules = [limit(), limit(direction=direction), excess(direction=direction), excess(region="*")]
    told = {rule.explained for rule in judge(compared, *rules).rules if rule.region == "corner"}
    assert len(told) == 1


def test_limit_follows_holm_where_an_excess_rule_judges_the_same_cell():
    borderline = cell(0.0075)  # rejected alone, not among ten
    assert judge(comparison(borderline), limit()).rules[0].explained is False
    others = [cell(0.0, region=f"r{i}") for i in range(9)]
    both = judge(comparison(borderline, *others), limit(), excess(region="*")).rules
    assert both[0].explained is both[1].explained is True
    assert "could explain" in both[0].sentence


def test_excess_is_inconclusive_between_margin_and_rejection():
    wide = cell(0.01, replicates=(0.01, -0.01, 0.005, -0.006, 0.002))
    verdict = judge(comparison(wide), excess(within=0.012))
    expect(verdict, "INCONCLUSIVE", 4)
    assert verdict.rules[0].needed is not None


def test_excess_names_the_replicates_that_would_settle_it():
    # t(2) makes the interval of three replicates wide; more replicates shorten it.
    few = cell(0.0, replicates=(0.003, -0.003, 0.0))
    found = judge(comparison(few, replicate_kinds=("seed",) * 3), excess(within=0.009)).rules[0]
    assert (found.outcome, found.needed) == (Outcome.INCONCLUSIVE, "about 4 replicates instead of 3")
    noisy = cell(0.004, replicates=(0.01, -0.01, 0.005, -0.006, 0.002))
    assert "no number of replicates" in judge(comparison(noisy), excess(within=0.012)).rules[0].needed


@pytest.mark.parametrize(
    ("value", "direction", "outcome", "code"),
    [
        (0.052, "increase", "FAIL", 3),
        (-0.052, "increase", "PASS", 0),
        (-0.052, "decrease", "FAIL", 3),
        (0.052, "decrease", "PASS", 0),
    ],
)
def test_excess_judges_by_direction(value, direction, outcome, code):
    expect(judge(comparison(cell(value)), excess(direction=direction)), outcome, code)


def test_excess_within_in_seed_sd():
    sd = float(np.std(FLOOR, ddof=1))
    found = judge(comparison(cell(0.0)), excess(within="3 sd")).rules[0]
    assert found.outcome is Outcome.PASS
    assert math.isclose(found.limit, 3 * sd)
    expect(judge(comparison(cell(0.0)), excess(within="2 sd")), "INCONCLUSIVE", 4)


@pytest.mark.parametrize("within", [None, 0, -1, "3", "sd", "-1 sd", "3 km", math.inf])
def test_excess_refuses_an_unreadable_margin(within):
    verdict = judge(comparison(cell()), excess(within=within))
    expect(verdict, "ERROR", 10)
    assert '"3 sd"' in verdict.sentence


@pytest.mark.parametrize(
    ("value", "outcome", "code"),
    [(0.2, "FAIL", 3), (0.052, "PASS", 0), (0.01, "PASS", 0), (0.062, "INCONCLUSIVE", 4)],
)
def test_excess_of_a_distance_is_one_sided(value, outcome, code):
    rule = excess(region="*", measure="js_distance", within=0.025)
    expect(judge(comparison(distance(value)), rule), outcome, code)


def test_excess_of_a_distance_within_sd_is_on_the_log_scale():
    found = judge(comparison(distance(0.05)), excess(region="*", measure="js_distance", within="3 sd")).rules[
        0
    ]
    logs = np.log(distance().replicates)
    assert math.isclose(found.limit, np.exp(logs.mean()) * np.expm1(3 * logs.std(ddof=1)))


def test_excess_of_level_and_ratio():
    level = cell(0.103, measure="level", replicates=tuple(0.051 + s for s in FLOOR))
    expect(judge(comparison(level), excess(measure="level")), "FAIL", 3)
    ratio = cell(2.02, measure="ratio", replicates=tuple(1 + s / 0.051 for s in FLOOR))
    expect(judge(comparison(ratio), excess(measure="ratio", within=0.5)), "FAIL", 3)
    # 0.1 more of the share before is 0.005 of the content mass: below the effect floor.
    small = replace(ratio, value=1.15)
    expect(judge(comparison(small), excess(measure="ratio", within=0.5)), "PASS", 0)


def test_excess_applies_holm_over_the_excess_rules():
    borderline = cell(0.0125, replicates=(0.003, -0.003, 0.004, -0.004, 0.001))
    one = judge(comparison(borderline), excess(within=0.005)).rules[0]
    assert one.outcome is Outcome.FAIL
    others = tuple(replace(borderline, region=f"r{i}", value=0.0) for i in range(9))
    ten = judge(comparison(borderline, *others), excess(region="*", within=0.005))
    found = next(rule for rule in ten.rules if rule.region == "corner")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.adjusted_pvalue == pytest.approx(10 * one.adjusted_pvalue)
    assert "Holm over 10 tests" in found.sentence
    sd = one.excess.sd
    assert one.minimum_detectable_shift / sd == pytest.approx(4.15, rel=0.01)
    assert found.minimum_detectable_shift / sd == pytest.approx(7.7, rel=0.01)


def test_limit_rules_do_not_count_for_holm():
    verdict = judge(comparison(cell(0.0125)), excess(), limit(), limit(fail=0.5))
    alone = judge(comparison(cell(0.0125)), excess())
    assert verdict.rules[0].adjusted_pvalue == alone.rules[0].adjusted_pvalue


@pytest.mark.parametrize("kinds", [("tail",) * 5, ("numeric",) * 5, ("tail", "numeric") * 2 + ("tail",)])
def test_excess_is_never_decided_by_weak_replicates(kinds):
    for value in (0.052, 0.0):
        verdict = judge(comparison(cell(value), replicate_kinds=kinds), excess())
        expect(verdict, "INCONCLUSIVE", 4)
        assert "understate the spread" in verdict.rules[0].reason


def test_excess_leaves_weak_replicates_out_beside_strong_ones():
    mixed = cell(0.052, replicates=(*FLOOR, 0.0, 0.0))
    verdict = judge(
        comparison(mixed, replicate_kinds=("seed",) * 3 + ("release", "refresh") + ("tail",) * 2), excess()
    )
    expect(verdict, "FAIL", 3)
    assert verdict.rules[0].n_replicates == 5


@pytest.mark.parametrize("k", [0, 1, 2])
def test_excess_needs_three_replicates(k):
    verdict = judge(comparison(cell(replicates=FLOOR[:k]), replicate_kinds=("seed",) * k), excess())
    expect(verdict, "INCONCLUSIVE", 4)
    assert verdict.rules[0].needed == "5 replicates of kind seed"


def test_excess_without_spread_is_inconclusive():
    verdict = judge(comparison(cell(replicates=(0.001,) * 5)), excess())
    expect(verdict, "INCONCLUSIVE", 4)
    assert "do not differ" in verdict.rules[0].reason


def test_excess_of_an_unmoved_distance_passes():
    still = distance(0.0, 0.0, reason="no change at all")
    expect(judge(comparison(still), excess(region="*", measure="js_distance", within=0.02)), "PASS", 0)


# --- before any rule --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [limit(), excess()])
def test_identical_maps_with_other_weights_never_pass(rule):
    same = comparison(cell(0.0, 0.0), identical_maps=True, same_weights=False)
    verdict = judge(same, rule)
    expect(verdict, "INCONCLUSIVE", 4)
    assert "nothing this method can see changed" in verdict.sentence
    assert "gradient_rollout" in verdict.rules[0].needed


def test_identical_maps_with_other_weights_do_not_pass_by_level():
    level = cell(0.051, measure="level")
    same = comparison(level, identical_maps=True, same_weights=False)
    expect(judge(same, limit(measure="level", fail=0.2)), "INCONCLUSIVE", 4)
    expect(judge(same, limit(measure="level", fail=0.01)), "FAIL", 3)


def test_identical_maps_with_unknown_weights_do_not_pass():
    same = comparison(cell(0.0, 0.0), identical_maps=True, same_weights=None)
    expect(judge(same, limit()), "INCONCLUSIVE", 4)


@pytest.mark.parametrize("rule", [limit(), excess()])
def test_same_checkpoint_passes(rule):
    same = comparison(cell(0.0, 0.0, n_probes=3), identical_maps=True, same_weights=True)
    verdict = judge(same, rule)
    expect(verdict, "PASS", 0)
    assert "same checkpoint" in verdict.sentence


def test_identical_maps_say_nothing_about_the_data():
    both = comparison(cell(0.0, 0.0), cell(0.1, effect="data", replicates=()), identical_maps=True)
    expect(judge(both, limit(effect="data")), "FAIL", 3)


def test_identical_maps_on_one_probe_set_say_nothing_about_the_other():
    both = comparison(cell(0.0, 0.0), cell(0.1, effect="model_on_domain"), identical_maps=True)
    expect(judge(both, limit(effect="model_on_domain")), "FAIL", 3)
    still = comparison(cell(0.0, 0.0), cell(0.0, 0.0, effect="model_on_domain"), identical_maps=True)
    expect(judge(still, limit(effect="model_on_domain")), "INCONCLUSIVE", 4)


@pytest.mark.parametrize("rule", [limit(), excess()])
@pytest.mark.parametrize("fields", [{"n_probes": 19}, {"n_clusters": 7}])
def test_fewer_probes_than_the_minimum_are_inconclusive(rule, fields):
    for value in (0.0, 0.5):
        verdict = judge(comparison(cell(value, **fields)), rule)
        expect(verdict, "INCONCLUSIVE", 4)
        assert "fewer than" in verdict.rules[0].reason
        assert verdict.rules[0].needed.startswith("at least")


def test_minimum_of_probes_is_enough():
    expect(judge(comparison(cell(n_probes=20, n_clusters=8)), limit()), "FAIL", 3)


@pytest.mark.parametrize("rule", [limit(), excess()])
def test_region_missing_in_more_than_half_is_inconclusive(rule):
    verdict = judge(comparison(cell(n_probes=199, n_missing=201)), rule)
    expect(verdict, "INCONCLUSIVE", 4)
    assert verdict.rules[0].reason == "the region is missing in 201 of 400 probes"
    expect(judge(comparison(cell(n_probes=200, n_missing=200)), rule), "FAIL", 3)


@pytest.mark.parametrize("rule", [limit(), excess()])
def test_undefined_value_is_inconclusive_with_its_reason(rule):
    empty = cell(
        None, n_probes=0, n_missing=400, reason="the region is missing in every probe", replicates=()
    )
    verdict = judge(comparison(empty), rule)
    expect(verdict, "INCONCLUSIVE", 4)
    assert verdict.rules[0].reason == "the region is missing in every probe"
    assert "neither special tokens nor position 0 of a causal model" in str(verdict.rules[0].needed)


def test_undefined_interval_is_inconclusive():
    alone = cell(n_probes=1, interval=None, reason="one probe: no interval")
    verdict = judge(comparison(alone), limit(), min_probes=1)
    expect(verdict, "INCONCLUSIVE", 4)
    assert verdict.rules[0].reason == "one probe: no interval"


def test_nondeterminism_is_an_error_before_everything():
    verdict = judge(comparison(cell(), nondeterministic="r-0001 differs by 0.02"), limit())
    expect(verdict, "ERROR", 13)
    assert "r-0001 differs by 0.02" in verdict.sentence


@pytest.mark.parametrize("value", [0.0, 0.052])
def test_mismatched_settings_are_refused_or_capped(value):
    other = comparison(cell(value), mismatches=("dtype (float32, bfloat16)",))
    refused = judge(other, limit())
    expect(refused, "ERROR", 10)
    assert "dtype (float32, bfloat16)" in refused.sentence
    assert "--allow-mismatch" in refused.sentence
    capped = judge(other, limit(), allow=("mismatch",))
    expect(capped, "INCONCLUSIVE", 4)
    assert capped.allowed == ("mismatch",)
    assert "cannot be trusted" in capped.sentence


def test_other_alpha_than_the_comparison_is_refused():
    expect(judge(comparison(cell()), limit(), alpha=0.01), "ERROR", 10)


def test_no_rules_and_no_pairs_evaluate_nothing():
    for compared, rules in (
        (comparison(cell()), ()),
        (comparison(), (limit(),)),
        (comparison(cell(), n_probes=0), (limit(),)),
    ):
        with pytest.raises(NothingEvaluatedError) as caught:
            judge(compared, *rules)
        assert caught.value.exit_code == 5


# --- which cells a rule judges ----------------------------------------------------------------


def test_star_judges_every_region():
    verdict = judge(comparison(cell(), cell(0.0, region="rest"), distance()), limit(region="*"))
    expect(verdict, "FAIL", 3)
    assert [rule.region for rule in verdict.rules] == ["corner", "rest"]
    assert verdict.sentence.startswith("1 of 2 conditions failed; the attention map moved")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"region": "cornr"}, "did you mean 'corner'?"),
        ({"measure": "shfit"}, "did you mean 'shift'?"),
        ({"stream": "imput"}, "did you mean 'input'?"),
        ({"segment": "language=fr"}, "did you mean 'language=en'?"),
        ({"layer": 7}, "there is 3"),
        ({"measure": "js_distance"}, "use region = '*'"),
        ({"effect": "data"}, "there is model"),
    ],
)
def test_rule_without_a_cell_is_an_error_that_names_the_nearest(fields, named):
    cells = (cell(), cell(segment="language=en"), cell(layer=3), distance())
    verdict = judge(comparison(*cells), limit(**fields), limit())
    expect(verdict, "ERROR", 10)
    assert named in verdict.rules[0].sentence
    assert verdict.rules[1].outcome is Outcome.FAIL


def test_rule_picks_segment_layer_and_stream():
    cells = (
        cell(0.0),
        cell(0.1, segment="language=en"),
        cell(0.2, layer=3),
        cell(0.3, stream="image"),
    )
    for fields, values in (
        ({}, [0.0, 0.3]),
        ({"stream": "image"}, [0.3]),
        ({"segment": "language=en"}, [0.1]),
        ({"layer": 3}, [0.2]),
    ):
        assert [rule.value for rule in judge(comparison(*cells), limit(**fields)).rules] == values


def test_effect_defaults_to_model_and_else_to_data():
    data = cell(0.1, effect="data", replicates=())
    both = judge(comparison(cell(0.0), data), limit())
    assert [(rule.effect, rule.value) for rule in both.rules] == [("model", 0.0)]
    only = judge(comparison(data, kind="unpaired", same_weights=True), limit())
    expect(only, "FAIL", 3)
    assert only.rules[0].effect == "data"
    assert only.sentence.startswith("between the two probe sets the attention map moved towards 'corner'")


def test_interaction_that_other_probes_could_reverse_is_inconclusive():
    scattered = cell(0.06, effect="interaction", probe_variance=0.05**2)
    expect(judge(comparison(cell(0.0), scattered), excess(effect="interaction")), "INCONCLUSIVE", 4)


def test_interaction_is_judged_against_the_replicates_interactions():
    both = comparison(cell(0.0), cell(0.06, effect="interaction"))
    verdict = judge(both, excess(effect="interaction"))
    expect(verdict, "FAIL", 3)
    assert verdict.rules[0].effect == "interaction"


# --- the policy's verdict ---------------------------------------------------------------------


def test_worst_outcome_decides():
    cells = comparison(cell(0.0, region="a"), cell(0.019, region="b"), cell(region="c"))
    rules = {name: limit(region=name) for name in "abc"} | {"d": limit(region="nowhere")}
    for names, outcome, code in (
        ("a", "PASS", 0),
        ("ab", "INCONCLUSIVE", 4),
        ("abc", "FAIL", 3),
        ("abcd", "ERROR", 10),
    ):
        expect(judge(cells, *(rules[name] for name in names)), outcome, code)


def test_allowed_inconclusive_exits_0_and_is_recorded():
    cells = comparison(cell(0.019))
    verdict = judge(cells, limit(), allow=("inconclusive",))
    expect(verdict, "INCONCLUSIVE", 0)
    assert verdict.allowed == ("inconclusive",)
    failed = judge(comparison(cell()), limit(), allow=("inconclusive",))
    expect(failed, "FAIL", 3)
    assert failed.allowed == ()


def test_verdict_carries_everything_a_reader_checks():
    found = Confirmation("corner", "zero", 0.1, 0.9, 0.8, (0.7, 0.9), True, 400)
    run = RunRef("run-1", "models/base", "d", "w")
    compared = comparison(cell(n_clusters=40, n_missing=5), confirmations=(found,), before=run, after=run)
    verdict = judge(compared, excess())
    rule = verdict.rules[0]
    assert (rule.before, rule.after, rule.value) == (0.051, 0.103, 0.052)
    assert (rule.n_probes, rule.n_missing, rule.n_clusters, rule.n_replicates) == (400, 5, 40, 5)
    assert rule.floor == pytest.approx((np.mean(FLOOR), np.std(FLOOR, ddof=1)))
    assert rule.confirmation is found
    assert verdict.comparison_id == "cmp-0123456789ab"
    assert "relies" not in repr(verdict)


def test_gate_starts_without_heavy_libraries():
    code = (
        "import sys\n"
        "for name in ('torch', 'duckdb', 'pyarrow', 'polars', 'transformers', 'scipy.stats'):\n"
        "    sys.modules[name] = None\n"
        "import audit.gate, audit.compare, audit.calibrate\n"
        "from audit.records import Cell, Comparison, Policy, Rule\n"
        "c = Cell('shift', 'a', value=0.5, interval=(0.4, 0.6), n_probes=99, replicates=(0.0, 0.1, 0.2))\n"
        "rule = Rule('a', 'excess', within='3 sd')\n"
        "print(audit.gate.evaluate_gate(Comparison('paired', (c,), 0.05, 99), Policy((rule,))).status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in {"FAIL", "INCONCLUSIVE", "PASS"}


def test_replicates_of_one_model_judge_no_other():
    compared = comparison(cell(), other_model="BertModel and GPT2Model")
    verdict = judge(compared, excess())
    expect(verdict, "INCONCLUSIVE", 4)
    assert "replicates of one say nothing about the other" in verdict.sentence
    assert (verdict.rules[0].excess, verdict.rules[0].adjusted_pvalue) == (None, None)
    assert false_alarm_lines(compared, verdict) == []
    both = judge(compared, limit(), excess())
    expect(both, "FAIL", 3)
    assert "re-training" not in both.rules[0].sentence
    assert false_alarm_lines(comparison(cell()), judge(comparison(cell()), excess())) != []


def test_a_failed_excess_whose_interval_holds_0_says_what_each_tells():
    clause = "the interval counts other probes too, which could show none"
    scattered = judge(comparison(cell(probe_variance=2e-3)), excess())
    low, high = scattered.rules[0].excess.interval
    assert low < 0 < high
    expect(scattered, "FAIL", 3)
    assert clause in scattered.sentence
    firm = judge(comparison(cell()), excess())
    expect(firm, "FAIL", 3)
    assert clause not in firm.sentence


@pytest.mark.parametrize("rule", [limit(), excess(), limit(measure="ratio", fail=1.5)])
def test_a_region_that_is_all_of_the_content_never_passes(rule):
    given = {"before": 1.0, "after": 1 - 1e-8, "measure": rule.measure, "replicates": (0.0,) * 5}
    verdict = judge(comparison(cell(0.0, 0.0, size=1.0, **given)), rule)
    expect(verdict, "INCONCLUSIVE", 4)
    assert "all of the content in every probe" in verdict.sentence
    small = judge(comparison(cell(0.0, 0.0, size=0.1, **given)), rule)
    assert "all of the content" not in small.sentence


def test_the_level_of_a_region_that_is_all_of_the_content_is_judged():
    whole = cell(1.0, 0.0, size=1.0, before=1.0, after=1.0, measure="level")
    expect(judge(comparison(whole), limit(measure="level", fail=0.5)), "FAIL", 3)
