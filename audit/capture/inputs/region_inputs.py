"""Inputs of models that take image regions as features with boxes, which a detector made beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from audit.capture.inputs.encoded import Encoded, accepted_arguments, core_model
from audit.capture.inputs.texts import encode_texts
from audit.errors import ProbeError
from audit.media import load_features
from audit.records import CaptureSettings, Checkpoint, Positions, Probe

FEATURES = "visual_feats"
"""The argument by which a model takes them."""


def takes_features(checkpoint: Checkpoint) -> bool:
    """Return whether a model reads an image as features of regions."""
    return FEATURES in accepted_arguments(checkpoint.model)


def check_features(checkpoint: Checkpoint, probes: Sequence[Probe]) -> None:
    """Raise ProbeError where probes have features of an image and the model takes none, or the reverse."""
    takes, name = takes_features(checkpoint), type(core_model(checkpoint.model)).__name__
    other = next((probe for probe in probes if (probe.features is not None) != takes), None)
    if other is None:
        return
    if takes:
        raise ProbeError(
            f"probe {other.id} has no features, but {name} reads an image as features of the boxes of a "
            "detector; give each probe the field features"
        )
    raise ProbeError(
        f"probe {other.id} has features of an image, but {name} takes none; remove the field features"
    )


def encode_features(checkpoint: Checkpoint, probe: Probe, settings: CaptureSettings | None = None) -> Encoded:
    """Return one probe for LXMERT: its text, and the regions of an image as features with boxes.

    Parameters
    ----------
    checkpoint : Checkpoint
        With a tokenizer.
    probe : Probe
        With text and features.
    settings : CaptureSettings, optional

    Returns
    -------
    Encoded
        Its image positions know their boxes.

    Raises
    ------
    ProbeError
        When features and boxes do not belong together, boxes are no fractions, or the model takes features
        of another size.
    """
    try:
        found, places = load_features(probe.features or {})
    except ProbeError as error:
        raise ProbeError(f"probe {probe.id}: {error}") from None
    wanted = getattr(core_model(checkpoint.model).config, "visual_feat_dim", found.shape[1])
    if found.shape[1] != wanted:
        raise ProbeError(
            f"probe {probe.id}: its features have {found.shape[1]} numbers a region, the checkpoint takes "
            f"{wanted} (visual_feat_dim); use the detector that it was trained with"
        )
    (text,) = encode_texts(checkpoint, [probe], settings or CaptureSettings())
    regions = {FEATURES: torch.from_numpy(found)[None], "visual_pos": torch.from_numpy(places)[None]}
    image = Positions("patch", np.zeros(len(found), np.bool_), boxes=places)
    return Encoded(probe, {**text.tensors, **regions}, text.positions, text.truncated, image)
