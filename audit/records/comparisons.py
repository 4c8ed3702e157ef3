"""Two runs and their replicates against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from audit.records.cells import Cell
from audit.records.evidence import Confirmation, Faithfulness

ReplicateKind = Literal["seed", "refresh", "release", "tail", "numeric"]

STRONG_KINDS: frozenset[str] = frozenset({"seed", "refresh", "release"})
"""Kinds of replicate that may decide an ``excess`` rule; the others understate the spread."""


@dataclass(frozen=True)
class RunRef:
    """One run as a comparison names it."""

    run_id: str
    checkpoint: str
    digest: str
    weights_digest: str
    kind: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs, their replicates, and every cell that was computed.

    `identical_maps` is True when no map differs at all; `same_weights` None when unknown (maps that
    were made elsewhere). `mismatches` lists the settings in which the runs differ. `nondeterministic`
    says what differed when the same probe went twice through one checkpoint, None when nothing did.
    `alignment` says how maps over different positions (tokenizer, patch grid) were brought to common
    ones, and why layers are not compared. `other_model` says how the checkpoints are two different
    models, of which replicates of one tell nothing about the other; None where they are one, or unknown.
    """

    kind: Literal["paired", "unpaired"]
    cells: tuple[Cell, ...]
    alpha: float
    n_probes: int
    n_clusters: int | None = None
    before: RunRef | None = None
    after: RunRef | None = None
    replicates: tuple[RunRef, ...] = ()
    replicate_kinds: tuple[str, ...] = ()
    identical_maps: bool = False
    same_weights: bool | None = None
    mismatches: tuple[str, ...] = ()
    method: str = "rollout"
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, Any] = field(default_factory=dict)
    confirmations: tuple[Confirmation, ...] = ()
    faithfulness: tuple[Faithfulness, ...] = ()
    id: str | None = None
    nondeterministic: str | None = None
    alignment: tuple[str, ...] = ()
    other_model: str | None = None

    def find(
        self,
        region: str,
        measure: str = "shift",
        *,
        stream: str | None = None,
        layer: int | None = None,
        effect: str | None = None,
        segment: str | None = None,
    ) -> Iterator[Cell]:
        """Yield the cells of `region` ("*" = every region) and `measure`."""
        for cell in self.cells:
            if (
                region in ("*", cell.region)
                and cell.measure == measure
                and (stream is None or cell.stream == stream)
                and cell.layer == layer
                and (effect is None or cell.effect == effect)
                and cell.segment == segment
            ):
                yield cell
