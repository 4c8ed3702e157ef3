"""Attention flow from the answer through decoder, connector and tower, against networkx."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import pytest
from torch import Tensor

from audit.capture import capture
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.errors import CaptureError, ConfigError
from audit.records import CaptureSettings, Checkpoint, Method
from tests.integration.test_capture_image_text import LAYERS, TOWER, attentions, by_stream, rolled
from tests.integration.test_capture_windows import swin
from tests.integration.tiny_image_text import idefics2, llava, question_probes, qwen2_vl
from tests.integration.tiny_models import image_probes

FLOW = Method("attention_flow")


def prepared(subject: Checkpoint) -> tuple[list[Tensor], Any]:
    item = ImageTextEncoder(subject, CaptureSettings()).encode(question_probes(1)[0])
    places = np.flatnonzero(item.tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    return attentions(subject, dict(item.tensors)), places


def add_layer(graph: Any, name: str, index: int, layer: Tensor) -> None:
    """Add the edges of one layer, half of each row being the identity."""
    for q, row in enumerate(0.5 * layer[0].mean(0).numpy() + 0.5 * np.eye(layer.shape[-1])):
        for k, capacity in enumerate(row):
            if capacity > 0:
                graph.add_edge((name, index + 1, q), (name, index, k), capacity=float(capacity))


def flows(graph: Any, source: Any, sinks: list[Any]) -> list[float]:
    return [networkx.maximum_flow_value(graph, source, sink) if sink in graph else 0.0 for sink in sinks]


def test_flow_passes_through_decoder_connector_and_tower() -> None:
    """LLaVA reads the second last layer of its tower, one patch for each token of the image."""
    subject, probes = llava(), question_probes(1)
    kept, places = prepared(subject)
    graph, n = networkx.DiGraph(), kept[-1].shape[-1]
    for index, layer in enumerate(kept[-LAYERS:]):
        add_layer(graph, "text", index, layer)
    for index, layer in enumerate(kept[:2]):
        add_layer(graph, "tower", index, layer)
    for token, place in enumerate(places):
        graph.add_edge(("text", 0, int(place)), ("tower", 2, token + 1), capacity=1.0)
    source, words = ("text", LAYERS, n - 1), [i for i in range(n) if i not in places]
    image = flows(graph, source, [("tower", 0, i) for i in range(17)])
    text = flows(graph, source, [("text", 0, i) for i in words])
    total = sum(image) + sum(text)
    maps = by_stream(next(capture(subject, probes, method=FLOW)).maps)
    np.testing.assert_allclose(
        maps["image"].weights * maps["image"].share, np.array(image) / total, atol=1e-6
    )
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, np.array(text) / total, atol=1e-6)
    assert maps["image"].share + maps["text"].share == pytest.approx(1.0, abs=1e-6)
    reached = rolled(kept[-LAYERS:])[-1]
    product = np.concatenate(
        [reached[places] @ np.eye(17)[1:] @ rolled(kept[:2]), np.delete(reached, places)]
    )
    assert (np.array(image + text) >= product - 1e-9).all()  # R ≤ F
    lowest = [0.5 * layer[0].mean(0).numpy().sum(0) + 0.5 for layer in (kept[0], kept[-LAYERS])]
    bound = np.minimum(np.concatenate([lowest[0], np.delete(lowest[1], places)]), 1)
    share = (np.array(image + text) >= bound - 1e-6).mean()
    assert maps["text"].diagnostics["saturated"] == pytest.approx(share)
    assert maps["image"].layers is None


def test_learned_latents_are_inputs_of_their_own() -> None:
    subject, probes = idefics2(), question_probes(1)
    kept, places = prepared(subject)
    graph, n = networkx.DiGraph(), kept[-1].shape[-1]
    for index, layer in enumerate(kept[-LAYERS:]):
        add_layer(graph, "text", index, layer)
    for index, layer in enumerate(kept[:TOWER]):
        add_layer(graph, "tower", index, layer)
    for index, layer in enumerate(kept[TOWER:-LAYERS]):
        for latent, row in enumerate(layer[0].mean(0).numpy() * 0.5):
            here = ("latent", index + 1, latent)
            for patch in range(8):
                graph.add_edge(here, ("context", index, patch), capacity=float(row[patch]))
            for other in range(4):
                capacity = float(row[8 + other]) + 0.5 * (other == latent)
                graph.add_edge(here, ("latent", index, other), capacity=capacity)
        for patch in range(8):
            lower = ("context", index - 1, patch) if index else ("tower", TOWER, patch)
            graph.add_edge(("context", index, patch), lower, capacity=1.0)
    for latent, place in enumerate(places):
        graph.add_edge(("text", 0, int(place)), ("latent", 2, latent), capacity=1.0)
    source, words = ("text", LAYERS, n - 1), [i for i in range(n) if i not in places]
    latents = flows(graph, source, [("latent", 0, i) for i in range(4)])
    image = flows(graph, source, [("tower", 0, i) for i in range(8)])
    text = flows(graph, source, [("text", 0, i) for i in words])
    total = sum(latents) + sum(image) + sum(text)
    maps = by_stream(next(capture(subject, probes, method=FLOW)).maps)
    found = maps["image"].weights * maps["image"].share
    np.testing.assert_allclose(found, np.array(latents + image) / total, atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, np.array(text) / total, atol=1e-6)
    assert maps["image"].positions.special.tolist() == [True] * 4 + [False] * 8


def test_merged_patches_have_no_capacity() -> None:
    with pytest.raises(ConfigError, match="made of 4 patches: a convention has no capacity; use rollout"):
        next(capture(qwen2_vl(), question_probes(1), method=FLOW))
    with pytest.raises(ConfigError, match="made of 4 patches"):
        next(capture(swin(), image_probes(1), method=FLOW))


def test_flow_above_its_limit_names_the_cost() -> None:
    method = Method("attention_flow", params={"max_seconds": 1e-6})
    with pytest.raises(CaptureError, match=r"max-flows over .* edges"):
        next(capture(llava(), question_probes(1), method=method))
