"""Read the rows of a probe set from each file format, as mappings of field to raw value."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from audit.errors import ProbeError
from audit.media import AUDIO_SUFFIXES, IMAGE_SUFFIXES

Row = tuple[str, dict[str, Any]]
"""Where the row stands (``line 3``), and its raw values."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file or folder.

    Raises
    ------
    ProbeError
        When the path is missing, of an unknown kind, unreadable, or has no rows.
    """
    if not path.exists():
        raise ProbeError(f"{path} does not exist; mend the path of the probe set")
    if path.is_dir():
        rows = list(_folder_rows(path))
    else:
        try:
            read = _READERS[path.suffix.lower()]
        except KeyError:
            raise ProbeError(
                f"{path} is no probe file: expected {', '.join(_READERS)} or a folder; rename or convert it"
            ) from None
        rows = list(read(path))
    if not rows:
        raise ProbeError(f"{path} has no probes; add at least one")
    return rows


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ProbeError(f"{path} is unreadable ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError as error:
        raise ProbeError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _json_lines(path: Path) -> Iterator[Row]:
    # str.splitlines would also split at U+2028, which JSON allows inside strings
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            yield f"line {number}", _json_object(line, f"{path} line {number}")


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ProbeError(f"{where} is not JSON ({error}); write one JSON object a line") from None
    if not isinstance(value, dict):
        raise ProbeError(
            f"{where} is not a JSON object but {type(value).__name__}; write {{...}} on each line"
        )
    return value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; NaN and infinities are refused."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _csv_rows(path: Path) -> Iterator[Row]:
    r"""Yield rows of strings; an empty cell is None and line ends inside cells become ``\n``."""
    text = _read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    limit = csv.field_size_limit(2**31 - 1)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = next(reader, [])
        for cells in reader:
            if cells:
                yield f"line {reader.line_num}", _csv_row(cells, header, f"{path} line {reader.line_num}")
    except csv.Error as error:
        raise ProbeError(f"{path} is not CSV ({error}); check its quotes") from None
    finally:
        csv.field_size_limit(limit)


def _csv_row(cells: list[str], header: list[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        raise ProbeError(
            f"{where} has {len(cells)} cells, expected {len(header)}; quote cells that hold commas"
        )
    row: dict[str, Any] = {name: cell or None for name, cell in zip(header, cells, strict=True)}
    if row.get("label") is not None:
        row["label"] = _csv_label(row["label"])
    return row


def _csv_label(cell: str) -> Any:
    """Return a number or a list where the cell is one, else the class name."""
    try:
        value = parse_json(cell)
    except ValueError:
        return cell
    return value if isinstance(value, int | float | list) and not isinstance(value, bool) else cell


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ProbeError(f"{path} is not a readable Parquet file ({reason}); write it again") from None
    batches = table.to_batches(max_chunksize=1000)
    yield from _numbered(row for batch in batches for row in batch.to_pylist())


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield f"row {number}", dict(row)


_READERS = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}


def _folder_rows(folder: Path) -> Iterator[Row]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ProbeError(
            f"{folder} holds several splits; name one: {', '.join(str(folder / s) for s in splits)}"
        )
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return _dataset_rows(folder)
    if (folder / "metadata.jsonl").exists():
        return _metadata_rows(folder)
    return _media_rows(folder)


def _dataset_rows(folder: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise ProbeError(
            f"{folder} is a saved dataset and datasets is not installed; "
            "pip install 'rollout-audit[datasets]', or save it as Parquet"
        ) from None
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # its readers raise whatever their storage raises
        reason = " ".join(str(error).split())
        raise ProbeError(f"{folder} is not a readable saved dataset ({reason}); save it again") from None
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):  # decoded here, not there
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    yield from _numbered(dataset)


def _metadata_rows(folder: Path) -> Iterator[Row]:
    """Yield the lines of metadata.jsonl; ``file_name`` is the image or sound."""
    for place, row in _json_lines(folder / "metadata.jsonl"):
        if "file_name" in row:
            name = str(row.pop("file_name"))
            row["audio" if Path(name).suffix.lower() in AUDIO_SUFFIXES else "image"] = name
        yield f"metadata.jsonl {place}", row


def _media_rows(folder: Path) -> Iterator[Row]:
    """Yield every image or sound of a folder; two or more sub-folders are classes."""
    files = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES | AUDIO_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    kinds = {_media_field(path) for path in files}
    if len(kinds) > 1:
        raise ProbeError(f"{folder} holds both images and sounds; put them into two folders")
    classes = {path.parts[0] for path in files if len(path.parts) > 1}
    for path in files:
        row: dict[str, Any] = {_media_field(path): path.as_posix()}
        if len(classes) > 1 and len(path.parts) > 1:
            row["label"] = path.parts[0]
        yield path.as_posix(), row


def _media_field(path: Path) -> str:
    return "audio" if path.suffix.lower() in AUDIO_SUFFIXES else "image"
