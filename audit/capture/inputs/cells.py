"""Which numbers of an image or a sound belong to each position, and what stands there without it.

Every number (pixel, sample, cell of a spectrogram) belongs to one position or to none, so that parts of a sum
over the numbers are parts of the same sum over the positions, and what is removed with one position stays
with all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from audit.capture.inputs.encoded import Encoded

MEAN_COLOUR, SILENCE = "mean colour", "silence"
ROUNDING = 1e-6
"""Shares come from seconds and boxes in float32; a trace of sound is no silence where a model normalises."""


@dataclass(frozen=True)
class Cells:
    """The numbers of one input, each given to a position.

    Attributes
    ----------
    name : str
        Which argument of the model the input is.
    owner : int array of the last axes of the input
        The position of each number, -1 for none; the same along the axes before.
    filling : str
        What takes the place of numbers that are removed, in a word.
    empty : Tensor
        The same in numbers, broadcast over the input.
    """

    name: str
    owner: NDArray[np.int64]
    filling: str
    empty: Tensor

    def summed(self, parts: Tensor, count: int) -> Tensor:
        """Return the sum over the numbers of each of `count` positions, in float64: (position,).

        Parameters
        ----------
        parts : Tensor
            Of the shape of the input, batch axis of 1 included.
        count : int
        """
        owner = torch.from_numpy(self.owner).to(parts.device).flatten()
        flat = parts.double().reshape(-1, len(owner)).sum(dim=0)
        # The last entry takes what belongs to none.
        found = flat.new_zeros(count + 1).index_add(0, owner % (count + 1), flat)
        return found[:count]

    def mixed(self, values: Tensor, share: NDArray[np.float64], other: Tensor | None = None) -> Tensor:
        """Return the input with each number mixed with `other` by the share of its position.

        Parameters
        ----------
        values : Tensor
            The input.
        share : float array (position,)
            In [0, 1]; at 1 nothing of the position is left.
        other : Tensor, optional
            By default :attr:`empty`.
        """
        whole = np.where(share > 1 - ROUNDING, 1.0, share)
        # Owner -1 reads the last entry: numbers of no position stay.
        mix = torch.from_numpy(np.append(whole, 0.0)[self.owner])
        other = self.empty if other is None else other
        return (values * (1 - mix) + other * mix).to(values.dtype)


def cells_of(item: Encoded) -> Cells | None:
    """Return the cells of an image or a sound, None for text."""
    if item.cells is not None or "pixel_values" not in item.tensors:
        return item.cells
    pixels, (rows, columns) = item.tensors["pixel_values"], item.positions.grid or (1, 1)
    whole = np.arange(rows * columns).reshape(rows, columns) + _first_patch(item)
    height, width = (pixels.shape[axis] // cells for axis, cells in ((-2, rows), (-1, columns)))
    owner = np.full(tuple(pixels.shape[-2:]), -1)  # a remainder that fills no patch belongs to none
    owner[: rows * height, : columns * width] = whole.repeat(height, axis=0).repeat(width, axis=1)
    mean = pixels.double().mean(dim=(-2, -1), keepdim=True)  # exact where the colour is one
    return Cells("pixel_values", owner, MEAN_COLOUR, mean)


def _first_patch(item: Encoded) -> int:
    """Return the position of the first patch of an image."""
    rows, columns = item.positions.grid or (1, 1)
    leading = (len(item) - rows * columns) if item.positions.grid else 0
    first = next((i for i in range(len(item)) if not item.positions.special[i]), leading)
    return min(first, leading)


# --- sound ------------------------------------------------------------------------------------


def wave_cells(samples: int, step: int, count: int, silence: float) -> Cells:
    """Return the cells of a waveform: `step` samples for each frame, and for the last one all that follow.

    Parameters
    ----------
    samples : int
    step : int
        Samples from one frame to the next, the product of the strides of the convolutions.
    count : int
        Frames.
    silence : float
        What the feature extractor puts where there is no sound.

    Examples
    --------
    >>> wave_cells(9, 3, 2, 0.0).owner.tolist()
    [0, 0, 0, 1, 1, 1, 1, 1, 1]
    """
    owner = np.minimum(np.arange(samples) // step, count - 1)
    return Cells("input_values", owner, SILENCE, torch.full((1, 1), silence))


def column_cells(bands: int, steps: int, count: int, silence: Tensor) -> Cells:
    """Return the cells of a spectrogram (1, band, step) whose columns are shared evenly by the frames.

    Parameters
    ----------
    bands, steps : int
        Of the spectrogram.
    count : int
        Frames; Whisper has one for each two columns.
    silence : Tensor
        What the feature extractor puts where there is no sound.

    Examples
    --------
    >>> column_cells(1, 6, 3, torch.zeros(1)).owner.tolist()
    [[0, 0, 1, 1, 2, 2]]
    """
    owner = np.broadcast_to(np.arange(steps) * count // steps, (bands, steps)).copy()
    return Cells("input_features", owner, SILENCE, silence)


def patch_cells(
    size: tuple[int, int], patch: int, strides: tuple[int, int], leading: int, silence: float
) -> Cells:
    """Return the cells of a spectrogram (1, time, band) that is cut into patches, which may overlap.

    A cell belongs to the patch whose centre is nearest, the earlier of two; cells that no patch reads, to
    none. Patches that do not overlap have all that they read.

    Parameters
    ----------
    size : (time, band)
    patch : int
        Side of a patch.
    strides : (time, band)
    leading : int
        Positions before the first patch. Patches go by bands, then by time.
    silence : float
        What the feature extractor puts where there is no sound.

    Examples
    --------
    >>> (patch_cells((7, 4), 4, (2, 2), 0, 0.0).owner[:, 0]).tolist()
    [0, 0, 0, 1, 1, 1, -1]
    """
    (time, columns), (band, _) = (_nearest(n, patch, stride) for n, stride in zip(size, strides, strict=True))
    owner = leading + band[None, :] * columns + time[:, None]
    owner[time < 0] = -1
    owner[:, band < 0] = -1
    return Cells("input_values", owner, SILENCE, torch.full((1, 1, 1), silence))


def _nearest(size: int, patch: int, stride: int) -> tuple[NDArray[np.int64], int]:
    """Return along one axis which patch each number belongs to, -1 for none, and the number of patches."""
    count, at = (size - patch) // stride + 1, np.arange(size)
    # Twice the distances, to stay with whole numbers: centre k lies at stride · k + (patch - 1) / 2.
    away = np.abs(2 * at[:, None] - (2 * stride * np.arange(count) + patch - 1)[None, :])
    nearest = away.argmin(axis=1)
    start = nearest * stride
    inside = (at >= start) & (at < start + patch)
    return np.where(inside, nearest, -1), count
