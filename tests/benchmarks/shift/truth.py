"""What a checkpoint really does: how far its output follows the shortcut, and its accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from audit.demo.training import accuracy, reproducible
from tests.benchmarks.shift.bases import State, written
from tests.benchmarks.shift.families import BaseData, Inputs, Swaps


@dataclass(frozen=True)
class Truth:
    """Causal share of the shortcut, and accuracy by data set."""

    gamma: float
    accuracies: Mapping[str, float]


def cached_truths(path: Path, make: Callable[[], Mapping[str, Truth]]) -> dict[str, Truth]:
    """Return the truths kept in a file, measured the first time."""
    if not path.is_file():
        with written(path) as draft:
            draft.write_text(json.dumps({name: asdict(one) for name, one in make().items()}, indent=1))
    return {name: Truth(**one) for name, one in json.loads(path.read_text()).items()}


def measure_truths(model: Any, data: BaseData, states: Mapping[str, State]) -> dict[str, Truth]:
    """Return the truth about every checkpoint, whose weights are put into `model` in turn."""
    found = {}
    for name, state in states.items():
        model.load_state_dict(state)
        found[name] = measure_truth(model, data)
    return found


def measure_truth(model: Any, data: BaseData) -> Truth:
    """Return the truth about a model."""
    accuracies = {name: accuracy(model, *check) for name, check in data.checks.items()}
    return Truth(causal_share(model, data.swaps), accuracies)


def causal_share(model: Any, swaps: Swaps) -> float:
    """Return γ = G_short / (G_core + G_short).

    G is the mean fall of the logit difference (own class − other class) when one kind of evidence is
    swapped, the other kept as it is: the main effect in the 2×2 of swaps, averaged over probes. A fall
    below 0 counts as 0; when neither moves the output, γ is NaN.
    """
    margins = [[_margin(model, one, swaps) for one in row] for row in swaps.inputs]
    core = ((margins[0][0] - margins[1][0]) + (margins[0][1] - margins[1][1])) / 2
    short = ((margins[0][0] - margins[0][1]) + (margins[1][0] - margins[1][1])) / 2
    return share_of(float(core.mean()), float(short.mean()))


def share_of(core: float, short: float) -> float:
    """Return the share of `short` in both effects.

    Examples
    --------
    >>> share_of(3.0, 1.0), share_of(2.0, -0.1)
    (0.25, 0.0)
    """
    core, short = max(core, 0.0), max(short, 0.0)
    return short / (core + short) if core + short else math.nan


def _margin(model: Any, inputs: Inputs, swaps: Swaps) -> torch.Tensor:
    with torch.inference_mode(), reproducible(0):
        logits = model(**inputs).logits.double()
    rows = torch.arange(len(logits))
    return torch.as_tensor(logits[rows, swaps.own] - logits[rows, swaps.other])
