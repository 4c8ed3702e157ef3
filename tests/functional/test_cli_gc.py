"""audit gc: what would go, what stays and why, and that nothing referenced is ever lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from audit.errors import ExitCode
from audit.store import Store
from tests.synthetic import World

DAYS = 86400
RULE = """
[[gate.rules]]
region = "opening"
kind = "limit"
fail = {fail}
"""


def age(store: Path, days: float, *, skip: str = "") -> None:
    for path in (store / "runs").iterdir():
        if path.name != skip:
            for one in (path, *path.rglob("*")):
                os.utime(one, (time.time() - days * DAYS,) * 2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def used(world: World, audit) -> tuple[World, dict[str, str]]:
    """Return a store of old runs: compared, approved, frozen in a floor, captured only, loose, unfinished."""
    base, after = world.run("base", 0.25), world.run("release-1", 0.251)
    seeds = [world.run(f"seed-{i}", 0.25 + 0.001 * i) for i in range(3)]
    frozen = [world.run(f"frozen-{i}", 0.25 + 0.001 * i) for i in range(3)]
    loose, waiting = world.run("loose", 0.3), world.run("waiting", 0.3)
    world.config(base, after, seeds, rules=RULE)
    assert audit("gate", "audit.toml").code == ExitCode.PASS
    named = Store(world.root / "store").comparison_ids()[0]
    approved = audit("approve", named, "--reason", "released", "--by", "a@b.org", "--store", "store")
    assert approved.code == 0, approved.err
    world.config(base, waiting, frozen, name="next.toml", rules=RULE)
    assert audit("floor", "next.toml", "--out", "floor.json").code == 0
    text = world.config(base, waiting, name="next.toml", rules=RULE).read_text()
    (world.root / "next.toml").write_text(text + '[[replicates]]\nfloor = "floor.json"\n')
    spec = world.store.spec(loose)
    started = world.store.begin_run(type(spec)(**{**vars(spec), "targets_digest": "other"}), 3)
    return world, {
        "base": base, "after": after, "loose": loose, "waiting": waiting, "started": started.run_id,
        **{f"seed-{i}": one for i, one in enumerate(seeds)},
        **{f"frozen-{i}": one for i, one in enumerate(frozen)},
    }  # fmt: skip


def test_gc_tells_what_would_go_and_why_the_rest_stays_and_removes_nothing(audit, used):
    world, ids = used
    age(world.root / "store", 100)
    before = sorted(path for path in (world.root / "store").rglob("*"))
    done = audit("gc", "--store", "store", "--json")
    assert done.code == 0
    going = {one["id"]: one["reason"] for one in done.json["removed"]}
    assert going == {
        ids["started"]: "unfinished",
        **{ids[name]: "unreferenced" for name in ("loose", "waiting", "frozen-0", "frozen-1", "frozen-2")},
    }
    stays = {one["id"]: one["reason"] for one in done.json["kept"]}
    assert set(stays) == {ids[name] for name in ("base", "after", "seed-0", "seed-1", "seed-2")}
    assert stays[ids["seed-0"]].startswith("compared in cmp-")
    assert "approved in approval-" in stays[ids["after"]]
    assert sorted(path for path in (world.root / "store").rglob("*")) == before
    assert "would be removed" in audit("gc", "--store", "store").out


def test_gc_keeps_what_configurations_and_their_floors_name(audit, used):
    world, ids = used
    age(world.root / "store", 100)
    done = audit("gc", "next.toml", "--yes", "--json")
    assert [one["id"] for one in done.json["removed"]] == [ids["started"], ids["loose"]]
    assert not (world.root / "store" / "runs" / ids["loose"]).exists()
    assert audit("verify", "--store", "store").code == 0  # tombstones stand in the log
    log = [json.loads(path.read_text()) for path in sorted((world.root / "store" / "log").glob("*.json"))]
    assert {entry["payload"]["id"] for entry in log if entry["kind"] == "gc"} == {
        ids["loose"],
        ids["started"],
    }
    assert audit("gate", "audit.toml").code == ExitCode.PASS
    assert audit("gate", "next.toml").code == ExitCode.FAIL


def test_gc_leaves_what_is_young(audit, used):
    world, ids = used
    age(world.root / "store", 6, skip=ids["loose"])
    assert audit("gc", "--store", "store", "--json").json["removed"] == []
    found = audit("gc", "--store", "store", "--older-than", "5", "--unfinished", "5", "--json").json[
        "removed"
    ]
    assert ids["loose"] not in {one["id"] for one in found}
    assert ids["started"] in {one["id"] for one in found}


def test_gc_of_no_store_and_of_a_negative_age_is_refused(audit, tmp_path):
    assert audit("gc", "--store", "nowhere").code == ExitCode.STORE
    assert audit("gc", "--older-than", "-1").code == ExitCode.USAGE
