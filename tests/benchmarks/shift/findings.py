"""What one base says about one method: alarms on harmless runs, on the dial, and on the confounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from audit.records import Outcome
from tests.benchmarks.shift.bases import (
    ANCHOR,
    BASE,
    DIAL,
    HARMLESS,
    LABEL_NOISE,
    LATE,
    REFRESHED,
    REPLICATES,
    SINK_DRIFT,
)
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.gated import gate_outcomes
from tests.benchmarks.shift.maps import Shares
from tests.benchmarks.shift.rates import (
    Array,
    alarm_rate,
    leave_one_out_rate,
    naive_rate,
    plain_rate,
    rejections,
    split_rate,
)
from tests.benchmarks.shift.truth import Truth

WANTED_SHARE, SMALL_SHARE = 0.1, 0.02
"""Changes of the causal share: from the one a shift has to be found, below the other nobody asks."""
ACCURACY_STEP = 0.01
OTHERS = tuple(one for one in HARMLESS if one != ANCHOR)


@dataclass(frozen=True)
class Findings:
    """One base, one method.

    Attributes
    ----------
    plain, splits, naive : float
        False alarms on the planted region: of the replicate test with the first runs as replicates, over
        all splits, and of the paired test over probes.
    harmless : float array (run,)
        Their shifts, for frozen limits.
    dial : float array (strength,)
        Excess of each checkpoint of the dial over the mean of the other harmless runs.
    delta : float array (strength,)
        Change of its causal share against theirs.
    found : mapping of kind of floor to float array (strength,)
        Share of the choices of replicates that alarm; 0 or 1 where there is but one.
    located : bool array (strength,)
        Whether the planted region gained more than every other cell.
    pointed : float
        Part of the probes whose largest gain lies in the planted region, at full strength.
    early : bool
        Whether the first alarm along the dial comes no later than a change of accuracy by 1 %.
    floors : mapping of a null to the rate of its false alarms
    parts : mapping of a kind of training to (change of causal share, alarm rate)
    confounds : mapping of a confound to its alarm rate
    gate, gate_found : sequence of outcomes
        Of the product's gate on harmless candidates, and on the dial where the change is large enough.
    """

    plain: float
    splits: float
    naive: float
    harmless: Array
    dial: Array
    dial_shifts: Array
    delta: Array
    found: Mapping[str, Array]
    located: NDArray[np.bool_]
    pointed: float
    early: bool
    floors: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confounds: Mapping[str, float] = field(default_factory=dict)
    gate: Sequence[Outcome] = ()
    gate_found: Sequence[Outcome] = ()

    @property
    def strong(self) -> NDArray[np.bool_]:
        """Return which checkpoints of the dial follow the shortcut enough to have to be found."""
        return np.asarray(self.delta >= WANTED_SHARE)

    @property
    def weak(self) -> NDArray[np.bool_]:
        """Return which checkpoints of the dial follow the shortcut a little."""
        return np.asarray((self.delta >= SMALL_SHARE) & (self.delta < WANTED_SHARE))


def findings_of(
    family: Family,
    shares: Shares,
    truths: Mapping[str, Truth],
    *,
    gate: bool = True,
    sink_gain: float | None = None,
) -> Findings:
    """Return what a base says about a method; `sink_gain` stands beside the alarms under sink drift."""
    shifts = _shifts(shares, family.planted)
    normal = np.mean([truths[one].gamma for one in OTHERS])
    delta = np.array([truths[one].gamma for one in DIAL]) - normal
    harmless, others, dial = (shifts(names) for names in (HARMLESS, OTHERS, DIAL))
    plain = rejections(dial, harmless[:REPLICATES])
    floors = _floors(shifts)
    found = {"seed": alarm_rate(dial, others), **_found_by_other_floors(shifts)}
    strong = [name for name, much in zip(DIAL, delta >= WANTED_SHARE, strict=True) if much]
    judge = gate_outcomes(family, shares) if gate else None
    confounds = _confounds(family, shares, strong)
    for name in (LABEL_NOISE, SINK_DRIFT):
        if judge and shifts.has(name):
            confounds[f"{name}, gate FAIL"] = float(judge([name])[0] is Outcome.FAIL)
    if sink_gain is not None:
        confounds[f"{SINK_DRIFT}, gain of the special tokens"] = sink_gain
    return Findings(
        plain=plain_rate(harmless),
        splits=split_rate(harmless),
        naive=naive_rate(shares.values[shares.rows(HARMLESS), :, shares.column(family.planted)]),
        harmless=harmless,
        dial=dial - others.mean(),
        dial_shifts=dial,
        delta=delta,
        found=found,
        located=_located(family, shares),
        pointed=float(shares.pointed[shares.row(DIAL[-1])]),
        early=_early(plain, truths),
        floors=floors,
        parts=_parts(family, shares, truths, float(normal)),
        confounds=confounds,
        gate=judge(HARMLESS[REPLICATES:]) if judge else (),
        gate_found=judge(strong) if judge else (),
    )


class _Shifts:
    """Shifts of one region by names of checkpoints."""

    def __init__(self, shares: Shares, means: Array) -> None:
        self.shares, self.means = shares, means

    def __call__(self, names: Sequence[str]) -> Array:
        return self.means[self.shares.rows(names)] - self.means[self.shares.row(BASE)]

    def has(self, name: str) -> bool:
        return name in self.shares.checkpoints


def _shifts(shares: Shares, region: str, probes: NDArray[np.bool_] | None = None) -> _Shifts:
    values = shares.values[:, :, shares.column(region)]
    chosen = values if probes is None else values[:, probes]
    return _Shifts(shares, np.asarray(np.nanmean(chosen, axis=1)))


def _floors(shifts: _Shifts) -> dict[str, float]:
    """Return false alarms where the replicates are of another kind than the candidates, or both are."""
    if not shifts.has(REFRESHED[0]):
        return {}
    releases, harmless = shifts(REFRESHED), shifts(HARMLESS)
    return {
        "tail": float(rejections(shifts(HARMLESS[1:]), shifts(LATE)).mean()),
        "release": float(alarm_rate(harmless, releases).mean()),
        "release, released candidate": leave_one_out_rate(releases),
        "seed, released candidate": float(alarm_rate(releases, harmless).mean()),
    }


def _found_by_other_floors(shifts: _Shifts) -> dict[str, Array]:
    if not shifts.has(REFRESHED[0]):
        return {}
    dial = shifts(DIAL)
    return {
        "tail": rejections(dial, shifts(LATE)).astype(float),
        "release": alarm_rate(dial, shifts(REFRESHED)),
    }


def _excesses(shares: Shares, names: Sequence[str], regions: Sequence[str]) -> Array:
    """Return the excess over the mean of the other harmless runs, (checkpoint, region)."""
    means = shares.means[:, [shares.column(one) for one in regions]]
    return np.asarray(means[shares.rows(names)] - means[shares.rows(OTHERS)].mean(axis=0))


def _located(family: Family, shares: Shares) -> NDArray[np.bool_]:
    gained_most = _excesses(shares, DIAL, family.cells).argmax(axis=1)
    return np.asarray(gained_most == family.cells.index(family.planted))


def _early(alarms: NDArray[np.bool_], truths: Mapping[str, Truth]) -> bool:
    usual = float(np.mean([truths[one].accuracies["usual"] for one in OTHERS]))
    moved = [abs(truths[one].accuracies["usual"] - usual) >= ACCURACY_STEP for one in DIAL]
    first_move = moved.index(True) if any(moved) else len(DIAL)
    return bool(alarms.any()) and int(alarms.argmax()) <= first_move


def _parts(
    family: Family, shares: Shares, truths: Mapping[str, Truth], normal: float
) -> dict[str, tuple[float, float]]:
    shifts = _shifts(shares, family.planted)
    return {
        part: (truths[part].gamma - normal, float(alarm_rate(shifts([part]), shifts(OTHERS))[0]))
        for part in family.parts
        if shifts.has(part)
    }


def _confounds(family: Family, shares: Shares, strong: Sequence[str]) -> dict[str, float]:
    """Return alarm rates on what is not the shortcut, or not the planted region."""
    planted = _shifts(shares, family.planted)
    pool = planted(OTHERS)
    found = {
        name: float(alarm_rate(planted([name]), pool)[0])
        for name in (LABEL_NOISE, SINK_DRIFT)
        if planted.has(name)
    }
    for size, region in family.sizes.items():
        found |= _false_and_found(f"region of {size}", _shifts(shares, region), strong)
    if len(set(shares.lengths.tolist())) > 1:
        long = shares.lengths > np.median(shares.lengths)
        for name, probes in (("short probes", ~long), ("long probes", long)):
            found |= _false_and_found(name, _shifts(shares, family.planted, probes), strong)
    if strong:
        decoy, own = np.abs(_excesses(shares, strong, [family.decoy, family.planted])).T
        found["decoy below planted"] = float((decoy < own).mean())
    bands = [one for one in shares.regions if one.startswith("band ")]
    if strong and bands:
        own, *by_band = np.abs(_excesses(shares, strong, [family.planted, *bands])).T
        found["every position band below planted"] = float((np.max(by_band, axis=0) < own).mean())
    return found


def _false_and_found(name: str, shifts: _Shifts, strong: Sequence[str]) -> dict[str, float]:
    rates = {f"{name}, false alarms": split_rate(shifts(HARMLESS))}
    if strong:
        rates[f"{name}, power"] = float(alarm_rate(shifts(strong), shifts(OTHERS)).mean())
    return rates
