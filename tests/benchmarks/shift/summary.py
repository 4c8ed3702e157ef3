"""From the findings of single bases to one row a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from audit.records import Outcome
from tests.benchmarks.shift.findings import WANTED_SHARE, Findings
from tests.benchmarks.shift.rates import (
    LEVEL,
    Rate,
    frozen_limit,
    over_bases,
    pooled,
    rank_correlation,
)

WANTED_POWER, WANTED_CORRELATION, WANTED_LOCATION = 0.9, 0.9, 0.95


@dataclass(frozen=True)
class Part:
    """A shortcut learnt by a part of the model: how strong it became, and how often it was seen.

    `missed` is the rate among the bases where the causal share changed by at least `WANTED_SHARE`; None
    where there is none.
    """

    delta: float
    alarms: Rate
    missed: Rate | None


@dataclass(frozen=True)
class Summary:
    """What a method is worth on some bases.

    Attributes
    ----------
    false_alarms, power : mapping of kind of floor to rate
        ``seed`` (of all splits), ``seed, one split``, ``paired``, ``limit``, ``tail``, ``release`` …; power
        over the checkpoints of the dial whose causal share changed enough.
    weak_power : Rate or None
        Power of the seed floor where it changed a little.
    correlation, within : float
        Spearman of excess and change of the causal share, over all bases together and averaged over bases.
    located, early : Rate
    pointed : float
    parts, confounds : mapping of name to what was measured
    gate, gate_power : Rate or None
        How often the product's gate fails a harmless candidate, and a shortcut that is strong enough.
    gate_open : float or None
        How often it leaves a harmless candidate undecided.
    """

    method: str
    family: str
    bases: int
    false_alarms: Mapping[str, Rate]
    power: Mapping[str, Rate]
    weak_power: Rate | None
    correlation: float
    within: float
    located: Rate
    early: Rate
    pointed: float
    parts: Mapping[str, Part]
    confounds: Mapping[str, Rate]
    gate: Rate | None
    gate_power: Rate | None
    gate_open: float | None


def summarise(
    method: str, family: str, scored: Sequence[Findings], *, frozen: Sequence[Findings] = ()
) -> Summary:
    """Return a method's row.

    Parameters
    ----------
    scored : sequence of Findings
        One of each base that counts.
    frozen : sequence of Findings
        Of other bases, on which the limit of the floor "none" is frozen.

    Raises
    ------
    ValueError
        When there is no scored base, or no shortcut that is strong enough.
    """
    limit = frozen_limit(np.concatenate([one.harmless for one in frozen])) if frozen else None
    return Summary(
        method=method,
        family=family,
        bases=len(scored),
        false_alarms=_false_alarms(scored, limit),
        power=_power(scored, limit),
        weak_power=_pooled_or_none([one.found["seed"][one.weak] for one in scored]),
        correlation=rank_correlation(
            np.concatenate([one.dial for one in scored]), np.concatenate([one.delta for one in scored])
        ),
        within=float(np.mean([rank_correlation(one.dial, one.delta) for one in scored])),
        located=pooled([one.located[one.strong] for one in scored]),
        early=over_bases([float(one.early) for one in scored]),
        pointed=float(np.mean([one.pointed for one in scored])),
        parts=_parts(scored),
        confounds=_rates([one.confounds for one in scored]),
        gate=_outcomes([one.gate for one in scored], Outcome.FAIL),
        gate_power=_outcomes([one.gate_found for one in scored], Outcome.FAIL),
        gate_open=_mean(_outcomes([one.gate for one in scored], Outcome.INCONCLUSIVE)),
    )


def _false_alarms(scored: Sequence[Findings], limit: float | None) -> dict[str, Rate]:
    found = {
        "seed": over_bases([one.splits for one in scored]),
        "seed, one split": over_bases([one.plain for one in scored]),
        "paired": over_bases([one.naive for one in scored]),
    }
    if limit is not None:
        found["limit"] = over_bases([float((np.abs(one.harmless) > limit).mean()) for one in scored])
    return found | _rates([one.floors for one in scored])


def _power(scored: Sequence[Findings], limit: float | None) -> dict[str, Rate]:
    kinds = dict.fromkeys(kind for one in scored for kind in one.found)
    found = {
        kind: pooled([one.found[kind][one.strong] for one in scored if kind in one.found]) for kind in kinds
    }
    if limit is not None:
        found["limit"] = pooled([np.abs(one.dial_shifts[one.strong]) > limit for one in scored])
    return found


def _rates(found: Sequence[Mapping[str, float]]) -> dict[str, Rate]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: over_bases([one[name] for one in found if name in one]) for name in names}


def _parts(scored: Sequence[Findings]) -> dict[str, Part]:
    found = {}
    for part in dict.fromkeys(name for one in scored for name in one.parts):
        pairs = [one.parts[part] for one in scored if part in one.parts]
        missed = [1 - alarm for delta, alarm in pairs if delta >= WANTED_SHARE]
        found[part] = Part(
            delta=float(np.mean([delta for delta, _ in pairs])),
            alarms=over_bases([alarm for _, alarm in pairs]),
            missed=over_bases(missed) if missed else None,
        )
    return found


def _outcomes(judged: Sequence[Sequence[Outcome]], wanted: Outcome) -> Rate | None:
    return _pooled_or_none([[float(one is wanted) for one in many] for many in judged])


def _pooled_or_none(groups: Sequence[ArrayLike]) -> Rate | None:
    return pooled(groups) if any(np.size(one) for one in groups) else None


def _mean(rate: Rate | None) -> float | None:
    return None if rate is None else rate.value


def over_families(row: Summary, families: Sequence[Summary]) -> Summary:
    """Return the row of all bases with the families' mean correlation: their shifts have other sizes."""
    return replace(row, correlation=float(np.mean([one.correlation for one in families])))


def missed_goals(row: Summary) -> list[str]:
    """Return which goals of the benchmark a method misses, with what was measured."""
    seed, missed = row.false_alarms["seed"], []
    if not (seed.holds(LEVEL) and seed.width < LEVEL):
        missed.append(f"false alarms {seed.value:.3f} [{seed.low:.3f}, {seed.high:.3f}]")
    if row.power["seed"].value < WANTED_POWER:
        missed.append(f"power {row.power['seed'].value:.2f}")
    if row.correlation < WANTED_CORRELATION:
        missed.append(f"correlation {row.correlation:.2f}")
    if row.located.value < WANTED_LOCATION:
        missed.append(f"localisation {row.located.value:.2f}")
    return missed
