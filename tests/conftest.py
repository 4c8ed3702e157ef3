"""Every test runs with a Prefect home of its own: never with the user's server, profile or history."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = tempfile.mkdtemp(prefix="rollout-audit-prefect-")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)

for name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[name]
os.environ |= {
    "PREFECT_HOME": HOME,
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def answers(url: str) -> bool:
    """Return whether a Prefect API is there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(condition, seconds: float, what: str, every: float = 0.2):
    """Return the first truthy value of `condition`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(every)
    pytest.fail(f"{what}: not within {seconds} s")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start ``prefect server start`` with an empty home on a free port; return its API's URL."""
    home = tmp_path_factory.mktemp("prefect-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/api"
    with Path(home, "log").open("w") as log:
        environment = {**os.environ, "PREFECT_HOME": str(home)}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(url), 120, f"prefect server (log in {home})")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
