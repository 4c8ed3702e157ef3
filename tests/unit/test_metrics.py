"""Measures of maps: exact values, SciPy, the slow reference, inequalities, arguments."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import energy_distance as scipy_energy_distance
from scipy.stats import spearmanr, wasserstein_distance

from audit import metrics
from tests import reference

FAST = settings(max_examples=30, deadline=None, derandomize=True)
PAIRED = [
    metrics.js_divergence,
    metrics.js_distance,
    metrics.kl_divergence,
    metrics.total_variation,
    metrics.hellinger,
    metrics.wasserstein,
    metrics.energy_distance,
    metrics.center_of_mass_shift,
    lambda p, q: metrics.earth_mover_distance(p, q, (1, np.shape(p)[-1])),
]


@st.composite
def pairs(draw, smallest=1):
    """Two maps of the same length, smooth or with zeros and ties."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(smallest, 12))
    if draw(st.booleans()):
        return tuple(rng.dirichlet(np.full(n, draw(st.sampled_from([0.05, 1.0, 50.0]))), 2))
    return tuple(rng.multinomial(8, np.full(n, 1 / n), 2) / 8)


# --- values -----------------------------------------------------------------------------------


def test_js_divergence_is_in_bits_and_the_distance_is_its_root():
    assert metrics.js_divergence([0.5, 0.5], [1, 0]) == pytest.approx(0.3113, abs=5e-5)
    assert metrics.js_distance([0.5, 0.5], [1, 0]) == pytest.approx(np.sqrt(0.311278), abs=1e-6)
    assert metrics.js_divergence([0, 1], [1, 0]) == 1


@FAST
@given(pairs())
def test_measures_equal_scipy_and_the_reference(pair):
    p, q = pair
    n = len(p)
    grid = np.arange(n) / max(n - 1, 1)
    smooth = [(m + 1e-6) / (1 + n * 1e-6) for m in pair]
    close = {"rel": 1e-9, "abs": 1e-9}
    assert metrics.js_divergence(p, q) == pytest.approx(reference.js_bits(p, q), **close)
    assert metrics.js_distance(p, q) == pytest.approx(jensenshannon(p, q, base=2), rel=1e-6, abs=1e-7)
    assert metrics.kl_divergence(p, q) == pytest.approx(reference.kl_bits(*smooth), **close)
    assert metrics.total_variation(p, q) == pytest.approx(sum(abs(p - q)) / 2, **close)
    assert metrics.hellinger(p, q) == pytest.approx(reference.hellinger(p, q), **close)
    assert metrics.wasserstein(p, q) == pytest.approx(wasserstein_distance(grid, grid, p, q), **close)
    assert metrics.energy_distance(p, q) == pytest.approx(
        scipy_energy_distance(grid, grid, p, q), rel=1e-6, abs=1e-7
    )
    assert metrics.center_of_mass_shift(p, q) == pytest.approx(grid @ q - grid @ p, **close)
    assert metrics.cosine_similarity(p, q) == pytest.approx(p @ q / np.sqrt(p @ p * (q @ q)), **close)
    for k in range(1, n + 1):
        assert metrics.top_k_overlap(p, q, k) == reference.top_k_overlap(list(p), list(q), k)


@FAST
@given(pairs(smallest=2))
def test_spearman_equals_scipy_and_is_none_for_a_constant_map(pair):
    p, q = pair
    found = metrics.spearman(p, q)
    if np.ptp(p) == 0 or np.ptp(q) == 0:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(p, q).statistic, abs=1e-12)


def test_spearman_masks_the_pairs_that_have_none():
    found = metrics.spearman([[0.5, 0.5], [0.2, 0.8]], [0.3, 0.7])
    assert found.mask.tolist() == [True, False]
    assert found.compressed().tolist() == pytest.approx([1.0])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_earth_mover_distance_equals_the_transport_problem(rows, columns, seed):
    p, q = np.random.default_rng(seed).dirichlet(np.full(rows * columns, 0.5), 2)
    at = np.array([(r, c) for r in range(rows) for c in range(columns)])
    steps = np.abs(at[:, None] - at[None]).sum(-1)
    expected = reference.transport_cost(p, q, steps) / max(rows + columns - 2, 1)
    assert metrics.earth_mover_distance(p, q, (rows, columns)) == pytest.approx(expected, abs=1e-8)


def test_earth_mover_distance_of_maps_that_differ_by_rounding_is_tiny_and_not_an_error():
    p = np.random.default_rng(3).dirichlet(np.ones(12))
    nudged = p.copy()
    nudged[5] = np.nextafter(nudged[5], 1)
    assert 0 <= metrics.earth_mover_distance(p, nudged, (3, 4)) < 1e-15


@FAST
@given(pairs())
def test_earth_mover_distance_on_one_row_is_wasserstein(pair):
    expected = metrics.wasserstein(*pair)
    assert metrics.earth_mover_distance(*pair, (1, len(pair[0]))) == pytest.approx(expected, abs=1e-8)
    assert metrics.earth_mover_distance(*pair, (len(pair[0]), 1)) == pytest.approx(expected, abs=1e-8)


def test_entropy_runs_from_one_position_to_uniform():
    assert metrics.entropy([0, 1, 0]) == 0
    assert metrics.entropy(np.full(7, 1 / 7)) == pytest.approx(1)
    assert metrics.entropy([0.5, 0.5, 0, 0]) == pytest.approx(0.5)
    assert metrics.entropy([1.0]) == 0


def test_sink_share_is_the_largest_weight_or_that_of_a_position():
    maps = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]
    assert metrics.sink_share(maps).tolist() == [0.7, 0.6]
    assert metrics.sink_share(maps, position=0).tolist() == [0.7, 0.1]


def test_depth_collapse_is_the_mean_over_pairs_of_rows():
    rows = np.random.default_rng(0).dirichlet(np.ones(5), size=(2, 4))
    expected = [
        np.mean([reference.js_bits(sample[i], sample[j]) for i in range(4) for j in range(i)])
        for sample in rows
    ]
    np.testing.assert_allclose(metrics.depth_collapse(rows), expected)
    assert metrics.depth_collapse(np.full((1, 3), 1 / 3)) == 0
    ends = metrics.depth_collapse(rows[0], max_rows=2)
    assert ends == pytest.approx(reference.js_bits(rows[0, 0], rows[0, 3]))


# --- inequalities -----------------------------------------------------------------------------


@FAST
@given(pairs())
def test_hellinger_brackets_total_variation(pair):
    h, tv = metrics.hellinger(*pair), metrics.total_variation(*pair)
    assert h**2 <= tv + 1e-12
    assert tv <= h * np.sqrt(2 - h**2) + 1e-12


@FAST
@given(pairs())
def test_js_bits_never_exceed_total_variation(pair):
    assert metrics.js_divergence(*pair) <= metrics.total_variation(*pair) + 1e-12


@FAST
@given(pairs())
def test_wasserstein_is_at_least_the_shift_of_the_centre_of_mass(pair):
    assert metrics.wasserstein(*pair) >= abs(metrics.center_of_mass_shift(*pair)) - 1e-12


@FAST
@given(pairs(), st.integers(0, 2**32))
def test_coarsening_to_regions_never_raises_js(pair, seed):
    n = len(pair[0])
    regions = np.eye(3)[np.random.default_rng(seed).integers(0, 3, n)]
    coarse = metrics.js_divergence(*(m @ regions for m in pair))
    assert coarse <= metrics.js_divergence(*pair) + 1e-12


@FAST
@given(pairs())
def test_identical_maps_are_at_distance_zero(pair):
    for p in pair:
        assert [measure(p, p) for measure in PAIRED] == [0] * len(PAIRED)
        assert metrics.cosine_similarity(p, p) == 1
        assert metrics.top_k_overlap(p, p, 1) == 1
        assert metrics.spearman(p, p) in (None, pytest.approx(1))


@FAST
@given(pairs())
def test_distances_are_symmetric_and_bounded(pair):
    p, q = pair
    for measure in (metrics.js_distance, metrics.total_variation, metrics.hellinger, metrics.wasserstein):
        assert 0 <= measure(p, q) <= 1
        assert measure(p, q) == pytest.approx(measure(q, p), abs=1e-12)
    assert metrics.center_of_mass_shift(p, q) == pytest.approx(-metrics.center_of_mass_shift(q, p), abs=1e-12)


# --- other positions --------------------------------------------------------------------------


def test_spread_to_words_makes_two_tokenizers_comparable():
    words = [[0, 4], [5, 8]]
    coarse = metrics.spread_to_words([0.25, 0.75], [[0, 4], [5, 8]], words)
    fine = metrics.spread_to_words([0.125, 0.125, 0.25, 0.5], [[0, 2], [2, 4], [5, 6], [6, 8]], words)
    np.testing.assert_allclose(coarse, fine)
    np.testing.assert_allclose(metrics.spread_to_words([1.0], [[3, 6]], words), [1 / 3, 1 / 3])


@FAST
@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 2**32))
def test_resampling_a_grid_keeps_the_mass_and_the_uniform_map(sizes, seed):
    grid, target = tuple(sizes[:2]), tuple(sizes[2:])
    n, m = np.prod(grid), np.prod(target)
    resampled = metrics.resample_grid(np.random.default_rng(seed).dirichlet(np.ones(n), 2), grid, target)
    np.testing.assert_allclose(resampled.sum(-1), 1)
    np.testing.assert_allclose(metrics.resample_grid(np.full(n, 1 / n), grid, target), 1 / m)


def test_resampling_to_a_multiple_and_back_is_the_identity():
    p = np.random.default_rng(1).dirichlet(np.ones(6))
    there = metrics.resample_grid(p, (2, 3), (4, 9))
    np.testing.assert_allclose(metrics.resample_grid(there, (4, 9), (2, 3)), p)
    np.testing.assert_allclose(there.reshape(4, 9)[0, 0], p[0] / 6)


# --- shapes and arguments ---------------------------------------------------------------------


def test_leading_axes_are_vectorised_and_broadcast():
    before, after = np.random.default_rng(2).dirichlet(np.ones(6), size=(2, 3, 4)).astype(np.float32)
    measures = [
        *PAIRED,
        metrics.cosine_similarity,
        lambda p, q: metrics.top_k_overlap(p, q, 2),
        metrics.spearman,
    ]
    for measure in measures:
        found = measure(before, after)
        assert found.shape == (3, 4)
        for index in np.ndindex(3, 4):
            assert found[index] == pytest.approx(measure(before[index], after[index]), abs=1e-7)
        np.testing.assert_allclose(
            measure(before, after[0, 0])[2, 3], measure(before[2, 3], after[0, 0]), atol=1e-7
        )


def test_a_single_pair_gives_a_float():
    assert {type(measure(np.array([0.5, 0.5]), [0.1, 0.9])) for measure in PAIRED} == {float}


def test_no_pairs_give_an_empty_result():
    assert metrics.js_distance(np.empty((0, 4)), np.empty((0, 4))).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.js_distance([0.5, 0.5], [1.0]), r"q: expected 2 positions like p, got 1"),
        (lambda: metrics.js_distance([0.5, np.nan], [0.5, 0.5]), r"p: expected finite weights, got NaN"),
        (lambda: metrics.wasserstein([0.5, 0.5], [1.5, -0.5]), r"q: expected weights >= 0, got -0.5"),
        (lambda: metrics.hellinger([0.5, 0.4], [0.5, 0.5]), r"p: expected maps that sum to 1, got 0.9"),
        (lambda: metrics.entropy([]), r"p: expected positions along the last axis, got shape \(0,\)"),
        (lambda: metrics.entropy(1.0), r"p: expected positions along the last axis, got shape \(\)"),
        (
            lambda: metrics.js_distance(np.full((2, 2), 0.5), np.full((3, 2), 0.5)),
            r"q: expected leading axes like p, \(2, 2\), got \(3, 2\)",
        ),
        (
            lambda: metrics.kl_divergence([1], [1], smoothing=0),
            r"smoothing: expected a positive number, got 0",
        ),
        (lambda: metrics.top_k_overlap([1], [1], k=2), r"k: expected an integer in \[1, 1\], got 2"),
        (lambda: metrics.sink_share([1], position=1), r"position: expected one of 1 positions, got 1"),
        (
            lambda: metrics.earth_mover_distance([1], [1], (1, 2)),
            r"grid: expected rows × columns = 1 patches",
        ),
        (lambda: metrics.resample_grid([1], (1, 1), (0, 1)), r"grid: expected rows × columns = 0 patches"),
        (
            lambda: metrics.spread_to_words([1], [0, 1], [[0, 1]]),
            r"spans: expected \(1, 2\), got shape \(2,\)",
        ),
        (
            lambda: metrics.spread_to_words([1], [[0, 1]], [0, 1]),
            r"words: expected \(m, 2\), got shape \(2,\)",
        ),
        (lambda: metrics.depth_collapse([1.0]), r"rollout: expected \(..., query, key\), got shape \(1,\)"),
        (lambda: metrics.depth_collapse([[1.0]], max_rows=1), r"max_rows: expected an integer >= 2, got 1"),
    ],
)
def test_measures_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_the_measures_is_light():
    code = "import sys, audit.metrics; print({'scipy.stats', 'scipy.optimize', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
