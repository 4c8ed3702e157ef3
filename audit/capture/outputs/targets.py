"""The score that a method explains: which logits of which rows, for each probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.capture.inputs.encoded import Encoded
from audit.capture.outputs.predictions import (
    ANSWERS,
    LANGUAGE,
    class_names,
    class_score,
    known_class,
    token_name,
    token_score,
)
from audit.capture.outputs.scores import Score
from audit.capture.outputs.spans import answer_ends, answer_score, interleaved, labelled_spans
from audit.errors import CaptureError, CheckpointError
from audit.records import Checkpoint

TOKENS = "token-classification"
SIMILARITY = "similarity"
"""Name of the only target of two towers: how alike image and text are to the model."""


def require_head(checkpoint: Checkpoint, method: str) -> None:
    """Raise CheckpointError when `checkpoint` has no logits that `method` could explain."""
    if not checkpoint.has_head:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no task head, so {method} has no logit to explain; audit "
            "a checkpoint with a head, or use the method rollout"
        )


def class_logits(outputs: Any, read: Tensor, task: str = "") -> Tensor:
    """Return the logits that a score is a sum of: (batch, logit).

    Those of the classes; the similarity of each image with its own text; those of the tokens at the output
    row for language models, averaged over the rows that `read` weighs; of position × class for token
    classification; of position × (start, end) for answers.

    Raises
    ------
    CaptureError
        When the model gives no logits of one kind.
    """
    if task == ANSWERS and hasattr(outputs, "start_logits"):
        return interleaved(outputs)
    if (own := similarity(outputs)) is not None:
        return own[:, None]
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise CaptureError(
            f"{type(outputs).__name__} has no single logit per class to explain; use the method rollout"
        )
    if logits.dim() == 2:
        return logits
    if task == TOKENS:
        return logits.flatten(1)
    if logits.shape[1] == 1:
        return logits[:, 0]
    return torch.einsum("bq,bqc->bc", read.to(logits.dtype), logits)


def similarity(outputs: Any) -> Tensor | None:
    """Return the similarity of each image with its own text (batch,), None for models without one."""
    found = getattr(outputs, "logits_per_image", None)
    return found.diagonal() if isinstance(found, Tensor) and found.dim() == 2 else None


def resolve_targets(
    checkpoint: Checkpoint, batch: Sequence[Encoded], outputs: Any, wanted: Mapping[str, Any], read: Tensor
) -> dict[str, Score]:
    """Return the score that is explained for each probe id of a batch.

    The wanted class; where none is wanted, the probe's own label if the checkpoint knows it, else the
    class that this checkpoint predicts. A regression has its single output. An answer has the sum of its
    start and its end logit; a span of tokens the mean of its class's logits over the rows that are read,
    labelled spans each the logits of their own class.

    Raises
    ------
    ProbeError
        When a wanted class does not exist.
    """
    if checkpoint.task == ANSWERS and hasattr(outputs, "start_logits"):
        return {
            item.probe.id: answer_score(item, answer_ends(item, wanted.get(item.probe.id), outputs, i))
            for i, item in enumerate(batch)
        }
    if similarity(outputs) is not None:
        return {item.probe.id: Score.single(SIMILARITY, 0) for item in batch}
    logits = class_logits(outputs, read).detach()
    token_wise = checkpoint.task == TOKENS and outputs.logits.dim() == 3
    found = {}
    for item, row, rows in zip(batch, logits, read, strict=True):
        make = _entity_score if token_wise else _score
        found[item.probe.id] = make(checkpoint, item, wanted.get(item.probe.id), row, rows)
    return found


def _score(checkpoint: Checkpoint, item: Encoded, wanted: Any, logits: Tensor, _read: Tensor) -> Score:
    best, size = int(logits.argmax()), len(logits)
    if checkpoint.task in LANGUAGE:
        tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
        return token_score(tokenizer, wanted, item.probe) or Score.single(token_name(tokenizer, best), best)
    names = class_names(checkpoint, size)
    if size == 1:
        return Score.single(names[0], 0)
    return class_score(_own(wanted, item.probe.label, names), names, item.probe) or Score.single(
        names[best], best
    )


def _own(wanted: Any, label: Any, names: Sequence[str]) -> Any:
    """Return what is wanted, else the probe's label where the checkpoint knows it."""
    if wanted is not None:
        return wanted
    labels = label if isinstance(label, (list, tuple)) else [label]
    known = all(isinstance(one, str | int) and known_class(one, names) is not None for one in labels)
    return label if known else None


def _entity_score(checkpoint: Checkpoint, item: Encoded, wanted: Any, logits: Tensor, read: Tensor) -> Score:
    size = len(logits)
    names, weights = class_names(checkpoint, size), read[: len(item)].double().cpu().numpy()
    rows = np.flatnonzero(weights)
    spans = labelled_spans(item, names) if wanted is None else []
    own = {
        int(place): c
        for _, span, classes in spans
        for place, c in zip(np.flatnonzero(span), classes, strict=True)
    }
    if own and set(rows.tolist()) <= set(own):
        entries = tuple((int(p) * size + own[int(p)], float(weights[p])) for p in rows)
        return Score(", ".join(name for name, _, _ in spans), entries)
    score = class_score(wanted, names, item.probe) or Score.single(
        names[int(logits.argmax())], int(logits.argmax())
    )
    spread = tuple((int(p) * size + c, float(weights[p]) * w) for c, w in score.entries for p in rows)
    return Score(score.name, spread)


def target_scores(
    batch: Sequence[Encoded], outputs: Any, targets: Mapping[str, Score], read: Tensor, task: str = ""
) -> Tensor:
    """Return the score of each probe's target: (batch,)."""
    logits = class_logits(outputs, read, task)
    return torch.cat([targets[item.probe.id].of(logits[i : i + 1]) for i, item in enumerate(batch)])
