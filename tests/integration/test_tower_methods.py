"""Every method on two towers: against each tower alone, kept gradients of the similarity, and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from audit import compute_maps
from audit.capture import capture
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.windows import probe_windows
from audit.capture.pairs.methods import methods_of
from audit.errors import CaptureError
from audit.methods import gradient_rollout
from audit.methods.gradient import gradient_map, weigh_by_gradient
from audit.records import CaptureSettings, Checkpoint, Map, Method, Probe
from tests.integration.test_capture_streams import clip, pair_probes
from tests.integration.tiny_models import build, checkpoint, image_processor, word_tokenizer

PROBES = pair_probes()[:2]
POST_NORM = ("globenc",)


def siglip(attention: str = "eager") -> Checkpoint:
    tokenizer = word_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    text = {**sizes, **ids, "max_position_embeddings": 64, "projection_size": 32}
    model = build(
        "SiglipModel",
        attention=attention,
        text_config=text,
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    return checkpoint(model, transformers.CLIPProcessor(image_processor(), tokenizer))


def encoded(subject: Checkpoint) -> list[Encoded]:
    (window,) = probe_windows(subject, PROBES, CaptureSettings())
    return window


def by_stream(maps: tuple[Map, ...]) -> dict[str, Map]:
    return {one.stream: one for one in maps}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("rollout", {"residual": [0.5, 0.4, 0.3], "discard_ratio": 0.3}),
        ("rollout", {"residual": "measured", "start_layer": 1}),
        ("raw_attention", {"layer": 0, "head_fusion": "max"}),
        ("per_head_rollout", {"head": 1, "layer": 1}),
        ("attention_flow", {}),
        ("norms", {}),
        ("alti", {}),
        ("value_zeroing", {}),
    ],
)
def test_each_tower_has_the_map_of_that_tower_alone(name: str, params: dict[str, Any]) -> None:
    subject = clip("sdpa")
    core, processor = subject.model, subject.processor
    alone = {
        "text": (
            checkpoint(core.text_model, processor.tokenizer),
            [Probe(p.id, text=p.text) for p in PROBES],
            "last",
        ),
        "image": (
            checkpoint(core.vision_model, processor.image_processor),
            [Probe(p.id, image=p.image) for p in PROBES],
            "cls",
        ),
    }
    found = [by_stream(one.maps) for one in capture(subject, PROBES, method=Method(name, params=params))]
    for stream, (tower, probes, row) in alone.items():
        for one, other in zip(found, capture(tower, probes, method=Method(name, row, params)), strict=True):
            (expected,) = other.maps
            np.testing.assert_allclose(one[stream].weights, expected.weights, atol=1e-6)
            for key, value in expected.diagnostics.items():
                assert one[stream].diagnostics[key] == pytest.approx(value, abs=1e-5), key
            if expected.layers is not None:
                np.testing.assert_allclose(one[stream].layers, expected.layers, atol=1e-6)


def kept(model: Any, item: Encoded) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Attentions of both towers with the gradient of the similarity, all retained."""
    out = model(**item.tensors, output_attentions=True)
    stacks = {"text": out.text_model_output.attentions, "image": out.vision_model_output.attentions}
    for attention in (a for stack in stacks.values() for a in stack):
        attention.retain_grad()
    out.logits_per_image[0, 0].backward()
    model.zero_grad()
    return (
        {name: [a.detach().double() for a in stack] for name, stack in stacks.items()},
        {name: [a.grad.double() for a in stack] for name, stack in stacks.items()},
    )


@pytest.mark.parametrize("form", ["relevance", "product"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_of_the_similarity_equals_the_one_of_kept_gradients(form: Any, attention: str) -> None:
    slow, subject = clip(), clip(attention)
    method = Method("gradient_rollout", params={"form": form})
    for item, found in zip(encoded(slow), capture(subject, PROBES, method=method), strict=True):
        attentions, slopes = kept(slow.model, item)
        for name, place in (("text", len(item) - 1), ("image", 0)):
            matrix = gradient_rollout(attentions[name], slopes[name], form=form)[:, place]
            start = torch.eye(matrix.shape[1])[None, place] if form == "relevance" else None
            expected, _ = gradient_map(matrix, start)
            np.testing.assert_allclose(by_stream(found.maps)[name].weights, expected[0], atol=2e-5)
        with torch.no_grad():
            similarity = float(slow.model(**item.tensors).logits_per_image[0, 0])
        assert found.prediction.target == "similarity"
        assert found.prediction.target_logit == pytest.approx(similarity, rel=1e-4)


def explicit_pooling(head: nn.MultiheadAttention) -> list[Tensor]:
    """Make a pooling head compute its attention step by step, and return where its weights will be kept."""
    weights: list[Tensor] = []

    def forward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        parts = zip(
            (query, key, value), head.in_proj_weight.chunk(3), head.in_proj_bias.chunk(3), strict=True
        )
        q, k, v = (
            nn.functional.linear(x, w, b).view(len(x), -1, head.num_heads, head.head_dim).transpose(1, 2)
            for x, w, b in parts
        )
        attention = (q @ k.transpose(2, 3) / head.head_dim**0.5).softmax(-1)
        if attention.requires_grad:
            attention.retain_grad()
        weights.append(attention)
        return head.out_proj((attention @ v).transpose(1, 2).flatten(2)), None

    head.forward = forward  # type: ignore[method-assign]
    return weights


def test_the_pooling_head_of_siglip_is_the_output_row() -> None:
    slow, subject = siglip(), siglip()
    pooled = explicit_pooling(slow.model.vision_model.head.attention)
    for item, found in zip(encoded(slow), capture(subject, PROBES), strict=True):
        with torch.no_grad():
            out = slow.model(**item.tensors, output_attentions=True).vision_model_output
        R = np.eye(16)
        for attention in out.attentions:
            R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(16)) @ R
        row = pooled[-1][0, :, 0].double().mean(0).numpy() @ R
        np.testing.assert_allclose(by_stream(found.maps)["image"].weights, row, atol=1e-6)
        assert np.abs(row - R.mean(0)).max() > 1e-3  # another row than the mean


@pytest.mark.parametrize("form", ["relevance", "product"])
def test_gradients_go_through_the_pooling_head(form: Any) -> None:
    slow, subject = siglip(), siglip("sdpa")
    pooled = explicit_pooling(slow.model.vision_model.head.attention)
    method = Method("gradient_rollout", params={"form": form})
    for item, found in zip(encoded(slow), capture(subject, PROBES, method=method), strict=True):
        attentions, slopes = kept(slow.model, item)
        probe = pooled[-1]
        assert probe.grad is not None
        row = weigh_by_gradient(probe.detach().double(), probe.grad.double())[:, 0]
        matrix = gradient_rollout(attentions["image"], slopes["image"], form=form)
        expected = (row[:, None] @ matrix)[0, 0].numpy()
        weights = by_stream(found.maps)["image"].weights
        np.testing.assert_allclose(weights, expected / expected.sum(), atol=2e-5)


def test_a_head_that_reads_past_its_attention_is_refused() -> None:
    subject = siglip()
    head = subject.model.vision_model.head
    own = head.forward
    head.forward = lambda states, **options: own(states, **options) + 0.1 * states[:, 3]
    with pytest.raises(CaptureError, match="reads its rows past its attention; set"):
        list(capture(subject, PROBES))
    (first, _) = capture(subject, PROBES, method=Method(row="mean"))
    assert first.maps[0].weights.sum() == pytest.approx(1)


def test_states_that_mix_before_the_pooling_head_are_refused() -> None:
    subject = siglip()
    head = subject.model.vision_model.head
    own = head.forward
    head.forward = lambda states, **options: own(states + states.mean(dim=1, keepdim=True), **options)
    with pytest.raises(CaptureError, match="mix before its pooling head"):
        list(capture(subject, PROBES))


def test_occlusion_of_either_input_is_the_change_of_the_similarity() -> None:
    subject = clip()
    items = encoded(subject)
    found = list(capture(subject, PROBES, method=Method("occlusion")))
    token = subject.processor.tokenizer.mask_token_id
    for item, one in zip(items, found, strict=True):
        maps = by_stream(one.maps)

        def similarity(changes: dict[str, Tensor], item: Encoded = item) -> float:
            with torch.no_grad():
                return float(subject.model(**{**item.tensors, **changes}).logits_per_image[0, 0])

        words = np.zeros(len(item))
        for place in np.flatnonzero(~item.positions.special):
            ids = item.tensors["input_ids"].clone()
            ids[0, place] = token
            words[place] = abs(similarity({"input_ids": ids}) - similarity({}))
        np.testing.assert_allclose(maps["text"].weights, words / words.sum(), atol=1e-4)
        patches, pixels = np.zeros(17), item.tensors["pixel_values"]
        for place in range(16):
            changed, (y, x) = pixels.clone(), (8 * (place // 4), 8 * (place % 4))
            changed[..., y : y + 8, x : x + 8] = pixels.mean(dim=(-2, -1), keepdim=True)
            patches[1 + place] = abs(similarity({"pixel_values": changed}) - similarity({}))
        np.testing.assert_allclose(maps["image"].weights, patches / patches.sum(), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in methods_of("towers") if name not in POST_NORM])
def test_every_method_runs_from_the_public_interface(name: str) -> None:
    params = {"samples": 8} if name in ("shap", "lime") else {}
    maps = list(compute_maps(siglip("sdpa"), PROBES, method=name, **params))
    assert [one.stream for one in maps] == ["text", "image"] * 2
    for one in maps:
        assert one.weights.sum() == pytest.approx(1, abs=1e-5)


def test_batches_and_single_probes_agree_for_gradients() -> None:
    subject = clip("sdpa")
    probes = [PROBES[0], Probe("other", text=PROBES[0].text, image=PROBES[1].image)]  # one length: one batch
    method = Method("gradient_rollout")
    together = list(capture(subject, probes, method=method))
    for probe, one in zip(probes, together, strict=True):
        (alone,) = capture(subject, [probe], method=method)
        for a, b in zip(one.maps, alone.maps, strict=True):
            np.testing.assert_allclose(a.weights, b.weights, atol=1e-6)
