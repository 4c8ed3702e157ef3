"""Blocks that attend to an image (BLIP, Llama 3.2), by every attention written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.errors import CaptureError, ConfigError
from audit.records import CaptureSettings, Checkpoint, Map, Method
from tests import reference
from tests.integration.test_capture_image_text import attentions, rolled
from tests.integration.test_image_text_methods import kept_softmaxes, relevance, weighted
from tests.integration.tiny_image_text import blip, mllama, question_probes, vilt

Matrix = NDArray[np.float64]
Step = tuple[str, Matrix]
TILE = np.concatenate([24 * tile + np.arange(17) for tile in range(4)])
"""The keys of Llama's cross-attention among the positions of its tower, whose tiles are padded to 24."""


def gated() -> Checkpoint:
    """Llama 3.2 with an open gate: a new one is closed, as before its training."""
    torch.manual_seed(0)  # weights by which the gated block matters to the logit
    subject = mllama()
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if name.endswith(("attn_gate", "mlp_gate")):
                parameter.fill_(0.7)
    return subject


def inputs(subject: Checkpoint) -> dict[str, Tensor]:
    return dict(ImageTextEncoder(subject, CaptureSettings()).encode(question_probes(1)[0]).tensors)


def order(make: Callable[[], Checkpoint]) -> tuple[str, ...]:
    """Return the kinds of attention of the decoder, in the order in which they run."""
    return ("self", "cross", "self", "cross") if make is blip else ("self", "cross", "self")


def decoder(make: Callable[[], Checkpoint], layers: list[Any]) -> list[tuple[str, Any]]:
    kinds = order(make)
    return list(zip(kinds, layers[-len(kinds) :], strict=True))


def keys_of(make: Callable[[], Checkpoint], layers: list[Tensor]) -> Matrix:
    """Return how each key draws on the positions of the tower; Llama's reads two of its depths."""
    if make is blip:
        return rolled(layers[:3])
    return (0.5 * rolled(layers[:4]) + 0.5 * rolled(layers[:2]))[TILE]


def composed(steps: list[Step], keys: Matrix) -> tuple[Matrix, Matrix]:
    """Return the last row of a decoder over the image and over its own positions."""
    n = len(steps[0][1])
    source, prefix = np.zeros((n, keys.shape[1])), np.eye(n)
    for kind, A in steps:
        if kind == "self":
            source, prefix = 0.5 * A @ source + 0.5 * source, 0.5 * A @ prefix + 0.5 * prefix
        else:
            source, prefix = 0.5 * source + 0.5 * A @ keys, 0.5 * prefix
    return source[-1], prefix[-1]


def check(maps: tuple[Map, ...], image: Matrix, text: Matrix, *, atol: float = 1e-6) -> None:
    """Compare with rows whose sums are the shares; Llama's patches are put in another order."""
    seen = maps[0].weights * maps[0].share
    pair = (np.sort(seen), np.sort(image)) if len(image) == 96 else (seen, image)
    np.testing.assert_allclose(*pair, atol=atol)
    np.testing.assert_allclose(maps[1].weights * maps[1].share, text, atol=atol)


def mean_heads(layers: list[tuple[str, Tensor]]) -> list[Step]:
    return [(kind, layer[0].mean(0).numpy()) for kind, layer in layers]


@pytest.mark.parametrize("make", [blip, gated])
def test_blocks_below_the_first_that_takes_part_are_the_identity(make: Callable[[], Checkpoint]) -> None:
    subject = make()
    kept = attentions(subject, inputs(subject))
    cut = 2 if make is blip else 1  # BLIP's first block has two attentions, Llama's has one
    expected = composed(mean_heads(decoder(make, kept)[cut:]), keys_of(make, kept))
    method = Method("rollout", params={"start_layer": 1})
    (captured,) = capture(subject, question_probes(1), method=method)
    check(captured.maps, *expected)
    rows = captured.maps[1].layers
    assert rows is not None
    np.testing.assert_array_equal(rows[0], np.eye(len(rows[0]))[-1])
    assert len(rows) == (2 if make is blip else 3)
    assert captured.maps[1].positions.causal


@pytest.mark.parametrize(("make", "layer"), [(blip, 0), (blip, -1), (gated, -1)])
def test_raw_attention_is_a_block_that_attends_to_the_image(
    make: Callable[[], Checkpoint], layer: int
) -> None:
    """Each kind of attention is a map of its own; Llama's block takes the self-attention below it."""
    subject = make()
    layers = mean_heads(decoder(make, attentions(subject, inputs(subject))))
    own, cross = layers[layer % 2 * 2 : layer % 2 * 2 + 2] if make is blip else layers[:2]
    image = cross[1][-1]
    if make is gated:
        image = np.concatenate([image, np.zeros(96 - 68)])
    method = Method("raw_attention", params={"layer": layer})
    (captured,) = capture(subject, question_probes(1), method=method)
    check(captured.maps, image, own[1][-1])
    assert [one.share for one in captured.maps] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("make", "layer", "head"), [(blip, 0, 1), (blip, -1, 3), (blip, -1, None), (gated, 0, 2)]
)
def test_a_head_reads_the_image_over_the_merged_layers_below(
    make: Callable[[], Checkpoint], layer: int, head: int | None
) -> None:
    subject = make()
    kept = attentions(subject, inputs(subject))
    layers, steps = decoder(make, kept), mean_heads(decoder(make, kept))
    last = layer % 2 * 2 + 1 if make is blip else 1
    chosen = layers[last][1][0].mean(0) if head is None else layers[last][1][0, head]
    expected = composed([*steps[:last], ("cross", chosen.numpy())], keys_of(make, kept))
    params = {"layer": layer} | ({} if head is None else {"head": head})
    method = Method("per_head_rollout", params=params)
    (captured,) = capture(subject, question_probes(1), method=method)
    check(captured.maps, *expected)
    assert captured.maps[0].diagnostics["head_disagreement"] > 0


# --- relevance --------------------------------------------------------------------------------


def crossed_relevance(steps: list[Step], normalized_keys: Matrix) -> tuple[Matrix, Matrix]:
    """Return R_tq and R_tt − I by the rules as they stand, slowly."""
    n = len(steps[0][1])
    state = np.eye(n), np.zeros((n, len(normalized_keys))), None, None
    for kind, A in steps:
        own, cross = state[:2]
        if kind == "self":
            state = own + reference.matmul(A, own), cross + reference.matmul(A, cross), None, None
        else:
            bar = reference.normalized_self(own)
            state = own, cross + reference.matmul(bar.T, A), None, None
    return state[1] @ normalized_keys, state[0] - np.eye(n)


def normalized(whole: Matrix, own: Matrix) -> Matrix:
    rest = whole - own
    return rest / rest.sum(axis=1, keepdims=True) + own


@pytest.mark.parametrize("make", [blip, gated])
def test_relevance_goes_by_the_rules_of_an_encoder_decoder(make: Callable[[], Checkpoint]) -> None:
    subject = make()
    tensors = inputs(subject)
    target = int(subject.processor.tokenizer("a", add_special_tokens=False)["input_ids"][0])
    layers = weighted(subject, tensors, lambda logits: logits[0, -1, target])
    if make is blip:
        keys = reference.normalized_self(relevance(layers[:3]))
    else:
        whole = 0.5 * relevance(layers[:4]) + 0.5 * relevance(layers[:2])
        keys = normalized(whole[TILE], np.eye(96)[TILE])
    cross, own = crossed_relevance([(k, A[0]) for k, A in decoder(make, layers)], keys)
    image, text = cross[-1], own[-1]
    (captured,) = capture(
        subject, question_probes(1), method=Method("gradient_rollout", row="last"), target="a"
    )
    check(captured.maps, image / image.sum(), text / text.sum(), atol=2e-6)
    said = captured.maps[0].diagnostics
    assert said["relevance_image"] == pytest.approx(image.sum(), rel=1e-4)
    assert said["relevance_text"] == pytest.approx(text.sum(), rel=1e-4)
    assert [one.share for one in captured.maps] == pytest.approx([1.0, 1.0])
    assert captured.maps[1].positions.causal
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_one_image_and_one_text_give_what_the_slow_rules_for_two_streams_give() -> None:
    """The image never attends to the text: R̄ of the keys is the same in every layer."""
    subject = blip()
    tensors = inputs(subject)
    layers = weighted(subject, tensors, lambda logits: logits[0, -1, 5])
    n, m = layers[-1].shape[1:]
    state = np.eye(n), np.zeros((n, m)), np.zeros((m, n)), np.eye(m)
    for layer in layers[:3]:
        state = reference.self_attention(state, "second", layer[0])
    for kind, layer in decoder(blip, layers):
        if kind == "self":
            state = reference.self_attention(state, "first", layer[0])
        else:
            state = reference.co_attention(state, layer[0], np.zeros((m, n)))
    image, text = state[1][-1], state[0][-1] - np.eye(n)[-1]
    target = subject.processor.tokenizer.convert_ids_to_tokens(5)
    (captured,) = capture(subject, question_probes(1), method=Method("gradient_rollout"), target=target)
    check(captured.maps, image / image.sum(), text / text.sum(), atol=2e-6)


def nudged(subject: Checkpoint, tensors: dict[str, Tensor], at: int, change: Tensor) -> float:
    """Return a logit when `change` is added to one of the model's attentions."""
    plain, calls = nn.functional.softmax, [0]

    def softmax(*args: Any, **kwargs: Any) -> Tensor:
        found = plain(*args, **kwargs)
        if found.dim() == 4:
            found = found + change if calls[0] == at else found
            calls[0] += 1
        return found

    nn.functional.softmax = softmax  # type: ignore[assignment]
    try:
        with torch.no_grad():
            return float(subject.model(**tensors).logits[0, -1, 5])
    finally:
        nn.functional.softmax = plain  # type: ignore[assignment]


def test_gradients_behind_an_open_gate_are_finite_differences() -> None:
    """The gate is a factor of the gradient; in float32, which Llama's norms and softmaxes keep to."""
    subject = gated()
    subject.model.set_attn_implementation("eager")
    tensors, step = inputs(subject), 3e-3
    with kept_softmaxes() as kept:
        score = subject.model(**tensors).logits[0, -1, 5]
    slopes = torch.autograd.grad(score, kept)
    draw, found = torch.Generator().manual_seed(0), list[tuple[float, float]]()
    for at, (weights, slope) in enumerate(zip(kept, slopes, strict=True)):
        change = torch.randn(weights.shape, generator=draw) * (weights > 0)
        there, back = (nudged(subject, tensors, at, sign * step * change) for sign in (1, -1))
        found.append(((there - back) / (2 * step), float((slope * change).sum())))
    by_differences, by_gradient = np.array(found).T
    np.testing.assert_allclose(by_differences, by_gradient, rtol=1e-2, atol=2e-3)
    assert abs(by_gradient[order(gated).index("cross") - 3]) > 0.01


def test_a_closed_gate_lets_no_relevance_through_but_leaves_attention() -> None:
    """tanh(0) = 0: the weights are what they are, and nothing of them reaches the logit."""
    (captured,) = capture(mllama(), question_probes(1), method=Method("gradient_rollout"), target="a")
    image, text = captured.maps
    assert image.share == 0
    assert not image.weights.any()
    assert image.diagnostics["relevance_image"] == 0
    assert text.weights.sum() == pytest.approx(1.0)
    (plain,) = capture(mllama(), question_probes(1))
    assert plain.maps[0].share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("rollout", {"start_layer": 2}, "start_layer = 2, but the decoder has 2 blocks"),
        ("raw_attention", {"layer": 2}, "layer = 2, but 2 layers of the decoder attend to the source"),
        ("per_head_rollout", {"head": 4}, "head = 4, but the layer has 4 heads"),
        ("gradient_rollout", {"form": "product"}, "form is not available for blocks that attend to an image"),
        ("per_head_rollout", {"same_head": True}, "same_head is not available"),
    ],
)
def test_what_a_decoder_does_not_have_is_refused(method: str, params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        next(capture(blip(), question_probes(1), method=Method(method, params=params)))


# --- flow -------------------------------------------------------------------------------------


def test_the_flow_of_a_captioner_runs_through_decoder_and_tower() -> None:
    """One graph over patches and tokens; the decoder's row is its source."""
    subject = blip()
    kept = attentions(subject, inputs(subject))
    m, n = kept[0].shape[-1], kept[-1].shape[-2]
    steps = []
    for kind, layer in zip(("tower",) * 3 + order(blip), kept, strict=True):
        A, step = layer[0].mean(0).double().numpy(), np.eye(m + n)
        if kind == "tower":
            step[:m, :m] = 0.5 * A + 0.5 * np.eye(m)
        elif kind == "self":
            step[m:, m:] = 0.5 * A + 0.5 * np.eye(n)
        else:
            step[m:] *= 0.5
            step[m:, :m] = 0.5 * A
        steps.append(step[None, None])
    flow = np.array([reference.flow(np.stack(steps), m + n - 1, key, 0.0) for key in range(m + n)])
    (captured,) = capture(subject, question_probes(1), method=Method("attention_flow"))
    check(captured.maps, flow[:m] / flow.sum(), flow[m:] / flow.sum())
    assert 0 < captured.maps[0].diagnostics["saturated"] <= 1


def test_a_flow_has_no_capacity_where_layers_are_merged_by_a_convention() -> None:
    with pytest.raises(ConfigError, match="keys that are made of several patches or layers"):
        next(capture(gated(), question_probes(1), method=Method("attention_flow")))


def test_the_flow_of_one_encoder_is_that_of_its_matrices() -> None:
    subject = vilt()
    torch.manual_seed(0)  # ViLT draws the order of its patches
    kept = [layer.double().numpy() for layer in attentions(subject, inputs(subject))]
    flow = np.array([reference.flow(np.stack(kept), 0, key, 0.5) for key in range(kept[0].shape[-1])])
    image, text = next(capture(subject, question_probes(1), method=Method("attention_flow"))).maps
    words = len(text.weights)
    np.testing.assert_allclose(text.weights * text.share, flow[:words] / flow.sum(), atol=1e-6)
    seen = np.sort(image.weights * image.share)
    np.testing.assert_allclose(seen, np.sort(flow[words:]) / flow.sum(), atol=1e-6)


def test_a_decoder_behind_the_encoder_that_sees_the_image_is_refused() -> None:
    """BLIP for questions gives no logits of its answer."""
    captioner = blip()
    model = transformers.BlipForQuestionAnswering._from_config(
        captioner.model.config, attn_implementation="eager"
    )
    with pytest.raises(
        CaptureError, match=r"BlipForQuestionAnswering answers by a decoder .* audit its captioner"
    ):
        next(capture(replace(captioner, model=model.eval()), question_probes(1)))
