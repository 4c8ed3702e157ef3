"""How a comparison is judged: its statistics, and the rules of the gate."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from audit.config.section import Section
from audit.errors import ConfigError
from audit.records import Effect, Policy, Rule
from audit.statistics.measures import RANGES, SIMILARITIES, MapMeasure

RESAMPLES = 9999
DEFAULT_MEASURES: tuple[MapMeasure, ...] = ("js_distance", "wasserstein")
"""Measures of whole maps that every comparison tells."""


class StatisticsSection(Section):
    """Level, power, resamples and seed of every statistic."""

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = Policy.alpha
    power: Annotated[float, Field(gt=0, lt=1)] = Policy.power
    resamples: Annotated[int, Field(ge=99)] = RESAMPLES
    seed: int = 0
    measures: tuple[MapMeasure, ...] = DEFAULT_MEASURES


class RuleSection(Section):
    """One condition of the policy."""

    region: str
    kind: Literal["limit", "excess"]
    measure: str = Rule.measure
    direction: Literal["increase", "decrease", "both"] = Rule.direction
    fail: float | None = None
    warn: float | None = None
    within: float | str | None = None
    stream: str | None = None
    effect: Effect | None = None
    segment: str | None = None
    layer: Annotated[int, Field(ge=0)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.kind == "limit" and self.fail is None:
            raise ValueError("a limit rule needs fail = <number>")
        if self.kind == "limit" and self.within is not None:
            raise ValueError('within belongs to kind = "excess"; a limit rule has fail and warn')
        if self.kind == "excess" and self.within is None:
            raise ValueError('an excess rule needs within = <number> or "3 sd"')
        if self.kind == "excess" and (self.fail is not None or self.warn is not None):
            raise ValueError('fail and warn belong to kind = "limit"; an excess rule has within')
        if self.fail is not None:
            self._check_bounds(self.fail)
        return self

    def _check_bounds(self, fail: float) -> None:
        """Refuse limits that no value, or every value, could keep."""
        from audit.verdicts.rules import limit_bounds

        rule = Rule(**self.model_dump())
        if fail < 0 and self.measure not in SIMILARITIES and self.direction != "decrease":
            raise ValueError(f"fail is {fail:g}; give its size, {-fail:g}, and the side as direction")
        try:
            low, high = limit_bounds(rule, fail)
            warned = (low, high) if self.warn is None else limit_bounds(rule, self.warn)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        reason = _never(self.measure, low, high)
        if reason is not None and fail not in RANGES[self.measure]:  # whoever gives the very end wants none
            raise ValueError(f"fail = {fail:g} never fails: {reason}")
        if warned[0] < low or warned[1] > high:
            raise ValueError(
                f"warn = {self.warn:g} is looser than fail = {fail:g} and would never be seen; exchange them"
            )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.measure == "shift" and isinstance(self.within, float | int) and self.within > 1:
            raise ValueError(f"within = {self.within:g} allows everything: {_never('shift', -1, 1)}")
        return self

    @field_validator("within")
    @classmethod
    def _within(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str):
            number, _, unit = value.strip().partition(" ")
            if unit.strip() != "sd" or not _is_positive(number):
                raise ValueError(f'within is {value!r}; expected a number or text like "3 sd"')
        elif value is not None and value <= 0:
            raise ValueError(f"within is {value}; expected a number above 0")
        return value


def _never(measure: str, low: float, high: float) -> str | None:
    """Return why no value of a measure leaves [low, high], or None where one can."""
    least, most = RANGES.get(measure, (-math.inf, math.inf))
    if math.isinf(most) or low > least or high < most:
        return None
    return f"{measure} lies from {least:g} to {most:g}; give a share such as 0.02 for 2 %"


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


class GateSection(Section):
    """The rules and the thresholds they share."""

    rules: list[RuleSection] = []
    effect_floor: Annotated[float, Field(ge=0)] = Policy.effect_floor
    min_probes: Annotated[int, Field(ge=1)] = Policy.min_probes
    min_clusters: Annotated[int, Field(ge=1)] = Policy.min_clusters
    min_replicates: Annotated[int, Field(ge=2)] = Policy.min_replicates
    allow: list[Literal["inconclusive"]] = []
