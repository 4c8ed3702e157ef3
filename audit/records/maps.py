"""What a capture yields: maps, the mass in their regions, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from audit.records.inputs import Positions

FloatArray = NDArray[np.floating[Any]]
Stream = Literal["input", "source", "prefix", "image", "text"]


@dataclass(frozen=True)
class Map:
    """A distribution over the positions of one stream, read from the rollout matrix of one probe.

    Attributes
    ----------
    weights : float array (n,)
        Non-negative, sums to 1.
    share : float
        Part of the output row's whole mass that falls on this stream (1 for a single stream).
    layers : float array (layer, n) or None
        The same row of the cumulative R_l, each summing to 1.
    diagnostics : mapping
        ``entropy`` (divided by log n), ``sink`` (largest weight), ``depth_collapse``, ``empty_rows``.
    """

    probe_id: str
    weights: FloatArray
    positions: Positions
    stream: Stream = "input"
    share: float = 1.0
    layers: FloatArray | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reliance:
    """Share of one map's mass in one region.

    `share` is None, with a `reason`, where the region has no position in the probe. `size` is the
    share that a uniform map over the same positions would give; lift = share / size. `layers` holds
    the share for each cumulative R_l.
    """

    probe_id: str
    region: str
    share: float | None
    size: float | None = None
    stream: Stream = "input"
    layers: tuple[float, ...] | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Prediction:
    """What the checkpoint answered for one probe; all None for a backbone without a task head.

    `label`, `group` and `segments` repeat the probe's annotations, so that a comparison needs no probe
    file.
    """

    probe_id: str
    logits: tuple[float, ...] | None = None
    predicted: str | None = None
    target: str | None = None
    target_logit: float | None = None
    label: str | None = None
    tokens: int | None = None
    truncated: bool = False
    group: str | None = None
    segments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """What a capture yields for one probe: a map for each stream, and the prediction."""

    maps: tuple[Map, ...]
    prediction: Prediction
