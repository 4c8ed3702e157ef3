"""Write and read comparisons; reading one back needs JSON alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from audit.errors import StoreError
from audit.records import Comparison, Policy, RunRef, Verdict, digest
from audit.schema import SCHEMA_VERSION, check_values
from audit.serialize import from_json, to_json
from audit.store import _log
from audit.store._files import (
    MANIFEST,
    check_file,
    create_file,
    exclusive,
    file_entry,
    provenance,
    read_json,
    read_sealed,
    scratch_directory,
    seal,
    sync_directory,
    sync_file,
    writing,
)
from audit.store._reader import Files
from audit.store._rows import cell_row, open_parquet, write_rows
from audit.store._writer import log_manifest

if TYPE_CHECKING:
    import polars as pl

Record = TypeVar("Record")
_PROBE_KEYS = ("probe_id", "stream", "region")


def comparison_id(comparison: Comparison, policy: Policy | None = None) -> str:
    """Return ``cmp-`` and 12 hex digits over runs, replicates, statistics settings and policy.

    Only `kind`, `before`, `after`, `replicates`, `alpha`, `method` and `settings` of the comparison
    count, so that the id is known before anything is computed. Where it names no runs (maps made
    elsewhere), its cells stand for them.
    """
    content = {
        "kind": comparison.kind,
        "before": _identity(comparison.before),
        "after": _identity(comparison.after),
        "replicates": [_identity(replicate) for replicate in comparison.replicates],
        "kinds": list(comparison.replicate_kinds),
        "alpha": comparison.alpha,
        "method": comparison.method,
        "settings": to_json(comparison.settings, where="settings"),
        "policy": policy and policy.digest,
    }
    if comparison.before is None or comparison.after is None:
        content["cells"] = to_json(comparison.cells, where="cells")
    return f"cmp-{digest(content)[:12]}"


def _identity(run: RunRef | None) -> list[str | None] | None:
    return None if run is None else [run.run_id, run.digest, run.kind]


def write(
    root: Path,
    comparison: Comparison,
    verdict: Verdict | None,
    probes: Mapping[str, Any] | pl.DataFrame,
    faithfulness: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Store a comparison and its verdict as one directory, renamed into place; return its id.

    A stored id is left as it is: the same audit twice finds its comparison.
    """
    try:
        name = comparison_id(comparison, verdict.policy if verdict else None)
        table = _probe_table(probes)
        records = _records(name, comparison, verdict)
    except ValueError as error:
        raise StoreError(f"comparison: {error}; nothing was stored") from None
    parent = root / "comparisons"
    target = parent / name
    with writing(parent):
        if not (target / MANIFEST).exists():
            with scratch_directory(parent) as scratch:
                files = _write_files(scratch, comparison, records, table, list(faithfulness))
                content = _content(name, comparison, verdict, files)
                create_file(scratch / MANIFEST, seal(content, provenance()))
                _rename(scratch, target)
        with exclusive(parent):
            _log_comparison(root, target)
    return name


def _records(name: str, comparison: Comparison, verdict: Verdict | None) -> dict[str, dict[str, Any]]:
    version = {"schema_version": SCHEMA_VERSION}
    named = {**to_json(comparison), "id": name}
    records = {"comparison": {**version, "comparison": named}}
    if verdict is not None:
        records["verdict"] = {**version, "verdict": {**to_json(verdict), "comparison_id": name}}
    return records


def _write_files(
    scratch: Path,
    comparison: Comparison,
    records: dict[str, dict[str, Any]],
    table: Any,
    faithfulness: list[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    files = []
    for name, record in records.items():
        path = scratch / f"{name}.json"
        create_file(path, seal(record, {}))
        files.append(file_entry(path, path.name, name, 1))
    rows = {"cells": write_rows(scratch / "cells.parquet", "cells", map(cell_row, comparison.cells))}
    with open_parquet(scratch / "probes.parquet", table.schema) as writer:
        writer.write_table(table)
    rows["probes"] = table.num_rows
    if faithfulness:
        path = scratch / "faithfulness.parquet"
        rows["faithfulness"] = write_rows(path, "faithfulness", map(dict, faithfulness))
    for name, count in rows.items():
        path = scratch / f"{name}.parquet"
        sync_file(path)
        files.append(file_entry(path, path.name, name, count))
    return files


def _content(
    name: str, comparison: Comparison, verdict: Verdict | None, files: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "comparison_id": name,
        "kind": comparison.kind,
        "before": to_json(comparison.before),
        "after": to_json(comparison.after),
        "replicates": to_json(comparison.replicates),
        "method": comparison.method,
        "alpha": comparison.alpha,
        "settings": to_json(comparison.settings),
        "n_probes": comparison.n_probes,
        "outcome": verdict and verdict.status,
        "sentence": verdict and verdict.sentence,
        "exit_code": verdict and int(verdict.exit_code),
        "policy_digest": verdict and verdict.policy.digest,
        "files": files,
    }


def _rename(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not (target / MANIFEST).exists():
            raise
    sync_directory(target.parent)


def _probe_table(probes: Mapping[str, Any] | pl.DataFrame) -> Any:
    """Return probes as an Arrow table with plain string and list columns, checked for NaN."""
    import pyarrow as pa

    table = pa.table(dict(probes)) if isinstance(probes, Mapping) else probes.to_arrow()
    if missing := [name for name in _PROBE_KEYS if name not in table.column_names]:
        raise ValueError(f"probes: expected the columns {', '.join(_PROBE_KEYS)}, {missing[0]} is missing")
    fields = [pa.field(field.name, _plain_type(field.type)) for field in table.schema]
    table = table.cast(pa.schema(fields)).combine_chunks()
    check_values(table)
    return table


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_dictionary(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return kind


# --- the log ----------------------------------------------------------------------------------


def _log_comparison(root: Path, target: Path) -> None:
    manifest = read_sealed(target / MANIFEST)
    name = manifest["comparison_id"]
    log_manifest(root, "comparison", manifest, fresh=False)
    if manifest["policy_digest"] is None:
        return
    earlier = [e["payload"] for e in _log.read(root / "log") if e["kind"] == "verdict"]
    if any(payload["comparison_id"] == name for payload in earlier):
        return
    subject = _subject(root, manifest)
    same = [payload for payload in earlier if payload["subject"] == subject]
    payload = {
        "comparison_id": name,
        "outcome": manifest["outcome"],
        "policy": manifest["policy_digest"],
        "subject": subject,
        "attempt": len(same) + 1,
        "verdict": next(f["sha256"] for f in manifest["files"] if f["table"] == "verdict"),
    }
    _log.append(root / "log", "verdict", payload)


def _subject(root: Path, manifest: dict[str, Any]) -> str:
    """Return what is judged: both checkpoints on their inputs, whatever the policy and regions."""
    parts = []
    for run in (manifest["before"], manifest["after"]):
        path = root / "runs" / (run["run_id"] if run else "none") / MANIFEST
        inputs = read_json(path)["spec"]["inputs_digest"] if path.is_file() else None
        parts.append([run and run["digest"], inputs])
    if manifest["before"] is None and manifest["after"] is None:
        parts.append([manifest["comparison_id"], None])
    return digest(parts)


# --- reading ----------------------------------------------------------------------------------


def read_comparison(files: Files, name: str) -> Comparison:
    """Return the stored comparison, equal to the one written but for its id."""
    return _read(files, name, "comparison", Comparison)


def read_verdict(files: Files, name: str) -> Verdict | None:
    """Return the stored verdict, without approvals; None where none was given."""
    manifest = files.manifest(name)
    if all(entry["table"] != "verdict" for entry in manifest["files"]):
        return None
    return _read(files, name, "verdict", Verdict)


def _read(files: Files, name: str, table: str, cls: type[Record]) -> Record:
    entry = next(e for e in files.manifest(name)["files"] if e["table"] == table)
    path = files.directory / name / entry["path"]
    check_file(path, entry)
    try:
        return from_json(cls, read_sealed(path)[table])
    except ValueError as error:
        raise StoreError(f"{path} does not fit this version ({error}); upgrade rollout-audit") from None
