"""The planted-shift benchmark in small: real trainings, the product's maps, and rates that could be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import audit
from audit.demo.training import Schedule
from tests.benchmarks.shift import bases, text, vision
from tests.benchmarks.shift.bases import DIAL, HARMLESS, checkpoints_of
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.findings import Findings, findings_of
from tests.benchmarks.shift.maps import METHODS, Shares, as_checkpoint, cached_shares, shares_of
from tests.benchmarks.shift.truth import measure_truths

pytestmark = pytest.mark.timeout(600)  # thirty real trainings: some 15 s of one idle core

ROLLOUT = METHODS[0]
SEEDS = {"vision": 1, "text": 2}


def shorter(family: Family) -> Family:
    """Return the family with trainings that are just long enough."""
    if family.name == "text":
        return family
    base, shortcut = (replace(one, epochs=20) for one in (family.base_schedule, family.shortcut))
    return replace(family, base_schedule=base, shortcut=shortcut, tuning=replace(family.tuning, epochs=5))


FAMILIES = {"vision": shorter(vision.make_family()), "text": shorter(text.make_family())}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shift")


@pytest.fixture(scope="module")
def measured(cache: Path) -> dict[str, tuple[Shares, Findings, dict[str, float]]]:
    found = {}
    for name, family in FAMILIES.items():
        states = checkpoints_of(family, cache / name, SEEDS[name], everything=False)
        data, model = family.draw(1000 * (SEEDS[name] + 1)), family.new_model().eval()
        truths = measure_truths(model, data, states)
        checkpoint = as_checkpoint(model, family.processor)
        shares = cached_shares(
            cache / name / "rollout.npz",
            lambda family=family, data=data, checkpoint=checkpoint, states=states: shares_of(
                family, data, checkpoint, states, ROLLOUT
            ),
        )
        gammas = {one: truth.gamma for one, truth in truths.items()}
        found[name] = (shares, findings_of(family, shares, truths), gammas)
    return found


def test_shortcut_is_learnt_and_harmless_runs_do_not_know_it(measured):
    for _, _, gammas in measured.values():
        assert max(gammas[one] for one in HARMLESS) < 0.1
        assert gammas[DIAL[-1]] > 0.3
        assert gammas[DIAL[0]] < gammas[DIAL[2]] < gammas[DIAL[-1]]


def test_replicate_test_finds_what_the_shortcut_moves_where_it_moves(measured):
    for _, found, _ in measured.values():
        assert found.strong.sum() >= 2
        assert found.found["seed"][found.strong].mean() >= 0.9
        assert found.located[-1]
        assert found.dial[-1] > 0
        assert found.pointed > 0.3


def test_replicate_test_keeps_harmless_runs_that_a_paired_test_rejects(measured):
    splits = np.mean([found.splits for _, found, _ in measured.values()])
    naive = np.mean([found.naive for _, found, _ in measured.values()])
    assert splits < 0.05 + 4 * 0.0235 / np.sqrt(len(measured))  # the spread that simulated normal shifts have
    assert naive > 0.3


def test_benchmark_judges_the_reliance_that_the_product_computes(measured, cache):
    family, shares = FAMILIES["vision"], measured["vision"][0]
    states = checkpoints_of(family, cache / "vision", SEEDS["vision"], everything=False)
    model = family.new_model()
    model.load_state_dict(states["shortcut"])
    probes = family.draw(1000 * (SEEDS["vision"] + 1)).probes
    rows = audit.compute_reliance(as_checkpoint(model, family.processor), probes, family.regions)
    found = {(one.probe_id, one.region): one.share for one in rows}
    for region in (family.planted, "quadrant"):
        expected = [found[probe.id, region] for probe in probes]
        kept = shares.values[shares.row("shortcut"), :, shares.column(region)]
        np.testing.assert_allclose(kept, expected, atol=1e-6)


def test_cache_is_read_not_trained_again(measured, cache, monkeypatch):
    monkeypatch.setattr(bases, "train_base", None)
    states = checkpoints_of(FAMILIES["text"], cache / "text", SEEDS["text"], everything=False)
    middle = states[DIAL[1]]["classifier.weight"]
    ends = states[bases.ANCHOR]["classifier.weight"], states["shortcut"]["classifier.weight"]
    torch.testing.assert_close(middle, torch.lerp(*ends, bases.STRENGTHS[1]))
    assert not list(cache.rglob(".partial-*"))


def test_recipe_digest_follows_what_decides_the_weights():
    family = FAMILIES["text"]
    other = replace(family, tuning=Schedule(epochs=9, learning_rate=2e-3))
    assert bases.recipe_digest(family) != bases.recipe_digest(other)
    assert bases.recipe_digest(family) == bases.recipe_digest(replace(family, sizes={"a": "name"}))


def test_part_trainings_change_that_part_alone():
    family = FAMILIES["text"]
    model = family.new_model()
    for pattern in family.parts.values():
        with bases._only(model, pattern):
            free = {name for name, one in model.named_parameters() if one.requires_grad}
        assert free
        assert all(one.requires_grad for one in model.parameters())
        assert not any("query" in name or "key" in name or "embeddings" in name for name in free)
