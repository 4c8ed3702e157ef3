"""Files that are written whole or not at all, and JSON that shows when it was changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from audit.errors import StoreError
from audit.records import digest
from audit.schema import SCHEMA_VERSION

MANIFEST = "manifest.json"


def resolve_root(url: str | Path) -> Path:
    """Return the directory of a store given as a path or a ``file://`` URL."""
    text = os.fspath(url)
    if "://" not in text:
        return Path(text).expanduser().resolve()
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise StoreError(
            f"store {text}: {parts.scheme}:// stores are not supported, only directories and file:// URLs; "
            "set [store] url to a directory (a mounted bucket works)"
        )
    return Path(unquote(parts.path)).resolve()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a written file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def create_file(path: Path, data: bytes) -> bool:
    """Create `path` with `data` at once; return False, changing nothing, when it exists already."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _link(temporary, path, data)
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path, data: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: exclusive, if not in one step
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
    sync_directory(path.parent)
    return True


def seal(content: dict[str, Any], provenance: dict[str, Any]) -> bytes:
    """Return `content` as JSON text with its digest, and a seal over the whole with provenance.

    ``digest`` leaves `provenance` (time, command, revision) out, so that identical runs have equal
    digests; ``seal`` covers every field, so that any change is found.
    """
    record = {**content, "digest": digest(content), "provenance": provenance}
    return _render({**record, "seal": digest(record)})


def _render(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of the store; its seal is not checked.

    Raises
    ------
    StoreError
        When the file is missing, is not JSON, or has a newer schema version.
    """
    return _parse(path, _read_bytes(path))


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a sealed JSON object whose every byte is as written; StoreError otherwise."""
    data = _read_bytes(path)
    record = _parse(path, data)
    content = {key: value for key, value in record.items() if key != "seal"}
    if record.get("seal") != digest(content) or data != _render(record):
        raise _damaged(path, "its seal does not fit its content")
    return record


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{path} is missing; restore it, or delete its directory and audit again") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); mend its permissions") from None


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
        canonical = isinstance(record, dict)
    except ValueError:
        canonical = False
    if not canonical:
        raise _damaged(path, "it is not a JSON object")
    version = record.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, this version reads up to {SCHEMA_VERSION}; "
            "upgrade rollout-audit"
        )
    checked: dict[str, Any] = record
    return checked


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({why}); restore it from a backup, or delete its directory and audit again"
    )


def file_entry(path: Path, name: str, table: str, rows: int) -> dict[str, Any]:
    """Return how a manifest lists a file: path, table, rows, size in bytes and SHA-256."""
    return {
        "path": name,
        "table": table,
        "rows": rows,
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
    }


def check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raise StoreError, naming the file, unless it has the listed size and SHA-256."""
    if not path.is_file():
        raise StoreError(f"{path} is listed but missing; restore it, or delete its directory and audit again")
    if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
        raise _damaged(path, "its SHA-256 is not the listed one")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance() -> dict[str, Any]:
    """Return time, author, command (file names only, no directories or host) and git revision."""
    command = [Path(part).name if os.sep in part else part for part in sys.argv]
    return {
        "time": now(),
        "author": os.environ.get("ROLLOUT_AUDIT_AUTHOR") or _git("config", "user.email"),
        "command": " ".join(command),
        "git_revision": _git("rev-parse", "HEAD"),
    }


@lru_cache(maxsize=4)
def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Yield a new directory inside `parent` that no reader looks at; remove what is left of it."""
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / f".tmp-{uuid.uuid4().hex}"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory that the system releases when the process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks: publication is still atomic, by its last step
        yield
        return
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into a StoreError that names the place."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise StoreError(f"cannot write to {path} ({what}); free space, or mend its permissions") from None
