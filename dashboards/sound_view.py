"""The map of a sound: shares of time spans, and of frequencies where a model has them, over a spectrogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboards.probe_view import as_png

SPANS = 120
"""Columns drawn at most; more frames are added up in groups of neighbours."""
WINDOW, HOP = 0.025, 0.010
DECIBELS = 80.0
HIGHEST = 8000.0


@dataclass(frozen=True)
class Spans:
    """Positions of a sound as a grid: which row and column each position belongs to, -1 outside.

    Rows run from the highest frequency down, columns in time; `times` holds start and end of each column.
    """

    cells: NDArray[np.int64]
    shape: tuple[int, int]
    times: NDArray[np.float64]

    def summed(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of each cell, row by row."""
        inside = self.cells >= 0
        size = self.shape[0] * self.shape[1]
        return np.bincount(self.cells[inside], weights=weights[inside], minlength=size)


def spans(times: NDArray[Any], special: NDArray[np.bool_]) -> Spans:
    """Return the grid of a sound's positions; special ones (silence after its end) are left out.

    Parameters
    ----------
    times : float array (n, 2)
        Start and end in seconds. Equal starts are patches of one time and several frequencies, lowest first.
    special : bool array (n,)
    """
    inside = np.flatnonzero(~special)
    starts, column = np.unique(times[inside, 0], return_inverse=True)
    rank = np.zeros(len(inside), dtype=np.int64)
    seen: dict[int, int] = {}
    for i, one in enumerate(column.tolist()):
        rank[i] = seen.get(one, 0)
        seen[one] = rank[i] + 1
    rows = int(rank.max(initial=0)) + 1
    group = -(-len(starts) // SPANS) if len(starts) else 1
    columns = max(1, -(-len(starts) // group))
    cells = np.full(len(special), -1, dtype=np.int64)
    cells[inside] = (rows - 1 - rank) * columns + column // group
    ends = np.array([times[inside, 1][column == i].max() for i in range(len(starts))])
    edges = [(starts[i], ends[min(i + group, len(starts)) - 1]) for i in range(0, len(starts), group)]
    return Spans(cells, (rows, columns), np.array(edges, dtype=np.float64).reshape(-1, 2))


def spectrogram_png(samples: NDArray[Any], rate: int, width: int = 720, height: int = 128) -> bytes:
    """Return a spectrogram as a grey picture: time to the right, frequency upwards, 80 dB to white.

    Parameters
    ----------
    samples : float array (samples,)
    rate : int
        In Hz.
    """
    from PIL import Image

    size, hop = max(8, int(WINDOW * rate)), max(1, int(HOP * rate))
    padded = np.pad(np.asarray(samples, dtype=np.float64), (size // 2, size))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    power = power[:, : max(2, int(size * min(HIGHEST, rate / 2) / rate))].T[::-1]
    level = 10 * np.log10(power + 1e-12)
    shade = np.clip((level - level.max()) / DECIBELS + 1, 0, 1)
    grey = Image.fromarray((shade * 255).astype(np.uint8))
    return as_png(np.asarray(grey.resize((width, height), Image.Resampling.BILINEAR)))
