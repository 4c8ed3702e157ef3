"""What the dashboard computes on demand: heads, rows and methods of a probe, and inputs of one's own."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from audit.errors import ProbeError
from audit.media import load_audio
from audit.pipeline import capture_both, capture_one, load_run_checkpoint, memory_obstacle, method_on_demand
from audit.probes import read_probes
from audit.records import Method, Probe
from audit.store import Store
from dashboards import controls, loaded
from dashboards.content import Content
from dashboards.views import edits, matrix
from tests.dashboard_app import fresh, open_page, said
from tests.dashboard_store import Audited, Kind, build, build_kinds


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    return build(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return build_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield from fresh()


def open_loaded(page: str, store: Path, config: Path, **address: str) -> AppTest:
    """Open a page as a reader who has allowed checkpoints to be loaded."""
    app = open_page(page, store, config=config, **address)
    app.session_state[loaded.LOADED] = True
    return app.run()


def shares(app: AppTest) -> list[float]:
    """Return the shares before that the words of the page carry, in order."""
    return [float(found) for found in re.findall(r"position \d+: (\d?\.\d+) →", said(app))]


def test_without_the_checkpoints_the_controls_are_off_and_say_why(audited: Audited) -> None:
    address = {"comparison": audited.text_comparison, "probe": "t-001"}
    app = open_page("probe", audited.store, config=audited.text, **address)
    off = {one.label: one.help for one in app.selectbox if one.disabled}
    assert set(off) == {"Heads", "Output row", "Method"}
    assert "computed from the checkpoints" in off["Heads"]
    bare = open_page("probe", audited.store, **address)
    assert "No configuration was given" in {one.label: one.help for one in bare.selectbox}["Heads"]


@pytest.mark.parametrize(
    "changed",
    [{"head": "2"}, {"row": "token:4"}, {"method": "raw_attention"}],
    ids=lambda one: next(iter(one)),
)
def test_a_probe_is_computed_for_another_head_row_or_method(
    audited: Audited, changed: dict[str, str]
) -> None:
    address = {"comparison": audited.text_comparison, "probe": "t-001", "unit": "tokens"}
    app = open_loaded("probe", audited.store, audited.text, **address, **changed)
    assert "Computed now, not stored" in said(app)
    store = Store(audited.store)
    before = store.comparison(audited.text_comparison).before
    assert before is not None
    spec = store.spec(before.run_id)
    probe = next(one for one in read_probes(audited.store.parent / "text.jsonl") if one.id == "t-001")
    head = changed.get("head")
    wanted = method_on_demand(
        spec.method, name=changed.get("method"), row=changed.get("row"), head=int(head) if head else None
    )
    expected = capture_one(load_run_checkpoint(spec), spec, probe, method=wanted).maps[0].weights
    assert shares(app)[: len(expected)] == pytest.approx(expected.tolist(), abs=6e-5)
    stored = store.map_of(spec.id, "t-001").weights
    assert np.abs(expected - stored).max() > 1e-3
    assert all(app.query_params[key] == value for key, value in changed.items())


def test_what_is_computed_now_equals_what_was_stored(audited: Audited) -> None:
    store = Store(audited.store)
    comparison = store.comparison(audited.text_comparison)
    assert comparison.before is not None
    assert comparison.after is not None
    specs = [store.spec(run.run_id) for run in (comparison.before, comparison.after)]
    probe = next(iter(read_probes(audited.store.parent / "text.jsonl")))
    found = capture_both([load_run_checkpoint(spec) for spec in specs], specs, probe)
    for spec, one in zip(specs, found, strict=True):
        assert one.maps[0].weights == pytest.approx(store.map_of(spec.id, probe.id).weights, abs=1e-6)


def test_heads_average_to_the_last_layers_rollout(audited: Audited) -> None:
    store = Store(audited.store)
    run = store.comparison(audited.text_comparison).before
    assert run is not None
    spec = store.spec(run.run_id)
    checkpoint, probe = load_run_checkpoint(spec), Probe("live", text="The film was good.")
    heads = [
        capture_one(checkpoint, spec, probe, method=method_on_demand(spec.method, head=i)).maps[0].weights
        for i in range(4)
    ]
    assert np.mean(heads, axis=0) == pytest.approx(
        capture_one(checkpoint, spec, probe).maps[0].weights, abs=1e-6
    )


def test_parameters_that_another_method_does_not_take_are_dropped() -> None:
    stored = Method("rollout", "cls", {"residual": 0.4, "top_k": 3})
    assert method_on_demand(stored, name="gradient_rollout").params == {}
    assert method_on_demand(stored, row="mean") == Method("rollout", "mean", {"residual": 0.4, "top_k": 3})


def test_more_memory_than_allowed_is_not_loaded(audited: Audited) -> None:
    os.environ[loaded.LIMIT_VARIABLE] = "0.0000001"
    address = {"comparison": audited.text_comparison}
    app = open_loaded("live", audited.store, audited.text, **address)
    assert "more than the 1e-07 GB allowed" in said(app).replace("\\", "")
    assert not app.text_area
    probe = open_loaded("probe", audited.store, audited.text, probe="t-001", **address)
    assert "1e-07 GB allowed" in str({one.label: one.help for one in probe.selectbox}["Heads"]).replace(
        "\\", ""
    )
    assert memory_obstacle(limit=1.0) is None


def test_a_changed_checkpoint_is_refused(audited: Audited, tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(audited.store.parent, tmp_path / "moved"))
    store, name = root / "store", audited.text_comparison
    config = audited.store.parent / "text" / "base" / "config.json"
    kept = config.read_text()
    try:
        config.write_text(kept.replace('"hidden_act": "gelu"', '"hidden_act": "relu"'))
        assert config.read_text() != kept
        app = open_loaded("live", store, audited.text, comparison=name)
        assert "is not the checkpoint of" in said(app).replace("\\", "")
    finally:
        config.write_text(kept)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x" * 100_000, "The text has 100,000 characters; shorten it to 2,000."),
        (" ", "Give a text to see both maps."),
    ],
)
def test_a_text_that_cannot_be_drawn_is_answered(audited: Audited, given: str, expected: str) -> None:
    app = open_loaded("live", audited.store, audited.text, comparison=audited.text_comparison)
    app.text_area[0].set_value(given).run()
    assert expected in said(app)
    assert "Predicted before" not in said(app)


def test_a_text_of_too_many_tokens_says_how_far_to_shorten_it(audited: Audited) -> None:
    app = open_loaded("live", audited.store, audited.text, comparison=audited.text_comparison)
    app.text_area[0].set_value("a " * 900).run()
    shown = said(app).replace("\\", "")
    assert re.search(r"The text has [\d,]+ tokens; shorten the text to [\d,]+ tokens\.", shown)
    assert "truncate" not in shown


def test_an_edit_shows_what_it_moved(audited: Audited) -> None:
    app = open_loaded("live", audited.store, audited.text, comparison=audited.text_comparison)
    app.text_area[0].set_value("The film was good .").run()
    assert "What your last edit moved" in [one.value for one in app.header]
    app.text_area[0].set_value("The film was bad .").run()
    shown = said(app)
    assert shown.count("<span>Before</span>") == 2  # the map, and what the edit moved in it
    assert shown.count("<span>After</span>") == 2
    assert "The film was good ." in shown


def test_words_of_an_edit_are_matched_in_order(audited: Audited) -> None:
    store = Store(audited.store)
    run = store.comparison(audited.text_comparison).after
    assert run is not None
    spec = store.spec(run.run_id)
    checkpoint = load_run_checkpoint(spec)
    probes = [Probe("live", text=text) for text in ("the film was good", "the film was so very good")]
    maps = [capture_one(checkpoint, spec, probe).maps[0] for probe in probes]
    found = edits.moved((maps[0], probes[0]), (maps[1], probes[1]), None)
    assert found is not None
    pieces, gained, (earlier, now) = found
    words = [piece.words for piece in pieces]
    assert words == ["·", "the", "film", "was", "so", "very", "good", "·"]
    assert earlier[[4, 5]].tolist() == [0.0, 0.0]
    assert earlier[[1, 6]] == pytest.approx(maps[0].weights[[1, 4]])
    assert gained == pytest.approx(now - earlier)


def test_a_sound_can_be_given(kinds: dict[str, Kind]) -> None:
    kind = kinds["sound"]
    store = kind.config.parent / "store"
    app = open_loaded("live", store, kind.config, comparison=kind.comparison)
    assert "Record a sound" in said(app)
    clip = (kind.config.parent / "clips/03.wav").read_bytes()
    app.get("file_uploader")[0].set_value(("tone.wav", clip, "audio/wav")).run()
    shown = said(app)
    assert 'class="panels wide"' in shown
    samples, rate = load_audio(clip)
    seconds = len(samples) / rate
    ends = [float(one) for one in re.findall(r"–(\d?\.\d+) s: ", shown)]
    assert max(ends) == pytest.approx(seconds, abs=0.011)
    app.get("file_uploader")[0].set_value(("tone.wav", b"RIFFnothing", "audio/wav")).run()
    assert "not a sound that can be read" in said(app)


def test_an_image_and_a_text_can_be_given_to_two_towers(kinds: dict[str, Kind]) -> None:
    kind = kinds["towers"]
    app = open_loaded("live", kind.config.parent / "store", kind.config, comparison=kind.comparison)
    picture = (kind.config.parent / "pictures/03.png").read_bytes()
    app.get("file_uploader")[0].set_value(("a.png", picture, "image/png")).run()
    shown = said(app)
    assert [one.value for one in app.header][:2] == ["Stream: text", "Stream: image"]
    assert shown.count('class="picture"') == 3
    assert 'class="words"' in shown
    app.get("file_uploader")[0].set_value(("a.png", io.BytesIO(b"no image").getvalue(), "image/png")).run()
    assert "not an image that can be read" in said(app)


def test_both_towers_of_a_stored_probe_are_drawn(kinds: dict[str, Kind]) -> None:
    kind = kinds["towers"]
    store = kind.config.parent / "store"
    shown = said(open_page("probe", store, config=kind.config, comparison=kind.comparison, probe="c-03"))
    assert shown.count('class="picture"') == 3
    assert ">liked</i>" in shown
    assert ">film</i>" in shown


def test_every_generated_token_has_its_row(kinds: dict[str, Kind]) -> None:
    kind = kinds["seq2seq"]
    store = kind.config.parent / "store"
    address = {"comparison": kind.comparison, "probe": "s-03"}
    closed = said(open_page("probe", store, config=kind.config, **address))
    assert "computed from the checkpoints: load them above" in closed
    app = open_loaded("probe", store, kind.config, **address)
    app.toggle(key="matrix on").set_value(True).run()
    assert "Each row is one generated token" in said(app)
    rows = {label for one in app.selectbox if one.label == "Output row" for label in one.options}
    assert "generated token 1" in rows


def test_generated_tokens_are_paged_and_stand_in_the_address(
    kinds: dict[str, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "SHOWN", 3)
    kind = kinds["seq2seq"]
    store = kind.config.parent / "store"
    address = {"comparison": kind.comparison, "probe": "s-03"}
    app = open_loaded("probe", store, kind.config, **address, tokens="4")
    app.toggle(key="matrix on").set_value(True).run()
    assert "generated token (3 to 5)" in said(app)
    app.query_params["tokens"] = "nonsense"
    app.run()
    assert "generated token (0 to 2)" in said(app)
    buttons = {one.label: one for one in app.button}
    assert buttons["Earlier tokens"].disabled
    buttons["Later tokens"].click().run()
    assert "generated token (3 to 5)" in said(app)
    assert app.query_params["tokens"] == "3"
    assert not {one.label: one for one in app.button}["Earlier tokens"].disabled


def test_the_matrix_ends_where_one_of_the_two_ends(
    kinds: dict[str, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kinds["seq2seq"]
    store = Store(kind.config.parent / "store")
    run = store.comparison(kind.comparison).before
    assert run is not None
    spec = store.spec(run.run_id)
    probe = next(iter(read_probes(kind.config.parent / "seq2seq.jsonl")))
    monkeypatch.setattr(matrix, "SHOWN", 3)
    checkpoint = load_run_checkpoint(spec)

    def capture(specs: object, probe: Probe, method: Method) -> object:
        if method.row in ("decoder:5", "decoder:6"):
            raise ProbeError("the checkpoint generates 5 tokens")
        return (capture_one(checkpoint, spec, probe, method=method),) * 2

    monkeypatch.setattr(loaded, "capture", capture)
    whole, rest = (matrix.rows_from(first, (spec, spec), probe) for first in (0, 3))
    assert (len(whole), len(rest)) == (4, 2)  # one more than is drawn tells of a further part
    cells = [
        cell for i, pair in enumerate(rest, start=3) for cell in matrix.row_cells(i, *pair, Content(probe))
    ]
    assert {cell["row"] for cell in cells} == {3, 4}
    assert {cell["value"] for cell in cells} == {0.0}
    prefix = [cell for cell in cells if cell["row"] == 4 and cell["stream"] == "prefix"]
    assert len(prefix) == 5
    assert matrix.rows_from(6, (spec, spec), probe) == []


def test_rows_name_what_stands_there() -> None:
    from audit.records import Map, Positions

    special = np.array([True, False, False, False, False])
    grid = Map("v", np.ones(5) / 5, Positions("patch", special, grid=(2, 2)))
    assert controls.rows_of([grid], None)[0] == ("token:0", "special")
    assert controls.rows_of([grid], None)[3] == ("token:3", "patch row 1, column 0")
    assert controls.rows_of([grid, grid], None) == []
