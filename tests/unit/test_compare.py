"""Cells against slow references, and every degenerate case by its name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from audit import metrics
from audit.calibrate import replicate_test
from audit.compare import compare_distances, compare_interaction, compare_maps, compare_tables
from audit.records import Cell, Column, Map, Positions, ShareTable
from audit.statistics import cells
from audit.statistics.resampling import (
    Units,
    bca_interval,
    bootstrap_means,
    collapse,
    encode_groups,
    percentile_interval,
    sign_flip_sums,
    sign_flips,
    two_sample_pvalues,
    variance_of_mean,
)

FAST = {"resamples": 199}


def table(values, *, ids=None, names=None) -> ShareTable:
    values = np.asarray(values, dtype=float)
    values = values[:, None] if values.ndim == 1 else values
    ids = ids or [f"p{i}" for i in range(len(values))]
    names = names or [f"r{i}" for i in range(values.shape[1])]
    return ShareTable(tuple(ids), tuple(Column(name) for name in names), values)


def shares(n=40, c=3, seed=0):
    return np.random.default_rng(seed).uniform(0.1, 0.4, (n, c))


def pick(cells, measure="shift", region="r0", **fields) -> Cell:
    [found] = [
        one
        for one in cells
        if (one.measure, one.region) == (measure, region)
        and all(getattr(one, key) == value for key, value in fields.items())
    ]
    return found


def no_nan(cells) -> None:
    assert "nan" not in repr(cells).lower()
    assert "inf" not in repr(cells).lower().replace("information", "")


# --- resampling -------------------------------------------------------------------------------


def test_bootstrap_is_the_mean_of_resampled_probes():
    values = shares(7, 2)
    rng = np.random.default_rng([5, 0])
    wanted = [values[rng.integers(0, 7, 7)].mean(axis=0) for _ in range(50)]
    found = bootstrap_means(collapse(values, None), resamples=50, seed=[5, 0])
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_cluster_bootstrap_resamples_whole_groups_and_skips_missing():
    values = shares(9, 2)
    values[[0, 4], 1] = np.nan
    codes = encode_groups(list("aabbbcccc"), 9)
    rng = np.random.default_rng([5, 0])
    wanted = []
    for _ in range(40):
        rows = np.concatenate([np.flatnonzero(codes == g) for g in rng.integers(0, 3, 3)])
        wanted.append(np.nanmean(values[rows], axis=0))
    found = bootstrap_means(collapse(values, codes), resamples=40, seed=[5, 0])
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_resampling_does_not_depend_on_the_chunk(chunk):
    values = shares(31, 3)
    values[::5, 1] = np.nan
    units, other = collapse(values, None), collapse(shares(12, 3, seed=1), None)
    options = {"resamples": 100, "seed": [1, 2]}
    np.testing.assert_allclose(
        bootstrap_means(units, chunk=chunk, **options), bootstrap_means(units, **options), rtol=1e-13
    )
    flips = [np.concatenate(list(sign_flip_sums(units.sums, chunk=c, **options))) for c in (chunk, None)]
    np.testing.assert_allclose(*flips, rtol=1e-10, atol=1e-13)
    np.testing.assert_array_equal(
        two_sample_pvalues(units, other, chunk=chunk, **options), two_sample_pvalues(units, other, **options)
    )


def test_more_resamples_start_with_the_same_ones():
    units = collapse(shares(), None)
    few, many = (bootstrap_means(units, resamples=n, seed=[0, 0]) for n in (50, 300))
    np.testing.assert_allclose(many[:50], few, rtol=1e-13)


def test_bca_interval_agrees_with_scipy():
    rng = np.random.default_rng(0)
    values = rng.exponential(1, (25, 1))
    units = collapse(values, None)
    draws = bootstrap_means(units, resamples=20000, seed=[0, 0])
    low, high = bca_interval(draws, units, 0.05)
    wanted = stats.bootstrap(
        (values[:, 0],), np.mean, confidence_level=0.9, n_resamples=20000, method="BCa", rng=1
    ).confidence_interval
    assert (low[0], high[0]) == pytest.approx((wanted.low, wanted.high), rel=0.02)


def test_percentile_interval_of_a_normal_mean_is_students():
    # For normal draws the expanded percentile interval is mean ± t·s/√n.
    z = stats.norm.ppf((np.arange(9999) + 0.5) / 9999)
    n, s = 8, 2.0
    draws = 1 + s * math.sqrt((n - 1) / n) / math.sqrt(n) * z[:, None]
    low, high = percentile_interval(draws, np.array([n]), 0.05)
    half = stats.t(n - 1).ppf(0.95) * s / math.sqrt(n)
    assert (low[0], high[0]) == pytest.approx((1 - half, 1 + half), rel=0.005)


def test_sign_flip_pvalue_matches_all_sign_patterns():
    x = np.random.default_rng(2).normal(0.5, 1, 10)
    signs = np.array(list(itertools.product([-1, 1], repeat=10)))
    exact = (np.abs(signs @ x) >= abs(x.sum()) - 1e-12).mean()
    found = sign_flips(collapse(x[:, None], None), resamples=20000, seed=[0, 1]).pvalue
    assert found[0] == pytest.approx(exact, abs=0.01)


def test_two_sample_pvalue_matches_all_relabellings():
    rng = np.random.default_rng(2)
    x, y = rng.normal(0, 1, 6), rng.normal(1, 1, 5)
    pooled, observed = np.concatenate([x, y]), y.mean() - x.mean()
    null = []
    for chosen in itertools.combinations(range(11), 5):
        mask = np.isin(np.arange(11), chosen)
        null.append(pooled[mask].mean() - pooled[~mask].mean())
    exact = (np.abs(null) >= abs(observed) - 1e-12).mean()
    one, two = collapse(x[:, None], None), collapse(y[:, None], None)
    assert two_sample_pvalues(one, two, resamples=20000, seed=[0, 1])[0] == pytest.approx(exact, abs=0.01)


def test_variance_of_mean_is_s2_over_n_and_reduces_groups_to_their_sums():
    x = shares(30, 1)
    assert variance_of_mean(collapse(x, None))[0] == pytest.approx(np.var(x, ddof=1) / 30)
    codes = encode_groups([f"g{i // 3}" for i in range(30)], 30)
    means = x.reshape(10, 3).mean(axis=1)
    assert variance_of_mean(collapse(x, codes))[0] == pytest.approx(np.var(means, ddof=1) / 10)


def test_groups_encode_a_probe_without_group_as_its_own():
    assert encode_groups(["a", None, "a", "1", None], 5).tolist() == [0, 1, 0, 2, 3]
    assert encode_groups([None, None], 2) is None
    with pytest.raises(ValueError, match="one entry for each of 3 probes"):
        encode_groups(["a"], 3)


# --- paired tables ----------------------------------------------------------------------------


def test_shift_level_and_ratio_are_means_over_pairs():
    before, after = shares(seed=1), shares(seed=2)
    cells = compare_tables(table(before), table(after), **FAST)
    assert len(cells) == 9
    shift, level, ratio = (pick(cells, m) for m in ("shift", "level", "ratio"))
    d = after[:, 0] - before[:, 0]
    assert shift.value == pytest.approx(d.mean())
    assert shift.sd == pytest.approx(d.std(ddof=1))
    assert shift.effect_size == pytest.approx(d.mean() / d.std(ddof=1))
    assert (shift.before, shift.after) == pytest.approx((before[:, 0].mean(), after[:, 0].mean()))
    assert level.value == pytest.approx(after[:, 0].mean())
    assert ratio.value == pytest.approx(after[:, 0].mean() / before[:, 0].mean())
    for one in (shift, level, ratio):
        assert one.interval[0] < one.value < one.interval[1]
        assert (one.n_probes, one.n_missing, one.n_clusters, one.reason) == (40, 0, None, None)
    no_nan(cells)


def test_intervals_cover_with_level_one_minus_two_alpha():
    before, after = shares(200, 1, seed=1), shares(200, 1, seed=2)
    d = (after - before)[:, 0]
    half = stats.t(199).ppf(0.95) * d.std(ddof=1) / math.sqrt(200)
    found = pick(compare_tables(table(before), table(after), resamples=9999))
    assert found.interval == pytest.approx((d.mean() - half, d.mean() + half), rel=0.05)


def test_ratio_interval_agrees_with_the_delta_method():
    rng = np.random.default_rng(0)
    before = rng.uniform(0.2, 0.4, 300)
    after = before * 1.5 + rng.normal(0, 0.02, 300)
    found = pick(compare_tables(table(before), table(after), resamples=4999), "ratio")
    influence = (after - found.value * before) / before.mean()
    half = stats.norm.ppf(0.95) * influence.std(ddof=1) / math.sqrt(300)
    assert found.interval == pytest.approx((found.value - half, found.value + half), rel=0.002)


def test_pairs_are_joined_by_id_and_columns_by_name():
    before, after = shares(seed=1), shares(seed=2)
    straight = compare_tables(table(before), table(after), **FAST)
    order = np.random.default_rng(0).permutation(40)
    mixed = table(after[order][:, [2, 0, 1]], ids=[f"p{i}" for i in order], names=["r2", "r0", "r1"])
    assert compare_tables(table(before), mixed, **FAST) == straight


def test_equal_arguments_give_equal_cells_and_seeds_differ():
    pair = table(shares(seed=1)), table(shares(seed=2))
    assert compare_tables(*pair, **FAST) == compare_tables(*pair, **FAST)
    assert compare_tables(*pair, **FAST) != compare_tables(*pair, seed=1, **FAST)


def test_column_blocks_do_not_change_the_result(monkeypatch):
    pair = table(shares(c=5, seed=1)), table(shares(c=5, seed=2))
    whole = compare_tables(*pair, **FAST)
    monkeypatch.setattr(cells, "_BLOCK", 2)
    for one, two in zip(whole, compare_tables(*pair, **FAST), strict=True):
        assert one.interval == pytest.approx(two.interval, rel=1e-12)
        assert (one.measure, one.region, one.pvalue) == (two.measure, two.region, two.pvalue)


def test_missing_entries_drop_the_pair_in_that_column_only():
    before, after = shares(seed=1), shares(seed=2)
    before[0, 0], after[1, 0] = np.nan, np.nan
    cells = compare_tables(table(before), table(after), **FAST)
    found = pick(cells)
    assert (found.n_probes, found.n_missing) == (38, 2)
    assert found.value == pytest.approx((after - before)[2:, 0].mean())
    assert found.before == pytest.approx(before[2:, 0].mean())
    assert pick(cells, region="r1").n_missing == 0
    no_nan(cells)


def test_groups_widen_the_interval_and_are_counted():
    rng = np.random.default_rng(0)
    d = np.repeat(rng.normal(0.02, 0.05, 20), 10) + rng.normal(0, 0.005, 200)
    before = np.full(200, 0.2)
    groups = [f"g{i // 10}" for i in range(200)]
    alone = pick(compare_tables(table(before), table(before + d), **FAST))
    grouped = pick(compare_tables(table(before), table(before + d), groups=groups, **FAST))
    assert grouped.value == pytest.approx(alone.value)
    assert np.ptp(grouped.interval) > 2 * np.ptp(alone.interval)
    assert (grouped.n_probes, grouped.n_clusters) == (200, 20)
    assert grouped.pvalue > alone.pvalue


def test_segments_equal_a_comparison_of_their_probes():
    before, after = shares(seed=1), shares(seed=2)
    language = ["en", "de"] * 20
    replicate = shares(seed=3)
    cells = compare_tables(
        table(before),
        table(after),
        [table(replicate)],
        segments={"language": language, "source": [None] * 39 + ["web"]},
        groups=[f"g{i // 4}" for i in range(40)],
        **FAST,
    )
    assert {one.segment for one in cells} == {None, "language=en", "language=de", "source=web"}
    ids = [f"p{i}" for i in range(0, 40, 2)]
    alone = compare_tables(
        table(before[::2], ids=ids),
        table(after[::2], ids=ids),
        [table(replicate[::2], ids=ids)],
        groups=[f"g{i // 4}" for i in range(0, 40, 2)],
        **FAST,
    )
    found = pick(cells, segment="language=en")
    family = found.adjusted_pvalue  # over all segments, not over the columns of one
    assert found == replace(pick(alone), segment="language=en", adjusted_pvalue=family)
    assert pick(cells, segment="source=web").reason == "one probe: no interval"
    no_nan(cells)


def test_bca_is_chosen_by_name():
    before = np.full(30, 0.2)
    after = before + np.random.default_rng(0).exponential(0.1, 30)
    pair = table(before), table(after)
    percentile = pick(compare_tables(*pair, interval="percentile", resamples=1999))
    bca = pick(compare_tables(*pair, interval="bca", resamples=1999))
    assert bca.interval[1] > percentile.interval[1]


# --- replicates -------------------------------------------------------------------------------


def test_replicates_give_the_same_measures_and_the_excess():
    before, after = shares(seed=1), shares(seed=2)
    others = [shares(seed=10 + i) for i in range(4)]
    cells = compare_tables(table(before), table(after), [table(one) for one in others], **FAST)
    shift, level, ratio = (pick(cells, m) for m in ("shift", "level", "ratio"))
    assert shift.replicates == pytest.approx([(one - before)[:, 0].mean() for one in others])
    assert level.replicates == pytest.approx([one[:, 0].mean() for one in others])
    assert ratio.replicates == pytest.approx([one[:, 0].mean() / before[:, 0].mean() for one in others])
    difference = (after - np.mean(others, axis=0))[:, 0]
    assert shift.probe_variance == pytest.approx(difference.var(ddof=1) / 40)
    assert level.probe_variance == pytest.approx(shift.probe_variance)
    scaled = (difference - difference.mean() * before[:, 0] / before[:, 0].mean()) / before[:, 0].mean()
    assert ratio.probe_variance == pytest.approx(scaled.var(ddof=1) / 40)
    wanted = replicate_test(shift.value, shift.replicates, probe_variance=shift.probe_variance, probe_df=39)
    assert shift.excess.interval == pytest.approx(wanted.interval)
    assert shift.excess.pvalue == pytest.approx(wanted.pvalue)


def test_weak_replicates_are_shown_and_left_out_of_the_test():
    before, after = shares(seed=1), shares(seed=2)
    others = [table(shares(seed=10 + i)) for i in range(5)]
    kinds = ("seed", "tail", "seed", "numeric", "release")
    found = pick(compare_tables(table(before), table(after), others, replicate_kinds=kinds, **FAST))
    strong = pick(compare_tables(table(before), table(after), [others[i] for i in (0, 2, 4)], **FAST))
    assert len(found.replicates) == 5
    assert found.excess == strong.excess
    assert found.probe_variance == strong.probe_variance
    with pytest.raises(ValueError, match="replicate_kinds"):
        compare_tables(table(before), table(after), others, replicate_kinds=("seed",), **FAST)


# --- unpaired and 2×2 -------------------------------------------------------------------------


def test_unpaired_tables_compare_two_samples():
    first, second = shares(60, 1, seed=1), shares(30, 1, seed=2) + 0.1
    cells = compare_tables(table(first), table(second), paired=False, effect="data", resamples=4999)
    found = pick(cells)
    assert found.value == pytest.approx(second.mean() - first.mean())
    half = 1.68 * math.sqrt(first.var(ddof=1) / 60 + second.var(ddof=1) / 30)
    assert found.interval == pytest.approx((found.value - half, found.value + half), rel=0.08)
    assert found.pvalue < 0.001
    assert (found.n_probes, found.effect) == (30, "data")
    assert pick(cells, "ratio").value == pytest.approx(second.mean() / first.mean())
    no_nan(cells)


def test_unpaired_groups_are_a_pair():
    first, second = shares(60, 1, seed=1), shares(30, 1, seed=2)
    groups = ([f"a{i // 6}" for i in range(60)], [f"b{i // 5}" for i in range(30)])
    found = pick(compare_tables(table(first), table(second), paired=False, groups=groups, **FAST))
    assert (found.n_probes, found.n_clusters) == (30, 6)
    with pytest.raises(ValueError, match="a pair"):
        compare_tables(table(first), table(second), paired=False, groups=["a"] * 60, **FAST)
    with pytest.raises(ValueError, match="unpaired"):
        compare_tables(table(first), table(second), [table(first)], paired=False, **FAST)


def test_interaction_is_the_difference_of_shifts():
    one = [shares(40, 2, seed=i) for i in (1, 2)]
    two = [shares(25, 2, seed=i) for i in (3, 4)]
    null = [(shares(40, 2, seed=20 + i), shares(25, 2, seed=30 + i)) for i in range(3)]
    cells = compare_interaction(
        *(table(x) for x in (*one, *two)), [(table(a), table(b)) for a, b in null], **FAST
    )
    found = pick(cells)
    base, domain = (one[1] - one[0])[:, 0], (two[1] - two[0])[:, 0]
    assert (found.effect, found.measure, len(cells)) == ("interaction", "shift", 2)
    assert found.value == pytest.approx(domain.mean() - base.mean())
    assert (found.before, found.after) == pytest.approx((base.mean(), domain.mean()))
    wanted = [(b - two[0])[:, 0].mean() - (a - one[0])[:, 0].mean() for a, b in null]
    assert found.replicates == pytest.approx(wanted)
    v = (one[1] - np.mean([a for a, _ in null], axis=0))[:, 0].var(ddof=1) / 40
    v += (two[1] - np.mean([b for _, b in null], axis=0))[:, 0].var(ddof=1) / 25
    assert found.probe_variance == pytest.approx(v)
    no_nan(cells)


# --- degenerate cases -------------------------------------------------------------------------


def test_no_change_at_all_is_named():
    same = shares()
    found = pick(compare_tables(table(same), table(same), **FAST))
    assert (found.value, found.interval, found.pvalue) == (0.0, (0.0, 0.0), 1.0)
    assert (found.sd, found.effect_size, found.reason) == (0.0, None, "no change at all")


def test_one_probe_and_one_group_have_no_interval():
    alone = compare_tables(table([0.2]), table([0.3]), [table([0.2]), table([0.21])], **FAST)
    found = pick(alone)
    assert found.value == pytest.approx(0.1)
    assert (found.interval, found.sd, found.effect_size, found.reason) == (
        None,
        None,
        None,
        "one probe: no interval",
    )
    grouped = pick(compare_tables(table(shares(5)), table(shares(5, seed=1)), groups=["a"] * 5, **FAST))
    assert (grouped.interval, grouped.n_clusters, grouped.reason) == (None, 1, "one group: no interval")
    no_nan(alone)


def test_constant_shift_has_an_interval_without_width():
    before = shares()
    found = pick(compare_tables(table(before), table(before + 0.125), **FAST))
    assert found.interval == pytest.approx((0.125, 0.125))
    assert found.sd == pytest.approx(0.0, abs=1e-15)
    assert found.pvalue == 1 / 200


def test_empty_region_is_missing_and_not_zero():
    before = shares()
    before[:, 1] = np.nan
    cells = compare_tables(table(before), table(shares(seed=1)), [table(shares(seed=2))] * 2, **FAST)
    for measure in ("shift", "level", "ratio"):
        found = pick(cells, measure, region="r1")
        assert (found.value, found.interval, found.pvalue, found.replicates) == (None, None, None, ())
        assert (found.n_probes, found.n_missing) == (0, 40)
        assert found.reason == "the region is missing in every probe"
    no_nan(cells)


@pytest.mark.parametrize("paired", [True, False])
def test_ratio_without_share_before_is_named(paired):
    cells = compare_tables(table(np.zeros(30)), table(shares(30, 1)), paired=paired, **FAST)
    assert (pick(cells, "ratio").value, pick(cells, "ratio").interval) == (None, None)
    assert "ratio" in pick(cells, "ratio").reason
    assert pick(cells).value > 0
    no_nan(cells)


def test_everything_missing_but_one_probe():
    before, after = shares(), shares(seed=1)
    before[1:] = np.nan
    for options in ({}, {"groups": ["a", "b"] * 20}, {"interval": "bca"}, {"paired": False}):
        cells = compare_tables(table(before), table(after), **options, **FAST)
        assert pick(cells).n_probes == 1
        assert pick(cells).interval is None
        no_nan(cells)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (table(np.empty((0, 1))), table(np.empty((0, 1))), "no pairs"),
        (table([0.1, 0.2]), table([0.1]), "lacks 'p1'"),
        (table([0.1]), table([0.1, 0.2]), "has beside them 'p1'"),
        (table([0.1]), table([0.1], names=["other"]), r"lacks 'r0 \(input\)'"),
        (table([0.1, 0.1], ids=["a", "a"]), table([0.1, 0.1], ids=["a", "a"]), "twice"),
        (table([0.1]), table([math.inf]), "finite"),
        (table([0.1]), ShareTable(("p0",), (Column("r0"),), np.ones((2, 1))), "shape"),
    ],
)
def test_tables_that_do_not_fit_are_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        compare_tables(before, after, **FAST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.5}, "alpha"),
        ({"resamples": 0}, "resamples"),
        ({"interval": "normal"}, "interval"),
        ({"groups": ["a"]}, "groups"),
        ({"segments": {"language": ["en"]}}, "language"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compare_tables(table(shares()), table(shares(seed=1)), **options)


# --- distances --------------------------------------------------------------------------------


def test_distances_are_summarised_without_a_pvalue():
    values = shares(50, 1)[:, 0]
    found = compare_distances("js_distance", values, column=Column("*", layer=2), **FAST)
    assert (found.value, found.pvalue, found.layer) == (pytest.approx(values.mean()), None, 2)
    assert found.interval[0] < found.value < found.interval[1]


def test_distances_are_judged_on_the_log_scale():
    values, null = shares(50, 1)[:, 0] * 3, [shares(50, 1, seed=i)[:, 0] for i in (1, 2, 3)]
    found = compare_distances("wasserstein", values, null, column=Column("*"), **FAST)
    assert found.replicates == pytest.approx([one.mean() for one in null])
    relative = values / values.mean() - np.mean([one / one.mean() for one in null], axis=0)
    assert found.probe_variance == pytest.approx(relative.var(ddof=1) / 50)
    centre = np.exp(np.mean(np.log(found.replicates)))
    assert found.excess.excess == pytest.approx(found.value - centre)
    assert found.excess.pvalue < 0.05


def test_signed_measures_are_judged_as_they_are():
    values, null = shares(50, 1)[:, 0] - 0.5, [shares(50, 1, seed=i)[:, 0] - 0.25 for i in (1, 2, 3)]
    found = compare_distances("center_of_mass_shift", values, null, column=Column("*"), **FAST)
    assert found.excess.excess == pytest.approx(values.mean() - np.mean([one.mean() for one in null]))


def test_degenerate_distances_are_named():
    still = compare_distances("js_distance", np.zeros(30), [np.zeros(30)] * 3, column=Column("*"), **FAST)
    assert (still.value, still.interval, still.reason) == (0.0, (0.0, 0.0), "no change at all")
    assert "did not move" in still.excess.reason
    moved = compare_distances(
        "js_distance", np.zeros(30), [shares(30, 1)[:, 0]] * 3, column=Column("*"), **FAST
    )
    assert moved.excess.pvalue == 1.0
    undefined = compare_distances("spearman", np.full(30, np.nan), column=Column("*"), **FAST)
    assert (undefined.value, undefined.n_missing) == (None, 30)
    assert undefined.reason == "the measure is undefined for every probe"
    alone = compare_distances("js_distance", [0.1, np.nan], column=Column("*"), **FAST)
    assert (alone.interval, alone.reason) == (None, "one probe: no interval")
    no_nan((still, moved, undefined, alone))


@pytest.mark.parametrize("bad", [[], [[0.1]], [-0.5], [math.inf]])
def test_distances_refuse_what_is_none(bad):
    with pytest.raises(ValueError, match="values"):
        compare_distances("js_distance", bad, column=Column("*"))


# --- maps -------------------------------------------------------------------------------------


def maps(n=30, positions=6, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(positions), n)


def as_map(probe_id, weights, *, special=(), stream="input", layers=None) -> Map:
    mask = np.zeros(len(weights), dtype=bool)
    mask[list(special)] = True
    return Map(probe_id, np.asarray(weights), Positions("token", mask), stream=stream, layers=layers)


def test_maps_give_distances_and_region_shifts():
    before, after = maps(seed=1), maps(seed=2)
    compared = compare_maps(
        before, after, regions={"head": [1, 1, 0, 0, 0, 0]}, replicates=[maps(seed=3), maps(seed=4)], **FAST
    )
    js = next(compared.find("*", "js_distance"))
    assert js.value == pytest.approx(metrics.js_distance(before, after).mean())
    assert js.replicates == pytest.approx([metrics.js_distance(before, maps(seed=i)).mean() for i in (3, 4)])
    head = next(compared.find("head"))
    assert head.value == pytest.approx((after - before)[:, :2].sum(axis=1).mean())
    assert (compared.n_probes, compared.identical_maps, compared.same_weights) == (30, False, None)
    assert compared.replicate_kinds == ("seed", "seed")
    assert next(compared.find("*", "wasserstein")).value > 0
    no_nan(compared.cells)


def test_maps_are_joined_by_probe_id():
    before, after = maps(seed=1), maps(seed=2)
    one = [as_map(f"p{i}", w) for i, w in enumerate(before)]
    two = [as_map(f"p{i}", w) for i, w in enumerate(after)]
    region = {"head": [1, 0, 0, 0, 0, 0]}
    plain = compare_maps(before, after, regions=region, **FAST)
    joined = compare_maps(one, two[::-1], regions=region, **FAST)
    assert next(joined.find("head")) == next(plain.find("head"))
    with pytest.raises(ValueError, match="lacks 'p0', 'p1', 'p2' and 1 more"):
        compare_maps(one, two[4:], **FAST)
    with pytest.raises(ValueError, match="adds 'p0'"):
        compare_maps(one[1:], two, **FAST)


def test_maps_of_several_lengths_take_weights_for_each():
    before = [*maps(10, 4, seed=1), *maps(10, 6, seed=2)]
    after = [*maps(10, 4, seed=3), *maps(10, 6, seed=4)]
    weights = [np.eye(len(one))[0] for one in before]
    weights[0] = None
    compared = compare_maps(before, after, regions={"first": weights}, **FAST)
    found = next(compared.find("first"))
    wanted = [b[0] - a[0] for a, b in zip(before, after, strict=True)][1:]
    assert (found.value, found.n_missing) == (pytest.approx(np.mean(wanted)), 1)
    js = [metrics.js_distance(a, b) for a, b in zip(before, after, strict=True)]
    assert next(compared.find("*", "js_distance")).value == pytest.approx(np.mean(js))
    with pytest.raises(ValueError, match="4 positions of before for probe '0'"):
        compare_maps(before, after[::-1], **FAST)


def test_map_regions_are_shares_of_the_content():
    one = [as_map(f"p{i}", [0.5, 0.2, 0.3], special=[0]) for i in range(5)]
    two = [as_map(f"p{i}", [0.2, 0.6, 0.2], special=[0]) for i in range(5)]
    compared = compare_maps(one, two, regions={"word": [0, 1, 0], "special": [1, 0, 0]}, **FAST)
    word, special = next(compared.find("word")), next(compared.find("special"))
    assert (word.before, word.after) == pytest.approx((0.4, 0.75))
    assert (special.before, special.after) == pytest.approx((0.5, 0.2))


def test_map_layers_and_streams_have_cells_of_their_own():
    layers = maps(20, 4, seed=5).reshape(10, 2, 4)
    one = [as_map(f"p{i}", w[-1], layers=w) for i, w in enumerate(layers)]
    two = [as_map(f"p{i}", w[-1], layers=w) for i, w in enumerate(layers[::-1])]
    compared = compare_maps(one, two, regions={"a": [1, 0, 0, 0]}, **FAST)
    assert next(compared.find("a", layer=1)).value == pytest.approx(next(compared.find("a")).value)
    expected = metrics.js_distance(layers[:, 0], layers[::-1, 0]).mean()
    assert next(compared.find("*", "js_distance", layer=0)).value == pytest.approx(expected)
    streams = [as_map(f"p{i}", w, stream=s) for s in ("source", "prefix") for i, w in enumerate(maps(8, 3))]
    split = compare_maps(
        streams, streams, regions={"a": [1, 0, 0]}, groups=[f"g{i % 4}" for i in range(16)], **FAST
    )
    assert split.n_probes == 8
    assert {cell.stream for cell in split.find("a")} == {"source", "prefix"}
    assert next(split.find("a")).n_clusters == 4


def test_identical_maps_are_seen():
    same = maps()
    compared = compare_maps(same, same.copy(), **FAST)
    assert compared.identical_maps
    assert next(compared.find("*", "js_distance")).value == 0.0
    no_nan(compared.cells)


def test_unpaired_maps_compare_regions():
    compared = compare_maps(
        maps(30), maps(20, seed=1), regions={"a": [1, 0, 0, 0, 0, 0]}, paired=False, **FAST
    )
    found = next(compared.find("a"))
    assert (compared.kind, found.effect, found.n_probes) == ("unpaired", "data", 20)
    with pytest.raises(ValueError, match="regions"):
        compare_maps(maps(), maps(), paired=False)


@pytest.mark.parametrize(
    ("before", "options", "message"),
    [
        ([], {}, "no pairs"),
        ([[0.5, 0.4]], {}, "sum to 1"),
        ([[1.5, -0.5]], {}, ">= 0"),
        ([[[0.5, 0.5]]], {}, "1-D map"),
        ([[0.5, 0.5]], {"regions": {"a": [1.0]}}, "2 positions"),
        ([[0.5, 0.5]], {"regions": {"a": [2.0, 0.0]}}, r"\[0, 1\]"),
        ([[0.5, 0.5]], {"regions": {"*": [1.0, 0.0]}}, "another name"),
        ([[0.5, 0.5]], {"groups": ["a", "b"]}, "groups"),
    ],
)
def test_maps_that_are_none_are_refused(before, options, message):
    with pytest.raises(ValueError, match=message):
        compare_maps(before, before, **options, **FAST)


def test_units_mean_is_undefined_without_values():
    assert np.isnan(Units(np.zeros((3, 1)), np.zeros((3, 1))).mean[0])


@pytest.mark.parametrize(("difference", "same"), [(0.0, True), (3e-8, True), (1e-4, False)])
def test_maps_that_differ_by_rounding_are_identical(difference, same):
    before = [np.array([0.25, 0.75]), np.array([0.5, 0.5])]
    after = [one + np.array([difference, -difference]) for one in before]
    assert compare_maps(before, after, resamples=99).identical_maps is same
