"""Agreement with annotated regions: exact values, slow references, chance, arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.agreement import auprc, iou_at_area, map_agreement, pointing_game
from audit.records import Map, Positions, Probe
from audit.regions import expand_regions

FAST = settings(max_examples=60, deadline=None, derandomize=True)
MEASURES = [pointing_game, iou_at_area, auprc]


@st.composite
def cases(draw):
    """A map with or without ties, a region of whole or covered positions, and which positions count."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 9))
    weights = rng.dirichlet(np.ones(n)) if draw(st.booleans()) else rng.integers(0, 4, n).astype(float)
    region = rng.random(n) if draw(st.booleans()) else rng.integers(0, 2, n).astype(float)
    content = rng.random(n) < draw(st.sampled_from([0.6, 1.0]))
    sure = rng.integers(n)
    weights[sure], region[sure], content[sure] = 0.5 + weights[sure], 1.0, True
    return weights, region, content


# --- slow references --------------------------------------------------------------------------


def slow_pointing(weights, region, content):
    shown = [i for i in range(len(weights)) if content[i]]
    best = max(weights[i] for i in shown)
    drawn = [region[i] for i in shown if weights[i] == best]
    return sum(drawn) / len(drawn)


def slow_iou(weights, region, content):
    shown = [i for i in range(len(weights)) if content[i]]
    left = sum(region[i] for i in shown)
    kept = dict.fromkeys(shown, 0.0)
    for value in sorted({weights[i] for i in shown}, reverse=True):
        ties = [i for i in shown if weights[i] == value]
        part = min(1.0, left / len(ties))
        for i in ties:
            kept[i] = part
        left -= part * len(ties)
    both = sum(min(kept[i], region[i]) for i in shown)
    return both / sum(max(kept[i], region[i]) for i in shown)


def slow_auprc(weights, region, content):
    shown = [i for i in range(len(weights)) if content[i]]
    total, area, recall = sum(region[i] for i in shown), 0.0, 0.0
    for value in sorted({weights[i] for i in shown}, reverse=True):
        above = [i for i in shown if weights[i] >= value]
        hits = sum(region[i] for i in above)
        area += (hits / total - recall) * hits / len(above)
        recall = hits / total
    return area


SLOW = [slow_pointing, slow_iou, slow_auprc]


@FAST
@given(cases())
def test_fast_measures_equal_the_slow_references(case):
    weights, region, content = case
    for fast, slow in zip(MEASURES, SLOW, strict=True):
        assert fast(weights, region, content=content) == pytest.approx(slow(*case), abs=1e-12)


@FAST
@given(cases(), st.integers(0, 99))
def test_measures_follow_a_permutation_and_ignore_scale_and_lie_in_the_unit_interval(case, seed):
    weights, region, content = case
    order = np.random.default_rng(seed).permutation(len(weights))
    for measure in MEASURES:
        value = measure(weights, region, content=content)
        moved = measure(3 * weights[order], region[order], content=content[order])
        assert moved == pytest.approx(value, abs=1e-12)
        assert 0 <= value <= 1


# --- exact values -----------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
def test_a_perfect_map_gives_one(measure):
    assert measure([0.1, 0.5, 0.4, 0.0], [0, 1, 1, 0]) == 1


def test_the_opposite_map_misses():
    weights, region = [0.4, 0.0, 0.1, 0.5], [0, 1, 1, 0]
    assert pointing_game(weights, region) == 0
    assert iou_at_area(weights, region) == 0
    assert auprc(weights, region) == pytest.approx(0.5 * 1 / 3 + 0.5 * 2 / 4)


def test_a_uniform_map_gives_what_chance_gives():
    region = np.array([1, 0, 0, 1, 0, 0, 0, 0.0])
    assert pointing_game(np.ones(8), region) == pytest.approx(0.25)
    assert auprc(np.ones(8), region) == pytest.approx(0.25)
    assert iou_at_area(np.ones(8), region) == pytest.approx(0.25 / 1.75)


def test_random_maps_agree_by_chance_on_average():
    rng = np.random.default_rng(0)
    region = np.zeros(20)
    region[:5] = 1
    maps = rng.dirichlet(np.ones(20), 4000)
    hits = pointing_game(maps, region)
    assert np.mean(hits) == pytest.approx(0.25, abs=3.5 * np.sqrt(0.25 * 0.75 / 4000))


def test_another_area_is_filled_instead_of_the_regions_own():
    weights, region = [0.5, 0.3, 0.1, 0.1], [1, 1, 0, 0]
    assert iou_at_area(weights, region, area=0.25) == pytest.approx(1 / 2)
    assert iou_at_area(weights, region, area=1.0) == pytest.approx(2 / 4)
    content = [True, True, True, False]
    assert iou_at_area(weights, region, content=content, area=1.0) == pytest.approx(2 / 3)


def test_leading_axes_are_broadcast_and_shape_the_result():
    rng = np.random.default_rng(1)
    maps, region = rng.dirichlet(np.ones(6), (3, 4)), np.array([0, 1, 1, 0, 0.5, 0])
    for measure in MEASURES:
        values = measure(maps, region)
        assert values.shape == (3, 4)
        assert values[2, 1] == pytest.approx(measure(maps[2, 1], region), abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, np.nan], [1, 0]), "weights: expected finite"),
        (([0.5, -0.5], [1, 0]), "weights: expected finite"),
        (([0.5, 0.5], [1, 0, 0]), "region: expected 2 positions"),
        (([0.5, 0.5], [2, 0]), "region: expected values in"),
        (([0.5, 0.5], [0, 0]), "region: expected a position"),
        (([0.0, 0.0], [1, 0]), "weights: expected mass"),
        ((0.5, [1]), "weights: expected positions"),
        ((np.ones((2, 2)), np.ones((3, 2))), "region: expected leading axes"),
    ],
)
@pytest.mark.parametrize("measure", MEASURES)
def test_measures_refuse_what_they_cannot_use(measure, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(*arguments)


@pytest.mark.parametrize("area", [0.0, -1, 1.5, float("nan")])
def test_iou_refuses_an_area_that_is_no_share(area):
    with pytest.raises(ValueError, match="area"):
        iou_at_area([1.0], [1.0], area=area)


# --- maps of probes ---------------------------------------------------------------------------


def token_map(weights, probe_id="p"):
    starts = np.array([-1, 0, 4, 9], np.int32)
    positions = Positions(
        "token",
        np.array([True, False, False, False]),
        starts=starts,
        ends=np.array([-1, 3, 8, 12], np.int32),
        parts=np.array([-1, 0, 0, 0], np.int8),
    )
    return Map(probe_id, np.array(weights), positions)


def test_map_agreement_leaves_special_positions_and_unannotated_regions_out():
    probe = Probe("p", text="the film was", regions={"film": [[4, 8]]})
    (one,) = map_agreement(token_map([0.6, 0.1, 0.2, 0.1]), probe, expand_regions((), [probe]))
    assert (one.pointing, one.iou, one.auprc) == (1, 1, 1)
    assert one.size == pytest.approx(1 / 3)


def test_map_agreement_says_why_there_is_none():
    probes = [Probe("p", text="the film was", regions={"film": [[4, 8]]}), Probe("q", text="the film was")]
    regions = expand_regions((), probes)
    (absent,) = map_agreement(token_map([0.6, 0.1, 0.2, 0.1], "q"), probes[1], regions)
    assert (absent.pointing, absent.reason) == (None, "not annotated in the probe")
    (empty,) = map_agreement(token_map([1.0, 0.0, 0.0, 0.0]), probes[0], regions)
    assert (empty.auprc, empty.reason) == (None, "the map has no mass on content")
