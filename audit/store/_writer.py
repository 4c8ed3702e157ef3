"""Write one run: shards as they are captured, then the manifest that makes them a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from audit.errors import StoreError
from audit.records import Captured, Reliance, RunSpec, digest
from audit.schema import SCHEMA_VERSION, arrow_schema
from audit.serialize import to_json
from audit.store import _log
from audit.store._aggregate import probe_ids, write_aggregate
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
from audit.store._rows import open_parquet, write_captured, write_reliance

Item = TypeVar("Item")
_PARTS = ("maps", "layer_maps")
_COMPACTED = ("reliance", "layers", "predictions")
_GROUP_BYTES = 4 << 20
"""Compressed size of the parts that make one row group of a compacted file."""
_SHARD = "shard.json"


@dataclass(frozen=True)
class RunWriter:
    """One unfinished run; any number of processes may write to it at once.

    A shard is staged as a directory that is renamed into place whole, so that it is there entirely
    or not at all, and the first of two writers wins. Nothing reads a run before its manifest.

    Attributes
    ----------
    root : Path
        Directory of the store.
    spec : RunSpec
    n_shards : int
    source : dict or None
        Manifest of the run whose maps are listed instead of being captured again.
    """

    root: Path
    spec: RunSpec
    n_shards: int
    source: dict[str, Any] | None = None

    @property
    def run_id(self) -> str:
        """Return the id that the run has, or will have."""
        return self.spec.id

    @property
    def path(self) -> Path:
        """Return the run's directory."""
        return self.root / "runs" / self.run_id

    @property
    def published(self) -> bool:
        """Return whether the manifest is there."""
        return (self.path / MANIFEST).exists()

    def open(self) -> RunWriter:
        """Create the directory, or find it again; drop what another plan of shards left there."""
        if self.published:
            return self
        plan = {
            "schema_version": SCHEMA_VERSION,
            "n_shards": self.n_shards,
            "source": self.source and self.source["run_id"],
        }
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with exclusive(self.path):
                self._plan(plan)
        return self

    def _plan(self, plan: dict[str, Any]) -> None:
        path = self.path / "plan.json"
        if self.published:  # by another writer, while this one waited
            return
        if path.exists() and read_json(path) != plan:
            shutil.rmtree(self._staged, ignore_errors=True)
            path.unlink()
        create_file(path, json.dumps(plan).encode())

    @property
    def _staged(self) -> Path:
        return self.path / "staged"

    def _shard(self, index: int) -> Path:
        return self._staged / f"{index:05d}"

    def finished_shards(self) -> set[int]:
        """Return the shards that need no capture; a damaged one is dropped and is not among them."""
        if self.published:
            return set(range(self.n_shards))
        return {index for index in range(self.n_shards) if self._intact(index)}

    def _intact(self, index: int) -> bool:
        directory = self._shard(index)
        if not directory.exists():
            return False
        try:
            for entry in read_sealed(directory / _SHARD)["files"]:
                check_file(directory / entry["path"], entry)
        except StoreError:
            if self.published:
                return True
            shutil.rmtree(directory, ignore_errors=True)
            return False
        return True

    def write_shard(self, index: int, captured: Iterable[Captured], reliance: Iterable[Reliance]) -> None:
        """Store one shard; do nothing when it is stored already.

        Parameters
        ----------
        index : int
            0 to n_shards - 1.
        captured : iterable of Captured
            Consumed once, in the order of the probes; empty where maps of another run are listed.
        reliance : iterable of Reliance
            Consumed after `captured`.

        Raises
        ------
        StoreError
            When a column holds NaN or infinity, a share is None without a reason, or the disk is
            full. Nothing of the shard is stored then.
        """
        if not 0 <= index < self.n_shards:
            raise StoreError(
                f"{self.run_id}: shard {index} does not exist; expected 0 to {self.n_shards - 1}"
            )
        if self.published or self._shard(index).exists():
            return
        try:
            with writing(self.path):
                self._stage(index, _marked(captured), _marked(reliance))
        except _CaptureError as failure:
            raise failure.error from None

    def _stage(self, index: int, captured: Iterable[Captured], reliance: Iterable[Reliance]) -> None:
        try:
            self._stage_whole(index, captured, reliance)
        except FileNotFoundError:
            if not self.published:  # otherwise another writer was faster and has tidied up
                raise

    def _stage_whole(self, index: int, captured: Iterable[Captured], reliance: Iterable[Reliance]) -> None:
        self._staged.mkdir(parents=True, exist_ok=True)
        with scratch_directory(self.path) as scratch:
            rows = write_captured(scratch, captured) | write_reliance(scratch, reliance)
            files = []
            for table, count in rows.items():
                sync_file(scratch / f"{table}.parquet")
                files.append(file_entry(scratch / f"{table}.parquet", f"{table}.parquet", table, count))
            content = {"schema_version": SCHEMA_VERSION, "run_id": self.run_id, "files": files}
            create_file(scratch / _SHARD, seal(content, {}))
            try:
                scratch.rename(self._shard(index))
            except OSError:
                if not self._shard(index).exists():
                    raise
        sync_directory(self._staged)

    def publish(
        self,
        *,
        counts: Mapping[str, Any],
        diagnostics: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make the staged shards a run and return its manifest; the manifest is written last.

        Parameters
        ----------
        counts : mapping
            Counted oddities: truncated probes, missing regions, all-zero rows, ...
        diagnostics : mapping
            Summaries of the run's maps.
        extra : mapping, optional
            Anything else that belongs to the run and not to its identity.

        Raises
        ------
        StoreError
            When a shard is missing or a probe was captured twice.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with exclusive(self.path):
                fresh = not self.published
                if fresh:
                    self._publish(counts, diagnostics, extra or {})
                manifest = read_sealed(self.path / MANIFEST)
                log_manifest(self.root, "run", manifest, fresh=fresh)
        return manifest

    def _publish(
        self, counts: Mapping[str, Any], diagnostics: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        if missing := sorted(set(range(self.n_shards)) - self.finished_shards()):
            raise StoreError(
                f"{self.run_id}: {len(missing)} of {self.n_shards} shards are missing, the first is "
                f"{missing[0]}; run the audit again to capture them"
            )
        staged = [self._shard(index) for index in range(self.n_shards)]
        with scratch_directory(self.path) as scratch:
            entries = self._map_entries(staged)
            for table in _COMPACTED:
                rows = self._compact(table, staged, scratch / f"{table}.parquet")
                entries.append(self._place(scratch, table, rows))
            rows = write_aggregate(scratch / "aggregate.parquet", self.path)
            entries.append(self._place(scratch, "aggregate", rows))
        content = self._content(entries, counts, diagnostics, extra)
        create_file(self.path / MANIFEST, seal(content, provenance()))
        self._clean()

    def _place(self, scratch: Path, table: str, rows: int) -> dict[str, Any]:
        name = f"{table}.parquet"
        sync_file(scratch / name)
        (scratch / name).replace(self.path / name)
        return file_entry(self.path / name, name, table, rows)

    def _map_entries(self, staged: list[Path]) -> list[dict[str, Any]]:
        if self.source is not None:
            return relinked_entries(self.root, self.source)
        entries = []
        for index, directory in enumerate(staged):
            for entry in read_sealed(directory / _SHARD)["files"]:
                if entry["table"] in _PARTS:
                    name = f"{entry['table']}/part-{index:05d}.parquet"
                    _link_or_copy(directory / entry["path"], self.path / name)
                    entries.append({**entry, "path": name})
        return sorted(entries, key=lambda entry: str(entry["path"]))

    def _compact(self, table: str, staged: list[Path], target: Path) -> int:
        """Join a table's shards, in order, into one file; return its rows."""
        import pyarrow.parquet as pq

        schema = arrow_schema(table)
        parts = [path for shard in staged if (path := shard / f"{table}.parquet").exists()]
        rows = 0
        with open_parquet(target, schema) as writer:
            for group in _groups(parts):
                joined = pq.ParquetDataset(group, schema=schema, partitioning=None).read(use_threads=False)
                writer.write_table(joined, row_group_size=max(1, joined.num_rows))
                rows += joined.num_rows
        return rows

    def _content(
        self,
        entries: list[dict[str, Any]],
        counts: Mapping[str, Any],
        diagnostics: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        ids = probe_ids(self.path, self.run_id)
        try:
            return {
                "schema_version": SCHEMA_VERSION,
                "kind": "run",
                "run_id": self.run_id,
                "spec": to_json(self.spec, where="spec"),
                "regions_digest": self.spec.regions_digest,
                "n_shards": self.n_shards,
                "n_probes": len(ids),
                "probe_ids_digest": digest(ids),
                "maps_of": self.source and self.source["run_id"],
                "counts": to_json(counts, where="counts"),
                "diagnostics": to_json(diagnostics, where="diagnostics"),
                "extra": to_json(extra, where="extra"),
                "files": entries,
            }
        except ValueError as error:
            raise StoreError(f"{self.run_id}: manifest, {error}; the run stays unpublished") from None

    def _clean(self) -> None:
        for path in (self._staged, *self.path.glob(".tmp-*")):
            shutil.rmtree(path, ignore_errors=True)
        (self.path / "plan.json").unlink(missing_ok=True)


class _CaptureError(Exception):
    """Carries an OSError of the capture past the handling of the store's own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _marked(items: Iterable[Item]) -> Iterator[Item]:
    try:
        yield from items
    except OSError as error:
        raise _CaptureError(error) from error


def _groups(parts: list[Path]) -> Iterator[list[Path]]:
    """Yield files, in order, in groups that are read into one row group of a compacted file."""
    group: list[Path] = []
    size = 0
    for path in parts:
        group.append(path)
        size += path.stat().st_size
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def relinked_entries(root: Path, source: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the map files of `source` as another run lists them, after checking each."""
    entries = []
    for entry in source["files"]:
        if entry["table"] in _PARTS:
            check_file(root / "runs" / source["run_id"] / entry["path"], entry)
            path = (
                entry["path"] if entry["path"].startswith("../") else f"../{source['run_id']}/{entry['path']}"
            )
            entries.append({**entry, "path": path})
    return entries


def _link_or_copy(source: Path, target: Path) -> None:
    """Put a staged part in its place; a crashed publication may have left an older one there."""
    target.parent.mkdir(exist_ok=True)
    temporary = target.parent.parent / f".tmp-{target.parent.name}-{target.name}"
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        sync_file(temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # renaming one name of a file to another of its names keeps both
    sync_directory(target.parent)


def log_manifest(root: Path, kind: str, manifest: dict[str, Any], *, fresh: bool) -> None:
    """Log a manifest, unless it is not `fresh` and the log has it; a killed writer may have left it out."""
    name = f"{kind}_id"
    payload = {name: manifest[name], "digest": manifest["digest"], "seal": manifest["seal"]}
    if fresh or not _log.has(root / "log", kind, payload):
        _log.append(root / "log", kind, payload)
