"""Where tasks report how far they are: the caller's bars, else the run's log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prefect import get_run_logger
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import get_current_settings

from audit.pipeline import Progress

PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)
"""The caller's progress bars: Prefect copies context variables into its threads."""

SECONDS_BETWEEN_LINES = 30.0


def run_progress() -> Progress:
    """Return the caller's bars, or where there are none a callback that writes to the run's log."""
    return PROGRESS.get() or _log_lines()


def shift_progress(progress: Progress, offset: int, total: int) -> Progress:
    """Return a callback that counts `offset` items more, of `total`."""
    return lambda stage, done, _: progress(stage, offset + done, total)


def _log_lines() -> Progress:
    logger, last = get_run_logger(), time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            logger.info("%s: %d of %d", stage, done, total)

    return report


@contextmanager
def quiet_console() -> Iterator[None]:
    """Keep Prefect's lines off the terminal, where bars tell the story, unless the user set their level.

    The lines still go to the Prefect server.
    """
    if "level" in get_current_settings().logging.model_fields_set:
        yield
        return
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, PrefectConsoleHandler)]
    for handler in handlers:
        handler.addFilter(_is_no_chatter)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_chatter)


def _is_no_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not record.name.startswith("prefect")
