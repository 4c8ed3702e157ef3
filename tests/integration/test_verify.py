"""audit verify: a flipped byte anywhere is found and named, and statistics are computed again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audit.config import load_config
from audit.errors import NothingEvaluatedError
from audit.pipeline import approve, freeze_config_floor, gate_runs, verify_store
from audit.pipeline.publish import probe_table
from audit.records import Outcome
from audit.store import Store
from tests.synthetic import World, release


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a small store with runs, a failing comparison, an approval and a log."""
    world = World(tmp_path_factory.mktemp("verify"), n=24)
    verdict = gate_runs(load_config(world.config(*release(world))))
    assert verdict.outcome is Outcome.FAIL
    given = {"reason": "wanted", "by": "bob", "expires": "2999-01-01"}
    approve(world.store, str(verdict.comparison_id), rule="limit shift opening", **given)
    return world


@pytest.fixture
def copy(audited: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(audited.root / "store", tmp_path / "store"))


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)


def test_an_intact_store_is_verified_and_computed_again(audited):
    found = verify_store(audited.store)
    assert (found.problems, found.notes) == ((), ())
    assert found.recomputed == tuple(audited.store.comparison_ids())
    assert set(found.checked) == {*audited.store.run_ids(), *audited.store.comparison_ids()}


def test_every_file_of_the_store_is_covered(copy):
    """Flip the middle byte of each file in turn: each time, that very file is named."""
    assert len(files_of(copy)) > 40
    for path in files_of(copy):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        problems = verify_store(Store(copy), recompute=False).problems
        assert any(str(path) in problem for problem in problems), path
        path.write_bytes(content)
    assert verify_store(Store(copy), recompute=False).problems == ()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_named(audited, data):
    path = data.draw(st.sampled_from(files_of(audited.root / "store")))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = content[place] ^ (1 << data.draw(st.integers(0, 7)))
    try:
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        problems = verify_store(Store(audited.root / "store"), recompute=False).problems
    finally:
        path.write_bytes(content)
    assert any(str(path) in problem for problem in problems), (path, place)
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    "pattern", ["runs/*/maps/*.parquet", "runs/*/manifest.json", "comparisons/*/cells.parquet"]
)
def test_a_missing_file_is_named(copy, pattern):
    path = next(copy.glob(pattern))
    path.unlink()
    assert any(
        path.parent.name in problem or str(path) in problem for problem in verify_store(Store(copy)).problems
    )


@pytest.mark.parametrize("pattern", ["runs/*", "comparisons/*", "approvals/*.json"])
def test_what_was_removed_without_a_trace_is_named(copy, pattern):
    path = next(path for path in sorted(copy.glob(pattern)) if path.name[0] != ".")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    name = path.name.removesuffix(".json")
    assert any(name in problem for problem in verify_store(Store(copy), recompute=False).problems)


def test_a_log_that_was_cut_short_is_seen_by_its_known_head(copy):
    store = Store(copy)
    head = store.log_head()
    assert verify_store(store, recompute=False, known_head=head).problems == ()
    sorted((copy / "log").glob("*.json"))[-1].unlink()
    problems = verify_store(Store(copy), recompute=False, known_head=head).problems
    assert any("newer entries were removed" in problem for problem in problems)


def test_a_verdict_that_the_log_does_not_tell_of_is_named(copy):
    entries = sorted((copy / "log").glob("*.json"))
    last = max(i for i, path in enumerate(entries) if json.loads(path.read_text())["kind"] == "verdict")
    for path in entries[last:]:
        path.unlink()
    problems = verify_store(Store(copy), recompute=False).problems
    assert any("its verdict is not in the log" in problem for problem in problems)


def test_forged_numbers_are_found_although_every_hash_fits(copy):
    store = Store(copy)
    name = store.comparison_ids()[0]
    comparison, verdict = store.comparison(name), store.verdict(name)
    cells = tuple(
        replace(cell, value=0.001) if (cell.measure, cell.region) == ("shift", "opening") else cell
        for cell in comparison.cells
    )
    forged = replace(comparison, cells=cells, settings={**comparison.settings, "seed": 7}, id=None)
    name = store.write_comparison(forged, verdict, probe_table(store, forged))
    assert store.verify(name) == []
    problems = verify_store(store, [name]).problems
    assert any("value of cell shift opening" in problem and "0.001" in problem for problem in problems)


def test_a_comparison_without_its_runs_is_noted_not_blamed(copy):
    store = Store(copy)
    name = store.comparison_ids()[0]
    lost = store.comparison(name).replicates[0].run_id
    shutil.rmtree(copy / "runs" / lost)
    found = verify_store(Store(copy), [name])
    assert found.recomputed == ()
    assert any(lost in note for note in found.notes)


def test_verify_on_the_command_line(copy, tmp_path):
    from tests.integration.test_approvals import cli

    done = cli("verify", "--store", copy, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
    path = next(copy.glob("comparisons/*/verdict.json"))
    path.write_bytes(path.read_bytes().replace(b"FAIL", b"PASS"))
    done = cli("verify", "--store", copy)
    assert done.returncode == 14
    assert str(path) in done.stdout
    assert cli("verify", "--store", tmp_path / "nowhere").returncode == 14


def test_one_deleted_entry_of_the_log_is_one_line(copy):
    for path in sorted((copy / "log").glob("*.json"))[:-1]:
        content = path.read_bytes()
        path.unlink()
        (problem,) = verify_store(Store(copy), recompute=False).problems
        assert problem == f"{copy / 'log'}: an entry is missing ({path.stem}); restore the log from a backup"
        path.write_bytes(content)
    assert verify_store(Store(copy), recompute=False).problems == ()


def test_a_log_that_is_gone_is_one_line(copy):
    for path in (copy / "log").glob("*.json"):
        path.unlink()
    (problem,) = verify_store(Store(copy), recompute=False).problems
    assert problem.startswith(f"{copy / 'log'} is missing or empty")


def test_a_log_that_was_cut_names_what_it_no_longer_records(copy):
    first, *rest = sorted((copy / "log").glob("*.json"))
    for path in rest:
        path.unlink()
    recorded = json.loads(first.read_text())["payload"]["run_id"]
    problems = verify_store(Store(copy), recompute=False).problems
    assert {problem.split()[0] for problem in problems} == {
        *Store(copy).run_ids(),
        *Store(copy).comparison_ids(),
    } - {recorded}
    assert all("is not in the log: cut after entry 00000000" in problem for problem in problems)


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no store")
    with pytest.raises(NothingEvaluatedError, match=r"is no store.*mend --store"):
        verify_store(Store(tmp_path))


def test_a_comparison_with_a_floor_of_stored_runs_is_computed_again_as_exactly(tmp_path):
    world = World(tmp_path, n=24)
    base, after, seeds = release(world)
    whole = gate_runs(load_config(world.config(base, after, seeds)))
    freeze_config_floor(load_config(world.config(base, after, seeds)), tmp_path / "floor.json")
    frozen = f'[[replicates]]\nfloor = "{tmp_path / "floor.json"}"\n'
    verdict = gate_runs(load_config(world.config(base, after, extra=frozen)))
    assert verdict.comparison_id != whole.comparison_id
    found = verify_store(world.store)
    assert (found.problems, found.notes) == ((), ())
    assert {verdict.comparison_id, whole.comparison_id} <= set(found.recomputed)
    stored = world.store.comparison(str(verdict.comparison_id))
    assert stored.settings["frozen"] == dict.fromkeys(seeds, base)


def test_a_number_forged_against_a_floor_is_found(tmp_path, monkeypatch):
    world = World(tmp_path, n=24)
    base, after, seeds = release(world)
    freeze_config_floor(load_config(world.config(base, after, seeds)), tmp_path / "floor.json")
    frozen = f'[[replicates]]\nfloor = "{tmp_path / "floor.json"}"\n'
    verdict = gate_runs(load_config(world.config(base, after, extra=frozen)))
    stored = world.store.comparison(str(verdict.comparison_id))
    cell = next(one for one in stored.cells if one.excess is not None)
    forged = replace(cell, replicates=(cell.replicates[0] + 1e-7, *cell.replicates[1:]))
    cells = tuple(forged if one is cell else one for one in stored.cells)
    monkeypatch.setattr(Store, "comparison", lambda self, name: replace(stored, cells=cells))
    (problem,) = verify_store(world.store, [str(verdict.comparison_id)]).problems
    assert "replicates of cell" in problem
