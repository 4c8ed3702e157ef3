"""Inputs of models that take image regions as features with boxes, which a detector made beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.capture.inputs import Encoded
from audit.capture.texts import encode_texts
from audit.errors import ProbeError
from audit.records import CaptureSettings, Checkpoint, Positions, Probe


def encode_regions(
    checkpoint: Checkpoint,
    probe: Probe,
    features: NDArray[np.floating[Any]],
    boxes: NDArray[np.floating[Any]],
    settings: CaptureSettings | None = None,
) -> Encoded:
    """Return one probe for LXMERT: its text, and the regions of an image as features with boxes.

    Parameters
    ----------
    checkpoint : Checkpoint
        With a tokenizer.
    probe : Probe
        With text.
    features : float array (region, dim)
    boxes : float array (region, 4)
        Left, top, right, bottom as fractions of the image.
    settings : CaptureSettings, optional

    Returns
    -------
    Encoded
        For :func:`audit.capture.session.capture_prepared`; its image positions know their boxes.

    Raises
    ------
    ProbeError
        When features and boxes do not belong together, or boxes are no fractions.
    """
    found, places = np.asarray(features, np.float32), np.asarray(boxes, np.float32)
    if found.ndim != 2 or places.shape != (len(found), 4) or not len(found):
        raise ProbeError(
            f"probe {probe.id}: features of shape {found.shape} and boxes of shape {places.shape}, expected "
            "(region, dim) and (region, 4)"
        )
    if not ((places >= 0) & (places <= 1)).all():
        raise ProbeError(f"probe {probe.id}: boxes must be fractions of the image's width and height")
    (text,) = encode_texts(checkpoint, [probe], settings or CaptureSettings())
    regions = {"visual_feats": torch.from_numpy(found)[None], "visual_pos": torch.from_numpy(places)[None]}
    image = Positions("patch", np.zeros(len(found), np.bool_), boxes=places)
    return Encoded(probe, {**text.tensors, **regions}, text.positions, text.truncated, image)
