"""Find the cells of a rule and judge each: the truth table of limit and excess rules."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scipy.special import stdtrit

from audit.calibrate import equivalence
from audit.errors import ConfigError
from audit.records import Cell, Comparison, Outcome, Policy, ReplicateTest, Rule, RuleVerdict
from audit.statistics.measures import DISTANCES, SIMILARITIES
from audit.verdicts.floor import (
    Floor,
    adjusted_detectable,
    covers_all,
    direction_of,
    floor_of,
    needed_where_undefined,
    plural,
    probes_needed,
    replicates_needed,
    within_of,
)
from audit.verdicts.sentences import (
    excess_numbers,
    excess_sentence,
    explanation,
    limit_sentence,
    place,
    retraining,
)


def _nearest(wanted: object, known: Iterable[object]) -> str:
    names = sorted({str(one) for one in known})
    if not names:
        return "; there is none"
    more = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    close = difflib.get_close_matches(str(wanted), names, n=1)
    return f"; did you mean '{close[0]}'? (there is {more})" if close else f"; there is {more}"


def find_cells(comparison: Comparison, rule: Rule) -> tuple[Cell, ...]:
    """Return the cells that a rule judges; region "*" is every region.

    Raises
    ------
    ConfigError
        When nothing in the comparison fits the rule, naming the nearest that does.
    """
    cells = [cell for cell in comparison.cells if cell.measure == rule.measure]
    if not cells:
        known = _nearest(rule.measure, {cell.measure for cell in comparison.cells})
        raise ConfigError(f"rule '{rule.label}': measure '{rule.measure}' was not computed{known}")
    effects = {cell.effect for cell in cells}
    effect = rule.effect or ("model" if "model" in effects else "data" if "data" in effects else min(effects))
    wanted: list[tuple[str, Any]] = [("effect", effect), ("segment", rule.segment), ("layer", rule.layer)]
    if rule.region != "*":
        wanted.insert(0, ("region", rule.region))
    if rule.stream is not None:
        wanted.append(("stream", rule.stream))
    for key, value in wanted:
        kept = [cell for cell in cells if getattr(cell, key) == value]
        if not kept:
            there = {getattr(cell, key) for cell in cells} - {None}
            hint = "; use region = '*'" if there == {"*"} else _nearest(value, there)
            what = f"a cell without {key}" if value is None else f"{key} '{value}'"
            raise ConfigError(f"rule '{rule.label}': {what} does not exist for {rule.measure}{hint}")
        cells = kept
    return tuple(cells)


def limit_bounds(rule: Rule, limit: float) -> tuple[float, float]:
    """Return the lowest and the highest allowed value for a limit.

    ``shift`` and other signed measures: ±limit, or one side by the direction. ``level``: at most the
    limit, or at least with direction "decrease". ``ratio``: at most ("increase"), at least
    ("decrease"; a factor above 1 is read as its inverse), or between 1/limit and limit. Distances: at
    most. Similarities: at least, or at most with direction "increase".

    Raises
    ------
    ConfigError
        When the rule has no such limit, or a distance should not decrease.
    """
    if not math.isfinite(limit):
        raise ConfigError(f"rule '{rule.label}': limit is {limit}; give a finite number")
    if rule.measure in DISTANCES:
        if rule.direction == "decrease":
            raise ConfigError(
                f"rule '{rule.label}': {rule.measure} cannot fall below 0; use direction = \"increase\""
            )
        return 0.0, limit
    if rule.measure in SIMILARITIES:
        return (-math.inf, limit) if rule.direction == "increase" else (limit, math.inf)
    if rule.measure == "level":
        return (limit, math.inf) if rule.direction == "decrease" else (-math.inf, limit)
    if rule.measure == "ratio":
        return _ratio_bounds(rule, limit)
    size = abs(limit)
    return (
        -math.inf if rule.direction == "increase" else -size,
        math.inf if rule.direction == "decrease" else size,
    )


def _ratio_bounds(rule: Rule, limit: float) -> tuple[float, float]:
    if limit <= 0:
        raise ConfigError(f"rule '{rule.label}': a ratio's limit is {limit:g}; give a number above 0")
    if rule.direction == "increase":
        return -math.inf, limit
    if rule.direction == "decrease":
        return min(limit, 1 / limit), math.inf
    return min(limit, 1 / limit), max(limit, 1 / limit)


def _inside(interval: tuple[float, float], bounds: tuple[float, float]) -> bool:
    return interval[0] >= bounds[0] and interval[1] <= bounds[1]


def _outside(interval: tuple[float, float], bounds: tuple[float, float]) -> bool:
    return interval[0] > bounds[1] or interval[1] < bounds[0]


def base_verdict(cell: Cell, rule: Rule, comparison: Comparison, **found: Any) -> RuleVerdict:
    """Return a verdict with everything the cell tells; `found` adds or overrides fields."""
    confirmations = [one for one in comparison.confirmations if one.region == cell.region]
    of_model = cell.measure == "shift" and cell.effect == "model"  # what occlusion on both checkpoints tells
    facts: dict[str, Any] = {
        "rule": rule,
        "region": cell.region,
        "stream": cell.stream,
        "effect": cell.effect,
        "value": cell.value,
        "interval": cell.interval,
        "limit": rule.fail if rule.kind == "limit" else None,
        "before": cell.before,
        "after": cell.after,
        "n_probes": cell.n_probes,
        "n_missing": cell.n_missing,
        "n_clusters": cell.n_clusters,
        "n_replicates": len(cell.replicates),
        "confirmation": confirmations[0] if confirmations and of_model else None,
    }
    return RuleVerdict(**{**facts, **found})


def _open(cell: Cell, rule: Rule, comparison: Comparison, *, reason: str, needed: str | None) -> RuleVerdict:
    about = place(cell) or "the whole map"
    sentence = f"nothing can be said about {about}: {reason}"
    return base_verdict(
        cell,
        rule,
        comparison,
        outcome=Outcome.INCONCLUSIVE,
        sentence=sentence,
        reason=reason,
        needed=needed,
    )


def precheck(cell: Cell, rule: Rule, comparison: Comparison, policy: Policy) -> RuleVerdict | None:
    """Return the verdict of a cell that needs no test: undefined, identical, or too few probes."""
    if cell.value is None:
        undefined = cell.reason or f"{cell.measure} is undefined"
        return _open(cell, rule, comparison, reason=undefined, needed=needed_where_undefined(cell))
    if _unmoved(cell, comparison) and cell.measure != "level":
        return identical(cell, rule, comparison)
    if everything := covers_all(cell):
        return _open(cell, rule, comparison, reason=everything, needed="a smaller region")
    total = cell.n_probes + cell.n_missing
    if 2 * cell.n_missing > total:
        what = "the measure" if cell.region == "*" else "the region"
        reason = f"{what} is missing in {cell.n_missing} of {plural(total, 'probe')}"
        return _open(cell, rule, comparison, reason=reason, needed="probes that have the region")
    for n, least, noun in (
        (cell.n_probes, policy.min_probes, "probe"),
        (cell.n_clusters, policy.min_clusters, "group"),
    ):
        if n is not None and n < least:
            reason = f"{plural(n, noun)}, fewer than the {least} that a verdict needs"
            return _open(cell, rule, comparison, reason=reason, needed=f"at least {least} {noun}s")
    if cell.interval is None:
        reason = cell.reason or "the interval is undefined"
        return _open(cell, rule, comparison, reason=reason, needed="more probes")
    return None


def _unmoved(cell: Cell, comparison: Comparison) -> bool:
    """Return whether the checkpoints' maps are identical where this cell looks."""
    if cell.effect in ("model_on_domain", "interaction"):  # a second probe set may show more
        return comparison.identical_maps and cell.value == 0
    return comparison.identical_maps and cell.effect == "model"


def identical(cell: Cell, rule: Rule, comparison: Comparison) -> RuleVerdict:
    """Return PASS for the same checkpoint, INCONCLUSIVE for other (or unknown) weights."""
    if comparison.same_weights:
        return base_verdict(
            cell,
            rule,
            comparison,
            outcome=Outcome.PASS,
            sentence="same checkpoint: weights and attention maps are identical",
            reason="same checkpoint",
        )
    known = (
        "the weights differ" if comparison.same_weights is False else "whether the weights differ is unknown"
    )
    return base_verdict(
        cell,
        rule,
        comparison,
        outcome=Outcome.INCONCLUSIVE,
        sentence=(
            f"nothing this method can see changed: every attention map is identical, but {known}; a changed "
            "head, value path or feed-forward is invisible to it"
        ),
        reason="nothing this method can see changed",
        needed='a method that sees values or outputs, such as [method] name = "gradient_rollout"',
    )


# --- limit rules ------------------------------------------------------------------------------


def judge_limit(
    cell: Cell, rule: Rule, comparison: Comparison, policy: Policy, *, explained: bool | None
) -> RuleVerdict:
    """Judge a cell against the policy's limit; replicates explain, and change nothing.

    Parameters
    ----------
    explained : bool or None
        What the replicates say about the cell, the same for every rule that judges it.

    Raises
    ------
    ConfigError
        When the rule has neither `fail` nor `warn`, or they make no sense for the measure.
    """
    if rule.fail is None and rule.warn is None:
        raise ConfigError(f"rule '{rule.label}' has no limit; add fail = <number>")
    free = (-math.inf, math.inf)
    fail, warn = (free if one is None else limit_bounds(rule, one) for one in (rule.fail, rule.warn))
    early = precheck(cell, rule, comparison, policy)
    if early is not None:
        return early
    interval = cell.interval or free
    outcome = Outcome.INCONCLUSIVE
    if _inside(interval, fail):
        outcome = Outcome.PASS
    elif _outside(interval, fail):
        outcome = Outcome.FAIL
    # The limit has a direction; whether re-training explains the value is asked on both sides.
    either = replace(rule, direction="both")
    floor = floor_of(cell, either, comparison, policy)
    remark = [retraining(floor, rule.measure), explanation(explained)] if floor.values else []
    if _limit_in_noise(cell, fail, floor, policy.alpha):
        remark.append("the limit lies inside the noise floor")
    warned = outcome is Outcome.PASS and not _inside(interval, warn)
    found = base_verdict(
        cell,
        rule,
        comparison,
        outcome=outcome,
        sentence=limit_sentence(cell, rule, outcome, (fail, warn), remark, warned=warned),
        warned=warned,
        explained=explained,
        needed=probes_needed(cell, *fail) if outcome is Outcome.INCONCLUSIVE else None,
        reason="the interval crosses the limit" if outcome is Outcome.INCONCLUSIVE else None,
        **_floor_facts(floor, either, policy, 1),
    )
    hidden = _unmoved(cell, comparison) and not comparison.same_weights
    return identical(cell, rule, comparison) if hidden and outcome is Outcome.PASS else found


def _limit_in_noise(cell: Cell, bounds: tuple[float, float], floor: Floor, alpha: float) -> bool:
    """Return whether one more harmless re-training would often be beyond the limit.

    The prediction interval of such a re-training (level 1 - 2 alpha) rests on the replicates alone: how
    much the candidate's own probes scatter says nothing about it.
    """
    if floor.mean is None or floor.sd is None or len(floor.values) < 2:
        return False
    if cell.measure in DISTANCES:
        return floor.mean + floor.sd > bounds[1]
    k = len(floor.values)
    half = float(stdtrit(k - 1, 1 - alpha)) * floor.sd * math.sqrt(1 + 1 / k)
    return floor.mean - half < bounds[0] or floor.mean + half > bounds[1]


def _floor_facts(floor: Floor, rule: Rule, policy: Policy, tests: int) -> dict[str, Any]:
    spread = None if floor.mean is None or floor.sd is None else (floor.mean, floor.sd)
    return {
        "floor": spread,
        "excess": floor.test,
        "minimum_detectable_shift": adjusted_detectable(rule, floor, policy, tests),
        "n_replicates": len(floor.values),
    }


# --- excess rules -----------------------------------------------------------------------------


def effect_of(cell: Cell, excess: float) -> float:
    """Return the size of an excess in content mass (in the measure's unit for other measures)."""
    return abs(excess) * (cell.before or 1.0) if cell.measure == "ratio" else abs(excess)


def judge_excess(
    cell: Cell,
    rule: Rule,
    comparison: Comparison,
    policy: Policy,
    *,
    adjusted: float | None,
    tests: int,
    explained: bool | None,
) -> RuleVerdict:
    """Judge a cell against the noise floor.

    Parameters
    ----------
    adjusted : float or None
        Holm-adjusted p-value of the cell's replicate test over the policy's `tests` excess tests.
    explained : bool or None
        What the replicates say about the cell, the same for every rule that judges it.

    Raises
    ------
    ConfigError
        When `within` is missing or unreadable.
    """
    floor = floor_of(cell, rule, comparison, policy)
    try:
        within = within_of(rule, floor)
    except ValueError as error:
        raise ConfigError(f"rule '{rule.label}': {error}") from None
    early = precheck(cell, rule, comparison, policy)
    if early is not None:
        return early
    facts = {**_floor_facts(floor, rule, policy, tests), "adjusted_pvalue": adjusted}
    test = floor.test
    if test is None or test.excess is None or adjusted is None:
        found = _open(cell, rule, comparison, reason=floor.reason or "undefined", needed=floor.needed)
        sentence = excess_sentence(cell, rule, Outcome.INCONCLUSIVE, floor, numbers=found.reason or "")
        return replace(found, sentence=sentence, **facts)
    large = effect_of(cell, test.excess) >= policy.effect_floor
    sampled = _probe_sets_explain(cell, test)
    explained = None if sampled else explained
    significant = adjusted <= policy.alpha
    outcome, reason, needed = Outcome.INCONCLUSIVE, None, None
    if significant and large and not sampled:
        outcome = Outcome.FAIL
    elif equivalence(test.interval, within, alternative=direction_of(rule)):
        outcome = Outcome.PASS
    else:
        reason = _undecided(policy, significant=significant, sampled=sampled)
        needed = replicates_needed(cell, rule, floor, within=within, rules=max(tests, 1), policy=policy)
        needed = "more probes in both probe sets" if sampled else needed
    failed_from = policy.effect_floor if outcome is Outcome.FAIL else None
    numbers = excess_numbers(test, within, rule, adjusted, tests, failed_from)
    return base_verdict(
        cell,
        rule,
        comparison,
        outcome=outcome,
        sentence=excess_sentence(cell, rule, outcome, floor, numbers=numbers, explained=explained),
        limit=within,
        explained=explained,
        needed=needed,
        reason=reason,
        **facts,
    )


def _undecided(policy: Policy, *, significant: bool, sampled: bool) -> str:
    """Return why an excess rule neither passes nor fails."""
    if not significant:
        return "the interval of the excess is not inside the margin"
    if sampled:
        return "other probes of the two sets could show the opposite: the interval holds 0"
    return f"larger than re-training explains, but below the effect floor of {policy.effect_floor:g}"


def _probe_sets_explain(cell: Cell, test: ReplicateTest) -> bool:
    """Return whether the choice of probes alone could explain an excess over two probe sets.

    The replicate test holds the probes fixed. That is right for one set, on which all runs are paired;
    two sets are two samples, so that the interval, which counts their scatter, must exclude 0 as well.
    """
    if cell.effect not in ("data", "interaction") or test.interval is None:
        return False
    return test.interval[0] <= 0 <= test.interval[1]
