"""audit list shows a verdict as it is read: with the approvals that count."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from audit.config import load_config
from audit.pipeline import accepted_outcomes, approve, gate_runs
from tests.synthetic import World, release

EXPIRES = "2999-01-01"


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, str]:
    monkeypatch.setenv("ROLLOUT_AUDIT_AUTHOR", "ann@example.org")
    world = World(tmp_path)
    verdict = gate_runs(load_config(world.config(*release(world))))
    assert verdict.status == "FAIL"
    return world, str(verdict.comparison_id)


def accept(world: World, name: str, rule: str) -> None:
    facts = {"reason": "wanted", "by": "bob@example.org", "expires": EXPIRES}
    approve(world.store, name, rule=rule, **facts)


def row_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


def test_a_comparison_passes_in_the_list_once_every_failing_rule_is_approved(failed, audit):
    world, name = failed
    store = ("--store", world.root / "store")
    accept(world, name, "limit shift opening")
    assert "FAIL " in row_of(audit("list", *store).out, name)  # another rule still fails
    accept(world, name, "excess shift *")
    assert "PASS (approved)" in row_of(audit("list", *store).out, name)
    (listed,) = audit("list", *store, "--json").json["comparisons"]
    assert (listed["outcome"], listed["accepted"]) == ("FAIL", "PASS")


def test_an_expired_approval_leaves_the_stored_outcome(failed):
    world, name = failed
    for rule in ("limit shift opening", "excess shift *"):
        accept(world, name, rule)
    assert accepted_outcomes(world.store, today=date(2998, 12, 31)) == {name: "PASS"}
    assert accepted_outcomes(world.store, today=date(2999, 1, 2)) == {}


def test_a_damaged_comparison_is_listed_as_it_was_stored(failed, audit):
    world, name = failed
    for rule in ("limit shift opening", "excess shift *"):
        accept(world, name, rule)
    path = next((world.root / "store" / "comparisons" / name).glob("verdict.json"))
    path.write_bytes(path.read_bytes().replace(b"FAIL", b"PASS"))
    assert "FAIL " in row_of(audit("list", "--store", world.root / "store").out, name)
