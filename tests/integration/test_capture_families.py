"""Every supported family against a slow rollout of the attentions that transformers returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from audit.capture import capture
from audit.capture.inputs.encoded import encode_image
from audit.capture.inputs.texts import encode_texts
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.tiny_models import (
    TEXT_FAMILIES,
    VISION_FAMILIES,
    build,
    checkpoint,
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

FAMILIES = (*TEXT_FAMILIES, *VISION_FAMILIES)

# Weights over the rows that each head reads, written down from the model definitions.
CLS, LAST = "cls", "last"
ROWS = {
    "gpt2": LAST,
    "llama": LAST,
    "qwen2": LAST,
    "deit-teacher": "cls and distillation",
    "dinov2": "cls and patches",
    "dinov2-registers": "cls and patches",
}


def family_checkpoint(family: str, attention: str = "eager", **changes: Any) -> Checkpoint:
    if family in VISION_FAMILIES:
        return vision_checkpoint(family, attention=attention, **changes)
    # DeBERTa has no fused kernel: transformers itself picks eager.
    return text_checkpoint(family, attention=None if family == "deberta-v2" else attention, **changes)


def family_probes(family: str) -> list[Probe]:
    return image_probes() if family in VISION_FAMILIES else text_probes()


def read_weights(row: str, n: int, special: int) -> NDArray[np.float64]:
    weights = np.zeros(n)
    if row == CLS:
        weights[0] = 1
    elif row == LAST:
        weights[-1] = 1
    elif row == "cls and distillation":
        weights[:2] = 0.5
    else:
        weights[0] = 0.5
        weights[1:] = 0.5 / (n - 1) if special == 1 else 0
        if special > 1:  # registers stand between CLS and the patches
            weights[special:] = 0.5 / (n - special)
    return weights


def reference_layers(
    model: Any, tensors: dict[str, torch.Tensor], rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rollout written out: R <- (½A + ½I) R in float64, one probe, eager attentions of transformers."""
    with torch.no_grad():
        attentions = model(**tensors, output_attentions=True).attentions
    n = len(rows)
    R, read = np.eye(n), []
    for attention in attentions:
        R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(n)) @ R
        read.append(rows @ R)
    return np.array(read)


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_equals_the_rollout_of_returned_attentions(family: str) -> None:
    subject = family_checkpoint(family)
    probes = family_probes(family)
    settings = CaptureSettings(batch_tokens=40)
    encoded = (
        [encode_image(subject, p) for p in probes]
        if family in VISION_FAMILIES
        else encode_texts(subject, probes, settings)
    )
    for item, captured in zip(encoded, capture(subject, probes, settings=settings), strict=True):
        (found,) = captured.maps
        n = len(item)
        special = 0 if found.positions.grid is None else n - found.positions.grid[0] * found.positions.grid[1]
        rows = read_weights(ROWS.get(family, CLS), n, special)
        expected = reference_layers(subject.model, dict(item.tensors), rows)
        np.testing.assert_allclose(found.layers, expected, atol=1e-6)
        np.testing.assert_allclose(found.weights, expected[-1], atol=1e-6)
        assert found.positions.causal == (family in ("gpt2", "llama", "qwen2"))
        assert abs(float(found.weights.sum()) - 1) < 1e-6
        # A map that is the same everywhere would pass any comparison.
        assert found.weights.max() > 1.3 * found.weights.min()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deberta-v2"])
def test_capture_under_sdpa_equals_eager(family: str) -> None:
    eager, fused = family_checkpoint(family), family_checkpoint(family, "sdpa")
    assert fused.model.config._attn_implementation == "sdpa"
    probes = family_probes(family)
    for a, b in zip(capture(eager, probes), capture(fused, probes), strict=True):
        np.testing.assert_allclose(a.maps[0].weights, b.maps[0].weights, atol=1e-5)
        np.testing.assert_allclose(a.maps[0].layers, b.maps[0].layers, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "qwen2", "vit", "deberta-v2", "albert"])
def test_predictions_are_those_of_the_model_to_the_last_bit(family: str, attention: str) -> None:
    subject = family_checkpoint(family, attention)
    probes = family_probes(family)
    settings = CaptureSettings(batch_tokens=1)  # one probe at a time, as in the plain call below
    encode = encode_image if family in VISION_FAMILIES else lambda c, p: encode_texts(c, [p], settings)[0]
    for probe, captured in zip(
        probes, capture(subject, probes, settings=settings, target="label"), strict=True
    ):
        with torch.no_grad():
            logits = subject.model(**encode(subject, probe).tensors).logits[0]
        assert captured.prediction.logits == tuple(logits.double().tolist())
        names = subject.model.config.id2label
        assert captured.prediction.predicted == names[int(logits.argmax())]
        label = probe.label if isinstance(probe.label, str) else names[probe.label]
        assert (captured.prediction.target, captured.prediction.label) == (label, label)
        index = subject.model.config.label2id[label]
        assert captured.prediction.target_logit == float(logits[index].double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_capture_in_half_precision_is_near_float32(
    family: str, attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    exact, half = family_checkpoint(family, attention), family_checkpoint(family, attention)
    half.model.to(dtype)
    probes = family_probes(family)
    for a, b in zip(capture(exact, probes), capture(half, probes), strict=True):
        np.testing.assert_allclose(a.maps[0].weights, b.maps[0].weights, atol=tolerance)
        assert b.maps[0].weights.dtype == np.float32
        assert abs(float(b.maps[0].weights.sum()) - 1) < 1e-6


def test_shared_layers_are_captured_once_for_each_call() -> None:
    subject = text_checkpoint("albert", attention="sdpa", num_hidden_layers=5, inner_group_num=2)
    for captured in capture(subject, text_probes()):
        assert captured.maps[0].layers is not None
        assert len(captured.maps[0].layers) == 10


def test_sliding_windows_are_captured_as_the_model_uses_them() -> None:
    changes = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    for attention in ("eager", "sdpa"):
        subject = text_checkpoint("qwen2", attention=attention, **changes)
        for captured in capture(subject, text_probes(), method=Method("raw")):
            weights = captured.maps[0].weights
            assert (weights[:-4] == 0).all()
            assert (weights[-4:] > 0).all()


def test_learned_sinks_become_a_special_position() -> None:
    tokenizer = word_tokenizer()
    sizes = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
    }
    model = build("GptOssForCausalLM", vocab_size=len(tokenizer), pad_token_id=0, sliding_window=64, **sizes)
    subject = checkpoint(model, tokenizer)
    for item, captured in zip(
        encode_texts(subject, text_probes(), CaptureSettings()), capture(subject, text_probes()), strict=True
    ):
        found = captured.maps[0]
        assert len(found.weights) == len(item) + 1
        assert found.positions.special[-1]
        assert found.weights[-1] > 0.01
        with torch.no_grad():
            attentions = model(**item.tensors, output_attentions=True).attentions
        R = np.eye(len(item))
        for attention in attentions:
            R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(len(item))) @ R
        np.testing.assert_allclose(found.weights[:-1], R[-1], atol=1e-6)


@pytest.mark.parametrize(
    "architecture", ["BloomForCausalLM", "FalconForCausalLM", "MPNetForSequenceClassification"]
)
def test_families_off_the_interface_are_captured_through_hooks(architecture: str) -> None:
    tokenizer = word_tokenizer()
    names = {"n_layer": 3, "n_head": 4} if architecture == "BloomForCausalLM" else {}
    model = build(architecture, vocab_size=len(tokenizer), pad_token_id=0, **names)
    subject = checkpoint(model, tokenizer)
    row = CLS if architecture.startswith("MPNet") else LAST
    encoded = encode_texts(subject, text_probes(), CaptureSettings())
    for item, captured in zip(encoded, capture(subject, text_probes()), strict=True):
        expected = reference_layers(model, dict(item.tensors), read_weights(row, len(item), 0))
        np.testing.assert_allclose(captured.maps[0].layers, expected, atol=1e-6)
