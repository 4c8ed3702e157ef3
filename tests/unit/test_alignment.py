"""Maps over other tokenizers, patch grids and frames are compared on common positions."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit import metrics
from audit.alignment import align_maps, common_positions, same_positions
from audit.compare import compare_maps
from audit.pipeline.map_measures import MEASURES
from audit.records import Map, Positions
from audit.statistics.measures import MapMeasure

TEXT = "the film was not so good, and dull; she liked it"


def tokens(spans, weights=None, *, special=(), parts=None, causal=False, layers=None) -> Map:
    n = len(spans)
    starts, ends = np.array(spans, np.int32).T
    mask = np.isin(np.arange(n), special)
    places = Positions("token", mask, starts, ends, parts, causal=causal)
    return Map("p", np.full(n, 1 / n) if weights is None else np.array(weights), places, layers=layers)


def grid(rows, columns, weights, *, frame=(0.0, 0.0, 1.0, 1.0)) -> Map:
    """Return a map of a [CLS] token and rows × columns patches that cover `frame`."""
    left, top, right, bottom = frame
    x, y = np.linspace(left, right, columns + 1), np.linspace(top, bottom, rows + 1)
    boxes = [[0.0] * 4] + [[x[c], y[r], x[c + 1], y[r + 1]] for r in range(rows) for c in range(columns)]
    special = np.arange(len(boxes)) == 0
    places = Positions("patch", special, boxes=np.array(boxes, np.float32), grid=(rows, columns))
    return Map("p", np.asarray(weights), places)


@st.composite
def tokenized(draw):
    """Draw a way to cut the text into tokens, some of them across several words, and a map on them."""
    cuts = sorted(draw(st.sets(st.integers(1, len(TEXT) - 1), min_size=3, max_size=25)))
    spans = [(a, b) for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True) if TEXT[a:b].strip()]
    trimmed = [(a + len(TEXT[a:b]) - len(TEXT[a:b].lstrip()), a + len(TEXT[a:b].rstrip())) for a, b in spans]
    weights = np.array(
        draw(st.lists(st.integers(1, 50), min_size=len(trimmed), max_size=len(trimmed))), float
    )
    return tokens(trimmed, weights / weights.sum())


def slow_pieces(maps) -> list[set[int]]:
    """Return the words, as sets of characters: tokens that share a character belong together."""
    pieces = [
        set(range(s, e)) for m in maps for s, e in zip(m.positions.starts, m.positions.ends, strict=True)
    ]
    merged: list[set[int]] = []
    for piece in pieces:
        touching = [other for other in merged if other & piece]
        merged = [other for other in merged if not other & piece] + [piece.union(*touching)]
    return sorted(merged, key=min)


@given(tokenized(), tokenized())
def test_words_are_the_finest_pieces_that_no_token_crosses_and_keep_all_mass(one, two):
    words = slow_pieces([one, two])
    found = align_maps([one, two])
    for given_map, aligned in zip((one, two), found, strict=True):
        own = zip(given_map.positions.starts, given_map.weights, strict=True)
        mass = [(start, weight) for start, weight in own]
        expected = [sum(weight for start, weight in mass if start in word) for word in words]
        if len(words) == 1:
            assert np.isnan(aligned.weights).all()  # nothing can move on one position
        else:
            assert aligned.weights == pytest.approx(expected)


@given(tokenized(), tokenized(), st.integers(0, 2**16))
def test_aligned_maps_bound_what_any_region_of_words_can_have_moved(one, two, seed):
    words = slow_pieces([one, two])
    p, q = (each.weights for each in align_maps([one, two]))
    if len(words) == 1:
        return
    chosen = np.random.default_rng(seed).random(len(words)) < 0.5
    region = set().union(*(word for word, inside in zip(words, chosen, strict=True) if inside))
    shares = [
        sum(w for s, w in zip(m.positions.starts, m.weights, strict=True) if s in region) for m in (one, two)
    ]
    assert abs(shares[1] - shares[0]) <= metrics.total_variation(p, q) + 1e-12
    assert (shares[0], shares[1]) == pytest.approx((p[chosen].sum(), q[chosen].sum()))


def test_special_tokens_and_the_first_of_causal_models_are_left_out():
    bert = tokens([(-1, -1), (0, 3), (4, 8), (-1, -1)], [0.4, 0.3, 0.1, 0.2], special=(0, 3))
    gpt = tokens([(0, 3), (4, 6), (6, 8)], [0.5, 0.2, 0.3], causal=True)
    one, two = align_maps([bert, gpt])
    assert one.weights == pytest.approx([0.75, 0.25])
    assert two.weights == pytest.approx([0.0, 1.0])


def test_the_second_text_does_not_meet_the_first():
    pair = tokens([(0, 3), (0, 5)], [0.2, 0.8], parts=np.array([0, 1], np.int8))
    other = tokens([(0, 3), (0, 2), (2, 5)], [0.5, 0.3, 0.2], parts=np.array([0, 1, 1], np.int8))
    one, two = align_maps([pair, other])
    assert one.positions.parts.tolist() == [0, 1]
    assert (one.positions.starts.tolist(), one.positions.ends.tolist()) == ([0, 0], [3, 5])
    assert one.weights == pytest.approx([0.2, 0.8])
    assert two.weights == pytest.approx([0.5, 0.5])


def test_layers_are_aligned_like_the_whole_map_and_a_layer_without_mass_is_undefined():
    layers = np.array([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])
    one = tokens([(0, 1), (1, 3), (4, 6)], [0.2, 0.3, 0.5], layers=layers, special=(0,))
    two = tokens([(1, 3), (4, 5), (5, 6)])
    aligned = align_maps([one, two])[0]
    assert aligned.layers[0] == pytest.approx([2 / 9, 7 / 9])
    assert np.isnan(aligned.layers[1]).all()


def test_a_finer_grid_is_summed_to_the_coarser_one():
    weights = np.random.default_rng(0).dirichlet(np.ones(17))
    fine, coarse = grid(4, 4, weights), grid(2, 2, [0.2] * 5)
    one, two = align_maps([fine, coarse])
    summed = weights[1:].reshape(2, 2, 2, 2).sum(axis=(1, 3)).ravel()
    assert one.weights == pytest.approx(summed / summed.sum(), rel=1e-5)
    assert two.weights == pytest.approx([0.25] * 4)
    assert one.positions.grid == two.positions.grid == (2, 2)


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (4, 4), (7, 2)])
def test_grids_over_the_whole_image_are_resampled_by_area(rows, columns):
    weights = np.random.default_rng(1).dirichlet(np.ones(rows * columns))
    one, two = align_maps([grid(rows, columns, [0.0, *weights]), grid(3, 3, [0.0, *[1 / 9] * 9])])
    common = (min(rows, 3), min(columns, 3))
    assert one.weights == pytest.approx(metrics.resample_grid(weights, (rows, columns), common), abs=1e-6)
    assert two.weights == pytest.approx(np.full(common[0] * common[1], 1 / (common[0] * common[1])), rel=1e-5)


def test_a_crop_is_laid_where_it_was_cut():
    whole = grid(4, 4, [0.0, *[1 / 16] * 16])
    crop = grid(2, 2, [0.0, 1.0, 0.0, 0.0, 0.0], frame=(0.25, 0.25, 0.75, 0.75))
    one, two = align_maps([whole, crop])
    assert two.positions.grid == (4, 4)
    assert two.positions.boxes[5] == pytest.approx([0.25, 0.25, 0.5, 0.5])
    expected = np.zeros((4, 4))
    expected[1, 1] = 1.0  # the crop's first patch, which is the whole image's second in either direction
    assert two.weights.reshape(4, 4) == pytest.approx(expected, abs=1e-6)
    assert one.weights == pytest.approx([1 / 16] * 16)


def test_frames_share_their_time():
    def frames(edges, weights):
        times = np.array(list(pairwise(edges)), np.float32)
        return Map("p", np.array(weights), Positions("frame", np.zeros(len(times), bool), times=times))

    one, two = align_maps([frames([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]), frames([0, 2, 4], [0.5, 0.5])])
    assert one.weights == pytest.approx([0.3, 0.7])
    assert two.weights == pytest.approx([0.5, 0.5])


def test_equal_lengths_of_other_tokens_are_not_the_same_positions():
    one, two = tokens([(0, 3), (4, 8)]), tokens([(0, 5), (5, 8)])
    assert not same_positions(one.positions, two.positions)
    with pytest.raises(ValueError, match=r"audit\.align_maps"):
        compare_maps([one], [two])


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (tokens([(0, 3), (4, 8)]), grid(1, 1, [0.5, 0.5]), "patch and token"),
        (tokens([(0, 3)]), Map("p", np.ones(1), Positions("token", np.zeros(1, bool))), "character spans"),
        (grid(1, 1, [0.5, 0.5]), Map("p", np.ones(1), Positions("patch", np.zeros(1, bool))), "boxes"),
        (
            Map("p", np.ones(1), Positions("frame", np.zeros(1, bool))),
            Map("p", np.ones(1), Positions("frame", np.zeros(1, bool))),
            "start and end",
        ),
    ],
)
def test_positions_that_do_not_know_where_they_lie_are_refused(one, two, message):
    with pytest.raises(ValueError, match=message):
        align_maps([one, two])


def test_maps_without_any_content_have_no_common_positions():
    shares, places = common_positions([tokens([(-1, -1)], special=(0,)).positions])
    assert (shares[0].shape, len(places)) == ((1, 0), 0)


def test_the_configuration_takes_exactly_the_measures_that_are_computed():
    assert set(get_args(MapMeasure)) == set(MEASURES)
