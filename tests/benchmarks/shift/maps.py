"""Shares of the regions in the maps that the product computes, for every checkpoint of a base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import audit
from audit.models.tasks import BACKBONE, task_of
from audit.records import Checkpoint, CheckpointInfo, Map, Probe, Region
from audit.regions import region_columns
from tests.benchmarks.shift.bases import HARMLESS, REPLICATES, State, written
from tests.benchmarks.shift.families import BaseData, Family

Array = NDArray[np.float64]
MAPS_VERSION = 1
"""Raise it when the product's maps change: what is kept is measured again, nothing is trained again."""


@dataclass(frozen=True)
class Judged:
    """A method that is judged: its label in the tables, its name and its parameters.

    `default` marks parameters that are the product's own, whose rates the product prints; `rare` methods
    are measured on fewer bases.
    """

    label: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    rare: bool = False
    families: tuple[str, ...] = ("vision", "text")

    @property
    def slug(self) -> str:
        """Return a name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.replace("×", "x"))

    @property
    def default(self) -> bool:
        """Return whether the method runs with the product's parameters."""
        return not self.params


METHODS = (
    Judged("rollout", "rollout"),
    Judged("rollout, max of heads", "rollout", {"head_fusion": "max"}, rare=True),
    Judged("rollout, discard .5", "rollout", {"discard_ratio": 0.5}, rare=True),
    Judged("rollout, measured residual", "rollout", {"residual": "measured"}, rare=True),
    Judged("gradient rollout, relevance", "gradient_rollout"),
    Judged("gradient rollout, product", "gradient_rollout", {"form": "product"}),
    Judged("raw attention", "raw_attention"),
    Judged("norms", "norms"),
    Judged("globenc", "globenc", rare=True, families=("text",)),  # refuses pre-norm layers
    Judged("alti", "alti"),
    Judged("value zeroing", "value_zeroing", rare=True),
    Judged("attention flow", "attention_flow", rare=True),
    Judged("rollout, top 4", "rollout", {"top_k": 4}, rare=True),
    Judged("input × gradient", "input_x_gradient", rare=True),
    Judged("occlusion", "occlusion", rare=True),
)


@dataclass(frozen=True)
class Shares:
    """What one method sees in the checkpoints of a base.

    Attributes
    ----------
    checkpoints, regions : tuple of str
    values : float array (checkpoint, probe, region)
        Share of the content mass; NaN where a probe lacks the region.
    pointed : float array (checkpoint,)
        Part of the probes in which the position that gained most over the mean of the replicates lies in
        the planted region.
    lengths : int array (probe,)
        Number of content positions.
    """

    checkpoints: tuple[str, ...]
    regions: tuple[str, ...]
    values: Array
    pointed: Array
    lengths: NDArray[np.int64]

    @property
    def means(self) -> Array:
        """Return the mean share over probes, (checkpoint, region)."""
        return np.asarray(np.nanmean(self.values, axis=1))

    def row(self, checkpoint: str) -> int:
        """Return the place of a checkpoint."""
        return self.checkpoints.index(checkpoint)

    def rows(self, checkpoints: Iterable[str]) -> list[int]:
        """Return the places of checkpoints."""
        return [self.row(one) for one in checkpoints]

    def column(self, region: str) -> int:
        """Return the place of a region."""
        return self.regions.index(region)


def as_checkpoint(model: Any, processor: Any) -> Checkpoint:
    """Wrap a model in memory as the record that loading gives."""
    architecture = type(model).__name__
    task = task_of(architecture, model.config.model_type)
    info = CheckpointInfo("benchmark", "0" * 64, "0" * 64, "0" * 64, architecture=architecture)
    return Checkpoint(info, model.eval(), processor, task, task != BACKBONE)


def shares_of(
    family: Family, data: BaseData, checkpoint: Checkpoint, states: Mapping[str, State], method: Judged
) -> Shares:
    """Return what a method sees in every checkpoint, whose weights are put into `checkpoint` in turn."""
    stacked: list[Array] = []
    inside = content = None
    for state in states.values():
        checkpoint.model.load_state_dict(state)
        maps = _maps(checkpoint, data.probes, method)
        if inside is None or content is None:
            inside, content = _columns(maps, data.probes, family.regions)
        stacked.append(_content_shares(maps, content))
    if inside is None or content is None:
        raise ValueError("states: expected at least one checkpoint, got none")
    names, weights = tuple(states), np.stack(stacked)
    regions = tuple(one.name for one in family.regions)
    values = np.einsum("cpn,pnr->cpr", weights, inside)
    values[:, ~inside.any(axis=1)] = np.nan
    replicates = weights[[names.index(one) for one in HARMLESS[:REPLICATES]]].mean(axis=0)
    planted = inside[:, :, regions.index(family.planted)]
    return Shares(
        names,
        regions,
        values,
        np.array([_pointed(one - replicates, planted, content) for one in weights]),
        content.sum(axis=1),
    )


def special_share(checkpoint: Checkpoint, probes: Sequence[Probe], state: State) -> float:
    """Return the mean share of the special tokens in the maps of plain rollout."""
    checkpoint.model.load_state_dict(state)
    maps = _maps(checkpoint, probes, METHODS[0])
    return float(np.mean([one.weights[one.positions.special].sum() for one in maps]))


def _maps(checkpoint: Checkpoint, probes: Sequence[Probe], method: Judged) -> list[Map]:
    targets = [probe.label for probe in probes]
    return list(audit.compute_maps(checkpoint, probes, method=method.name, target=targets, **method.params))


def _columns(
    maps: Sequence[Map], probes: Sequence[Probe], regions: Sequence[Region]
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the regions' weights (probe, position, region) and the content (probe, position)."""
    longest = max(len(one.weights) for one in maps)
    inside = np.zeros((len(maps), longest, len(regions)))
    content = np.zeros((len(maps), longest), dtype=bool)
    for i, (one, probe) in enumerate(zip(maps, probes, strict=True)):
        columns = region_columns(one.positions, probe, regions)
        inside[i, : len(columns)] = columns[:, : len(regions)] * columns[:, -2:-1]
        content[i, : len(columns)] = one.positions.content
    return inside, content


def _content_shares(maps: Sequence[Map], content: NDArray[np.bool_]) -> Array:
    """Return the maps as shares of their content mass, (probe, position); NaN where there is none."""
    weights = np.zeros(content.shape)
    for i, one in enumerate(maps):
        weights[i, : len(one.weights)] = one.weights
    weights *= content
    mass = weights.sum(axis=1, keepdims=True)
    return np.divide(weights, mass, out=np.full_like(weights, np.nan), where=mass > 0)


def _pointed(gain: Array, planted: Array, content: NDArray[np.bool_]) -> float:
    best = np.where(content & np.isfinite(gain), gain, -np.inf).argmax(axis=1)
    return float((planted[np.arange(len(best)), best] > 0).mean())


def cached_shares(path: Path, make: Callable[[], Shares]) -> Shares:
    """Return the shares kept in a file, made the first time."""
    if not path.is_file():
        found = make()
        with written(path) as draft:
            np.savez(
                draft,
                checkpoints=np.array(found.checkpoints),
                regions=np.array(found.regions),
                values=found.values.astype(np.float32),
                pointed=found.pointed,
                lengths=found.lengths,
            )
    with np.load(path) as kept:
        return Shares(
            tuple(kept["checkpoints"].tolist()),
            tuple(kept["regions"].tolist()),
            kept["values"].astype(np.float64),
            kept["pointed"],
            kept["lengths"],
        )
