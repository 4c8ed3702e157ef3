"""What an encoder-decoder generates for a probe: the steps whose rows are read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from audit.capture.attention.passes import exclusive, place
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.positions import token_positions
from audit.errors import CaptureError, ConfigError, ProbeError
from audit.records import Checkpoint, Positions

STEPS = 64
_CLASSIFIES = (
    "sequence-classification",
    "token-classification",
    "question-answering",
    "audio-classification",
)


def with_decoder_steps(checkpoint: Checkpoint, item: Encoded, row: str) -> Encoded:
    """Return `item` with the decoder tokens that the checkpoint generates for it, without sampling.

    The decoder then runs on these tokens at once; its row i predicts generated token i.

    Parameters
    ----------
    checkpoint : Checkpoint
    item : Encoded
    row : str
        ``decoder:<i>`` generates as far as token i; other rows, up to 64 tokens, and no more than the
        decoder has positions for.

    Raises
    ------
    ConfigError
        When the row is unknown, or lies beyond the decoder's positions.
    CaptureError
        When the model generates nothing.
    ProbeError
        When it ends before the token asked for.
    """
    core: Any = core_model(checkpoint.model)
    name = type(core).__name__
    if checkpoint.task in _CLASSIFIES or not getattr(core, "can_generate", bool)():
        raise CaptureError(
            f"{name} is an encoder-decoder that generates nothing (task {checkpoint.task}), which is not "
            "supported; audit the checkpoint with its generating head (…ForConditionalGeneration)"
        )
    wanted, limit = generated_token(row), _position_limit(core)
    if wanted is not None and limit is not None and wanted >= limit:
        raise ConfigError(
            f"[method] row = {row!r} is beyond the {limit} positions of {name}'s decoder; use decoder:0 to "
            f"decoder:{limit - 1}"
        )
    # The last token that is generated is not fed, so that the start and limit - 1 tokens fill the positions.
    steps = min(STEPS, limit or STEPS) if wanted is None else wanted + 1
    with exclusive(checkpoint.model):
        # Whisper's own method cuts its start tokens off, whose rows count here like all others.
        ids = GenerationMixin.generate(
            core,
            **place(item.tensors, core.device, core.dtype),
            max_new_tokens=steps,
            num_beams=1,
            do_sample=False,
        )
    ids = ids.cpu()
    if wanted is not None and ids.shape[1] < wanted + 2:
        raise ProbeError(
            f"probe {item.probe.id}: the checkpoint generates {ids.shape[1] - 1} tokens, none is row "
            f"{row!r}; mend [method] row or remove the probe"
        )
    ids = ids[:, :-1] if ids.shape[1] > 1 else ids
    return replace(
        item,
        tensors={**item.tensors, "decoder_input_ids": ids},
        second=_prefix_positions(checkpoint, ids),
    )


def _position_limit(core: Any) -> int | None:
    """Return how many positions the decoder has, None where it has no limit."""
    config = core.config.get_text_config(decoder=True)
    declared = (getattr(config, key, None) for key in ("max_target_positions", "max_position_embeddings"))
    return next((int(one) for one in declared if one), None)


def generated_token(row: str) -> int | None:
    """Return i of the row ``decoder:<i>``, None for a row that is no single token's.

    Raises
    ------
    ConfigError
        When an encoder-decoder has no such row.

    Examples
    --------
    >>> generated_token("decoder:1"), generated_token("last")
    (1, None)
    """
    match = re.fullmatch(r"decoder:(\d+)", row)
    if match is None and row not in ("auto", "mean", "last"):
        raise ConfigError(
            f"[method] row = {row!r} is unknown for an encoder-decoder; use auto, mean, last or decoder:<i>"
        )
    return None if match is None else int(match[1])


def _prefix_positions(checkpoint: Checkpoint, ids: Tensor) -> Positions:
    tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
    known = set(getattr(tokenizer, "all_special_ids", ()))
    start = getattr(core_model(checkpoint.model).config, "decoder_start_token_id", None)
    special = [i in known or i == start for i in torch.flatten(ids).tolist()]
    special[0] = True
    return token_positions(None, [-1] * len(special), special, ())
