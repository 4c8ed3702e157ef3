"""Where each token lies in its text, and each patch in its stored image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from audit.errors import CaptureError
from audit.records import Positions

Span = tuple[int, int]


def trim_span(text: str, start: int, end: int) -> Span:
    """Return [start, end) without the white space at its ends; a span of white space alone stays.

    Examples
    --------
    >>> trim_span("a bird", 1, 6)
    (2, 6)
    """
    piece = text[start:end]
    left, right = piece.lstrip(), piece.rstrip()
    return (start + len(piece) - len(left), end - len(piece) + len(right)) if left else (start, end)


def token_positions(
    spans: Sequence[Span | None] | None, parts: Sequence[int], special: Sequence[bool], texts: Sequence[str]
) -> Positions:
    """Build the positions of one tokenised text or pair.

    Parameters
    ----------
    spans : sequence (n,) of (start, end) or None; or None
        Character span in the token's part; None altogether when the tokenizer could not be aligned.
    parts : sequence (n,)
        0 = first text, 1 = second, -1 = neither.
    special : sequence (n,)
    texts : the texts of the parts

    Returns
    -------
    Positions
        Spans without white space at their ends; -1 where there is none.
    """
    n = len(special)
    bounds = np.full((n, 2), -1, np.int32)
    found = [
        trim_span(texts[part], *span) if span is not None and part >= 0 else (-1, -1)
        for span, part in zip(spans or (), parts, strict=False)
    ]
    if found:
        bounds[: len(found)] = found
    starts, ends = bounds.T.copy()
    return Positions(
        kind="token",
        special=np.asarray(special, np.bool_),
        starts=None if spans is None else starts,
        ends=None if spans is None else ends,
        parts=np.asarray(parts, np.int8),
    )


def spans_by_decoding(tokenizer: Any, ids: Sequence[int], text: str) -> list[Span] | None:
    """Align tokens with characters by decoding ever longer beginnings, and verify the result.

    Parameters
    ----------
    tokenizer : tokenizer without offsets
    ids : tokens of `text` alone, without special tokens
    text : str

    Returns
    -------
    list of (start, end), or None
        None when decoding does not give the text back. Tokens that share a character, such as the
        bytes of one letter, each have its span.
    """
    lengths = [0]
    for stop in range(1, len(ids) + 1):
        decoded = tokenizer.decode(list(ids[:stop]), clean_up_tokenization_spaces=False).rstrip("\ufffd")
        if not text.startswith(decoded):
            return None
        lengths.append(len(decoded))
    if lengths[-1] != len(text):
        return None
    return [(a, min(max(b, a + 1), len(text))) for a, b in pairwise(lengths)]


# --- images -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageGeometry:
    """How an image processor moved pixels: resize to `resized`, then cut or pad to `processed`.

    All are (height, width) in pixels; `offset` is the top left corner of the processed image in the
    resized one (negative where it was padded).
    """

    resized: tuple[int, int]
    processed: tuple[int, int]
    offset: tuple[int, int]

    def boxes(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Return the patches of a rows × columns grid as fractions of the stored image.

        Returns
        -------
        float32 array (rows * columns, 4)
            Left, top, right, bottom, cut to [0, 1]; empty where a patch shows only padding.
        """
        top = _edges(rows, self.processed[0], self.offset[0], self.resized[0])
        left = _edges(columns, self.processed[1], self.offset[1], self.resized[1])
        y0, x0 = np.meshgrid(top[:-1], left[:-1], indexing="ij")
        y1, x1 = np.meshgrid(top[1:], left[1:], indexing="ij")
        return np.stack([x0, y0, x1, y1], axis=-1).reshape(-1, 4).astype(np.float32)


def _edges(cells: int, processed: int, offset: int, resized: int) -> NDArray[np.float64]:
    # A remainder of processed / cells that fills no patch is not seen by the model.
    size = processed // cells
    return np.clip((np.arange(cells + 1) * size + offset) / resized, 0.0, 1.0)


def image_geometry(processor: Any, stored: tuple[int, int], processed: tuple[int, int]) -> ImageGeometry:
    """Work out the geometry of `processor` for one image.

    Parameters
    ----------
    processor : image processor of transformers
    stored, processed : (height, width) in pixels
        Size of the stored image and of the tensor that the processor made of it.

    Raises
    ------
    CaptureError
        When the processor does something else than resize, centre crop, pad at right and bottom.
    """
    resized = _resized(processor, stored)
    offset, size = (0, 0), resized
    if getattr(processor, "do_center_crop", None):
        crop = processor.crop_size
        size = (int(crop["height"]), int(crop["width"]))
        offset = ((resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2)
    if getattr(processor, "do_pad", None) and size[0] <= processed[0] and size[1] <= processed[1]:
        size = processed
    if size != processed:
        raise CaptureError(
            f"{type(processor).__name__} made a {processed[0]}×{processed[1]} image of "
            f"{stored[0]}×{stored[1]} where its "
            f"settings say {size[0]}×{size[1]}; patches cannot be placed, use resize, centre crop "
            "and pad only"
        )
    return ImageGeometry(resized, processed, offset)


def _resized(processor: Any, stored: tuple[int, int]) -> tuple[int, int]:
    if not getattr(processor, "do_resize", None):
        return stored
    size = {key: value for key, value in dict(processor.size).items() if value is not None}
    if "height" in size and "width" in size:
        return int(size["height"]), int(size["width"])
    if "shortest_edge" in size:
        return _aspect_resized(stored, int(size["shortest_edge"]), size.get("longest_edge"))
    raise CaptureError(
        f"{type(processor).__name__} resizes by {', '.join(size) or 'no size'}, expected height "
        "and width or shortest_edge"
    )


def _aspect_resized(stored: tuple[int, int], shortest: int, longest: int | None) -> tuple[int, int]:
    height, width = stored
    if longest is not None and max(stored) / min(stored) * shortest > longest:
        scale = longest * min(stored) / max(stored)
        short = round(scale)
        long = int(scale * max(stored) / min(stored))
    else:
        short, long = shortest, int(shortest * max(stored) / min(stored))
    return (short, long) if height <= width else (long, short)


def patch_positions(geometry: ImageGeometry, grid: tuple[int, int], leading: int, trailing: int) -> Positions:
    """Build the positions of one image: special tokens before and after the patches.

    Parameters
    ----------
    geometry : ImageGeometry
    grid : (rows, columns)
    leading, trailing : int
        Tokens before (CLS, distillation, registers) and after (detection) the patches.

    Returns
    -------
    Positions
        Patches that show only padding are special.
    """
    boxes = np.concatenate(
        [np.zeros((leading, 4), np.float32), geometry.boxes(*grid), np.zeros((trailing, 4), np.float32)]
    )
    special = (boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])
    boxes[special] = 0
    return Positions(kind="patch", special=special, boxes=boxes, grid=grid)


_LEADING = ("cls_token", "class_token", "class_embedding", "distillation_token", "register_tokens")
_TRAILING = ("detection_tokens",)


_EXTRA_TOKENS: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def extra_tokens(model: Any) -> tuple[int, int]:
    """Count the learned tokens that a vision model puts before and after its patches, once a model."""
    if model not in _EXTRA_TOKENS:
        _EXTRA_TOKENS[model] = sum(_learned(model, _LEADING)), sum(_learned(model, _TRAILING))
    return _EXTRA_TOKENS[model]


def _learned(model: Any, names: Sequence[str]) -> Iterator[int]:
    for path, parameter in model.named_parameters():
        if path.rpartition(".")[2] in names:
            yield parameter.shape[-2] if parameter.dim() >= 2 else 1


def with_sink_position(positions: Positions) -> Positions:
    """Return `positions` with one more, special one: the learned sink."""

    def longer(values: Any, fill: float) -> Any:
        if values is None:
            return None
        last = np.full((1, *values.shape[1:]), fill, values.dtype)
        return np.concatenate([values, last])

    return Positions(
        kind=positions.kind,
        special=longer(positions.special, 1),
        starts=longer(positions.starts, -1),
        ends=longer(positions.ends, -1),
        parts=longer(positions.parts, -1),
        boxes=longer(positions.boxes, 0),
        grid=positions.grid,
        times=longer(positions.times, 0),
        causal=positions.causal,
    )
