"""Every measure of whole maps is computed, by layer, segment and group, and may be gated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from audit import metrics
from audit.config import load_config
from audit.pipeline import gate_runs
from audit.pipeline.compare import Statistics, compare_runs
from audit.pipeline.map_measures import GRID, MEASURES, map_measures
from audit.records import Column, Comparison, Map, Outcome, Positions
from tests.synthetic import World, release

RULE = '[[gate.rules]]\nregion = "*"\nkind = "limit"\nmeasure = "{measure}"\nfail = 0.5\n'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("measures"))


@pytest.fixture(scope="module")
def released(world: World) -> tuple[str, str, list[str]]:
    return release(world)


@pytest.fixture(scope="module")
def compared(world: World, released: tuple[str, str, list[str]]) -> Comparison:
    before, after, seeds = released
    statistics = Statistics(resamples=199, measures=MEASURES)
    return compare_runs(before, after, replicates=seeds, store=world.store, statistics=statistics)


def weights(world: World, run_id: str) -> np.ndarray:
    return np.array([one.weights for one in world.store.iter_maps(run_id)], dtype=np.float64)


def test_every_measure_has_cells_for_the_stack_each_layer_and_each_segment(compared):
    for measure in set(MEASURES) - {GRID}:  # these maps are no patch grids
        cells = [cell for cell in compared.cells if cell.measure == measure]
        assert {(cell.layer, cell.segment) for cell in cells} == {
            (None, None), (0, None), (None, "language=de"), (None, "language=en"),
        }, measure  # fmt: skip
        assert all(cell.value is not None and len(cell.replicates) == 5 for cell in cells), measure
        assert [cell.n_probes for cell in cells if cell.segment] == [20, 20]
    assert not [cell for cell in compared.cells if cell.measure == GRID]


def test_values_are_those_of_the_measures_of_each_pair(world, released, compared):
    before, after = weights(world, released[0]), weights(world, released[1])
    german = np.arange(len(before)) % 2 == 0
    for measure in ("hellinger", "energy_distance", "cosine_similarity"):
        expected = getattr(metrics, measure)(before, after)
        assert next(compared.find("*", measure)).value == pytest.approx(expected.mean(), rel=1e-5)
        segment = next(compared.find("*", measure, segment="language=de"))
        assert segment.value == pytest.approx(expected[german].mean(), rel=1e-5)
    centre = next(compared.find("*", "center_of_mass_shift"))
    assert centre.value == pytest.approx(metrics.center_of_mass_shift(before, after).mean(), abs=1e-6)
    entropy = next(compared.find("*", "entropy_change"))
    assert entropy.value == pytest.approx(np.mean(metrics.entropy(after) - metrics.entropy(before)), abs=1e-6)


def test_changes_have_the_tests_of_shifts_and_distances_have_none(compared):
    centre, js = (next(compared.find("*", name)) for name in ("center_of_mass_shift", "js_distance"))
    assert centre.pvalue < 0.05
    assert None not in (centre.wilcoxon_pvalue, centre.effect_size, centre.excess)
    assert (js.pvalue, js.wilcoxon_pvalue) == (None, None)


@pytest.mark.parametrize("measure", ["kl_divergence", "top_k_overlap", "sink_change"])
def test_a_rule_names_its_measure_and_nothing_else_is_needed(world, released, measure):
    before, after, _ = released
    verdict = gate_runs(load_config(world.config(before, after, rules=RULE.format(measure=measure))))
    assert verdict.outcome is not Outcome.ERROR
    assert verdict.rules[0].value is not None


def test_constant_maps_have_no_rank_correlation_and_never_pass(tmp_path: Path):
    flat = World(tmp_path)
    one, two = (flat.run(name, 0.25, noise=0.0) for name in ("flat-1", "flat-2"))
    for measure in ("spearman", "js_distance"):
        verdict = gate_runs(load_config(flat.config(one, two, rules=RULE.format(measure=measure))))
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "NaN" not in verdict.sentence
    comparison = compare_runs(one, two, store=flat.store, statistics=Statistics(measures=("spearman",)))
    cell = next(comparison.find("*", "spearman"))
    assert (cell.value, cell.n_missing, cell.reason) == (None, 40, "the measure is undefined for every probe")


def generated(*special: list[bool]) -> SimpleNamespace:
    """Return a run whose probes have two equal source positions and a prefix with these special tokens."""
    source = Positions("token", np.zeros(2, np.bool_), np.array([0, 2]), np.array([1, 3]))
    maps = []
    for i, flags in enumerate(special):
        weights = np.full(len(flags), 1 / len(flags), np.float32)
        prefix = Positions("token", np.array(flags), np.full(len(flags), -1), np.full(len(flags), -1))
        maps += [
            Map(f"p{i}", np.array([0.5, 0.5], np.float32), source, stream="source"),
            Map(f"p{i}", weights, prefix, stream="prefix"),
        ]
    return SimpleNamespace(maps=lambda: (one for one in maps), ref=SimpleNamespace(run_id="run"))


def test_prefixes_of_other_tokens_are_left_out_and_counted():
    before = generated([True, False, False], [True, False])
    after = generated([True, False, True], [True, False])
    found = map_measures([before, after], ["js_distance", "entropy_change"])
    (rows,) = found.paired
    assert rows["js_distance", Column("*", "source")].tolist() == [0, 0]
    np.testing.assert_array_equal(rows["js_distance", Column("*", "prefix")], [np.nan, 0])
    assert found.alignment == (
        "maps of the prefix are left out where the runs generated other tokens (probes: 1)",
    )


def test_default_measures_leave_the_id_of_a_comparison_as_it_was():
    assert "measures" not in Statistics().settings()
    assert Statistics(measures=("hellinger",)).settings()["measures"] == ["hellinger"]
