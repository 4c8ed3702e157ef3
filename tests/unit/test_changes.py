"""Change points against every segmentation, known series, and the false-alarm rate that is promised."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from audit.statistics.changes import FACTOR, FEWEST, change_points, noise_scale


def slowly(values: list[float], scale: float) -> tuple[int, ...]:
    """Return the best of all segmentations, tried one by one."""
    n, best, found = len(values), np.inf, ()
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            parts = np.split(np.array(values) / scale, cuts)
            cost = sum(((part - part.mean()) ** 2).sum() for part in parts) + FACTOR * np.log(n) * count
            if cost < best - 1e-12:
                best, found = cost, cuts
    line = np.polyfit(np.arange(n), np.array(values) / scale, 1, full=True)[1]
    return () if line.sum() + FACTOR * np.log(n) <= best else found


@pytest.mark.parametrize("seed", range(12))
def test_change_points_are_those_of_the_best_segmentation(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(FEWEST, 10))
    values = list(
        rng.normal(size=n) + 4 * (np.arange(n) >= n // 2) - 6 * (np.arange(n) >= n - 2) * (seed % 2)
    )
    assert change_points(values, scale=1.0) == slowly(values, 1.0)


def test_a_step_and_its_return_are_found_where_they_are():
    values = [0.2] * 6 + [0.3] * 4 + [0.2] * 5
    noisy = np.array(values) + 0.004 * np.tile([1, -1, 0], 5)
    assert change_points(noisy, scale=noise_scale(noisy)) == (6, 10)


def test_a_slow_drift_is_no_step():
    drift = np.linspace(0.2, 0.24, 12)
    assert change_points(drift, scale=noise_scale(drift, known=0.004)) == ()


@pytest.mark.parametrize("n", [5, 6, 8, 12, 20, 50, 200])
def test_noise_has_a_change_point_in_at_most_one_of_twenty_series(n):
    rng = np.random.default_rng(n)
    repetitions = 2000 if n < 100 else 300
    found = sum(bool(change_points(rng.normal(size=n), scale=1.0)) for _ in range(repetitions))
    assert found / repetitions <= 0.05


def test_a_change_of_the_level_does_not_matter_and_the_unit_neither():
    values = np.r_[np.zeros(5), np.ones(5)] + 0.05 * np.tile([1.0, -1.0], 5)
    assert change_points(1e6 + 1e3 * values, scale=50.0) == change_points(values, scale=0.05) == (5,)


def test_few_values_have_no_change_and_bad_ones_are_refused():
    assert change_points([0.0, 9.0, 0.0, 9.0], scale=0.1) == ()
    with pytest.raises(ValueError, match="scale"):
        change_points(np.zeros(6), scale=0.0)
    with pytest.raises(ValueError, match="values"):
        change_points([0.0] * 5 + [np.nan], scale=1.0)
