"""Texts of approvals, child processes and arguments cannot steer the terminal that prints them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from audit.config import load_config
from audit.pipeline import gate_runs
from tests.synthetic import World, release

RED = "\x1b[31mred"


def assert_made_visible(text: str) -> None:
    assert "\x1b" not in text
    assert "␛[31mred" in text


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("ROLLOUT_AUDIT_AUTHOR", "ann@example.org")
    return World(tmp_path)


def test_the_reason_of_an_approval_is_made_visible_in_lists_and_errors(world, audit):
    name = str(gate_runs(load_config(world.config(*release(world)))).comparison_id)
    store = ("--store", world.root / "store")
    facts = ("--rule", "limit shift opening", "--by", "bob@example.org", "--expires", "2999-01-01", *store)
    first = audit("approve", name, "--reason", RED, *facts)
    assert first.code == 0, first.err
    assert_made_visible(first.out)
    assert_made_visible(audit("list", *store).out)
    again = audit("approve", name, "--reason", "again", *facts)
    assert again.code != 0
    assert_made_visible(again.err)


def test_what_a_training_command_prints_last_is_made_visible(tmp_path, audit):
    trainer = tmp_path / "trainer.py"
    trainer.write_text(f"import sys\nprint({RED!r})\nsys.exit(1)\n")
    config = tmp_path / "audit.toml"
    command = f"{sys.executable} {trainer} {{seed}} {{out}}"
    (tmp_path / "probes.jsonl").write_text('{"id": "a", "text": "b", "regions": {"r": [[0, 1]]}}\n')
    config.write_text(
        '[checkpoints.before]\npath = "x"\n[checkpoints.after]\npath = "y"\n[probes]\npath = "probes.jsonl"\n'
        f"[[replicates]]\nseeds = 1\ncommand = '{command}'\npath = \"out/{{seed}}\"\n"
    )
    done = audit("replicate", config)
    assert done.code != 0
    assert_made_visible(done.err)
