"""Value-aware methods on images with text or in windows, against each layer's sums written out slowly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.encoded import encode_image
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.errors import CaptureError
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.test_capture_image_text import CONNECTORS, LAYERS, by_stream, softmaxes
from tests.integration.test_capture_windows import SIDE, WINDOW, swin
from tests.integration.test_image_text_methods import packed
from tests.integration.tiny_image_text import (
    gemma3,
    idefics2,
    internvl,
    llava,
    question_probes,
    qwen2_5_vl,
    qwen2_vl,
    vilt,
)
from tests.integration.tiny_models import image_probes

Matrix = NDArray[np.float64]
METHODS = {
    "norms": Method("norms"),
    "alti": Method("alti"),
    "measured": Method("rollout", params={"residual": "measured"}),
    "value_zeroing": Method("value_zeroing"),
}


@dataclass
class Layer:
    """One layer of a model: its modules, what they took and gave, and where the rows of its call stand."""

    block: nn.Module
    value: nn.Module
    out: nn.Module
    scale: Tensor | None = None
    taken: list[Any] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    zeroed: int | None = None

    def watch(self) -> None:
        self.block.register_forward_pre_hook(lambda _m, a, k: self.taken.append((a, k)), with_kwargs=True)
        for name, module in (("value", self.value), ("out", self.out), ("block", self.block)):
            module.register_forward_hook(lambda _m, _a, o, name=name: self.keep(name, o))

    def keep(self, name: str, output: Any) -> Tensor | None:
        first = output[0] if isinstance(output, tuple) else output
        if name == "value" and self.zeroed is not None:
            first = first.clone()
            width = first.shape[-1] // (3 if self.value.out_features == 3 * self.value.in_features else 1)
            first.view(-1, first.shape[-1])[self.zeroed, -width:] = 0
            return first
        if self.zeroed is None:
            self.given[name] = first.detach().double()
        return None

    @property
    def hidden(self) -> Tensor:
        args, kwargs = self.taken[0]
        found = args[0] if args else kwargs["hidden_states"]
        return found.detach().double()


LISTS: dict[str, list[tuple[str, str, str]]] = {
    "llava": [
        ("model.vision_tower.encoder.layers", "self_attn.v_proj", "self_attn.out_proj"),
        ("model.language_model.layers", "self_attn.v_proj", "self_attn.o_proj"),
    ],
    "qwen2_5_vl": [
        ("model.visual.blocks", "attn.qkv", "attn.proj"),
        ("model.language_model.layers", "self_attn.v_proj", "self_attn.o_proj"),
    ],
    "internvl": [
        ("model.vision_tower.encoder.layer", "attention.v_proj", "attention.projection_layer"),
        ("model.language_model.layers", "self_attn.v_proj", "self_attn.o_proj"),
    ],
    "idefics2": [
        ("model.vision_model.encoder.layers", "self_attn.v_proj", "self_attn.out_proj"),
        ("model.connector.perceiver_resampler.layers", "self_attn.v_proj", "self_attn.o_proj"),
        ("model.text_model.layers", "self_attn.v_proj", "self_attn.o_proj"),
    ],
    "vilt": [("vilt.encoder.layer", "attention.attention.value", "attention.output.dense")],
    "swin": [
        ("swin.encoder.layers.0.blocks", "attention.v_proj", "attention.o_proj"),
        ("swin.encoder.layers.1.blocks", "attention.v_proj", "attention.o_proj"),
    ],
}
LISTS["qwen2_vl"] = LISTS["qwen2_5_vl"]
MAKE: dict[str, Callable[[], Checkpoint]] = {
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "internvl": internvl,
    "idefics2": idefics2,
    "vilt": vilt,
    "swin": swin,
}


def inputs(subject: Checkpoint, family: str) -> tuple[list[Probe], dict[str, Tensor]]:
    if family == "swin":
        probes = image_probes(1)
        return probes, dict(encode_image(subject, probes[0], windows=True).tensors)
    probes = question_probes(1)
    return probes, dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)


def run(subject: Checkpoint, family: str, tensors: dict[str, Tensor]) -> list[Layer]:
    """Return the layers of a model after one pass, in the order in which they ran."""
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("eager")
    layers = []
    for path, value, out in LISTS[family]:
        for block in model.get_submodule(path):
            scale = getattr(block, "lambda_1", None)
            layers.append(Layer(block, block.get_submodule(value), block.get_submodule(out), scale))
            layers[-1].watch()
    torch.manual_seed(0)  # ViLT draws the order of its patches
    with torch.no_grad(), softmaxes() as kept:
        counts = []
        for layer in layers:
            layer.block.register_forward_hook(lambda *_: counts.append(len(kept)))
        model(**tensors, **({} if family in {"vilt", "swin"} else {"use_cache": False}))
        for layer, start, stop in zip(layers, [0, *counts], counts, strict=False):
            layer.weights = kept[start:stop]
    return layers


def places(family: str, layer: Layer, index: int) -> NDArray[np.int64]:
    """Return which position of the layer's stack each row of its call is: (batch, row)."""
    if family != "swin":
        length = layer.hidden.shape[-2]
        return np.arange(layer.hidden[..., 0].numel()).reshape(-1, length)
    if index >= 2:
        return np.arange(SIDE * SIDE // 4)[None]
    shift = WINDOW // 2 * index
    grid = np.roll(np.arange(SIDE * SIDE).reshape(SIDE, SIDE), (-shift, -shift), axis=(0, 1))
    cut = grid.reshape(SIDE // WINDOW, WINDOW, SIDE // WINDOW, WINDOW).transpose(0, 2, 1, 3)
    return cut.reshape(-1, WINDOW * WINDOW)


def attention(layer: Layer) -> Tensor:
    """Return the weights of one call; pieces of a packed row stand on the diagonal."""
    if len(layer.weights) == 1:
        return layer.weights[0]
    heads = [torch.block_diag(*(piece[0, head] for piece in layer.weights)) for head in range(4)]
    return torch.stack(heads)[None]


def slow_matrix(family: str, layer: Layer, index: int, method: str) -> Matrix:
    """Return one layer over all positions of its stack, the context of latents behind these."""
    at, weights = places(family, layer, index), attention(layer)
    hidden = layer.hidden.reshape(-1, layer.hidden.shape[-1]).numpy()
    heads, keys = weights.shape[1], weights.shape[3]
    total, beside = len(hidden), keys - at.shape[1]
    whole = np.eye(total + beside)
    whole[:total] = 0
    value = layer.given["value"].reshape(len(at), keys, -1)
    if layer.value.out_features == 3 * layer.value.in_features:
        value = value.chunk(3, dim=-1)[2]
    out = layer.out.weight.detach().double()
    out = out if layer.scale is None else out * layer.scale.detach().double()[:, None]
    head_dim = out.shape[1] // heads
    value = value.reshape(len(at), keys, -1, head_dim).transpose(1, 2)
    value = value.repeat_interleave(heads // value.shape[1], dim=1).numpy()
    given = layer.given["out"].reshape(len(at), at.shape[1], -1).numpy()
    given = given if layer.scale is None else given * layer.scale.detach().double().numpy()
    cut = [out[:, h * head_dim : (h + 1) * head_dim].numpy() for h in range(heads)]
    for window, rows in enumerate(at):
        columns = np.concatenate([np.arange(total, total + beside), rows])
        written = np.array([[cut[h] @ value[window, h, j] for j in range(keys)] for h in range(heads)])
        for i, row in enumerate(rows):
            added = given[window, i]
            if method == "measured":
                size = np.linalg.norm(hidden[row])
                rho = size / (size + np.linalg.norm(added))
                whole[row, columns] += (1 - rho) * weights[window].mean(0)[i].numpy()
                whole[row, row] += rho
                continue
            parts = (weights[window][:, i, :, None].numpy() * written).sum(0)
            parts[beside + i] += hidden[row]
            if method == "norms":
                sizes = np.linalg.norm(parts, axis=1)
            else:
                y = hidden[row] + added
                sizes = np.array([max(0.0, np.abs(y).sum() - np.abs(y - part).sum()) for part in parts])
            whole[row, columns] = sizes / sizes.sum()
    return whole


def zeroed_matrix(family: str, layer: Layer, index: int) -> Matrix:
    """Return 1 − cos of a layer's output with and without each position's value, one run for each."""
    at, keys = places(family, layer, index), attention(layer).shape[3]
    total, beside = at.size, keys - at.shape[1]
    before = layer.given["block"].reshape(total, -1)
    whole = np.eye(total + beside)
    whole[:total] = 0
    args, kwargs = layer.taken[0]
    for window, rows in enumerate(at):
        columns = np.concatenate([np.arange(total, total + beside), rows])
        for j, column in enumerate(columns):
            layer.zeroed = window * keys + j
            with torch.no_grad():
                output = layer.block(*args, **kwargs)
            after = (output[0] if isinstance(output, tuple) else output).double().reshape(total, -1)
            turned = 1 - torch.cosine_similarity(before, after, dim=-1)
            whole[:total, column] = turned.clamp_min(0).numpy()
    layer.zeroed = None
    return whole / whole.sum(axis=1, keepdims=True)


def product(layers: list[Matrix]) -> Matrix:
    R = np.eye(len(layers[0]))
    for layer in layers:
        R = layer @ R
    return R


@cache
def prepared(family: str) -> tuple[Checkpoint, list[Probe], dict[str, Tensor], list[Layer]]:
    subject = MAKE[family]()
    subject.model.double()
    probes, tensors = inputs(subject, family)
    tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    return subject, probes, tensors, run(subject, family, tensors)


def matrices(family: str, method: str) -> list[Matrix]:
    _, _, _, layers = prepared(family)
    if method == "value_zeroing":
        return [zeroed_matrix(family, layer, i) for i, layer in enumerate(layers)]
    return [slow_matrix(family, layer, i, method) for i, layer in enumerate(layers)]


def check_streams(maps: Any, image: Matrix, text: Matrix) -> None:
    found = by_stream(maps)
    np.testing.assert_allclose(found["image"].weights * found["image"].share, image, atol=2e-6)
    np.testing.assert_allclose(found["text"].weights * found["text"].share, text, atol=2e-6)
    assert found["image"].share + found["text"].share == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_both_stacks_are_split_and_joined_by_the_connector(family: str, method: str) -> None:
    subject, probes, tensors, _ = prepared(family)
    layers, (depth, patches) = matrices(family, method), CONNECTORS[family]
    tower, row = product(layers[:depth]), product(layers[-LAYERS:])[-1]
    image = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    connector = np.zeros((len(image), len(tower)))
    for token, behind in enumerate(patches(len(image))):
        connector[token, behind] = 1 / len(behind)
    (captured,) = capture(subject, probes, method=METHODS[method])
    check_streams(captured.maps, packed(family, row[image] @ connector @ tower), np.delete(row, image))
    assert captured.maps[0].diagnostics["empty_rows"] == 0
    found = by_stream(captured.maps)["text"]
    assert found.positions.causal == by_stream(next(capture(subject, probes)).maps)["text"].positions.causal
    assert found.layers is not None
    assert len(found.layers) == LAYERS


@pytest.mark.parametrize("method", METHODS)
def test_pieces_of_a_packed_tower_are_split_each_by_itself(method: str) -> None:
    """Qwen2.5-VL: two windows side by side, of 2×2 tokens of four patches."""
    subject, probes, tensors, _ = prepared("qwen2_5_vl")
    layers = matrices("qwen2_5_vl", method)
    tower, row = product(layers[:3]), product(layers[3:])[-1]
    places_ = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    connector = np.zeros((8, 32))
    for place, token in enumerate(order):
        connector[token, 4 * place : 4 * place + 4] = 0.25
    by_window = (row[places_] @ connector @ tower).reshape(8, 4)
    by_token = np.zeros((8, 4))
    by_token[order] = by_window
    image = by_token.reshape(2, 4, 2, 2).transpose(0, 2, 1, 3).flatten()
    check_streams(next(capture(subject, probes, method=METHODS[method])).maps, image, np.delete(row, places_))


@pytest.mark.parametrize("method", METHODS)
def test_latents_are_split_over_their_context_and_themselves(method: str) -> None:
    subject, probes, tensors, _ = prepared("idefics2")
    layers = matrices("idefics2", method)
    tower, resampler, row = product(layers[:3]), product(layers[3:5])[:4], product(layers[5:])[-1]
    at = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    own, source = resampler[:, :4], resampler[:, 4:] @ tower
    image = np.concatenate([row[at] @ own, row[at] @ source])
    check_streams(next(capture(subject, probes, method=METHODS[method])).maps, image, np.delete(row, at))


@pytest.mark.parametrize("method", METHODS)
def test_windows_are_split_each_by_itself(method: str) -> None:
    subject, probes, _, _ = prepared("swin")
    layers, half = matrices("swin", method), SIDE // 2
    merge = np.zeros((half * half, SIDE * SIDE))
    for row in range(SIDE):
        for column in range(SIDE):
            merge[row // 2 * half + column // 2, row * SIDE + column] = 0.25
    expected = product(layers[2:]) @ merge @ product(layers[:2])
    (one,) = next(capture(subject, probes, method=METHODS[method])).maps
    np.testing.assert_allclose(one.weights, expected.mean(axis=0), atol=2e-6)
    assert one.weights.sum() == pytest.approx(1.0)
    plain = next(capture(subject, probes)).maps[0]
    assert np.abs(one.weights - plain.weights).max() > 1e-4


@pytest.mark.parametrize("method", ["norms", "alti", "measured"])
def test_words_and_patches_of_one_encoder_are_split_together(method: str) -> None:
    subject, probes, tensors, _ = prepared("vilt")
    row, words = product(matrices("vilt", method))[0], tensors["input_ids"].shape[1]
    image, text = next(capture(subject, probes, method=METHODS[method])).maps
    np.testing.assert_allclose(text.weights * text.share, row[: words + 1], atol=2e-6)
    np.testing.assert_allclose(np.sort(image.weights * image.share), np.sort(row[words + 1 :]), atol=2e-6)


@pytest.mark.parametrize("method", ["norms", "measured"])
def test_a_factor_of_the_layer_scales_what_attention_adds(method: str) -> None:
    """InternVL's tower multiplies it by λ, which starts at 0.1."""
    subject, probes, tensors, _ = prepared("internvl")
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if name.endswith("lambda_1"):
                parameter.copy_(torch.linspace(0.5, 2.0, len(parameter)))
    layers = [slow_matrix("internvl", x, i, method) for i, x in enumerate(run(subject, "internvl", tensors))]
    depth, patches = CONNECTORS["internvl"]
    row = product(layers[-LAYERS:])[-1]
    tiles = len(tensors["pixel_values"])
    tower = product(layers[:depth])
    at = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    connector = np.zeros((len(at), len(tower)))
    for token, behind in enumerate(patches(len(at))):
        connector[token, behind] = 1 / len(behind)
    image = (row[at] @ connector @ tower).reshape(tiles, -1)[:, 1:].flatten()
    found = by_stream(next(capture(subject, probes, method=METHODS[method])).maps)["image"]
    seen = (found.weights * found.share)[~found.positions.special]
    np.testing.assert_allclose(np.sort(seen), np.sort(image), atol=2e-6)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "method", "named"),
    [
        (llava, "globenc", "vision_tower.encoder.layers.0.* so globenc would be norms"),
        (gemma3, "alti", "no norm takes the sum of residual and attention"),
        (vilt, "value_zeroing", "not on the attention interface, so its values cannot be"),
    ],
)
def test_layers_that_cannot_be_split_are_refused_by_name(
    make: Callable[[], Checkpoint], method: str, named: str
) -> None:
    with pytest.raises(CaptureError, match=named):
        next(capture(make(), question_probes(1), method=METHODS.get(method, Method(method))))


def test_norms_within_the_branch_of_windows_are_refused_but_their_values_can_be_zeroed() -> None:
    subject, probes = swin("Swinv2ForImageClassification"), image_probes(1)
    with pytest.raises(CaptureError, match="no norm takes the sum of residual and attention"):
        next(capture(subject, probes, method=Method("norms")))
