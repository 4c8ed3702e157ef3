"""A cell against its noise floor, as rules need it: strong replicates, direction, Holm, planning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from audit.calibrate import (
    Alternative,
    distance_replicate_test,
    equivalence,
    excess_interval,
    excess_pvalue,
    minimum_detectable_shift,
    replicate_test,
)
from audit.records import STRONG_KINDS, Cell, Comparison, Policy, ReplicateTest, Rule
from audit.statistics.measures import DISTANCES

WANTED_REPLICATES = 5
_REPLICATES_TRIED = (*range(3, 21), 25, 30, 40, 50, 75, 100)
_MOST_PROBES = 1_000_000
_ROUNDING = 1e-6  # of the float32 shares of a map, summed


@dataclass(frozen=True)
class Floor:
    """The replicates that may judge a cell, and the test of the cell against them.

    `mean` and `sd` are in the measure's unit; `test` is None, with a `reason`, where it cannot decide.
    """

    values: tuple[float, ...]
    mean: float | None
    sd: float | None
    test: ReplicateTest | None
    reason: str | None = None
    needed: str | None = None


def direction_of(rule: Rule) -> Alternative:
    """Return the side on which the replicate test looks."""
    if rule.measure in DISTANCES or rule.direction == "increase":
        return "greater"
    return "less" if rule.direction == "decrease" else "two-sided"


def plural(n: int, noun: str) -> str:
    """Return "1 probe", "2 probes"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def floor_of(cell: Cell, rule: Rule, comparison: Comparison, policy: Policy) -> Floor:
    """Return the noise floor of a cell; weak kinds are left out unless there is nothing else to show.

    Between two different models there is none: how far re-training moves one says nothing of the other.
    """
    if comparison.other_model is not None:
        different = f"two different models are compared ({comparison.other_model})"
        silent = f"{different}, and replicates of one say nothing about the other"
        return Floor((), None, None, None, silent, "a limit rule instead")
    kinds = comparison.replicate_kinds
    known = kinds if len(kinds) == len(cell.replicates) else ("seed",) * len(cell.replicates)
    strong = tuple(value for value, kind in zip(cell.replicates, known, strict=True) if kind in STRONG_KINDS)
    shown = strong or cell.replicates
    mean = float(np.mean(shown)) if shown else None
    sd = float(np.std(shown, ddof=1)) if len(shown) > 1 else None
    seeds = f"{WANTED_REPLICATES} replicates of kind seed"
    if not shown:
        return Floor((), None, None, None, f"there are no replicates of {rule.measure}", seeds)
    if not strong:
        only = ", ".join(sorted(set(known)))
        return Floor(shown, mean, sd, None, f"replicates of kind {only} understate the spread", seeds)
    test = _test(cell, rule, strong, policy)
    if len(strong) < policy.min_replicates:
        too_few = f"{plural(len(strong), 'replicate')}, fewer than the {policy.min_replicates} needed"
        return Floor(strong, mean, sd, None, too_few, seeds)
    if test is None or test.pvalue is None:
        reason = test.reason if test is not None else "the replicate test is undefined"
        return Floor(strong, mean, sd, None, reason, "replicates that differ (other seeds)")
    return Floor(strong, mean, sd, test)


def _test(cell: Cell, rule: Rule, strong: Sequence[float], policy: Policy) -> ReplicateTest | None:
    if cell.value is None:
        return None
    variance, df = cell.probe_variance or 0.0, units_of(cell) - 1.0
    probe_df = df if df > 0 else None
    if rule.measure in DISTANCES:
        return distance_replicate_test(
            cell.value,
            strong,
            alpha=policy.alpha,
            power=policy.power,
            probe_variance=variance,
            probe_df=probe_df,
        )
    return replicate_test(
        cell.value,
        strong,
        alternative=direction_of(rule),
        alpha=policy.alpha,
        power=policy.power,
        probe_variance=variance,
        probe_df=probe_df,
    )


def covers_all(cell: Cell) -> str | None:
    """Return why a rule on a region that is the whole content in every probe can never fail, else None.

    Shares are at most 1, so that a mean of 1 on both sides is 1 in every probe. Where the region's size is
    known it must be 1 too: a small region that took all of the mass can lose it again.
    """
    ends = (cell.before, cell.after, 1.0 if cell.size is None else cell.size)
    if cell.measure not in ("shift", "ratio") or any(end is None or end < 1 - _ROUNDING for end in ends):
        return None
    return "the region is all of the content in every probe, so that its share is always 1"


def units_of(cell: Cell) -> int:
    """Return the number of groups, or of probes where there are none."""
    return cell.n_probes if cell.n_clusters is None else cell.n_clusters


def log_centre(floor: Floor) -> float:
    """Return the geometric mean of a distance's replicates."""
    return float(np.exp(np.mean(np.log(floor.values))))


def adjusted_detectable(rule: Rule, floor: Floor, policy: Policy, rules: int) -> float | None:
    """Return the minimum detectable shift at α / rules, in the measure's unit."""
    if floor.test is None or floor.test.sd is None:
        return None
    shift = minimum_detectable_shift(
        floor.test.sd,
        len(floor.values),
        alpha=policy.alpha,
        power=policy.power,
        alternative=direction_of(rule),
        rules=max(rules, 1),
    )
    if shift is None or rule.measure not in DISTANCES:
        return shift
    return log_centre(floor) * math.expm1(min(shift, 600.0))


def within_of(rule: Rule, floor: Floor) -> float:
    """Return the equivalence margin of an excess rule in the measure's unit; "3 sd" is in seed-SD.

    Raises
    ------
    ValueError
        When `within` is missing, not positive, or not a number or ``"<number> sd"``.
    """
    given = rule.within
    if isinstance(given, str):
        text, _, unit = given.strip().partition(" ")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if unit.strip() != "sd" or not (math.isfinite(factor) and factor > 0):
            raise ValueError(f'within is {given!r}; expected a number or text like "3 sd"')
        sd = floor.test.sd if floor.test is not None and floor.test.sd is not None else 0.0
        logs = rule.measure in DISTANCES and sd > 0
        return log_centre(floor) * math.expm1(min(factor * sd, 600.0)) if logs else factor * sd
    if given is None or not (math.isfinite(given) and given > 0):
        raise ValueError(f'within is {given}; expected a number above 0 or text like "3 sd"')
    return float(given)


# --- what would settle an INCONCLUSIVE rule ---------------------------------------------------


def needed_where_undefined(cell: Cell) -> str:
    """Return which probes would define a cell that has no value.

    Examples
    --------
    >>> needed_where_undefined(Cell("spearman", "*"))
    'probes in which it is defined'
    """
    if cell.region in {"*", "special", "first"}:
        return "probes in which it is defined"
    return (
        "probes in which it has content that is read: not truncated away, and neither special tokens nor "
        "position 0 of a causal model"
    )


def probes_needed(cell: Cell, low: float, high: float) -> str | None:
    """Return how many probes (or groups) bring the interval to one side of the limits.

    The half-width shrinks as 1/√n around the present value.
    """
    if cell.value is None or cell.interval is None:
        return None
    ratios = [
        (end - cell.value) / (limit - cell.value)
        for end, limit in ((e, b) for e in cell.interval for b in (low, high))
        if math.isfinite(limit) and limit != cell.value and (end - cell.value) * (limit - cell.value) > 0
    ]
    factor = max(ratios, default=0.0)
    touching = cell.value in (low, high)
    wanted = math.ceil(units_of(cell) * factor**2) if factor < _MOST_PROBES else _MOST_PROBES + 1
    noun = "probe" if cell.n_clusters is None else "group"
    if touching or wanted > _MOST_PROBES:
        return f"more than {_MOST_PROBES:,} {noun}s, since the value lies on the limit itself"
    return f"about {plural(max(wanted, units_of(cell) + 1), noun)} instead of {units_of(cell):,}"


def replicates_needed(
    cell: Cell, rule: Rule, floor: Floor, *, within: float, rules: int, policy: Policy
) -> str | None:
    """Return how many replicates, else how many probes, would settle an excess rule as it stands."""
    test = floor.test
    if test is None or test.statistic is None or not test.sd:
        return None
    k, log = len(floor.values), rule.measure in DISTANCES
    excess = test.statistic * test.sd * math.sqrt(1 + 1 / k)
    margin = math.log1p(within / log_centre(floor)) if log else within
    variance, alternative = cell.probe_variance or 0.0, direction_of(rule)

    def settles(count: int, v: float) -> bool:
        low, high = excess_interval(excess, test.sd or 0.0, count, alpha=policy.alpha, probe_variance=v)
        return equivalence((low, high), margin, alternative=alternative) or (
            excess_pvalue(excess, test.sd or 0.0, count, alternative=alternative) <= policy.alpha / rules
        )

    for count in _REPLICATES_TRIED:
        if count > k and settles(count, variance):
            return f"about {plural(count, 'replicate')} instead of {k}"
    noun, units = ("probe", cell.n_probes) if cell.n_clusters is None else ("group", cell.n_clusters)
    for factor in (2, 4, 10, 100):
        if variance and settles(k, variance / factor):
            return f"about {plural(factor * units, noun)} instead of {units:,}"
    return (
        f"no number of replicates or {noun}s: the candidate's own seed spread is as wide as `within`; "
        "widen it, or average several candidates"
    )
