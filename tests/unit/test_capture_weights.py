"""Attention weights recomputed beside a fused kernel, against torch's own kernel and exact values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.capture.attention.scratch import Scratch
from audit.capture.attention.weights import attention_weights, with_sink


def tensors(
    heads: int = 4, key_heads: int = 4, n: int = 5, dim: int = 8, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, n, dim), (2, key_heads, n, dim), (2, key_heads, n, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_weights_reproduce_the_kernel(masked: str, key_heads: int) -> None:
    query, key, value = tensors(key_heads=key_heads)
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allowed[0, ..., 3:] = False
    mask = {"bool": allowed, "additive": torch.zeros(2, 1, 5, 5).masked_fill(~allowed, -1e9)}.get(masked)
    weights = attention_weights(query, key, mask, scaling=0.3, is_causal=masked == "causal")
    wide = [t.repeat_interleave(4 // key_heads, dim=1) for t in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        *wide,
        attn_mask=None if mask is None else mask.to(torch.bool if masked == "bool" else torch.float64),
        is_causal=masked == "causal",
        scale=0.3,
    )
    torch.testing.assert_close(weights @ wide[1], expected, rtol=1e-12, atol=1e-12)


def test_attention_weights_are_float32_for_half_precision() -> None:
    query, key, _ = (t.to(torch.bfloat16) for t in tensors())
    weights = attention_weights(query, key)
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    exact = attention_weights(query.double(), key.double())
    np.testing.assert_allclose(weights, exact, atol=1e-6)


def test_attention_weights_with_softcap_and_bias_follow_the_equation() -> None:
    query, key, _ = tensors()
    bias = torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(1, 1, 5, 5)
    scores = np.einsum("bhqd,bhkd->bhqk", query.numpy(), key.numpy()) / np.sqrt(8)
    scores = np.tanh(scores / 0.7) * 0.7 + bias.numpy()
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        attention_weights(query, key, softcap=0.7, position_bias=bias), expected, rtol=1e-12
    )


def test_attention_weights_of_a_sink_take_mass_from_the_keys() -> None:
    query, key, _ = tensors()
    sinks = torch.tensor([0.0, 1.0, 2.0, -30.0], dtype=torch.float64)
    weights = attention_weights(query, key, sinks=sinks)
    assert weights.shape == (2, 4, 5, 6)
    plain = attention_weights(query, key)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / 8**0.5
    total = scores.exp().sum(-1, keepdim=True)
    share = sinks.exp().reshape(1, 4, 1, 1) / (total + sinks.exp().reshape(1, 4, 1, 1))
    torch.testing.assert_close(weights[..., 5:], share)
    torch.testing.assert_close(weights[..., :5], plain * (1 - share))
    torch.testing.assert_close(with_sink(weights[..., :5]), weights)


def test_attention_weights_of_a_row_without_keys_are_zero_and_nan_stays_nan() -> None:
    query, key, _ = tensors()
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2] = False
    query[1, 0, 0, 0] = float("nan")
    weights = attention_weights(query, key, mask)
    assert bool((weights[0, :, 2] == 0).all())
    assert bool(weights[1, 0, 0].isnan().all())
    assert bool(weights[0].isfinite().all())


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("copies", [1, 3])
def test_weights_in_lent_memory_are_the_same(masked: str, key_heads: int, copies: int) -> None:
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allowed[0, ..., 3:] = False
    allowed[1, 0, 2] = False  # a row without keys
    hidden = torch.zeros(2, 1, 5, 5).masked_fill(~allowed, float("-inf"))
    mask = {"bool": allowed, "additive": hidden}.get(masked)
    scratch = Scratch()
    for n in (5, 3):  # the larger call first: the smaller one takes part of its room
        query, key, _ = (
            torch.cat([t, -t, 2 * t][:copies]) for t in tensors(key_heads=key_heads, n=n, seed=n)
        )
        part = None if mask is None else mask[..., :n, :n].repeat(copies, 1, 1, 1)
        expected = attention_weights(query, key, part, scaling=0.3, is_causal=masked == "causal")
        found = scratch.weights(query, key, part, scaling=0.3, is_causal=masked == "causal")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_what_is_kept_under_a_name_lies_where_its_predecessor_lay():
    scratch = Scratch()
    first = scratch.keep("key 0", torch.arange(12.0).reshape(3, 4).T)
    assert torch.equal(first, torch.arange(12.0).reshape(3, 4).T)
    assert first.is_contiguous()
    other = scratch.keep("key 1", torch.ones(4, 3))
    smaller = scratch.keep("key 0", torch.zeros(2, 3))
    assert smaller.data_ptr() == first.data_ptr() != other.data_ptr()
    assert torch.equal(other, torch.ones(4, 3))
    assert scratch.nbytes == 2 * 12 * 4


def test_lent_memory_is_used_again_and_half_precision_gives_float32() -> None:
    query, key, _ = (t.to(torch.bfloat16) for t in tensors())
    scratch = Scratch()
    first = scratch.weights(query, key)
    torch.testing.assert_close(first, attention_weights(query, key))
    assert scratch.weights(query, key).data_ptr() == first.data_ptr()
