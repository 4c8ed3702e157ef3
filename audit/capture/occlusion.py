"""Remove a region from each probe and see how the target logit changes: the causal check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.batches import length_batches, stack
from audit.capture.inputs import Encoded, core_model, encode_image, encode_texts, text_tokenizer
from audit.capture.passes import exclusive, run_model
from audit.capture.predictions import Target, check_finite, class_index, class_names, targets_by_probe
from audit.errors import CheckpointError, ProbeError
from audit.records import CaptureSettings, Checkpoint, Probe


@dataclass(frozen=True)
class Occlusion:
    """Target logit of one probe as it is, and with the region removed.

    `occluded` is None, with a `reason`, where the region has no position in the probe or the probe has
    no target.
    """

    probe_id: str
    target: str | None
    intact: float | None
    occluded: float | None
    occlusion: str
    reason: str | None = None

    @property
    def change(self) -> float | None:
        """Return occluded − intact: negative where the region spoke for the target."""
        return None if self.intact is None or self.occluded is None else self.occluded - self.intact


def occlude(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    region_weights: Sequence[NDArray[np.floating[Any]]],
    *,
    targets: Target = "label",
    settings: CaptureSettings | None = None,
) -> tuple[Occlusion, ...]:
    """Occlude a region in each probe and return the target logit with and without it.

    Text tokens with any weight in the region become the mask token (the unknown, pad or end token
    where there is none); special positions stay. Image patches are mixed, by their weight, with the
    mean colour of the processed image.

    Parameters
    ----------
    checkpoint : Checkpoint
        With a classification head.
    probes : sequence of Probe
    region_weights : sequence of float arrays (n,), one for each probe
        Weights in [0, 1] over its positions, as :func:`audit.regions.region_weights` gives them.
    targets : see :func:`audit.capture.capture`
    settings : CaptureSettings, optional

    Returns
    -------
    tuple of Occlusion, in the order of the probes

    Raises
    ------
    CheckpointError
        When the checkpoint has no classification head.
    ProbeError
        When weights do not fit a probe or a target class does not exist.
    """
    if not checkpoint.has_head:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no task head, so occlusion has no logit to "
            "watch; audit a classifier"
        )
    settings = settings or CaptureSettings()
    wanted = targets_by_probe(targets, probes)
    encoded = _encode(checkpoint, probes, settings)
    name, replacement = replacement_token(checkpoint, encoded)
    intact = _logits(checkpoint, encoded, settings)
    changed = [occluded(i, w, replacement) for i, w in zip(encoded, region_weights, strict=True)]
    without = _logits(checkpoint, changed, settings)
    names = class_names(checkpoint, intact.shape[1])
    found = []
    for item, weights, before, after in zip(encoded, region_weights, intact, without, strict=True):
        target = class_index(wanted[item.probe.id], names, item.probe)
        reason = "no target class" if target is None else _empty(item, weights)
        found.append(
            Occlusion(
                item.probe.id,
                None if target is None else names[target],
                None if target is None else float(before[target]),
                None if reason is not None or target is None else float(after[target]),
                name,
                reason,
            )
        )
    return tuple(found)


def _empty(item: Encoded, weights: NDArray[np.floating[Any]]) -> str | None:
    reached = np.asarray(weights)[: len(item)][~item.positions.special]
    return None if np.any(reached > 0) else "the region has no position in this probe"


def _encode(checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings) -> list[Encoded]:
    if all(probe.modality == "text" for probe in probes):
        return encode_texts(checkpoint, probes, settings)
    return [encode_image(checkpoint, probe) for probe in probes]


def replacement_token(checkpoint: Checkpoint, encoded: Sequence[Encoded]) -> tuple[str, int | None]:
    """Return the name and the id of what text is occluded with; None for images, which turn grey."""
    if encoded and "pixel_values" in encoded[0].tensors:
        return "mean colour", None
    tokenizer = text_tokenizer(checkpoint)
    for name in ("mask", "unk", "pad", "eos"):
        found = getattr(tokenizer, f"{name}_token_id", None)
        if found is not None:
            return f"{name} token", int(found)
    raise CheckpointError(
        f"checkpoint {checkpoint.info.ref} has no mask, unknown, pad or end token to occlude with; add one"
    )


def occluded(item: Encoded, weights: NDArray[np.floating[Any]], replacement: int | None) -> Encoded:
    """Return `item` with its positions occluded by their weights (n,); special positions stay."""
    share = np.asarray(weights, np.float64)[: len(item)]
    if len(share) != len(item):
        raise ProbeError(
            f"probe {item.probe.id}: {len(weights)} region weights for {len(item)} positions; give "
            "one for each"
        )
    share = np.where(item.positions.special, 0.0, share)
    tensors = dict(item.tensors)
    if replacement is None:
        tensors["pixel_values"] = _greyed(item, share)
    else:
        ids = tensors["input_ids"].clone()
        ids[0, torch.from_numpy(share > 0)] = replacement
        tensors["input_ids"] = ids
    return replace(item, tensors=tensors)


def _greyed(item: Encoded, share: NDArray[np.float64]) -> Tensor:
    """Mix patches with the image's mean colour, each by its share."""
    pixels = item.tensors["pixel_values"]
    rows, columns = item.positions.grid or (1, 1)
    start = first_patch(item)
    patches = torch.from_numpy(share[start : start + rows * columns]).reshape(rows, columns)
    height, width = pixels.shape[-2] // rows, pixels.shape[-1] // columns
    mix = torch.zeros(pixels.shape[-2:], dtype=torch.float64)
    whole = patches.repeat_interleave(height, 0).repeat_interleave(width, 1)
    mix[: whole.shape[0], : whole.shape[1]] = whole
    mean = pixels.mean(dim=(-2, -1), keepdim=True)
    return (pixels * (1 - mix) + mean * mix).to(pixels.dtype)


def first_patch(item: Encoded) -> int:
    """Return the position of the first patch of an image."""
    rows, columns = item.positions.grid or (1, 1)
    leading = (len(item) - rows * columns) if item.positions.grid else 0
    first = next((i for i in range(len(item)) if not item.positions.special[i]), leading)
    return min(first, leading)


def _logits(checkpoint: Checkpoint, encoded: Sequence[Encoded], settings: CaptureSettings) -> Tensor:
    model = checkpoint.model
    config = core_model(model).config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    single = checkpoint.task == "sequence-classification" and text_config.pad_token_id is None
    found: dict[int, Tensor] = {}
    for indices in length_batches(encoded, settings.batch_tokens, max_size=1 if single else None):
        batch = [encoded[i] for i in indices]
        with exclusive(model):
            outputs = run_model(model, stack(batch))
        if getattr(outputs, "logits", None) is None or outputs.logits.dim() != 2:
            raise CheckpointError(
                f"checkpoint {checkpoint.info.ref} gives no class logits, so occlusion has nothing "
                "to watch; audit a classifier"
            )
        check_finite(batch, outputs.logits)
        found |= dict(zip(indices, outputs.logits.double().cpu(), strict=True))
    return torch.stack([found[i] for i in range(len(encoded))])
