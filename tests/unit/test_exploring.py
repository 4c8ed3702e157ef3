"""Statistics for looking around: adjusted p-values, signed ranks, and whole distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from audit.calibrate import benjamini_hochberg, sign_flip_max_t
from audit.records import Column, ShareTable
from audit.statistics.domain import compare_distributions, distances_of_labels, mmd_of_labels
from audit.statistics.resampling import wilcoxon_pvalues
from audit.statistics.tables import compare_tables


def table(values, prefix: str = "p") -> ShareTable:
    values = np.asarray(values, dtype=np.float64)
    columns = tuple(Column(f"r{i}") for i in range(values.shape[1]))
    return ShareTable(tuple(f"{prefix}{i}" for i in range(len(values))), columns, values)


def uniform(n: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((n, columns))


# --- many cells -------------------------------------------------------------------------------


def test_the_regions_of_all_probes_are_adjusted_by_max_t():
    before, after = uniform(40, 6, 0), uniform(40, 6, 1)
    after[:, 2] += 0.3
    cells = [
        one for one in compare_tables(table(before), table(after), resamples=1999) if one.measure == "shift"
    ]
    expected = sign_flip_max_t(after - before, resamples=1999)
    assert [one.adjusted_pvalue for one in cells] == pytest.approx(expected.tolist(), abs=0.03)
    assert all(one.adjusted_pvalue >= one.pvalue for one in cells)
    assert cells[2].adjusted_pvalue < 0.05


def test_max_t_is_the_same_for_more_columns_than_a_block():
    random = np.random.default_rng(3)
    before = random.random((12, 700))
    after = before + 0.01 * random.standard_normal((12, 700))
    cells = [
        one for one in compare_tables(table(before), table(after), resamples=199) if one.measure == "shift"
    ]
    strongest = min(cells, key=lambda one: one.adjusted_pvalue)
    assert strongest.adjusted_pvalue > 0.05  # among 700 columns of 12 probes nothing stands out
    assert strongest.pvalue < 0.05


def test_segments_times_regions_are_adjusted_by_benjamini_hochberg():
    before, after = uniform(60, 3, 0), uniform(60, 3, 1)
    after[::3, 1] += 0.5
    segments = {"class": ["a", "b", "c"] * 20}
    cells = compare_tables(table(before), table(after), segments=segments, resamples=999)
    shifts = [one for one in cells if one.measure == "shift" and one.segment is not None]
    assert len(shifts) == 9
    expected = benjamini_hochberg([one.pvalue for one in shifts])
    assert [one.adjusted_pvalue for one in shifts] == pytest.approx(expected.tolist())
    found = [(one.segment, one.region) for one in shifts if one.adjusted_pvalue < 0.05]
    assert found == [("class=a", "r1")]


def test_family_error_over_segments_is_held():
    wrong = []
    for seed in range(60):
        before, after = uniform(30, 4, 2 * seed), uniform(30, 4, 2 * seed + 1)
        cells = compare_tables(
            table(before), table(after), segments={"s": ["a", "b"] * 15}, resamples=99, seed=seed
        )
        wrong.append(any((one.adjusted_pvalue or 1) <= 0.05 for one in cells if one.segment))
    assert np.mean(wrong) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 60)


@pytest.mark.parametrize("n", [8, 40, 300])
def test_wilcoxon_is_scipys_column_by_column(n):
    differences = uniform(n, 4, 5) - 0.4
    differences[: n // 2, 1] = np.nan
    differences[:3, 2] = 0.0
    expected = []
    for column in differences.T:
        values = column[~np.isnan(column)]
        expected.append(stats.wilcoxon(values).pvalue)
    np.testing.assert_allclose(wilcoxon_pvalues(differences), expected)


def test_wilcoxon_is_undefined_without_any_change_and_for_groups():
    same = uniform(20, 2, 0)
    cells = compare_tables(table(same), table(same), resamples=99)
    assert {one.wilcoxon_pvalue for one in cells} == {None}
    grouped = compare_tables(table(same), table(uniform(20, 2, 1)), groups=["a", "b"] * 10, resamples=99)
    assert {one.wilcoxon_pvalue for one in grouped} == {None}
    plain = [
        one
        for one in compare_tables(table(same), table(uniform(20, 2, 1)), resamples=99)
        if one.measure == "shift"
    ]
    assert all(one.wilcoxon_pvalue is not None and one.effect_size is not None for one in plain)


# --- distributions ----------------------------------------------------------------------------


def test_ks_and_energy_are_scipys():
    one, two = uniform(31, 1, 0)[:, 0].round(1), uniform(47, 1, 1)[:, 0].round(1) ** 2
    labels = np.repeat([False, True], [31, 47])[None]
    ks, energy = distances_of_labels(np.concatenate([one, two]), labels)
    assert ks[0] == pytest.approx(stats.ks_2samp(one, two).statistic)
    assert energy[0] == pytest.approx(stats.energy_distance(one, two))


def test_mmd_is_the_published_double_sum():
    points = uniform(9, 3, 0)
    labels = np.arange(9) >= 4
    distances = np.array([[((a - b) ** 2).sum() for b in points] for a in points])
    kernel = np.exp(-distances / (2 * np.median(distances[distances > 0])))
    x, y = ~labels, labels
    slow = kernel[np.ix_(x, x)].mean() + kernel[np.ix_(y, y)].mean() - 2 * kernel[np.ix_(x, y)].mean()
    assert mmd_of_labels(points, labels[None])[0] == pytest.approx(np.sqrt(slow))


def test_a_change_of_spread_alone_is_seen_by_the_distributions_and_not_by_the_mean():
    random = np.random.default_rng(0)
    before, after = (
        0.5 + 0.01 * random.standard_normal((200, 1)),
        0.5 + 0.05 * random.standard_normal((200, 1)),
    )
    cells = {
        one.measure: one for one in compare_distributions(table(before), table(after, "q"), resamples=999)
    }
    assert max(cells[name].pvalue for name in ("ks", "energy_distance", "mmd")) < 0.01
    shift = compare_tables(table(before), table(after, "q"), paired=False, resamples=999)[0]
    assert shift.pvalue > 0.05


@pytest.mark.parametrize("grouped", [False, True])
def test_pvalues_of_distributions_are_uniform_under_the_null(grouped):
    found = {"ks": [], "energy_distance": [], "mmd": []}
    groups = ([f"g{i // 3}" for i in range(24)], [f"h{i // 3}" for i in range(30)]) if grouped else None
    for seed in range(150):
        random = np.random.default_rng(seed)
        sides = [random.random((n, 2)) for n in (24, 30)]
        if grouped:  # probes of a group move together
            sides = [0.3 * side + np.repeat(random.random((len(side) // 3, 2)), 3, axis=0) for side in sides]
        cells = compare_distributions(
            table(sides[0]), table(sides[1], "q"), groups=groups, resamples=199, seed=seed
        )
        for name, values in found.items():
            values.append(next(one.pvalue for one in cells if one.measure == name))
    for name, values in found.items():
        assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.08), name
        assert np.mean(values) == pytest.approx(0.5, abs=0.08), name


def test_distributions_of_missing_and_constant_columns_are_never_nan():
    before, after = np.full((10, 3), 0.2), np.full((12, 3), 0.2)
    before[:, 1] = np.nan
    after[:4, 2] = np.nan
    cells = compare_distributions(table(before), table(after, "q"), resamples=99)
    assert "nan" not in repr(cells).lower()
    gone = [one for one in cells if one.region == "r1"]
    assert {one.value for one in gone} == {None}
    assert all("missing in every probe" in str(one.reason) for one in gone)
    same = [one for one in cells if one.region == "r0"]
    assert {(one.value, one.pvalue) for one in same} == {(0.0, 1.0)}
    partly = next(one for one in cells if one.region == "r2")
    assert (partly.n_probes, partly.n_missing) == (8, 4)
