"""What a checkpoint is shown: probes, the positions they are cut into, and regions of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Probe:
    """One input of the probe set.

    Attributes
    ----------
    id : str
        Unique within its probe set; the digest of the content where the file gives none.
    text, text_pair : str or None
        Content of a text probe. Character spans refer to these strings exactly as stored here.
    messages : sequence of {"role", "content"} or None
        A chat; rendered through the tokenizer's chat template.
    image : str or uint8 array (height, width) or (height, width, channel), or None
        Absolute path of an image file, or its pixels.
    audio : str or float32 array (samples,), or None
        Absolute path of a sound file, or its samples at `sampling_rate`.
    features : str or mapping, or None
        What a detector found in an image, for models that read that in the place of pixels: absolute path of
        an ``.npz`` file of the arrays ``features`` (region, dim) and ``boxes`` (region, 4; left, top, right,
        bottom in fractions of the image), or these arrays. The image beside it, if any, is only shown.
    label : class name, class index, number, list of classes, or None
    group : str or None
        Template or cluster that the probe was made from; the unit of resampling when given.
    segments : mapping of str to str
        Free keys by which results are broken down.
    regions : mapping of name to annotation
        As read: character spans ``[[start, end], ...]``, ``{"text": spans, "text_pair": spans}``,
        ``{"box": [left, top, right, bottom]}`` in fractions of the stored image,
        ``{"mask": path}``, or time spans in seconds.
    """

    id: str
    text: str | None = None
    text_pair: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    image: str | NDArray[np.uint8] | None = None
    audio: str | NDArray[np.float32] | None = None
    sampling_rate: int | None = None
    label: Any = None
    group: str | None = None
    segments: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, Any] = field(default_factory=dict)
    features: str | Mapping[str, NDArray[np.float32]] | None = None

    @property
    def modality(self) -> Literal["text", "image", "audio", "image+text", "features+text"]:
        """Return which kind of processor the probe needs."""
        if self.features is not None:
            return "features+text"
        if self.image is not None:
            return "image" if self.text is None and self.messages is None else "image+text"
        return "text" if self.audio is None else "audio"


@dataclass(frozen=True)
class ProbeSet:
    """An ordered, fixed list of probes and its two digests; `contents` are the digests of single probes."""

    probes: tuple[Probe, ...]
    inputs_digest: str
    annotations_digest: str
    source: str = ""
    contents: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.probes)

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.probes)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the probe ids in order."""
        return tuple(probe.id for probe in self.probes)


@dataclass(frozen=True)
class Positions:
    """Where each of n positions (tokens, patches, audio frames) lies in its probe.

    Attributes
    ----------
    kind : "token", "patch" or "frame"
    special : bool array (n,)
        Positions without content of the user: [CLS], [SEP], registers, sinks, template tokens.
    starts, ends : int32 array (n,) or None
        Character span [start, end) in the part's text, white space trimmed; -1 where there is none.
    parts : int8 array (n,) or None
        0 = ``text``, 1 = ``text_pair``, -1 = neither.
    boxes : float32 array (n, 4) or None
        Left, top, right, bottom as fractions of the *stored* image; zeros at special positions.
    grid : (rows, columns) or None
        Shape of the patch grid; patches run row by row.
    times : float32 array (n, 2) or None
        Start and end in seconds.
    causal : bool
        True when position i cannot attend beyond i, so that position 0 is the region ``first``.
    """

    kind: Literal["token", "patch", "frame"]
    special: NDArray[np.bool_]
    starts: NDArray[np.int32] | None = None
    ends: NDArray[np.int32] | None = None
    parts: NDArray[np.int8] | None = None
    boxes: NDArray[np.float32] | None = None
    grid: tuple[int, int] | None = None
    times: NDArray[np.float32] | None = None
    causal: bool = False

    def __len__(self) -> int:
        return len(self.special)

    @property
    def content(self) -> NDArray[np.bool_]:
        """Return which positions carry content: neither special nor position 0 of a causal model."""
        mask = ~self.special
        if self.causal and len(mask) > 1:
            mask = mask.copy()
            mask[0] = False
        return mask


@dataclass(frozen=True)
class Region:
    """A named set of positions, fixed before anything is looked at.

    `kind` is ``terms`` (list of words), ``pattern`` (regular expression), ``box``, ``annotated``
    (spans, boxes or masks of each probe), ``special``, ``first``, ``quantile`` (band of the relative
    position), ``grid`` (one cell of a rows × columns grid) or ``rest`` (content outside every other
    region). `params` holds the JSON-able parameters of the kind.
    """

    name: str
    kind: Literal["terms", "pattern", "box", "annotated", "special", "first", "quantile", "grid", "rest"]
    params: Mapping[str, Any] = field(default_factory=dict)
