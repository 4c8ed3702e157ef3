"""Tokenise text and place its tokens in it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BatchEncoding

from audit.capture.inputs.encoded import Encoded, accepted_arguments, core_model
from audit.capture.inputs.positions import Span, spans_by_decoding, token_positions
from audit.capture.inputs.strides import check_stride
from audit.errors import CheckpointError, ConfigError, ProbeError
from audit.records import CaptureSettings, Checkpoint, Positions, Probe

# Fast tokenizers keep truncation as state: two threads may not set it at once.
_tokenizer_lock = threading.RLock()
_SHOWN = 3
_OTHER_MODALITY = re.compile(r"vision|visual|image|audio", re.IGNORECASE)
_POSITION_TABLES = ("position_embeddings", "position_embedding", "wpe", "embed_positions", "pos_embedding")


def text_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer of a checkpoint.

    Raises
    ------
    CheckpointError
        When its processor has none.
    """
    processor = checkpoint.processor
    tokenizer = (
        processor if hasattr(processor, "convert_ids_to_tokens") else getattr(processor, "tokenizer", None)
    )
    if tokenizer is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no tokenizer but the probes are text; save its "
            "tokenizer beside it"
        )
    return tokenizer


def position_limit(checkpoint: Checkpoint, settings: CaptureSettings) -> int | None:
    """Return how many tokens one probe may have, None without a limit.

    The smallest of ``max_length``, the model's table of position embeddings (RoBERTa's 514 rows mean
    512), the config's ``max_position_embeddings``, and the tokenizer's own limit. An explicit
    ``max_length`` may exceed the last two where no table forbids it.
    """
    model = core_model(checkpoint.model)
    tables = [
        module.num_embeddings - _table_offset(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and path.rpartition(".")[2] in _POSITION_TABLES
        and not _OTHER_MODALITY.search(path)
    ]
    if settings.max_length is not None:
        return min([settings.max_length, *tables])
    declared = [text_tokenizer(checkpoint).model_max_length]
    if not getattr(model.config, "relative_attention", False):  # DeBERTa's is no limit
        declared.append(getattr(model.config, "max_position_embeddings", None) or 0)
    limits = [*tables, *(limit for limit in declared if 0 < limit < 10**9)]
    return min(limits) if limits else None


def _table_offset(module: nn.Embedding) -> int:
    offset = getattr(module, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if module.padding_idx is None else module.padding_idx + 1


def encode_texts(checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings) -> list[Encoded]:
    """Tokenise text probes, cutting over-long ones only where the settings allow it.

    With a ``stride`` a long probe gives several encodings, its overlapping windows, one after the other.

    Raises
    ------
    ProbeError
        Counting the probes that are too long, with the first of them; or for a probe without text.
    """
    tokenizer, limit = text_tokenizer(checkpoint), position_limit(checkpoint, settings)
    if settings.stride is not None:
        return _encode_windows(checkpoint, probes, settings.stride, limit)
    encodings = _tokenised(tokenizer, probes, limit, settings)
    place = _Placing.of(checkpoint, tokenizer)
    encoded = []
    for probe, encoding in zip(probes, encodings, strict=True):
        cut = limit is not None and len(encoding["input_ids"]) > limit
        final = _tokenise(tokenizer, probe, limit, settings.truncation_side) if cut else encoding
        encoded.append(place.encoded(probe, final, cut=cut))
    return encoded


def check_texts(checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings) -> None:
    """Refuse text that :func:`encode_texts` would refuse, as fast as tokens can be counted.

    Raises
    ------
    ProbeError
    """
    messages = [probe for probe in probes if probe.messages is not None]
    if settings.stride is not None or messages:
        encode_texts(checkpoint, probes, settings)
        return
    tokenizer, limit = text_tokenizer(checkpoint), position_limit(checkpoint, settings)
    for probe, encoding in zip(probes, _tokenised(tokenizer, probes, limit, settings), strict=True):
        _require_tokens(probe, encoding)


def _tokenised(
    tokenizer: Any, probes: Sequence[Probe], limit: int | None, settings: CaptureSettings
) -> list[Any]:
    encodings = [_tokenise(tokenizer, probe) for probe in probes]
    long = [
        f"{p.id} ({len(e['input_ids'])})"
        for p, e in zip(probes, encodings, strict=True)
        if limit is not None and len(e["input_ids"]) > limit
    ]
    if long and not settings.truncate:
        more = f" (and {len(long) - _SHOWN} more)" if len(long) > _SHOWN else ""
        raise ProbeError(
            f"{len(long)} of {len(probes)} probes have more than {limit} tokens: {', '.join(long[:_SHOWN])}"
            f"{more}; shorten them, or set [probes] truncate = true to cut them, or stride, the overlap of "
            "the windows in which they are read"
        )
    return encodings


def _encode_windows(
    checkpoint: Checkpoint, probes: Sequence[Probe], stride: int, limit: int | None
) -> list[Encoded]:
    check_stride(stride, limit)
    tokenizer = text_tokenizer(checkpoint)
    place = _Placing.of(checkpoint, tokenizer)
    if not tokenizer.is_fast or any(probe.messages is not None for probe in probes):
        raise ConfigError("[probes] stride needs plain text and a fast tokenizer; remove stride")
    options = {"max_length": limit, "stride": stride}
    encoded = []
    for probe in probes:
        first, second = _texts(tokenizer, probe)
        with _tokenizer_lock:
            found = tokenizer(
                first,
                second,
                truncation="longest_first" if second is None else "only_second",
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                **options,
            )
        for i, window in enumerate(found.encodings):
            one = BatchEncoding({name: values[i] for name, values in found.items()}, encoding=window)
            encoded.append(place.encoded(probe, one))
    return encoded


def _tokenise(tokenizer: Any, probe: Probe, limit: int | None = None, side: str = "right") -> Any:
    options: dict[str, Any] = {"verbose": False}  # of lengths, which encode_texts tells itself
    if tokenizer.is_fast:
        options["return_offsets_mapping"] = True
    if limit is not None:
        options |= {"truncation": True, "max_length": limit}
    first, second = _texts(tokenizer, probe)
    with _tokenizer_lock, _truncation_side(tokenizer, side):
        if probe.messages is not None:
            options["add_special_tokens"] = False
        return tokenizer(first, second, **options) if second is not None else tokenizer(first, **options)


@contextmanager
def _truncation_side(tokenizer: Any, side: str) -> Iterator[None]:
    previous = tokenizer.truncation_side
    tokenizer.truncation_side = side
    try:
        yield
    finally:
        tokenizer.truncation_side = previous


def _texts(tokenizer: Any, probe: Probe) -> tuple[str, str | None]:
    if probe.messages is not None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ProbeError(
                f"probe {probe.id} has messages but the tokenizer has no chat template; use text"
            )
        return str(tokenizer.apply_chat_template(list(probe.messages), tokenize=False)), None
    if probe.text is None:
        raise ProbeError(f"probe {probe.id} has no text but the checkpoint takes text; mend the probe file")
    return probe.text, probe.text_pair


@dataclass(frozen=True)
class _Placing:
    """What is the same for all texts of a checkpoint.

    `arguments` are those of the model that its tokenizer fills, `markers` the ids that never carry content.
    """

    tokenizer: Any
    arguments: tuple[str, ...]
    markers: frozenset[int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokenizer: Any) -> _Placing:
        accepted = accepted_arguments(checkpoint.model)
        names = tuple(name for name in tokenizer.model_input_names if name in accepted)
        return cls(tokenizer, names, marker_ids(tokenizer))

    def encoded(self, probe: Probe, encoding: Any, *, cut: bool = False) -> Encoded:
        """Return a text with its tensors and positions."""
        _require_tokens(probe, encoding)
        tensors = {name: torch.tensor([list(encoding[name])]) for name in self.arguments if name in encoding}
        if probe.messages is not None:
            positions = _message_positions(self.tokenizer, probe, encoding)
        elif self.tokenizer.is_fast:
            positions = _fast_positions(self.markers, probe, encoding)
        else:
            positions = _decoded_positions(self.tokenizer, self.markers, probe, list(encoding["input_ids"]))
        return Encoded(probe, tensors, positions, cut)


def _require_tokens(probe: Probe, encoding: Any) -> None:
    if not len(encoding["input_ids"]):
        raise ProbeError(f"probe {probe.id} has no tokens; remove it from the probe file")


def marker_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that never carry content: all special ones but a pure unknown token."""
    reserved = {
        getattr(tokenizer, f"{n}_token_id", None) for n in ("bos", "eos", "sep", "cls", "pad", "mask")
    }
    return frozenset(i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id or i in reserved)


def _fast_positions(markers: frozenset[int], probe: Probe, encoding: Any) -> Positions:
    parts = [-1 if part is None else part for part in encoding.sequence_ids()]
    special = [p < 0 or i in markers for p, i in zip(parts, encoding["input_ids"], strict=True)]
    spans = [tuple(span) for span in encoding["offset_mapping"]]
    return token_positions(spans, parts, special, (probe.text or "", probe.text_pair or ""))


def _decoded_positions(tokenizer: Any, markers: frozenset[int], probe: Probe, ids: list[int]) -> Positions:
    special = [i in markers for i in ids]
    parts, spans = [-1] * len(ids), [None] * len(ids)
    aligned: list[Span | None] | None = list(spans)
    cursor = 0
    for part, text in enumerate(t for t in (probe.text, probe.text_pair) if t is not None):
        alone = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = _find(ids, alone, cursor)
        found = None if start is None else spans_by_decoding(tokenizer, alone, text)
        if start is None or found is None or aligned is None:
            aligned = None
            continue
        cursor = start + len(alone)
        parts[start:cursor] = [part] * len(alone)
        aligned[start:cursor] = found
    if aligned is None:
        parts = [-1 if s else 0 for s in special]
    return token_positions(aligned, parts, special, (probe.text or "", probe.text_pair or ""))


def _find(ids: list[int], piece: list[int], cursor: int) -> int | None:
    starts = range(cursor, len(ids) - len(piece) + 1)
    return next((i for i in starts if ids[i : i + len(piece)] == piece), None)


def _message_positions(tokenizer: Any, probe: Probe, encoding: Any) -> Positions:
    """Place tokens in the messages' contents, joined by line feeds; template tokens are special."""
    if not tokenizer.is_fast:
        raise ProbeError(f"probe {probe.id} has messages, which need a fast tokenizer; use text")
    rendered, cursor, origin = _texts(tokenizer, probe)[0], 0, 0
    blocks: list[tuple[int, int, int]] = []
    contents = [str(message["content"]) for message in probe.messages or ()]
    for content in contents:
        start = rendered.find(content, cursor)
        if start < 0:
            raise ProbeError(
                f"probe {probe.id}: the chat template changes the content of a message; use text"
            )
        cursor = start + len(content)
        blocks.append((start, cursor, origin - start))
        origin += len(content) + 1
    spans: list[Span | None] = []
    for start, end in encoding["offset_mapping"]:
        inside = next(((a, b, d) for a, b, d in blocks if start < b and end > a), None)
        spans.append(
            None if inside is None else (max(start, inside[0]) + inside[2], min(end, inside[1]) + inside[2])
        )
    parts = [-1 if span is None else 0 for span in spans]
    return token_positions(spans, parts, [p < 0 for p in parts], ("\n".join(contents),))
