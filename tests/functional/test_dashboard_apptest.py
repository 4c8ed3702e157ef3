"""The dashboard's logic without a browser: filters, links, and stores that are not as they should be."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from streamlit.testing.v1 import AppTest

from audit.store import Store
from dashboards.data import STORE_VARIABLE
from dashboards.views import effects
from tests.dashboard_app import APP, fresh, open_page, said
from tests.dashboard_store import Audited, build, build_streams
from tests.synthetic import World


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Return a store with a text and a vision audit."""
    return build(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture
def copy(audited: Audited, tmp_path: Path) -> Path:
    """Return a copy of that store that a test may damage."""
    return Path(shutil.copytree(audited.store, tmp_path / "store"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield from fresh()


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


def offered(app: AppTest) -> set[str]:
    """Return the keys of the download buttons, which hold the names of the files."""
    return {str(one.key) for one in app.get("download_button")}


def test_files_of_a_selection_are_named_after_it(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison=audited.text_comparison)
    name, every = audited.text_comparison, offered(app)
    assert {f"csv {name}-segments", f"svg {name}-regions", f"csv {name}-probes"} <= every
    app = open_page("compare", audited.store, comparison=name, segment="source=mail", label="negative")
    left = re.search(r"<b>(\d+) of 48 probes", said(app))
    assert left is not None
    one = f"{name}-source-mail-label-negative-{left[1]}-probes"
    assert {f"svg {one}-regions", f"png {one}-layers", f"csv {one}-probes"} <= offered(app)
    shared = {key for key in offered(app) if one not in key}
    assert {key.rpartition("-")[2] for key in shared} == {"rules"}  # the verdict is about all probes


def test_filters_that_leave_no_probe_are_said_once_and_nothing_else_is_claimed(audited: Audited) -> None:
    answers = Store(audited.store).comparison(audited.text_comparison).predictions
    assert answers["fixed"] == 0
    app = open_page("compare", audited.store, comparison=audited.text_comparison, changed="fixed")
    shown = said(app)
    assert shown.count("No probe fits these filters") == 1
    assert "holds no layers" not in shown
    assert not any("Every number" in one.label for one in app.expander)


def test_unknown_filters_of_a_link_are_named_and_dropped(audited: Audited) -> None:
    asked = {"segment": "x=y", "label": "nope", "effect": "zzz", "changed": "flipped"}
    app = open_page("compare", audited.store, comparison=audited.text_comparison, **asked)
    lines = [one.value for one in app.warning]
    assert len(lines) == 1
    assert all(f"{key} “{value}”" in lines[0] for key, value in asked.items() if key != "changed")
    assert set(app.query_params) == {"comparison", "changed"}


def test_a_link_to_another_comparison_leaves_the_filters_of_the_last_one(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison=audited.text_comparison, changed="flipped")
    assert "changed" in app.query_params
    app.query_params.clear()
    app.query_params["comparison"] = audited.other_method
    app.run()
    assert set(app.query_params) == {"comparison"}
    assert "of 48 probes.</b>" not in said(app)


def test_a_region_is_called_chosen_only_where_somebody_chose_it(audited: Audited) -> None:
    app = open_page("compare", audited.store, comparison=audited.text_comparison)
    assert "Region: <b>" in said(app)
    assert "as chosen above" not in said(app)
    app = open_page("compare", audited.store, comparison=audited.text_comparison, region="name")
    assert "Region: <b>name</b>, as chosen above." in said(app)


def test_shares_of_a_run_name_the_whole_stack(audited: Audited) -> None:
    shares = open_page("runs", audited.store).dataframe[-1].value
    assert "whole stack" in set(shares["layer"])
    assert not shares["layer"].isna().any()


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


def test_no_page_but_that_of_a_probe_reads_maps(audited: Audited, copy: Path) -> None:
    for name in ("maps", "layer_maps"):
        for folder in (copy / "runs").glob(f"*/{name}"):
            shutil.rmtree(folder)
    pages = ("overview", "compare", "trends", "runs", "log", "about")
    for page in pages:
        shown = said(open_page(page, copy, comparison=audited.text_comparison, segment="source=mail"))
        assert "damaged" not in shown
    assert "part-00000.parquet" in said(open_page("probe", copy, comparison=audited.text_comparison))


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


def test_a_link_to_a_comparison_of_a_newer_version_says_why(audited: Audited, copy: Path) -> None:
    path = copy / "comparisons" / audited.text_comparison / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    shown = said(open_page("compare", copy, comparison=audited.text_comparison))
    assert "which cannot be read" in shown
    assert "schema version 99" in shown


@pytest.mark.parametrize("name", ["comparison.json", "verdict.json", "manifest.json"])
def test_a_damaged_comparison_is_named_and_hides_no_other(audited: Audited, copy: Path, name: str) -> None:
    (copy / "comparisons" / audited.text_comparison / name).write_bytes(b"{\x00 gone")
    assert name in said(open_page("compare", copy, comparison=audited.text_comparison))
    assert "base → after" in said(open_page("overview", copy))


def test_a_link_to_a_removed_run_shows_the_newest_and_says_so(audited: Audited) -> None:
    app = open_page("runs", audited.store, run="run-000000000000")
    assert "run-000000000000, which is not in this store" in said(app)


def test_an_unfinished_run_is_not_listed(audited: Audited, copy: Path) -> None:
    name = Store(copy).run_ids()[0]
    (copy / "runs" / name / "manifest.json").unlink()
    app = open_page("runs", copy, run=name)
    assert f"{name}, which is unfinished or has lost its manifest" in said(app)


def test_a_damaged_run_is_called_damaged(audited: Audited, copy: Path) -> None:
    name = Store(copy).run_ids()[0]
    (copy / "runs" / name / "manifest.json").write_bytes(b"{")
    assert f"{name}, which is damaged" in said(open_page("runs", copy, run=name))


def test_probe_shows_words_only_from_the_file_that_was_captured(audited: Audited) -> None:
    address = {"comparison": audited.text_comparison, "probe": "t-001"}
    shown = said(open_page("probe", audited.store, config=audited.text, **address))
    assert ">Nils</i>" in shown
    bare = said(open_page("probe", audited.store, **address))
    assert "Nils" not in bare
    assert "audit dashboard --config" in bare
    other = said(open_page("probe", audited.store, config=audited.vision, **address))
    assert "The given probe file is not the one that was captured" in other


def test_probe_with_a_changed_file_shows_positions_and_the_reason(audited: Audited) -> None:
    text = (audited.store.parent / "text.jsonl").read_text().replace("Nils", "Nora")
    (audited.store.parent / "changed.jsonl").write_text(text)
    config = audited.store.parent / "changed.toml"
    config.write_text(audited.text.read_text().replace("text.jsonl", "changed.jsonl"))
    address = {"comparison": audited.text_comparison, "probe": "t-001"}
    app = open_page("probe", audited.store, config=config, **address)
    assert "inputs digest" in said(app)
    assert "Nora" not in said(app)


@pytest.mark.parametrize("how", ["changed", "changed at the same time", "deleted"])
def test_a_changed_image_is_not_drawn_under_the_old_map(audited: Audited, tmp_path: Path, how: str) -> None:
    shutil.copy(audited.store.parent / "vision.jsonl", tmp_path / "vision.jsonl")
    config = audited.vision.read_text().replace('[[replicates]]\npath = "vision/seed-*"\n', "")
    (tmp_path / "vision.toml").write_text(config)
    shutil.copytree(audited.store.parent / "images", tmp_path / "images")
    address = {"comparison": audited.vision_comparison, "probe": "v-001"}
    show = {"config": tmp_path / "vision.toml", **address}
    whole = said(open_page("probe", audited.store, **show))  # type: ignore[arg-type]
    assert 'alt="the probe' in whole
    path = tmp_path / "images" / "001.png"
    before = path.stat()
    if how == "deleted":
        path.unlink()
    else:
        shutil.copy(tmp_path / "images" / "002.png", path)
    if how == "changed at the same time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    shown = said(open_page("probe", audited.store, **show))  # type: ignore[arg-type]
    assert 'alt="the probe' not in shown
    assert (
        "001.png" if how == "deleted" else "The content of v-001 is not the one that was captured"
    ) in shown
    other = said(open_page("probe", audited.store, **{**show, "probe": "v-003"}))  # type: ignore[arg-type]
    assert 'alt="the probe' in other


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


def _button(app: AppTest, label: str) -> Any:
    return next(one for one in app.button if one.label == label)


def test_verify_everything_computes_again_and_names_what_is_lost(audited: Audited, copy: Path) -> None:
    app = open_page("runs", copy)
    _button(app, "Verify everything").click().run()
    number = len(Store(copy).run_ids()) + 3
    told = "".join(one.value for one in app.success)
    assert f"{number} runs and comparisons are as they were logged; 3 comparisons came out the same" in told
    shutil.rmtree(copy / "comparisons" / audited.vision_comparison)
    app = open_page("runs", copy)
    _button(app, "Verify everything").click().run()
    assert not app.success
    assert f"{audited.vision_comparison} is recorded in the log but not in the store" in app.error[0].value


def test_a_garbled_entry_of_the_log_hides_no_entry_before_it(audited: Audited, copy: Path) -> None:
    app = open_page("log", copy)
    assert "follow one another. Whether the stored files match" in app.success[0].value
    entries = sorted((copy / "log").glob("*.json"))
    verdicts = [one for one in Store(copy).log() if one["kind"] == "verdict"]
    assert len(app.dataframe[0].value) == len(verdicts) == 3
    entries[-1].write_bytes(b"garbled")
    app = open_page("log", copy)
    shown = said(app)
    assert not app.success
    assert f"the {len(entries) - 1} entries before the damage" in shown
    assert entries[-1].name in app.error[0].value
    assert len(app.dataframe[0].value) == 2
    entries[0].write_bytes(b"garbled")
    shown = said(open_page("log", copy))
    assert "No verdict stands before the damage" in shown
    assert "The log is empty" not in shown


def test_verify_names_a_changed_file(audited: Audited, copy: Path) -> None:
    name = Store(copy).run_ids()[0]
    app = open_page("runs", copy, run=name)
    _button(app, "Verify now").click().run()
    assert "as it was written" in said(app)
    path = copy / "runs" / name / "reliance.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    app = open_page("runs", copy, run=name)
    _button(app, "Verify now").click().run()
    assert "reliance.parquet" in "".join(one.value for one in app.error)


def test_downloads_hold_every_cell(audited: Audited) -> None:
    from dashboards.frames import cells as cell_frame

    cells = Store(audited.store).comparison(audited.text_comparison).cells
    frame = cell_frame(cells)
    assert isinstance(frame, pl.DataFrame)
    assert len(frame) == len(cells)
    assert frame["value"].to_list() == [cell.value for cell in cells]


# --- approvals, trends, methods, streams ----------------------------------------------------------


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


def test_an_expired_link_of_a_probe_is_explained(audited: Audited) -> None:
    app = open_page("probe", audited.store, comparison=audited.text_comparison, probe="gone")
    assert "is not in this comparison" in said(app)
    assert "gone" not in app.query_params.get("probe", [])
