"""What the dashboard tells over time: approvals, the log, trends, and large stores."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from audit.config import load_config
from audit.errors import StoreError
from audit.pipeline import approve, gate_runs
from audit.store._files import seal
from dashboards import acceptance, data
from dashboards.data import STORE_VARIABLE
from dashboards.views import log, overview, trends
from tests.dashboard_app import APP, fresh, open_page, said
from tests.dashboard_store import build_many
from tests.synthetic import World, release

LENIENT = """
[[gate.rules]]
region = "opening"
kind = "limit"
fail = {fail}
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield from fresh()


def test_verdicts_of_the_log_name_a_changed_policy_and_repeated_attempts() -> None:
    def entry(index: int, policy: str, attempt: int) -> dict[str, object]:
        payload = {"comparison_id": f"cmp-{index}", "outcome": "FAIL", "policy": policy, "subject": "s"}
        return {
            "kind": "verdict",
            "time": "2026-01-01T00:00:00+00:00",
            "payload": {**payload, "attempt": attempt},
        }

    found = log.verdicts([entry(0, "a", 1), {"kind": "run", "time": "", "payload": {}}, entry(1, "b", 2)])
    assert [one["comparison"] for one in found] == ["cmp-1", "cmp-0"]
    assert found[0]["remark"] == "attempt 2 on this pair; another policy than the time before"
    assert found[1]["remark"] == ""


def test_models_put_the_worst_newest_verdict_first() -> None:
    def manifest(after: str, outcome: str, day: int) -> dict[str, object]:
        return {
            "comparison_id": f"cmp-{after}{day}",
            "before": {"checkpoint": "base"},
            "after": {"checkpoint": after},
            "method": "rollout",
            "kind": "paired",
            "outcome": outcome,
            "n_probes": 1,
            "replicates": [],
            "provenance": {"time": f"2026-01-{day:02d}T00:00:00+00:00"},
        }

    stored = [manifest("a", "FAIL", 1), manifest("a", "PASS", 2), manifest("b", "INCONCLUSIVE", 1)]
    found = overview.models(stored)
    assert [(one.name, one.outcome, len(one.history)) for one in found] == [
        ("base → b", "INCONCLUSIVE", 1),
        ("base → a", "PASS", 2),
    ]


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Path, str]:
    """Return a failing audit that ann captured: its world, configuration and comparison."""
    monkeypatch.setenv("ROLLOUT_AUDIT_AUTHOR", "ann@example.org")
    world = World(tmp_path)
    config = world.config(*release(world))
    return world, config, str(gate_runs(load_config(config)).comparison_id)


def test_the_shown_command_accepts_the_failing_rule(failed: tuple[World, Path, str]) -> None:
    world, _, name = failed
    app = open_page("compare", world.store.root, comparison=name)
    app.text_input(key="approve by").set_value("bob@example.org")
    app.text_input(key="approve reason").set_value("wanted; it's fine").run()
    shown = [one.value for one in app.code]
    assert len(shown) == 2
    for line in shown:
        command = shlex.split(line)
        assert command[:3] == ["audit", "approve", name]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
    accepted = said(open_page("compare", world.store.root, comparison=name))
    assert "accepted by approval" in accepted
    listed = said(open_page("log", world.store.root))
    assert "limit shift opening on opening" in listed
    assert "wanted; it&#x27;s fine" in listed
    assert ">counts<" in listed


def test_an_approval_that_does_not_count_says_why(failed: tuple[World, Path, str]) -> None:
    world, config, name = failed
    given = {"reason": "wanted", "by": "bob@example.org", "expires": "2999-01-01"}
    approve(world.store, name, rule="limit shift opening", **given)  # type: ignore[arg-type]
    config.write_text(config.read_text().replace("within = 0.02", "within = 0.03"))
    again = str(gate_runs(load_config(config)).comparison_id)
    assert "the policy changed since" in said(open_page("compare", world.store.root, comparison=again))
    app = open_page("log", world.store.root)
    assert app.dataframe[0].value["remark"][0] == (
        "attempt 2 on this pair; policy loosened: 'excess shift *' .02 → .03"
    )


def test_rules_of_one_name_cannot_be_accepted_and_it_says_so(failed: tuple[World, Path, str]) -> None:
    from dataclasses import replace

    world, _, name = failed
    comparison, verdict = world.store.comparison(name), world.store.verdict(name)
    assert verdict is not None
    rule = verdict.policy.rules[0]
    twice = replace(verdict, policy=replace(verdict.policy, rules=(rule, replace(rule, fail=0.5))))
    limit = acceptance.commands(comparison, twice, "store", acceptance.Given())[0]
    assert limit.line is None
    assert "2 rules of the policy are called" in str(limit.obstacle)


def test_trends_tell_a_drift_over_all_releases(tmp_path: Path) -> None:
    world = World(tmp_path, n=24)
    seeds = [world.run(f"seed-{i}", 0.25 + 0.002 * i) for i in range(-1, 2)]
    base = world.run("base", 0.25, noise=0.001)
    names = []
    for i in range(11):
        run = world.run(f"release-{i}", 0.25 + 0.004 * (i + 1), noise=0.001)
        names.append(str(gate_runs(load_config(world.config(base, run, seeds, fail=0.5))).comparison_id))
    newest = "base → release-10 · rollout"
    app = open_page("trends", world.store.root, model=newest, region="opening")
    assert app.selectbox[0].value == newest
    assert "the attention map moves towards 'opening'" in app.warning[0].value.replace("\\", "")
    assert "11 audits of <b>opening</b>" in said(app)
    model = next(one for one in overview.models(world.store.comparisons()) if one.name in newest)
    assert [one["comparison_id"] for one in trends.line(model, world.store.comparisons())] == names


def test_trends_tell_a_change_at_once_and_mark_an_approval(tmp_path: Path) -> None:
    world = World(tmp_path, n=24)
    seeds = [world.run(f"seed-{i}", 0.25 + 0.002 * i) for i in range(-1, 2)]
    base = world.run("base", 0.25, noise=0.001)
    names = []
    for i, opening in enumerate([0.25, 0.251, 0.249, 0.25, 0.31, 0.309, 0.31]):
        run = world.run(f"release-{i}", opening, noise=0.001)
        names.append(str(gate_runs(load_config(world.config(base, run, seeds))).comparison_id))
    given = {"reason": "wanted", "by": "bob@example.org", "expires": "2999-01-01"}
    approve(world.store, names[4], rule="limit shift opening", **given)  # type: ignore[arg-type]
    newest = "base → release-6 · rollout"
    app = open_page("trends", world.store.root, model=newest, region="opening")
    shown = said(app)
    assert ".250 → .310 on average" in shown
    assert f"({names[4]})" in shown
    assert shown.count("is another:") == 1
    assert "Flag: an approval." in shown
    assert "control limits, where harmless re-trainings lie" in shown
    calm = said(open_page("trends", world.store.root, model="base → release-3 · rollout", region="opening"))
    assert "Change points can be told from the 5th audit" in calm
    listed = said(open_page("overview", world.store.root))
    assert "accepted by bob@example.org" in listed


def test_what_is_new_since_an_approval_is_told_by_model() -> None:
    def model(time: str, name: str) -> overview.Model:
        latest = {"comparison_id": name, "outcome": "FAIL", "provenance": {"time": time}}
        return overview.Model("a → b", "rollout", "paired", (latest,))

    given = {"comparison_id": "cmp-1", "by": "bob", "provenance": {"time": "2026-02-01T00:00:00+00:00"}}
    assert overview.approval_remark(model("2026-01-01T00:00:00+00:00", "cmp-1"), given) == "accepted by bob"
    newer = overview.approval_remark(model("2026-03-01T00:00:00+00:00", "cmp-2"), given)
    assert newer == "new since the approval of 1 Feb 2026, 00:00 UTC"
    assert overview.approval_remark(model("2026-01-01T00:00:00+00:00", "cmp-0"), given) == ""
    assert overview.approval_remark(model("2026-03-01T00:00:00+00:00", "cmp-2"), None) == ""


def test_a_sparkline_has_a_bar_for_each_audit() -> None:
    drawn = overview.sparkline([0.01, None, 0.04])
    assert drawn.count("<i ") == 2
    assert "height:100%" in drawn
    assert overview.sparkline([0.01]) == ""


def test_a_store_of_5000_runs_opens(failed: tuple[World, Path, str], tmp_path: Path) -> None:
    many = build_many(failed[0].store.root, tmp_path / "many", runs=5000, comparisons=500)
    os.environ[STORE_VARIABLE] = str(many)
    assert "500 audits so far" in said(AppTest.from_file(str(APP), default_timeout=60).run())
    app = open_page("runs", many, run=f"run-{4999:012x}")
    assert len(app.dataframe[0].value) == 5000
    assert "does not exist" not in said(app)
    said(open_page("compare", many))


def test_an_approval_is_read_alike_on_every_page_and_names_all_who_gave_it(
    failed: tuple[World, Path, str],
) -> None:
    world, _, name = failed
    verdict = world.store.verdict(name)
    assert verdict is not None
    labels = list(dict.fromkeys(one.rule.label for one in verdict.rules if one.outcome.value == "FAIL"))
    assert len(labels) == 2
    for label, by in zip(labels, ("bob@example.org", "eve@example.org"), strict=True):
        assert ">FAIL</span>" in said(open_page("overview", world.store.root))
        approve(world.store, name, rule=label, reason="wanted", by=by, expires="2999-01-01")  # type: ignore[arg-type]
    listed = said(open_page("overview", world.store.root))
    assert "<b>1</b>PASS" in listed
    assert "FAIL" not in listed
    assert "(approved)" in listed
    for label, by in zip(labels, ("bob@example.org", "eve@example.org"), strict=True):
        assert f"{label} on opening" in listed
        assert f"accepted by {by} until 2999-01-01 (wanted)" in listed
    chosen = open_page("compare", world.store.root, comparison=name).selectbox[0]
    assert chosen.options[0].startswith("PASS (approved) · ")
    run = world.store.comparison(name).after
    assert run is not None
    links = open_page("runs", world.store.root, run=run.run_id).get("page_link")
    assert any("PASS \\(approved\\)" in one.proto.label for one in links)


@pytest.fixture
def passed(tmp_path: Path) -> tuple[World, str]:
    """Return a passing audit: its world and comparison."""
    world = World(tmp_path)
    config = world.config(*release(world), fail=0.9, rules=LENIENT)
    return world, str(gate_runs(load_config(config)).comparison_id)


@pytest.mark.parametrize("how", ["rewritten", "truncated", "deleted", "sealed again"])
def test_a_running_dashboard_sees_what_was_changed_since_it_was_logged(
    passed: tuple[World, str], how: str
) -> None:
    world, name = passed
    folder = world.store.root / "comparisons" / name
    before = said(open_page("overview", world.store.root))
    assert '<span class="badge PASS">' in before
    said(open_page("compare", world.store.root, comparison=name))
    path = folder / ("manifest.json" if how == "sealed again" else "verdict.json")
    whole = path.read_bytes()
    if how == "rewritten":
        path.write_bytes(whole.replace(b'"pass"', b'"fail"').replace(b'"PASS"', b'"FAIL"'))
        assert path.read_bytes() != whole
    elif how == "truncated":
        path.write_bytes(whole[:-1])
    elif how == "deleted":
        path.unlink()
    else:
        record = json.loads(whole)
        content = {k: v for k, v in record.items() if k not in ("digest", "provenance", "seal")}
        path.write_bytes(seal({**content, "sentence": "PASS: trust me"}, record["provenance"]))
    listed = said(open_page("overview", world.store.root))
    assert '<span class="badge PASS">' not in listed
    assert '<span class="badge ERROR">' in listed
    assert "(changed since it was logged)" in listed
    app = open_page("compare", world.store.root, comparison=name)
    assert app.selectbox[0].options[0].startswith("ERROR (changed since it was logged) · ")
    assert "changed since it was logged" in said(app)
    assert "badge PASS" not in said(app)
    run = world.store.comparison(name).after if how != "sealed again" else None
    links = open_page("runs", world.store.root, run=run.run_id if run else "").get("page_link")
    assert any(r"ERROR \(changed since it was logged\)" in one.proto.label for one in links)


def test_a_running_dashboard_sees_a_damaged_map(passed: tuple[World, str]) -> None:
    world, name = passed
    os.environ[STORE_VARIABLE] = str(world.store.root)
    run = world.store.comparison(name).after
    assert run is not None
    data.map_of(run.run_id, "p-000", "input")
    (part,) = (world.store.root / "runs" / run.run_id / "maps").glob("*.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="SHA-256 is not the listed one"):
        data.map_of(run.run_id, "p-000", "input")
    part.unlink()
    with pytest.raises(StoreError, match="listed but missing"):
        data.map_of(run.run_id, "p-000", "input")
    part.write_bytes(whole)
    assert data.map_of(run.run_id, "p-000", "input").probe_id == "p-000"
