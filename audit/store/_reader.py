"""Read runs: only files that a manifest lists, and only when they are as they were written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from audit.errors import StoreError
from audit.records import Column, Map, Prediction, ShareTable
from audit.schema import arrow_schema
from audit.store._files import MANIFEST, check_file, read_json, read_sealed
from audit.store._rows import read_maps, read_table, read_vectors

if TYPE_CHECKING:
    import polars as pl

Stamp = tuple[int, int, int]
GONE: Stamp = (0, 0, 0)
_BATCH_ROWS = 256


@dataclass
class Files:
    """The published directories of one kind (``runs`` or ``comparisons``) and their listed files.

    A file's SHA-256 is checked when it is first read, and again when its time or size has changed.
    """

    directory: Path
    _manifests: dict[str, tuple[Stamp, dict[str, Any]]] = field(default_factory=dict)
    _checked: dict[tuple[Path, str], Stamp] = field(default_factory=dict)
    _sealed: dict[str, tuple[Stamp, str]] = field(default_factory=dict)

    def ids(self) -> list[str]:
        """Return the ids of published directories, sorted; unfinished ones are left out."""
        if not self.directory.is_dir():
            return []
        return sorted(d.name for d in self.directory.iterdir() if d.name[0] != "." and self.has(d.name))

    def has(self, name: str) -> bool:
        """Return whether `name` is published; a name that no file could have is not."""
        try:
            return (self.directory / name / MANIFEST).is_file()
        except OSError:  # such as a name that is too long
            return False

    def manifest(self, name: str) -> dict[str, Any]:
        """Return a manifest after checking its seal."""
        self._require(name)
        manifest = read_sealed(self.directory / name / MANIFEST)
        if name not in (manifest.get("run_id"), manifest.get("comparison_id")):
            raise StoreError(
                f"{self.directory / name} holds another id's manifest; restore the directory's name"
            )
        return manifest

    def manifests(self) -> list[dict[str, Any]]:
        """Return every manifest, oldest first; parsed once, and not checked against their seals."""
        listed = [self._listed(name) for name in self.ids()]
        return sorted(listed, key=lambda m: (m["provenance"]["time"], m.get("run_id") or m["comparison_id"]))

    def _listed(self, name: str) -> dict[str, Any]:
        path = self.directory / name / MANIFEST
        stamp = stamp_of(path)
        known = self._manifests.get(name)
        if known is None or known[0] != stamp:
            known = self._manifests[name] = (stamp, read_json(path))
        return known[1]

    def seal(self, name: str) -> str:
        """Return the seal of a manifest whose bytes fit it; read again only when the file has changed."""
        stamp = stamp_of(self.directory / name / MANIFEST)
        known = self._sealed.get(name)
        if known is None or known[0] != stamp:
            known = self._sealed[name] = (stamp, str(self.manifest(name)["seal"]))
        return known[1]

    def check(self, name: str, tables: Collection[str]) -> None:
        """Raise StoreError unless the listed files of these tables are there, as they were written."""
        for table in tables:
            self.paths(self._listed(name), table)

    def stamps(self, name: str, tables: Collection[str]) -> tuple[Stamp, ...]:
        """Return times, sizes and numbers of the manifest and of the listed files of these tables."""
        found = stamp_of(self.directory / name / MANIFEST)
        if found == GONE:
            return (found,)
        listed = [entry for entry in self._listed(name)["files"] if entry["table"] in tables]
        return (found, *(stamp_of(self.directory / name / entry["path"]) for entry in listed))

    def _require(self, name: str) -> None:
        if "/" in name or "\\" in name or not self.has(name):
            kind = self.directory.name.removesuffix("s")
            raise StoreError(
                f"{kind} {name} is not in the store {self.directory.parent} (or is unfinished); "
                "name its store with --store (or --config, where the command takes it); "
                "`audit list` shows what is there"
            )

    def paths(self, manifest: dict[str, Any], table: str) -> list[Path]:
        """Return the listed files of one table, each checked."""
        name = manifest.get("run_id") or manifest["comparison_id"]
        return [
            self._intact(self.directory / name / entry["path"], entry)
            for entry in manifest["files"]
            if entry["table"] == table
        ]

    def shard(self, manifest: dict[str, Any], table: str, shard: int | None) -> list[Path]:
        """Return the file of one shard of a table, in a list; with None every one's."""
        paths = self.paths(manifest, table)
        return paths if shard is None else [path for path in paths if path.stem == f"part-{shard:05d}"]

    def _intact(self, path: Path, entry: dict[str, Any]) -> Path:
        path = Path(os.path.normpath(path))
        if not path.is_relative_to(self.directory):
            raise StoreError(
                f"{path} lies outside the store; the manifest that lists it is not to be trusted"
            )
        key = (path, str(entry["sha256"]))
        stamp = stamp_of(path)
        if stamp == GONE or self._checked.get(key) != stamp:
            check_file(path, entry)
            self._checked[key] = stamp
        return path


def stamp_of(path: Path) -> Stamp:
    """Return time, size and inode of a file, a cheap sign that it was changed; `GONE` if it is missing."""
    try:
        state = path.stat()
    except OSError:
        return GONE
    return state.st_mtime_ns, state.st_size, state.st_ino


def read_frame(paths: list[Path], table: str, probe_ids: Collection[str] | None = None) -> pl.DataFrame:
    """Return the rows of listed files in their order, of some probes or of all."""
    import polars as pl

    if not paths:
        empty = pl.from_arrow(arrow_schema(table).empty_table())
        return empty if isinstance(empty, pl.DataFrame) else empty.to_frame()
    rows = pl.scan_parquet(paths, glob=False, hive_partitioning=False)
    if probe_ids is not None:
        rows = rows.filter(pl.col("probe_id").is_in(list(probe_ids)))
    return rows.collect()


def read_predictions(paths: list[Path]) -> dict[str, Prediction]:
    """Return predictions by probe id."""
    rows = [row for path in paths for row in read_table(path).to_pylist()]
    return {row["probe_id"]: Prediction(**_prediction_fields(row)) for row in rows}


def _prediction_fields(row: dict[str, Any]) -> dict[str, Any]:
    logits = None if row["logits"] is None else tuple(row["logits"])
    return {**row, "logits": logits, "segments": dict(row["segments"])}


def iter_maps(maps: list[Path], layers: list[Path]) -> Iterator[Map]:
    """Yield maps with their layers, a few hundred in memory at a time.

    Parameters
    ----------
    maps : list of Path
        Parts in the order of the probes.
    layers : list of Path
        Parts of ``layer_maps`` in the same order, or none.
    """
    vectors = (vector for path in layers for vector in read_vectors(_batches(path)))
    for path in maps:
        for batch in _batches(path):
            yield from read_maps(batch, vectors)


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH_ROWS)


def find_map(maps: list[Path], layers: list[Path], probe_id: str, stream: str) -> Map | None:
    """Return the map of one probe and stream, or None; only its own part is read whole."""
    for path in maps:
        found = _rows_of(path, probe_id, stream)
        if found is not None:
            batch, part = found, path.name
            own = [p for p in layers if p.name == part]
            rows = [r for p in own if (r := _rows_of(p, probe_id, stream)) is not None]
            return next(read_maps(batch, read_vectors(rows)))
    return None


def _rows_of(path: Path, probe_id: str, stream: str) -> Any:
    """Return the rows of one probe and stream as one batch, or None."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    kept = []
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            keys = file.read_row_group(group, columns=["probe_id", "stream"])
            mask = pc.and_(pc.equal(keys["probe_id"], probe_id), pc.equal(keys["stream"], stream))
            if pc.any(mask).as_py():
                kept.append(file.read_row_group(group).filter(mask))
    return pa.concat_tables(kept).combine_chunks().to_batches()[0] if kept else None


def share_table(predictions: Path, reliance: Path, layers: Path | None) -> ShareTable:
    """Return reliance as a matrix of probes × columns, NaN where a region is missing.

    Parameters
    ----------
    predictions : Path
        Gives the probes and their order.
    reliance : Path
    layers : Path or None
        When given, columns of single layers follow those of the whole stack.
    """
    ids = read_table(predictions, ["probe_id"]).column(0).to_pylist()
    parts = [_columns_of(reliance, layered=False)]
    if layers is not None:
        parts.append(_columns_of(layers, layered=True))
    columns: list[Column] = []
    blocks = []
    row_of = {probe: i for i, probe in enumerate(ids)}
    for probes, probe_codes, found, column_codes, shares in parts:
        block = np.full((len(ids), len(found)), np.nan)
        rows = np.array([row_of[probe] for probe in probes], dtype=np.intp)
        block[rows[probe_codes], column_codes] = shares
        blocks.append(block)
        columns.extend(found)
    return ShareTable(tuple(ids), tuple(columns), np.concatenate(blocks, axis=1))


def _columns_of(path: Path, *, layered: bool) -> tuple[Any, ...]:
    """Return probes, their codes, columns in order of first appearance, their codes, and shares."""
    import pyarrow.compute as pc

    table = read_table(path)
    if layered:
        table = table.filter(pc.is_valid(table["layer"]))
    probes = table["probe_id"].combine_chunks().dictionary_encode()
    keys = [table[name].combine_chunks().dictionary_encode() for name in ("stream", "region")]
    names = [key.dictionary.to_pylist() for key in keys]
    codes = [key.indices.to_numpy(zero_copy_only=False).astype(np.int64) for key in keys]
    layer = table["layer"].to_numpy().astype(np.int64) if layered else np.zeros(len(table), np.int64)
    depth = int(layer.max(initial=0)) + 1
    joined = (codes[0] * len(names[1]) + codes[1]) * depth + layer
    unique, column_codes = np.unique(joined, return_inverse=True)
    columns = [
        Column(
            region=names[1][code // depth % len(names[1])],
            stream=names[0][code // depth // len(names[1])],
            layer=int(code % depth) if layered else None,
        )
        for code in unique
    ]
    shares = table["share"].to_numpy().astype(np.float64)
    return (
        probes.dictionary.to_pylist(),
        probes.indices.to_numpy(zero_copy_only=False),
        columns,
        column_codes,
        shares,
    )
