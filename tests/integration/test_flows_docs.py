"""Every command in docs/operations.md is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from audit.cli import app
from tests.synthetic import World

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```sh\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)
LINES = [line.strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("audit ")]


def arguments(line: str) -> list[str]:
    """Return the words of a command without a redirection."""
    words = shlex.split(line, comments=True)
    return words[: words.index(">")] if ">" in words else words


def test_commands_are_found():
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_command_parses(line):
    _, name, *rest = arguments(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, rest)


def test_documented_removal_runs(tmp_path, monkeypatch, capsys):
    lines = [line for line in COMMANDS if line.startswith("audit gc ")]
    assert len(lines) == 2
    world = World(tmp_path, n=2)
    world.config(world.run("base", 0.25), world.run("after", 0.3))
    monkeypatch.chdir(tmp_path)
    for line in lines:
        app(arguments(line)[1:], standalone_mode=False)
    assert "0 removed, 2 runs stay" in capsys.readouterr().out
    assert len(world.store.run_ids()) == 2


def test_documented_settings_are_ones_that_prefect_has(monkeypatch):
    from prefect.settings import Settings

    settings = dict(re.findall(r"(PREFECT_SERVER_\w+)=(\S+)", TEXT))
    assert len(settings) == 3
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert server.analytics_enabled is False
    assert server.services.db_vacuum.enabled_vacuum_types == {"events", "flow_runs", "orphans"}
    assert server.services.db_vacuum.retention_period.days == 30
