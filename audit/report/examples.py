"""One probe's map before and after, ready to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from audit.records import FloatArray

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Example:
    """Before and after weights of one probe, with as much of its content as may be shown.

    Attributes
    ----------
    probe_id : str
    caption : str
        One line above the maps, for example the prediction before and after.
    kind : "text" or "image"
    before, after : float array (n,)
        Weights of the positions, non-negative; of all patches row by row for an image.
    words : tuple of str or None
        The word or token of each position; None prints positions only (``report.content = "none"``).
    grid : (rows, columns) or None
        Shape of the patch grid; images need it, or `boxes`.
    boxes : float array (n, 4) or None
        Where patches lie that are no grid: left, top, right, bottom as fractions of the image.
    png : bytes or None
        PNG file of exactly the area that the grid covers, of the whole image with `boxes`; None draws the
        patches alone.

    Raises
    ------
    ValueError
        When shapes disagree, weights are negative or not finite, or `png` is not a PNG file.

    Examples
    --------
    >>> Example("r-1", "positive → negative", "text", np.array([0.8, 0.2]), np.array([0.3, 0.7])).size
    2
    """

    probe_id: str
    caption: str
    kind: Literal["text", "image"]
    before: FloatArray
    after: FloatArray
    words: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None
    png: bytes | None = None
    boxes: FloatArray | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        for name in ("before", "after"):
            weights = np.asarray(getattr(self, name))
            if weights.ndim != 1 or not len(weights):
                raise ValueError(f"{name}: expected a non-empty array (n,), got shape {weights.shape}")
            if not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError(f"{name}: expected finite non-negative weights, got {weights.min()}")
        if self.before.shape != self.after.shape:
            raise ValueError(f"after: expected shape {self.before.shape} of before, got {self.after.shape}")
        if self.words is not None and len(self.words) != self.size:
            raise ValueError(f"words: expected {self.size}, one a position, got {len(self.words)}")
        self._check_image()

    def _check_image(self) -> None:
        if self.boxes is not None and self.boxes.shape != (self.size, 4):
            raise ValueError(f"boxes: expected shape ({self.size}, 4), got {self.boxes.shape}")
        tiled = self.grid is not None and self.grid[0] * self.grid[1] == self.size
        if self.kind == "image" and self.boxes is None and not tiled:
            raise ValueError(f"grid: expected rows × columns = {self.size} patches, got {self.grid}")
        if self.png is not None and not self.png.startswith(PNG_SIGNATURE):
            raise ValueError(f"png: expected the bytes of a PNG file, got {self.png[:8]!r}")

    @property
    def size(self) -> int:
        """Return the number of positions."""
        return len(self.before)

    @property
    def difference(self) -> FloatArray:
        """Return after - before, float64 (n,)."""
        return np.asarray(self.after, dtype=np.float64) - np.asarray(self.before, dtype=np.float64)
