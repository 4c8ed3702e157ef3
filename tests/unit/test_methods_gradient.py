"""Gradient-weighted, two-stream and encoder-decoder methods against the slow reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.methods import (
    encoder_decoder_relevance,
    encoder_decoder_rollout,
    gradient_rollout,
    two_stream_relevance,
)
from audit.methods.encoder_decoder import cross_rollout_step
from audit.methods.gradient import gradient_map, gradient_row_step, weigh_by_gradient
from audit.methods.two_stream import CoAttention, SelfAttention
from tests import reference

FAST = settings(max_examples=25, deadline=None, derandomize=True)


def assert_close(found, expected, rtol=1e-7, atol=1e-12):
    """Compare tensors through NumPy: torch.testing takes seconds to import."""
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rtol, atol=atol)


def gradients_like(attention, seed):
    return np.random.default_rng(seed).normal(size=attention.shape)


@st.composite
def attentions(draw):
    return reference.random_attention(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(["dense", "ties"])),
        causal=draw(st.booleans()),
    )


# --- gradient rollout -------------------------------------------------------------------------


@FAST
@given(attentions(), st.integers(0, 2**32), st.sampled_from(["relevance", "product"]))
def test_gradient_rollout_equals_the_reference(attention, seed, form):
    gradients = gradients_like(attention, seed)
    found = gradient_rollout(attention, gradients, form=form)
    np.testing.assert_allclose(found, reference.gradient_rollout(attention, gradients, form), rtol=1e-12)


@FAST
@given(attentions(), st.integers(0, 2**32), st.sampled_from(["relevance", "product"]))
def test_gradient_row_from_the_last_layer_down_equals_the_matrix(attention, seed, form):
    gradients = gradients_like(attention, seed)
    whole = gradient_rollout(attention, gradients, form=form)
    row = start = np.tile(np.eye(attention.shape[-1])[-1], (attention.shape[1], 1))
    excess = np.zeros_like(start)
    for layer in reversed(range(len(attention))):
        weighted = weigh_by_gradient(attention[layer], gradients[layer])
        row = gradient_row_step(row, weighted, form=form)
        if form == "relevance":
            excess = gradient_row_step(excess, weighted, start=start)
    np.testing.assert_allclose(row, whole[:, -1], rtol=1e-12)
    if form == "relevance":
        np.testing.assert_allclose(excess, whole[:, -1] - start, rtol=1e-10, atol=1e-13)


def test_row_of_excess_relevance_keeps_small_gradients_in_float32():
    attention = reference.random_attention(0, 6, 1, 2, 5)
    gradients = 1e-7 * np.abs(gradients_like(attention, 1))
    start = torch.eye(5)[:1]
    excess = torch.zeros(1, 5)
    for layer in reversed(range(6)):
        weighted = weigh_by_gradient(
            *(torch.tensor(a[layer], dtype=torch.float32) for a in (attention, gradients))
        )
        excess = gradient_row_step(excess, weighted, start=start)
    expected = gradient_map(gradient_rollout(attention, gradients)[:, 0], start)[0]
    np.testing.assert_allclose(gradient_map(excess)[0].numpy(), expected, rtol=1e-5)


def test_gradients_keyed_by_layer_may_arrive_in_any_order():
    attention = reference.random_attention(1, 3, 1, 2, 4)
    gradients = gradients_like(attention, 2)
    arrived = {layer: gradients[layer] for layer in (2, 1, 0)}
    np.testing.assert_array_equal(
        gradient_rollout(attention, arrived), gradient_rollout(attention, gradients)
    )


@pytest.mark.parametrize("form", ["relevance", "product"])
def test_gradient_rollout_of_causal_attention_is_lower_triangular(form):
    attention = reference.random_attention(2, 3, 1, 2, 5, causal=True)
    assert (np.triu(gradient_rollout(attention, gradients_like(attention, 3), form=form), 1) == 0).all()


def test_product_form_rows_are_distributions():
    attention = reference.random_attention(3, 4, 2, 2, 5)
    found = gradient_rollout(attention, gradients_like(attention, 4), form="product")
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-12)


def test_map_without_relevance_is_undefined_not_nan():
    attention = reference.random_attention(4, 2, 1, 1, 3)
    found = gradient_rollout(attention, -np.ones_like(attention))
    weights, defined = gradient_map(found[:, 1], np.eye(3)[1:2])
    assert weights.tolist() == [[0, 0, 0]]
    assert defined.tolist() == [False]


def test_gradients_of_real_attention_agree_with_finite_differences():
    scores = torch.from_numpy(np.random.default_rng(5).normal(size=(1, 1, 2, 3, 3)))
    values = torch.from_numpy(np.random.default_rng(6).normal(size=(2, 3)))
    attention = scores.softmax(-1).requires_grad_()

    def logit(weights):
        return torch.tanh(torch.einsum("lbhqk,hk->q", weights, values)).pow(2).sum()

    (gradient,) = torch.autograd.grad(logit(attention), attention)
    step, base = 1e-6, attention.detach()
    numeric = torch.zeros_like(base)
    for index in np.ndindex(*base.shape):
        nudge = torch.zeros_like(base)
        nudge[index] = step
        numeric[index] = (logit(base + nudge) - logit(base - nudge)) / (2 * step)
    assert_close(gradient_rollout(base, gradient), gradient_rollout(base, numeric), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (lambda a: a[:1], r"gradients: expected 2 layers like the attentions, got 1"),
        (lambda a: {1: a[1]}, r"gradients: expected layers 0…1, got \[1\] \(missing \[0\]\)"),
        (lambda a: [a[0], a[1][:, :1]], r"gradients\[1\]: expected shape \(1, 2, 3, 3\)"),
        (lambda a: a * np.nan, r"attention and gradient: expected finite numbers, got NaN"),
    ],
)
def test_gradient_rollout_refuses_wrong_gradients(gradients, message):
    attention = reference.random_attention(7, 2, 1, 2, 3)
    with pytest.raises(ValueError, match=message):
        gradient_rollout(attention, gradients(attention))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: gradient_rollout(a, a, form="sum"), r"form: expected 'relevance' or 'product', got 'sum'"),
        (lambda a: gradient_map(a[0, 0, 0], a[0, 0, 0, :1]), r"start: expected shape"),
        (lambda a: weigh_by_gradient(a[0], a[0, 0]), r"gradient: expected \(batch, head, query, key\)"),
        (
            lambda a: gradient_row_step(a[0, 0, 0, :1], a[0, 0, :1], start=a[0, 0, 0, :1], form="product"),
            r"form: expected 'relevance', or 'product' without start",
        ),
    ],
)
def test_gradient_pieces_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(reference.random_attention(8, 1, 1, 1, 3))


# --- two streams ------------------------------------------------------------------------------


@FAST
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_two_stream_relevance_equals_the_reference(seed, first, second, layers):
    rng = np.random.default_rng(seed)
    state = (np.eye(first), np.zeros((first, second)), np.zeros((second, first)), np.eye(second))
    steps = []

    def draw(queries, keys):
        attention = reference.random_attention(int(rng.integers(2**32)), 1, 1, 2, queries, keys=keys)[0]
        gradient = rng.normal(size=attention.shape)
        return attention, gradient, reference.weigh(attention[0], gradient[0])

    for _ in range(layers):
        *both, weighted = draw(first, first)
        steps.append(SelfAttention("first", *both))
        state = reference.self_attention(state, "first", weighted)
        *forth, weighted = draw(first, second)
        *back, other = draw(second, first)
        steps.append(CoAttention(*forth, *back))
        state = reference.co_attention(state, weighted, other)
        *both, weighted = draw(second, second)
        steps.append(SelfAttention("second", *both))
        state = reference.self_attention(state, "second", weighted)
    for found, expected in zip(two_stream_relevance(steps), state, strict=True):
        np.testing.assert_allclose(found[0], expected, rtol=1e-11, atol=1e-13)


def test_swapping_the_streams_swaps_the_relevances():
    rng = np.random.default_rng(9)
    forth, back, own = (rng.random((1, 2, *shape)) for shape in ((3, 4), (4, 3), (3, 3)))
    found = two_stream_relevance([SelfAttention("first", own, own), CoAttention(forth, forth, back, back)])
    swapped = two_stream_relevance([SelfAttention("second", own, own), CoAttention(back, back, forth, forth)])
    np.testing.assert_allclose(found.first_second, swapped.second_first)
    np.testing.assert_allclose(found.first_first, swapped.second_second)


def test_either_direction_of_co_attention_may_be_left_out():
    forth, back = np.random.default_rng(16).random((2, 1, 2, 3, 3))
    whole = two_stream_relevance([CoAttention(forth, forth, back, back)])
    only_back = two_stream_relevance(
        [CoAttention(second=torch.tensor(back), second_gradient=torch.tensor(back))]
    )
    assert isinstance(only_back.second_first, torch.Tensor)
    np.testing.assert_array_equal(only_back.second_first.numpy(), whole.second_first)
    assert (only_back.first_second == 0).all()


def test_unnormalised_two_stream_relevance_uses_the_self_relevance_as_it_is():
    one = np.ones((1, 1, 1, 1))
    steps = [SelfAttention("first", one, 3 * one), CoAttention(one, one)]
    assert two_stream_relevance(steps).first_second.item() == 2
    assert two_stream_relevance(steps, normalize=False).first_second.item() == 4


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], r"steps: expected at least one layer, got none"),
        (
            [SelfAttention("first", np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)))],
            r"streams 'first' and 'second'",
        ),
        (
            [CoAttention(np.ones((1, 1, 2, 3)), np.ones((1, 1, 2, 3))), CoAttention()],
            r"steps\[1\]: expected attention of at least one stream to the other, got none",
        ),
        ([CoAttention(np.ones((1, 1, 2, 3)))], r"steps\[0\]: gradient: expected one .*got None"),
        (
            [
                CoAttention(np.ones((1, 1, 2, 3)), np.ones((1, 1, 2, 3))),
                SelfAttention("second", np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2))),
            ],
            r"steps\[1\]: attention: expected \(batch, query, key\) = \(1, 3, 3\), got \(1, 2, 2\)",
        ),
        (
            [
                CoAttention(np.ones((1, 1, 2, 3)), np.ones((1, 1, 2, 3))),
                SelfAttention("third", np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2))),
            ],
            r"steps: expected layers of streams 'first' and 'second', got \['first', 'second', 'third'\]",
        ),
    ],
)
def test_two_stream_relevance_refuses_wrong_steps(steps, message):
    with pytest.raises(ValueError, match=message):
        two_stream_relevance(steps)


# --- encoder-decoder --------------------------------------------------------------------------


def stacks(seed, batch=1, encoder_layers=2, decoder_layers=3, source=4, steps=3):
    encoder = reference.random_attention(seed, encoder_layers, batch, 2, source)
    decoder = reference.random_attention(seed + 1, decoder_layers, batch, 2, steps, causal=True)
    cross = reference.random_attention(seed + 2, decoder_layers, batch, 2, steps, keys=source)
    return encoder, decoder, cross


def test_encoder_decoder_rollout_is_exact():
    swap, decoder = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1, 0], [0.5, 0.5]])
    encoder = swap[None, None, None]
    source, prefix = encoder_decoder_rollout(encoder, decoder[None, None, None], np.eye(2)[None, None, None])
    np.testing.assert_array_equal(source[0], np.full((2, 2), 0.25))
    np.testing.assert_array_equal(prefix[0], [[0.5, 0], [0.125, 0.375]])
    twice = [np.array([matrix] * 2)[:, None, None] for matrix in (decoder, np.eye(2))]
    np.testing.assert_array_equal(encoder_decoder_rollout(encoder, *twice)[0][0], np.full((2, 2), 0.375))


@FAST
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_encoder_decoder_rollout_equals_the_reference(seed, layers, source, steps, measured):
    arrays = stacks(seed, batch=2, decoder_layers=layers, source=source, steps=steps)
    rng = np.random.default_rng(seed)
    beta = rng.random((layers, 2, steps)) if measured else np.full((layers, 2, steps), 0.3)
    found = encoder_decoder_rollout(*arrays, residual=0.4, cross_residual=beta if measured else 0.3)
    np.testing.assert_allclose(found[0].sum(-1) + found[1].sum(-1), 1, rtol=1e-12)
    for sample in range(2):
        expected = reference.encoder_decoder(*(a[:, sample] for a in arrays), 0.4, beta[:, sample])
        np.testing.assert_allclose(found[0][sample], expected[0], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found[1][sample], expected[1], rtol=1e-12, atol=1e-15)


def test_source_share_of_a_fixed_residual_is_the_same_for_every_model():
    source, _ = encoder_decoder_rollout(*stacks(10), cross_residual=0.6)
    np.testing.assert_allclose(source.sum(-1), 1 - 0.6**3)


def test_encoder_decoder_relevance_of_a_row_that_nothing_favours_is_zero_not_nan():
    arrays = stacks(13)
    gradients = [-np.ones_like(array) for array in arrays]
    assert (encoder_decoder_relevance(*arrays, *gradients) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: lambda a: a[:2]}, r"cross: expected 3 layers like the decoder, got 2"),
        (
            {2: lambda a: a[..., :3]},
            r"cross: expected \(batch, head, 3 decoder positions, 4 encoder positions\)",
        ),
        ({0: lambda a: a[..., :3]}, r"encoder: expected as many queries as keys"),
        ({2: lambda a: a / 2}, r"cross\[0\]: expected rows over keys that sum to 1, got 0.5"),
        ({1: lambda a: a * 2}, r"decoder\[0\]: expected rows over keys that sum to at most 1"),
    ],
)
def test_encoder_decoder_rollout_refuses_wrong_stacks(change, message):
    arrays = list(stacks(14))
    for index, function in change.items():
        arrays[index] = function(arrays[index])
    with pytest.raises(ValueError, match=message):
        encoder_decoder_rollout(*arrays)


@pytest.mark.parametrize("residual", [-0.1, 1.1, float("nan")])
def test_cross_step_refuses_a_residual_outside_its_range(residual):
    one = np.ones((1, 1, 1))
    with pytest.raises(ValueError, match=r"residual: expected weights in \[0, 1\]"):
        cross_rollout_step(one, one, one, residual)
    with pytest.raises(ValueError, match=r"cross_residual: expected weights in \[0, 1\]"):
        encoder_decoder_rollout(*stacks(15), cross_residual=residual)
