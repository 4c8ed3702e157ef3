"""Turn probes into model inputs that know where each of their positions comes from."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BatchEncoding

from audit.capture.pictures import Picture, measured_picture
from audit.capture.positions import (
    Span,
    extra_tokens,
    image_geometry,
    patch_positions,
    spans_by_decoding,
    token_positions,
)
from audit.capture.strides import check_stride
from audit.errors import CaptureError, CheckpointError, ConfigError, ProbeError
from audit.media import load_image
from audit.records import CaptureSettings, Checkpoint, Positions, Probe

# Fast tokenizers keep truncation as state: two threads may not set it at once.
_tokenizer_lock = threading.RLock()
_SHOWN = 3
_OTHER_MODALITY = re.compile(r"vision|visual|image|audio", re.IGNORECASE)
_POSITION_TABLES = ("position_embeddings", "position_embedding", "wpe", "embed_positions", "pos_embedding")


@dataclass(frozen=True)
class Encoded:
    """One probe as the model takes it: tensors with a batch axis of 1, and its positions.

    `second` holds the positions of the second stream: the decoder's own tokens, or the second tower.
    `picture` places the pixels of an image that is read in one sequence with the text.
    """

    probe: Probe
    tensors: Mapping[str, Tensor]
    positions: Positions
    truncated: bool = False
    second: Positions | None = None
    picture: Picture | None = None

    def __len__(self) -> int:
        return len(self.positions)


def core_model(model: nn.Module) -> Any:
    """Return the transformers model inside a compiled or PEFT wrapper, or `model` itself."""
    get_base = getattr(uncompiled(model), "get_base_model", None)
    return uncompiled(get_base() if callable(get_base) else model)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside what `torch.compile` returns, or `model` itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


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
    encoded = []
    for probe, encoding in zip(probes, encodings, strict=True):
        cut = limit is not None and len(encoding["input_ids"]) > limit
        final = _tokenise(tokenizer, probe, limit, settings.truncation_side) if cut else encoding
        encoded.append(_encoded_text(checkpoint, tokenizer, probe, final, cut))
    return encoded


def _encode_windows(
    checkpoint: Checkpoint, probes: Sequence[Probe], stride: int, limit: int | None
) -> list[Encoded]:
    check_stride(stride, limit)
    tokenizer = text_tokenizer(checkpoint)
    if not tokenizer.is_fast or any(probe.messages is not None for probe in probes):
        raise ConfigError("[probes] stride needs plain text and a fast tokenizer; remove stride")
    options = {"truncation": "longest_first", "max_length": limit, "stride": stride}
    encoded = []
    for probe in probes:
        first, second = _texts(tokenizer, probe)
        if second is not None:
            options["truncation"] = "only_second"
        with _tokenizer_lock:
            found = tokenizer(
                first, second, return_overflowing_tokens=True, return_offsets_mapping=True, **options
            )
        for i, window in enumerate(found.encodings):
            one = BatchEncoding({name: values[i] for name, values in found.items()}, encoding=window)
            encoded.append(_encoded_text(checkpoint, tokenizer, probe, one, False))
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


def _encoded_text(checkpoint: Checkpoint, tokenizer: Any, probe: Probe, encoding: Any, cut: bool) -> Encoded:
    ids = list(encoding["input_ids"])
    if not ids:
        raise ProbeError(f"probe {probe.id} has no tokens; remove it from the probe file")
    accepted = accepted_arguments(checkpoint.model)
    names = [n for n in tokenizer.model_input_names if n in encoding and n in accepted]
    tensors = {name: torch.tensor([list(encoding[name])]) for name in names}
    if probe.messages is not None:
        positions = _message_positions(tokenizer, probe, encoding)
    elif tokenizer.is_fast:
        positions = _fast_positions(tokenizer, probe, encoding)
    else:
        positions = _decoded_positions(tokenizer, probe, ids)
    return Encoded(probe, tensors, positions, cut)


def accepted_arguments(model: nn.Module) -> frozenset[str]:
    """Return the names that the model's forward method takes explicitly."""
    return frozenset(inspect.signature(core_model(model).forward).parameters)


def _markers(tokenizer: Any) -> set[int]:
    """Ids that never carry content: all special ones but a pure unknown token."""
    reserved = {
        getattr(tokenizer, f"{n}_token_id", None) for n in ("bos", "eos", "sep", "cls", "pad", "mask")
    }
    return {i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id or i in reserved}


def _fast_positions(tokenizer: Any, probe: Probe, encoding: Any) -> Positions:
    parts = [-1 if part is None else part for part in encoding.sequence_ids()]
    markers = _markers(tokenizer)
    special = [p < 0 or i in markers for p, i in zip(parts, encoding["input_ids"], strict=True)]
    spans = [tuple(span) for span in encoding["offset_mapping"]]
    return token_positions(spans, parts, special, (probe.text or "", probe.text_pair or ""))


def _decoded_positions(tokenizer: Any, probe: Probe, ids: list[int]) -> Positions:
    markers = _markers(tokenizer)
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


# --- images -----------------------------------------------------------------------------------


def processor_part(checkpoint: Checkpoint, part: str, *, mark: str, probes: str) -> Any:
    """Return one part of a checkpoint's processor, or all of it where it is that part alone.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : "image_processor" or "feature_extractor"
    mark : str
        Attribute by which the part alone is known.
    probes : str
        What needs it, for the error.

    Raises
    ------
    CheckpointError
        When the processor has no such part.
    """
    processor = checkpoint.processor
    found = getattr(processor, part, None) or (processor if hasattr(processor, mark) else None)
    if found is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no {part.replace('_', ' ')} but the probes are {probes}; "
            "save its preprocessor_config.json beside it"
        )
    return found


def image_processor(checkpoint: Checkpoint) -> Any:
    """Return the image processor of a checkpoint; raise CheckpointError where it has none."""
    return processor_part(checkpoint, "image_processor", mark="image_mean", probes="images")


def encode_image(checkpoint: Checkpoint, probe: Probe, *, windows: bool = False) -> Encoded:
    """Process one image and place its patches in the stored image; with `windows`, by measuring.

    Raises
    ------
    ProbeError
        When the image is missing or unreadable.
    CaptureError
        When the patches cannot be placed.
    """
    if probe.image is None:
        raise ProbeError(
            f"probe {probe.id} has no image but the checkpoint takes images; mend the probe file"
        )
    processor, model = image_processor(checkpoint), core_model(checkpoint.model)
    pixels = load_image(probe.image)
    stored = (pixels.shape[0], pixels.shape[1])
    if getattr(model.config, "num_channels", 3) == 1:
        pixels = pixels.mean(axis=2, keepdims=True).round().astype(np.uint8)
    processed = processor(pixels, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    if windows:

        def process(image: NDArray[np.uint8]) -> NDArray[np.float64]:
            found = processor(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
            return np.asarray(found.double())

        picture = measured_picture("pixel_values", process, stored)
        patches = int(np.prod(patch_grid(model.config, processed.shape[-2:])))
        several = Positions("patch", np.zeros(patches, np.bool_))
        return Encoded(probe, {"pixel_values": processed}, several, picture=picture)
    size = (processed.shape[-2], processed.shape[-1])
    geometry = image_geometry(processor, stored, size)
    positions = patch_positions(geometry, patch_grid(model.config, size), *extra_tokens(model))
    return Encoded(probe, {"pixel_values": processed}, positions)


def patch_grid(config: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of the patches of a processed image, from the config's patch size.

    Raises
    ------
    CaptureError
        When the config has no patch size.
    """
    patch = patch_size(config)
    if patch is None:
        raise CaptureError(
            f"{type(config).__name__} has no patch_size; patches cannot be placed in the image"
        )
    return size[0] // patch[0], size[1] // patch[1]


def patch_size(config: Any) -> tuple[int, int] | None:
    """Return (height, width) in pixels of the patches of a model's image part, None where it has none."""
    # Models with two towers and captioners keep the image part's config inside theirs.
    parts = [getattr(config, name, None) for name in ("vision_config", "encoder")]
    patch = next((p for part in (*parts, config) if (p := getattr(part, "patch_size", None))), None)
    if patch is None:
        return None
    height, width = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return int(height), int(width)
