"""The audit as a Prefect flow on a real server: same numbers, one-line errors, retries, a visible verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from audit.config import load_config
from audit.errors import ExitCode, NothingEvaluatedError, ProbeError
from audit.pipeline import run_audit
from audit.records import Outcome, Verdict
from audit.store import Store
from tests import tiny_audits as tiny
from tests.conftest import answers, wait_until

prefect = pytest.importorskip("prefect")

SHARDS = "[capture]\nshard_probes = 10\n"
REPLICATE = '[[replicates]]\npath = "{models}/seed-1"\n'
MOVED = '[[gate.rules]]\nregion = "*"\nkind = "limit"\nmeasure = "js_distance"\nfail = 0.001\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.bert(folder / "base")
    tiny.bert(folder / "shifted", seed=12, noise=0.25)
    tiny.bert(folder / "seed-1", seed=1, noise=0.002)
    return folder


@pytest.fixture(scope="module")
def write(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of audits with three shards a run, each in a folder with a store of its own."""

    def write(rows: list[dict[str, Any]] | None = None, **sections: Any) -> Path:
        folder = tmp_path_factory.mktemp("project")
        tiny.write_rows(folder / "probes.jsonl", tiny.text_rows() if rows is None else rows)
        return tiny.write_config(folder, models=models, **{"more": SHARDS, "rules": MOVED, **sections})

    return write


@pytest.fixture(scope="module")
def plain(write: Callable[..., Path]) -> tuple[Store, Verdict]:
    """Return the store and the verdict of an audit that ran in this process, without Prefect."""
    config = load_config(write(more=REPLICATE + SHARDS))
    return Store(config.store.url), run_audit(config)


@pytest.fixture
def connected(prefect_server: str) -> Iterator[Any]:
    """Point Prefect at the test's server; return a client of it."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.server import _drain

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        with prefect.get_client(sync_client=True) as client:
            yield client
        _drain()


def last_flow_run(client: Any) -> Any:
    from prefect.client.schemas.sorting import FlowRunSort

    return client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)[0]


def task_runs(client: Any, flow_run: Any) -> dict[str, Any]:
    """Return the task runs of a flow run by name, once the server has recorded all of them."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))

    def recorded() -> list[Any]:
        found = client.read_task_runs(flow_run_filter=chosen)
        return found if found and all(one.state and one.state.is_final() for one in found) else []

    return {one.name: one for one in wait_until(recorded, 60, "task runs")}


def files_of(store: Store) -> dict[str, str]:
    """Return the hash of every file of every run and comparison."""
    manifests = [json.loads(path.read_text()) for path in sorted(store.root.glob("*/*/manifest.json"))]
    return {
        f"{one.get('run_id') or one['comparison_id']}/{entry['path']}": entry["sha256"]
        for one in manifests
        for entry in one["files"]
    }


def test_flow_gives_the_same_files_and_verdict_as_a_run_without_prefect(write, plain, connected):
    from flows.audit_flow import run_flow

    config = write(more=REPLICATE + SHARDS)
    store, verdict = plain
    flowed = Store(load_config(config).store.url)
    assert run_flow(config) == verdict
    assert verdict.outcome is Outcome.FAIL
    assert flowed.run_ids() == store.run_ids()
    assert len(store.run_ids()) == 3
    assert files_of(flowed) == files_of(store)
    assert sum("part-" in name for name in files_of(store)) >= 3 * 3

    written = tiny.files_below(flowed.root)
    assert run_flow(config) == verdict
    assert tiny.files_below(flowed.root) == written
    assert not [name for name in task_runs(connected, last_flow_run(connected)) if "shard" in name]


def test_failed_gate_completes_and_shows_the_verdict_in_state_name_and_artifact(write, connected):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    from flows.audit_flow import audit_name, run_flow

    config = write()
    verdict = run_flow(config)
    flow_run = last_flow_run(connected)
    assert flow_run.state.is_completed()
    assert flow_run.state.message.startswith("FAIL: ")
    assert flow_run.name == "audit: FAIL"
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
    (artifact,) = connected.read_artifacts(artifact_filter=chosen)
    assert artifact.key == f"verdict-{audit_name(config)}"
    assert artifact.description.startswith(f"{verdict.comparison_id}: FAIL")
    assert "FAIL" in artifact.data
    names = set(task_runs(connected, flow_run))
    shards = {f"capture {role} shard {i}" for role in ("before", "after") for i in range(3)}
    assert names == shards | {"prepare before", "publish before", "prepare after", "publish after", "gate"}


@pytest.mark.parametrize(("error", "tries"), [(OSError("the disk was away"), 2), (KeyError("a bug"), 1)])
def test_task_is_retried_after_passing_trouble_but_not_after_a_bug(write, connected, error, tries):
    from flows.audit_flow import run_flow

    raised: list[str] = []

    def fail_once(stage: str, done: int, total: int) -> None:
        if stage == "capture before" and not raised:
            raised.append(stage)
            raise error

    if tries == 1:
        with pytest.raises(KeyError, match="a bug"):
            run_flow(write(), progress=fail_once)
    else:
        assert run_flow(write(), progress=fail_once).outcome is Outcome.FAIL
    runs = task_runs(connected, last_flow_run(connected))
    assert raised == ["capture before"]
    assert runs["capture before shard 0"].run_count == tries


def test_user_error_in_a_task_reaches_the_caller_unwrapped_and_is_not_retried(write, connected):
    from flows.audit_flow import run_flow

    rows = [*tiny.text_rows(), {"id": "long", "text": "good " * 100}]
    config = write(rows=rows)
    with pytest.raises(ProbeError) as plain:
        run_audit(load_config(config))
    with pytest.raises(ProbeError) as flowed:
        run_flow(config)
    assert str(flowed.value) == str(plain.value)
    assert "long" in str(flowed.value)
    flow_run = last_flow_run(connected)
    assert flow_run.state.is_failed()
    assert flow_run.state.message == str(plain.value)
    (run,) = task_runs(connected, flow_run).values()
    assert (run.name, run.run_count) == ("prepare before", 1)


def test_policy_without_rules_is_refused_before_any_capture(write, connected):
    from flows.audit_flow import run_flow

    config = write(rules="")
    with pytest.raises(NothingEvaluatedError):
        run_flow(config)
    assert not (config.parent / "store" / "runs").exists()


def test_command_gives_one_line_and_exit_code_of_a_user_error(write, prefect_server):
    config = write(regions='absent = { terms = ["zebra"] }\n', rules="")
    rule = '[[gate.rules]]\nregion = "absent"\nkind = "limit"\nfail = 0.1\n'
    config.write_text(config.read_text() + rule)
    done = tiny.run_command(
        "run", config, "--prefect", cwd=config.parent, environment={"PREFECT_API_URL": prefect_server}
    )
    assert done.code == ExitCode.PROBES
    assert "absent" in done.error  # which also refuses a traceback
    assert done.out == ""


def test_configured_server_that_does_not_answer_is_named(write):
    config = write()
    dead = "http://127.0.0.1:9/api"
    done = tiny.run_command(
        "run", config, "--prefect", cwd=config.parent, environment={"PREFECT_API_URL": dead}
    )
    assert done.code == ExitCode.CONFIG
    assert dead in done.error


def test_command_with_a_private_server_gives_the_same_and_leaves_no_server(write, plain):
    config = write(more=REPLICATE + SHARDS)
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on it in the last digit
    done = tiny.run_command("run", config, "--prefect", cwd=config.parent, environment=threads)
    assert done.code == ExitCode.FAIL, done.err
    assert done.out.startswith("FAIL")
    assert files_of(Store(load_config(config).store.url)) == files_of(plain[0])
    assert not answers(api_in(done.err))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_private_server_ends_with_a_command_that_is_stopped(write, end, tmp_path):
    config = write()
    log = tmp_path / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "audit", "run", str(config), "--prefect"]
        environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
    try:
        wait_until(lambda: "View at" in log.read_text(), 120, "the flow's start", every=0.05)
        url = api_in(log.read_text())
        assert answers(url)
        process.send_signal(end)
        code = process.wait(60)
    finally:
        process.kill()
    assert code == (ExitCode.INTERRUPTED if end is signal.SIGINT else -end)
    wait_until(lambda: not answers(url), 60, "the server's end")
    assert not list((config.parent / "store").glob("comparisons/*"))


def api_in(log: str) -> str:
    """Return the URL of the API that a flow's log names."""
    found = re.search(r"View at (http://127\.0\.0\.1:\d+)/", log)
    assert found, log
    return f"{found[1]}/api"
