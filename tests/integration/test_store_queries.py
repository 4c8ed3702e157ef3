"""SQL through a real DuckDB; finding, relinking and removing runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from audit.errors import StoreError
from audit.records import Method, Prediction, Region, RunRef
from audit.schema import TABLES, arrow_schema
from audit.store import Store
from tests.store_records import (
    PROBE_IDS,
    assert_same_map,
    make_comparison,
    make_spec,
    measure,
    probe_columns,
    write_run,
    write_shard,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    store = Store(tmp_path_factory.mktemp("[odd] name") / "env=1e5" / ".hidden" / "_store")
    return store, write_run(store)


@pytest.fixture(scope="module")
def queried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[str]]:
    store = Store(tmp_path_factory.mktemp("store") / "env=1e5" / "it's")
    return store, [write_run(store), write_run(store, make_spec("b"), seed=1)]


# --- SQL ----------------------------------------------------------------------------------------


def test_views_have_the_columns_of_the_schema_after_run_id(queried: tuple[Store, list[str]]) -> None:
    store, runs = queried
    for table in TABLES:
        if table not in ("cells", "faithfulness"):  # they belong to comparisons
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
        "SELECT * FROM query_table('ma' || 'ps')",
        "",
    ],
)
def test_query_reads_nothing_else_and_writes_nothing(queried: tuple[Store, list[str]], query: str) -> None:
    store, runs = queried
    target = store.root / "target"
    other = str(store.root / "runs" / runs[1] / "reliance.parquet").replace("'", "''")
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*")}
    with pytest.raises(StoreError, match=r"^query") as error:
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

    def annotate(prediction: Prediction) -> Prediction:
        return replace(prediction, label="pos") if prediction.probe_id == "1e5" else prediction

    manifest = store.relink_run(spec, lambda m: measure(m, ["words"]), annotate=annotate)
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


def test_gc_keeps_the_replicates_and_second_probe_set_of_a_comparison(tmp_path: Path) -> None:
    store = Store(tmp_path)
    specs = [make_spec(weights) for weights in "abc"]
    one_set = [write_run(store, spec) for spec in specs]
    other_set = [write_run(store, replace(spec, inputs_digest="8" * 64)) for spec in specs]
    loose = write_run(store, make_spec("d"))
    kept = RunRef(one_set[2], "models/seed-1", "c" * 64, "c" * 64, "seed")
    comparison = make_comparison(one_set[0], one_set[1], replicates=(kept,))
    settings = {**comparison.settings, "domain": other_set}
    store.write_comparison(replace(comparison, settings=settings), None, probe_columns())
    for path in (tmp_path / "runs").iterdir():
        age(path, 100)
    assert [found["id"] for found in store.gc()] == [loose]


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
    assert len(store.find_runs(checkpoint="models/base")) == 5001
    assert store.sql("SELECT count(*) AS n FROM runs")["n"].to_list() == [5001]
