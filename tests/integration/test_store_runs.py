"""Runs through real Parquet files and a real DuckDB."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.errors import StoreError
from audit.records import Captured, Map, Method, Positions, Prediction, Region, Reliance
from audit.schema import TABLES, arrow_schema
from audit.store import Store
from audit.store._files import seal
from tests.store_records import (
    PROBE_IDS,
    audio_positions,
    image_positions,
    make_captured,
    make_comparison,
    make_map,
    make_spec,
    make_verdict,
    measure,
    probe_columns,
    text_positions,
    write_run,
    write_shard,
)

PUBLISHED = {"counts": {}, "diagnostics": {}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    store = Store(tmp_path_factory.mktemp("[odd] name") / "env=1e5" / ".hidden" / "_store")
    return store, write_run(store)


@pytest.fixture(scope="module")
def queried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[str]]:
    store = Store(tmp_path_factory.mktemp("store") / "env=1e5" / "it's")
    return store, [write_run(store), write_run(store, make_spec("b"), seed=1)]


def assert_same_map(found: Map, expected: Map) -> None:
    assert (found.probe_id, found.stream, found.share) == (expected.probe_id, expected.stream, expected.share)
    assert found.diagnostics == expected.diagnostics
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.weights.dtype == np.float32
    if expected.layers is None:
        assert found.layers is None
    else:
        np.testing.assert_array_equal(found.layers, expected.layers)
    assert_same_positions(found.positions, expected.positions)


def assert_same_positions(found: Positions, expected: Positions) -> None:
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            np.testing.assert_array_equal(other, value)
        else:
            assert other == value, name


# --- layout and manifest ------------------------------------------------------------------------


def test_run_has_the_layout_of_the_design_and_no_leftovers(finished: tuple[Store, str]) -> None:
    store, run = finished
    directory = store.root / "runs" / run
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    parts = {f"{t}/part-{i:05d}.parquet" for t in ("maps", "layer_maps") for i in range(3)}
    tables = {f"{t}.parquet" for t in ("reliance", "layers", "predictions", "aggregate")}
    assert files - {".lock"} == {"manifest.json", *parts, *tables}
    manifest = store.manifest(run)
    assert {entry["path"] for entry in manifest["files"]} == parts | tables
    for entry in manifest["files"]:
        assert pq.read_metadata(directory / entry["path"]).num_rows == entry["rows"]
    assert manifest["n_probes"] == 6
    assert store.spec(run) == make_spec()
    assert store.verify(run) == []
    assert [entry["payload"]["run_id"] for entry in store.log()] == [run]


def test_manifest_names_no_directory_and_no_host_of_the_writer(finished: tuple[Store, str]) -> None:
    store, run = finished
    text = (store.root / "runs" / run / "manifest.json").read_text()
    assert str(store.root) not in text
    assert os.uname().nodename not in text
    assert set(json.loads(text)["provenance"]) == {"time", "command", "git_revision"}


def test_parts_are_compressed_and_byte_stream_split_with_float32_lists(finished: tuple[Store, str]) -> None:
    store, run = finished
    metadata = pq.read_metadata(store.root / "runs" / run / "maps" / "part-00000.parquet")
    columns = {metadata.row_group(0).column(i).path_in_schema: i for i in range(metadata.num_columns)}
    weights = metadata.row_group(0).column(columns["weights.list.element"])
    assert weights.compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" in weights.encodings
    assert weights.physical_type == "FLOAT"


def test_identical_runs_have_identical_files_and_digests(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in "ab"]
    first, second = (store.manifest(write_run(store)) for store in stores)
    assert first["files"] == second["files"]
    assert first["digest"] == second["digest"]


def test_different_maps_have_different_files(tmp_path: Path) -> None:
    first, second = (Store(tmp_path / str(seed)) for seed in (0, 1))
    digests = [s.manifest(write_run(s, seed=i))["digest"] for i, s in enumerate((first, second))]
    assert digests[0] != digests[1]


# --- reading ------------------------------------------------------------------------------------


def test_maps_come_back_exactly_in_the_order_of_the_probes(finished: tuple[Store, str]) -> None:
    store, run = finished
    found = list(store.iter_maps(run))
    assert [item.probe_id for item in found] == list(PROBE_IDS)
    for item in found:
        assert_same_map(item, make_captured(item.probe_id).maps[0])
        assert_same_map(store.map_of(run, item.probe_id), item)
    assert [item.probe_id for item in store.iter_maps(run, shard=1)] == list(PROBE_IDS[2:4])


def test_maps_as_a_frame_keep_ids_that_look_like_numbers_or_dates(finished: tuple[Store, str]) -> None:
    store, run = finished
    assert store.maps(run)["probe_id"].to_list() == list(PROBE_IDS)
    frame = store.maps(run, ["2024-01-01", "1e5", "absent"])
    assert frame["probe_id"].to_list() == ["1e5", "2024-01-01"]
    assert frame.schema["weights"] == pl.List(pl.Float32)
    assert store.predictions(run)["probe_id"].to_list() == list(PROBE_IDS)


def test_map_of_an_absent_probe_or_stream_is_a_clear_error(finished: tuple[Store, str]) -> None:
    store, run = finished
    for probe, stream in (("nobody", "input"), ("1e5", "image")):
        with pytest.raises(StoreError, match=f"has no map of probe {probe}, stream {stream}"):
            store.map_of(run, probe, stream)


def test_share_table_holds_every_share_and_nan_for_missing_regions(finished: tuple[Store, str]) -> None:
    store, run = finished
    table = store.share_table(run, layers=True)
    assert table.probe_ids == PROBE_IDS
    assert len(table.columns) == 2 + 2 * 3
    assert np.isnan(table.values).sum() == 4
    for item in store.iter_maps(run):
        row = PROBE_IDS.index(item.probe_id)
        for one in measure(item):
            by_layer = {None: one.share, **dict(enumerate(one.layers or ()))}
            for layer, share in by_layer.items():
                column = next(
                    i for i, c in enumerate(table.columns) if (c.region, c.layer) == (one.region, layer)
                )
                expected = np.nan if share is None else share
                np.testing.assert_array_equal(table.values[row, column], expected)
    whole = store.share_table(run)
    assert all(column.layer is None for column in whole.columns)
    np.testing.assert_array_equal(whole.values, table.values[:, :2])


def test_missing_region_is_null_with_a_reason_in_reliance_and_layers(finished: tuple[Store, str]) -> None:
    store, run = finished
    for frame in (store.reliance(run), store.layers(run)):
        missing = frame.filter(pl.col("share").is_null())
        assert missing.select("probe_id", "region", "reason").rows() == [("null", "names", "no such word")]


def test_aggregate_agrees_with_numpy(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    frame = store.aggregate()
    assert frame["run_id"].unique().sort().to_list() == sorted(runs)
    for run in runs:
        table = store.share_table(run, layers=True)
        rows = {(r["region"], r["layer"]): r for r in store.aggregate([run]).to_dicts()}
        assert len(rows) == len(table.columns)
        for i, column in enumerate(table.columns):
            values = table.values[:, i]
            row = rows[column.region, column.layer]
            assert row["mean"] == pytest.approx(np.nanmean(values), abs=1e-12)
            assert row["sd"] == pytest.approx(np.nanstd(values, ddof=1), abs=1e-12)
            assert (row["n"], row["n_missing"]) == ((~np.isnan(values)).sum(), np.isnan(values).sum())


MAPS = st.builds(
    make_map,
    st.sampled_from(["a", "b"]),
    st.one_of(
        st.integers(1, 9).map(text_positions),
        st.builds(image_positions, st.integers(1, 3), st.integers(1, 3)),
        st.integers(1, 9).map(audio_positions),
    ),
    layers=st.integers(0, 3),
    stream=st.just("input"),
    seed=st.integers(0, 99),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(MAPS, min_size=1, max_size=4))
def test_maps_of_every_modality_round_trip(tmp_path_factory: pytest.TempPathFactory, maps: list[Map]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    maps = [replace(item, probe_id=f"{i}") for i, item in enumerate(maps)]
    writer = store.begin_run(make_spec(), 1)
    writer.write_shard(0, [Captured((item,), Prediction(item.probe_id)) for item in maps], [])
    run = writer.publish(**PUBLISHED)["run_id"]
    for found, expected in zip(store.iter_maps(run), maps, strict=True):
        assert_same_map(found, expected)
        assert_same_map(store.map_of(run, expected.probe_id), expected)


def test_two_streams_of_a_probe_are_kept_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    pair = (
        make_map("p", image_positions(2, 2), stream="image"),
        make_map("p", text_positions(5), stream="text"),
    )
    writer = store.begin_run(make_spec(), 1)
    writer.write_shard(0, [Captured(pair, Prediction("p"))], [r for m in pair for r in measure(m)])
    run = writer.publish(**PUBLISHED)["run_id"]
    for item in pair:
        assert_same_map(store.map_of(run, "p", item.stream), item)
    assert [(c.stream, c.region) for c in store.share_table(run).columns] == [
        (stream, region) for stream in ("image", "text") for region in ("names", "rest")
    ]


def test_run_without_layers_and_without_a_head_has_empty_tables(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = store.begin_run(make_spec(), 1)
    item = make_map("p", text_positions(4), layers=0)
    writer.write_shard(0, [Captured((item,), Prediction("p"))], measure(item))
    run = writer.publish(**PUBLISHED)["run_id"]
    assert store.map_of(run, "p").layers is None
    assert store.layers(run)["reason"].unique().to_list() == ["this method yields no layers"]
    assert store.sql("SELECT count(*) AS n FROM layer_maps")["n"].to_list() == [0]
    assert store.predictions(run).row(0, named=True)["logits"] is None
    assert len(store.share_table(run, layers=True).columns) == 2


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


# --- SQL ----------------------------------------------------------------------------------------


def test_views_have_the_columns_of_the_schema_after_run_id(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    for table in TABLES:
        if table != "cells":
            frame = store.sql(f"SELECT * FROM {table}")
            assert frame.columns == arrow_schema(table, run_id=True).names
            assert frame["run_id"].unique().sort().to_list() == sorted(runs)
    frame = store.sql("SELECT * FROM runs ORDER BY run_id")
    assert frame.columns == arrow_schema("runs").names
    assert frame["n_probes"].to_list() == [6, 6]


def test_views_agree_with_what_was_written(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    query = "SELECT share, probe_id FROM Reliance WHERE run_id = '{}' AND region = 'names' ORDER BY probe_id"
    for run in runs:
        found = store.sql(query.format(run)).rows()
        expected = store.reliance(run).filter(pl.col("region") == "names").sort("probe_id")
        assert found == expected.select("share", "probe_id").rows()
    sums = store.sql("SELECT list_sum(weights) AS s, diagnostics['sink'] AS sink FROM maps")
    np.testing.assert_allclose(sums["s"], 1, atol=1e-6)
    assert sums["sink"].is_between(0, 1).all()


def test_query_sees_only_the_runs_it_is_given(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    query = "SELECT DISTINCT m.run_id FROM maps m JOIN runs r USING (run_id) WHERE r.method = 'rollout'"
    assert store.sql(query, runs[:1])["run_id"].to_list() == runs[:1]
    assert store.sql(query)["run_id"].sort().to_list() == sorted(runs)
    assert store.sql(query, [])["run_id"].to_list() == []


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_parquet('{other}')",
        "COPY (SELECT 1) TO '{target}'",
        "SELECT 1; COPY (SELECT 1) TO '{target}'",
        "ATTACH '{target}'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "CREATE TABLE x AS SELECT 1",
        "DROP VIEW maps",
        "EXPORT DATABASE '{target}'",
        "selec",
        "SELECT nothing FROM maps",
        "",
    ],
)
def test_query_reads_nothing_else_and_writes_nothing(queried: tuple[Store, list[str]], query: str) -> None:
    store, runs = queried
    target = store.root / "target"
    other = str(store.root / "runs" / runs[1] / "reliance.parquet").replace("'", "''")
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*")}
    with pytest.raises(StoreError, match="^query") as error:
        store.sql(query.format(target=str(target).replace("'", "''"), other=other), runs[:1])
    assert "\n" not in str(error.value)
    assert {p: p.stat().st_mtime_ns for p in store.root.rglob("*")} == before


def test_query_in_a_directory_that_duckdb_takes_for_a_pattern_says_so(finished: tuple[Store, str]) -> None:
    store, _ = finished
    with pytest.raises(StoreError, match="rename the directory"):
        store.sql("SELECT * FROM maps")


# --- finding, relinking, removing ---------------------------------------------------------------


def test_find_runs_fits_every_condition(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    assert set(store.find_runs()) == set(runs)
    assert store.find_runs(checkpoint="b" * 64) == runs[1:]
    assert set(store.find_runs(checkpoint="models/base", inputs="1" * 64, method="rollout")) == set(runs)
    assert store.find_runs(method="attention_flow") == []
    assert store.find_runs(regions=make_spec().regions_digest, checkpoint="a" * 64) == runs[:1]


def test_run_that_differs_only_in_regions_lists_the_other_runs_maps(tmp_path: Path) -> None:
    store = Store(tmp_path)
    source = write_run(store)
    spec = make_spec(regions=(Region("words", "terms"),), annotations_digest="9" * 64)
    manifest = store.relink_run(spec, lambda m: measure(m, ["words"]), labels={"1e5": "pos"})
    assert manifest is not None
    run = manifest["run_id"]
    assert manifest["maps_of"] == source
    listed = [e["path"] for e in manifest["files"] if e["table"] in ("maps", "layer_maps")]
    assert all(path.startswith(f"../{source}/") for path in listed)
    assert len(listed) == 6
    assert not (tmp_path / "runs" / run / "maps").exists()
    for found, expected in zip(store.iter_maps(run), store.iter_maps(source), strict=True):
        assert_same_map(found, expected)
    assert store.reliance(run)["region"].unique().to_list() == ["words"]
    labels = dict(store.predictions(run).select("probe_id", "label").rows())
    assert labels == {**dict.fromkeys(PROBE_IDS, "neg"), "1e5": "pos"}
    columns = [c for c in store.predictions(run).columns if c != "label"]
    assert store.predictions(run).select(columns).equals(store.predictions(source).select(columns))
    assert store.sql("SELECT run_id, count(*) AS n FROM maps GROUP BY 1")["n"].to_list() == [6, 6]
    assert store.verify(run) == []
    third = store.relink_run(replace(spec, regions=()), lambda m: measure(m, ["x"]))
    assert third is not None
    again = [e["path"] for e in third["files"] if e["table"] == "maps"]
    assert all(path.startswith(f"../{source}/") for path in again)
    (tmp_path / "runs" / source / "maps" / "part-00000.parquet").write_bytes(b"")
    with pytest.raises(StoreError, match=f"{source}/maps/part-00000"):
        list(store.iter_maps(run))


def test_run_that_differs_in_more_than_regions_is_not_relinked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store)
    for spec in (
        make_spec("b"),
        make_spec(inputs_digest="8" * 64),
        make_spec(method=Method(params={"residual": 0.4})),
        make_spec(versions={"torch": "2.14"}),
    ):
        assert store.relink_run(spec, measure) is None
    by_region = make_spec(method=Method(row="names"), annotations_digest="5" * 64)
    write_run(store, by_region)
    assert store.relinkable(replace(by_region, regions=())) == by_region.id
    assert store.relinkable(replace(by_region, regions=(), annotations_digest="6" * 64)) is None


def age(path: Path, days: float) -> None:
    for p in (path, *path.rglob("*")):
        os.utime(p, (time.time() - days * 86400,) * 2)


def test_gc_removes_old_unfinished_and_unreferenced_runs_with_tombstones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    compared, linked, loose, kept, young = (make_spec(c) for c in "abcde")
    for spec in (compared, linked, loose, kept, young):
        write_run(store, spec)
    child = replace(linked, regions=())
    assert store.relink_run(child, lambda m: measure(m, ["x"])) is not None
    unfinished, active = (store.begin_run(make_spec(c), 3) for c in "fg")
    for writer in (unfinished, active):
        write_shard(writer, 0)
    store.write_comparison(make_comparison(compared.id, child.id, replicates=()), None, probe_columns())
    for path in (tmp_path / "runs").iterdir():
        if path.name not in (young.id, active.run_id):
            age(path, 100)
    everything = sorted(tmp_path.rglob("*"))
    planned = store.gc(keep=[kept.id])
    assert {(c["id"], c["reason"]) for c in planned} == {
        (unfinished.run_id, "unfinished"),
        (loose.id, "unreferenced"),
    }
    assert sorted(tmp_path.rglob("*")) == everything
    assert store.gc(keep=[kept.id], dry_run=False) == planned
    assert set(store.run_ids()) == {compared.id, linked.id, child.id, kept.id, young.id}
    assert not (tmp_path / "runs" / unfinished.run_id).exists()
    assert active.path.exists()
    tombstones = [entry["payload"] for entry in store.log() if entry["kind"] == "gc"]
    assert {entry["id"] for entry in tombstones} == {unfinished.run_id, loose.id}
    assert store.verify_log() == []
    assert store.verify(child.id) == []
    assert store.gc(keep=[kept.id], unreferenced_after=None, unfinished_after=timedelta(0)) != []


def test_listing_five_thousand_runs_reads_only_their_manifests(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = tmp_path / "runs" / write_run(store) / "manifest.json"
    template = path.read_text()
    for i in range(5000):
        directory = tmp_path / "runs" / f"run-{i:012x}"
        directory.mkdir()
        text = template.replace(path.parent.name, directory.name)
        (directory / "manifest.json").write_text(text)
    assert len(store.runs()) == len(store.run_ids()) == 5001
    start = time.perf_counter()
    assert len(store.find_runs(checkpoint="models/base")) == 5001
    assert time.perf_counter() - start < 5  # an order of magnitude above what it takes
    assert store.sql("SELECT count(*) AS n FROM runs")["n"].to_list() == [5001]
