"""`audit plan`: probes and replicates for a wanted sensitivity, and how harmless candidates will end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from audit.calibrate import Alternative, minimum_detectable_shift
from audit.config import AuditConfig
from audit.errors import AuditError, NothingEvaluatedError
from audit.pipeline.checks import check_replicate_runs
from audit.pipeline.compare import in_common
from audit.pipeline.floor import read_floor
from audit.pipeline.resolve import replicate_runs, resolve
from audit.pipeline.runs import RunData
from audit.pipeline.sources import load_probes, probe_source
from audit.pipeline.specs import audit_regions
from audit.records import STRONG_KINDS, Policy, Rule
from audit.statistics.resampling import collapse, encode_groups, variance_of_mean
from audit.statistics.sensitivity import (
    Chances,
    PlannedRule,
    Sensitivity,
    Spread,
    excess_chances,
    limit_chances,
    probes_for,
    replicates_for,
)
from audit.store import Store
from audit.verdicts.rules import limit_bounds

PLANNED = frozenset({"shift"})
"""Measures whose sensitivity is planned; the others follow the replicates' own spread."""

_HOPELESS = "no number of replicates finds this shift in one candidate: its own seed spread is too wide"


def plan_sensitivity(config: AuditConfig, *, shift: float | None = None, power: float = 0.9) -> Sensitivity:
    """Return how many probes and replicates each rule needs, and how often harmless candidates fail it.

    Spreads come from the stored baseline and replicates of the configuration, where there are at least
    two; otherwise everything is told in seed-SD.

    Parameters
    ----------
    config : AuditConfig
    shift : float, optional
        Shift (share of content mass) that must be found; each rule's own limit when omitted.
    power : float
        Chance with which it must be found.

    Returns
    -------
    Sensitivity

    Raises
    ------
    NothingEvaluatedError
        When the policy has no rules.
    """
    policy = config.policy()
    if not policy.rules:
        raise NothingEvaluatedError("the policy has no rules; add at least one [[gate.rules]]")
    spreads, grouped, notes = _spreads(config)
    pairs = [(rule, region) for rule in policy.rules for region in _regions(rule, spreads)]
    tests = sum(rule.kind == "excess" for rule, _ in pairs)
    least = policy.min_clusters if grouped else policy.min_probes
    planned = tuple(
        _at_least(
            least,
            _plan_rule(rule, region, spreads.get(region, Spread()), policy, tests, shift=shift, power=power),
        )
        for rule, region in pairs
    )
    return Sensitivity(
        rules=planned,
        tests=tests,
        power=power,
        alpha=policy.alpha,
        unit="group" if grouped else "probe",
        inconclusive=_any_inconclusive(planned),
        notes=tuple(notes),
    )


# --- what is stored ---------------------------------------------------------------------------


def _spreads(config: AuditConfig) -> tuple[dict[str, Spread], bool, list[str]]:
    """Return the spread of each region, whether probes have groups, and what is not stored."""
    notes: list[str] = []
    try:
        baseline, replicates = _stored(config)
    except AuditError as error:
        notes.append(f"told in seed-SD, since no replicates are at hand: {error}")
        return *_unknown(config), notes
    if len(replicates) < 2:
        notes.append(
            f"told in seed-SD: {len(replicates)} strong replicates have no spread; capture at least 2"
        )
        return *_unknown(config), notes
    baseline, *replicates = in_common(baseline, *replicates)
    codes = encode_groups(list(baseline.groups) or None, len(baseline.shares.probe_ids))
    shifts = np.stack([one.shares.values - baseline.shares.values for one in replicates])
    found = {
        column.region: _spread(shifts[:, :, i], codes) for i, column in enumerate(baseline.shares.columns)
    }
    return found, codes is not None, notes


def _stored(config: AuditConfig) -> tuple[RunData, list[RunData]]:
    """Return the baseline and the strong replicates, from the store and from floors."""
    store = Store(config.store.url)
    floors = [read_floor(one.floor) for one in config.replicates if one.floor is not None]
    baseline = floors[0].baseline if floors else resolve(config, store, "before").read()
    frozen = [one for floor in floors for one in floor.replicates]
    captured = [one.read() for one in replicate_runs(config, store)]
    check_replicate_runs([one.ref for one in (*frozen, *captured)], {"before": baseline.ref})
    return baseline, [one for one in [*frozen, *captured] if (one.ref.kind or "seed") in STRONG_KINDS]


def _unknown(config: AuditConfig) -> tuple[dict[str, Spread], bool]:
    """Return each region with the number of probes (groups) alone, and whether probes have groups."""
    probes = load_probes(probe_source(config))
    names = [region.name for region in audit_regions(config, probes)]
    codes = encode_groups([probe.group for probe in probes], len(probes))
    units = len(probes) if codes is None else len(np.unique(codes))
    return {name: Spread(units=units) for name in names}, codes is not None


def _spread(shifts: np.ndarray, codes: np.ndarray | None) -> Spread:
    """Return the spread of one region from the replicates' shifts, (replicate, probe)."""
    k = len(shifts)
    own = [collapse(one[:, None], codes) for one in shifts]
    means = np.array([unit.mean[0] for unit in own])
    others = [(shifts.sum(axis=0) - one) / (k - 1) for one in shifts]
    against = [collapse((one - rest)[:, None], codes) for one, rest in zip(shifts, others, strict=True)]
    units = int(own[0].present[0])
    variance = float(np.mean([variance_of_mean(unit)[0] for unit in own]))
    excess = float(np.mean([variance_of_mean(unit)[0] for unit in against]))
    if not np.isfinite(means).all() or units < 2:
        return Spread(units=units, replicates=k)
    return Spread(
        mean=float(means.mean()),
        seed_sd=float(means.std(ddof=1)),
        probe_sd=math.sqrt(variance * units),
        probe_variance=excess,
        units=units,
        replicates=k,
    )


# --- one rule ---------------------------------------------------------------------------------


def _regions(rule: Rule, spreads: dict[str, Spread]) -> Sequence[str]:
    return list(spreads) if rule.region == "*" and rule.measure in PLANNED else [rule.region]


def _at_least(least: int, planned: PlannedRule) -> PlannedRule:
    """Return `planned` with no fewer probes (groups) than any verdict needs."""
    needed = planned.probes_needed
    return planned if needed is None else replace(planned, probes_needed=max(needed, least))


def _plan_rule(
    rule: Rule,
    region: str,
    spread: Spread,
    policy: Policy,
    tests: int,
    *,
    shift: float | None,
    power: float,
) -> PlannedRule:
    alpha = policy.alpha / tests if rule.kind == "excess" else policy.alpha
    if rule.measure not in PLANNED or rule.segment is not None or rule.layer is not None:
        note = "planned for shifts of the whole stack and all probes alone"
        return _unplanned(rule, region, alpha, spread, note)
    if spread.seed_sd == 0:
        return _unplanned(rule, region, alpha, spread, "the replicates do not differ at all")
    wanted = shift if shift is not None else _own_limit(rule, spread)
    if rule.kind == "limit":
        return _plan_limit(rule, region, spread, policy, shift=wanted, power=power)
    side = _side(rule)
    scale = spread.seed_sd or 1.0
    k = spread.replicates or _replicates_to_plan(policy)
    in_sd = spread.seed_sd is None
    size = None if wanted is None else wanted / scale
    needed = None
    if size is not None and not (in_sd and shift is not None):
        needed = replicates_for(size, alpha=alpha, power=power, alternative=side, least=policy.min_replicates)
    hopeless = size is not None and needed is None and not in_sd
    return PlannedRule(
        rule=rule.label,
        kind=rule.kind,
        region=region,
        alpha=alpha,
        shift=wanted,
        in_sd=in_sd,
        spread=spread,
        replicates_needed=needed,
        probes_needed=_enough_probes(spread, policy, wanted, power, k),
        detectable=minimum_detectable_shift(
            scale, k, alpha=policy.alpha, power=power, alternative=side, rules=tests
        ),
        harmless=_excess_chances(rule, spread, policy, k=k, tests=tests, side=side),
        note=_HOPELESS if hopeless else None,
    )


def _replicates_to_plan(policy: Policy) -> int:
    """Return the number of replicates to plan with where none is stored."""
    return max(5, policy.min_replicates)


def _unplanned(rule: Rule, region: str, alpha: float, spread: Spread, note: str) -> PlannedRule:
    return PlannedRule(
        rule.label,
        rule.kind,
        region,
        alpha,
        None,
        spread.seed_sd is None,
        spread,
        None,
        None,
        None,
        None,
        note,
    )


def _side(rule: Rule) -> Alternative:
    return {"increase": "greater", "decrease": "less"}.get(rule.direction, "two-sided")  # type: ignore[return-value]


def _own_limit(rule: Rule, spread: Spread) -> float | None:
    """Return the shift that the rule itself speaks of: its limit, or its margin."""
    if rule.kind == "limit":
        return None if rule.fail is None else abs(rule.fail)
    if isinstance(rule.within, str):
        return float(rule.within.partition(" ")[0]) * (spread.seed_sd or 1.0)
    return None if rule.within is None or spread.seed_sd is None else float(rule.within)


def _enough_probes(spread: Spread, policy: Policy, shift: float | None, power: float, k: int) -> int | None:
    """Return how many probes let the excess' interval tell `shift` from 0; None where seeds alone hide it."""
    if spread.seed_sd is None or not spread.units or not shift:
        return None
    z = float(special.ndtri(1 - policy.alpha) + special.ndtri(power))
    room = (shift / z) ** 2 - spread.seed_sd**2 * (1 + 1 / k)
    return None if room <= 0 else max(2, math.ceil(spread.probe_variance * spread.units / room))


def _excess_chances(
    rule: Rule, spread: Spread, policy: Policy, *, k: int, tests: int, side: Alternative
) -> Chances | None:
    if rule.within is None or k < 2 or (spread.seed_sd is None and not isinstance(rule.within, str)):
        return None
    scale = spread.seed_sd or 1.0
    within = rule.within if isinstance(rule.within, str) else float(rule.within) / scale
    return excess_chances(
        k,
        within,
        alpha=policy.alpha,
        rules=tests,
        effect_floor=policy.effect_floor / scale if spread.seed_sd is not None else 0.0,
        probe_variance=spread.probe_variance / scale**2,
        alternative=side,
    )


def _plan_limit(
    rule: Rule, region: str, spread: Spread, policy: Policy, *, shift: float | None, power: float
) -> PlannedRule:
    """Plan a limit rule: `shift` is the distance from the limit that must be told apart."""
    probes, harmless = None, None
    if spread.probe_sd and shift:
        probes = probes_for(shift, spread.probe_sd, alpha=policy.alpha, power=power)
    if spread.probe_sd is not None and spread.seed_sd is not None and spread.mean is not None and rule.fail:
        half = _half_width(spread, policy.alpha)
        bounds = limit_bounds(rule, rule.fail)
        harmless = limit_chances(spread.mean, spread.seed_sd, half, *bounds)
    return PlannedRule(
        rule=rule.label,
        kind=rule.kind,
        region=region,
        alpha=policy.alpha,
        shift=shift,
        in_sd=False,
        spread=spread,
        replicates_needed=None,
        probes_needed=probes,
        detectable=None,
        harmless=harmless,
        note=None
        if spread.probe_sd is not None
        else "its probes are planned from the baseline and at least 2 replicates; capture what is missing",
    )


def _half_width(spread: Spread, alpha: float) -> float:
    """Return the half-width of the interval over the probes at hand."""
    t = float(special.stdtrit(spread.units - 1, 1 - alpha))
    return t * (spread.probe_sd or 0.0) / math.sqrt(spread.units)


def _any_inconclusive(planned: Sequence[PlannedRule]) -> float | None:
    """Return the chance that at least one rule stays open, were the rules independent."""
    chances = [one.harmless for one in planned]
    if not chances or any(one is None for one in chances):
        return None
    return 1 - math.prod(1 - one.inconclusive for one in chances if one is not None)
