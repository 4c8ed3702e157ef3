"""Runs written to real Parquet files and read back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.errors import StoreError
from audit.records import Captured, Map, Prediction
from audit.store import Store
from tests.store_records import (
    PROBE_IDS,
    assert_same_map,
    audio_positions,
    image_positions,
    make_captured,
    make_map,
    make_spec,
    measure,
    text_positions,
    write_run,
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
    assert set(json.loads(text)["provenance"]) == {"time", "author", "command", "git_revision"}


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


def test_predictions_keep_every_field(finished: tuple[Store, str]) -> None:
    store, run = finished
    for row, probe_id in zip(store.predictions(run).to_dicts(), PROBE_IDS, strict=True):
        expected = make_captured(probe_id).prediction
        found = {**row, "logits": tuple(row["logits"]), "segments": dict(row["segments"])}
        assert Prediction(**found) == expected


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


def test_store_under_a_relative_path_with_parents_and_a_link_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    run = write_run(Store("../link/store"))
    child = Store("store").relink_run(make_spec(regions=()), lambda m: measure(m, ["x"]))
    assert child is not None
    for url in ("store", "../here/store", "../link/store", (tmp_path / "link" / "store").as_uri()):
        assert len(Store(url).maps(run)) == len(Store(url).maps(child["run_id"])) == 6
        assert Store(url).sql("SELECT count(*) AS n FROM maps")["n"].to_list() == [12]
