"""Turn raw values of a probe file into a probe, or say in one line what is wrong with them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from audit.media import check_samples, image_size, load_audio, load_features, load_image
from audit.probes.rows import parse_json
from audit.records import Probe
from audit.regions.parse import check_box, nearest
from audit.regions.weights import part_texts

FIELDS = (
    "id",
    "text",
    "text_pair",
    "messages",
    "image",
    "features",
    "audio",
    "label",
    "group",
    "segments",
    "regions",
)
CONTENT = ("text", "messages", "image", "features", "audio")
_TOGETHER = (
    {"text"},
    {"text", "text_pair"},
    {"messages"},
    {"image"},
    {"image", "text"},
    {"image", "messages"},
    {"features", "text"},
    {"features", "text", "image"},
    {"audio"},
)


def make_probe(raw: Mapping[str, Any], folder: Path) -> Probe:
    """Return the probe of one row; its id is empty where the row has none.

    Parameters
    ----------
    raw : mapping of field to value
        As read: JSON values, or strings that hold JSON where the format has no nested values.
    folder : Path
        What relative paths are relative to.

    Raises
    ------
    ValueError
        In one line, without the place.
    """
    audio, rate = _audio(raw.get("audio"), folder)
    probe = Probe(
        id=_name("id", raw.get("id")) or "",
        text=_text("text", raw.get("text")),
        text_pair=_text("text_pair", raw.get("text_pair")),
        messages=_messages(_parsed("messages", raw.get("messages"))),
        image=_image(raw.get("image"), folder),
        audio=audio,
        sampling_rate=raw.get("sampling_rate") if rate is None else rate,
        label=_label(raw.get("label")),
        group=_name("group", raw.get("group")),
        segments=_segments(raw),
        features=_features(raw.get("features"), folder),
    )
    _check_content(probe)
    return _with_regions(probe, raw, folder)


def _check_content(probe: Probe) -> None:
    given = {name for name in (*CONTENT, "text_pair") if getattr(probe, name) is not None}
    if not given:
        raise ValueError(f"no content: expected one of {', '.join(CONTENT)}; fill it in")
    if given not in _TOGETHER:
        raise ValueError(
            f"{' and '.join(sorted(given))} cannot make one probe; expected text, text and text_pair, "
            "image and text, image and messages, or one of messages, image and audio"
        )


def _name(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{field} must be a word or a whole number, got {value!r}")
    return _well_formed(field, str(value))


def _text(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a text, got {value!r}")
    if not value.strip():
        raise ValueError(f"{field} is empty; fill it in, or remove the probe")
    return _well_formed(field, value)


def _well_formed(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field} has half a surrogate pair at character {error.start}; mend the text"
        ) from None
    return text


def _parsed(field: str, value: Any) -> Any:
    """Return nested values, which formats without them give as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{field} is not JSON ({error})") from None


def _compact(value: Any) -> Any:
    """Return `value` without the empty entries that columnar formats add to nested values."""
    if isinstance(value, Mapping):
        return {key: _compact(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_compact(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _messages(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of {{role, content}}, got {value!r}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages must be a list of {{role, content}}, got {message!r}")
        if not isinstance(message.get("content"), str | list):
            raise ValueError(f"the content of a message must be a text, got {message.get('content')!r}")
    messages: list[dict[str, Any]] = _compact(value)
    return messages


def _image(value: Any, folder: Path) -> Any:
    if value is None:
        return None
    if isinstance(value, np.ndarray | bytes):
        return load_image(value)
    if isinstance(value, Mapping):  # how datasets stores images
        return load_image(value["bytes"]) if value.get("bytes") else _image(value.get("path"), folder)
    return _path("image", value, folder)


def _features(value: Any, folder: Path) -> Any:
    """Return a path, or the two arrays."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return dict(zip(("features", "boxes"), load_features(value), strict=True))
    return _path("features", value, folder)


def _audio(value: Any, folder: Path) -> tuple[Any, int | None]:
    """Return samples and their rate, or a path and None."""
    if isinstance(value, bytes):
        return load_audio(value)
    if isinstance(value, Mapping):
        return load_audio(value["bytes"]) if value.get("bytes") else _audio(value.get("path"), folder)
    if isinstance(value, np.ndarray):
        return check_samples(value, "audio in the probe file"), None
    if value is None:
        return None, None
    return _path("audio", value, folder), None


def _path(field: str, value: Any, folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be the path of a file, got {value!r}")
    path = os.path.abspath(folder / value)  # noqa: PTH100 - symbolic links are kept
    if not Path(path).is_file():
        raise ValueError(f"{field} {value!r} does not exist in {folder}; mend the path")
    return path


def _label(value: Any) -> Any:
    """Return a class name, a number, or (nested) lists and mappings of them."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"label must be a finite number, got {value!r}")
    if isinstance(value, list | tuple | np.ndarray):
        return [_label(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _label(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return _label(value.item())
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"label must be a class, a number or a list, got {value!r}")
    return _well_formed("label", value)


def _segments(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the field ``segments`` together with the columns ``segments.<key>``."""
    value = _parsed("segments", raw.get("segments"))
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"segments must be a mapping of key to word, got {value!r}")
    pairs = {**(value or {}), **_prefixed(raw, "segments.")}
    segments = {key: _segment(key, item) for key, item in pairs.items() if item is not None}
    return dict(sorted(segments.items()))


def _segment(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ValueError(f"segments.{key} must be a word or a number, got {value!r}")
    return _well_formed(f"segments.{key}", str(value))


def _prefixed(raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in raw.items() if key.startswith(prefix)}


# --- annotations ------------------------------------------------------------------------------


def _with_regions(probe: Probe, raw: Mapping[str, Any], folder: Path) -> Probe:
    value = _parsed("regions", raw.get("regions"))
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"regions must be a mapping of name to annotation, got {value!r}")
    pairs = {**(value or {}), **_prefixed(raw, "regions.")}
    regions = {}
    for name, item in sorted(pairs.items()):
        annotation = _compact(_parsed(f"regions.{name}", item))
        if annotation:  # null and [] mean that the probe has no such region
            regions[name] = _annotation(f"regions.{name}", annotation, probe, folder)
    fields = {key: getattr(probe, key) for key in Probe.__dataclass_fields__}
    return Probe(**{**fields, "regions": regions})


def _annotation(where: str, value: Any, probe: Probe, folder: Path) -> Any:
    if isinstance(value, list):
        return _audio_spans(where, value) if probe.audio is not None else _bare_spans(where, value, probe)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be spans, a box or a mask, got {value!r}")
    if "box" in value or "mask" in value:
        return _image_annotation(where, value, probe, folder)
    valid = {"text": probe.text, "text_pair": probe.text_pair}
    for key in value:
        if key not in valid:
            raise ValueError(f"{where}: unknown key {key!r}{nearest(key, [*valid, 'box', 'mask'])}")
    return {key: _spans(f"{where}.{key}", spans, valid[key]) for key, spans in sorted(value.items())}


def _image_annotation(where: str, value: Mapping[str, Any], probe: Probe, folder: Path) -> dict[str, Any]:
    if len(value) != 1:
        raise ValueError(f"{where} must have one key, box or mask, got {', '.join(value)}")
    if "box" in value and probe.features is not None:
        return {"box": check_box(value["box"], where)}
    if probe.image is None:
        raise ValueError(f"{where} is a box or a mask, but the probe has no image; use spans")
    if "box" in value:
        return {"box": check_box(value["box"], where)}
    if isinstance(value["mask"], list):  # a mask that was loaded already
        return {"mask": np.asarray(value["mask"], dtype=np.float32)}
    mask = _path(f"{where}: mask", value["mask"], folder)
    if image_size(mask) != image_size(probe.image):
        raise ValueError(
            f"{where}: mask {value['mask']!r} is {image_size(mask)} (height, width) and the image "
            f"{image_size(probe.image)}; make them equal"
        )
    return {"mask": mask}


def _bare_spans(where: str, value: list[Any], probe: Probe) -> list[list[int]]:
    """Return spans of ``text``, or of the contents of ``messages`` joined by line breaks."""
    texts = part_texts(probe)
    if not texts:
        raise ValueError(f"{where} has character spans, but the probe has no text; use a box or a mask")
    return _spans(where, value, texts[0])


def _spans(where: str, value: Any, text: str | None) -> list[list[int]]:
    if text is None:
        raise ValueError(f"{where} has spans in a text that the probe does not have")
    spans = []
    for span in _pairs(where, value):
        if not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in span):
            raise ValueError(f"{where}: span edges must be whole numbers of characters, got {span!r}")
        start, end = span
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"{where}: span [{start}, {end}] lies outside the text, which has {len(text)} characters; "
                "expected [start, end) with 0 <= start < end"
            )
        spans.append([start, end])
    return spans


def _audio_spans(where: str, value: list[Any]) -> list[list[float]]:
    spans = []
    for span in _pairs(where, value):
        if not all(isinstance(edge, int | float) and not isinstance(edge, bool) for edge in span):
            raise ValueError(f"{where}: span edges must be seconds, got {span!r}")
        start, end = float(span[0]), float(span[1])
        if not 0 <= start < end < math.inf:
            raise ValueError(f"{where}: span [{start}, {end}] must have 0 <= start < end, in seconds")
        spans.append([start, end])
    return spans


def _pairs(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(span, list) and len(span) == 2 for span in value):
        raise ValueError(f"{where} must be a list of spans such as [[4, 9]], got {value!r}")
    return value
