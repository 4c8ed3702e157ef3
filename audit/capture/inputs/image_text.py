"""Turn an image with text into what a model takes that reads both in one sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.inputs.encoded import Encoded, accepted_arguments
from audit.capture.inputs.pictures import Picture, measured_picture
from audit.capture.inputs.positions import Span, token_positions
from audit.capture.inputs.texts import marker_ids, position_limit, text_tokenizer
from audit.errors import CheckpointError, ProbeError
from audit.media import load_image
from audit.records import CaptureSettings, Checkpoint, Positions, Probe
from audit.regions.weights import part_texts

IMAGE_INPUTS = ("pixel_values", "image_patches", "flattened_patches")


class ImageTextEncoder:
    """Encode probes of an image with text; the geometry of each size of image is measured once.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its processor takes images and text together.
    settings : CaptureSettings

    Raises
    ------
    CheckpointError
        When it has no such processor.
    """

    def __init__(self, checkpoint: Checkpoint, settings: CaptureSettings) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.tokenizer = text_tokenizer(checkpoint)
        if getattr(checkpoint.processor, "image_processor", None) is None or not callable(
            checkpoint.processor
        ):
            raise CheckpointError(
                f"checkpoint {checkpoint.info.ref} has no processor for images with text; save its whole "
                "processor (AutoProcessor) into the same directory"
            )
        self._pictures: dict[tuple[int, ...], Picture] = {}

    def encode(self, probe: Probe) -> Encoded:
        """Return the tensors of one probe, the spans of its tokens and the places of its pixels.

        Raises
        ------
        ProbeError
            When the probe lacks its image or text, is too long, or its text cannot be found again.
        """
        if probe.image is None:
            raise ProbeError(f"probe {probe.id} has text but no image; mend the probe file")
        pixels = load_image(probe.image)
        prompt, origin, contents = self._prompt(probe)
        tokenizer = _Recording(self.tokenizer)
        processed = self._process(pixels, prompt, tokenizer)
        name = next((name for name in IMAGE_INPUTS if name in processed), None)
        if name is None:
            raise ProbeError(f"probe {probe.id}: the processor makes no pixels of its image")
        accepted = accepted_arguments(self.checkpoint.model)
        tensors = {key: value for key, value in processed.items() if key in accepted and key != "labels"}
        self._check_length(probe, tensors["input_ids"].shape[1])
        token = _image_token(self.checkpoint.processor, self.tokenizer)
        places = _places(prompt, origin, token, tokenizer.text)
        positions = _text_positions(probe, contents, places, tokenizer)
        return Encoded(probe, tensors, positions, picture=self._picture(name, pixels, prompt, tensors[name]))

    def _process(self, pixels: NDArray[np.uint8], prompt: str, tokenizer: Any) -> dict[str, Tensor]:
        from PIL import Image

        processor: Any = copy.copy(self.checkpoint.processor)
        processor.tokenizer = tokenizer
        image = Image.fromarray(pixels)  # some processors take nothing else
        found = processor(images=[image], text=prompt, return_tensors="pt")
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def _check_length(self, probe: Probe, length: int) -> None:
        limit = position_limit(self.checkpoint, self.settings)
        if limit is not None and length > limit:
            raise ProbeError(
                f"1 of the probes has more than {limit} tokens with its image: {probe.id} ({length}); "
                "shorten it, an image cannot be truncated"
            )

    def _picture(self, name: str, pixels: NDArray[np.uint8], prompt: str, processed: Tensor) -> Picture:
        stored = (pixels.shape[0], pixels.shape[1])
        key = (*stored, *processed.shape)
        if key not in self._pictures:

            def process(image: NDArray[np.uint8]) -> NDArray[np.float64]:
                return self._process(image, prompt, self.tokenizer)[name].double().numpy()

            self._pictures[key] = measured_picture(name, process, stored)
        return self._pictures[key]

    def _prompt(self, probe: Probe) -> tuple[str, NDArray[np.int64], str]:
        """Return the text with a place for the image, where its characters stand in the probe's, and that."""
        token = _image_token(self.checkpoint.processor, self.tokenizer)
        if probe.messages is not None:
            return self._rendered(probe)
        text = str(probe.text)
        given = token is None or token in text
        prompt = text if given else f"{token}{text}"
        origin = np.full(len(prompt), -1)
        origin[len(prompt) - len(text) :] = np.arange(len(text))
        return prompt, origin, text

    def _rendered(self, probe: Probe) -> tuple[str, NDArray[np.int64], str]:
        processor = self.checkpoint.processor
        if not (getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)):
            raise ProbeError(
                f"probe {probe.id} has messages but the processor has no chat template; use text"
            )
        messages = _with_image(probe.messages or ())
        answer_next = messages[-1]["role"] == "user"
        prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
        origin, cursor = np.full(len(prompt), -1), 0
        for content, place in _pieces(messages):
            start = prompt.find(content, cursor)
            if start < 0:
                raise ProbeError(
                    f"probe {probe.id}: the chat template changes the content of a message; use text"
                )
            cursor = start + len(content)
            origin[start:cursor] = np.arange(place, place + len(content))
        return str(prompt), origin, part_texts(probe)[0]


def _with_image(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in parts; the image stands first in the first message of the user unless placed."""
    found = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        found.append({**message, "content": parts})
    placed = any(part.get("type") == "image" for message in found for part in message["content"])
    if not placed:
        first = next((message for message in found if message["role"] == "user"), found[0])
        first["content"] = [{"type": "image"}, *first["content"]]
    return found


def _pieces(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return the texts of messages, and where each begins in all of them: one message a line."""
    pieces, place = [], 0
    for message in messages:
        for part in message["content"]:
            text = str(part.get("text") or "")
            pieces.append((text, place))
            place += len(text)
        place += 1
    return pieces


def _image_token(processor: Any, tokenizer: Any) -> str | None:
    token = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None)
    return None if token is None else str(token)


class _Recording:
    """A tokenizer that keeps what it was given and where its tokens lie in it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text, self.spans = "", list[Span]()
        self.tokens = list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._tokenizer.is_fast:
            return self._tokenizer(text, *args, **kwargs)
        found = self._tokenizer(text, *args, **{**kwargs, "return_offsets_mapping": True})
        spans = torch.as_tensor(found.pop("offset_mapping")).reshape(-1, 2).tolist()
        self.text = text if isinstance(text, str) else str(text[0])
        self.spans = [(int(start), int(end)) for start, end in spans]
        self.tokens = torch.as_tensor(found["input_ids"]).flatten().tolist()
        return found


def _text_positions(
    probe: Probe, contents: str, places: NDArray[np.int64] | None, seen: _Recording
) -> Positions:
    """Place the tokens of what the processor made of the prompt in the probe's own text."""
    if not seen.spans:
        raise ProbeError(f"probe {probe.id} is an image with text, which needs a fast tokenizer; convert it")
    if places is None:
        raise ProbeError(f"probe {probe.id}: the processor changes its text beyond the place of the image")
    spans: list[Span | None] = []
    for start, end in seen.spans:
        inside = places[start:end][places[start:end] >= 0]
        spans.append(None if len(inside) == 0 else (int(inside[0]), int(inside[-1]) + 1))
    markers = marker_ids(seen)
    special = [span is None or i in markers for span, i in zip(spans, seen.tokens, strict=True)]
    parts = [-1 if span is None else 0 for span in spans]
    return token_positions(spans, parts, special, (contents,))


def _places(prompt: str, origin: NDArray[np.int64], token: str | None, text: str) -> NDArray[np.int64] | None:
    """Carry the origin of the prompt's characters over to `text`, in which the image has more tokens."""
    places, cursor, start = np.full(len(text), -1), 0, 0
    pieces = prompt.split(token) if token else [prompt]
    for i, piece in enumerate(pieces):
        last = len(pieces) > 1 and i == len(pieces) - 1
        found = text.rfind(piece) if last and piece else text.find(piece, cursor)
        if found < cursor:
            return None
        places[found : found + len(piece)] = origin[start : start + len(piece)]
        cursor = found + len(piece)
        start += len(piece) + len(token or "")
    return places
