"""What a gradient method explains on a model of two streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from audit.capture.inputs.encoded import Encoded
from audit.capture.outputs.predictions import token_score
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import similarity
from audit.errors import CaptureError
from audit.records import Checkpoint, Prediction


def next_token_scores(
    checkpoint: Checkpoint, batch: Sequence[Encoded], outputs: Any, wanted: Mapping[str, Any], read: Tensor
) -> dict[str, Score]:
    """Return what is explained for each probe id: logits at the decoder rows that are read.

    Of the wanted token, or the difference of two; where none is wanted, of the token that follows each row
    in what the checkpoint generates.

    Raises
    ------
    ProbeError
        When what is wanted is not a single token.
    CaptureError
        When the model gives no logits of its tokens.
    """
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[1] != read.shape[1]:
        raise CaptureError(
            f"{type(outputs).__name__} has no logits of tokens to explain; use the method rollout"
        )
    tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
    size, found = logits.shape[2], {}
    for item, row, rows in zip(batch, logits.detach(), read.double().cpu(), strict=True):
        places = rows.nonzero()[:, 0].tolist()
        score = token_score(tokenizer, wanted.get(item.probe.id), item.probe)
        if score is None:
            entries = [(place, _follower(item, row, place), 1.0) for place in places]
            name = _decoded(tokenizer, [token for _, token, _ in entries])
        else:
            entries = [(place, token, weight) for place in places for token, weight in score.entries]
            name = score.name
        found[item.probe.id] = Score(
            name,
            tuple((place * size + token, float(rows[place]) * weight) for place, token, weight in entries),
        )
    return found


def _follower(item: Encoded, logits: Tensor, place: int) -> int:
    """Return the token that follows a decoder row: the generated one, for the last row the likeliest."""
    ids = item.tensors.get("decoder_input_ids")
    if ids is not None and place + 1 < ids.shape[1]:
        return int(ids[0, place + 1])
    return int(logits[place].argmax())


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    decode = getattr(tokenizer, "decode", None)
    return " ".join(map(str, tokens)) if decode is None else str(decode(tokens))


def pair_scores(batch: Sequence[Encoded], outputs: Any, targets: Mapping[str, Score]) -> Tensor:
    """Return the score of each probe's target: (batch,)."""
    logits = outputs.logits.flatten(1)
    return torch.cat([targets[item.probe.id].of(logits[i : i + 1]) for i, item in enumerate(batch)])


def with_target(answer: Prediction, score: Score | None, logits: Tensor) -> Prediction:
    """Return a prediction with the logit that was explained; `logits` are the probe's own, flat."""
    if score is None:
        return answer
    value = float(score.of(logits.detach().double().cpu()[None])[0])
    return replace(answer, target=score.name, target_logit=value)


def explained_logits(outputs: Any) -> Tensor:
    """Return the logits that targets are sums of, flat for each probe: (batch, logit)."""
    own = similarity(outputs)
    if own is not None:
        return own[:, None]
    answers = getattr(outputs, "question_answering_score", None)
    return answers if isinstance(answers, Tensor) else outputs.logits.flatten(1)
