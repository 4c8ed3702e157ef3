"""Scheduled audits: what `audit serve` refuses, and a schedule that fires on a real Prefect server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from audit.errors import ConfigError, ExitCode
from audit.records import Outcome
from audit.store import Store
from tests import tiny_audits as tiny
from tests.conftest import wait_until

prefect = pytest.importorskip("prefect")

MOVED = '[[gate.rules]]\nregion = "*"\nkind = "limit"\nmeasure = "js_distance"\nfail = 0.001\n'
EVERY_MINUTE = '[schedule]\ncron = "* * * * *"\n'


def scheduled(folder: Path, schedule: str) -> Path:
    """Write an audit with a schedule; its checkpoints are made only where the test runs it."""
    tiny.write_rows(folder / "probes.jsonl", tiny.text_rows())
    return tiny.write_config(folder, more=schedule, rules=MOVED)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("", "has no [schedule]"),
        ('[schedule]\ncron = "every monday"\n', "has 2 fields, expected five"),
        ('[schedule]\ncron = "0 0 3 * * 1"\n', "has 6 fields, expected five"),
        ('[schedule]\ncron = "@daily"\n', "has 1 field, expected five"),
        ('[schedule]\ncron = "61 3 * * 1"\n', "'61 3 * * 1' is no cron expression"),
        ('[schedule]\ncron = "0 0 30 2 *"\n', "never comes due"),
        ('[schedule]\ncron = "0 3 * * 1"\ntimezone = "Europe/Berln"\n', "did you mean 'Europe/Berlin'?"),
        ('[schedule]\ncron = "0 3 * * 1"\ntimezone = "moon"\n', "schedule.timezone = 'moon' is unknown"),
    ],
)
def test_unusable_schedule_is_refused_in_one_line(tmp_path, schedule, expected):
    from flows.serve import deployment

    config = scheduled(tmp_path, schedule)
    with pytest.raises(ConfigError) as refused:
        deployment(config)
    message = str(refused.value)
    assert expected in message
    assert message.startswith(str(config))
    assert "\n" not in message


def test_command_refuses_an_unusable_schedule_with_10_before_any_server_starts(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
    scheduled(good, EVERY_MINUTE)
    scheduled(bad, '[schedule]\ncron = "soon"\n')
    done = tiny.run_command("serve", "good/audit.toml", "bad/audit.toml", cwd=tmp_path)
    assert done.code == ExitCode.CONFIG
    assert "'soon' has 1 field" in done.error
    assert "served" not in done.out


def test_deployment_holds_cron_timezone_path_and_one_run_at_a_time(tmp_path):
    from flows.serve import deployment

    config = scheduled(tmp_path, '[schedule]\ncron = "0 3 * * 1"\ntimezone = "Europe/Berlin"\n')
    made = deployment(config)
    (one,) = made.schedules
    assert (one.schedule.cron, one.schedule.timezone) == ("0 3 * * 1", "Europe/Berlin")
    assert made.parameters == {"config_path": str(config)}
    assert (made.concurrency_limit, made.concurrency_options.collision_strategy.value) == (1, "CANCEL_NEW")
    assert made.entrypoint == "flows.audit_flow.audit_flow"


def test_files_of_the_same_name_have_deployments_of_their_own(tmp_path):
    from flows.serve import deployment

    names = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        names.add(deployment(scheduled(tmp_path / name, EVERY_MINUTE)).name)
    assert len(names) == 2


@dataclass(frozen=True)
class Served:
    """A running `audit serve`."""

    process: subprocess.Popen[bytes]
    config: Path
    log: Path
    client: Any

    def flow_runs(self) -> list[Any]:
        return [one for one in self.client.read_flow_runs() if one.deployment_id is not None]


@pytest.fixture
def served(tmp_path: Path, prefect_server: str) -> Iterator[Served]:
    """Start `audit serve` from another folder, where packages of our names lie in wait."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    tiny.bert(tmp_path / "models" / "base")
    tiny.bert(tmp_path / "models" / "shifted", seed=12, noise=0.25)
    config = scheduled(tmp_path, EVERY_MINUTE)
    elsewhere = tmp_path / "elsewhere"
    for name in ("flows", "audit"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    command = [sys.executable, "-c", "from audit.cli import main; main()", "serve", "../audit.toml"]
    environment = {
        **os.environ,
        "PREFECT_API_URL": prefect_server,
        "PYTHONPATH": str(tiny.ROOT),
        "PYTHONSAFEPATH": "1",  # as the console script, which does not search the current folder either
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=elsewhere, env=environment, stdout=out, stderr=out)
    try:
        with (
            temporary_settings({PREFECT_API_URL: prefect_server}),
            prefect.get_client(sync_client=True) as client,
        ):
            yield Served(process, config, log, client)
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


@pytest.mark.slow
def test_served_schedule_fires_one_run_at_a_time_and_stops_without_a_trace(served):
    store = Store(served.config.parent / "store")

    def completed() -> list[Any]:
        assert served.process.poll() is None, served.log.read_text()
        return [one for one in served.flow_runs() if one.state.is_completed()]

    # the schedule fires by itself
    first = wait_until(completed, 200, "a scheduled run", every=0.5)[0]
    assert first.auto_scheduled
    assert first.name == "audit: FAIL"
    assert len(store.run_ids()) == 2
    (comparison,) = store.comparisons()
    verdict = store.verdict(comparison["comparison_id"])
    assert verdict is not None
    assert verdict.outcome is Outcome.FAIL

    # of three that are asked for at once, one runs and the others are cancelled
    asked = {served.client.create_flow_run_from_deployment(first.deployment_id).id for _ in range(3)}

    def settled() -> list[Any]:
        runs = [one for one in served.flow_runs() if one.id in asked]
        return runs if len(runs) == 3 and all(one.state.is_final() for one in runs) else []

    runs = wait_until(settled, 200, "three runs asked for at once", every=0.5)
    assert any(one.state.is_cancelled() for one in runs)
    assert all(one.state.is_cancelled() or one.state.is_completed() for one in runs)
    spans = sorted((one.start_time, one.end_time) for one in served.flow_runs() if one.state.is_completed())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert len(store.comparisons()) == 1

    # stopped, it leaves no process behind, and nothing more is due
    family = [psutil.Process(served.process.pid)]
    family += family[0].children(recursive=True)
    served.process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert served.process.wait(10) == 0, served.log.read_text()
    assert served.client.read_deployment(first.deployment_id).paused
