"""The logit that a method explains: one class per probe, and its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from audit.capture.inputs import Encoded
from audit.capture.predictions import LANGUAGE, class_index, class_names, token_id
from audit.errors import CaptureError, CheckpointError
from audit.records import Checkpoint


def require_head(checkpoint: Checkpoint, method: str) -> None:
    """Raise CheckpointError when `checkpoint` has no logits that `method` could explain."""
    if not checkpoint.has_head:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no task head, so {method} has no logit to explain; audit "
            "a checkpoint with a head, or use the method rollout"
        )


def class_logits(outputs: Any, read: Tensor) -> Tensor:
    """Return the logits that belong to the output row: (batch, class).

    Logits of every position are averaged over the rows that `read` weighs.

    Raises
    ------
    CaptureError
        When the model gives no logits of one kind.
    """
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise CaptureError(
            f"{type(outputs).__name__} has no single logit per class to explain; use the method rollout"
        )
    if logits.dim() == 2:
        return logits
    if logits.shape[1] == 1:
        return logits[:, 0]
    return torch.einsum("bq,bqc->bc", read.to(logits.dtype), logits)


def resolve_targets(
    checkpoint: Checkpoint, batch: Sequence[Encoded], outputs: Any, wanted: Mapping[str, Any], read: Tensor
) -> dict[str, int]:
    """Return the class (or token) index that is explained for each probe id of a batch.

    The wanted class; where none is wanted, the probe's own label if the checkpoint knows it, else the
    class that this checkpoint predicts. A regression has its single output.

    Raises
    ------
    ProbeError
        When a wanted class does not exist.
    """
    logits = class_logits(outputs, read).detach()
    best = logits.argmax(dim=1).tolist()
    return {
        item.probe.id: _index(checkpoint, item, wanted.get(item.probe.id), predicted, logits.shape[1])
        for item, predicted in zip(batch, best, strict=True)
    }


def _index(checkpoint: Checkpoint, item: Encoded, wanted: Any, predicted: int, size: int) -> int:
    if checkpoint.task in LANGUAGE:
        tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
        token = token_id(tokenizer, wanted, item.probe)
        return predicted if token is None else token
    if size == 1:
        return 0
    names = class_names(checkpoint, size)
    found = class_index(wanted, names, item.probe)
    if found is None and item.probe.label in names:
        found = names.index(item.probe.label)
    return predicted if found is None else found


def target_scores(batch: Sequence[Encoded], outputs: Any, targets: Mapping[str, int], read: Tensor) -> Tensor:
    """Return the logit of each probe's target: (batch,)."""
    logits = class_logits(outputs, read)
    index = torch.tensor([targets[item.probe.id] for item in batch], device=logits.device)
    return logits.gather(1, index[:, None])[:, 0]
