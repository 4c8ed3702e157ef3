"""Read images and sounds from disk; the one place that decodes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.errors import ProbeError


def load_image(source: str | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the pixels of an image as RGB.

    Parameters
    ----------
    source : str or uint8 array (height, width) or (height, width, 3)
        Path of an image file, or pixels.

    Returns
    -------
    uint8 array (height, width, 3)

    Raises
    ------
    ProbeError
        When the file is missing or is not an image.
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(source, str):
        return np.asarray(Image.fromarray(np.asarray(source)).convert("RGB"))
    try:
        with Image.open(source) as image:
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise ProbeError(f"image {source} does not exist; mend the path in the probe file") from None
    except (UnidentifiedImageError, OSError) as error:
        raise ProbeError(f"image {source} cannot be decoded ({error}); replace the file") from None


def load_mask(path: str) -> NDArray[np.float32]:
    """Return a region mask as weights in [0, 1], float32 (height, width).

    Raises
    ------
    ProbeError
        When the file is missing or is not an image.
    """
    grey: NDArray[Any] = load_image(path).mean(axis=2)
    return (grey / 255.0).astype(np.float32)
