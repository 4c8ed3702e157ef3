"""The trend over scheduled audits: told when it is there, and rarely when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from audit.calibrate import e_process
from audit.config import load_config
from audit.pipeline import gate_runs, report_context, trends
from audit.pipeline.trend import ALARM
from audit.report import to_text
from tests.integration.test_approvals import cli
from tests.synthetic import World


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, list[str]]:
    """Return a world in which twelve releases each moved a little to the opening."""
    world = World(tmp_path_factory.mktemp("trend"), n=24)
    seeds = [world.run(f"seed-{i}", 0.25 + 0.002 * i) for i in range(-1, 2)]
    base = world.run("base", 0.25, noise=0.001)
    return world, audits(world, base, seeds, [0.25 + 0.004 * (i + 1) for i in range(12)])


def audits(
    world: World, base: str, seeds: list[str], openings: list[float], name: str = "release"
) -> list[str]:
    found = []
    for i, opening in enumerate(openings):
        run = world.run(f"{name}-{i}", opening, noise=0.001)
        verdict = gate_runs(load_config(world.config(base, run, seeds, fail=0.5)))
        found.append(str(verdict.comparison_id))
    return found


def test_slow_drift_is_told_before_any_limit_fails(drifting):
    world, comparisons = drifting
    found = {one.region: one for one in trends(world.store)}
    opening = found["opening"]
    assert opening.alarm in comparisons
    assert opening.highest >= ALARM
    assert opening.looks == tuple(comparisons)
    assert opening.levels[0] == pytest.approx(0.25, abs=0.002)
    assert opening.levels[-1] == pytest.approx(0.298, abs=0.002)
    assert "moves towards 'opening'" in opening.sentence
    assert "moves away from 'rest'" in found["rest"].sentence


def test_the_report_of_a_comparison_knows_only_the_history_up_to_it(drifting):
    world, comparisons = drifting
    told = []
    for name in (comparisons[0], comparisons[3], comparisons[-1]):
        compared, verdict = world.store.comparison(name), world.store.verdict(name)
        told.append(
            to_text(compared, verdict, context=report_context(world.store, compared, verdict), width=200)
        )
    assert "rend" not in told[0].split("Record")[1]
    assert "Trend over 4 audits: no region drifts" in told[1]
    assert "Trend: audit by audit the attention map moves towards 'opening'" in told[2]


def test_evidence_is_that_of_the_e_process_of_neighbouring_looks(drifting):
    world, comparisons = drifting
    opening = next(one for one in trends(world.store) if one.region == "opening")
    cells = [next(world.store.comparison(name).find("opening")) for name in comparisons]
    levels = [cells[0].before, *(cell.after for cell in cells)]
    scale = np.std(cells[0].replicates, ddof=1)
    assert opening.scale == pytest.approx(scale)
    assert opening.evidence == pytest.approx(e_process(np.diff(levels), scale=scale)[-1])


def test_another_model_on_the_same_probes_has_a_history_of_its_own(drifting):
    world, comparisons = drifting
    other = world.run("other-base", 0.4)
    audits(world, other, [], [0.4, 0.401, 0.399], name="other")
    found = {one.looks for one in trends(world.store) if one.region == "opening"}
    assert {len(looks) for looks in found} == {3, 12}
    assert tuple(comparisons) in found


def test_trend_on_the_command_line(drifting, tmp_path):
    world, _ = drifting
    done = cli("list", "--trend", "--store", world.root / "store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Trend: audit by audit")
    found = json.loads(cli("list", "--trend", "--store", world.root / "store", "--json").stdout)["trends"]
    assert found[0]["alarm"] is not None
    empty = World(tmp_path / "empty")
    empty.run("base", 0.25)
    assert (
        "No model was audited three times" in cli("list", "--trend", "--store", empty.root / "store").stdout
    )


# --- how often it errs ------------------------------------------------------------------------


@pytest.mark.parametrize("null", ["releases around one level", "a walk without direction"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_a_trend_is_told_for_at_most_one_in_twenty_harmless_histories(null, scale):
    random = np.random.default_rng(0)
    steps = random.standard_normal((2000, 25))
    levels = steps if null == "releases around one level" else np.cumsum(steps, axis=1)
    alarms = [bool((e_process(np.diff(one), scale=scale) >= ALARM).any()) for one in levels]
    assert np.mean(alarms) <= 0.05


def test_a_drift_of_one_seed_sd_an_audit_is_found_within_a_year_of_months():
    random = np.random.default_rng(1)
    found = []
    for _ in range(400):
        levels = np.arange(25) * 1.0 + 0.5 * random.standard_normal(25)
        found.append(bool((e_process(np.diff(levels), scale=1.0) >= ALARM).any()))
    assert np.mean(found) > 0.9


def test_one_large_step_is_no_trend():
    levels = np.concatenate([np.zeros(6), np.full(18, 10.0)])
    assert e_process(np.diff(levels), scale=1.0).max() < ALARM


def test_a_damaged_history_names_the_file(tmp_path: Path):
    world = World(tmp_path, n=24)
    names = audits(world, world.run("base", 0.25), [], [0.25, 0.251, 0.252])
    path = world.root / "store" / "comparisons" / names[1] / "comparison.json"
    path.write_bytes(path.read_bytes().replace(b"opening", b"openinG"))
    done = cli("list", "--trend", "--store", world.root / "store")
    assert (done.returncode, done.stderr.count("\n")) == (14, 1)
    assert str(path) in done.stderr
