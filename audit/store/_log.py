"""The append-only log: each entry holds the digest of the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audit.errors import StoreError
from audit.records import canonical_json, digest
from audit.store._files import create_file, now, writing

GENESIS = "0" * 64
"""The `previous` of the first entry, and the head of an empty log."""


def entry_paths(directory: Path) -> list[Path]:
    """Return the files of the log in order."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.suffix == ".json" and path.stem.isdigit())


def append(directory: Path, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Add one entry; whoever loses the race for a number takes the next one."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            paths = entry_paths(directory)
            index = int(paths[-1].stem) + 1 if paths else 0
            previous = read_entry(paths[-1])["digest"] if paths else GENESIS
            entry = {"index": index, "kind": kind, "payload": payload, "previous": previous, "time": now()}
            entry["digest"] = digest(entry)
            if create_file(directory / f"{index:08d}.json", _render(entry)):
                return entry


def _render(entry: dict[str, Any]) -> bytes:
    return (canonical_json(entry) + "\n").encode()


def read_entry(path: Path) -> dict[str, Any]:
    """Return one entry; StoreError, naming the file, when it was changed."""
    data = path.read_bytes()
    try:
        entry = json.loads(data)
        intact = (
            data == _render(entry)
            and entry["digest"] == digest({key: value for key, value in entry.items() if key != "digest"})
            and entry["index"] == int(path.stem)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise StoreError(f"{path} was changed after it was written; restore the log from a backup")
    checked: dict[str, Any] = entry
    return checked


def read(directory: Path) -> list[dict[str, Any]]:
    """Return every entry in order."""
    return [read_entry(path) for path in entry_paths(directory)]


def read_intact(directory: Path) -> list[dict[str, Any]]:
    """Return the entries before the first that was changed."""
    found: list[dict[str, Any]] = []
    for path in entry_paths(directory):
        try:
            found.append(read_entry(path))
        except StoreError:
            break
    return found


def has(directory: Path, kind: str, payload: dict[str, Any]) -> bool:
    """Return whether the log holds such an entry; the newest entries are looked at first."""
    entries = map(read_entry, reversed(entry_paths(directory)))
    return any(entry["kind"] == kind and entry["payload"] == payload for entry in entries)


def head(directory: Path) -> str:
    """Return the digest of the newest entry, which covers the whole log."""
    paths = entry_paths(directory)
    return str(read_entry(paths[-1])["digest"]) if paths else GENESIS


def gaps(directory: Path) -> list[str]:
    """Return one line for each place where entries before the last are missing."""
    found, expected = [], 0
    for path in entry_paths(directory):
        index = int(path.stem)
        if index > expected:
            which = f"{expected:08d}" if index == expected + 1 else f"{expected:08d} to {index - 1:08d}"
            found.append(f"{directory}: an entry is missing ({which}); restore the log from a backup")
        expected = index + 1
    return found


def problems(directory: Path, known_head: str | None = None) -> list[str]:
    """Return what is wrong with the log: changed or missing entries, a head that is gone."""
    found = gaps(directory)
    previous, heads, expected = GENESIS, {GENESIS}, 0
    for path in entry_paths(directory):
        follows, expected = int(path.stem) == expected, int(path.stem) + 1
        try:
            entry = read_entry(path)
        except StoreError as error:
            found.append(str(error))
            previous = ""
            continue
        if follows and previous and entry["previous"] != previous:
            found.append(f"{path}: does not follow the entry before it; an entry was replaced")
        previous = entry["digest"]
        heads.add(previous)
    if known_head is not None and known_head not in heads:
        found.append(f"{directory}: head {known_head[:12]} is not in the log; newer entries were removed")
    return found
