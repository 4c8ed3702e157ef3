"""`audit dashboard`: one process that ends with its command, on a port that is free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic, sleep

import pytest

from audit.errors import ExitCode
from tests.tiny_audits import run_command


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def within(seconds: float, port: int, wanted: bool) -> bool:
    deadline = monotonic() + seconds
    while monotonic() < deadline:
        if answers(port) == wanted:
            return True
        sleep(0.2)
    return False


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_terminated_command_leaves_no_server_behind_and_says_that_the_store_is_new(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "audit", "dashboard", "--store", "store", "--port", str(port)]
    said = tmp_path / "said"
    with said.open("w") as stream:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=stream)
    try:
        assert within(120, port, True)
        assert f"{tmp_path / 'store'} does not exist yet" in said.read_text()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        assert within(10, port, False)
    finally:
        process.kill()


def test_a_taken_port_is_told_before_an_address_is_shown(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run_command("dashboard", "--port", str(port), cwd=tmp_path)
    assert done.code == ExitCode.CONFIG
    assert f"port {port} is taken" in done.error
    assert "http://" not in done.out
