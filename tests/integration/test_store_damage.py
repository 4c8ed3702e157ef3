"""What the store refuses: NaN, unfinished or damaged files, newer versions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.errors import StoreError
from audit.records import Captured, Prediction, Reliance
from audit.store import Store
from audit.store._files import seal
from tests.store_records import (
    PROBE_IDS,
    image_positions,
    make_captured,
    make_comparison,
    make_map,
    make_spec,
    make_verdict,
    probe_columns,
    write_run,
    write_shard,
)

PUBLISHED = {"counts": {}, "diagnostics": {}}


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "column"),
    [
        ("weights", "weights"),
        ("layers", "weights"),
        ("diagnostics", "diagnostics"),
        ("boxes", "boxes"),
        ("share", "share"),
    ],
)
def test_nan_in_a_map_names_the_column_and_stores_nothing(tmp_path: Path, where: str, column: str) -> None:
    item = make_map("p", image_positions(2, 2))
    bad: dict[str, Any] = {"share": float("nan"), "diagnostics": {"entropy": float("nan")}}
    for name in ("weights", "layers"):
        bad[name] = getattr(item, name).copy()
        bad[name].flat[1] = np.nan
    boxes = item.positions.boxes.copy()
    boxes[1, 2] = np.nan
    bad["positions"] = replace(item.positions, boxes=boxes)
    name = "positions" if where == "boxes" else where
    writer = Store(tmp_path).begin_run(make_spec(), 1)
    with pytest.raises(StoreError, match=f"column '{column}'"):
        writer.write_shard(0, [Captured((replace(item, **{name: bad[name]}),), Prediction("p"))], [])
    assert writer.finished_shards() == set()
    assert not list(tmp_path.rglob("*.parquet"))


def test_nan_in_reliance_predictions_or_counts_is_refused(tmp_path: Path) -> None:
    writer = Store(tmp_path).begin_run(make_spec(), 1)
    captured = [make_captured("p")]
    for reliance in (
        Reliance("p", "names", float("nan")),
        Reliance("p", "names", 0.5, layers=(0.5, float("nan"))),
    ):
        with pytest.raises(StoreError, match="column 'share'"):
            writer.write_shard(0, captured, [reliance])
    with pytest.raises(StoreError, match="share is None without a reason"):
        writer.write_shard(0, captured, [Reliance("p", "names", None)])
    with pytest.raises(StoreError, match="column 'logits'"):
        writer.write_shard(0, [Captured((), Prediction("p", (float("nan"),)))], [])
    writer.write_shard(0, captured, [])
    with pytest.raises(StoreError, match=r"diagnostics\.entropy"):
        writer.publish(counts={}, diagnostics={"entropy": float("nan")})
    assert not writer.published


def test_publishing_names_missing_shards_repeated_and_unknown_probes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = store.begin_run(make_spec(), 2)
    write_shard(writer, 0)
    with pytest.raises(StoreError, match="1 of 2 shards are missing, the first is 1"):
        writer.publish(**PUBLISHED)
    writer.write_shard(1, [make_captured(PROBE_IDS[0])], [])
    with pytest.raises(StoreError, match="probe 007 was captured twice"):
        writer.publish(**PUBLISHED)
    with pytest.raises(StoreError, match="shard 2 does not exist"):
        write_shard(writer, 2)
    other = store.begin_run(make_spec("b"), 1)
    other.write_shard(0, [make_captured("p")], [Reliance("q", "names", 0.5)])
    with pytest.raises(StoreError, match="probe q has reliance but no prediction"):
        other.publish(**PUBLISHED)
    with pytest.raises(StoreError, match="probe set is empty"):
        store.begin_run(make_spec("c"), 0)
    assert store.run_ids() == []


def test_unfinished_directory_is_never_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = store.begin_run(make_spec(), 3)
    write_shard(writer, 0)
    assert not store.has_run(writer.run_id)
    assert store.runs() == []
    for read in (store.maps, store.reliance, store.share_table, store.manifest):
        with pytest.raises(StoreError, match="or is unfinished"):
            read(writer.run_id)
    assert store.sql("SELECT count(*) AS n FROM maps")["n"].to_list() == [0]
    assert store.verify(writer.run_id)[0].startswith(f"run {writer.run_id} is not in the store")


def test_unlisted_file_beside_the_parts_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = write_run(store)
    parts = tmp_path / "runs" / run / "maps"
    shutil.copy(parts / "part-00000.parquet", parts / "part-00009.parquet")
    (parts / "part-00010.parquet").write_bytes(b"PAR1 half written")
    assert store.sql("SELECT count(*) AS n FROM maps")["n"].to_list() == [6]
    assert len(list(store.iter_maps(run))) == len(store.maps(run)) == 6


def test_newer_run_asks_to_upgrade(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = write_run(store)
    path = tmp_path / "runs" / run / "manifest.json"
    newer = {
        k: v for k, v in json.loads(path.read_text()).items() if k not in ("digest", "seal", "provenance")
    }
    path.write_bytes(seal({**newer, "schema_version": 2}, {"time": ""}))
    for read in (lambda: store.manifest(run), store.runs, lambda: store.reliance(run)):
        with pytest.raises(StoreError, match=r"schema version 2, .* upgrade rollout-audit"):
            read()


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str, str]:
    store = Store(tmp_path_factory.mktemp("damaged"))
    return store, write_run(store), store.write_comparison(make_comparison(), make_verdict(), probe_columns())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flip_of_any_byte_of_any_file_is_found_and_named(
    damaged: tuple[Store, str, str], data: st.DataObject
) -> None:
    store, run, comparison = damaged
    paths = sorted(p for p in store.root.rglob("*") if p.is_file() and p.name != ".lock")
    path = data.draw(st.sampled_from(paths))
    original = path.read_bytes()
    i = data.draw(st.integers(0, len(original) - 1))
    changed = original[i] ^ data.draw(st.integers(1, 255))
    try:
        path.write_bytes(original[:i] + bytes([changed]) + original[i + 1 :])
        found = [*store.verify(run), *store.verify(comparison), *store.verify_log()]
        relative = str(path.relative_to(store.root))
        assert any(relative in problem for problem in found), (relative, i)
    finally:
        path.write_bytes(original)
    assert [*store.verify(run), *store.verify(comparison), *store.verify_log()] == []


READERS = {
    "maps": [lambda s, r: list(s.iter_maps(r)), lambda s, r: s.maps(r), lambda s, r: s.sql("FROM maps")],
    "layer_maps": [lambda s, r: list(s.iter_maps(r)), lambda s, r: s.sql("FROM layer_maps")],
    "reliance": [
        lambda s, r: s.reliance(r),
        lambda s, r: s.share_table(r),
        lambda s, r: s.sql("FROM reliance"),
    ],
    "layers": [lambda s, r: s.layers(r), lambda s, r: s.share_table(r, layers=True)],
    "predictions": [lambda s, r: s.predictions(r), lambda s, r: s.share_table(r)],
    "aggregate": [lambda s, r: s.aggregate(), lambda s, r: s.aggregate([r])],
}


@pytest.mark.parametrize("table", READERS)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_part_is_named_and_refused_by_every_reader(tmp_path: Path, table: str, damage: str) -> None:
    store = Store(tmp_path)
    run = write_run(store)
    for read in READERS[table]:
        read(store, run)  # a checked file is checked again once it has changed
    path = (
        tmp_path / "runs" / run / next(e["path"] for e in store.manifest(run)["files"] if e["table"] == table)
    )
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:] if damage == "flip" else data[:-9])
    for read in READERS[table]:
        with pytest.raises(StoreError, match=path.name) as error:
            read(store, run)
        assert error.value.exit_code == 14
        assert "\n" not in str(error.value)


def test_damage_to_one_table_leaves_queries_of_others_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = write_run(store)
    (tmp_path / "runs" / run / "maps" / "part-00001.parquet").write_bytes(b"")
    assert len(store.sql("SELECT * FROM reliance")) == 12
    assert store.aggregate().height == 8


def test_verify_finds_wrong_row_counts_and_manifests_the_log_does_not_know(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = write_run(store)
    path = tmp_path / "runs" / run / "manifest.json"
    manifest = json.loads(path.read_text())
    content = {k: v for k, v in manifest.items() if k not in ("digest", "seal", "provenance")}
    content["files"] = [{**e, "rows": 99} if e["table"] == "reliance" else e for e in content["files"]]
    path.write_bytes(seal(content, manifest["provenance"]))
    problems = store.verify(run)
    assert any("reliance.parquet: expected 99 rows, got 12" in problem for problem in problems)
    assert any("not the manifest that the log recorded" in problem for problem in problems)


def test_manifest_that_lists_files_outside_the_store_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    run = write_run(store)
    path = store.root / "runs" / run / "manifest.json"
    manifest = json.loads(path.read_text())
    content = {k: v for k, v in manifest.items() if k not in ("digest", "seal", "provenance")}
    content["files"] = [{**e, "path": "../../../secret"} for e in content["files"]]
    path.write_bytes(seal(content, {"time": ""}))
    with pytest.raises(StoreError, match="lies outside the store"):
        store.maps(run)
