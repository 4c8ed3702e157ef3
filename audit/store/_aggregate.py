"""What is computed over the whole of a run when it is published."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

from audit.errors import StoreError
from audit.schema import arrow_schema
from audit.store._rows import PartWriter, read_table


def probe_ids(run: Path, run_id: str) -> list[str]:
    """Return the run's probes in order, after checking that reliance and predictions agree on them."""
    ids = _column(run / "predictions.parquet", "probe_id")
    if len(set(ids)) != len(ids):
        twice = next(probe for probe, count in Counter(ids).items() if count > 1)
        raise StoreError(f"{run_id}: probe {twice} was captured twice; give each probe its own id")
    if unknown := sorted(set(_column(run / "reliance.parquet", "probe_id")) - set(ids)):
        raise StoreError(
            f"{run_id}: probe {unknown[0]} has reliance but no prediction; store it as captured too"
        )
    return ids


def _column(path: Path, name: str) -> list[str]:
    values: list[str] = read_table(path, [name]).column(0).to_pylist()
    return values


def write_aggregate(target: Path, run: Path) -> int:
    """Write the region aggregate of the run's reliance and layers; return its rows."""
    import duckdb

    query = (resources.files("audit") / "sql" / "aggregate.sql").read_text()
    with duckdb.connect() as connection:
        connection.execute("SET threads = 1")
        for table in ("reliance", "layers"):
            connection.register(table, read_table(run / f"{table}.parquet"))
        result = connection.sql(query).to_arrow_table()
    schema = arrow_schema("aggregate")
    with PartWriter(target, "aggregate") as writer:
        writer.write(result.cast(schema))
    return writer.rows
