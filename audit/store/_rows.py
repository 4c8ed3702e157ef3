"""Records to Parquet rows and back; equal records give equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.errors import StoreError
from audit.records import Captured, Cell, Map, Positions, Prediction, Reliance
from audit.schema import ROW_GROUP_ROWS, TABLES, arrow_schema, check_values

_GROUP_VALUES = 8_000_000
"""Numbers held in memory before a row group is written, however few its rows are."""
_SHUFFLED = {"weights", "logits"}
"""Columns whose floats are stored byte by byte in streams, which halves them under zstd."""

Row = dict[str, Any]


class PartWriter:
    """Write rows of one table to one Parquet file, group by group, checked, without time stamps."""

    def __init__(self, path: Path, table: str) -> None:
        self.path, self.table, self.rows = path, table, 0
        self.schema = arrow_schema(table)
        self._pending: list[Row] = []
        self._size = 0
        self._writer: Any = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        if self._writer is not None:
            self._writer.close()

    def add(self, row: Row, size: int = 0) -> None:
        """Take one row that holds about `size` numbers."""
        self._pending.append(row)
        self._size += size
        if len(self._pending) >= ROW_GROUP_ROWS or self._size >= _GROUP_VALUES:
            self.flush()

    def flush(self) -> None:
        """Write the rows taken so far as one row group."""
        import pyarrow as pa

        if not self._pending:
            return
        columns = [
            pa.array([row[field.name] for row in self._pending], type=field.type) for field in self.schema
        ]
        self.write(pa.table(columns, schema=self.schema))
        self._pending, self._size = [], 0

    def write(self, table: Any) -> None:
        """Write an Arrow table as it is, after checking its values."""
        try:
            check_values(table, schema=self.schema)
        except ValueError as error:
            raise StoreError(f"table {self.table}, {error}; nothing of this part was stored") from None
        if self._writer is None:
            self._writer = open_parquet(self.path, self.schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows


def read_table(path: Path, columns: list[str] | None = None) -> Any:
    """Return a Parquet file as an Arrow table; the reader of pyarrow's own ``read_table`` loads pandas."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read(columns)


def open_parquet(path: Path, schema: Any) -> Any:
    """Return a Parquet writer with the store's fixed encodings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = [f.name for f in schema if pa.types.is_string(f.type)]
    shuffled = [f"{f.name}.list.element" for f in schema if f.name in _SHUFFLED]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=text,
        use_byte_stream_split=shuffled or False,
        write_statistics=True,
        store_schema=True,
    )


# --- records to rows --------------------------------------------------------------------------


def map_row(item: Map) -> Row:
    """Return the row of ``maps`` for one map."""
    places = item.positions
    n = len(places)
    if len(item.weights) != n:
        raise StoreError(
            f"probe {item.probe_id}: map has {len(item.weights)} weights but {n} positions; capture it again"
        )
    return {
        "probe_id": item.probe_id,
        "stream": item.stream,
        "kind": places.kind,
        "n_positions": n,
        "n_layers": 0 if item.layers is None else len(item.layers),
        "share": float(item.share),
        "weights": np.asarray(item.weights, dtype=np.float32),
        "special": np.asarray(places.special, dtype=bool),
        "starts": _flat(places.starts, np.int32),
        "ends": _flat(places.ends, np.int32),
        "parts": _flat(places.parts, np.int8),
        "boxes": _flat(places.boxes, np.float32),
        "times": _flat(places.times, np.float32),
        "grid_rows": None if places.grid is None else places.grid[0],
        "grid_columns": None if places.grid is None else places.grid[1],
        "causal": places.causal,
        "diagnostics": [(name, float(item.diagnostics[name])) for name in sorted(item.diagnostics)],
    }


def _flat(array: NDArray[Any] | None, kind: type[np.generic]) -> NDArray[Any] | None:
    return None if array is None else np.asarray(array, dtype=kind).reshape(-1)


def layer_map_rows(item: Map) -> Iterator[Row]:
    """Yield the rows of ``layer_maps`` for one map, from layer 0 up."""
    for layer, weights in enumerate(() if item.layers is None else item.layers):
        yield {
            "probe_id": item.probe_id,
            "stream": item.stream,
            "layer": layer,
            "weights": np.asarray(weights, dtype=np.float32),
        }


def prediction_row(item: Prediction) -> Row:
    """Return the row of ``predictions`` for one probe."""
    return {**vars(item), "segments": sorted(item.segments.items())}


def reliance_row(item: Reliance) -> Row:
    """Return the row of ``reliance``; a share of None needs a reason."""
    if item.share is None and not item.reason:
        raise StoreError(
            f"probe {item.probe_id}, region {item.region}: share is None without a reason; give one"
        )
    return {name: value for name, value in vars(item).items() if name != "layers"}


def layer_rows(item: Reliance) -> Iterator[Row]:
    """Yield the rows of ``layers``: one a layer, or one that says why there is none."""
    base = {"probe_id": item.probe_id, "stream": item.stream, "region": item.region}
    if not item.layers:
        reason = item.reason or "this method yields no layers"
        yield {**base, "layer": None, "share": None, "reason": reason}
        return
    for layer, share in enumerate(item.layers):
        yield {**base, "layer": layer, "share": share, "reason": None}


def cell_row(cell: Cell) -> Row:
    """Return the row of ``cells`` for one cell, its interval and replicate test spread to columns."""
    row = {name: value for name, value in vars(cell).items() if name not in ("interval", "excess")}
    row["low"], row["high"] = cell.interval or (None, None)
    row["replicates"] = list(cell.replicates)
    test = cell.excess
    row["excess"] = test and test.excess
    row["excess_low"], row["excess_high"] = (test and test.interval) or (None, None)
    row["excess_pvalue"] = test and test.pvalue
    row["minimum_detectable_shift"] = test and test.minimum_detectable_shift
    return row


# --- writing the tables of a shard ------------------------------------------------------------


def write_captured(directory: Path, captured: Iterable[Captured]) -> dict[str, int]:
    """Write maps, layer maps and predictions of a shard; return the rows of each table."""
    with (
        PartWriter(directory / "maps.parquet", "maps") as maps,
        PartWriter(directory / "layer_maps.parquet", "layer_maps") as layers,
        PartWriter(directory / "predictions.parquet", "predictions") as predictions,
    ):
        for item in captured:
            predictions.add(prediction_row(item.prediction))
            for one in item.maps:
                maps.add(map_row(one), 8 * len(one.weights))
                for row in layer_map_rows(one):
                    layers.add(row, len(one.weights))
    return {writer.table: writer.rows for writer in (maps, layers, predictions) if writer.rows}


def write_reliance(directory: Path, reliance: Iterable[Reliance]) -> dict[str, int]:
    """Write reliance and its layers of a shard; return the rows of each table."""
    with (
        PartWriter(directory / "reliance.parquet", "reliance") as shares,
        PartWriter(directory / "layers.parquet", "layers") as layers,
    ):
        for item in reliance:
            shares.add(reliance_row(item))
            for row in layer_rows(item):
                layers.add(row)
    return {writer.table: writer.rows for writer in (shares, layers) if writer.rows}


def write_rows(path: Path, table: str, rows: Iterable[Row]) -> int:
    """Write rows to one file, which exists even without rows; return their number."""
    with PartWriter(path, table) as writer:
        for row in rows:
            writer.add(row)
        writer.flush()
        if not writer.rows:
            writer.write(writer.schema.empty_table())
    return writer.rows


# --- rows back to records ---------------------------------------------------------------------


def read_maps(batch: Any, layers: Iterator[NDArray[np.float32]]) -> Iterator[Map]:
    """Yield the maps of an Arrow batch of ``maps``, taking each map's layers from `layers`."""
    vectors = {c.name: _vectors(batch.column(c.name)) for c in TABLES["maps"] if c.type.startswith("list<")}
    plain = [c.name for c in TABLES["maps"] if not c.type.startswith("list<")]
    for i, row in enumerate(batch.select(plain).to_pylist()):
        lists = {name: values[i] for name, values in vectors.items()}
        own = [next(layers) for _ in range(row["n_layers"])]
        yield Map(
            probe_id=row["probe_id"],
            weights=lists["weights"],
            positions=_positions(row, lists),
            stream=row["stream"],
            share=row["share"],
            layers=np.stack(own) if own else None,
            diagnostics=dict(row["diagnostics"]),
        )


def read_vectors(batches: Iterable[Any]) -> Iterator[NDArray[np.float32]]:
    """Yield the weights of each row of ``layer_maps``."""
    for batch in batches:
        yield from _vectors(batch.column("weights"))


def _vectors(column: Any) -> list[Any]:
    """Return each row of a list column as an array, None where it is null."""
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    values = column.values.to_numpy(zero_copy_only=False)
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return [None if missing[i] else values[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _positions(row: Row, lists: dict[str, Any]) -> Positions:
    boxes, times = lists["boxes"], lists["times"]
    return Positions(
        kind=row["kind"],
        special=lists["special"],
        starts=lists["starts"],
        ends=lists["ends"],
        parts=lists["parts"],
        boxes=None if boxes is None else boxes.reshape(-1, 4),
        grid=None if row["grid_rows"] is None else (row["grid_rows"], row["grid_columns"]),
        times=None if times is None else times.reshape(-1, 2),
        causal=row["causal"],
    )
