"""Rows and targets of tasks beside classification: answers, spans, several labels, numbers, two tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audit.capture import capture, occlude
from audit.capture.inputs.texts import encode_texts
from audit.config import load_config
from audit.errors import ConfigError, ProbeError
from audit.pipeline import run_audit
from audit.records import Captured, CaptureSettings, Checkpoint, Method, Probe
from audit.store import Store
from tests import tiny_audits
from tests.integration.tiny_models import build, byte_tokenizer, checkpoint, text_checkpoint, word_tokenizer

TARGETED = ("gradient_rollout", "input_x_gradient", "integrated_gradients", "occlusion")
CONTEXT = "the film was truly very good and she liked it"
ENTITIES = {0: "O", 1: "B-FILM", 2: "I-FILM", 3: "B-PERSON", 4: "I-PERSON"}


def tiny(architecture: str, *, seed: int = 0, **changes: Any) -> Checkpoint:
    tokenizer = word_tokenizer()
    model = build(architecture, vocab_size=len(tokenizer), pad_token_id=0, seed=seed, **changes)
    return checkpoint(model, tokenizer)


def run(
    subject: Checkpoint, probe: Probe, *, row: str = "auto", target: Any = None, name: str = "rollout"
) -> Captured:
    other = Probe(
        "other", text=probe.text, text_pair=probe.text_pair, label=probe.label, regions=probe.regions
    )
    settings = CaptureSettings(batch_tokens=512)
    return next(
        iter(capture(subject, [probe, other], method=Method(name, row), target=target, settings=settings))
    )


def outputs_of(subject: Checkpoint, probe: Probe) -> Any:
    (item,) = encode_texts(subject, [probe], CaptureSettings())
    with torch.no_grad():
        return subject.model(**item.tensors)


def occluded_scores(subject: Checkpoint, probe: Probe, score: Any) -> np.ndarray:
    """Return |change of `score`(outputs)| when each content token is masked, normalised: slowly."""
    (item,) = encode_texts(subject, [probe], CaptureSettings())
    moved = np.zeros(len(item))
    with torch.no_grad():
        intact = score(subject.model(**item.tensors))
        for place in np.flatnonzero(~item.positions.special):
            ids = item.tensors["input_ids"].clone()
            ids[0, place] = subject.processor.mask_token_id
            moved[place] = abs(float(score(subject.model(**{**item.tensors, "input_ids": ids})) - intact))
    return moved / moved.sum()


# --- question answering -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def answering() -> Checkpoint:
    return tiny("BertForQuestionAnswering")


def question(label: Any = "very good", **extra: Any) -> Probe:
    return Probe("q", text="she liked a film", text_pair=CONTEXT, label=label, **extra)


def test_rows_of_an_answer_are_those_of_its_first_and_last_token(answering: Checkpoint) -> None:
    # [CLS] she liked a film [SEP] the film was truly very good …: the answer is at 10 and 11
    rows = {
        row: run(answering, question(), row=row).maps[0].weights
        for row in ("start", "end", "start+end", "auto")
    }
    np.testing.assert_allclose(rows["start"], run(answering, question(), row="token:10").maps[0].weights)
    np.testing.assert_allclose(rows["end"], run(answering, question(), row="token:11").maps[0].weights)
    np.testing.assert_allclose(rows["start+end"], (rows["start"] + rows["end"]) / 2, atol=1e-6)
    np.testing.assert_array_equal(rows["auto"], rows["start+end"])
    assert np.abs(rows["start"] - rows["end"]).max() > 1e-3


def test_an_annotated_answer_goes_before_the_label_and_an_empty_one_is_row_zero(
    answering: Checkpoint,
) -> None:
    start = CONTEXT.index("she")
    annotated = question(regions={"answer": {"text_pair": [[start, start + 3]]}})
    one = run(answering, annotated, row="start").maps[0].weights
    np.testing.assert_allclose(one, run(answering, annotated, row="token:13").maps[0].weights)
    none = run(answering, question(label=""), row="end").maps[0].weights
    np.testing.assert_allclose(none, run(answering, question(), row="cls").maps[0].weights)


def test_without_a_label_the_answer_is_the_best_span_of_the_context(answering: Checkpoint) -> None:
    found, outputs = run(answering, question(label=None)), outputs_of(answering, question())
    start, end = outputs.start_logits[0], outputs.end_logits[0]
    context = range(6, 16)
    best = max(
        ((i, j) for i in context for j in context if i <= j), key=lambda s: float(start[s[0]] + end[s[1]])
    )
    words = CONTEXT.split()
    assert found.prediction.predicted == " ".join(words[best[0] - 6 : best[1] - 5])
    halves = [run(answering, question(label=None), row=f"token:{place}").maps[0].weights for place in best]
    np.testing.assert_allclose(found.maps[0].weights, np.mean(halves, axis=0), atol=1e-6)


def test_the_score_of_an_answer_is_its_start_plus_its_end_logit(answering: Checkpoint) -> None:
    found, outputs = run(answering, question(), target="label"), outputs_of(answering, question())
    score = float(outputs.start_logits[0, 10] + outputs.end_logits[0, 11])
    assert found.prediction.target == found.prediction.label == "very good"
    assert found.prediction.target_logit == pytest.approx(score, abs=1e-5)
    expected = occluded_scores(answering, question(), lambda o: o.start_logits[0, 10] + o.end_logits[0, 11])
    np.testing.assert_allclose(
        run(answering, question(), name="occlusion").maps[0].weights, expected, atol=1e-5
    )


def test_an_answer_that_is_not_in_the_context_is_refused(answering: Checkpoint) -> None:
    with pytest.raises(ProbeError, match="answer 'dull' is not in its text_pair"):
        run(answering, question(label="dull"))


# --- token classification ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagging() -> Checkpoint:
    labels = {name: i for i, name in ENTITIES.items()}
    return tiny("BertForTokenClassification", id2label=ENTITIES, label2id=labels)


def tagged() -> Probe:
    # [CLS] the film was truly very good and she liked it [SEP]
    start = CONTEXT.index("she")
    return Probe("t", text=CONTEXT, regions={"FILM": [[0, 8]], "PERSON": [[start, start + 3]]})


def test_labelled_spans_are_read_each_as_one_row(tagging: Checkpoint) -> None:
    rows = [run(tagging, tagged(), row=f"token:{place}").maps[0].weights for place in (1, 2, 8)]
    expected = (rows[0] + rows[1]) / 4 + rows[2] / 2
    found = run(tagging, tagged(), row="labelled")
    np.testing.assert_allclose(found.maps[0].weights, expected, atol=1e-6)
    logits = outputs_of(tagging, tagged()).logits[0]
    guesses = [ENTITIES[int(part.argmax())] for part in (logits[1:3].mean(0), logits[8])]
    assert found.prediction.predicted == ", ".join(
        name.removeprefix("B-").removeprefix("I-") for name in guesses
    )
    assert found.prediction.label == "FILM, PERSON"


def test_labelled_spans_are_explained_each_by_its_own_class(tagging: Checkpoint) -> None:
    def score(outputs: Any) -> Any:
        logits = outputs.logits[0]
        return (logits[1, 1] + logits[2, 2]) / 4 + logits[8, 3] / 2

    found = run(tagging, tagged(), row="labelled", name="occlusion")
    np.testing.assert_allclose(found.maps[0].weights, occluded_scores(tagging, tagged(), score), atol=1e-5)
    assert found.prediction.target == "FILM, PERSON"
    assert found.prediction.target_logit == pytest.approx(
        float(score(outputs_of(tagging, tagged()))), abs=1e-5
    )


def test_a_span_and_a_class_are_the_mean_of_its_logits(tagging: Checkpoint) -> None:
    found = run(tagging, tagged(), row="FILM", name="occlusion", target="I-PERSON")
    expected = occluded_scores(tagging, tagged(), lambda o: o.logits[0, 1:3, 4].mean())
    np.testing.assert_allclose(found.maps[0].weights, expected, atol=1e-5)
    assert found.prediction.target == "I-PERSON"


def test_rows_of_another_task_or_without_a_span_are_refused(
    tagging: Checkpoint, answering: Checkpoint
) -> None:
    with pytest.raises(ProbeError, match="has no position for the row 'labelled'; annotate a region"):
        run(tagging, Probe("t", text=CONTEXT), row="labelled")
    with pytest.raises(ConfigError, match="row = 'start' belongs to question-answering"):
        run(tagging, tagged(), row="start")
    with pytest.raises(ConfigError, match="row = 'labelled' belongs to token-classification"):
        run(answering, question(), row="labelled")


# --- several labels, a number -----------------------------------------------------------------


def test_several_labels_are_predicted_by_their_sigmoids_and_explained_one_by_one() -> None:
    subject = text_checkpoint("bert", problem_type="multi_label_classification")
    probe = Probe("m", text=CONTEXT, label=["negative", "neutral"])
    logits = outputs_of(subject, probe).logits[0]
    names = ("negative", "positive", "neutral")
    found = run(subject, probe).prediction
    assert found.predicted == ", ".join(
        n for n, x in zip(names, logits, strict=True) if torch.sigmoid(x) > 0.5
    )
    assert found.label == "negative, neutral"
    for index, name in enumerate(names):
        one = run(subject, probe, name="occlusion", target=name)
        expected = occluded_scores(subject, probe, lambda o, i=index: o.logits[0, i])
        np.testing.assert_allclose(one.maps[0].weights, expected, atol=1e-5)
    both = run(subject, probe, name="occlusion", target="label")
    expected = occluded_scores(subject, probe, lambda o: (o.logits[0, 0] + o.logits[0, 2]) / 2)
    np.testing.assert_allclose(both.maps[0].weights, expected, atol=1e-5)
    assert both.prediction.target_logit == pytest.approx(float(logits[0] + logits[2]) / 2, abs=1e-5)


def test_a_regression_has_its_single_output() -> None:
    subject = text_checkpoint("bert", id2label={0: "score"}, label2id={"score": 0}, problem_type="regression")
    probe = Probe("r", text=CONTEXT, label=3.5)
    found = run(subject, probe, name="occlusion")
    np.testing.assert_allclose(
        found.maps[0].weights, occluded_scores(subject, probe, lambda o: o.logits[0, 0]), atol=1e-5
    )
    assert (found.prediction.target, found.prediction.predicted) == ("score", None)
    weights = np.where(np.arange(12) == 2, 1.0, 0.0)
    (one,) = occlude(subject, [probe], [weights])
    assert one.target == "score"
    assert one.change is not None


# --- two tokens, two classes ------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETED)
def test_two_classes_are_the_difference_of_their_logits(name: str) -> None:
    subject, probe = text_checkpoint("bert"), Probe("d", text=CONTEXT)
    found = run(subject, probe, name=name, target=["positive", "negative"])
    logits = outputs_of(subject, probe).logits[0]
    assert found.prediction.target == "positive − negative"
    assert found.prediction.target_logit == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    with torch.no_grad():  # a class whose logit is the difference gives the same map
        head = subject.model.classifier
        head.weight[2], head.bias[2] = head.weight[1] - head.weight[0], head.bias[1] - head.bias[0]
    same = run(subject, probe, name=name, target="neutral")
    np.testing.assert_allclose(found.maps[0].weights, same.maps[0].weights, atol=1e-5)


@pytest.mark.parametrize("name", TARGETED)
def test_a_decoder_answers_yes_or_no(name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["Yes", "No"])
    model = build(
        "LlamaForCausalLM", vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=128
    )
    subject, probe = checkpoint(model, tokenizer), Probe("y", text="is the film good?", label="Yes")
    yes, no = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    found = run(subject, probe, name=name, target=["Yes", "No"])
    logits = outputs_of(subject, probe).logits[0, -1]
    assert found.prediction.target == "Yes − No"
    assert found.prediction.target_logit == pytest.approx(float(logits[yes] - logits[no]), abs=1e-5)
    assert found.maps[0].weights.sum() == pytest.approx(1)
    other = run(subject, probe, name=name, target=["No", "Yes"]).maps[0].weights
    if name != "gradient_rollout":  # which keeps what speaks for the target; the others drop the sign
        np.testing.assert_allclose(found.maps[0].weights, other, atol=1e-5)
    else:
        assert np.abs(found.maps[0].weights - other).max() > 1e-3


def test_occlusion_of_a_region_watches_the_difference_of_two_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["Yes", "No"])
    model = build("GPT2LMHeadModel", vocab_size=len(tokenizer), max_position_embeddings=128)
    subject, probe = checkpoint(model, tokenizer), Probe("y", text="is it good?")
    yes, no = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    (item,) = encode_texts(subject, [probe], CaptureSettings())
    weights = (np.arange(len(item)) == 3).astype(float)
    (found,) = occlude(subject, [probe], [weights], targets=["Yes", "No"])
    changed = item.tensors["input_ids"].clone()
    changed[0, 3] = tokenizer.eos_token_id
    with torch.no_grad():
        before, after = (model(ids).logits[0, -1] for ids in (item.tensors["input_ids"], changed))
    assert found.intact == pytest.approx(float(before[yes] - before[no]), abs=1e-5)
    assert found.change == pytest.approx(float(after[yes] - after[no]) - found.intact, abs=1e-5)


def test_a_target_of_two_that_is_no_token_is_refused() -> None:
    with pytest.raises(ProbeError, match="target 'Maybe' is 5 tokens, expected 1"):
        run(text_checkpoint("gpt2"), Probe("y", text="good?"), target=["Maybe", "N"])


@pytest.mark.parametrize("name", TARGETED)
@pytest.mark.parametrize(("kind", "row"), [("answer", "auto"), ("tags", "labelled")])
def test_every_targeted_method_explains_answers_and_spans(
    name: str, kind: str, row: str, answering: Checkpoint, tagging: Checkpoint
) -> None:
    subject, probe = (answering, question()) if kind == "answer" else (tagging, tagged())
    one = run(subject, probe, name=name, row=row).maps[0]
    assert one.weights.sum() == pytest.approx(1)
    assert one.weights[~one.positions.special].max() > 0


# --- whole audits -----------------------------------------------------------------------------


def audited(folder: Path, subject: Checkpoint, rows: list[dict[str, Any]], **sections: str) -> Store:
    """Audit a checkpoint against itself with noise; the rule fails, so that occlusion confirms or not."""
    tiny_audits.write_rows(folder / "probes.jsonl", rows)
    tiny_audits.save(subject, folder / "base")
    tiny_audits.save(subject, folder / "shifted", seed=13, noise=0.3)
    path = tiny_audits.write_config(
        folder, models=folder, rules=tiny_audits.LIMIT.format(fail=1e-5), **sections
    )
    config = load_config(path)
    run_audit(config)
    return Store(config.store.url)


def test_a_decoder_is_audited_by_a_logit_difference_and_confirmed_by_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["Yes", "No"])
    model = build("GPT2LMHeadModel", vocab_size=len(tokenizer), max_position_embeddings=128)
    rows = [{k: row[k] for k in ("id", "text")} for row in tiny_audits.text_rows()]
    probes = 'path = "probes.jsonl"\ntarget = ["Yes", "No"]'
    store = audited(
        tmp_path, checkpoint(model, tokenizer), rows, probes=probes, more='[method]\nname = "occlusion"'
    )
    comparison = store.comparison(store.comparison_ids()[0])
    assert comparison.confirmations
    run_id = comparison.before.run_id
    assert store.spec(run_id).target == '["Yes","No"]'
    assert set(store.predictions(run_id)["target"]) == {"Yes − No"}


def test_labelled_spans_are_audited_without_labels(tmp_path: Path, tagging: Checkpoint) -> None:
    rows = [
        {"id": row["id"], "text": row["text"], "regions": {"FILM": [[0, row["text"].index(" ")]]}}
        for row in tiny_audits.text_rows()
    ]
    store = audited(tmp_path, tagging, rows, more='[method]\nname = "gradient_rollout"\nrow = "labelled"')
    table = store.predictions(store.comparison(store.comparison_ids()[0]).before.run_id)
    assert set(table["label"]) == {"FILM"}
    assert set(table["predicted"]) <= {"FILM", "PERSON", "O"}


@pytest.mark.parametrize("target", ['["Yes"]', '["Yes", "Yes"]', '["Yes", "No", "Maybe"]'])
def test_a_target_that_is_no_pair_of_two_is_refused(tmp_path: Path, target: str) -> None:
    path = tiny_audits.write_config(tmp_path, probes=f'path = "probes.jsonl"\ntarget = {target}')
    with pytest.raises(ConfigError, match=r"probes\.target: target is .*two different ones"):
        load_config(path)
