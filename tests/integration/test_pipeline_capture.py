"""Captures that are killed, repeated, derived from stored maps, or shared by a base and its adapter."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import CheckpointError, ProbeError
from audit.pipeline import capture_all, capture_run, plan_audit, plan_run, run_audit
from audit.pipeline import loader as loading
from audit.pipeline.capture import missing_shards
from audit.pipeline.cost import ATTENTION_ALONE, capture_cost, cost_note
from audit.records import Method, Outcome
from audit.store import Store
from tests import tiny_audits as tiny
from tests.tiny_audits import LIMIT, REGIONS, files_below, write_config

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.bert(folder / "base")
    tiny.bert(folder / "shifted", seed=13, noise=0.4)
    tiny.save_adapter(folder / "base", folder / "adapter")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tiny.write_rows(tmp_path / "probes.jsonl", tiny.text_rows())
    return tmp_path


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return what is loaded from here on: (name of the directory, whether with an adapter)."""
    found: list[tuple[str, bool]] = []
    load = loading.load

    def counted(source, *arguments):
        found.append((Path(source.ref).name, source.adapter is not None))
        return load(source, *arguments)

    monkeypatch.setattr(loading, "load", counted)
    monkeypatch.setattr(loading.LOADER, "checkpoint", None)
    return found


def part_hashes(store: Path, run_id: str) -> dict[str, str]:
    return {entry["path"]: entry["sha256"] for entry in Store(store).manifest(run_id)["files"]}


def test_a_killed_capture_goes_on_part_by_part_and_ends_with_the_same_parts(project, models):
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(60))
    config = write_config(project, models=models, more="[capture]\nshard_probes = 6\n")
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "audit", "capture"], cwd=project, env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not list(project.glob("store/runs/*/staged/00001")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    plan = plan_run(load_config(config), "before")
    missing = missing_shards(plan)
    assert 0 < len(missing) < 10
    assert not Store(project / "store").has_run(plan.run_id)
    staged = project / "store" / "runs" / plan.run_id / "staged"
    kept = {
        index: (staged / f"{index:05d}/maps.parquet").stat().st_ino for index in {*range(10)} - {*missing}
    }
    assert capture_run(plan) == plan.run_id
    maps = staged.parent / "maps"
    assert kept == {index: (maps / f"part-{index:05d}.parquet").stat().st_ino for index in kept}
    whole = replace(plan, store=str(project / "whole"))
    capture_run(whole)
    assert part_hashes(project / "store", plan.run_id) == part_hashes(project / "whole", plan.run_id)
    assert Store(project / "store").verify(plan.run_id) == []
    assert Store(project / "store").verify_log() == []


def test_the_same_capture_twice_loads_and_writes_nothing(project, models, loads):
    config = load_config(write_config(project, models=models))
    first = run_audit(config, confirm=False)
    before = files_below(project / "store")
    loads.clear()
    assert run_audit(config, confirm=False) == first
    assert loads == []
    assert files_below(project / "store") == before


def test_other_regions_reuse_the_stored_maps_and_give_what_a_capture_gives(project, models, loads):
    first = load_config(write_config(project, models=models))
    capture_all(plan_audit(first))
    loads.clear()
    regions = REGIONS + 'ending = { quantile = [0.5, 1.0] }\nfilm = { terms = ["film"] }\n'
    rows = [
        {**row, "segments": {"half": str(i % 2)}, "group": f"g{i % 4}"}
        for i, row in enumerate(tiny.text_rows())
    ]
    tiny.write_rows(project / "probes.jsonl", rows)
    plans = plan_audit(load_config(write_config(project, models=models, regions=regions)))
    runs = capture_all(plans)
    assert loads == []
    store = Store(project / "store")
    manifest = store.manifest(runs["after"])
    assert manifest["maps_of"] == plan_run_id(first, "after", store)
    assert all(e["path"].startswith("../") for e in manifest["files"] if e["table"] in ("maps", "layer_maps"))
    fresh = replace(next(plan for plan in plans if plan.role == "after"), store=str(project / "whole"))
    capture_run(fresh)
    names = ("reliance.parquet", "layers.parquet", "predictions.parquet", "aggregate.parquet")
    derived, captured = (part_hashes(project / name, fresh.run_id) for name in ("store", "whole"))
    assert {n: derived[n] for n in names} == {n: captured[n] for n in names}
    assert store.predictions(fresh.run_id)["group"].to_list()[:5] == ["g0", "g1", "g2", "g3", "g0"]


def plan_run_id(config, role: str, store: Store) -> str:
    """Return the run of a role among the stored ones by its checkpoint, before its probes were edited."""
    ref = str(config.checkpoints[role].path)
    return next(run["run_id"] for run in store.runs() if run["spec"]["checkpoint"]["ref"] == ref)


def test_regions_that_match_nothing_are_refused_before_maps_are_reused(project, models):
    capture_all(plan_audit(load_config(write_config(project, models=models))))
    config = load_config(write_config(project, models=models, regions='opinion = { terms = ["zebra"] }'))
    before = files_below(project / "store")
    with pytest.raises(ProbeError, match="opinion"):
        capture_all(plan_audit(config))
    assert files_below(project / "store") == before


def test_labels_are_part_of_a_run_only_where_they_are_its_targets(project, models, loads):
    def run_with(probes: str, label: str) -> str:
        tiny.write_rows(project / "probes.jsonl", tiny.text_rows(label=label))
        config = load_config(write_config(project, models=models, probes=probes))
        return capture_run(plan_run(config, "before"))

    plain, target = 'path = "probes.jsonl"', 'path = "probes.jsonl"\ntarget = "label"'
    assert run_with(plain, "positive") != run_with(plain, "negative")
    assert len(loads) == 1
    runs = [run_with(target, label) for label in ("positive", "negative")]
    store = Store(project / "store")
    answers = [store.predictions(run)["target_logit"].to_list() for run in runs]
    assert answers[0] != answers[1]
    assert store.manifest(runs[1])["maps_of"] is None


def test_a_base_and_its_adapter_are_loaded_once_and_told_apart(project, models, loads):
    config = load_config(
        write_config(project, models=models, after='path = "{models}/base"\nadapter = "{models}/adapter"')
    )
    runs = capture_all(plan_audit(config))
    assert loads == [("base", True)]
    store = Store(project / "store")
    before, after = store.spec(runs["before"]).checkpoint, store.spec(runs["after"]).checkpoint
    assert (before.adapter, Path(str(after.adapter)).name) == (None, "adapter")
    assert before.parts["weights"] == after.parts["weights"]
    assert before.weights_digest != after.weights_digest
    alone = replace(plan_run(config, "before"), store=str(project / "alone"))
    loading.LOADER.checkpoint = None
    capture_run(alone)
    assert loads[1:] == [("base", False)]
    assert part_hashes(project / "store", alone.run_id) == part_hashes(project / "alone", alone.run_id)
    assert run_audit(config, confirm=False).outcome is not Outcome.ERROR


def test_a_long_lived_process_sees_new_probes_and_new_weights(project, models, tmp_path):
    own = tiny.bert(tmp_path / "own")
    config = load_config(write_config(project, before='path = "./own"', after='path = "./own"'))
    first = capture_run(plan_run(config, "before"))
    tiny.bert(own, seed=3, noise=0.3)
    second = capture_run(plan_run(config, "before"))
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(21))
    third = capture_run(plan_run(config, "before"))
    store = Store(project / "store")
    maps = [store.map_of(run, "r-0").weights.tolist() for run in (first, second, third)]
    assert maps[0] != maps[1] == maps[2]
    assert [store.manifest(run)["n_probes"] for run in (first, second, third)] == [24, 24, 21]


def test_files_that_change_after_planning_are_not_captured_under_the_old_id(project, models, tmp_path):
    own = tiny.bert(tmp_path / "own")
    config = load_config(write_config(project, before='path = "./own"', after='path = "./own"'))
    plan = plan_run(config, "before")
    tiny.bert(own, seed=3, noise=0.3)
    with pytest.raises(CheckpointError, match="was changed while it was audited"):
        capture_run(plan)
    assert not (project / "store").exists()


def test_a_long_capture_is_announced_with_its_cost(project, models):
    plan = plan_run(load_config(write_config(project, models=models)), "after")
    assert cost_note([plan]) is None
    assert cost_note([]) is None
    large = replace(plan.spec.checkpoint, parameters=1_500_000_000)
    note = cost_note([replace(plan, spec=replace(plan.spec, checkpoint=large))] * 2)
    assert note is not None
    assert "2 runs on cpu" in note
    assert "6.6 GB" in note
    assert " min" in note
    slow = replace(plan, spec=replace(plan.spec, method=Method("occlusion")))
    positions = capture_cost([slow]).minutes / (capture_cost([plan]).minutes / ATTENTION_ALONE)
    assert 4 < positions < 40  # of the probes: one pass for each


def test_a_rule_on_a_layer_or_stream_that_is_not_there_never_passes(project, models):
    rules = LIMIT.format(fail=0.5) + "layer = 9\n"
    verdict = run_audit(load_config(write_config(project, models=models, rules=rules)), confirm=False)
    assert verdict.outcome is not Outcome.PASS
