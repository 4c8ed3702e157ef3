"""Methods beside plain rollout on images that are read with text, against every attention written out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.errors import CheckpointError, ConfigError
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.test_capture_image_text import (
    CONNECTORS,
    LAYERS,
    TOWER,
    attentions,
    by_stream,
)
from tests.integration.test_capture_windows import SIDE, dense, swin
from tests.integration.tiny_image_text import (
    FAMILIES,
    blip,
    idefics2,
    llava,
    question_probes,
    vilt,
)
from tests.integration.tiny_models import image_probes

Matrix = NDArray[np.float64]


@contextmanager
def kept_softmaxes() -> Iterator[list[Tensor]]:
    """Keep every softmax over a matrix of queries and keys, in the graph."""
    kept, plain = list[Tensor](), nn.functional.softmax

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        found = plain(*args, **kwargs)
        if found.dim() == 4:
            kept.append(found)
        return found

    nn.functional.softmax = keep  # type: ignore[assignment]
    try:
        yield kept
    finally:
        nn.functional.softmax = plain  # type: ignore[assignment]


def weighted(
    subject: Checkpoint, tensors: dict[str, Tensor], pick: Callable[[Tensor], Tensor]
) -> list[Matrix]:
    """Return the mean head of (∇A ⊙ A)⁺ of each layer, (sequence, query, key), the first layer first."""
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)  # ViLT draws the order of its patches
    with kept_softmaxes() as kept:
        score = pick(model(**tensors).logits)
    slopes = torch.autograd.grad(score, kept, allow_unused=True)
    return [
        np.zeros(A[:, 0].shape) if G is None else (A * G).clamp_min(0).double().mean(1).detach().numpy()
        for A, G in zip(kept, slopes, strict=True)
    ]


def block_diagonal(blocks: Matrix) -> Matrix:
    return torch.block_diag(*torch.from_numpy(blocks)).numpy()


def relevance(layers: list[Matrix], form: str = "relevance") -> Matrix:
    """Return R of one stack; sequences that do not see each other stand on the diagonal."""
    R = np.eye(layers[0].shape[0] * layers[0].shape[1])
    for layer in layers:
        step = np.eye(len(R)) + block_diagonal(layer)
        R = (step if form == "relevance" else step / step.sum(1, keepdims=True)) @ R
    return R


def connector(family: str, subject: Checkpoint, tensors: dict[str, Tensor], size: int) -> tuple[Matrix, Any]:
    """Return which patches stand behind each token of the image, and where these tokens are."""
    places = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    C = np.zeros((len(places), size))
    for token, patches in enumerate(CONNECTORS[family][1](len(places))):
        C[token, patches] = 1 / len(patches)
    return C, places


def packed(family: str, image: Matrix) -> Matrix:
    """Put rows that come in blocks of 2×2 in the order of the image."""
    return image.reshape(2, 4, 2, 2).transpose(0, 2, 1, 3).flatten() if family == "qwen2_vl" else image


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "relevance") for family in ("llava", "gemma3", "idefics3", "qwen2_vl")),
        ("llava", "product"),
    ],
)
def test_gradient_rollout_carries_the_answers_row_through_connector_and_tower(family: str, form: str) -> None:
    subject, probes = FAMILIES[family](), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    token = subject.processor.tokenizer("a")["input_ids"][0]
    layers = weighted(subject, tensors, lambda logits: logits[0, -1, token])
    tower = relevance(layers[: CONNECTORS[family][0]], form)
    row = relevance(layers[-LAYERS:], form)[-1]
    if form == "relevance":
        row[-1] -= 1
    C, places = connector(family, subject, tensors, len(tower))
    image, text = packed(family, row[places] @ C @ tower), np.delete(row, places)
    total = image.sum() + text.sum()
    method = Method("gradient_rollout", params={"form": form})
    (captured,) = capture(subject, probes, method=method, target="a")
    maps = by_stream(captured.maps)
    np.testing.assert_allclose(maps["image"].weights * maps["image"].share, image / total, atol=2e-6)
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, text / total, atol=2e-6)
    assert maps["image"].diagnostics["relevance"] == pytest.approx(row.sum(), rel=1e-4)
    assert maps["image"].weights.max() > 1.2 * maps["image"].weights.min()
    plain = by_stream(next(capture(subject, probes)).maps)["text"].positions
    assert maps["text"].positions.causal == plain.causal
    assert captured.prediction.target == "a"
    with torch.no_grad():
        logit = float(subject.model(**tensors).logits[0, -1, token])
    assert captured.prediction.target_logit == pytest.approx(logit, abs=1e-4)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_gradient_rollout_of_a_difference_reads_the_row_of_a_later_token() -> None:
    subject, probes = llava(), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    with torch.no_grad():
        chosen = subject.model(**tensors).logits[:, -1].argmax(dim=-1)
    tensors["input_ids"] = torch.cat([tensors["input_ids"], chosen[:, None]], dim=1)
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    a, b = (subject.processor.tokenizer(name)["input_ids"][0] for name in "ab")
    layers = weighted(subject, tensors, lambda logits: logits[0, -1, a] - logits[0, -1, b])
    tower, row = relevance(layers[:2]), relevance(layers[-LAYERS:])[-1]
    row[-1] -= 1
    C, places = connector("llava", subject, tensors, len(tower))
    image = row[places] @ C @ tower
    method = Method("gradient_rollout", row="decoder:1")
    maps = by_stream(next(capture(subject, probes, method=method, target=["a", "b"])).maps)
    np.testing.assert_allclose(maps["image"].weights, image / image.sum(), atol=2e-6)
    assert maps["image"].share == pytest.approx(
        image.sum() / (image.sum() + np.delete(row, places).sum()), abs=1e-5
    )


def test_gradient_rollout_of_latents_is_one_more_stack() -> None:
    subject, probes = idefics2(), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    token = subject.processor.tokenizer("a")["input_ids"][0]
    layers = weighted(subject, tensors, lambda logits: logits[0, -1, token])
    tower, row = relevance(layers[:TOWER]), relevance(layers[-LAYERS:])[-1]
    row[-1] -= 1
    source, own = np.zeros((4, len(tower))), np.eye(4)
    for layer in layers[TOWER:-LAYERS]:
        before, latents = layer[0][:, : len(tower)], layer[0][:, len(tower) :]
        source = source + before @ tower + latents @ source
        own = own + latents @ own
    place = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    expected = np.concatenate([row[place] @ own, row[place] @ source])
    image = next(capture(subject, probes, method=Method("gradient_rollout"), target="a")).maps[0]
    np.testing.assert_allclose(image.weights, expected / expected.sum(), atol=2e-6)
    assert image.positions.special.tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize("form", ["relevance", "product"])
def test_gradient_rollout_of_one_encoder_reads_words_and_patches(form: str) -> None:
    subject, probes = vilt(), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    row = relevance(weighted(subject, tensors, lambda logits: logits[0, 1]), form)[0]
    row[0] -= form == "relevance"
    row = row / row.sum()
    method = Method("gradient_rollout", params={"form": form})
    image, text = next(capture(subject, probes, method=method, target=1)).maps
    words = tensors["input_ids"].shape[1]
    np.testing.assert_allclose(text.weights * text.share, row[: words + 1], atol=2e-6)
    np.testing.assert_allclose(np.sort(image.weights * image.share), np.sort(row[words + 1 :]), atol=2e-6)


def test_gradient_rollout_of_windows_takes_the_identity_off_the_mean_row() -> None:
    """Every position of the last stage is read, and stands for four patches."""
    subject, probes = swin(), image_probes(1)
    pixels = subject.processor(probes[0].image, return_tensors="pt", input_data_format="channels_last")
    layers = weighted(subject, dict(pixels), lambda logits: logits[0, 2])
    half, R = SIDE // 2, np.eye(SIDE * SIDE)
    for windows, shift in zip(layers[:2], (0, 2), strict=True):
        R = (np.eye(len(R)) + dense(torch.from_numpy(windows)[:, None], SIDE, shift)) @ R
    C = np.zeros((half * half, SIDE * SIDE))
    for row in range(SIDE):
        for column in range(SIDE):
            C[row // 2 * half + column // 2, row * SIDE + column] = 0.25
    expected = (relevance(layers[2:]) @ C @ R - C).mean(axis=0)
    (one,) = next(capture(subject, probes, method=Method("gradient_rollout"), target=2)).maps
    np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=2e-6)


# --- attention alone --------------------------------------------------------------------------


def fused(layer: Tensor, params: dict[str, Any]) -> Matrix:
    """Return one layer's heads as one matrix, pruned row by row (sequence, query, key)."""
    A = layer.numpy()
    kind = params.get("head_fusion", "mean")
    whole = A.mean(1) if kind == "mean" else getattr(A, kind)(axis=1)
    whole = whole / whole.sum(-1, keepdims=True)
    for row in whole.reshape(-1, whole.shape[-1]):
        known = np.sort(row[row > 0])
        if "top_k" in params and len(known) > params["top_k"]:
            row[row < known[-params["top_k"]]] = 0
        dropped = int(params.get("discard_ratio", 0) * len(known))
        row[row < known[dropped]] = 0
    pruned: Matrix = whole / whole.sum(-1, keepdims=True)
    return pruned


@pytest.mark.parametrize(
    "params",
    [
        {"head_fusion": "max"},
        {"head_fusion": "min", "residual": 0.3},
        {"discard_ratio": 0.4},
        {"top_k": 3},
        {"start_layer": 1},
    ],
    ids=lambda params: next(iter(params)),
)
def test_variants_of_rollout_fuse_and_prune_every_stack(params: dict[str, Any]) -> None:
    """`start_layer` counts the layers of the last stack; the tower is whole."""
    subject, probes, family = llava(), question_probes(1), "llava"
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    kept, rho = attentions(subject, tensors), params.get("residual", 0.5)

    def rolled(layers: list[Tensor]) -> Matrix:
        R = np.eye(layers[0].shape[0] * layers[0].shape[-1])
        for layer in layers:
            R = ((1 - rho) * block_diagonal(fused(layer, params)) + rho * np.eye(len(R))) @ R
        return R

    tower = rolled(kept[: CONNECTORS[family][0]])
    row = rolled(kept[len(kept) - LAYERS + params.get("start_layer", 0) :])[-1]
    C, places = connector(family, subject, tensors, len(tower))
    maps = by_stream(next(capture(subject, probes, method=Method("rollout", params=params))).maps)
    found = maps["image"].weights * maps["image"].share
    np.testing.assert_allclose(found, row[places] @ C @ tower, atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, np.delete(row, places), atol=1e-6)


def test_residuals_and_weights_by_layer_go_with_one_stack() -> None:
    subject, probes = vilt(), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    torch.manual_seed(0)
    heads, rho = [[0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.5, 0.0], [0.25] * 4], [0.2, 0.5, 0.8]
    R = None
    for layer, one, keep in zip(attentions(subject, tensors), heads, rho, strict=True):
        A = np.einsum("h,hqk->qk", one, layer[0].numpy())
        step = (1 - keep) * A + keep * np.eye(len(A))
        R = step if R is None else step @ R
    assert R is not None
    params = {"head_fusion": "weighted", "head_weights": heads, "residual": rho}
    image, text = next(capture(subject, probes, method=Method("rollout", params=params))).maps
    words = tensors["input_ids"].shape[1]
    np.testing.assert_allclose(text.weights * text.share, R[0][: words + 1], atol=1e-6)
    np.testing.assert_allclose(np.sort(image.weights * image.share), np.sort(R[0][words + 1 :]), atol=1e-6)


@pytest.mark.parametrize(("family", "layer"), [("llava", 0), ("qwen2_5_vl", -1)])
def test_raw_attention_is_a_row_of_one_layer_over_the_patches_of_each_position(
    family: str, layer: int
) -> None:
    subject, probes = FAMILIES[family](), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    row = attentions(subject, tensors)[-LAYERS:][layer][0].mean(0)[-1].numpy()
    method = Method("raw_attention", params={"layer": layer})
    maps = by_stream(next(capture(subject, probes, method=method)).maps)
    places = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    if family == "qwen2_5_vl":  # a token for each block of 2×2
        expected = np.repeat(np.repeat(row[places].reshape(2, 4), 2, axis=0), 2, axis=1).flatten() / 4
    else:
        expected = np.concatenate([[0.0], row[places]])  # none for the tower's CLS
    np.testing.assert_allclose(maps["image"].weights * maps["image"].share, expected, atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, np.delete(row, places), atol=1e-6)


@pytest.mark.parametrize(
    ("family", "head", "layer"), [("idefics3", 2, 1), ("llava", 0, 0), ("llava", None, -1)]
)
def test_a_head_of_the_decoder_reads_the_merged_layers_below(
    family: str, head: int | None, layer: int
) -> None:
    subject, probes = FAMILIES[family](), question_probes(1)
    tensors = dict(ImageTextEncoder(subject, CaptureSettings()).encode(probes[0]).tensors)
    kept = attentions(subject, tensors)

    def rolled(layers: list[Matrix]) -> Matrix:
        R = np.eye(layers[0].shape[0] * layers[0].shape[-1])
        for one in layers:
            R = (0.5 * block_diagonal(one) + 0.5 * np.eye(len(R))) @ R
        return R

    tower = rolled([one.numpy().mean(1) for one in kept[: CONNECTORS[family][0]]])
    decoder = [one.numpy() for one in kept[-LAYERS:]]
    last = layer % LAYERS
    chosen = decoder[last].mean(1) if head is None else decoder[last][:, head]
    row = rolled([*(one.mean(1) for one in decoder[:last]), chosen])[-1]
    C, places = connector(family, subject, tensors, len(tower))
    params = {"layer": layer} | ({} if head is None else {"head": head})
    maps = by_stream(next(capture(subject, probes, method=Method("per_head_rollout", params=params))).maps)
    np.testing.assert_allclose(
        maps["image"].weights * maps["image"].share, row[places] @ C @ tower, atol=1e-6
    )
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, np.delete(row, places), atol=1e-6)
    assert maps["image"].diagnostics["head_disagreement"] > 0


# --- the logit itself -------------------------------------------------------------------------


def logit(subject: Checkpoint, tensors: dict[str, Tensor], pick: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    return pick(subject.model(**tensors).logits.double())


def patch_of(tensors: dict[str, Tensor], patch: int) -> tuple[Any, ...]:
    """Return where a patch of 8×8 lies in the pixels, row by row."""
    columns = tensors["pixel_values"].shape[-1] // 8
    top, left = patch // columns * 8, patch % columns * 8
    return ..., slice(top, top + 8), slice(left, left + 8)


def picked(subject: Checkpoint) -> tuple[Callable[[Tensor], Tensor], Any]:
    """Return what is explained, as a function of the logits, and its name."""
    if subject.task == "visual-question-answering":
        return (lambda logits: logits[0, 1]), 1
    token = subject.processor.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    return (lambda logits: logits[0, -1, token]), "a"


def content(subject: Checkpoint, probe: Probe) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probe)
    return dict(item.tensors), np.flatnonzero(~item.positions.special)


@pytest.mark.parametrize("make", [llava, vilt])
def test_occlusion_is_what_the_logit_loses_with_each_token_and_each_patch(
    make: Callable[[], Checkpoint],
) -> None:
    subject, probes = make(), question_probes(1)
    tensors, tokens = content(subject, probes[0])
    pick, target = picked(subject)
    tokenizer = subject.processor.tokenizer
    replacement = tokenizer.mask_token_id or tokenizer.unk_token_id or tokenizer.pad_token_id
    pixels, words, patches = tensors["pixel_values"], [], []
    grey = pixels.mean(dim=(-2, -1), keepdim=True).expand_as(pixels)
    with torch.no_grad():
        intact = logit(subject, tensors, pick)
        for at in tokens:
            ids = tensors["input_ids"].clone()
            ids[0, at] = replacement
            words.append(float((logit(subject, {**tensors, "input_ids": ids}, pick) - intact).abs()))
        for patch in range(pixels.shape[-2] * pixels.shape[-1] // 64):
            changed = pixels.clone()
            changed[patch_of(tensors, patch)] = grey[patch_of(tensors, patch)]
            patches.append(float((logit(subject, {**tensors, "pixel_values": changed}, pick) - intact).abs()))
    (captured,) = capture(subject, probes, method=Method("occlusion"), target=target)
    maps, total = by_stream(captured.maps), sum(words) + sum(patches)
    image, text = maps["image"], maps["text"]
    found = (image.weights * image.share)[~image.positions.special]
    np.testing.assert_allclose(found, np.array(patches) / total, atol=1e-5)
    found = (text.weights * text.share)[~text.positions.special]
    np.testing.assert_allclose(found, np.array(words) / total, atol=1e-5)
    assert image.share + text.share == pytest.approx(1.0)
    assert captured.prediction.target_logit == pytest.approx(float(intact), abs=1e-4)


@pytest.mark.parametrize(
    ("make", "steps"), [(llava, None), (llava, 80), (blip, None)], ids=["llava", "llava-path", "blip"]
)
def test_gradients_of_inputs_are_those_of_pixels_and_embedded_tokens(
    make: Callable[[], Checkpoint], steps: int | None
) -> None:
    """Input × gradient once, integrated gradients by the midpoint rule in `steps` steps."""
    subject, probes = make(), question_probes(1)
    if steps is not None:  # a path that few steps follow
        with torch.no_grad():
            for parameter in subject.model.parameters():
                parameter.mul_(0.5)
    tensors, tokens = content(subject, probes[0])
    pick, target = picked(subject)
    table = subject.model.get_input_embeddings()
    pixels, words = tensors["pixel_values"], table(tensors["input_ids"]).detach()
    from_pixels, from_words = torch.zeros_like(pixels), torch.zeros_like(words)
    if steps is not None:
        ids = tensors["input_ids"].clone()
        ids[0, tokens] = subject.processor.tokenizer.pad_token_id
        from_pixels = pixels.mean(dim=(-2, -1), keepdim=True).expand_as(pixels)
        from_words = table(ids).detach()
    slopes = [torch.zeros_like(pixels), torch.zeros_like(words)]
    for step in range(steps or 1):
        share = 1.0 if steps is None else (step + 0.5) / steps
        leaves = [
            torch.lerp(a, b, share).requires_grad_() for a, b in ((from_pixels, pixels), (from_words, words))
        ]
        handle = table.register_forward_hook(lambda _m, _a, _o, leaves=leaves: leaves[1].clone())
        score = logit(subject, {**tensors, "pixel_values": leaves[0]}, pick)
        handle.remove()
        slopes = [
            a + b / (steps or 1) for a, b in zip(slopes, torch.autograd.grad(score, leaves), strict=True)
        ]
    parts = ((pixels - from_pixels) * slopes[0])[0].sum(0)
    patches = np.array([float(parts[patch_of(tensors, i)].sum().abs()) for i in range(16)])
    spoken = ((words - from_words) * slopes[1])[0].sum(-1).abs().numpy()
    method = Method("input_x_gradient")
    if steps is not None:
        method = Method("integrated_gradients", params={"steps": steps // 2})
    maps = by_stream(next(capture(subject, probes, method=method, target=target)).maps)
    image, text, total = maps["image"], maps["text"], patches.sum() + spoken.sum()
    tolerance = 2e-6 if steps is None else 1e-4
    found = image.weights * image.share
    np.testing.assert_allclose(found[~image.positions.special], patches / total, atol=tolerance)
    ids = tensors["input_ids"][0].numpy()
    own = ids != getattr(subject.model.config, "image_token_id", -1) if make is llava else ids >= 0
    np.testing.assert_allclose(text.weights * text.share, spoken[own] / total, atol=tolerance)
    if steps is not None:
        assert image.diagnostics["completeness_error"] < 0.05


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "method", "params", "named"),
    [
        (llava, "rollout", {"residual": [0.5] * 5}, "residual is not available for an image that comes"),
        (llava, "per_head_rollout", {"same_head": True}, "same_head is not available"),
    ],
)
def test_what_has_no_exact_meaning_is_refused_with_its_reason(
    make: Callable[[], Checkpoint], method: str, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        next(capture(make(), question_probes(1), method=Method(method, params=params)))


def test_a_backbone_has_no_logit_to_explain() -> None:
    bare = replace(llava(), task="backbone", has_head=False)
    with pytest.raises(CheckpointError, match="no task head"):
        next(capture(bare, question_probes(1), method=Method("gradient_rollout")))
