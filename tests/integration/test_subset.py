"""The statistics of a selection: what the dashboard shows for a filter equals an audit of those probes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from audit.errors import ConfigError, NothingEvaluatedError
from audit.pipeline import compare_runs, compare_subset, subset_crossing
from audit.pipeline.compare import Statistics
from audit.pipeline.publish import publish
from audit.records import Comparison
from tests.synthetic import World, release

STATISTICS = Statistics(resamples=199)


@pytest.fixture
def compared(tmp_path: Path) -> tuple[World, Comparison]:
    world = World(tmp_path)
    base, after, seeds = release(world)
    found = compare_runs(base, after, replicates=seeds, store=world.store, statistics=STATISTICS)
    return world, world.store.comparison(publish(world.store, found, None))


def cells_of(cells, measure="shift"):
    return {(c.region, c.layer): c for c in cells if c.measure == measure and c.segment is None}


def test_one_replicate_is_not_taken_for_two(tmp_path):
    world = World(tmp_path)
    base, after, seeds = release(world)
    with pytest.raises(ConfigError, match="equal weights, so that they are no two re-trainings"):
        compare_runs(base, after, replicates=[*seeds, seeds[0]], store=world.store, statistics=STATISTICS)


def test_a_selection_is_compared_with_its_own_probes_and_replicates(compared):
    world, comparison = compared
    ids = [f"p-{i:03d}" for i in range(0, 40, 2)]
    found = cells_of(compare_subset(world.store, comparison, ids, statistics=STATISTICS))
    tables = [world.store.share_table(ref.run_id) for ref in (comparison.before, comparison.after)]
    for i, column in enumerate(tables[0].columns):
        shifts = (tables[1].values - tables[0].values)[::2, i]
        cell = found[column.region, None]
        assert cell.value == pytest.approx(shifts.mean())
        assert (cell.n_probes, len(cell.replicates)) == (20, 5)
        assert cell.effect_size == pytest.approx(shifts.mean() / shifts.std(ddof=1))


def test_all_probes_give_the_stored_cells(compared):
    world, comparison = compared
    ids = world.store.share_table(comparison.before.run_id).probe_ids
    found = compare_subset(world.store, comparison, ids, statistics=STATISTICS)
    stored = [cell for cell in comparison.cells if cell.measure in ("shift", "level", "ratio")]
    assert list(found) == stored


def test_cells_carry_the_regions_size_so_that_lift_can_be_told(compared):
    _, comparison = compared
    opening = next(comparison.find("opening"))
    assert opening.size == pytest.approx(0.25)  # two of eight positions
    assert opening.after / opening.size > 1.1
    assert opening.adjusted_pvalue is not None
    assert opening.wilcoxon_pvalue is not None


@pytest.mark.parametrize("ids", [[], ["no-such-probe"]])
def test_an_empty_selection_is_refused(compared, ids):
    world, comparison = compared
    with pytest.raises(NothingEvaluatedError, match="holds no probe"):
        compare_subset(world.store, comparison, ids, statistics=STATISTICS)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_run_that_is_not_at_hand_is_named_and_never_replaced_by_another(compared, side):
    world, comparison = compared
    lost = getattr(comparison, side).run_id
    shutil.rmtree(world.root / "store" / "runs" / lost)
    with pytest.raises(NothingEvaluatedError, match=f"the run {lost} {side} is not in this store"):
        compare_subset(world.store, comparison, ["p-000"], statistics=STATISTICS)


def test_replicates_that_are_gone_are_left_out(compared):
    world, comparison = compared
    shutil.rmtree(world.root / "store" / "runs" / comparison.replicates[0].run_id)
    found = cells_of(
        compare_subset(world.store, comparison, [f"p-{i:03d}" for i in range(20)], statistics=STATISTICS)
    )
    assert len(found["opening", None].replicates) == 4


def test_two_probe_sets_are_selected_on_both_sides(tmp_path):
    world = World(tmp_path)
    before = world.run("base", 0.25)
    text = world.probes.read_text().replace("one two", "uno due").replace('"p-', '"q-')
    world.probes.write_text(text)
    after = world.run("base", 0.35)
    found = compare_runs(before, after, store=world.store, paired=False, statistics=STATISTICS)
    measures = {cell.measure for cell in found.cells}
    assert measures >= {"shift", "ks", "energy_distance", "mmd"}
    assert all(cell.effect == "data" for cell in found.cells)
    ks = next(found.find("opening", "ks"))
    assert (ks.value, ks.pvalue) == (pytest.approx(1.0), pytest.approx(1 / 200))
    comparison = replace(found, id="cmp-000000000000")
    ids = [f"{side}-{i:03d}" for side in "pq" for i in range(10)]
    chosen = cells_of(compare_subset(world.store, comparison, ids, statistics=STATISTICS))
    values = [world.store.share_table(run).values[:10] for run in (before, after)]
    shift = np.mean(values[1], axis=0) - np.mean(values[0], axis=0)
    columns = [column.region for column in world.store.share_table(before).columns]
    assert chosen["opening", None].value == pytest.approx(shift[columns.index("opening")])
    with pytest.raises(NothingEvaluatedError, match="on one of the two probe sets"):
        compare_subset(world.store, comparison, ["p-000"], statistics=STATISTICS)


@pytest.fixture
def crossed(tmp_path: Path) -> tuple[World, Comparison]:
    """Return a 2×2 of which the second probe set has other texts."""
    from audit.pipeline.runs import read_run

    world = World(tmp_path)
    base, after, seeds = release(world)
    kept = world.probes.read_text()
    world.probes.write_text(kept.replace("one two", "new two"))
    domain = [world.run(name, share) for name, share in (("base", 0.27), ("release-1", 0.36))]
    domain += [world.run(f"seed-{i}", 0.27 + 0.001 * i) for i in range(-2, 3)]
    world.probes.write_text(kept)
    read = [read_run(world.store, name) for name in domain]
    corners = (read[0], read[1], read[2:])
    found = compare_runs(
        base, after, replicates=seeds, domain=corners, store=world.store, statistics=STATISTICS
    )
    return world, world.store.comparison(publish(world.store, found, None))


def test_all_probes_of_both_sets_give_the_stored_2x2(crossed):
    world, comparison = crossed
    ids = [list(world.store.share_table(run).probe_ids) for run in _domain_pair(comparison)]
    found = subset_crossing(world.store, comparison, *ids, statistics=STATISTICS)
    stored = {_key(cell): cell for cell in comparison.cells}
    effects = {cell.effect for cell in found}
    assert effects == {"model", "data", "model_on_domain", "interaction"}
    for cell in found:
        whole = stored[_key(cell)]
        assert cell.value == pytest.approx(whole.value, abs=1e-12)
        assert cell.interval == pytest.approx(whole.interval, abs=1e-9)
        assert (cell.n_probes, cell.n_missing) == (whole.n_probes, whole.n_missing)


def test_a_selection_of_a_2x2_counts_its_own_probes_on_each_side(crossed):
    world, comparison = crossed
    one, two = ([f"p-{i:03d}" for i in range(0, 40, step)] for step in (2, 4))
    found = subset_crossing(world.store, comparison, one, two, statistics=STATISTICS)
    by_effect = {c.effect: c for c in found if c.region == "opening" and c.measure == "shift"
                 and c.layer is None and c.segment is None}  # fmt: skip
    assert (by_effect["model"].n_probes, by_effect["model_on_domain"].n_probes) == (20, 10)
    tables = [
        world.store.share_table(run).values[::step, 0]
        for run, step in zip(
            (*_runs(comparison), *comparison.settings["domain"][:2]), (2, 2, 4, 4), strict=True
        )
    ]
    moved = [tables[1] - tables[0], tables[3] - tables[2]]
    column = next(
        i
        for i, c in enumerate(world.store.share_table(_runs(comparison)[0]).columns)
        if c.region == "opening"
    )
    assert column == 0
    assert by_effect["model_on_domain"].value == pytest.approx(moved[1].mean())
    assert by_effect["interaction"].value == pytest.approx(moved[1].mean() - moved[0].mean())


def test_a_2x2_whose_second_runs_are_gone_says_so(crossed):
    world, comparison = crossed
    shutil.rmtree(world.store.root / "runs" / comparison.settings["domain"][0])
    with pytest.raises(NothingEvaluatedError, match="second probe set"):
        subset_crossing(world.store, comparison, ["p-000"], ["p-000"], statistics=STATISTICS)
    with pytest.raises(NothingEvaluatedError, match="no probe"):
        subset_crossing(world.store, comparison, ["gone"], ["p-000"], statistics=STATISTICS)


def _runs(comparison: Comparison) -> tuple[str, str]:
    assert comparison.before is not None
    assert comparison.after is not None
    return comparison.before.run_id, comparison.after.run_id


def _domain_pair(comparison: Comparison) -> tuple[str, str]:
    return _runs(comparison)[0], str(comparison.settings["domain"][0])


def _key(cell):
    return cell.measure, cell.region, cell.stream, cell.layer, cell.effect, cell.segment
