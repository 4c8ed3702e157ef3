"""Turn probes into windows of encoded inputs, by what the checkpoint takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from audit.capture.inputs.decoding import with_decoder_steps
from audit.capture.inputs.encoded import Encoded, accepted_arguments, core_model, encode_image
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.capture.inputs.prefetch import prefetched
from audit.capture.inputs.region_inputs import check_features, encode_features
from audit.capture.inputs.sound import encode_sound
from audit.capture.inputs.texts import encode_texts
from audit.capture.joined.windowed import has_windows
from audit.errors import CaptureError
from audit.records import CaptureSettings, Checkpoint, Probe


def probe_windows(
    checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings, row: str = "auto"
) -> Iterator[list[Encoded]]:
    """Encode text all at once, so that it can be sorted by length, and images and sound a few at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
    probes : sequence of Probe
        All text, all images, all sound, all images with text, or all text with features of images.
    settings : CaptureSettings
    row : str
        The output row, which says how far an encoder-decoder has to generate.

    Yields
    ------
    list of Encoded

    Raises
    ------
    ProbeError
        When a probe cannot be used.
    CaptureError
        When the probes are of several kinds, or of one that the model does not take.
    """
    modality = _modality(probes)
    check_features(checkpoint, probes)
    if modality == "text":
        windows: Iterator[list[Encoded]] = iter([encode_texts(checkpoint, probes, settings)])
    else:
        few = _few(probes, _encoder(checkpoint, modality, settings), settings.batch_tokens)
        windows = prefetched(few)
    generates = getattr(core_model(checkpoint.model).config, "is_encoder_decoder", False)
    for window in windows:
        yield [with_decoder_steps(checkpoint, item, row) for item in window] if generates else window


def _modality(probes: Sequence[Probe]) -> str:
    modalities = sorted({probe.modality for probe in probes})
    if len(modalities) > 1:
        raise CaptureError(
            f"probes are {', '.join(modalities)}; expected probes of one kind, split the probe set"
        )
    return modalities[0]


def _encoder(checkpoint: Checkpoint, modality: str, settings: CaptureSettings) -> Callable[[Probe], Encoded]:
    if modality == "image":
        windows = has_windows(core_model(checkpoint.model).config)
        return lambda probe: encode_image(checkpoint, probe, windows=windows)
    if modality == "audio":
        return lambda probe: encode_sound(checkpoint, probe)
    if modality == "features+text":
        return lambda probe: encode_features(checkpoint, probe, settings)
    if has_two_towers(checkpoint):
        return lambda probe: _image_with_text(checkpoint, probe, settings)
    _refuse_three_stacks(checkpoint)
    return ImageTextEncoder(checkpoint, settings).encode


def _refuse_three_stacks(checkpoint: Checkpoint) -> None:
    """Refuse a decoder of answers behind an encoder of questions that attends to the image (BLIP's VQA)."""
    core = core_model(checkpoint.model)
    answers = {"input_ids", "decoder_input_ids"} <= accepted_arguments(checkpoint.model)
    if answers and not getattr(core.config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(core).__name__} answers by a decoder behind the encoder that reads question and image, "
            "and gives no logits of its answer; this is not supported, audit its captioner "
            "(ForConditionalGeneration) or another model that answers"
        )


def has_two_towers(checkpoint: Checkpoint) -> bool:
    """Return whether a model compares a text tower with an image tower, such as CLIP."""
    core: Any = core_model(checkpoint.model)
    return hasattr(core, "get_text_features") and hasattr(core, "get_image_features")


def _image_with_text(checkpoint: Checkpoint, probe: Probe, settings: CaptureSettings) -> Encoded:
    """Encode both parts of a probe for two towers."""
    (text,) = encode_texts(checkpoint, [probe], settings)
    image = encode_image(checkpoint, probe)
    tensors = {**text.tensors, **image.tensors}
    return Encoded(probe, tensors, text.positions, text.truncated, image.positions)


def _few(
    probes: Sequence[Probe], encode: Callable[[Probe], Encoded], batch_tokens: int
) -> Iterator[list[Encoded]]:
    window: list[Encoded] = []
    tokens = 0
    for probe in probes:
        window.append(encode(probe))
        tokens += len(window[-1])
        if tokens + len(window[-1]) > batch_tokens:
            yield window
            window, tokens = [], 0
    if window:
        yield window
