"""Tiny checkpoints saved once for all functional tests, and the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from audit.cli import main
from tests import tiny_audits as tiny
from tests.tiny_audits import Done


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with base, benign, shifted, and seed-1 to seed-5."""
    return tiny.save_family(tmp_path_factory.mktemp("models"))


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return the command ``audit``, run in this process and in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capfd.readouterr()
        return Done(int(stop.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a user's folder with a probe set."""
    tiny.write_rows(tmp_path / "probes.jsonl", tiny.text_rows())
    return tmp_path


Run = Callable[..., Done]
