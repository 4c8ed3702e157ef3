"""How often the replicate test alarms on harmless re-trainings, as measured by the planted-shift benchmark.

The rates lie in the package as ``audit/false_alarms.json``, which ``make benchmark-shift`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from audit.records import STRONG_KINDS, Comparison, RuleVerdict, Verdict
from audit.report.wording import clip, number

RATES = Path(__file__).parents[1] / "false_alarms.json"
MEASURED = ("shift", "model")
"""Measure and effect that the benchmark judges; distances and the 2×2 it does not."""


@dataclass(frozen=True)
class FalseAlarms:
    """Measured rate of the unadjusted replicate test for a method with its default parameters.

    Attributes
    ----------
    method, floor : str
        ``rollout``, …; kind of replicate.
    rate, low, high : float
        With its 95 % interval over bases.
    level : float
        Nominal level of the test.
    replicates, bases : int
    """

    method: str
    floor: str
    rate: float
    low: float
    high: float
    level: float
    replicates: int
    bases: int

    @property
    def sentence(self) -> str:
        """Return the rate in words.

        Examples
        --------
        >>> FalseAlarms("rollout", "seed", 0.049, 0.041, 0.058, 0.05, 5, 40).sentence
        'Measured false-alarm rate of this test: .049 [.041, .058] at nominal .05 (planted-shift benchmark, \
rollout at its defaults, seed floor of 5 replicates, 40 bases).'
        """
        span = f"[{number(self.low)}, {number(self.high)}]"
        return (
            f"Measured false-alarm rate of this test: {number(self.rate)} {span} at nominal "
            f"{number(self.level, 2)} (planted-shift benchmark, {self.method} at its defaults, {self.floor} "
            f"floor of {self.replicates} replicates, {self.bases} bases)."
        )


@lru_cache(maxsize=1)
def read_false_alarms(path: Path = RATES) -> tuple[FalseAlarms, ...]:
    """Return the measured rates; empty where the file is missing."""
    if not path.is_file():
        return ()
    return tuple(FalseAlarms(**one) for one in json.loads(path.read_text(encoding="utf-8"))["rates"])


def false_alarms_of(comparison: Comparison | None) -> FalseAlarms | None:
    """Return the measured rate for a comparison's method and kind of floor, None where there is none."""
    if comparison is None:
        return None
    floor = _floor(comparison)
    return next(
        (one for one in read_false_alarms() if (one.method, one.floor) == (comparison.method, floor)), None
    )


def false_alarm_lines(comparison: Comparison | None, verdict: Verdict | None) -> list[str]:
    """Return what is known about the false alarms of a verdict's excess rules, one sentence each.

    Rules without a test (no replicates, or weak ones only) have no rate.
    """
    if comparison is None or verdict is None:
        return []
    tested = [one for one in verdict.rules if one.rule.kind == "excess" and one.excess is not None]
    return list(dict.fromkeys(_lines(comparison, tested)))


def _lines(comparison: Comparison, tested: list[RuleVerdict]) -> Iterator[str]:
    rate = false_alarms_of(comparison)
    for one in tested:
        if (one.rule.measure, one.effect) != MEASURED:
            what = one.rule.measure.replace("_", " ")
            effect = "" if one.effect == "model" else f", {one.effect.replace('_', ' ')}"
            yield f"No false-alarm rate was measured for excess rules on {what}{effect}."
        elif rate is None:
            yield (
                f"No false-alarm rate was measured for {clip(comparison.method, 60)} with a floor of kind "
                f"{_floor(comparison)}."
            )
        else:
            yield rate.sentence


def _floor(comparison: Comparison) -> str:
    """Return the kinds of the replicates that decide; plain shifts count as ``seed``."""
    kinds = comparison.replicate_kinds or ("seed",)
    return " and ".join(sorted(set(kinds) & STRONG_KINDS)) or "none"
