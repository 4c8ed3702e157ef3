"""SHAP, LIME, Grad-CAM and LRP against games, sums and slow references that are known exactly."""

from __future__ import annotations

from itertools import permutations
from math import factorial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.attributions.attribution import _integrated_gradients
from audit.capture.attributions.occlusion import occluded
from audit.capture.attributions.question import Question
from audit.capture.attributions.relevance import conserving, relevance
from audit.capture.attributions.sampling import lime, shapley
from audit.errors import CaptureError, CheckpointError, ConfigError
from audit.records import Method
from tests.integration.test_capture_families import family_checkpoint, family_probes
from tests.integration.test_methods_gradient import FAMILIES, encode
from tests.integration.tiny_models import build, checkpoint, text_checkpoint, text_probes, word_tokenizer
from tests.toy_models import Toy, toy_question

MASK = 4
IDS = [2, 7, 9, 11, 13, 3]
INNER = slice(1, 5)


def additive(embedded: Tensor) -> Tensor:
    return embedded.sum(dim=(1, 2))


def interacting(embedded: Tensor) -> Tensor:
    one = embedded[..., 0]
    return one[:, 1] * one[:, 2] + 3 * one[:, 3] - one[:, 1] * one[:, 3] * one[:, 4]


def toy(logit=additive) -> Question:
    return toy_question(Toy(logit), IDS, special=(0, 5))


def worth(question: Question) -> NDArray[np.float64]:
    """By how much each token's embedding differs from the mask token's."""
    table = question.checkpoint.model.table.weight[:, 0].detach().numpy()
    return table[IDS] - table[MASK]


def brute_shapley(question: Question) -> NDArray[np.float64]:
    """The mean over every order of the players, from the definition."""
    (item,) = question.batch
    players = [1, 2, 3, 4]

    def value(kept: frozenset[int]) -> float:
        mask = np.array([float(i in players and i not in kept) for i in range(len(item))])
        return float(question.scores([occluded(item, mask, MASK)])[0].detach())

    found = np.zeros(len(item))
    for order in permutations(players):
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            found[player] += value(before | {player}) - value(before)
    return found / factorial(len(players))


# --- SHAP and LIME ----------------------------------------------------------------------------


def test_shapley_values_of_an_additive_game_are_its_parts_after_one_order() -> None:
    question = toy()
    found, error = shapley(question, 2, 0)
    expected = np.abs(worth(question))
    np.testing.assert_allclose(found[INNER], expected[INNER], rtol=1e-6)
    assert found[[0, 5]].tolist() == [0, 0]
    assert error < 1e-6


def test_sampled_shapley_values_tend_to_the_mean_over_all_orders() -> None:
    question = toy(interacting)
    expected = np.abs(brute_shapley(question))
    few, _ = shapley(question, 4, 0)
    many, error = shapley(question, 400, 0)
    np.testing.assert_allclose(many, expected, atol=0.1 * expected.max())
    assert np.abs(few.numpy() - expected).max() > 2 * np.abs(many.numpy() - expected).max()
    assert error < 1e-5  # Captum adds in float32


def test_shapley_values_that_miss_their_sum_are_refused() -> None:
    question = toy()
    calls = iter(range(10**6))
    question.checkpoint.model.logit = lambda embedded: embedded.sum(dim=(1, 2)) + 0.1 * next(calls)
    with pytest.raises(CaptureError, match="Shapley values miss their sum"):
        shapley(question, 2, 0)


def test_shapley_values_may_miss_a_small_difference_by_the_rounding_of_a_large_logit() -> None:
    # One float32 step of 2.357 is 1e-3 of a difference of 2.4e-4, as between logits of a real checkpoint.
    steps = iter(range(10**6))

    def rounded(size: float) -> Question:
        question = toy(lambda x: 2.357 + size * x.sum(dim=(1, 2)) + 2.4e-7 * (next(steps) % 2))
        question.checkpoint.model.to(torch.float32)
        return question

    found, error = shapley(rounded(1e-4), 3, 0)
    np.testing.assert_allclose(found[INNER], 1e-4 * np.abs(worth(toy()))[INNER], atol=2.3e-6)
    assert 1e-4 < error < 0.05
    with pytest.raises(CaptureError, match=r"\(logit 2\.357.*load the checkpoint in float64, or remove"):
        shapley(rounded(5e-7), 3, 0)
    nothing, error = shapley(rounded(1e-7), 3, 0)
    assert not nothing.any()
    assert error == 0


def test_lime_of_a_linear_game_orders_and_weighs_the_positions_as_they_are() -> None:
    question = toy()
    found = lime(question, 2000, 0).numpy()
    expected = np.abs(worth(question))
    assert found[[0, 5]].tolist() == [0, 0]
    np.testing.assert_allclose(found[INNER], expected[INNER], atol=0.03 * expected.max())  # the ridge pulls


@pytest.mark.parametrize("name", ["shap", "lime"])
def test_the_seed_and_the_number_of_samples_decide_what_is_drawn(name: str) -> None:
    subject, probes = text_checkpoint("bert", attention="sdpa"), text_probes()[:2]

    def weights(**params: int) -> NDArray[np.float64]:
        found = list(capture(subject, probes, method=Method(name, params=params), target=1))
        return np.concatenate([one.maps[0].weights for one in found])

    state = torch.random.get_rng_state()
    first = weights(samples=4)
    np.testing.assert_array_equal(first, weights(samples=4, seed=0))
    assert np.abs(first - weights(samples=4, seed=1)).max() > 1e-3
    assert np.abs(first - weights(samples=9)).max() > 1e-3
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("method", [shapley, lime])
def test_a_probe_without_content_has_no_players(method) -> None:
    found = method(toy_question(Toy(additive), [2, 3], special=(0, 1)), 2, 0)
    sizes = found[0] if isinstance(found, tuple) else found
    assert sizes.tolist() == [0, 0]


def test_integrated_gradients_of_a_sum_are_its_parts_and_complete() -> None:
    question = toy()
    found, error = _integrated_gradients(question, 4)
    np.testing.assert_allclose(found[INNER], np.abs(worth(question))[INNER], rtol=1e-9)
    assert error < 1e-9


# --- Grad-CAM ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_grad_cam_equals_the_formula_on_the_hidden_states(family: str, layer: int) -> None:
    subject, probe = text_checkpoint(family), text_probes()[0]
    outputs = subject.model(**encode(subject, probe).tensors, output_hidden_states=True)
    hidden = outputs.hidden_states[:-1][layer]
    (gradient,) = torch.autograd.grad(outputs.logits[0, 2], hidden)
    raw = (gradient[0].mean(dim=0) * hidden[0]).sum(dim=-1).detach().clamp_min(0)
    method = Method("grad_cam", params={"layer": layer})
    (found,) = capture(subject, [probe], method=method, target=2)
    assert raw.sum() > 0
    np.testing.assert_allclose(found.maps[0].weights, raw / raw.sum(), atol=1e-5)


def test_grad_cam_at_a_layer_that_is_not_there_is_refused() -> None:
    subject = text_checkpoint("bert")
    with pytest.raises(ConfigError, match="layer = 3, but the checkpoint has 3 attention layers"):
        list(capture(subject, text_probes()[:1], method=Method("grad_cam", params={"layer": 3})))


# --- LRP --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_relevance_is_conserved_in_every_family(family: str, attention: str) -> None:
    subject, probes = family_checkpoint(family, attention), family_probes(family)[:2]
    for frozen in (False, True):
        subject.model.requires_grad_(not frozen)
        for found in capture(subject, probes, method=Method("lrp"), target=1):
            assert found.maps[0].diagnostics["conservation_error"] < 1e-5
            assert found.maps[0].weights.max() > 1.1 * found.maps[0].weights.mean()
        parameters = list(subject.model.parameters())
        assert all(p.requires_grad != frozen and p.grad is None for p in parameters)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())


def test_relevance_equals_captums_lrp_on_a_plain_network() -> None:
    from captum.attr import LRP

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2)).double()
    given = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    expected = LRP(network).attribute(given, target=1)
    with conserving(network):
        (gradient,) = torch.autograd.grad(network(given)[:, 1].sum(), given)
    torch.testing.assert_close(gradient * given, expected, rtol=1e-6, atol=1e-7)


def test_a_step_without_a_rule_is_refused_and_one_with_a_rule_is_not() -> None:
    for logit, refused in (
        (lambda e: e.pow(2).sum(dim=(1, 2)), True),
        (lambda e: e.exp().sum(dim=(1, 2)), True),
        (lambda e: (e * e).sum(dim=(1, 2)), False),
        (lambda e: torch.tanh(e).sum(dim=(1, 2)), False),
        (lambda e: (e / e.norm(dim=-1, keepdim=True)).sum(dim=(1, 2)), False),
    ):
        question = toy(logit)
        if refused:
            with pytest.raises(CaptureError, match=r"relevances miss the target logit by .* no rule"):
                relevance(question)
        else:
            sizes, error = relevance(question)
            embedded = question.checkpoint.model.table.weight[IDS].detach()
            parts = torch.stack([logit(one[None, None]) for one in embedded])
            torch.testing.assert_close(sizes, parts[:, 0].abs())
            assert error < 1e-9


def linear_rule(layer: nn.Linear, given: Tensor, after: Tensor) -> Tensor:
    """LRP-0: R_i = Σ_o x_i W_oi / z_o · R_o, the bias keeping its part."""
    return given * ((after / layer(given)) @ layer.weight)


def norm_rule(norm: nn.LayerNorm, given: Tensor, after: Tensor) -> Tensor:
    """LRP-0 of y = W x + b with W the centring matrix, scaled by fixed spread and weight."""
    n = given.shape[-1]
    spread = (given.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    centre = torch.eye(n, dtype=given.dtype) - 1 / n
    share = after / norm(given) * norm.weight / spread
    return given * (share @ centre)


def sum_rule(one: Tensor, two: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    share = after / (one + two)
    return one * share, two * share


def slow_relevance(subject, tensors: dict[str, Tensor], target: int) -> NDArray[np.float64]:
    """CP-LRP of a BERT classifier, rule by rule from the logit down (Ali et al. 2022, eqs. 3 and 12)."""
    model, bert = subject.model, subject.model.bert
    embeddings, tape = bert.embeddings, []
    words = embeddings.word_embeddings(tensors["input_ids"])[0]
    n = len(words)
    constant = embeddings.position_embeddings.weight[:n] + embeddings.token_type_embeddings.weight[0]
    x = embeddings.LayerNorm(words + constant)
    for layer in bert.encoder.layer:
        own, heads = layer.attention.self, layer.attention.self.num_attention_heads
        q, k, v = (part(x).view(n, heads, -1).transpose(0, 1) for part in (own.query, own.key, own.value))
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).reshape(n, -1)
        attended = layer.attention.output.dense(mixed)
        middle = layer.attention.output.LayerNorm(attended + x)
        inner = layer.intermediate.dense(middle)
        active = nn.functional.gelu(inner)
        fed = layer.output.dense(active)
        tape.append((layer, x, weights, v, mixed, attended, middle, active, fed))
        x = layer.output.LayerNorm(fed + middle)
    pooled = bert.pooler.dense(x[0])
    logits = model.classifier(pooled.tanh())
    torch.testing.assert_close(logits, model(**tensors).logits[0])
    after = torch.zeros_like(logits)
    after[target] = logits[target]
    r = linear_rule(model.classifier, pooled.tanh(), after)  # through tanh unchanged
    relevances = torch.zeros_like(x)
    relevances[0] = linear_rule(bert.pooler.dense, x[0], r)
    for layer, x, weights, v, mixed, attended, middle, active, fed in reversed(tape):
        r = norm_rule(layer.output.LayerNorm, fed + middle, relevances)
        r_fed, r_middle = sum_rule(fed, middle, r)
        r_inner = linear_rule(layer.output.dense, active, r_fed)  # through gelu unchanged
        r_middle = r_middle + linear_rule(layer.intermediate.dense, middle, r_inner)
        r = norm_rule(layer.attention.output.LayerNorm, attended + x, r_middle)
        r_attended, r_x = sum_rule(attended, x, r)
        r_mixed = linear_rule(layer.attention.output.dense, mixed, r_attended)
        share = (r_mixed / mixed).view(n, len(weights), -1).transpose(0, 1)
        r_value = (v * (weights.transpose(1, 2) @ share)).transpose(0, 1).reshape(n, -1)
        relevances = r_x + linear_rule(layer.attention.self.value, x, r_value)
    r = norm_rule(embeddings.LayerNorm, words + constant, relevances)
    return sum_rule(words, constant, r)[0].sum(dim=-1).abs().detach().numpy()


def test_relevance_equals_the_rules_applied_one_by_one() -> None:
    subject = text_checkpoint("bert")
    subject.model.double()
    for probe in text_probes()[:3]:
        raw = slow_relevance(subject, dict(encode(subject, probe).tensors), 2)
        (found,) = capture(subject, [probe], method=Method("lrp"), target=2)
        np.testing.assert_allclose(found.maps[0].weights, raw / raw.sum(), atol=1e-9)


@pytest.mark.parametrize("name", ["shap", "lime", "grad_cam", "lrp"])
def test_a_backbone_has_no_logit_to_explain(name: str) -> None:
    subject = checkpoint(build("BertModel", vocab_size=30), word_tokenizer())
    with pytest.raises(CheckpointError, match=f"no task head, so {name} has no logit"):
        list(capture(subject, text_probes()[:1], method=Method(name)))
