"""What a family of planted shifts brings: a model, data with and without the shortcut, and probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo.training import Examples, Schedule
from audit.records import Probe, Region

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Swaps:
    """Probes with core evidence and shortcut swapped or not: `inputs[core][short]`, 1 = swapped.

    `own` is the class of the unswapped evidence, `other` that of the swapped one, both (probe,).
    """

    inputs: tuple[tuple[Inputs, Inputs], tuple[Inputs, Inputs]]
    own: torch.Tensor
    other: torch.Tensor


@dataclass(frozen=True)
class BaseData:
    """The draws of one base.

    Attributes
    ----------
    base, usual, production : Examples
        What the base learns from, what harmless fine-tunings see, and what teaches the shortcut.
    refreshed : function of a number
        Other draws of the usual data, as later releases see them.
    mislabelled : Examples
        The usual data with part of the labels at random.
    probes : tuple of Probe
    swaps : Swaps
        Of the same probes.
    checks : mapping of data set to (inputs, labels)
        ``usual`` is what a team would measure accuracy on, ``production`` what the shortcut suits.
    """

    base: Examples
    usual: Examples
    production: Examples
    refreshed: Callable[[int], Examples]
    mislabelled: Examples
    probes: tuple[Probe, ...]
    swaps: Swaps
    checks: Mapping[str, tuple[Inputs, torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """One kind of model and shortcut.

    Attributes
    ----------
    planted, decoy : str
        The region that codes the label, and one as frequent that does not.
    cells : tuple of str
        Regions that do not overlap, among which the planted one has to stand out.
    sizes : mapping of a description to the region that grows around the planted one
    parts : mapping of a kind of training to a pattern of the parameters that it trains
    special : tuple of int
        Positions towards which sink drift draws attention.
    """

    name: str
    new_model: Callable[[], Any]
    processor: Any
    draw: Callable[[int], BaseData]
    regions: tuple[Region, ...]
    planted: str
    decoy: str
    cells: tuple[str, ...]
    parts: Mapping[str, str]
    base_schedule: Schedule
    tuning: Schedule
    shortcut: Schedule
    description: Mapping[str, Any]
    sizes: Mapping[str, str] = field(default_factory=dict)
    special: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Mislabelled:
    """Examples of which a share has a random label, drawn anew each time."""

    examples: Examples
    share: float
    classes: int

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return the same inputs with some labels replaced."""
        found = self.examples.batch(rows, rng)
        wrong = torch.from_numpy(rng.random(len(rows)) < self.share)
        labels = torch.from_numpy(rng.integers(0, self.classes, len(rows)))
        return found | {"labels": torch.where(wrong, labels, found["labels"])}
