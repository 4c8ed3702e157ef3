"""Rollout: exact values, the slow reference, invariants, arguments."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.methods import attention_rollout, per_head_rollout, raw_attention
from audit.methods.fusion import fuse_heads, fuse_heads_counted
from audit.methods.rollout import add_residual, measured_residual, rollout_step, row_step
from tests import reference

FAST = settings(max_examples=25, deadline=None, derandomize=True)


def assert_close(found, expected, rtol=1e-7, atol=1e-12):
    """Compare tensors through NumPy: torch.testing takes seconds to import."""
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rtol, atol=atol)


SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])


def stack(*matrices):
    """Return attention (layer, 1, 1, n, n)."""
    return np.array(matrices, dtype=float)[:, None, None]


def uniform(layers, n):
    return np.full((layers, 1, 1, n, n), 1 / n)


def uniform_causal(layers, n):
    rows = np.tril(np.ones((n, n)))
    return stack(*[rows / rows.sum(1, keepdims=True)] * layers)


def cyclic(n):
    return np.roll(np.eye(n), 1, axis=1)


@st.composite
def attentions(draw, kinds=("dense", "ties")):
    return reference.random_attention(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 6)),
        kind=draw(st.sampled_from(kinds)),
        causal=draw(st.booleans()),
    )


# --- exact values -----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "layers"), [(5, 2), (3, 1), (4, 6)])
def test_rollout_of_uniform_attention_is_exact(n, layers):
    decay = 2.0**-layers
    expected = np.full((n, n), (1 - decay) / n) + decay * np.eye(n)
    np.testing.assert_allclose(attention_rollout(uniform(layers, n))[0], expected, rtol=1e-14)


def test_rollout_of_identity_attention_is_the_identity():
    np.testing.assert_array_equal(attention_rollout(stack(np.eye(4), np.eye(4)))[0], np.eye(4))


@pytest.mark.parametrize(
    ("attention", "row", "expected"),
    [
        (stack(*[cyclic(4)] * 3), 0, [1 / 8, 3 / 8, 3 / 8, 1 / 8]),
        (stack(*[np.vstack([np.eye(4)[0], np.eye(4)[:3]])] * 2), -1, [0, 1 / 4, 1 / 2, 1 / 4]),
        (uniform_causal(1, 3), -1, [1 / 6, 1 / 6, 2 / 3]),
        (uniform_causal(2, 3), -1, [23 / 72, 17 / 72, 4 / 9]),
        (uniform_causal(2, 4), -1, np.array([49, 37, 31, 75]) / 192),
        (uniform_causal(3, 4), -1, [1747 / 4608, 1015 / 4608, 721 / 4608, 125 / 512]),
    ],
)
def test_rollout_row_is_exact(attention, row, expected):
    np.testing.assert_allclose(attention_rollout(attention)[0, row], expected, rtol=1e-14)


def test_rollout_without_residual_is_exact():
    found = attention_rollout(uniform_causal(2, 3), residual=0.0)[0, -1]
    np.testing.assert_allclose(found, [11 / 18, 5 / 18, 1 / 9], rtol=1e-14)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ([[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0, 1]], [[0.8125, 0.1875], [0.25, 0.75]]),
        ([[0.8, 0.2], [0.4, 0.6]], [[0.5, 0.5], [0.1, 0.9]], [[0.725, 0.275], [0.235, 0.765]]),
        (
            [[0.5, 0.25, 0.25], [0, 1, 0], [0, 0, 1]],
            cyclic(3),
            [[3 / 8, 9 / 16, 1 / 16], [0, 0.5, 0.5], [3 / 8, 1 / 16, 9 / 16]],
        ),
    ],
)
def test_rollout_multiplies_later_layers_from_the_left(lower, upper, expected):
    np.testing.assert_allclose(attention_rollout(stack(lower, upper))[0], expected, rtol=1e-14)


def test_uniform_causal_attention_puts_most_mass_on_the_first_token():
    column = [Fraction(int(i == 0)) for i in range(64)]
    for _ in range(12):
        column = [(column[i] + sum(column[: i + 1]) / (i + 1)) / 2 for i in range(64)]
    assert float(column[-1]) == pytest.approx(0.6253507629, abs=1e-10)
    np.testing.assert_allclose(attention_rollout(uniform_causal(12, 64))[0, -1, 0], float(column[-1]))


# --- against the slow reference ---------------------------------------------------------------


@FAST
@given(attentions(), st.data())
def test_rollout_equals_the_reference(attention, data):
    layers, batch, heads, n, _ = attention.shape
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    residual = data.draw(st.sampled_from([0.0, 0.3, 1.0, "layer", "query"]))
    if residual == "layer":
        residual, expected_residual = (
            (per_layer := list(rng.random(layers))),
            np.array(per_layer)[:, None, None],
        )
    elif residual == "query":
        residual = expected_residual = rng.random((layers, batch, n))
    else:
        expected_residual = residual
    fusion = data.draw(st.sampled_from(["mean", "max", "min", "weighted"]))
    weights = np.tile(np.arange(1, heads + 1) / np.arange(1, heads + 1).sum(), (layers, 1))
    start = data.draw(st.integers(0, layers - 1))
    pruning = {
        "discard_ratio": data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.9])),
        "discard_below": data.draw(st.sampled_from([None, 0.1, 0.6])),
        "top_k": data.draw(st.sampled_from([None, 1, 2, 9])),
    }
    found = attention_rollout(
        attention,
        head_fusion=fusion,
        head_weights=weights if fusion == "weighted" else None,
        residual=residual,
        start_layer=start,
        **pruning,
    )
    expected = reference.rollout(
        attention,
        expected_residual,
        start,
        head_fusion=fusion,
        head_weights=weights[0],
        ratio=pruning["discard_ratio"],
        below=pruning["discard_below"],
        top_k=pruning["top_k"],
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@FAST
@given(
    attentions(kinds=("ties",)),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([None, 2]),
)
def test_fusion_with_a_mask_equals_the_reference(attention, seed, ratio, top_k):
    n = attention.shape[-1]
    mask = np.random.default_rng(seed).random((attention.shape[1], n, n)) < 0.7
    fused, empty = fuse_heads_counted(attention[0], discard_ratio=ratio, top_k=top_k, mask=mask)
    for sample in range(len(mask)):
        rows, gaps = reference.fuse(attention[0, sample], ratio=ratio, top_k=top_k, mask=mask[sample])
        np.testing.assert_allclose(fused[sample], rows, rtol=1e-12, atol=1e-15)
        assert empty[sample] == len(gaps)


@FAST
@given(attentions(), st.sampled_from([0.0, 0.5, 0.8]))
def test_per_head_rollout_equals_the_reference(attention, residual):
    found = per_head_rollout(attention, residual=residual)
    np.testing.assert_allclose(found, reference.per_head(attention, residual), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        found.mean(1), attention_rollout(attention, residual=residual), rtol=1e-12, atol=1e-15
    )


def test_per_head_rollout_of_a_lower_layer_ignores_the_layers_above():
    attention = reference.random_attention(0, 3, 2, 4, 5)
    np.testing.assert_array_equal(per_head_rollout(attention, layer=1), per_head_rollout(attention[:2]))


def test_per_head_rollout_by_the_same_index_is_each_heads_own_rollout():
    attention = reference.random_attention(1, 3, 2, 4, 5)
    found = per_head_rollout(attention, same_head=True)
    for head in range(4):
        expected = attention_rollout(attention[:, :, head : head + 1])
        np.testing.assert_allclose(found[:, head], expected, rtol=1e-13)


# --- invariants -------------------------------------------------------------------------------


@FAST
@given(
    attentions(),
    st.sampled_from(["mean", "max", "min"]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, 1]),
)
def test_rows_stay_distributions(attention, fusion, ratio, top_k):
    found = attention_rollout(attention, head_fusion=fusion, discard_ratio=ratio, top_k=top_k)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-12)


@FAST
@given(attentions())
def test_no_pruning_equals_plain_rollout(attention):
    plain = attention_rollout(attention)
    n = attention.shape[-1]
    np.testing.assert_array_equal(attention_rollout(attention, discard_ratio=0.0), plain)
    np.testing.assert_allclose(attention_rollout(attention, top_k=n), plain, rtol=1e-14)
    np.testing.assert_allclose(attention_rollout(attention, top_k=n + 5), plain, rtol=1e-14)
    np.testing.assert_allclose(attention_rollout(attention, discard_below=0.0), plain, rtol=1e-14)


@FAST
@given(attentions(), st.integers(0, 2**32), st.sampled_from([0.0, 0.4]))
def test_permuting_positions_permutes_the_rollout(attention, seed, ratio):
    order = np.random.default_rng(seed).permutation(attention.shape[-1])
    permuted = attention[..., order, :][..., order]
    expected = attention_rollout(attention, discard_ratio=ratio)[:, order][..., order]
    np.testing.assert_allclose(
        attention_rollout(permuted, discard_ratio=ratio), expected, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("options", [{}, {"head_fusion": "max"}, {"discard_ratio": 0.5}, {"top_k": 2}])
def test_causal_attention_gives_a_lower_triangular_rollout(options):
    attention = reference.random_attention(3, 4, 2, 3, 6, causal=True)
    assert (np.triu(attention_rollout(attention, **options), 1) == 0).all()


@pytest.mark.parametrize("options", [{}, {"head_fusion": "max"}, {"discard_ratio": 0.5}, {"top_k": 2}])
@pytest.mark.parametrize("masked", [False, True])
def test_padding_is_irrelevant(options, masked):
    attention = reference.random_attention(4, 3, 1, 2, 5)
    padded = np.random.default_rng(5).dirichlet(np.ones(7), size=(3, 1, 2, 7))
    padded[..., :5, :] = 0
    padded[..., :5, :5] = attention
    mask = np.array([[True] * 5 + [False] * 2]) if masked else None
    found = attention_rollout(padded, mask=mask, **options)
    np.testing.assert_allclose(found[:, :5, :5], attention_rollout(attention, **options), rtol=1e-12)
    assert (found[:, :5, 5:] == 0).all()


def test_samples_do_not_mix():
    attention = reference.random_attention(6, 3, 3, 2, 5)
    whole = attention_rollout(attention, discard_ratio=0.3)
    for sample in range(3):
        alone = attention_rollout(attention[:, sample : sample + 1], discard_ratio=0.3)
        np.testing.assert_allclose(alone[0], whole[sample], rtol=1e-13)


@FAST
@given(attentions(), st.booleans())
def test_row_vector_engine_equals_the_matrix(attention, measured):
    layers, batch, _, n, _ = attention.shape
    rho = (
        np.random.default_rng(7).random((layers, batch, n)) if measured else np.full((layers, batch, n), 0.5)
    )
    row = np.tile(np.linspace(1, 2, n) / np.linspace(1, 2, n).sum(), (batch, 1))
    expected = (row[:, None] @ attention_rollout(attention, residual=rho))[:, 0]
    several = np.tile(np.eye(n), (batch, 1, 1))
    for layer in reversed(range(layers)):
        fused = fuse_heads(attention[layer])
        row, several = row_step(row, fused, rho[layer]), row_step(several, fused, rho[layer])
    np.testing.assert_allclose(row, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(several, attention_rollout(attention, residual=rho), rtol=1e-12, atol=1e-15)


def test_folding_layer_by_layer_equals_the_whole():
    attention = torch.from_numpy(reference.random_attention(8, 4, 2, 3, 6))
    rollout = None
    for layer in attention:
        rollout = rollout_step(rollout, add_residual(fuse_heads(layer), 0.5))
    assert_close(rollout, attention_rollout(attention), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"head_fusion": "min"}, {"discard_ratio": 0.4}, {"top_k": 2}, {"discard_below": 0.9}]
)
def test_blocks_of_queries_give_the_same_rows(options):
    attention = reference.random_attention(9, 1, 2, 3, 7)[0]
    whole = fuse_heads(attention, **options)
    blocks = [
        fuse_heads(attention[:, :, start : start + 3], query_offset=start, **options) for start in (0, 3, 6)
    ]
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole)


# --- single behaviours ------------------------------------------------------------------------


def test_discard_keeps_ties_at_the_threshold():
    row = np.array([[[[0.125, 0.125, 0.25, 0.5]]]])
    np.testing.assert_array_equal(fuse_heads(row, discard_ratio=0.25, query_offset=None), row[0])
    np.testing.assert_allclose(fuse_heads(row, discard_ratio=0.5), [[[0, 0, 1 / 3, 2 / 3]]])


def test_discard_ratio_counts_keys_exactly():
    row = np.arange(1, 101, dtype=float)[None, None, None] / 5050
    assert (fuse_heads(row, discard_ratio=0.29, query_offset=None) == 0).sum() == 29


def test_top_k_keeps_ties():
    row = np.array([[[[0.5, 0.2, 0.2, 0.1]]]])
    np.testing.assert_allclose(fuse_heads(row, top_k=2), [[[5 / 9, 2 / 9, 2 / 9, 0]]])


def test_discard_counts_only_unmasked_keys():
    causal = uniform_causal(1, 4)[0] * [1, 2, 3, 4]
    causal /= causal.sum(-1, keepdims=True)
    kept = fuse_heads(causal, discard_ratio=0.5)[0] > 0
    assert kept.sum(-1).tolist() == [1, 1, 2, 2]


def test_max_fusion_restores_the_row_before_the_residual():
    heads = np.array([[[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]])
    np.testing.assert_allclose(attention_rollout([heads], head_fusion="max")[0], [[0.75, 0.25], [0, 1]])


def test_empty_row_becomes_the_identity_row_and_is_counted():
    disjoint = np.array([[[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]])
    fused, empty = fuse_heads_counted(disjoint, head_fusion="min")
    assert fused.tolist() == [[[1.0, 0.0], [0.0, 1.0]]]
    assert empty.tolist() == [1]


def test_empty_row_of_cross_attention_stays_zero():
    fused, empty = fuse_heads_counted(np.zeros((1, 1, 2, 3)), query_offset=None)
    assert fused.sum() == 0
    assert empty.tolist() == [0]


def test_rows_with_a_sink_left_out_keep_their_sum_unless_normalised():
    attention = 0.8 * reference.random_attention(10, 1, 1, 2, 4)
    for fusion in ("mean", "max", "min"):
        kept = attention_rollout(attention, head_fusion=fusion, residual=0.0, top_k=2, normalize=False)
        np.testing.assert_allclose(kept.sum(-1), 0.8, rtol=1e-12)
    np.testing.assert_allclose(attention_rollout(attention).sum(-1), 1, rtol=1e-12)


def test_raw_attention_is_the_fused_layer():
    attention = reference.random_attention(11, 3, 2, 2, 4)
    np.testing.assert_allclose(raw_attention(attention), attention[-1].mean(1))
    np.testing.assert_allclose(raw_attention(attention, layer=0, head_fusion="max").sum(-1), 1)


def test_measured_residual_is_the_norm_ratio():
    hidden, added = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 5.0], [0.0, 0.0]]])
    assert measured_residual(hidden, added).tolist() == [[0.5, 1.0]]


def test_rollout_is_differentiable():
    scores = torch.from_numpy(np.random.default_rng(12).normal(size=(2, 1, 2, 3, 3))).requires_grad_()
    direction = torch.from_numpy(np.random.default_rng(13).normal(size=scores.shape))

    def corner(values):
        return attention_rollout(values.softmax(-1), head_fusion="max", discard_ratio=0.4)[0, 0, 2]

    (gradient,) = torch.autograd.grad(corner(scores), scores)
    with torch.no_grad():
        step = 1e-6
        numeric = (corner(scores + step * direction) - corner(scores - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=1e-6)
    assert abs(float(numeric)) > 1e-4


# --- kinds of array ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_torch_in_gives_torch_out_in_float32_or_better(dtype, expected):
    attention = torch.from_numpy(reference.random_attention(13, 3, 1, 2, 4)).to(dtype)
    found = attention_rollout(tuple(attention))
    assert isinstance(found, torch.Tensor)
    assert found.dtype == expected
    exact = attention_rollout(attention.double())
    assert_close(found.double(), exact, rtol=1e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "expected"), [("f8", "f8"), ("f4", "f4"), ("f2", "f4")])
def test_numpy_in_gives_numpy_out(dtype, expected):
    attention = reference.random_attention(14, 2, 1, 2, 4).astype(dtype)
    attention.flags.writeable = False
    found = attention_rollout(attention)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype(expected)


def test_arguments_are_not_written_to():
    attention = reference.random_attention(15, 2, 1, 1, 4)
    before = attention.copy()
    attention_rollout(attention, head_fusion="max", discard_ratio=0.5)
    per_head_rollout(attention)
    np.testing.assert_array_equal(attention, before)


# --- wrong arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": 1.5}, r"residual: expected weights in \[0, 1\], got 1.5"),
        ({"residual": [0.5]}, r"residual: expected a float, 2 weights .* got shape \(1,\)"),
        ({"residual": float("nan")}, r"residual: expected weights in \[0, 1\], got nan"),
        ({"discard_ratio": 1.0}, r"discard_ratio: expected a share in \[0, 1\), got 1.0"),
        ({"discard_ratio": -0.1}, r"discard_ratio: expected"),
        ({"discard_below": 2.0}, r"discard_below: expected a share in \[0, 1\], got 2.0"),
        ({"top_k": 0}, r"top_k: expected an integer >= 1, got 0"),
        ({"start_layer": 2}, r"start_layer: expected one of 0…1, got 2"),
        ({"head_fusion": "median"}, r"head_fusion: expected 'mean', 'max', 'min' or 'weighted'"),
        ({"head_fusion": "weighted"}, r"head_weights: expected with head_fusion='weighted'"),
        (
            {"head_fusion": "weighted", "head_weights": [[1.0, 1.0]] * 2},
            r"head_weights: expected a sum of 1, got 2",
        ),
        (
            {"head_fusion": "weighted", "head_weights": [[0.5, 0.5]]},
            r"head_weights: expected one vector for each",
        ),
        ({"head_fusion": "weighted", "head_weights": [[1.0]] * 2}, r"head_weights: expected 2 weights"),
        ({"mask": np.ones((1, 3), dtype=bool)}, r"mask: expected bool .*got torch.bool of shape \(1, 3\)"),
        ({"mask": np.ones((1, 4))}, r"mask: expected bool .*got torch.float64"),
    ],
)
def test_rollout_refuses_a_wrong_option(options, message):
    with pytest.raises(ValueError, match=message):
        attention_rollout(reference.random_attention(16, 2, 1, 2, 4), **options)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (["weights"], r"attentions\[0\]: expected \(batch, head, query, key\), got str"),
        ([], r"attentions: expected at least one layer, got none"),
        ((None, None), r"attentions\[0\]: expected \(batch, head, query, key\), got NoneType"),
        (np.ones((2, 3, 3)), r"attentions: expected \(layer, batch, head, query, key\)"),
        ([np.eye(2)[None]], r"attentions\[0\]: expected \(batch, head, query, key\), got shape \(1, 2, 2\)"),
        (
            [np.eye(2)[None, None], np.eye(3)[None, None]],
            r"attentions\[1\]: expected the \(batch, query, key\) of layer 0, \(1, 2, 2\), got \(1, 3, 3\)",
        ),
        (np.full((1, 1, 1, 2, 3), 1 / 3), r"attentions: expected as many queries as keys"),
        (np.full((1, 1, 1, 2, 2), np.nan), r"attention: expected finite weights, got NaN"),
        (stack([[1.5, -0.5], [0, 1]]), r"attention: expected weights >= 0, got -0.5"),
        (
            stack([[1, 0.5], [0, 0.5]]),
            r"attentions\[0\]: expected rows over keys that sum to at most 1, got 1.5",
        ),
        (np.array([[[[["a"]]]]]), r"expected real numbers, got dtype <U1"),
        ([[[[[1.0]]]]], r"attentions\[0\]: expected \(batch, head, query, key\), got list"),
        (np.ones((1, 1, 1, 0, 0)), r"expected at least one position"),
    ],
)
def test_rollout_refuses_wrong_attention(attention, message):
    with pytest.raises(ValueError, match=message):
        attention_rollout(attention)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fuse_heads(np.eye(2)), r"attention: expected \(batch, head, query, key\)"),
        (lambda: fuse_heads(np.ones((1, 1, 2, 2)) / 2, query_offset=1), r"query_offset: expected 2 queries"),
        (lambda: add_residual(np.ones((1, 2, 3)), 0.5), r"fused: expected square"),
        (
            lambda: add_residual(np.eye(2)[None], np.ones(2)),
            r"residual: expected a float or \(batch, query\)",
        ),
        (lambda: rollout_step(np.eye(3)[None], np.eye(2)[None]), r"rollout: expected \(batch, key, …\)"),
        (lambda: row_step(np.ones((1, 3)), np.eye(2)[None]), r"row: expected \(batch, query\)"),
        (lambda: row_step(np.ones((1, 3)), np.ones((1, 3, 2))), r"fused: expected square"),
        (lambda: raw_attention(uniform(2, 3), layer=2), r"layer: expected one of 2 layers, got 2"),
        (lambda: per_head_rollout(uniform(2, 3), layer=-3), r"layer: expected one of 2 layers, got -3"),
        (
            lambda: per_head_rollout([np.full((1, h, 2, 2), 0.5) for h in (1, 2)], same_head=True),
            r"attentions: expected the same number of heads",
        ),
        (lambda: measured_residual(np.ones((1, 2, 3)), np.ones((1, 2, 4))), r"attention_output: expected"),
    ],
)
def test_pieces_refuse_wrong_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
