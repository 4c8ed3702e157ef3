"""Read and write probe sets, and digest them.

Two digests identify a probe set: the inputs digest covers ids and contents (images and sounds by what
they decode to), the annotations digest covers labels, groups, segments and regions. Neither depends on
the order of keys, line ends, the file format, or where the files lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.errors import ProbeError
from audit.media import (
    load_audio,
    load_features,
    load_image,
    load_mask,
    save_audio,
    save_features,
    save_image,
)
from audit.probes.fields import CONTENT, FIELDS, make_probe
from audit.probes.rows import Row, read_rows
from audit.records import Probe, ProbeSet, digest
from audit.regions.parse import nearest

__all__ = ["as_probes", "content_digest", "load_annotations", "read_probes", "write_probes"]

_ID_DIGITS = 16


# --- read -------------------------------------------------------------------------------------


def read_probes(path: str | Path, *, columns: Mapping[str, str] | None = None) -> ProbeSet:
    r"""Read a probe set.

    Parameters
    ----------
    path : str or Path
        A ``.jsonl``, ``.parquet``, ``.csv`` or ``.tsv`` file; a folder of images or sounds, with or
        without ``metadata.jsonl`` (two or more sub-folders are the classes); or a folder written by
        ``save_to_disk`` of the package datasets.
    columns : mapping of field to column, optional
        Where the columns of the file have other names, ``{"text": "sentence"}``. A field may be
        ``segments.<key>`` or ``regions.<name>``. With a mapping, columns that it does not name and that
        are not fields are left out; without one they are errors.

    Returns
    -------
    ProbeSet
        In the order of the file. A probe without ``id`` has the digest of its content as id
        (16 hex digits).

    Raises
    ------
    ProbeError
        Naming the file, the line and the remedy.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "probes.csv"
    >>> _ = path.write_text("id,sentence,label\nr-1,It was great.,positive\n")
    >>> read_probes(path, columns={"text": "sentence"}).probes[0].text
    'It was great.'
    """
    path = Path(path)
    rows = _rename(read_rows(path), columns or {}, path)
    _check_columns(rows, path, strict=not columns)
    folder = path if path.is_dir() else path.parent
    return _make_set([(place, raw, folder) for place, raw in rows], str(path))


def as_probes(probes: Iterable[Probe | str | Mapping[str, Any]], *, source: str = "") -> ProbeSet:
    """Return probes that were made in memory as a probe set, checked as if read from a file.

    Parameters
    ----------
    probes : iterable of Probe, text, or mapping of field to value
        Images may be uint8 arrays (height, width) or (height, width, channel). Relative paths are
        relative to the working directory. An empty id becomes the digest of the content.
    source : str
        Name of the set in messages.

    Returns
    -------
    ProbeSet

    Raises
    ------
    ProbeError
        When a probe is not valid or two have one id.

    Examples
    --------
    >>> [len(probe.id) for probe in as_probes(["It was great."])]
    [16]
    """
    entries = [(f"probe {number}", _fields(item), Path.cwd()) for number, item in enumerate(probes)]
    name = source or "probes"
    if not entries:
        raise ProbeError(f"{name}: there are none; give at least one")
    for place, raw, _ in entries:
        for key in raw:
            _check_field(key, f"{name} {place}", ("sampling_rate",))
    return _make_set(entries, name, source)


def _fields(item: Probe | str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Probe):
        return {**vars(item), "id": item.id or None}
    return dict(item)


def _rename(rows: list[Row], columns: Mapping[str, str], path: Path) -> list[Row]:
    """Return the rows with mapped columns under the names of their fields."""
    present = dict.fromkeys(key for _, raw in rows for key in raw)
    for field, column in columns.items():
        _check_field(field, f"{path}: columns", ())
        if column not in present:
            raise ProbeError(f"{path} has no column {column!r} for {field}{nearest(column, present)}")
    if not columns:
        return rows
    moved = set(columns.values())
    return [
        (
            place,
            {key: value for key, value in raw.items() if key not in moved and key not in columns}
            | {field: raw.get(column) for field, column in columns.items()},
        )
        for place, raw in rows
    ]


def _check_columns(rows: list[Row], path: Path, *, strict: bool) -> None:
    """Refuse a set without content, and columns that are no fields."""
    seen: dict[str, str] = {}
    for place, raw in rows:
        for key in raw:
            seen.setdefault(key, place)
    if not seen.keys() & set(CONTENT):
        raise ProbeError(
            f"{path} has no column {', '.join(CONTENT[:-1])} or {CONTENT[-1]}, only "
            f"{', '.join(seen) or 'none'}; "
            'map one: columns = { text = "..." }'
        )
    for key, place in seen.items():
        if strict:
            _check_field(key, f"{path} {place}", ())
    if not strict:
        for _, raw in rows:
            for key in [key for key in raw if not _is_field(key)]:
                del raw[key]


def _is_field(key: str) -> bool:
    return key in FIELDS or (key.startswith(("segments.", "regions.")) and not key.endswith("."))


def _check_field(key: str, where: str, extra: Sequence[str]) -> None:
    if not _is_field(key) and key not in extra:
        raise ProbeError(
            f"{where}: unknown field {key!r}{nearest(key, FIELDS)} "
            f'(or keep it as a segment: columns = {{ "segments.{key}" = "{key}" }})'
        )


def _make_set(
    entries: list[tuple[str, dict[str, Any], Path]], name: str, source: str | None = None
) -> ProbeSet:
    probes, places, contents = list[Probe](), dict[str, str](), list[str]()
    errors = list[str]()
    for place, raw, folder in entries:
        try:
            probe = make_probe(raw, folder)
            content = content_digest(probe)
        except (ValueError, ProbeError) as error:
            errors.append(f"{place}: {error}")
            continue
        named = replace(probe, id=probe.id or content[:_ID_DIGITS])
        if named.id in places:
            why = "id" if probe.id else "content"
            errors.append(
                f"{place}: same {why} as {places[named.id]} ({named.id}); give each probe an id of its own"
            )
        places.setdefault(named.id, place)
        probes.append(named)
        contents.append(content)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ProbeError(f"{name} {errors[0]}{more}")
    inputs = digest([[probe.id, content] for probe, content in zip(probes, contents, strict=True)])
    annotations = digest([_annotations(probe) for probe in probes])
    return ProbeSet(tuple(probes), inputs, annotations, name if source is None else source, tuple(contents))


# --- digests ----------------------------------------------------------------------------------


def content_digest(probe: Probe) -> str:
    """Return the SHA-256 (hex) of what goes into the model: texts, pixels, features with boxes, samples.

    Raises
    ------
    ProbeError
        When an image, features or a sound cannot be decoded.
    """
    content: dict[str, Any] = {
        "text": probe.text,
        "text_pair": probe.text_pair,
        "messages": None if probe.messages is None else list(probe.messages),
    }
    if probe.image is not None:
        content["image"] = _array_digest(load_image(probe.image))
    if probe.features is not None:
        content["features"] = [_array_digest(array) for array in load_features(probe.features)]
    if probe.audio is not None:
        samples, rate = _samples(probe)
        content["audio"] = [rate, _array_digest(samples)]
    return digest({key: value for key, value in content.items() if value is not None})


def _samples(probe: Probe) -> tuple[NDArray[np.float32], int]:
    if isinstance(probe.audio, str):
        return load_audio(probe.audio)
    if not isinstance(probe.audio, np.ndarray) or probe.sampling_rate is None:
        raise ValueError("audio samples need a sampling_rate; give it in Hz")
    return probe.audio, probe.sampling_rate


def _array_digest(array: NDArray[Any]) -> str:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    head = f"{little.dtype.str} {little.shape} ".encode()
    return hashlib.sha256(head + little.tobytes()).hexdigest()


def _annotations(probe: Probe) -> list[Any]:
    regions = load_annotations(probe).regions
    digestible = {name: _digestible(annotation) for name, annotation in regions.items()}
    return [probe.id, _whole(probe.label), probe.group, dict(probe.segments), digestible]


def _digestible(annotation: Any) -> Any:
    if isinstance(annotation, Mapping) and "mask" in annotation:
        return {"mask": _array_digest(annotation["mask"])}
    return annotation


def _whole(label: Any) -> Any:
    """Return a label with 7.0 as 7: formats differ in which of the two they store."""
    if isinstance(label, float) and label.is_integer():
        return int(label)
    if isinstance(label, list):
        return [_whole(item) for item in label]
    if isinstance(label, Mapping):
        return {key: _whole(item) for key, item in label.items()}
    return label


def load_annotations(probe: Probe) -> Probe:
    """Return the probe with the masks of its regions as float32 arrays (height, width) in [0, 1].

    Raises
    ------
    ProbeError
        When a mask is missing or cannot be decoded.
    """
    masks = {
        name: {"mask": load_mask(annotation["mask"])}
        for name, annotation in probe.regions.items()
        if isinstance(annotation, Mapping) and isinstance(annotation.get("mask"), str)
    }
    return replace(probe, regions={**probe.regions, **masks}) if masks else probe


# --- write ------------------------------------------------------------------------------------


def write_probes(path: str | Path, probes: ProbeSet | Iterable[Probe]) -> None:
    """Write probes as JSON lines; :func:`read_probes` gives them back with equal digests.

    Images, features, sounds and masks that are arrays are written beside the file, into ``<name>-media/``.

    Parameters
    ----------
    path : str or Path
        A ``.jsonl`` file; replaced whole, never left half-written.
    probes : ProbeSet or iterable of Probe

    Raises
    ------
    ProbeError
        When the file cannot be written.
    """
    path = Path(path)
    media = path.with_name(f"{path.stem}-media")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [_to_line(probe, number, path, media) for number, probe in enumerate(probes, 1)]
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text("".join(lines), encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        raise ProbeError(f"{path} cannot be written ({error.strerror}); choose another place") from None


def _to_line(probe: Probe, number: int, path: Path, media: Path) -> str:
    record = {key: getattr(probe, key) for key in FIELDS}
    record["segments"], record["regions"] = dict(probe.segments), dict(probe.regions)
    if isinstance(probe.image, np.ndarray):
        record["image"] = _saved(media / f"{number}.png", save_image, load_image(probe.image))
    if isinstance(probe.audio, np.ndarray):
        record["audio"] = _saved(media / f"{number}.wav", save_audio, *_samples(probe))
    if isinstance(probe.features, Mapping):
        record["features"] = _saved(media / f"{number}.npz", save_features, *load_features(probe.features))
    for field in ("image", "features", "audio"):
        if record[field] is not None:
            record[field] = _relative(record[field], path)
    for name, annotation in probe.regions.items():
        if isinstance(annotation, Mapping) and "mask" in annotation:
            mask = annotation["mask"]
            if isinstance(mask, np.ndarray):
                grey = np.rint(mask * 255).astype(np.uint8)
                mask = _saved(media / f"{number}-{digest(name)[:8]}.png", save_image, grey)
            record["regions"][name] = {"mask": _relative(mask, path)}
    filled = {key: value for key, value in record.items() if value is not None and value != {}}
    return json.dumps(filled, ensure_ascii=False, allow_nan=False) + "\n"


def _saved(target: Path, save: Callable[..., None], *content: Any) -> str:
    save(target, *content)
    return str(target)


def _relative(place: str, path: Path) -> str:
    return Path(os.path.relpath(place, path.parent)).as_posix()
