"""Attributions of LXMERT against loops of removed tokens and boxes, exact games and held factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audit.capture.inputs.encoded import Encoded
from audit.capture.session import capture_prepared
from audit.errors import ConfigError
from audit.records import Captured, Checkpoint, Method
from tests.integration.test_co_attention import ANSWER, REGIONS, inputs, lxmert
from tests.integration.test_image_text_attribution import (
    Vector,
    exact_shapley,
    held_softmaxes,
    slow_grad_cam,
    taken,
    with_constants,
)
from tests.integration.tiny_models import text_probes


def nudged() -> Checkpoint:
    """Return a model whose one-dimensional parameters have values of their own, as after training."""
    subject, draw = lxmert(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return subject


def explained(subject: Checkpoint, item: Encoded, name: str, **given: Any) -> Captured:
    return next(iter(capture_prepared(subject, [item], method=Method(name, params=given), target=ANSWER)))


def joint(found: Captured) -> Vector:
    """Return what both maps say on one scale, tokens before boxes."""
    assert sum(one.share for one in found.maps) == pytest.approx(1.0)
    return np.concatenate([one.weights * one.share for one in found.maps])


def logit(subject: Checkpoint, tensors: dict[str, Tensor]) -> Tensor:
    found: Tensor = subject.model(**tensors).question_answering_score[0, ANSWER]
    return found


def removed(subject: Checkpoint, item: Encoded, gone: Sequence[int]) -> dict[str, Tensor]:
    """Remove players: tokens turn to the mask token, the features of boxes to zero; boxes stay."""
    ids, features = item.tensors["input_ids"].clone(), item.tensors["visual_feats"].clone()
    for player in gone:
        if player < len(item):
            ids[0, player] = subject.processor.mask_token_id
        else:
            features[0, player - len(item)] = 0
    return {**item.tensors, "input_ids": ids, "visual_feats": features}


def content(item: Encoded) -> list[int]:
    tokens = np.flatnonzero(~item.positions.special).tolist()
    return [*tokens, *range(len(item), len(item) + REGIONS)]


def test_occlusion_removes_one_token_or_the_features_of_one_box() -> None:
    subject = nudged()
    item = inputs(subject)[0]
    moved = np.zeros(len(item) + REGIONS)
    with torch.no_grad():
        for player in content(item):
            moved[player] = abs(
                float(logit(subject, removed(subject, item, [player])) - logit(subject, dict(item.tensors)))
            )
    np.testing.assert_allclose(joint(explained(subject, item, "occlusion")), moved / moved.sum(), atol=1e-4)


def test_shapley_values_of_tokens_and_boxes_tend_to_those_of_all_sets() -> None:
    subject = nudged()
    item = inputs(subject)[0]
    regions = {name: item.tensors[name][:, :3] for name in ("visual_feats", "visual_pos")}
    second = replace(item.second, special=item.second.special[:3], boxes=item.second.boxes[:3])
    item = replace(item, tensors={**item.tensors, **regions}, second=second)
    players = content(item)[: -REGIONS + 3]
    known: dict[frozenset[int], float] = {}

    def value(kept: frozenset[int]) -> float:
        if kept not in known:
            gone = [p for i, p in enumerate(players) if i not in kept]
            with torch.no_grad():
                known[kept] = float(logit(subject, removed(subject, item, gone)))
        return known[kept]

    exact = exact_shapley(len(players), value)
    found = explained(subject, item, "shap", samples=60)
    expected = np.zeros(len(item) + 3)
    expected[players] = np.abs(exact) / np.abs(exact).sum()
    np.testing.assert_allclose(joint(found), expected, atol=0.05)
    assert found.maps[1].diagnostics["completeness_error"] < 1e-4


def test_lime_weighs_tokens_and_boxes_and_leaves_special_tokens() -> None:
    subject = nudged()
    item = inputs(subject)[0]
    found, again = (joint(explained(subject, item, "lime", samples=40, seed=s)) for s in (1, 1))
    other = joint(explained(subject, item, "lime", samples=40, seed=2))
    np.testing.assert_array_equal(found, again)
    assert np.abs(found - other).max() > 1e-3
    assert found[: len(item)][item.positions.special].sum() == 0
    assert found[len(item) :].min() > 0


def test_input_times_gradient_equals_finite_differences_of_features() -> None:
    subject = nudged()
    subject.model.double()
    item = inputs(subject)[0]
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in item.tensors.items()}
    features, step = tensors["visual_feats"], 1e-5
    slopes = []
    with torch.no_grad():
        for region in range(REGIONS):  # along the features themselves: d f(x + t·x_r) / dt
            along = torch.zeros_like(features)
            along[0, region] = features[0, region]
            up, down = (
                logit(subject, {**tensors, "visual_feats": features + sign * step * along})
                for sign in (1, -1)
            )
            slopes.append(abs(float(up - down)) / (2 * step))
    image = explained(subject, item, "input_x_gradient").maps[1]
    np.testing.assert_allclose(image.weights, np.array(slopes) / sum(slopes), atol=1e-5)


def test_integrated_gradients_are_complete_down_to_features_of_zero() -> None:
    subject = nudged()
    item = inputs(subject)[0]
    found = explained(subject, item, "integrated_gradients", steps=64)
    assert found.maps[0].diagnostics["completeness_error"] < 0.05
    assert found.maps[0].weights[item.positions.special].sum() == 0
    assert found.maps[1].share > 0.05


def test_relevance_equals_input_times_gradient_of_a_model_with_its_factors_held() -> None:
    """Relevances of tokens, boxes and all constants, the places of the boxes among them, give the logit."""
    subject = nudged()
    item = inputs(subject)[0]
    model: Any = with_constants(subject.model)
    model.answer_head.logit_fc[1].forward = slope_of(model.answer_head.logit_fc[1].forward)
    model.lxmert.pooler.activation.forward = slope_of(model.lxmert.pooler.activation.forward)
    table = model.lxmert.embeddings.word_embeddings
    words = table(item.tensors["input_ids"]).detach().requires_grad_()
    table.register_forward_hook(lambda *_: words.clone())
    features = item.tensors["visual_feats"].double().requires_grad_()
    places = item.tensors["visual_pos"].double().requires_grad_()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else its row has no gradient, though it is added
    added = [p for n, p in model.named_parameters() if n.endswith("bias") or "_embeddings" in n]
    with held_softmaxes():
        score = model(
            item.tensors["input_ids"], visual_feats=features, visual_pos=places
        ).question_answering_score[0, ANSWER]
    given = [words, features, places, *added]
    slopes = torch.autograd.grad(score, given, allow_unused=True)
    parts = [x * g for x, g in zip(given, slopes, strict=True) if g is not None]
    assert float(sum(part.sum() for part in parts).detach()) == pytest.approx(float(score.detach()), rel=1e-6)
    sizes = np.concatenate([part[0].sum(-1).detach().abs().numpy() for part in parts[:2]])
    found = explained(subject, item, "lrp")
    np.testing.assert_allclose(joint(found), sizes / sizes.sum(), atol=1e-5)
    assert found.maps[0].diagnostics["conservation_error"] < 1e-5


def slope_of(function: Any) -> Any:
    return lambda x: x * (function(x) / x).detach()


@pytest.mark.parametrize("layer", [0, -1])
def test_grad_cam_reads_what_both_streams_bring_to_a_crossing_layer(layer: int) -> None:
    subject = nudged()
    item = inputs(subject)[0]
    with taken(subject.model.lxmert.encoder.x_layers[layer].visual_attention.att) as kept:
        score = logit(subject, dict(item.tensors))
    for one, features in zip(explained(subject, item, "grad_cam", layer=layer).maps, kept, strict=True):
        expected = slow_grad_cam(score, features)
        assert one.share == pytest.approx(1.0)
        if expected.sum() > 0:
            np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=1e-5)
        else:
            assert one.diagnostics["undefined"] == 1.0


def test_grad_cam_at_a_layer_that_does_not_cross_is_refused() -> None:
    subject = nudged()
    with pytest.raises(ConfigError, match="layer = 2, but the checkpoint has 2 attention layers"):
        explained(subject, inputs(subject)[0], "grad_cam", layer=2)


def test_a_batch_explains_each_probe_as_alone() -> None:
    subject = nudged()
    items = inputs(subject)
    twin = replace(items[0], probe=replace(text_probes()[0], id="twin"))
    both = list(capture_prepared(subject, [items[0], twin], method=Method("lrp"), target=ANSWER))
    for found in both:
        np.testing.assert_allclose(joint(found), joint(explained(subject, items[0], "lrp")), atol=1e-6)
