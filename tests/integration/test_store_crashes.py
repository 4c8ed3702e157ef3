"""Writers that are killed, and writers that work on the same run at once, as real processes."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from audit.errors import StoreError
from audit.store import Store
from tests.store_records import (
    PROBE_IDS,
    make_captured,
    make_comparison,
    make_spec,
    make_verdict,
    measure,
    probe_columns,
    write_run,
    write_shard,
)

ROOT = Path(__file__).parents[2]

STOPS_INSIDE_A_SHARD = """
import sys
from audit.store import Store
from tests.store_records import *
writer = Store(sys.argv[1]).begin_run(make_spec(), 3)
write_shard(writer, 0)
def endless():
    item = make_captured(PROBE_IDS[2])
    for i in range(10**9):
        if i == 5000:
            print("writing", flush=True)
        yield item
writer.write_shard(1, endless(), [])
"""

STOPS_BEFORE_THE_MANIFEST = """
import sys, time
import audit.store._writer as module
from audit.store import Store
from tests.store_records import *
def halt(*args, **named):
    print("writing", flush=True)
    time.sleep(1000)
writer = Store(sys.argv[1]).begin_run(make_spec(), 3)
for index in range(3):
    write_shard(writer, index)
module.provenance = halt
writer.publish(counts={"truncated": 0}, diagnostics={"entropy": 0.5})
"""

STOPS_BEFORE_THE_LOG = STOPS_BEFORE_THE_MANIFEST.replace("module.provenance", "module.log_manifest")


def kill_while_writing(code: str, store: Path) -> None:
    """Run `code` until it says that it is writing, then SIGKILL it."""
    process = subprocess.Popen([sys.executable, "-c", code, str(store)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"writing\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "finished"),
    [
        (STOPS_INSIDE_A_SHARD, {0}),
        (STOPS_BEFORE_THE_MANIFEST, {0, 1, 2}),
    ],
    ids=["inside a shard", "before the manifest"],
)
def test_killed_writer_is_resumed_and_gives_the_same_run(
    tmp_path: Path, code: str, finished: set[int]
) -> None:
    kill_while_writing(code, tmp_path / "killed")
    store = Store(tmp_path / "killed")
    writer = store.begin_run(make_spec(), 3)
    assert list(writer.path.glob(".tmp-*" if len(finished) == 1 else "aggregate.parquet"))  # killed midway
    assert store.run_ids() == []
    assert writer.finished_shards() == finished
    run = write_run(store)
    other = Store(tmp_path / "whole")
    assert store.manifest(run)["digest"] == other.manifest(write_run(other))["digest"]
    assert {p.name for p in writer.path.iterdir()} == {p.name for p in (other.root / "runs" / run).iterdir()}
    assert store.verify(run) == []


def test_run_whose_writer_was_killed_before_logging_is_logged_by_the_next(tmp_path: Path) -> None:
    kill_while_writing(STOPS_BEFORE_THE_LOG, tmp_path)
    store = Store(tmp_path)
    run = make_spec().id
    assert store.has_run(run)
    assert "log is missing or empty" in store.verify(run)[0]
    write_run(store)
    assert store.verify(run) == []
    assert len(store.log()) == 1


def test_finished_shard_is_not_captured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = store.begin_run(make_spec(), 3)
    write_shard(writer, 0)

    def unwanted():  # type: ignore[no-untyped-def]
        raise AssertionError("captured again")
        yield

    store.begin_run(make_spec(), 3).write_shard(0, unwanted(), unwanted())
    run = write_run(store)
    published = store.begin_run(make_spec(), 3)
    assert published.finished_shards() == {0, 1, 2}
    published.write_shard(1, unwanted(), unwanted())
    assert published.publish(counts={}, diagnostics={}) == store.manifest(run)
    assert len(store.log()) == 1


def test_shard_damaged_while_staged_is_captured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = store.begin_run(make_spec(), 3)
    for index in range(3):
        write_shard(writer, index)
    part = writer.path / "staged" / "00001" / "maps.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="1 of 3 shards are missing, the first is 1"):
        writer.publish(counts={}, diagnostics={})
    assert writer.finished_shards() == {0, 2}
    assert store.verify(write_run(store)) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, FileNotFoundError, ValueError])
def test_error_of_the_capture_passes_through_and_leaves_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    writer = Store(tmp_path).begin_run(make_spec(), 1)

    def breaks():  # type: ignore[no-untyped-def]
        yield make_captured("p")
        raise error

    with pytest.raises(error):
        writer.write_shard(0, breaks(), [])
    assert writer.finished_shards() == set()
    assert not list(tmp_path.rglob("*.parquet"))


def _write_all(arguments: tuple[str, list[int]]) -> str:
    """Write the run's shards in the given order, then publish it and a comparison of it."""
    url, order = arguments
    store = Store(url)
    writer = store.begin_run(make_spec(), 3)
    for index in order:
        write_shard(writer, index)
    run = str(writer.publish(counts={}, diagnostics={})["run_id"])
    store.write_comparison(make_comparison(run), make_verdict(), probe_columns())
    for i in range(5):
        store.append_log("note", {"writer": order, "i": i})
    return run


def test_writers_of_one_run_at_once_all_succeed_and_leave_one_valid_run(tmp_path: Path) -> None:
    orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 1, 2]]
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        runs = pool.map(_write_all, [(str(tmp_path), order) for order in orders], chunksize=1)
    assert set(runs) == {make_spec().id}
    store = Store(tmp_path)
    assert store.run_ids() == [runs[0]]
    assert [item.probe_id for item in store.iter_maps(runs[0])] == list(PROBE_IDS)
    assert store.verify(runs[0]) == []
    (comparison,) = store.comparisons()
    assert store.verify(comparison["comparison_id"]) == []
    kinds = [entry["kind"] for entry in store.log()]
    assert sorted(kinds) == ["comparison", *["note"] * 20, "run", "verdict"]
    assert store.verify_log() == []
    assert not list(tmp_path.rglob(".tmp-*"))


def test_unwritable_store_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = Store(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot write to") as error:
        store.begin_run(make_spec(), 1)
    assert "\n" not in str(error.value)
    with pytest.raises(StoreError, match="cannot write to"):
        store.append_log("note", {})


def test_measure_covers_every_probe() -> None:
    assert {r.probe_id for i in PROBE_IDS for r in measure(make_captured(i).maps[0])} == set(PROBE_IDS)
