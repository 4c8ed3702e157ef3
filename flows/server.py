"""A Prefect API for one command: the configured one, else a server that cannot outlive the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from audit.errors import ConfigError

CHILD = Path(__file__).with_name("_server_process.py")
GRACE_SECONDS = 10


@contextmanager
def prefect_api(*, scheduler: bool = False) -> Iterator[str]:
    """Yield the URL of a Prefect API.

    Where ``PREFECT_API_URL`` is set, by the environment or a profile, that server is used and left
    running. Else a private one is started on a free loopback port with the database of
    ``PREFECT_HOME``. It ends with the block, and also when this process is killed, because it reads a
    pipe whose other end only this process holds.

    Parameters
    ----------
    scheduler : bool
        Run the services that turn schedules into flow runs too.

    Yields
    ------
    str
        The URL, which is set as ``PREFECT_API_URL`` within the block.

    Raises
    ------
    ConfigError
        When the configured server does not answer, or a private one does not start.
    """
    configured = PREFECT_API_URL.value()
    if configured:
        _check(configured)
        yield configured
        return
    process = _start(scheduler)
    try:
        url = _wait_until_ready(process)
        with temporary_settings({PREFECT_API_URL: url}):
            try:
                yield url
            finally:
                _drain()
    finally:
        _stop(process)


def _check(url: str) -> None:
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=20)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"PREFECT_API_URL = {url} does not answer ({type(error).__name__}); start that server, or run "
            "`prefect config unset PREFECT_API_URL` and unset the variable to use a private one"
        ) from None


def _start(scheduler: bool) -> subprocess.Popen[str]:
    environment = {**os.environ, "PREFECT_SERVER_UI_ENABLED": "false", "PREFECT__SERVER_FINAL": "1"}
    if not scheduler:
        environment["PREFECT__SERVER_EPHEMERAL"] = "1"
    return subprocess.Popen(
        [sys.executable, "-P", str(CHILD)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which still has a state to report
    )


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    """Return the API's URL once it answers; the child prints its port on the first line."""
    seconds = float(PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
    deadline = time.monotonic() + seconds
    port = process.stdout.readline().strip() if process.stdout else ""
    url = f"http://127.0.0.1:{port}/api"
    while port and process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return url
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise ConfigError(
        f"a private Prefect server did not start within {seconds:.0f} s; start one with "
        "`prefect server start` and set PREFECT_API_URL, or leave out --prefect"
    )


def _drain() -> None:
    """Send the logs and events that are still queued, while the server is there to take them."""
    APILogWorker.drain_all(timeout=GRACE_SECONDS)
    EventsWorker.drain_all(timeout=GRACE_SECONDS)


def _stop(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
