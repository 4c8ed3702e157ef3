"""Verify what is stored, and remove what nobody needs."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from audit.errors import StoreError
from audit.store import _log
from audit.store._files import MANIFEST, check_file, read_json, writing
from audit.store._reader import Files

DAY = 86400

_LOG = "restore the log from a backup"
_OTHER = "{} is not the manifest that the log recorded; restore the store from a backup"


def problems_of(root: Path, files: Files, name: str) -> list[str]:
    """Return what is wrong with one run or comparison; each line names the file."""
    try:
        manifest = files.manifest(name)
    except StoreError as error:
        return [str(error)]
    found = _log_problems(root, files.directory / name / MANIFEST, manifest)
    for entry in manifest["files"]:
        path = files.directory / name / entry["path"]
        try:
            check_file(path, entry)
            _check_rows(path, entry)
        except StoreError as error:
            found.append(str(error))
    return found


def _check_rows(path: Path, entry: dict[str, Any]) -> None:
    if path.suffix != ".parquet":
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} is no readable Parquet file ({error}); restore it from a backup") from None
    if rows != entry["rows"]:
        raise StoreError(f"{path}: expected {entry['rows']} rows, got {rows}; restore it from a backup")


def _log_problems(root: Path, path: Path, manifest: dict[str, Any]) -> list[str]:
    try:
        payloads = [entry["payload"] for entry in _log.read(root / "log")]
    except StoreError as error:
        return [str(error)]
    if manifest["seal"] in {payload.get("seal") for payload in payloads}:
        return []
    if not payloads:
        return [
            f"{root / 'log'} is missing or empty, so that nothing stored can be checked against it; {_LOG}"
        ]
    name = path.parent.name
    recorded = any(
        "seal" in one and name in (one.get("run_id"), one.get("comparison_id")) for one in payloads
    )
    if recorded:
        return [_OTHER.format(path)]
    return _log.gaps(root / "log") or [
        f"{name} is not in the log: cut after entry {len(payloads) - 1:08d}, not yet written when its "
        f"command was interrupted, or passed by; run that command again, or {_LOG}"
    ]


def changed(files: Files, name: str, tables: Collection[str], recorded: Collection[str]) -> str | None:
    """Return why a manifest, or a file of these tables, is not what was logged; None where it is.

    Cheap to ask again: bytes are read only where a file's time, size or number is new.

    Parameters
    ----------
    files : Files
    name : str
        A run or comparison.
    tables : collection of str
    recorded : collection of str
        The seals that the log holds of it; where there are none, the manifest stands for itself.
    """
    try:
        seal = files.seal(name)
        files.check(name, tables)
    except StoreError as error:
        return str(error)
    if recorded and seal not in recorded:
        return _OTHER.format(files.directory / name / MANIFEST)
    return None


# --- removal ----------------------------------------------------------------------------------


def candidates(
    root: Path, *, unfinished_after: float, unreferenced_after: float | None, keep: Collection[str]
) -> list[dict[str, str]]:
    """Return what may be removed: ``{"id", "path", "reason"}`` each, nothing of it younger than asked."""
    found = []
    for kind in ("runs", "comparisons"):
        for path in _directories(root / kind):
            if not (path / MANIFEST).exists() and _age(path) >= unfinished_after:
                found.append({"id": path.name, "path": f"{kind}/{path.name}", "reason": "unfinished"})
    if unreferenced_after is not None:
        needed = reasons_to_stay(root, keep)
        for path in _directories(root / "runs"):
            if (path / MANIFEST).exists() and path.name not in needed and _age(path) >= unreferenced_after:
                found.append({"id": path.name, "path": f"runs/{path.name}", "reason": "unreferenced"})
    return found


def _directories(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _age(path: Path) -> float:
    """Return the seconds since anything in a directory was written."""
    newest = max((p.stat().st_mtime for p in (path, *path.rglob("*")) if p.exists()), default=0.0)
    return time.time() - newest


def reasons_to_stay(root: Path, keep: Collection[str] = ()) -> dict[str, str]:
    """Return run → why it is needed: compared, approved, asked for, or its maps serve such a run."""
    needed = dict.fromkeys(keep, "named by the caller")
    files = sorted((root / "approvals").glob("*.json"))
    approved = {str(read_json(path).get("comparison_id")): path.stem for path in files}
    for path in _directories(root / "comparisons"):
        if (path / MANIFEST).exists():
            manifest = read_json(path / MANIFEST)
            runs = [manifest["before"], manifest["after"], *manifest["replicates"]]
            names = [run["run_id"] for run in runs if run]
            names += manifest["settings"].get("domain", ())  # the same checkpoints on other probes
            by = approved.get(path.name)
            reason = f"compared in {path.name}" + (f", approved in {by}" if by else "")
            needed |= dict.fromkeys((name for name in names if by or name not in needed), reason)
    for path in _directories(root / "runs"):
        plan = path / "plan.json"
        if plan.exists() and (source := read_json(plan)["source"]):
            needed.setdefault(source, f"its maps serve {path.name}")
    return _owners_of_maps(root, needed) | needed


def _owners_of_maps(root: Path, needed: Collection[str]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for name in needed:
        path = root / "runs" / name / MANIFEST
        if path.exists():
            listed = [entry["path"] for entry in read_json(path)["files"]]
            owners |= {
                Path(one).parts[1]: f"its maps serve {name}" for one in listed if one.startswith("../")
            }
    return owners


def kept(root: Path, removed: Collection[str], keep: Collection[str]) -> list[dict[str, str]]:
    """Return every run that stays, and why: ``{"id", "reason"}`` each."""
    needed = reasons_to_stay(root, keep)
    found = []
    for path in _directories(root / "runs"):
        if path.name not in removed:
            age = "published" if (path / MANIFEST).exists() else "written"
            default = f"{age} {_age(path) / DAY:.0f} days ago"
            found.append({"id": path.name, "reason": needed.get(path.name, default)})
    return found


def remove(root: Path, candidate: dict[str, str]) -> None:
    """Hide a directory, log its tombstone, and delete it; a crash leaves only hidden files."""
    source = root / candidate["path"]
    with writing(source):
        manifest = source / MANIFEST
        sealed = read_json(manifest).get("seal") if manifest.exists() else None
        hidden = root / "trash" / f"{source.name}-{uuid.uuid4().hex}"
        hidden.parent.mkdir(exist_ok=True)
        source.rename(hidden)
        _log.append(root / "log", "gc", {**candidate, "seal_removed": sealed})
        shutil.rmtree(hidden)


def empty_trash(root: Path) -> None:
    """Delete what an interrupted removal left behind."""
    shutil.rmtree(root / "trash", ignore_errors=True)
