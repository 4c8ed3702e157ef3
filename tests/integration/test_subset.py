"""The statistics of a selection: what the dashboard shows for a filter equals an audit of those probes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from audit.errors import NothingEvaluatedError
from audit.pipeline import compare_runs, compare_subset
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
