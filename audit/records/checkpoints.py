"""A checkpoint: its identity, and the loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckpointInfo:
    """Identity of a checkpoint, computable without loading its weights.

    `digest` is the SHA-256 over the per-file digests in `parts` (``weights``, ``config``,
    ``tokenizer``, ``adapter``); `weights_digest` covers weights and adapter alone.
    """

    ref: str
    digest: str
    weights_digest: str
    tokenizer_digest: str
    revision: str | None = None
    adapter: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    labels: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded: the model in eval mode, its processor, and what it can do.

    `processor` is a tokenizer, an image processor, a feature extractor or a combined processor.
    `pooling` is the pooling that the checkpoint itself declares (``cls``, ``mean``, ``last``), else None.
    `task` is ``sequence-classification``, ``token-classification``, ``question-answering``,
    ``multiple-choice``, ``masked-lm``, ``causal-lm``, ``seq2seq-lm``, ``image-classification``,
    ``zero-shot-image-classification``, ``image-text-to-text``, ``ctc``, ``speech-seq2seq``,
    ``audio-classification``, ``visual-question-answering`` (a question about an image, answered by one of the
    labels), ``other`` (a head of another kind) or ``backbone`` (no head).
    `base_has_head` is False when the head came with the adapter, so that the base has none.
    """

    info: CheckpointInfo
    model: Any
    processor: Any
    task: str
    has_head: bool
    pooling: str | None = None
    base_has_head: bool = True
