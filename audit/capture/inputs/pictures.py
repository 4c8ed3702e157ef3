"""Where each number of a processed image comes from in the stored one, measured by processing ramps.

Resizing, cropping, padding, tiling and packing differ with every family's processor. An image whose
brightness is its own x or y coordinate comes out as the coordinates, whatever the processor did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.errors import CaptureError

Process = Callable[[NDArray[np.uint8]], NDArray[np.float64]]
SEGMENTS = 8
"""A ramp of 8 bits is drawn in as many parts, each with all 255 steps, so that steps are no coarser."""


@dataclass(frozen=True)
class Picture:
    """A processed image and the place of each of its numbers in the stored image.

    Attributes
    ----------
    name : str
        Which argument of the model it is.
    x, y : float64 arrays of the shape of the processed image
        Centre of the pixel, as a fraction of the stored width and height; NaN in padding.
    stored : (height, width) in pixels
    colours : int64 array of the shape of the processed image, optional
        Which colour of the stored image each number holds: 0 red, 1 green, 2 blue; negative in padding and
        where a number mixes them.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    stored: tuple[int, int]
    colours: NDArray[np.int64] | None = None

    def boxes(self, fed: NDArray[np.int64], count: int, patch: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return the box of each of `count` positions, as fractions of the stored image.

        Parameters
        ----------
        fed : int array of the shape of the processed image
            Which position each number feeds, negative for none.
        count : int
        patch : (height, width) in pixels of the processed image; None = square

        Returns
        -------
        float32 array (count, 4)
            Left, top, right, bottom; zeros where a position reads no pixel of the stored image.
        """
        boxes = np.zeros((count, 4), np.float32)
        known = (fed >= 0) & ~np.isnan(self.x) & ~np.isnan(self.y)
        owner = fed[known]
        for axis, (values, size) in enumerate(
            ((self.x[known], self.stored[1]), (self.y[known], self.stored[0]))
        ):
            low, high = np.full(count, np.inf), np.full(count, -np.inf)
            np.minimum.at(low, owner, values)
            np.maximum.at(high, owner, values)
            seen = np.isfinite(low)
            low, high = low[seen], high[seen]
            cells = _cells(fed, count, patch, axis)
            half = (high - low) / max(cells - 1, 1) / 2
            boxes[seen, axis] = _snapped(low - half, size)
            boxes[seen, axis + 2] = _snapped(high + half, size)
        return boxes


def _cells(fed: NDArray[np.int64], count: int, patch: tuple[int, int] | None, axis: int) -> int:
    """Return how many pixels a patch has along x (axis 0) or y (axis 1)."""
    if patch is not None:
        return patch[1 - axis]
    return round(float(np.sqrt(np.sum(fed >= 0) / max(count, 1) / 3)))


def _snapped(edges: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return edges on the image's border where they are nearer to it than one stored pixel.

    Enlarging repeats the outermost pixels, which hides where within them the border lies.
    """
    near = 1.0 / size + 1e-3
    edges = np.where(edges < near, 0.0, edges)
    return np.where(edges > 1.0 - near, 1.0, edges)


def measured_picture(name: str, process: Process, stored: tuple[int, int]) -> Picture:
    """Return where each number that `process` gives comes from.

    Parameters
    ----------
    name : str
        Which argument of the model the processed image is.
    process : function of a uint8 array (height, width, 3)
        Returns the processed image, of one shape for one size of image.
    stored : (height, width) in pixels

    Raises
    ------
    CaptureError
        When brighter pixels do not come out as larger numbers, as in images cut into tokens.
    """
    height, width = stored
    black = process(np.zeros((height, width, 3), np.uint8))
    white = process(np.full((height, width, 3), 255, np.uint8))
    span = white - black
    span[np.abs(span) < 1e-6] = np.nan  # padding looks alike whatever the image
    if np.isnan(span).all():
        raise CaptureError(
            f"the processed image ({name}) does not depend on the stored one; its patches cannot be placed"
        )

    def along(axis: int) -> NDArray[np.float64]:
        total: Any = 0.0
        for part in range(SEGMENTS):
            total = total + (process(_ramp(stored, axis, part)) - black) / span
        found: NDArray[np.float64] = total / SEGMENTS
        return found

    return Picture(name, along(1), along(0), stored, _colours(process, black, stored))


def _colours(process: Process, black: NDArray[np.float64], stored: tuple[int, int]) -> NDArray[np.int64]:
    """Return which of the three colours, raised alone in a black image, each number follows."""
    moved = []
    for colour in range(3):
        image = np.zeros((*stored, 3), np.uint8)
        image[..., colour] = 255
        moved.append(np.abs(process(image) - black) > 1e-6)
    table = np.stack(moved)
    found: NDArray[np.int64] = np.where(table.sum(axis=0) == 1, table.argmax(axis=0), -1)
    return found


def _ramp(stored: tuple[int, int], axis: int, part: int) -> NDArray[np.uint8]:
    """Return an image that rises along `axis` within one of the parts and is flat elsewhere."""
    size = stored[axis]
    rise = np.clip((np.arange(size) + 0.5) / size * SEGMENTS - part, 0.0, 1.0)
    line = np.rint(rise * 255).astype(np.uint8)
    line = line[:, None] if axis == 0 else line[None, :]
    return np.repeat(np.broadcast_to(line, stored)[:, :, None], 3, axis=2)
