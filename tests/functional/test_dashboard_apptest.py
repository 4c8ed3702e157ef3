"""The dashboard's logic without a browser: filters, links, and stores that are not as they should be."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from audit.config import load_config
from audit.pipeline import approve, gate_runs
from audit.store import Store
from dashboards import acceptance
from dashboards.content import CONFIGS_VARIABLE
from dashboards.data import STORE_VARIABLE
from dashboards.views import effects, log, overview, trends
from tests.dashboard_store import Audited, build, build_many, build_streams
from tests.synthetic import World, release

APP = Path(__file__).parents[2] / "dashboards" / "app.py"
Look = Callable[..., AppTest]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Return a store with a text and a vision audit."""
    return build(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture
def copy(audited: Audited, tmp_path: Path) -> Path:
    """Return a copy of that store that a test may damage."""
    return Path(shutil.copytree(audited.store, tmp_path / "store"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    st.cache_resource.clear()
    yield
    for name in (STORE_VARIABLE, CONFIGS_VARIABLE):
        os.environ.pop(name, None)


def _draw(page: str) -> None:
    from importlib import import_module

    from dashboards import navigation, state

    state.read_address()
    navigation.choose_page()
    import_module(f"dashboards.views.{page}").page()


def open_page(page: str, store: Path, *, config: Path | None = None, **address: str) -> AppTest:
    os.environ[STORE_VARIABLE] = str(store)
    os.environ[CONFIGS_VARIABLE] = str(config) if config else ""
    app = AppTest.from_function(_draw, kwargs={"page": page}, default_timeout=60)
    for key, value in address.items():
        app.query_params[key] = value
    return app.run()


def said(app: AppTest) -> str:
    """Return everything that is written on the page, HTML included."""
    parts = [*app.warning, *app.info, *app.error, *app.success, *app.caption, *app.markdown]
    bodies = [one.value for one in parts] + [one.proto.body for one in app.get("html")]
    assert not app.exception, app.exception
    return "\n".join(bodies)


def test_overview_of_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    os.environ[STORE_VARIABLE] = str(tmp_path / "nothing")
    app = AppTest.from_file(str(APP), default_timeout=60).run()
    assert "audit run audit.toml" in said(app)


@pytest.mark.parametrize("page", ["compare", "probe", "live", "trends", "runs", "log", "about"])
def test_every_page_of_an_empty_store_is_calm(page: str, tmp_path: Path) -> None:
    app = open_page(page, tmp_path / "nothing")
    assert app.title[0].value
    said(app)


def test_a_filter_narrows_the_plots_and_stands_in_the_address(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison=audited.text_comparison)
    assert "of 48 probes.</b>" not in said(app)
    answers = Store(audited.store).comparison(audited.text_comparison).predictions
    app.segmented_control[0].set_value("flipped").run()
    assert f"<b>{answers['changed']} of 48 probes.</b>" in said(app)
    assert app.query_params["changed"] == "flipped"


def test_a_link_with_filters_opens_them(audited: Audited) -> None:
    address = {"comparison": audited.text_comparison, "segment": "source=mail", "label": "negative"}
    app = open_page("compare", audited.store, **address)
    chosen = {one.label: one.value for one in app.selectbox}
    assert (chosen["Segment"], chosen["Label"]) == ("source=mail", "negative")
    rows = [json.loads(line) for line in (audited.store.parent / "text.jsonl").read_text().splitlines()]
    wanted = sum(r["segments"]["source"] == "mail" and r["label"] == "negative" for r in rows)
    assert f"<b>{wanted} of 48 probes.</b>" in said(app)


def test_a_link_to_a_removed_comparison_shows_the_newest_and_says_so(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison="cmp-000000000000")
    assert "cmp-000000000000, which is not in this store" in said(app)
    newest = Store(audited.store).comparisons()[-1]["comparison_id"]
    assert app.query_params["comparison"] == newest


@pytest.mark.parametrize(
    "value", ["../../etc", "<script>", "cmp-", "![x](http://example.org/x.png)", "x" * 5000]
)
def test_nonsense_in_the_address_is_no_error(audited: Audited, value: str) -> None:
    for page in ("compare", "probe", "runs"):
        keys = ("comparison", "run", "probe", "layer", "effect", "changed", "segment", "region", "unit")
        shown = said(open_page(page, audited.store, **dict.fromkeys(keys, value)))
        assert "<script>" not in shown
        assert "![" not in shown


def test_a_damaged_table_of_probes_leaves_the_verdict_standing(audited: Audited, copy: Path) -> None:
    part = copy / "comparisons" / audited.text_comparison / "probes.parquet"
    part.write_bytes(b"PAR1 not any more")
    app = open_page("compare", copy, comparison=audited.text_comparison)
    assert "conditions failed" in said(app)
    assert "probes.parquet is damaged" in said(app)


def test_a_damaged_map_is_named_on_the_probe_page(audited: Audited, copy: Path) -> None:
    after = Store(copy).comparison(audited.text_comparison).after
    assert after is not None
    (copy / "runs" / after.run_id / "maps" / "part-00000.parquet").write_bytes(b"gone")
    app = open_page("probe", copy, comparison=audited.text_comparison)
    assert "part-00000.parquet is damaged" in said(app)


def test_a_manifest_of_a_newer_version_hides_no_other(audited: Audited, copy: Path) -> None:
    manifest = copy / "comparisons" / audited.text_comparison / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "schema_version": 99}))
    os.environ[STORE_VARIABLE] = str(copy)
    app = AppTest.from_file(str(APP), default_timeout=60).run()
    assert "schema version 99" in said(app)
    assert "base → after" in said(app)


def test_deleted_runs_still_show_the_verdict(audited: Audited, copy: Path) -> None:
    shutil.rmtree(copy / "runs")
    assert "no longer in the store" in said(open_page("compare", copy, comparison=audited.text_comparison))
    assert "no longer in the store" in said(open_page("probe", copy, comparison=audited.text_comparison))
    assert "no longer in the store" in said(open_page("live", copy, comparison=audited.text_comparison))


def test_an_unfinished_run_is_not_listed(audited: Audited, copy: Path) -> None:
    name = Store(copy).run_ids()[0]
    (copy / "runs" / name / "manifest.json").unlink()
    app = open_page("runs", copy, run=name)
    assert f"{name}, which is not in this store" in said(app)


def test_probe_shows_words_only_from_the_file_that_was_captured(audited: Audited) -> None:
    address = {"comparison": audited.text_comparison, "probe": "t-001"}
    shown = said(open_page("probe", audited.store, config=audited.text, **address))
    assert ">Nils</i>" in shown
    bare = said(open_page("probe", audited.store, **address))
    assert "Nils" not in bare
    assert "audit dashboard --config" in bare
    other = said(open_page("probe", audited.store, config=audited.vision, **address))
    assert "None of the 1 given probe files is the one that was captured" in other


def test_probe_with_a_changed_file_shows_positions_and_the_reason(audited: Audited) -> None:
    text = (audited.store.parent / "text.jsonl").read_text().replace("Nils", "Nora")
    (audited.store.parent / "changed.jsonl").write_text(text)
    config = audited.store.parent / "changed.toml"
    config.write_text(audited.text.read_text().replace("text.jsonl", "changed.jsonl"))
    address = {"comparison": audited.text_comparison, "probe": "t-001"}
    app = open_page("probe", audited.store, config=config, **address)
    assert "inputs digest" in said(app)
    assert "Nora" not in said(app)


def test_hostile_text_is_escaped_and_made_visible(audited: Audited) -> None:
    address = {"comparison": audited.text_comparison, "probe": "t-000", "unit": "tokens"}
    shown = said(open_page("probe", audited.store, config=audited.text, **address))
    assert "<script" not in shown
    assert "&lt;" in shown
    assert "\u202e" not in shown


def test_next_and_layer_move_through_probes_and_layers(audited: Audited) -> None:
    app = open_page("probe", audited.store, config=audited.text, comparison=audited.text_comparison)
    first = app.query_params.get("probe")
    app.button(key="step Next").click().run()
    second = app.query_params["probe"]
    assert second != first
    whole = said(app)
    app.select_slider[0].set_value("0").run()
    assert app.query_params["layer"] == "0"
    assert said(app) != whole
    assert app.query_params["probe"] == second


def test_verify_names_a_changed_file(audited: Audited, copy: Path) -> None:
    name = Store(copy).run_ids()[0]
    app = open_page("runs", copy, run=name)
    app.button[0].click().run()
    assert "as it was written" in said(app)
    path = copy / "runs" / name / "reliance.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    app = open_page("runs", copy, run=name)
    app.button[0].click().run()
    assert "reliance.parquet" in "".join(one.value for one in app.error)


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


def test_downloads_hold_every_cell(audited: Audited) -> None:
    from dashboards.frames import cells as cell_frame

    cells = Store(audited.store).comparison(audited.text_comparison).cells
    frame = cell_frame(cells)
    assert isinstance(frame, pl.DataFrame)
    assert len(frame) == len(cells)
    assert frame["value"].to_list() == [cell.value for cell in cells]


# --- approvals, trends, methods, streams ----------------------------------------------------------


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


def crossed(world: World) -> str:
    """Store a 2×2 whose second probe set has other texts, and French in place of English."""
    from audit.pipeline import compare_runs
    from audit.pipeline.publish import publish
    from audit.pipeline.runs import read_run

    runs = [world.run(name, share) for name, share in (("base", 0.25), ("new", 0.3))]
    ours = world.probes.read_text()
    world.probes.write_text(ours.replace("one two", "new two").replace('"en"', '"fr"'))
    domain = [world.run(name, share) for name, share in (("base", 0.26), ("new", 0.34))]
    world.probes.write_text(ours)
    one, two = (read_run(world.store, name) for name in domain)
    compared = compare_runs(runs[0], runs[1], domain=(one, two, ()), store=world.store)
    return publish(world.store, compared, None)


def test_filters_of_a_2x2_hold_for_both_probe_sets(tmp_path: Path) -> None:
    world = World(tmp_path)
    name = crossed(world)
    app = open_page("compare", world.store.root, comparison=name, segment="language=de")
    shown = said(app)
    assert "<b>20 of 40 probes.</b>" in shown
    assert "20 of 40 probes of the second one are left" in shown
    assert any(one.label == "What moved it" for one in app.segmented_control)
    assert "the data (same checkpoint)" in shown
    gone = open_page("compare", world.store.root, comparison=name, segment="language=en")
    assert "of the second probe set, no probe of it fits these filters" in said(gone)
    assert not any(one.label == "What moved it" for one in gone.segmented_control)


def test_methods_of_one_pair_are_held_against_each_other(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison=audited.text_comparison, region="name")
    shown = said(app)
    assert "Rank correlation, over the probes, of the shift of <b>name</b>" in shown
    store = Store(audited.store)
    names = {"rollout": audited.text_comparison, "raw_attention": audited.other_method}
    manifests = list(reversed(store.comparisons()))
    assert effects.same_pair(store.comparison(audited.text_comparison), manifests) == names
    found = effects.agreement("name", names)
    assert found is not None
    tables = [store.comparison_probes(name).filter(pl.col("region") == "name") for name in names.values()]
    one, two = (table.sort("probe_id")["shift"].to_numpy() for table in tables)
    ranks = [np.argsort(np.argsort(values)) for values in (one, two)]
    if len({*one}) == len(one) and len({*two}) == len(two):
        assert found["rollout", "raw_attention"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["rollout", "rollout"] == pytest.approx(1.0)


def test_streams_and_sounds_are_drawn(tmp_path: Path) -> None:
    text, pair, sound, clip = build_streams(tmp_path)
    shown = said(open_page("probe", tmp_path / "store", config=text, comparison=pair, probe="s-03"))
    assert ">film</i>" in shown
    assert shown.count("Part of the whole map on this stream") == 2
    assert "decoder:&lt;i&gt;" in shown
    drawn = said(open_page("probe", tmp_path / "store", config=sound, comparison=clip, probe="a-03"))
    assert drawn.count('title="0.98–1.00 s') + drawn.count('title=".98–1.00 s') == 3
    assert 'class="panels wide"' in drawn
    assert drawn.count("data:image/png;base64,") == 3


def test_a_store_of_5000_runs_opens(failed: tuple[World, Path, str], tmp_path: Path) -> None:
    many = build_many(failed[0].store.root, tmp_path / "many", runs=5000, comparisons=500)
    os.environ[STORE_VARIABLE] = str(many)
    assert "500 audits so far" in said(AppTest.from_file(str(APP), default_timeout=60).run())
    app = open_page("runs", many, run=f"run-{4999:012x}")
    assert len(app.dataframe[0].value) == 5000
    assert "does not exist" not in said(app)
    said(open_page("compare", many))


def test_an_expired_link_of_a_probe_is_explained(audited: Audited) -> None:
    app = open_page("probe", audited.store, comparison=audited.text_comparison, probe="gone")
    assert "is not in this comparison" in said(app)
    assert "gone" not in app.query_params.get("probe", [])
