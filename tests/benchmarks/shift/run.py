"""Train and measure every base, or take from the cache what an earlier run left there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.benchmarks.shift.bases import (
    ANCHOR,
    SINK_DRIFT,
    State,
    checkpoints_of,
    recipe_digest,
    written,
)
from tests.benchmarks.shift.families import BaseData, Family
from tests.benchmarks.shift.maps import (
    MAPS_VERSION,
    METHODS,
    Judged,
    Shares,
    as_checkpoint,
    cached_shares,
    shares_of,
    special_share,
)
from tests.benchmarks.shift.truth import Truth, cached_truths, measure_truths

SCORED, FROZEN, FULL, FEW = 20, 20, 10, 3
"""Bases that are scored, and on which limits are frozen; of the scored ones those that have every training,
and those that every method sees."""

TRUTHS = "truth.json"


@dataclass(frozen=True)
class Measured:
    """One base of a family, as far as it has been measured.

    Attributes
    ----------
    number : int
        Those below `FULL` have every training, the others harmless fine-tunings and the dial only; those
        below `SCORED` are scored.
    """

    family: Family
    number: int
    folder: Path

    @property
    def scored(self) -> bool:
        """Return whether rates are taken from this base."""
        return self.number < SCORED

    @property
    def full(self) -> bool:
        """Return whether this base has every training."""
        return self.number < FULL

    @cached_property
    def data(self) -> BaseData:
        """Return the base's draws."""
        return self.family.draw(1000 * (self.number + 1))

    @cached_property
    def states(self) -> dict[str, State]:
        """Return the weights of its checkpoints."""
        return checkpoints_of(self.family, self.folder, self.number, everything=self.full)

    def truths(self) -> dict[str, Truth]:
        """Return what each checkpoint really does."""
        return cached_truths(
            self.folder / TRUTHS,
            lambda: measure_truths(self.family.new_model().eval(), self.data, self.states),
        )

    def sink_gain(self) -> float | None:
        """Return what the special tokens gained under sink drift; None without that training."""
        if not self.full:
            return None
        path = self.folder / "sink.json"
        if not path.is_file():
            checkpoint = as_checkpoint(self.family.new_model(), self.family.processor)
            drifted, harmless = (
                special_share(checkpoint, self.data.probes, self.states[one]) for one in (SINK_DRIFT, ANCHOR)
            )
            with written(path) as draft:
                draft.write_text(json.dumps(drifted - harmless))
        return float(json.loads(path.read_text()))

    def has_truths(self) -> bool:
        """Return whether the truth about its checkpoints is known."""
        return (self.folder / TRUTHS).is_file()

    def shares(self, method: Judged) -> Shares:
        """Return what a method sees in each checkpoint."""
        return cached_shares(self._path(method), lambda: self._measure(method))

    def has(self, method: Judged) -> bool:
        """Return whether the base has been measured by a method."""
        return self._path(method).is_file()

    def _path(self, method: Judged) -> Path:
        return self.folder / f"{method.slug}-{MAPS_VERSION}.npz"

    def _measure(self, method: Judged) -> Shares:
        checkpoint: Any = as_checkpoint(self.family.new_model(), self.family.processor)
        return shares_of(self.family, self.data, checkpoint, self.states, method)


def bases_of(family: Family, cache: Path, numbers: Sequence[int]) -> list[Measured]:
    """Return bases of a family by their number."""
    home = cache / f"{family.name}-{recipe_digest(family)[:12]}"
    return [Measured(family, number, home / f"{number:02d}") for number in numbers]


def measure(families: Sequence[Family], cache: Path) -> Iterator[str]:
    """Measure everything that the cache lacks, the most telling bases first; yield a line for each."""
    common, rare = ([one for one in METHODS if one.rare is rare] for rare in (False, True))
    half = SCORED + FROZEN // 2
    rounds = [
        (range(FULL), common),
        (range(SCORED, half), common),
        (range(FEW), rare),
        (range(FULL, SCORED), common),
        (range(half, SCORED + FROZEN), common),
    ]
    for numbers, methods in rounds:
        for number in numbers:
            for family in families:
                (base,) = bases_of(family, cache, [number])
                base.truths()
                base.sink_gain()
                for method in methods:
                    if family.name in method.families:
                        base.shares(method)
                yield f"{family.name} base {number}: {len(methods)} methods"
