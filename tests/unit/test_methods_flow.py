"""Attention flow: exact values, networkx, bounds, cost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.methods import attention_flow, attention_rollout
from audit.methods.flow import flow_bound, layered_flow, normalized_flow, saturated_share
from tests import reference

FAST = settings(max_examples=25, deadline=None, derandomize=True)


def assert_close(found, expected, rtol=1e-7, atol=1e-12):
    """Compare tensors through NumPy: torch.testing takes seconds to import."""
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rtol, atol=atol)


def stack(*matrices):
    """Return attention (layer, 1, 1, n, n)."""
    return np.array(matrices, dtype=float)[:, None, None]


def uniform_causal(layers, n):
    rows = np.tril(np.ones((n, n)))
    return stack(*[rows / rows.sum(1, keepdims=True)] * layers)


@st.composite
def attentions(draw):
    return reference.random_attention(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 4)),
        1,
        2,
        draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(["dense", "ties"])),
        causal=draw(st.booleans()),
    )


@pytest.mark.parametrize(
    ("attention", "row", "expected"),
    [
        (np.full((2, 1, 1, 2, 2), 1 / 2), 0, [1, 0.5]),
        (np.full((3, 1, 1, 4, 4), 1 / 4), 0, [1, 0.875, 0.875, 0.875]),
        (uniform_causal(2, 3), -1, [1 / 2, 1 / 3, 2 / 3]),
        (uniform_causal(3, 4), -1, [0.875, 0.625, 0.375, 0.625]),
        (stack(*[np.roll(np.eye(4), 1, axis=1)] * 2), 0, [0.5, 1, 0.5, 0]),
        (stack([[0.8, 0.2], [0.4, 0.6]], [[0.5, 0.5], [0.1, 0.9]]), 0, [0.95, 0.35]),
        (stack([[0.8, 0.2], [0.4, 0.6]], [[0.5, 0.5], [0.1, 0.9]]), 1, [0.25, 0.85]),
        (stack(np.eye(3), np.eye(3)), 1, [0, 1, 0]),
    ],
)
def test_flow_row_is_exact(attention, row, expected):
    np.testing.assert_allclose(attention_flow(attention, rows=[row])[0, 0], expected, rtol=1e-12)


@FAST
@given(attentions(), st.sampled_from([0.0, 0.3, 0.5]))
def test_flow_equals_networkx(attention, residual):
    n = attention.shape[-1]
    row, key = n // 2, n - 1
    found = attention_flow(attention, rows=[row], residual=residual)[0, 0, key]
    assert found == pytest.approx(reference.flow(attention, row, key, residual), rel=1e-10, abs=1e-12)


@FAST
@given(attentions())
def test_flow_lies_between_rollout_and_bound(attention):
    found = attention_flow(attention)
    assert (attention_rollout(attention) <= found + 1e-12).all()
    assert (found <= flow_bound(attention)[:, None] + 1e-12).all()


def test_flow_of_chosen_rows_is_those_rows_for_every_sample():
    attention = reference.random_attention(0, 3, 2, 2, 5)
    chosen = attention_flow(attention, rows=[3, -5])
    np.testing.assert_array_equal(chosen, attention_flow(attention)[:, [3, 0]])
    np.testing.assert_array_equal(attention_flow(attention[:, 1:], rows=[3])[0], chosen[1, :1])


def test_flow_takes_a_residual_for_each_query():
    attention = reference.random_attention(1, 3, 1, 1, 4)
    rho = np.random.default_rng(2).random((3, 1, 4))
    rho[:, :, 1] = 1.0
    found = attention_flow(attention, rows=[1], residual=rho)
    np.testing.assert_allclose(found[0, 0], [0, 1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(
        flow_bound(attention, residual=rho)[0],
        np.minimum(1, reference.mix(attention[0, 0, 0], rho[0, 0]).sum(0)),
    )
    np.testing.assert_allclose(
        attention_flow(attention, residual=[0.2, 0.5, 0.5])[0].max(0),
        attention_flow(attention, residual=np.array([0.2, 0.5, 0.5]))[0].max(0),
    )


def test_normalized_flow_rows_are_distributions():
    flow = attention_flow(reference.random_attention(3, 2, 2, 2, 4))
    np.testing.assert_allclose(normalized_flow(flow).sum(-1), 1)


def test_saturated_share_counts_inputs_on_the_bound():
    attention = np.full((3, 1, 1, 4, 4), 1 / 4)
    share = saturated_share(attention_flow(attention), flow_bound(attention))
    np.testing.assert_array_equal(share, [[0.25] * 4])
    dense = reference.random_attention(4, 8, 1, 4, 12)
    assert saturated_share(attention_flow(dense, rows=[0]), flow_bound(dense)) > 0.5


def test_flow_keeps_the_kind_of_array():
    attention = torch.from_numpy(reference.random_attention(5, 2, 1, 2, 3))
    found = attention_flow(attention.to(torch.bfloat16))
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert_close(found.double(), attention_flow(attention), rtol=0.01, atol=0.01)


def test_flow_refuses_work_that_takes_hours_and_names_the_cost():
    attention = np.broadcast_to(np.full(1, 1 / 512), (12, 1, 1, 512, 512))
    with pytest.raises(ValueError, match=r"rows: .*512 max-flows over 3,145,728 edges.*raise max_seconds"):
        attention_flow(attention, rows=[0], max_seconds=10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: attention_flow(a, rows=[4]), r"rows: expected positions among 4, got \[4\]"),
        (lambda a: attention_flow(a, rows=[]), r"rows: expected positions among 4"),
        (lambda a: attention_flow(2 * a), r"attentions\[0\]: expected rows over keys that sum to at most 1"),
        (lambda a: attention_flow(a, residual=2.0), r"residual: expected weights in \[0, 1\]"),
        (lambda a: flow_bound(a, residual=[0.5]), r"residual: expected one weight for each of 2 layers"),
        (lambda a: saturated_share(a[0], np.ones((1, 3))), r"bound: expected \(batch, key\)"),
    ],
)
def test_flow_refuses_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(reference.random_attention(6, 2, 1, 1, 4))


def test_layers_that_only_pass_an_input_on_change_neither_flow_nor_bound():
    lower, upper = np.array([[0.6, 0.4], [1.0, 0.0]]), np.array([[0.3, 0.7]])
    flow, saturated = layered_flow([lower, upper], [0])
    wide = np.eye(3)[:2]  # one more input, which nothing draws on
    again, on_bound = layered_flow([np.eye(3), wide, lower, upper], [0])
    np.testing.assert_allclose(again, np.pad(flow, ((0, 0), (0, 1))), atol=1e-12)
    assert saturated.tolist() == [[True, False]]
    assert on_bound.tolist() == [[True, False, True]]
