"""Attributions of images with text against exact games, slow loops, finite differences and conserved sums."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.errors import CaptureError, ConfigError
from audit.records import CaptureSettings, Checkpoint, Map, Method, Probe
from tests.integration.test_capture_image_text import by_stream
from tests.integration.test_capture_windows import swin
from tests.integration.test_image_text_methods import connector, packed, relevance, weighted
from tests.integration.tiny_image_text import FAMILIES, blip, idefics2, llava, question_probes
from tests.integration.tiny_models import image_probes

MAKERS: dict[str, Callable[[], Checkpoint]] = {
    **FAMILIES,
    "idefics2": idefics2,
    "swin": swin,
    "swinv2": lambda: swin("Swinv2ForImageClassification"),
}
Vector = NDArray[np.float64]
Value = Callable[[frozenset[int]], float]


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Draw the same random weights in every run and in every order of the tests."""
    torch.manual_seed(0)


def encode(subject: Checkpoint, probe: Probe) -> Encoded:
    return ImageTextEncoder(subject, CaptureSettings()).encode(probe)


def logit(subject: Checkpoint, tensors: dict[str, Tensor], name: str = "a") -> Tensor:
    """Return the logit of a token at the last position, in float64."""
    token = subject.processor.tokenizer(name, add_special_tokens=False)["input_ids"][0]
    found: Tensor = subject.model(**tensors).logits[0, -1, token].double()
    return found


def params(name: str, **given: Any) -> Method:
    return Method(name, params=given)


def content(maps: Sequence[Map]) -> Vector:
    """Return what both maps of a probe say of their content, on one scale: patches, then tokens."""
    image, text = maps
    assert image.share + text.share == pytest.approx(1.0)
    return np.concatenate([(one.weights * one.share)[~one.positions.special] for one in (image, text)])


# --- SHAP, LIME and occlusion: what is removed ------------------------------------------------


def removed(subject: Checkpoint, item: Encoded, gone: Sequence[int]) -> dict[str, Tensor]:
    """Remove players: 0 to 3 are patches of 16×16, which turn grey, the others tokens, which turn to end."""
    pixels, ids = item.tensors["pixel_values"].clone(), item.tensors["input_ids"].clone()
    tokens = np.flatnonzero(~item.positions.special)
    grey = item.tensors["pixel_values"].mean(dim=(-2, -1))[0]
    for player in gone:
        if player < 4:
            top, left = player // 2 * 16, player % 2 * 16
            pixels[0, :, top : top + 16, left : left + 16] = grey[:, None, None]
        else:
            ids[0, tokens[player - 4]] = subject.processor.tokenizer.pad_token_id
    return {**item.tensors, "pixel_values": pixels, "input_ids": ids}


def few_players() -> tuple[Checkpoint, Probe, int, Value]:
    """Return a model of four patches, a probe of three tokens, and the value of each set of the seven."""
    subject, probe = llava(patch=16), replace(question_probes(1)[0], text="abc")
    item, known = encode(subject, probe), dict[frozenset[int], float]()
    count = 4 + int((~item.positions.special).sum())

    def value(kept: frozenset[int]) -> float:
        if kept not in known:
            with torch.no_grad():
                gone = [i for i in range(count) if i not in kept]
                known[kept] = float(logit(subject, removed(subject, item, gone)))
        return known[kept]

    return subject, probe, count, value


def exact_shapley(count: int, value: Value) -> Vector:
    """Σ over sets S without i of |S|! (n − |S| − 1)! / n! · (f(S ∪ i) − f(S))."""
    found = np.zeros(count)
    for player in range(count):
        others = [i for i in range(count) if i != player]
        for size in range(count):
            weight = factorial(size) * factorial(count - size - 1) / factorial(count)
            for kept in map(frozenset, combinations(others, size)):
                found[player] += weight * (value(kept | {player}) - value(kept))
    return found


def test_shapley_values_of_patches_and_tokens_tend_to_those_of_all_sets() -> None:
    subject, probe, count, value = few_players()
    everyone, exact = frozenset(range(count)), exact_shapley(count, value)
    assert count == 7
    assert exact.sum() == pytest.approx(value(everyone) - value(frozenset()), abs=1e-6)
    torch.manual_seed(0)
    drawn, samples = np.zeros(count), 160
    for _ in range(samples):  # the orders that Captum draws, tokens before patches
        order = [(int(i) + 4) % count for i in torch.randperm(count)]
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            drawn[player] += (value(before | {player}) - value(before)) / samples
    method = params("shap", samples=samples)
    (captured,) = capture(subject, [probe], method=method, target="a")
    found = content(captured.maps)
    np.testing.assert_allclose(found, np.abs(drawn) / np.abs(drawn).sum(), atol=1e-4)
    np.testing.assert_allclose(found, np.abs(exact) / np.abs(exact).sum(), atol=0.1)
    assert captured.maps[0].diagnostics["completeness_error"] < 1e-4


def test_lime_is_the_ridge_regression_of_the_logit_on_what_is_kept() -> None:
    """The same sets are drawn here as Captum draws them: a coin for each token, then for each patch."""
    subject, probe, count, value = few_players()
    torch.manual_seed(3)
    coins = torch.full((1, count), 0.5)
    kept = np.roll(torch.cat([torch.bernoulli(coins) for _ in range(60)]).double().numpy(), 4, axis=1)
    values = np.array([value(frozenset(np.flatnonzero(row).tolist())) for row in kept])
    cosine = kept.sum(1) / np.sqrt(np.maximum(kept.sum(1), 1e-30) * count)
    weight = np.exp(-((1 - cosine) ** 2) / (2 * 0.25**2))
    middle, mean = weight @ kept / weight.sum(), weight @ values / weight.sum()
    x, y = kept - middle, values - mean
    slopes = np.abs(np.linalg.solve(x.T @ (weight[:, None] * x) + np.eye(count), x.T @ (weight * y)))
    method = params("lime", samples=60, seed=3)
    (captured,) = capture(subject, [probe], method=method, target="a")
    np.testing.assert_allclose(content(captured.maps), slopes / slopes.sum(), atol=1e-4)


def packed_grey(pixels: Tensor, patch: int) -> Tensor:
    """Turn a patch of Qwen's packed row to the mean colour: colours, two frames, 8×8 side by side."""
    changed = pixels.clone().view(len(pixels), 3, -1)
    changed[patch] = changed.mean(dim=(0, 2))[:, None]
    return changed.view_as(pixels)


def test_occlusion_of_packed_patches_turns_them_to_the_measured_mean_colour() -> None:
    subject, (probe,) = FAMILIES["qwen2_5_vl"](), question_probes(1)
    item = encode(subject, probe)
    pixels, ids = item.tensors["pixel_values"], item.tensors["input_ids"]
    with torch.no_grad():
        intact = logit(subject, item.tensors)
        moved = [
            logit(subject, {**item.tensors, "pixel_values": packed_grey(pixels, i)}) - intact
            for i in range(len(pixels))
        ]
        spoken = []
        for at in np.flatnonzero(~item.positions.special):
            changed = ids.clone()
            changed[0, at] = subject.processor.tokenizer.pad_token_id
            spoken.append(logit(subject, {**item.tensors, "input_ids": changed}) - intact)
    in_order = np.array(moved).reshape(2, 4, 2, 2).transpose(0, 2, 1, 3).flatten()
    expected = np.abs(np.concatenate([in_order, np.array(spoken)]))
    (captured,) = capture(subject, [probe], method=Method("occlusion"), target="a")
    np.testing.assert_allclose(content(captured.maps), expected / expected.sum(), atol=1e-5)


def test_integrated_gradients_of_packed_patches_are_complete() -> None:
    subject, probes = FAMILIES["qwen2_vl"](), question_probes(1)
    (captured,) = capture(subject, probes, method=Method("integrated_gradients"), target="a")
    assert content(captured.maps).sum() == pytest.approx(1.0)
    assert captured.maps[0].diagnostics["completeness_error"] < 0.05


# --- Grad-CAM ---------------------------------------------------------------------------------


def slow_grad_cam(score: Tensor, features: Tensor) -> Vector:
    """(Σ_k α_k H_jk)⁺ with α the mean gradient over positions, loop by loop."""
    (slopes,) = torch.autograd.grad(score, features, retain_graph=True)
    H, G = (x.detach().double().reshape(-1, x.shape[-1]).numpy() for x in (features, slopes))
    alpha = [G[:, k].mean() for k in range(H.shape[1])]
    return np.array([max(0.0, sum(a * h for a, h in zip(alpha, row, strict=True))) for row in H])


@contextmanager
def taken(module: nn.Module) -> Iterator[list[Tensor]]:
    """Keep what a module takes in each call."""
    kept = list[Tensor]()

    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        handle.remove()


@pytest.mark.parametrize(("family", "layer"), [("llava", -1), ("llava", 0), ("gemma3", -1), ("idefics3", 1)])
def test_grad_cam_lays_the_features_of_image_tokens_on_their_patches(family: str, layer: int) -> None:
    subject, probes = FAMILIES[family](), question_probes(1)
    tensors = dict(encode(subject, probes[0]).tensors)
    model = subject.model.model
    blocks = (model.text_model if family == "idefics3" else model.language_model).layers
    places = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    for target in "abcdefgh":  # of some, nothing in the image speaks for the token
        with taken(blocks[layer].self_attn) as kept:
            raw = slow_grad_cam(logit(subject, tensors, target), *kept)
        if raw[places].any():
            break
    method = params("grad_cam", layer=layer)
    maps = by_stream(next(capture(subject, probes, method=method, target=target)).maps)
    image, text = maps["image"], maps["text"]
    C, _ = connector(family, subject, tensors, len(image.weights))
    assert raw[places].sum() > 0
    np.testing.assert_allclose(image.weights * image.share, raw[places] @ C / raw.sum(), atol=1e-5)
    np.testing.assert_allclose(text.weights * text.share, np.delete(raw, places) / raw.sum(), atol=1e-5)


def test_grad_cam_of_windows_puts_each_row_where_it_comes_from() -> None:
    """The first stage has four windows, shifted by two in its second layer."""
    subject, probes = swin(depths=[2], num_heads=[2]), image_probes(1)
    pixels = subject.processor(probes[0].image, return_tensors="pt", input_data_format="channels_last")
    with taken(subject.model.swin.encoder.layers[0].blocks[1].attention) as kept:
        raw = slow_grad_cam(subject.model(**pixels).logits[0, 2], *kept)
    places = np.roll(np.arange(64).reshape(8, 8), (-2, -2), axis=(0, 1))
    placed = np.zeros(64)
    placed[places.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).flatten()] = raw
    (one,) = next(capture(subject, probes, method=Method("grad_cam"), target=2)).maps
    np.testing.assert_allclose(one.weights, placed / placed.sum(), atol=1e-5)


@pytest.mark.parametrize("make", [blip, idefics2])
def test_grad_cam_is_refused_where_no_position_has_the_features_of_a_patch(
    make: Callable[[], Checkpoint],
) -> None:
    with pytest.raises(
        CaptureError, match="has the features of patches and Grad-CAM has no map of them; use"
    ):
        next(capture(make(), question_probes(1), method=Method("grad_cam")))


def test_grad_cam_at_a_layer_that_the_last_stack_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer = 2, but the checkpoint has 2 attention layers"):
        next(capture(llava(), question_probes(1), method=params("grad_cam", layer=2)))


# --- LRP --------------------------------------------------------------------------------------


def slope(act: nn.Module) -> Callable[[Tensor], Tensor]:
    plain = act.forward
    return lambda x: x * torch.where(x == 0, 0.0, plain(x) / x).detach()


def with_constants(model: nn.Module) -> nn.Module:
    """Return LLaVA with weights of attention, spreads of norms, slopes and half of each gate as constants."""
    copied = copy.deepcopy(model).double()
    copied.set_attn_implementation("eager")
    for module in copied.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = lambda x, m=module: (
                (x - x.mean(-1, keepdim=True))
                / (x.var(-1, unbiased=False, keepdim=True) + m.eps).sqrt().detach()
                * m.weight
                + m.bias
            )
        elif type(module).__name__ == "LlamaRMSNorm":
            module.forward = lambda x, m=module: (
                m.weight * x / (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).sqrt().detach()
            )
        elif type(module).__name__ == "LlamaMLP":

            def gated(x: Tensor, m: Any = module) -> Tensor:
                gate, up = m.act_fn(m.gate_proj(x)), m.up_proj(x)
                return m.down_proj((gate.detach() * up + gate * up.detach()) / 2)

            module.forward = gated
        elif type(module).__module__ == "transformers.activations":
            module.forward = slope(module)
    return copied


def test_relevance_equals_input_times_gradient_of_a_model_with_its_factors_held() -> None:
    subject, probes = llava(), question_probes(1)
    subject.model.double()
    item = encode(subject, probes[0])
    held = replace(subject, model=with_constants(subject.model))
    pixels = item.tensors["pixel_values"].double().requires_grad_()
    words = subject.model.get_input_embeddings()(item.tensors["input_ids"]).detach().requires_grad_()
    hook = held.model.get_input_embeddings().register_forward_hook(lambda *_: words.clone())
    with held_softmaxes():
        score = logit(held, {**item.tensors, "pixel_values": pixels})
    hook.remove()
    assert float(score.detach()) == pytest.approx(
        float(logit(subject, {**item.tensors, "pixel_values": pixels.detach()}).detach()), rel=1e-5
    )  # Llama's norms and softmaxes are in float32 whatever the model's precision
    slopes = torch.autograd.grad(score, [pixels, words])
    parts = (pixels * slopes[0])[0].sum(0).reshape(4, 8, 4, 8).sum((1, 3)).flatten().abs().detach()
    spoken = (words * slopes[1])[0].sum(-1).abs().detach()
    places = item.tensors["input_ids"][0] == subject.model.config.image_token_id
    assert not spoken[places].any()
    total = float(parts.sum() + spoken.sum())
    maps = by_stream(next(capture(subject, probes, method=Method("lrp"), target="a")).maps)
    image, text = maps["image"], maps["text"]
    np.testing.assert_allclose((image.weights * image.share)[1:], parts / total, atol=1e-6)
    np.testing.assert_allclose(text.weights * text.share, spoken[~places] / total, atol=1e-6)


@contextmanager
def held_softmaxes() -> Iterator[None]:
    plain = nn.functional.softmax
    nn.functional.softmax = lambda *args, **kwargs: plain(*args, **kwargs).detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.softmax = plain  # type: ignore[assignment]


@pytest.mark.parametrize("family", [*FAMILIES, "idefics2", "swin", "swinv2"])
def test_relevance_is_conserved_from_the_answer_down_to_pixels_and_words(family: str) -> None:
    windows = family.startswith("swin")
    subject = MAKERS[family]()
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "gate" in name and parameter.dim() < 2:  # Llama 3.2's are closed before training
                parameter.fill_(0.7)
    flags = [parameter.requires_grad for parameter in subject.model.parameters()]
    probes = image_probes(1) if windows else question_probes(1)
    (captured,) = capture(subject, probes, method=Method("lrp"))
    assert sum(one.share for one in captured.maps) == pytest.approx(1.0)
    for one in captured.maps:
        assert one.diagnostics["conservation_error"] < 1e-5
        assert one.share > 0.01
        assert one.weights.max() > 1.1 * one.weights.mean()
    assert [parameter.requires_grad for parameter in subject.model.parameters()] == flags
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_relevance_through_a_connector_without_a_rule_is_refused() -> None:
    subject = llava()
    projector = subject.model.model.multi_modal_projector
    projector.register_forward_hook(lambda _module, _args, output: output.abs().add(1).log() + output)
    with pytest.raises(CaptureError, match=r"relevances miss the target logit by .* has a step that LRP has"):
        next(capture(subject, question_probes(1), method=Method("lrp")))


# --- relevance of attention where the tower attends in windows ---------------------------------


def test_gradient_rollout_puts_the_windows_of_a_packed_tower_together() -> None:
    """Two windows of 2×2 tokens in the first and last layer of the tower, all of the image in the second."""
    subject, probes = FAMILIES["qwen2_5_vl"](), question_probes(1)
    tensors = dict(encode(subject, probes[0]).tensors)
    token = subject.processor.tokenizer("a")["input_ids"][0]
    kept = weighted(subject, tensors, lambda logits: logits[0, -1, token])
    assert [layer.shape[1] for layer in kept[:5]] == [16, 16, 32, 16, 16]
    tower = relevance([np.concatenate(kept[:2]), kept[2], np.concatenate(kept[3:5])])
    row = relevance(kept[5:])[-1]
    row[-1] -= 1
    order = np.concatenate([np.arange(4 * u, 4 * u + 4) for u in (0, 1, 4, 5, 2, 3, 6, 7)])
    places = np.flatnonzero(tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    C = np.equal.outer(np.arange(8), order // 4) / 4
    packed_row = np.zeros(32)
    packed_row[order] = row[places] @ C @ tower
    total = packed_row.sum() + np.delete(row, places).sum()
    maps = by_stream(next(capture(subject, probes, method=Method("gradient_rollout"), target="a")).maps)
    expected = packed("qwen2_vl", packed_row) / total
    np.testing.assert_allclose(maps["image"].weights * maps["image"].share, expected, atol=2e-6)
