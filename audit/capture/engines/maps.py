"""Maps from rows of the rollout matrix, with their diagnostics."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from audit.capture.inputs.encoded import Encoded
from audit.errors import CaptureError
from audit.records import Map, Positions, Stream


def undefined_map(item: Encoded, positions: Positions, extra: dict[str, float]) -> Map:
    """Return the map of a probe in which nothing speaks for the target: no mass, so no share of it."""
    weights = np.zeros(len(positions), np.float32)
    return Map(item.probe.id, weights, positions, diagnostics={"undefined": 1.0, **extra})


def stream_map(
    item: Encoded,
    row: NDArray[np.float64],
    layers: NDArray[np.float64] | None,
    positions: Positions,
    extra: dict[str, float],
    *,
    stream: Stream = "input",
) -> Map:
    """Return the map of one stream of a probe.

    Parameters
    ----------
    item : Encoded
    row : float array (n,)
        The output row, with the mass that falls on this stream.
    layers : float array (layer, n) or None
        The same row of each cumulative R_l.
    positions : Positions
    extra : mapping of diagnostics beside ``entropy`` (divided by log n) and ``sink`` (largest weight)
    stream : str
        Another stream than ``input`` may have less than the whole mass; its share is kept.

    Returns
    -------
    Map
        Its weights sum to 1.

    Raises
    ------
    CaptureError
        When the row has no mass, or not one number for each position.
    """
    if len(row) != len(positions) or not row.sum() > 0:
        raise CaptureError(
            f"probe {item.probe.id}: stream {stream} has {len(row)} positions with mass {row.sum():.3g}, "
            f"expected {len(positions)} positions with some mass"
        )
    weights = row / row.sum()
    if layers is not None:
        layers = (layers / layers.sum(axis=1, keepdims=True)).astype(np.float32)
    entropy = -float(np.sum(weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))))
    return Map(
        probe_id=item.probe.id,
        weights=weights.astype(np.float32),
        positions=positions,
        stream=stream,
        share=1.0 if stream == "input" else min(float(row.sum()), 1.0),
        layers=layers,
        diagnostics={
            "entropy": entropy / math.log(len(weights)) if len(weights) > 1 else 0.0,
            "sink": float(weights.max()),
            **extra,
        },
    )
