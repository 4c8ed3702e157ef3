"""Attributions of images with text against exact games, slow loops, finite differences and conserved sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from math import factorial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture import capture
from audit.capture.image_text import ImageTextEncoder
from audit.capture.inputs import Encoded
from audit.records import CaptureSettings, Checkpoint, Map, Method, Probe
from tests.integration.tiny_image_text import FAMILIES, llava, question_probes

Vector = NDArray[np.float64]
Value = Callable[[frozenset[int]], float]


def encode(subject: Checkpoint, probe: Probe) -> Encoded:
    return ImageTextEncoder(subject, CaptureSettings()).encode(probe)


def logit(subject: Checkpoint, tensors: dict[str, Tensor]) -> Tensor:
    """Return the logit of the token "a" at the last position, in float64."""
    token = subject.processor.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    found: Tensor = subject.model(**tensors).logits[0, -1, token].double()
    return found


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
    torch.manual_seed(0)
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
    drawn = np.zeros(count)
    for _ in range(40):  # the orders that Captum draws, tokens before patches
        order = [(int(i) + 4) % count for i in torch.randperm(count)]
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            drawn[player] += (value(before | {player}) - value(before)) / 40
    method = Method("shap", params={"samples": 40})
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
    method = Method("lime", params={"samples": 60, "seed": 3})
    (captured,) = capture(subject, [probe], method=method, target="a")
    np.testing.assert_allclose(content(captured.maps), slopes / slopes.sum(), atol=1e-4)


def packed_grey(pixels: Tensor, patch: int) -> Tensor:
    """Turn a patch of Qwen's packed row to the mean colour: colours, two frames, 8×8 side by side."""
    changed = pixels.clone().view(len(pixels), 3, 2 * 64)
    changed[patch] = pixels.view(len(pixels), 3, -1).mean(dim=(0, 2))[:, None]
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
