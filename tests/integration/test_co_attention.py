"""LXMERT: two streams that attend to each other, against attentions kept where softmax makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.region_inputs import encode_features
from audit.capture.pairs.methods import methods_of
from audit.capture.session import capture_prepared
from audit.errors import CaptureError, CheckpointError, ConfigError, ProbeError
from audit.methods import two_stream_relevance
from audit.methods.two_stream import CoAttention, SelfAttention
from audit.records import Checkpoint, Method
from tests.integration.tiny_models import build, checkpoint, text_probes, word_tokenizer

REGIONS, ANSWER = 6, 3
SIZES: dict[str, Any] = {
    "l_layers": 2,
    "x_layers": 2,
    "r_layers": 1,
    "visual_feat_dim": 16,
    "num_qa_labels": 5,
}


def lxmert(architecture: str = "LxmertForQuestionAnswering") -> Checkpoint:
    tokenizer = word_tokenizer()
    return checkpoint(build(architecture, vocab_size=len(tokenizer), **SIZES), tokenizer)


def inputs(subject: Checkpoint) -> list[Encoded]:
    draw, found = np.random.default_rng(3), []
    for probe in text_probes()[:2]:
        corners = np.sort(draw.random((2, 2, REGIONS)), axis=0)  # left and top before right and bottom
        boxes = corners.reshape(4, REGIONS).T
        features = {"features": draw.standard_normal((REGIONS, 16)), "boxes": boxes}
        found.append(encode_features(subject, replace(probe, features=features)))
    return found


@pytest.mark.parametrize(
    ("features", "boxes", "why"),
    [((3, 16), (2, 4), "expected"), ((0, 16), (0, 4), "expected"), ((3, 16), (3, 4), "fractions")],
)
def test_regions_and_boxes_that_do_not_belong_together_are_refused(
    features: Any, boxes: Any, why: str
) -> None:
    given = {"features": np.ones(features), "boxes": np.full(boxes, 1.5)}
    probe = replace(text_probes()[0], features=given)
    with pytest.raises(ProbeError, match=f"t-0: .*{why}"):
        encode_features(lxmert(), probe)


def kept(subject: Checkpoint, item: Encoded) -> list[Tensor]:
    """Every layer's attention in the order of the forward pass, with the gradient of one answer's logit."""
    layers: list[Tensor] = []
    softmax = nn.functional.softmax

    def keeping(scores: Tensor, *args: Any, **options: Any) -> Tensor:
        weights = softmax(scores, *args, **options)
        if weights.requires_grad:
            weights.retain_grad()
        layers.append(weights)
        return weights

    nn.functional.softmax = keeping  # type: ignore[assignment]
    try:
        out = subject.model(**item.tensors)
    finally:
        nn.functional.softmax = softmax
    out.question_answering_score[0, ANSWER].backward()
    subject.model.zero_grad()
    return layers


def steps(layers: list[Tensor]) -> list[Any]:
    def pair(layer: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.zeros_like(layer) if layer.grad is None else layer.grad
        return layer.detach().double(), slope.double()

    found: list[Any] = [SelfAttention("first", *pair(layer)) for layer in layers[:2]]
    found.append(SelfAttention("second", *pair(layers[2])))
    for start in (3, 7):
        there, back, text, image = layers[start : start + 4]
        found.append(CoAttention(*pair(there), *pair(back)))
        found += [SelfAttention("first", *pair(text)), SelfAttention("second", *pair(image))]
    return found


def test_relevance_equals_the_one_of_kept_gradients() -> None:
    subject = lxmert()
    items = inputs(subject)
    method = Method("gradient_rollout")
    for item, found in zip(
        items, capture_prepared(subject, items, method=method, target=ANSWER), strict=True
    ):
        expected = two_stream_relevance(steps(kept(subject, item)))
        text = expected.first_first[0, 0] - torch.eye(len(item))[0]
        image = expected.first_second[0, 0]
        for one, row in zip(found.maps, (text, image), strict=True):
            np.testing.assert_allclose(one.weights, row / row.sum(), atol=2e-5)
        assert [one.stream for one in found.maps] == ["text", "image"]
        assert found.prediction.target == str(ANSWER)


def joint_step(n: int, *, text: Any = None, image: Any = None, there: Any = None, back: Any = None) -> Any:
    """Return one layer over the positions of both streams, the text first, half of it the identity."""
    step = np.eye(n + REGIONS)
    if text is not None:
        step[:n, :n] = 0.5 * text + 0.5 * np.eye(n)
    if image is not None:
        step[n:, n:] = 0.5 * image + 0.5 * np.eye(REGIONS)
    if there is not None:
        step *= 0.5
        step[:n, n:], step[n:, :n] = 0.5 * there, 0.5 * back
    return step


def test_rollout_carries_both_streams_through_every_layer() -> None:
    subject = lxmert()
    items = inputs(subject)
    for item, found in zip(items, capture_prepared(subject, items), strict=True):
        layers = [layer[0].detach().double().mean(0).numpy() for layer in kept(subject, item)]
        n = len(item)
        R = joint_step(n, image=layers[2]) @ joint_step(n, text=layers[1]) @ joint_step(n, text=layers[0])
        for start in (3, 7):
            there, back, text_layer, image_layer = layers[start : start + 4]
            R = joint_step(n, text=text_layer, image=image_layer) @ joint_step(n, there=there, back=back) @ R
        text, image = found.maps
        np.testing.assert_allclose(text.weights, R[0, :n] / R[0, :n].sum(), atol=1e-6)
        np.testing.assert_allclose(image.weights, R[0, n:] / R[0, n:].sum(), atol=1e-6)
        assert text.share + image.share == pytest.approx(1, abs=1e-5)
        assert image.positions.boxes is not None


@pytest.mark.parametrize("name", methods_of("co-attention"))
def test_every_method_gives_two_maps_that_do_not_depend_on_the_batch(name: str) -> None:
    subject = lxmert()
    items = inputs(subject)
    method = Method(name, params={"samples": 8} if name in ("shap", "lime") else {})
    for item, found in zip(items, capture_prepared(subject, items, method=method), strict=True):
        (alone,) = capture_prepared(subject, [item], method=method)
        for one, other in zip(found.maps, alone.maps, strict=True):
            undefined = name == "grad_cam" and one.diagnostics.get("undefined")
            assert one.weights.sum() == pytest.approx(0 if undefined else 1, abs=1e-5)
            np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)


def test_what_has_no_meaning_for_two_streams_is_refused() -> None:
    subject = lxmert()
    with pytest.raises(ConfigError, match="'value_zeroing' is not available for two streams"):
        list(capture_prepared(subject, inputs(subject), method=Method("value_zeroing")))


def test_gradients_need_the_head_that_answers() -> None:
    subject = lxmert("LxmertModel")
    with pytest.raises(CheckpointError, match="no task head"):
        list(capture_prepared(subject, inputs(subject), method=Method("gradient_rollout")))


def test_a_direction_that_sees_the_other_ones_result_is_refused() -> None:
    subject = lxmert()
    layer = subject.model.lxmert.encoder.x_layers[0]
    attend = layer.visual_attention

    def one_after_the_other(**given: Any) -> Any:
        text, image, asked = given["lang_input"], given["visual_input"], given["output_x_attentions"]
        there = attend(text, image, given["visual_attention_mask"], output_attentions=asked)
        return there, attend(image, there[0], given["lang_attention_mask"])

    layer.cross_att = one_after_the_other
    with pytest.raises(CaptureError, match="sees the other's result"):
        list(capture_prepared(subject, inputs(subject)))


def test_positions_that_mix_beside_attention_are_refused() -> None:
    subject = lxmert()
    layer = subject.model.lxmert.encoder.x_layers[1]
    own = layer.visn_output.forward
    layer.visn_output.forward = lambda states, given: own(
        states, given + 0.1 * given.mean(dim=1, keepdim=True)
    )
    with pytest.raises(CaptureError, match="positions mix outside the captured attention"):
        list(capture_prepared(subject, inputs(subject)))


def test_outputs_stay_the_same_to_the_last_bit_and_the_model_as_it_was() -> None:
    subject = lxmert()
    items = inputs(subject)
    with torch.no_grad():
        before = [subject.model(**item.tensors).question_answering_score for item in items]
    list(capture_prepared(subject, items, method=Method("gradient_rollout")))
    with torch.no_grad():
        after = [subject.model(**item.tensors).question_answering_score for item in items]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())
