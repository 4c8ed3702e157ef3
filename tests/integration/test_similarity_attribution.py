"""Grad-CAM and LRP of the similarity of image and text against slow loops and models with constants held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from audit.capture import capture
from audit.capture.inputs.windows import probe_windows
from audit.records import CaptureSettings, Checkpoint, Method
from tests.integration.test_capture_image_text import by_stream
from tests.integration.test_capture_streams import clip, pair_probes
from tests.integration.test_image_text_attribution import (
    held_softmaxes,
    params,
    slow_grad_cam,
    taken,
    with_constants,
)
from tests.integration.test_tower_methods import PROBES, siglip
from tests.integration.tiny_models import build, checkpoint, image_processor, word_tokenizer


@pytest.mark.parametrize("layer", [0, -1])
def test_grad_cam_of_each_tower_is_of_the_similarity(layer: int) -> None:
    subject, probes = clip("sdpa"), pair_probes()[:1]
    (item,) = next(probe_windows(subject, probes, CaptureSettings()))
    towers = {"text": subject.model.text_model, "image": subject.model.vision_model}
    maps = by_stream(next(capture(subject, probes, method=params("grad_cam", layer=layer))).maps)
    for stream, tower in towers.items():
        with taken(tower.encoder.layers[layer].self_attn) as kept:
            raw = slow_grad_cam(subject.model(**item.tensors).logits_per_image[0, 0], *kept)
        np.testing.assert_allclose(maps[stream].weights, raw / raw.sum(), atol=1e-5)


def test_relevance_of_both_towers_adds_up_to_the_similarity() -> None:
    """The lengths of both embeddings are constants of the rule, and each tower gets half of their product."""
    subject, probes = clip(), pair_probes()[:1]
    subject.model.double()
    (item,) = next(probe_windows(subject, probes, CaptureSettings()))
    model: Any = with_constants(subject.model)
    pixels = item.tensors["pixel_values"].double().requires_grad_()
    table = model.text_model.embeddings.token_embedding
    words = table(item.tensors["input_ids"]).detach().requires_grad_()
    table.register_forward_hook(lambda *_: words.clone())
    constants = ("bias", "class_embedding", "position_embedding.weight")
    added = [p for n, p in model.named_parameters() if n.endswith(constants)]
    with held_softmaxes():
        text = model.text_projection(model.text_model(item.tensors["input_ids"]).pooler_output)[0]
        image = model.visual_projection(model.vision_model(pixels).pooler_output)[0]
    scale = model.logit_scale.exp().detach() / text.norm().detach() / image.norm().detach()
    score = scale * (text.detach() @ image + text @ image.detach()) / 2
    given = [pixels, words, *added]
    slopes = torch.autograd.grad(score, given, allow_unused=True)
    parts = [x * g for x, g in zip(given, slopes, strict=True) if g is not None]
    with torch.no_grad():
        whole = float(subject.model(**{**item.tensors, "pixel_values": pixels}).logits_per_image)
    assert float(sum(part.sum() for part in parts).detach()) == pytest.approx(whole, rel=1e-5)
    patches = parts[0][0].sum(0).reshape(4, 8, 4, 8).sum((1, 3)).flatten().abs().detach()
    spoken = parts[1][0].sum(-1).abs().detach()
    maps = by_stream(next(capture(subject, probes, method=Method("lrp"))).maps)
    np.testing.assert_allclose(maps["image"].weights[1:], patches / patches.sum(), atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights, spoken / spoken.sum(), atol=1e-6)
    assert maps["text"].diagnostics["conservation_error"] < 1e-5


def test_relevance_of_a_pooled_tower_is_conserved_and_the_same_with_every_kernel() -> None:
    found = [list(capture(siglip(kind), PROBES, method=Method("lrp"))) for kind in ("eager", "sdpa")]
    for one, two in zip(*found, strict=True):
        for a, b in zip(one.maps, two.maps, strict=True):
            assert a.diagnostics["conservation_error"] < 1e-5
            np.testing.assert_allclose(a.weights, b.weights, atol=1e-5)


def owlvit() -> Checkpoint:
    """Towers like CLIP's, whose text tower does not name its table of embeddings."""
    tokenizer = word_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    text = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    model = build("OwlViTModel", attention="sdpa", text_config=text, vision_config=vision, projection_dim=32)
    return checkpoint(model, transformers.CLIPProcessor(image_processor(), tokenizer))


@pytest.mark.parametrize("name", ["input_x_gradient", "occlusion", "lrp"])
def test_a_table_of_embeddings_without_a_name_is_found_by_its_size(name: str) -> None:
    maps = by_stream(next(capture(owlvit(), PROBES, method=Method(name))).maps)
    assert maps["text"].weights.sum() == pytest.approx(1, abs=1e-5)
    assert maps["text"].weights.max() < 0.99
    assert maps["image"].weights.max() > 1.1 * maps["image"].weights.mean()
