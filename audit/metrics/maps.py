"""Checks of maps: the ground under :mod:`audit.metrics`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Result = float | NDArray[np.float64]

SUM_TOLERANCE = 1e-3
"""How far a map's sum may lie from 1 (float32 and bfloat16 rounding); it is then divided by it."""


def checked_map(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return `values` as float64 maps that sum to exactly 1, or raise ValueError."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"{name}: expected positions along the last axis, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite weights, got NaN or infinity")
    if (array < 0).any():
        raise ValueError(f"{name}: expected weights >= 0, got {array.min():.6g}")
    sums = array.sum(-1, keepdims=True)
    off = np.abs(sums - 1)
    if array.size and off.max() > SUM_TOLERANCE:
        raise ValueError(f"{name}: expected maps that sum to 1, got {sums.flat[off.argmax()]:.6g}")
    normalized: NDArray[np.float64] = array / np.where(off > 1e-12, sums, 1.0)
    return normalized


def checked_pair(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two maps of the same length and leading axes, or raise ValueError."""
    before, after = checked_map("p", p), checked_map("q", q)
    if before.shape[-1] != after.shape[-1]:
        raise ValueError(f"q: expected {before.shape[-1]} positions like p, got {after.shape[-1]}")
    try:
        before, after = np.broadcast_arrays(before, after)
    except ValueError:
        raise ValueError(f"q: expected leading axes like p, {before.shape}, got {after.shape}") from None
    return before, after


def as_result(value: Any) -> Result:
    """Return a float for a single pair, else the array."""
    array: NDArray[np.float64] = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array
