"""Replicate test, planning, equivalence and multiplicity against exact values and SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from audit.calibrate import (
    benjamini_hochberg,
    distance_replicate_test,
    e_process,
    equivalence,
    excess_interval,
    holm,
    minimum_detectable_shift,
    replicate_power,
    replicate_test,
    sign_flip_max_t,
)

SHIFTS = [0.004, -0.002, 0.001, 0.0, -0.003]


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
def test_replicate_test_is_the_two_sample_t_test_of_one_against_k(alternative):
    # The prediction interval t is Student's test with a sample of one.
    found = replicate_test(0.01, SHIFTS, alternative=alternative)
    sd = np.std(SHIFTS, ddof=1)
    t = (0.01 - np.mean(SHIFTS)) / (sd * math.sqrt(1 + 1 / 5))
    assert found.statistic == pytest.approx(t)
    law = stats.t(4)
    wanted = {"two-sided": 2 * law.sf(abs(t)), "greater": law.sf(t), "less": law.cdf(t)}
    assert found.pvalue == pytest.approx(wanted[alternative])
    assert (found.n_replicates, found.df) == (5, 4.0)
    assert found.sd == pytest.approx(sd)


def test_replicate_interval_has_level_one_minus_two_alpha():
    found = replicate_test(0.01, SHIFTS, alpha=0.05)
    half = stats.t(4).ppf(0.95) * np.std(SHIFTS, ddof=1) * math.sqrt(1.2)
    assert found.interval == pytest.approx((found.excess - half, found.excess + half))


def test_excess_interval_follows_satterthwaite():
    seeds, v, df_v = 4.0 * 1.25, 3.0, 30
    df = (seeds + v) ** 2 / (seeds**2 / 3 + v**2 / df_v)
    half = stats.t(df).ppf(0.95) * math.sqrt(seeds + v)
    assert excess_interval(1.0, 2.0, 4, probe_variance=v, probe_df=df_v) == pytest.approx(
        (1 - half, 1 + half)
    )


def test_probe_variance_widens_the_interval_and_leaves_the_test():
    plain, wide = replicate_test(0.01, SHIFTS), replicate_test(0.01, SHIFTS, probe_variance=1e-4, probe_df=99)
    assert wide.pvalue == plain.pvalue
    assert wide.interval[1] - wide.interval[0] > plain.interval[1] - plain.interval[0]


@pytest.mark.parametrize(
    ("shifts", "excess", "reason"),
    [
        ([], None, "no replicates"),
        ([0.25], 0.25, "one replicate"),
        ([0.25] * 4, 0.25, "do not differ"),
        ([0.1 + 0.2, 0.3, 0.3], 0.2, "do not differ"),
    ],
)
def test_replicate_test_names_what_is_undefined(shifts, excess, reason):
    found = replicate_test(0.5, shifts)
    assert found.excess == (None if excess is None else pytest.approx(excess))
    assert (found.pvalue, found.interval, found.minimum_detectable_shift) == (None, None, None)
    assert reason in found.reason
    assert found.n_replicates == len(shifts)


def test_other_bases_pool_the_spread_within_bases():
    other = [1.004, 0.998, 1.001]
    found = replicate_test(0.01, SHIFTS, other_bases=[other])
    pooled = (np.var(SHIFTS, ddof=1) * 4 + np.var(other, ddof=1) * 2) / 6
    assert found.sd == pytest.approx(math.sqrt(pooled))
    assert (found.df, found.n_replicates) == (6.0, 5)
    assert found.excess == pytest.approx(0.01 - np.mean(SHIFTS))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shift": math.nan}, "shift"),
        ({"replicate_shifts": [0.1, math.nan]}, "replicate_shifts"),
        ({"alternative": "bigger"}, "alternative"),
        ({"alpha": 0.0}, "alpha"),
        ({"power": 1.0}, "power"),
        ({"probe_variance": -1.0}, "probe_variance"),
    ],
)
def test_replicate_test_refuses_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        replicate_test(**{"shift": 0.1, "replicate_shifts": SHIFTS, **arguments})


# --- distances --------------------------------------------------------------------------------

DISTANCES = [0.10, 0.12, 0.09, 0.11, 0.10]


def test_distance_test_is_the_one_sided_test_of_logs():
    found = distance_replicate_test(0.2, DISTANCES)
    logs = replicate_test(math.log(0.2), np.log(DISTANCES), alternative="greater")
    assert (found.statistic, found.pvalue, found.sd) == (logs.statistic, logs.pvalue, logs.sd)
    centre = math.exp(np.log(DISTANCES).mean())
    assert found.excess == pytest.approx(0.2 - centre)
    assert found.interval[1] == pytest.approx(centre * math.expm1(logs.interval[1]))


def test_distance_test_does_not_depend_on_the_unit():
    one, ten = (
        distance_replicate_test(0.2, DISTANCES),
        distance_replicate_test(2.0, np.multiply(10, DISTANCES)),
    )
    assert ten.pvalue == pytest.approx(one.pvalue)
    assert ten.excess == pytest.approx(10 * one.excess)


def test_distance_test_names_what_is_undefined():
    still = distance_replicate_test(0.0, DISTANCES)
    assert (still.pvalue, still.reason) == (1.0, "no change at all: the distance is 0")
    assert still.excess < 0
    assert "did not move any map" in distance_replicate_test(0.1, [0.0, 0.1, 0.2]).reason
    assert distance_replicate_test(0.1, []).reason == "there are no replicates"
    with pytest.raises(ValueError, match="distance"):
        distance_replicate_test(-0.1, DISTANCES)


# --- planning ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "published"), [(2, 19.9), (3, 6.5), (5, 4.15), (10, 3.3)])
def test_minimum_detectable_shift_in_seed_sd(k, published):
    assert minimum_detectable_shift(1.0, k) == pytest.approx(published, rel=0.01)


def test_minimum_detectable_shift_with_ten_rules():
    assert minimum_detectable_shift(1.0, 5, rules=10) == pytest.approx(7.7, rel=0.01)
    assert minimum_detectable_shift(1.0, 5, rules=10) == minimum_detectable_shift(1.0, 5, alpha=0.005)


def test_minimum_detectable_shift_scales_and_falls_with_one_side():
    assert minimum_detectable_shift(0.003, 5) == pytest.approx(0.003 * minimum_detectable_shift(1.0, 5))
    assert minimum_detectable_shift(1.0, 5, alternative="greater") < minimum_detectable_shift(1.0, 5)
    assert minimum_detectable_shift(1.0, 1) is None
    assert minimum_detectable_shift(0.0, 5) is None


def test_replicate_power_is_the_noncentral_t():
    for k, shift in itertools.product((5, 10), (0.0, 2.0, 4.0)):
        law = stats.nct(k - 1, shift / math.sqrt(1 + 1 / k))
        critical = stats.t(k - 1).ppf(0.975)
        assert replicate_power(shift, k) == pytest.approx(law.sf(critical) + law.cdf(-critical), abs=2e-4)


# --- equivalence and multiplicity -------------------------------------------------------------


def test_equivalence_by_side():
    assert equivalence((-0.5, 0.5), 0.5)
    assert not equivalence((-0.5, 0.51), 0.5)
    assert equivalence((-9.0, 0.5), 0.5, alternative="greater")
    assert equivalence((-0.5, 9.0), 0.5, alternative="less")
    assert not equivalence(None, 0.5)
    with pytest.raises(ValueError, match="within"):
        equivalence((0.0, 0.0), -0.1)


def test_holm_and_benjamini_hochberg_match_their_definitions():
    rng = np.random.default_rng(0)
    for m in (0, 1, 2, 7, 40):
        p = rng.random(m).round(2)
        ordered = np.sort(p)
        steps = [min(1, max((m - j) * ordered[j] for j in range(i + 1))) for i in range(m)]
        rank = {value: max(i for i in range(m) if ordered[i] == value) for value in ordered}
        assert holm(p).tolist() == pytest.approx([steps[rank[v]] for v in p])
        wanted = stats.false_discovery_control(p) if m else p
        assert benjamini_hochberg(p).tolist() == pytest.approx(wanted.tolist())


@pytest.mark.parametrize("adjust", [holm, benjamini_hochberg])
@pytest.mark.parametrize("bad", [[0.5, math.nan], [1.5], [[0.1]]])
def test_adjustments_refuse_what_is_no_pvalue(adjust, bad):
    with pytest.raises(ValueError, match="pvalues"):
        adjust(bad)


def test_sign_flip_max_t_matches_all_sign_patterns():
    rng = np.random.default_rng(3)
    x = rng.normal(0.4, 1, (9, 4))
    signs = np.array(list(itertools.product([-1, 1], repeat=9)))
    scale = np.sqrt((x**2).sum(axis=0))
    largest = np.abs(signs @ x / scale).max(axis=1)
    exact = [(largest >= abs(u) - 1e-12).mean() for u in x.sum(axis=0) / scale]
    assert sign_flip_max_t(x, seed=1).tolist() == pytest.approx(exact, abs=0.02)


def test_sign_flip_max_t_takes_missing_columns_and_groups():
    x = np.array([[1.0, np.nan], [1.0, np.nan], [1.0, 0.0], [1.0, 0.0]] * 5)
    found = sign_flip_max_t(x, resamples=999)
    assert found[1] == 1.0
    assert found[0] == 0.001
    grouped = sign_flip_max_t(x, groups=["a", "b"] * 10, resamples=999)
    assert grouped[0] == pytest.approx(0.5, abs=0.06)
    with pytest.raises(ValueError, match="groups"):
        sign_flip_max_t(x, groups=["a"])


def test_e_process_matches_the_mixture_it_is():
    # exp(λS − λ²Q/2) averaged over λ ~ N(0, τ²).
    steps, tau = np.array([0.5, -0.2, 0.8, 1.1]), 1 / 0.7
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    for n, found in enumerate(e_process(steps, scale=0.7), start=1):
        total, squares = steps[:n].sum(), (steps[:n] ** 2).sum()
        mixture = np.exp(tau * points * total - (tau * points) ** 2 * squares / 2)
        assert found == pytest.approx((weights * mixture).sum() / weights.sum(), rel=1e-6)


def test_e_process_edges():
    assert e_process([]).tolist() == []
    assert e_process([0.0, 0.0]).tolist() == [1.0, 1.0]
    assert np.isfinite(e_process([1e200] * 5, scale=1e190)).all()
    assert e_process([1.0] * 10)[-1] > 20
    for bad in ({"scale": 0.0}, {"differences": [math.nan]}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            e_process(**{"differences": [1.0], **bad})
