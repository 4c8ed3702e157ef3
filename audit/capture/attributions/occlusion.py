"""Remove a region from each probe and see how the target logit changes: the causal check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor

from audit.capture.attention.passes import exclusive, run_model
from audit.capture.inputs.batches import length_batches, stack
from audit.capture.inputs.cells import cells_of
from audit.capture.inputs.encoded import Encoded, core_model, encode_image
from audit.capture.inputs.sound import encode_sound
from audit.capture.inputs.texts import encode_texts, text_tokenizer
from audit.capture.outputs.predictions import (
    ANSWERS,
    LANGUAGE,
    Target,
    check_finite,
    class_names,
    class_score,
    first_tensor,
    targets_by_probe,
)
from audit.capture.outputs.rows import OutputRow, decide_row, row_weights
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import TOKENS, class_logits, resolve_targets
from audit.errors import CheckpointError, ProbeError
from audit.records import CaptureSettings, Checkpoint, Probe

Fill = Literal["mean", "blur"]


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
    row: str = "auto",
    settings: CaptureSettings | None = None,
    fill: Fill = "mean",
) -> tuple[Occlusion, ...]:
    """Occlude a region in each probe and return the target logit with and without it.

    Text tokens with any weight in the region become the mask token (the unknown, pad or end token
    where there is none); special positions stay. Image patches are mixed, by their weight, with the
    mean colour of the processed image, or with the image blurred; frames of sound with silence (see
    :mod:`audit.capture.inputs.sound`).

    Parameters
    ----------
    checkpoint : Checkpoint
        With a classification head.
    probes : sequence of Probe
    region_weights : sequence of float arrays (n,), one for each probe
        Weights in [0, 1] over its positions, as :func:`audit.regions.region_weights` gives them.
    targets : see :func:`audit.capture.capture`
    row : str
        The row at which language models and token classifiers answer.
    settings : CaptureSettings, optional
    fill : "mean" or "blur"
        What images are mixed with: their mean colour, or themselves under a Gaussian blur whose standard
        deviation is the side of a patch, which leaves the colours around but no detail.

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
    question, encoded = _ask(checkpoint, probes, targets, row, settings)
    name, replacement = replacement_token(checkpoint, encoded)
    scores = question.targets(encoded)
    name = "blur" if encoded and _blurs(encoded[0], fill) else name
    changed = [occluded(i, w, replacement, fill) for i, w in zip(encoded, region_weights, strict=True)]
    intact, without = question.values(encoded, scores), question.values(changed, scores)
    found = []
    for item, weights in zip(encoded, region_weights, strict=True):
        key = item.probe.id
        score = scores.get(key)
        reason = "no target class" if score is None else _empty(item, weights)
        found.append(
            Occlusion(
                key,
                None if score is None else score.name,
                intact.get(key),
                without.get(key) if reason is None else None,
                name,
                reason,
            )
        )
    return tuple(found)


def occluded_scores(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    masks: Sequence[NDArray[np.floating[Any]]],
    *,
    targets: Target = "label",
    row: str = "auto",
    settings: CaptureSettings | None = None,
) -> tuple[NDArray[np.float64] | None, ...]:
    """Return the target logit of each probe under many masks; see :func:`occlude`.

    Parameters
    ----------
    checkpoint, probes, targets, row, settings
        As for :func:`occlude`.
    masks : sequence of float arrays (mask, n), one for each probe
        Each row says which positions are occluded; equal rows are run once.

    Returns
    -------
    tuple of float64 array (mask,), None for a probe without a target

    Raises
    ------
    CheckpointError, ProbeError
        As for :func:`occlude`.
    """
    question, encoded = _ask(checkpoint, probes, targets, row, settings)
    _, replacement = replacement_token(checkpoint, encoded)
    scores = question.targets(encoded)
    return tuple(
        question.variants(item, scores[item.probe.id], rows, replacement) if item.probe.id in scores else None
        for item, rows in zip(encoded, masks, strict=True)
    )


def _ask(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    targets: Target,
    row: str,
    settings: CaptureSettings | None,
) -> tuple[_Question, list[Encoded]]:
    """Return what is asked of the checkpoint, and the probes as it takes them."""
    if not checkpoint.has_head:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no task head, so occlusion has no logit to "
            "watch; audit a classifier"
        )
    settings = settings or CaptureSettings()
    wanted = targets_by_probe(targets, probes)
    encoded = _encode(checkpoint, probes, settings)
    return _Question(checkpoint, settings, _read_rows(checkpoint, encoded, row), wanted), encoded


def _empty(item: Encoded, weights: NDArray[np.floating[Any]]) -> str | None:
    reached = np.asarray(weights)[: len(item)][~item.positions.special]
    return None if np.any(reached > 0) else "the region has no position in this probe"


def _encode(checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings) -> list[Encoded]:
    if settings.stride is not None:
        raise ProbeError(
            "occlusion is not defined for windows of one probe; remove [probes] stride to confirm regions"
        )
    if all(probe.modality == "text" for probe in probes):
        return encode_texts(checkpoint, probes, settings)
    encode = encode_sound if probes[0].modality == "audio" else encode_image
    return [encode(checkpoint, probe) for probe in probes]


def replacement_token(checkpoint: Checkpoint, encoded: Sequence[Encoded]) -> tuple[str, int | None]:
    """Return the name and the id of what text is occluded with; images and sounds have no id."""
    cells = cells_of(encoded[0]) if encoded else None
    if cells is not None:
        return cells.filling, None
    tokenizer = text_tokenizer(checkpoint)
    known = len(checkpoint.model.get_input_embeddings().weight)
    for name in ("mask", "unk", "pad", "eos"):
        found = getattr(tokenizer, f"{name}_token_id", None)
        if found is not None and found < known:  # a tokenizer may name tokens that the model does not have
            return f"{name} token", int(found)
    raise CheckpointError(
        f"checkpoint {checkpoint.info.ref} has no mask, unknown, pad or end token to occlude with; add one"
    )


def occluded(
    item: Encoded, weights: NDArray[np.floating[Any]], replacement: int | None, fill: Fill = "mean"
) -> Encoded:
    """Return `item` with its positions occluded by their weights (n,); special positions stay."""
    share = np.asarray(weights, np.float64)[: len(item)]
    if len(share) != len(item):
        raise ProbeError(
            f"probe {item.probe.id}: {len(weights)} region weights for {len(item)} positions; give "
            "one for each"
        )
    share = np.where(item.positions.special, 0.0, share)
    tensors = dict(item.tensors)
    cells = cells_of(item)
    if replacement is not None:
        ids = tensors["input_ids"].clone()
        ids[0, torch.from_numpy(share > 0)] = replacement
        tensors["input_ids"] = ids
    elif cells is not None:
        other = _blurred(item) if _blurs(item, fill) else None
        tensors[cells.name] = cells.mixed(tensors[cells.name], share, other)
    return replace(item, tensors=tensors)


def removable(item: Encoded, replacement: int | None) -> NDArray[np.int64]:
    """Return the positions that occlusion changes: (place,).

    Neither special positions nor those that look occluded as they are: patches of the mean colour, frames of
    silence, mask tokens. The last change nothing, whatever the model, while a model rounds the same input
    otherwise in another batch.
    """
    cells = cells_of(item)
    name = "input_ids" if cells is None else cells.name
    bare = occluded(item, np.ones(len(item)), replacement)
    changed = bare.tensors[name] != item.tensors[name]
    own = changed[0] if cells is None else cells.summed(changed, len(item)) > 0
    return np.flatnonzero(own.cpu().numpy() & ~item.positions.special)


def _blurs(item: Encoded, fill: Fill) -> bool:
    """Return whether the item is mixed with its own blur, which images alone have."""
    return fill == "blur" and "pixel_values" in item.tensors


def _blurred(item: Encoded) -> Tensor:
    """Return an image under a Gaussian blur as wide as a patch."""
    pixels = item.tensors["pixel_values"]
    rows, columns = item.positions.grid or (1, 1)
    side = float(pixels.shape[-2] // rows), float(pixels.shape[-1] // columns)
    spread = (*[0.0] * (pixels.dim() - 2), *side)
    return torch.from_numpy(gaussian_filter(pixels.double().numpy(), spread, mode="nearest"))


@dataclass(frozen=True)
class _Question:
    """What is asked of the checkpoint: the score of each probe's target, at the row that is read."""

    checkpoint: Checkpoint
    settings: CaptureSettings
    row: OutputRow | None
    wanted: Mapping[str, Any]

    def targets(self, encoded: Sequence[Encoded]) -> dict[str, Score]:
        """Return the score of each probe that has a target; never one that this checkpoint predicts."""
        found: dict[str, Score] = {}
        for batch, outputs, read in self._batches(encoded):
            if self.row is not None or self.checkpoint.task == ANSWERS:
                scores = resolve_targets(self.checkpoint, batch, outputs, self.wanted, read)
                labelled = self.row is not None and self.row.kind == "labelled"
                asked = {i.probe.id for i in batch if labelled or self.wanted[i.probe.id] is not None}
                found |= {key: score for key, score in scores.items() if key in asked}
            else:
                names = class_names(self.checkpoint, outputs.logits.shape[1])
                classes = {item.probe.id: self._class(item, names) for item in batch}
                found |= {key: score for key, score in classes.items() if score is not None}
        return found

    def _class(self, item: Encoded, names: Sequence[str]) -> Score | None:
        only = len(names) == 1  # a regression
        return (
            Score.single(names[0], 0) if only else class_score(self.wanted[item.probe.id], names, item.probe)
        )

    def values(self, encoded: Sequence[Encoded], scores: Mapping[str, Score]) -> dict[str, float]:
        """Return the value of each score."""
        found: dict[str, float] = {}
        for batch, outputs, read in self._batches(encoded):
            logits = class_logits(outputs, read, self.checkpoint.task).double()
            found |= {
                item.probe.id: float(scores[item.probe.id].of(logits[i : i + 1])[0])
                for i, item in enumerate(batch)
                if item.probe.id in scores
            }
        return found

    def variants(
        self, item: Encoded, score: Score, masks: NDArray[np.floating[Any]], replacement: int | None
    ) -> NDArray[np.float64]:
        """Return the value of one probe's score under each mask (mask, n)."""
        if not len(masks):
            return np.zeros(0)
        different, places = np.unique(masks, axis=0, return_inverse=True)
        probes = [replace(item.probe, id=f"{item.probe.id} {i}") for i in range(len(different))]
        named = [
            replace(occluded(item, mask, replacement), probe=probe)
            for mask, probe in zip(different, probes, strict=True)
        ]
        found = self.values(named, {probe.id: score for probe in probes})
        return np.array([found[probe.id] for probe in probes])[places]

    def _batches(self, encoded: Sequence[Encoded]) -> Iterator[tuple[list[Encoded], Any, Tensor]]:
        """Yield batches, what the model returns for them, and the rows that are read."""
        model = self.checkpoint.model
        config = core_model(model).config
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        single = self.checkpoint.task == "sequence-classification" and text_config.pad_token_id is None
        every = self.row is not None and self.row.name != "last"
        for indices in length_batches(encoded, self.settings.batch_tokens, max_size=1 if single else None):
            batch = [encoded[i] for i in indices]
            with exclusive(model):
                outputs = run_model(model, stack(batch), keep_logits=every)
            logits = first_tensor(outputs)
            if self.row is None and self.checkpoint.task != ANSWERS and logits.dim() != 2:
                raise CheckpointError(
                    f"checkpoint {self.checkpoint.info.ref} gives no class logits, so occlusion has nothing "
                    "to watch; audit a classifier"
                )
            check_finite(batch, logits)
            yield batch, outputs, self._read(batch).to(logits.device)

    def _read(self, batch: Sequence[Encoded]) -> Tensor:
        longest = max(map(len, batch))
        if self.row is None:
            return torch.zeros(len(batch), longest)
        mask_id = getattr(text_tokenizer(self.checkpoint), "mask_token_id", None)
        names = class_names(self.checkpoint, len(core_model(self.checkpoint.model).config.id2label))
        read = torch.zeros(len(batch), longest)
        for i, item in enumerate(batch):
            read[i, : len(item)] = torch.from_numpy(row_weights(self.row, item, mask_id, names=names))
        return read


def _read_rows(checkpoint: Checkpoint, encoded: Sequence[Encoded], row: str) -> OutputRow | None:
    """Return the row of tasks that have logits at every position; None for the others."""
    if checkpoint.task not in (*LANGUAGE, TOKENS) or not encoded:
        return None
    return decide_row(checkpoint, row, max(encoded, key=len))
