"""Serve the schedules of audit.toml files through Prefect, one run at a time for each file."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from zoneinfo import available_timezones

from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron
from prefect.server.schemas.schedules import CronSchedule
from prefect.types.entrypoint import EntrypointType

from audit.config import ScheduleSection, load_config
from audit.errors import ConfigError
from flows.audit_flow import audit_flow, audit_name
from flows.server import prefect_api

CRON_FIELDS = 5
EXAMPLE = 'cron = "0 3 * * 1" is Mondays at 03:00'


def serve_audits(configs: Sequence[Path]) -> None:
    """Block, and run each configuration's audit on its cron.

    A run that falls due while the last one of the same file still runs is cancelled, not queued.

    Parameters
    ----------
    configs : sequence of Path
        Files with a ``[schedule]`` section; one that is named twice is served once.

    Raises
    ------
    ConfigError
        When a file has no schedule or an invalid one, or Prefect's server cannot be had.
    """
    deployments = [deployment(path) for path in dict.fromkeys(path.resolve() for path in configs)]
    # Prefect puts the working directory first on a run's import path: a user's own folder named flows
    # or audit must not be found there.
    with prefect_api(scheduler=True), TemporaryDirectory() as empty, chdir(empty):
        serve(*deployments)


def deployment(path: Path) -> RunnerDeployment:
    """Return the deployment of one configuration: its cron, and at most one run at a time.

    Raises
    ------
    ConfigError
        When the file has no schedule, or an invalid one.
    """
    schedule = load_config(path).schedule
    if schedule is None:
        raise ConfigError(f"{path} has no [schedule]; add one: {EXAMPLE}")
    check_schedule(schedule, path)
    made = audit_flow.to_deployment(
        name=audit_name(path),
        description=f"audit of {path}",
        parameters={"config_path": str(path.resolve())},
        schedule=Cron(schedule.cron, timezone=schedule.timezone),
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
        ),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return cast(RunnerDeployment, made)  # a coroutine only where an event loop runs


def check_schedule(schedule: ScheduleSection, path: Path) -> None:
    """Refuse a cron or a timezone that Prefect could not follow.

    Raises
    ------
    ConfigError
        Naming the key, the value and the remedy.
    """
    if schedule.timezone not in available_timezones():
        close = difflib.get_close_matches(schedule.timezone, available_timezones(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "expected a name such as 'Europe/Berlin' or 'UTC'"
        raise ConfigError(f"{path}: schedule.timezone = {schedule.timezone!r} is unknown; {hint}")
    problem = _cron_problem(schedule)
    if problem is not None:
        raise ConfigError(f"{path}: schedule.cron = {schedule.cron!r} {problem}; {EXAMPLE}")


def _cron_problem(schedule: ScheduleSection) -> str | None:
    fields = len(schedule.cron.split())
    if fields != CRON_FIELDS:
        counted = "1 field" if fields == 1 else f"{fields} fields"
        return f"has {counted}, expected five (minute, hour, day, month, weekday)"
    try:
        cron = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    except ValueError:  # pydantic's own message spans several lines
        return "is no cron expression"
    try:
        asyncio.run(cron.get_dates(1))
    except ValueError:
        return "never comes due"
    return None
