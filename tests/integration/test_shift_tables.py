"""The planted-shift benchmark's statistics and tables, on shifts whose answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import audit
from audit.records import Outcome
from tests.benchmarks.shift import bases, rates
from tests.benchmarks.shift.collect import choose
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.findings import findings_of
from tests.benchmarks.shift.maps import Shares
from tests.benchmarks.shift.page import Results, to_page, write_rates
from tests.benchmarks.shift.summary import missed_goals, summarise
from tests.benchmarks.shift.truth import Truth, share_of

CELLS = ("left", "right", "planted")
PROBES = 40
SEED_SD, PROBE_SD = 0.004, 0.001


# --- rates --------------------------------------------------------------------------------------


def test_rejections_are_those_of_the_replicate_test():
    rng = np.random.default_rng(0)
    for k in (2, 3, 5, 9):
        candidates, replicates = rng.normal(size=(50, 4)) * 3, rng.normal(size=(50, k))
        expected = [
            [audit.replicate_test(x, s).pvalue <= 0.05 for x in row]
            for row, s in zip(candidates, replicates, strict=True)
        ]
        found = rates.rejections(candidates, replicates)
        assert found.tolist() == expected
        assert 0.05 < found.mean() < 0.95


def test_replicates_without_spread_reject_nothing():
    assert not rates.rejections([5.0], [1.0, 1.0, 1.0]).any()


def test_split_rate_is_the_mean_over_every_choice_of_replicates():
    shifts = np.random.default_rng(1).standard_t(2, size=8)
    slow = [
        audit.replicate_test(shifts[i], shifts[list(chosen)]).pvalue <= 0.05
        for chosen in combinations(range(8), 3)
        for i in range(8)
        if i not in chosen
    ]
    assert rates.split_rate(shifts, k=3) == pytest.approx(np.mean(slow))
    assert rates.plain_rate([0.0, 1.0, 0.5, 40.0, 0.4], k=3) == 0.5


def test_split_rate_of_normal_shifts_is_nominal_and_its_interval_is_narrow():
    harmless = np.random.default_rng(2).normal(size=(150, 13))
    splits = [rates.split_rate(one) for one in harmless]
    assert np.mean(splits) == pytest.approx(0.05, abs=4 * 0.0235 / np.sqrt(150))
    assert np.std([rates.plain_rate(one) for one in harmless]) > 3 * np.std(splits)
    assert rates.over_bases(splits[:20]).width < 0.05


def test_paired_test_rejects_harmless_runs_that_the_replicate_test_keeps():
    rng = np.random.default_rng(3)
    runs = rng.normal(0, 1, (13, 1)) + rng.normal(0, 0.1, (13, PROBES))
    assert rates.naive_rate(runs) > 0.8
    assert rates.naive_rate(rng.normal(0, 1, (13, PROBES))) < 0.15
    assert rates.naive_rate(np.ones((3, PROBES))) == 0.0


def test_frozen_limit_is_exceeded_by_a_twentieth_of_the_harmless_runs():
    assert rates.frozen_limit(np.concatenate([np.arange(101), -np.arange(101)])) == pytest.approx(95, abs=0.1)


def test_interval_over_bases_resamples_bases_not_their_values():
    rate = rates.pooled([[1.0] * 50, [0.0] * 50])
    assert (rate.value, rate.low, rate.high, rate.bases) == (0.5, 0.0, 1.0, 2)
    assert rates.pooled([[1.0, 0.0], []]).bases == 1
    with pytest.raises(ValueError, match="at least one value"):
        rates.pooled([[], []])


def test_causal_share_counts_only_evidence_that_speaks_for_the_class():
    assert share_of(3.0, 1.0) == 0.25
    assert share_of(3.0, -1.0) == 0.0
    assert np.isnan(share_of(-1.0, 0.0))


# --- findings and tables ------------------------------------------------------------------------


def family() -> Family:
    return Family(
        name="made up",
        new_model=lambda: None,
        processor=None,
        draw=lambda seed: None,  # type: ignore[arg-type, return-value]
        regions=(),
        planted="planted",
        decoy="left",
        cells=CELLS,
        parts={"head-only": "", "value-only": ""},
        base_schedule=None,  # type: ignore[arg-type]
        tuning=None,  # type: ignore[arg-type]
        shortcut=None,  # type: ignore[arg-type]
        description={},
        sizes={"1 patch": "planted"},
    )


def planted_shifts(names: tuple[str, ...], rng: np.random.Generator) -> dict[str, float]:
    """Return the planted region's shifts: a dial that rises, late checkpoints that hardly differ."""
    shifts = {name: float(rng.normal(0, SEED_SD)) for name in names} | {bases.BASE: 0.0}
    shifts |= {name: 0.1 * size for name, size in zip(bases.DIAL, bases.STRENGTHS, strict=True)}
    end = shifts[bases.LATE[-1]]
    return shifts | {name: end + float(rng.normal(0, SEED_SD / 1000)) for name in bases.LATE[:-1]}


def made_up(seed: int) -> tuple[Shares, dict[str, Truth]]:
    rng = np.random.default_rng(seed)
    names = (bases.BASE, *bases.HARMLESS, *bases.DIAL, *bases.LATE[:-1], *bases.REFRESHED)
    names += ("head-only", "value-only", bases.LABEL_NOISE, bases.SINK_DRIFT)
    values = np.empty((len(names), PROBES, len(CELLS)))
    probes, shifts = rng.normal(0, 0.01, PROBES), planted_shifts(names, rng)
    for i, name in enumerate(names):
        planted = 0.2 + shifts[name] + probes + rng.normal(0, PROBE_SD, PROBES)
        left = 0.3 + rng.normal(0, SEED_SD) + rng.normal(0, PROBE_SD, PROBES)
        values[i] = np.stack([left, 1 - left - planted, planted], axis=1)
    gammas = dict.fromkeys(names, 0.0) | dict(zip(bases.DIAL, bases.STRENGTHS, strict=True))
    gammas["value-only"] = 0.5
    truths = {name: Truth(gamma, {"usual": 0.9 - 0.1 * gamma}) for name, gamma in gammas.items()}
    return Shares(names, CELLS, values, np.ones(len(names)), np.full(PROBES, 16)), truths


@pytest.fixture(scope="module")
def summary():
    found = [findings_of(family(), *made_up(seed), gate=seed < 4) for seed in range(20)]
    return summarise("rollout", "made up", found, frozen=found)


def test_findings_tell_nulls_from_the_dial(summary):
    assert summary.false_alarms["seed"].value == pytest.approx(0.05, abs=0.022)
    assert summary.false_alarms["seed"].width < 0.05
    assert summary.false_alarms["paired"].value > 0.5
    assert summary.power["seed"].value > 0.97
    assert (summary.located.value, summary.pointed, summary.within) == (1.0, 1.0, pytest.approx(1.0))
    assert summary.correlation > 0.96
    assert not [goal for goal in missed_goals(summary) if not goal.startswith("false alarms")]


def test_findings_know_that_a_tail_understates_the_spread(summary):
    assert summary.false_alarms["tail"].value > 0.9
    assert summary.power["tail"].value == 1.0
    assert summary.false_alarms["release"].value < 0.12
    assert summary.false_alarms["limit"].value == pytest.approx(0.05, abs=0.01)


def test_findings_count_what_a_part_hides(summary):
    assert summary.parts["value-only"].missed.value > 0.8
    assert summary.parts["head-only"].missed is None
    assert summary.parts["value-only"].delta == pytest.approx(0.5)


def test_findings_compare_the_first_alarm_with_accuracy():
    shares, truths = made_up(0)
    assert findings_of(family(), shares, truths, gate=False).early
    steady = {name: Truth(one.gamma, {"usual": 0.9}) for name, one in truths.items()}
    quiet = Shares(shares.checkpoints, CELLS, shares.values.copy(), shares.pointed, shares.lengths)
    quiet.values[shares.rows(bases.DIAL)] = quiet.values[shares.row(bases.HARMLESS[0])]
    assert not findings_of(family(), quiet, steady, gate=False).early


def test_gate_fails_the_shortcut_and_hardly_a_harmless_run(summary):
    assert summary.gate_power.value > 0.9
    assert summary.gate.value < 0.05
    found = findings_of(family(), *made_up(1))
    assert set(found.gate) <= {Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL}


def test_page_and_rates_hold_the_measured_numbers(summary, tmp_path):
    results = Results(
        "2026, a machine", [summary], [summary], [summary], {"made up": 7}, "rollout", "rollout"
    )
    page, seed = to_page(results), summary.false_alarms["seed"]
    assert f"| {seed.value:.3f} [{seed.low:.3f}, {seed.high:.3f}] |" in page
    assert "- rollout, made up: " in page
    assert "Scored bases: 20 made up; " in page
    assert "7 made up" in page
    lines = page.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| --- "))
    assert lines[header - 1].count("|") == lines[header].count("|") == lines[header + 1].count("|")
    write_rates([summary], tmp_path / "rates.json", "2026")
    kept = {one["floor"]: one for one in json.loads((tmp_path / "rates.json").read_text())["rates"]}
    assert kept["seed"]["rate"] == pytest.approx(seed.value, abs=1e-4)
    assert set(kept) == {"seed", "release", "refresh"}


def test_best_method_misses_fewest_goals_on_most_bases(summary):
    worse = replace(summary, method="worse", correlation=0.5)
    lucky = replace(summary, method="lucky", bases=3, located=rates.Rate(1.0, 1.0, 1.0, 3))
    assert choose([worse, summary, lucky]) == "rollout"
    assert [goal for goal in missed_goals(worse) if "correlation" in goal] == ["correlation 0.50"]


def test_rates_of_too_few_bases_are_not_written(tmp_path):
    found = [findings_of(family(), *made_up(seed), gate=False) for seed in range(3)]
    write_rates([summarise("rollout", "both", found)], tmp_path / "rates.json", "2026")
    assert not (tmp_path / "rates.json").exists()
