"""A policy and its rules, and how they end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from audit.records.cells import Effect, ReplicateTest
from audit.records.digests import digest
from audit.records.evidence import Confirmation


class Outcome(StrEnum):
    """How a rule or a policy ends; worst first when compared by :func:`worst`."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"


_SEVERITY = [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL, Outcome.ERROR]


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: ERROR > FAIL > INCONCLUSIVE > PASS."""
    return max(outcomes, key=_SEVERITY.index)


@dataclass(frozen=True)
class Rule:
    """One condition of a policy.

    ``limit`` rules judge against `fail` (and `warn`), ``excess`` rules against the noise floor:
    PASS needs the interval of the excess shift inside ±`within` (a number, or ``"3 sd"``).
    """

    region: str
    kind: Literal["limit", "excess"]
    measure: str = "shift"
    direction: Literal["increase", "decrease", "both"] = "both"
    fail: float | None = None
    warn: float | None = None
    within: float | str | None = None
    stream: str | None = None
    effect: Effect | None = None
    segment: str | None = None
    layer: int | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """Return the rule's name in tables and approvals."""
        return self.name or f"{self.kind} {self.measure} {self.region}"


@dataclass(frozen=True)
class Policy:
    """All rules, and the thresholds they share."""

    rules: tuple[Rule, ...]
    alpha: float = 0.05
    power: float = 0.8
    effect_floor: float = 0.01
    min_probes: int = 20
    min_clusters: int = 8
    min_replicates: int = 3
    allow: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return the SHA-256 that approvals and the log bind to."""
        return digest({**vars(self), "rules": [vars(rule) for rule in self.rules]})


@dataclass(frozen=True)
class RuleVerdict:
    """The outcome of one rule on one cell, with every number a reader needs to check it.

    `floor` is the mean and SD of the replicates' shifts; `explained` says whether re-training alone
    could explain the value (None = cannot be said), the same for every rule on one cell; `needed` is
    how many probes or replicates would settle an INCONCLUSIVE rule. `unproven` says why a shift proves no
    change of reliance: the method is not shown to be faithful on a checkpoint, and occlusion of the region
    has not confirmed it.
    """

    rule: Rule
    region: str
    outcome: Outcome
    sentence: str
    stream: str = "input"
    effect: str = "model"
    value: float | None = None
    interval: tuple[float, float] | None = None
    limit: float | None = None
    warned: bool = False
    before: float | None = None
    after: float | None = None
    floor: tuple[float, float] | None = None
    excess: ReplicateTest | None = None
    adjusted_pvalue: float | None = None
    minimum_detectable_shift: float | None = None
    n_probes: int = 0
    n_missing: int = 0
    n_clusters: int | None = None
    n_replicates: int = 0
    explained: bool | None = None
    needed: str | None = None
    reason: str | None = None
    confirmation: Confirmation | None = None
    unproven: str | None = None
    approved_by: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The worst outcome of a policy's rules, and all of them; `notes` tells what was not counted."""

    outcome: Outcome
    rules: tuple[RuleVerdict, ...]
    sentence: str
    exit_code: int
    policy: Policy
    comparison_id: str | None = None
    reason: str | None = None
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """Return the outcome as text."""
        return self.outcome.value
