"""audit plan: sensitivity of the rules from stored runs, checked against the gate's own behaviour."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from audit.calibrate import replicate_power, replicate_test
from audit.config import load_config
from audit.errors import NothingEvaluatedError
from audit.gate import evaluate_gate
from audit.pipeline import plan_sensitivity
from audit.records import Cell, Comparison, Outcome, Policy, Rule
from audit.statistics.sensitivity import excess_chances, limit_chances, probes_for, replicates_for
from tests.integration.test_approvals import cli
from tests.synthetic import World, release

# --- the numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [4.5, 6.0, 9.0])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_replicates_for_is_the_smallest_number_with_the_power(shift, alpha):
    k = replicates_for(shift, alpha=alpha, power=0.9)
    assert k is not None
    assert replicate_power(shift, k, alpha=alpha) >= 0.9
    assert k == 3 or replicate_power(shift, k - 1, alpha=alpha) < 0.9


def test_replicates_for_finds_what_it_promises_in_simulated_audits():
    random, shift = np.random.default_rng(0), 5.0
    k = replicates_for(shift, alpha=0.05, power=0.9)
    found = [
        (replicate_test(shift + random.standard_normal(), random.standard_normal(k)).pvalue or 1) <= 0.05
        for _ in range(1500)
    ]
    assert 0.9 - 0.025 < np.mean(found) < 0.97


def test_probes_for_excludes_the_limit_with_the_power():
    random, sd, shift = np.random.default_rng(1), 0.1, 0.03
    n = probes_for(shift, sd, alpha=0.05, power=0.9)
    samples = shift + sd * random.standard_normal((4000, n))
    low = samples.mean(axis=1) - 1.6449 * samples.std(axis=1, ddof=1) / np.sqrt(n)
    assert np.mean(low > 0) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("k", "within", "published"), [(5, 3.0, 0.47), (5, "3 sd", 0.53), (10, 3.0, 0.29)])
def test_harmless_candidates_end_as_the_statistics_page_says(k, within, published):
    assert excess_chances(k, within, alpha=0.05).inconclusive == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize("direction", ["both", "increase"])
def test_excess_chances_are_those_of_the_gate(direction):
    random, sd, floor = np.random.default_rng(2), 0.004, 0.01
    rule = Rule("corner", "excess", within=0.012, direction=direction)
    ends = []
    for _ in range(600):
        values = sd * random.standard_normal(6)
        cell = Cell(
            "shift", "corner", value=values[0], interval=(values[0] - 1e-4, values[0] + 1e-4),
            n_probes=400, replicates=tuple(values[1:]), probe_variance=1e-6,
        )  # fmt: skip
        compared = Comparison("paired", (cell,), 0.05, 400, replicate_kinds=("seed",) * 5, same_weights=False)
        ends.append(evaluate_gate(compared, Policy((rule,), effect_floor=floor)).outcome)
    told = excess_chances(
        5, 0.012 / sd, alpha=0.05, effect_floor=floor / sd, probe_variance=1e-6 / sd**2,
        alternative="greater" if direction == "increase" else "two-sided",
    )  # fmt: skip
    for outcome, chance in (
        (Outcome.PASS, told.passes), (Outcome.FAIL, told.fails), (Outcome.INCONCLUSIVE, told.inconclusive),
    ):  # fmt: skip
        assert np.mean([end is outcome for end in ends]) == pytest.approx(chance, abs=0.06)


def test_limit_chances_add_up_and_follow_the_normal_law():
    chances = limit_chances(0.0, 0.01, 0.005, -0.02, 0.02)
    assert chances.passes + chances.inconclusive + chances.fails == pytest.approx(1)
    assert chances.passes == pytest.approx(0.8664, abs=1e-4)  # P(|Z| < 1.5)
    assert chances.fails == pytest.approx(0.0124, abs=1e-4)  # P(|Z| > 2.5)


# --- the plan of an audit ---------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_plan_reads_spread_and_tests_from_the_stored_runs(world):
    base, after, seeds = release(world)
    plan = plan_sensitivity(load_config(world.config(base, after, seeds)), shift=0.02)
    shifts = [world.store.share_table(run).values - world.store.share_table(base).values for run in seeds]
    columns = [column.region for column in world.store.share_table(base).columns]
    expected = dict(zip(columns, np.std([s.mean(axis=0) for s in shifts], axis=0, ddof=1), strict=True))
    assert plan.tests == len(columns)
    assert {one.region for one in plan.rules if one.kind == "excess"} == set(columns)
    for one in plan.rules:
        assert one.spread.seed_sd == pytest.approx(expected[one.region])
        assert (one.spread.replicates, one.spread.units) == (5, world.n)
        if one.kind == "excess":
            assert one.alpha == pytest.approx(0.05 / plan.tests)
            k = replicates_for(0.02 / one.spread.seed_sd, alpha=one.alpha, power=0.9)
            assert one.replicates_needed == k


def test_plan_says_when_no_number_of_replicates_suffices(world):
    base, after, seeds = release(world)
    plan = plan_sensitivity(load_config(world.config(base, after, seeds)), shift=0.0005)
    opening = next(one for one in plan.rules if one.kind == "excess" and one.region == "opening")
    assert opening.replicates_needed is None
    assert "no number of replicates" in str(opening.note)


def test_plan_without_stored_runs_speaks_in_seed_sd(world):
    config = world.config("run-000000000000", "run-000000000001")
    plan = plan_sensitivity(load_config(config))
    assert all(one.in_sd for one in plan.rules if one.kind == "excess")
    assert {one.region for one in plan.rules} >= {"opening", "ending", "rest"}
    assert "told in seed-SD" in plan.notes[0]
    five = next(one for one in plan.rules if one.kind == "excess")
    assert five.detectable is not None
    assert five.detectable > 4.1


def test_plan_without_replicates_counts_groups_as_groups(world):
    rows = [json.loads(line) for line in world.probes.read_text().splitlines()]
    grouped = [{**row, "group": f"t{i % 12}"} for i, row in enumerate(rows)]
    world.probes.write_text("\n".join(map(json.dumps, grouped)) + "\n")
    plan = plan_sensitivity(load_config(world.config(world.run("base", 0.25), "run-000000000001")))
    assert (plan.unit, {one.spread.units for one in plan.rules}) == ("group", {12})
    limited = next(one for one in plan.rules if one.kind == "limit")
    assert "at least 2 replicates" in str(limited.note)


def test_plan_on_the_command_line(world):
    base, after, seeds = release(world)
    config = world.config(base, after, seeds)
    done = cli("plan", config, "--shift", "0.02")
    assert done.returncode == 0, done.stderr
    assert "Harmless candidate" in done.stdout
    assert "INCONCLUSIVE for" in done.stdout
    found = json.loads(cli("plan", config, "--json").stdout)
    assert found["power"] == 0.9
    assert found["rules"][0]["probes_needed"] >= 20
    assert cli("plan", world.root / "nowhere.toml").returncode == 10
    assert cli("plan", config, "--power", "2").returncode == 2


def test_plan_without_rules_evaluates_nothing(world):
    config = world.config("run-0", "run-1", rules="")
    with pytest.raises(NothingEvaluatedError):
        plan_sensitivity(load_config(config))
    assert cli("plan", config).returncode == 5
