"""Value-aware contributions: exact values, the slow reference, a real layer norm and attention layer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.methods.rollout import rollout_step
from audit.methods.value_aware import (
    alti_contributions,
    identity_where_empty,
    linearized_layer_norm,
    norm_contributions,
    transformed_vectors,
    value_zeroing_contributions,
)
from tests import reference

FAST = settings(max_examples=25, deadline=None, derandomize=True)


def assert_close(found, expected, rtol=1e-7, atol=1e-12):
    """Compare tensors through NumPy: torch.testing takes seconds to import."""
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rtol, atol=atol)


def layer(seed, n=4, heads=2, size=3, dim=6):
    rng = np.random.default_rng(seed)
    attention = reference.random_attention(seed, 1, 1, heads, n)[0]
    values, output = rng.normal(size=(1, heads, n, size)), rng.normal(size=(heads, size, dim))
    return attention, values, output, rng.normal(size=(1, n, dim))


def test_contributions_are_exact():
    vectors = np.array([[[[2.0, 0.0], [1.0, 1.0]]]])
    np.testing.assert_allclose(alti_contributions(vectors), [[[0.5, 0.5]]])
    np.testing.assert_allclose(norm_contributions(vectors), [[[0.5858, 0.4142]]], atol=5e-5)


def test_row_in_which_nothing_helps_becomes_the_identity_row():
    vectors = np.array([[[[2.0, 0.0], [-1.0, 1.0]]]])
    contributions = alti_contributions(vectors)
    assert contributions.tolist() == [[[0.0, 0.0]]]
    rows, empty = identity_where_empty(contributions, query_offset=1)
    assert rows.tolist() == [[[0.0, 1.0]]]
    assert empty.tolist() == [1]


@FAST
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3))
def test_transformed_vectors_and_contributions_equal_the_reference(seed, n, heads):
    attention, values, output, hidden = layer(seed, n=n, heads=heads)
    vectors = transformed_vectors(attention, values, output, hidden)
    expected = reference.transformed(attention[0], values[0], output, hidden[0])
    np.testing.assert_allclose(vectors[0], expected, rtol=1e-10, atol=1e-13)
    gains = np.array([reference.alti(row) for row in expected])
    filled = gains / np.where(gains.sum(-1, keepdims=True) > 0, gains.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(alti_contributions(vectors)[0], filled, rtol=1e-8, atol=1e-10)
    lengths = np.sqrt((expected**2).sum(-1))
    np.testing.assert_allclose(norm_contributions(vectors)[0], lengths / lengths.sum(-1, keepdims=True))


def test_transformed_vectors_add_up_to_the_output_of_a_real_attention_layer():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(6, 2, batch_first=True).double()
    hidden = torch.randn(1, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        output, attention = module(hidden, hidden, hidden, average_attn_weights=False)
        values = torch.nn.functional.linear(hidden, module.in_proj_weight[12:], module.in_proj_bias[12:])
        vectors = transformed_vectors(
            attention,
            values.reshape(1, 4, 2, 3).transpose(1, 2),
            module.out_proj.weight.T.reshape(2, 3, 6),
            hidden,
        )
        assert_close(vectors.sum(2) + module.out_proj.bias, output + hidden)


def test_linearized_layer_norm_adds_up_to_the_layer_norm_of_the_sum():
    vectors = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3, 4, 5)))
    norm = torch.nn.LayerNorm(5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 5))
        norm.bias.copy_(torch.linspace(-1, 1, 5))
        total = vectors.sum(2)
        deviation = (total.var(-1, correction=0) + norm.eps).sqrt()
        parts = linearized_layer_norm(vectors, norm.weight, deviation)
        assert_close(parts.sum(2) + norm.bias, norm(total))


def test_blocks_of_queries_give_the_same_contributions():
    attention, values, output, hidden = layer(2)
    whole = transformed_vectors(attention, values, output, hidden)
    block = transformed_vectors(attention[:, :, 2:], values, output, hidden[:, 2:], query_offset=2)
    np.testing.assert_array_equal(block, whole[:, 2:])


def test_contributions_roll_out_to_distributions():
    total = None
    for seed in range(3):
        rows, _ = identity_where_empty(alti_contributions(transformed_vectors(*layer(seed))))
        total = rollout_step(total, rows)
    np.testing.assert_allclose(total.sum(-1), 1, rtol=1e-12)


def test_value_zeroing_is_the_cosine_distance_and_ignores_keys_that_change_nothing():
    output = np.array([[[1.0, 1.0]]], dtype=np.float32)
    zeroed = np.array([[[[1.0, 1.0], [1.0, 0.0], [-1.0, -1.0]]]], dtype=np.float32)
    turned = np.array([0, 1 - 1 / np.sqrt(2), 2])
    found = value_zeroing_contributions(output, zeroed)
    np.testing.assert_allclose(found, [[turned / turned.sum()]], rtol=1e-6)
    assert found[0, 0, 0] == 0
    assert value_zeroing_contributions(output, zeroed[:, :, :1]).tolist() == [[[0.0]]]


def test_value_aware_functions_take_and_give_torch_and_half_precision():
    vectors = torch.tensor([[[[2.0, 0.0], [1.0, 1.0]]]], dtype=torch.bfloat16)
    for function in (alti_contributions, norm_contributions):
        found = function(vectors)
        assert found.dtype == torch.float32
        assert found.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a, v, o, h: transformed_vectors(a, v[:, :1], o),
            r"values: expected \(batch, head, key, head_dim\)",
        ),
        (
            lambda a, v, o, h: transformed_vectors(a, v, o[:1]),
            r"output_weight: expected \(head, head_dim, dim\)",
        ),
        (
            lambda a, v, o, h: transformed_vectors(a, v, o, h[:, :2]),
            r"hidden: expected \(batch, query, dim\)",
        ),
        (lambda a, v, o, h: norm_contributions(a[0]), r"vectors: expected \(batch, query, key, dim\)"),
        (lambda a, v, o, h: norm_contributions(a * np.nan), r"vectors: expected finite numbers"),
        (lambda a, v, o, h: alti_contributions(a, h), r"output: expected \(batch, query, dim\)"),
        (lambda a, v, o, h: value_zeroing_contributions(h, a), r"output: expected \(batch, query, dim\)"),
        (
            lambda a, v, o, h: linearized_layer_norm(a, np.ones(4), np.ones((1, 3))),
            r"vectors: expected \(batch, query, key, dim\) with weight",
        ),
        (
            lambda a, v, o, h: linearized_layer_norm(a, np.ones(4), np.zeros((1, 2))),
            r"deviation: expected values > 0, got 0",
        ),
    ],
)
def test_value_aware_functions_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(*layer(3))
