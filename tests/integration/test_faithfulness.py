"""Faithfulness measured on models whose reliance is known, and through a whole audit and its store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from audit.capture import capture, cascade, shuffled
from audit.capture.attributions.attribution import _occlusion
from audit.config import load_config, parse_config
from audit.errors import ConfigError
from audit.faithfulness import summarise
from audit.pipeline import gate_runs, report_context, run_audit, verify_store
from audit.pipeline.faithfulness import _scores, _Subject, measure_faithfulness
from audit.records import Captured, CaptureSettings, Checkpoint, CheckpointInfo, Map, Positions, Probe
from audit.report import to_text
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration.tiny_models import (
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)
from tests.toy_models import Toy, toy_question

WORDS = ["the", "film", "was", "truly", "very", "good", "bad", "dull", "fine", "and", "she", "he", "liked"]


def toy_subject(matters: int, n: int = 8, probes: int = 16) -> _Subject:
    """Texts of n words to a model whose logit is the embedding of one place (after [CLS]) alone."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, n)) for _ in range(probes)]
    sample = tuple(Probe(f"p{i}", text=text, label="positive") for i, text in enumerate(texts))
    model = Toy(lambda embedded: embedded[:, matters, 0])
    info = CheckpointInfo("toy", "0" * 64, "0" * 64, "0" * 64)
    checkpoint = Checkpoint(info, model.eval(), word_tokenizer(), "sequence-classification", True)
    special = np.isin(np.arange(n + 2), (0, n + 1))
    positions = Positions("token", special)

    def maps(make):
        return {probe.id: Map(probe.id, make(), positions) for probe in sample}

    def exact():
        weights = rng.random(n + 2) * 0.1
        weights[matters] = 1
        return weights / weights.sum()

    def drawn():
        weights = rng.random(n + 2)
        return weights / weights.sum()

    spec = SimpleNamespace(
        method=SimpleNamespace(name="exact", row="auto"), target="label", settings=CaptureSettings()
    )
    plan = SimpleNamespace(spec=spec, role="after")
    found = {"exact": maps(exact), "drawn": maps(drawn), "flat": maps(lambda: np.full(n + 2, 1 / (n + 2)))}
    return _Subject(plan, checkpoint, sample, found)  # type: ignore[arg-type]


def test_the_map_of_the_one_word_that_matters_is_faithful_and_random_ones_are_not() -> None:
    subject = toy_subject(3)
    rows = list(_scores(subject, [], 6, 0))
    exact, drawn, flat = summarise(rows, audited="exact", resamples=999)
    assert (exact.method, drawn.method, flat.method) == ("exact", "drawn", "flat")
    assert exact.faithful
    assert not drawn.faithful
    assert not flat.faithful  # its ties are drawn: from left to right would be an order
    table = subject.checkpoint.model.table.weight[:, 0].detach().numpy()
    tokenizer = subject.checkpoint.processor
    worth = [abs(table[tokenizer(p.text)["input_ids"][3]] - table[4]) for p in subject.probes]
    size = float(np.mean(worth))
    assert exact.comprehensiveness == pytest.approx([size] * 5)  # gone with the first position
    assert exact.sufficiency == pytest.approx([0] * 5, abs=1e-9)
    assert exact.deletion is not None
    assert exact.deletion.area == pytest.approx(size * (1 - 0.5 / 8))
    assert exact.insertion is not None
    assert exact.insertion.area == pytest.approx(size * 0.5 / 8)


def test_the_occlusion_map_of_a_weighted_sum_is_faithful() -> None:
    """Every word counts, each place by its own factor, and occlusion finds them."""
    subject = toy_subject(3)
    factors = torch.tensor([0, 8, 0.1, 4, 0.5, 2, 0.2, 1, 0.05, 0], dtype=torch.float64)
    subject.checkpoint.model.logit = lambda embedded: embedded[..., 0].abs() @ factors
    maps = {}
    for probe in subject.probes:
        ids = subject.checkpoint.processor(probe.text)["input_ids"]
        asked = toy_question(subject.checkpoint.model, ids, special=(0, len(ids) - 1))
        with torch.no_grad():
            sizes = _occlusion(asked).numpy()
        maps[probe.id] = Map(probe.id, sizes / sizes.sum(), asked.batch[0].positions)
    judged = replace(subject, maps={"exact": subject.maps["exact"], "occlusion": maps})
    _, found = summarise(_scores(judged, [], 6, 0), audited="exact", resamples=999)
    assert found.method == "occlusion"
    assert found.faithful
    assert found.insertion is not None
    assert found.insertion.interval is not None
    assert found.insertion.interval[0] > 0


def test_random_orders_are_the_same_for_both_checkpoints() -> None:
    before, after = (
        [row for row in _scores(toy_subject(3), [], 2, 0) if row.measure == "random_deletion"]
        for _ in range(2)
    )
    assert before == after
    other = [row for row in _scores(toy_subject(3), [], 2, 1) if row.measure == "random_deletion"]
    assert before != other


# --- shuffled weights -------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [text_checkpoint("albert"), vision_checkpoint("vit")])
def test_shuffled_weights_change_the_map_from_the_top_down_and_come_back(subject: Checkpoint) -> None:
    probes = text_probes()[3:5] if subject.task == "sequence-classification" else image_probes(2)
    kept = {name: value.clone() for name, value in subject.model.state_dict().items()}
    before = list(capture(subject, probes))
    stages = cascade(subject, probes[0], CaptureSettings(), stages=3)
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(list(subject.model.parameters()))
    with shuffled(subject.model, stages[0], 0):
        top = list(capture(subject, probes))
    whole: list[Captured] = []

    def interrupted() -> None:
        with shuffled(subject.model, stages[-1], 0):
            whole.extend(capture(subject, probes))
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        interrupted()
    assert all(torch.equal(kept[name], value) for name, value in subject.model.state_dict().items())
    for one, two, three in zip(before, top, whole, strict=True):
        a, b, c = (each.maps[0] for each in (one, two, three))
        if "albert" not in type(subject.model).__name__.lower():  # whose layers are one
            np.testing.assert_allclose(a.layers[0], b.layers[0], atol=1e-6)
        assert np.abs(a.weights - b.weights).max() > 1e-4
        assert np.abs(a.weights - c.weights).max() > 1e-3


# --- a whole audit ----------------------------------------------------------------------------

SECTION = '[faithfulness]\nprobes = 8\norders = 1\nmethods = ["occlusion", "lrp"]\n'


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faithful")
    tiny.bert(folder / "models" / "base")
    tiny.bert(folder / "models" / "shifted", seed=13, noise=0.4)
    tiny.write_rows(folder / "probes.jsonl", tiny.text_rows())
    tiny.write_config(folder, more=SECTION)
    return folder


def test_an_audit_measures_stores_and_verifies_faithfulness(audited: Path) -> None:
    config = load_config(audited / "audit.toml")
    verdict = run_audit(config)
    store = Store(config.store.url)
    comparison = store.comparison(str(verdict.comparison_id))
    places = {(one.role, one.method) for one in comparison.faithfulness}
    assert places == {(r, m) for r in ("before", "after") for m in ("rollout", "occlusion", "lrp")}
    by_place = {(one.role, one.method): one for one in comparison.faithfulness}
    for role in ("before", "after"):
        assert by_place[role, "rollout"].spearman.keys() == {"occlusion", "lrp"}
        assert len(by_place[role, "rollout"].randomised) == 4
        assert by_place[role, "rollout"].depth_collapse is not None
        assert by_place[role, "lrp"].randomised == ()
        one, two = by_place[role, "occlusion"], by_place[role, "lrp"]
        assert one.spearman["lrp"] == pytest.approx(two.spearman["occlusion"])
    rule = verdict.rules[0]
    assert (rule.unproven is None) == (rule.confirmation is not None and rule.confirmation.confirmed)
    assert "Faithfulness of the maps" in to_text(
        comparison, verdict, context=report_context(store, comparison, verdict)
    )
    listed = {entry["table"] for entry in store.comparison_manifest(str(comparison.id))["files"]}
    assert "faithfulness" in listed
    assert verify_store(store).problems == ()


def test_the_same_audit_twice_does_nothing_and_the_gate_finds_it_without_measuring(audited: Path) -> None:
    config = load_config(audited / "audit.toml")
    first, before = run_audit(config), tiny.files_below(audited / "store")
    assert run_audit(config).comparison_id == gate_runs(config).comparison_id == first.comparison_id
    assert tiny.files_below(audited / "store") == before


def test_a_changed_score_is_found_by_its_hash_and_a_changed_summary_by_the_scores(audited: Path) -> None:
    config = load_config(audited / "audit.toml")
    store = Store(config.store.url)
    name = str(run_audit(config).comparison_id)
    stored, verdict = store.comparison(name), store.verdict(name)
    rows = store.comparison_faithfulness(name)
    assert all(row["value"] is None or np.isfinite(row["value"]) for row in rows)
    forged = Store(audited / "forged")
    (audited / "forged").mkdir()
    (audited / "forged" / "runs").symlink_to(audited / "store" / "runs")
    from audit.pipeline.publish import probe_table

    raised = [{**row, "value": row["value"] + 0.5} if row["measure"] == "deletion" else row for row in rows]
    forged.write_comparison(stored, verdict, probe_table(store, stored), faithfulness=raised)
    problems = verify_store(forged, [name]).problems
    assert any("deletion of the faithfulness of rollout before is stored as" in one for one in problems)
    path = audited / "forged" / "comparisons" / name / "faithfulness.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    assert any(
        "faithfulness.parquet" in one for one in verify_store(Store(audited / "forged"), [name]).problems
    )


def test_what_cannot_be_measured_is_said(audited: Path) -> None:
    config = load_config(audited / "audit.toml")
    comparison = Store(config.store.url).comparison(str(run_audit(config).comparison_id))
    windows = config.model_copy(update={"probes": config.probes.model_copy(update={"stride": 4})})
    for asked, judged, reason in (
        (windows, comparison, "occlusion is not defined for windows of one probe"),
        (config, replace(comparison, kind="unpaired"), "the comparison has no two checkpoints"),
    ):
        found = measure_faithfulness(asked, judged)
        assert (found.scores, found.summary) == ((), ())
        assert found.notes[0].startswith(f"Faithfulness was not measured: {reason}")


def test_an_unknown_method_is_refused_by_the_configuration() -> None:
    data = {"checkpoints": {"before": {"path": "a"}, "after": {"path": "b"}}, "probes": {"path": "p.jsonl"}}
    assert parse_config(data).faithfulness.probes == 0
    with pytest.raises(
        ConfigError, match=r"faithfulness.methods: method 'shapp' is unknown; did you mean 'shap'"
    ):
        parse_config({**data, "faithfulness": {"methods": ["shapp"]}})
    with pytest.raises(ConfigError, match=r'unknown key "faithfulness.probe"; did you mean "probes"'):
        parse_config({**data, "faithfulness": {"probe": 3}})
