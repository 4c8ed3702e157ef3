"""Serve the schedules of audit.toml files through Prefect, one run at a time for each file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.schedules import Cron

from audit.config import load_config
from audit.errors import ConfigError
from flows.audit_flow import audit_flow


def serve_audits(configs: Sequence[Path]) -> None:
    """Block, and run each configuration's audit on its cron.

    Parameters
    ----------
    configs : sequence of Path
        Files with a ``[schedule]`` section.

    Raises
    ------
    ConfigError
        When a file has no schedule, or an invalid cron expression.
    """
    serve(*(deployment(path) for path in configs))  # type: ignore[arg-type]


def deployment(path: Path) -> object:
    """Return the deployment of one configuration: its cron, and at most one run at a time."""
    schedule = load_config(path).schedule
    if schedule is None:
        raise ConfigError(f'{path} has no [schedule]; add cron = "0 3 * * 1"')
    try:
        cron = Cron(schedule.cron, timezone=schedule.timezone)
        return audit_flow.to_deployment(
            name=path.stem,
            parameters={"config_path": str(path.resolve())},
            schedule=cron,
            concurrency_limit=ConcurrencyLimitConfig(
                limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
            ),
        )
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path}: schedule.cron = {schedule.cron!r} is not usable ({first})") from None
