"""SQL over listed files: a DuckDB in memory that can read them and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audit.errors import StoreError
from audit.schema import RUN_COLUMNS, TABLES, arrow_schema
from audit.store._reader import Files

if TYPE_CHECKING:
    import duckdb
    import polars as pl

VIEWS = ("maps", "layer_maps", "reliance", "layers", "predictions", "aggregate")


def run_row(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the view ``runs`` for one manifest."""
    spec = manifest["spec"]
    values = {
        **spec,
        **spec["settings"],
        "run_id": manifest["run_id"],
        "checkpoint": spec["checkpoint"]["ref"],
        "checkpoint_digest": spec["checkpoint"]["digest"],
        "weights_digest": spec["checkpoint"]["weights_digest"],
        "regions_digest": manifest["regions_digest"],
        "method": spec["method"]["name"],
        "output_row": spec["method"]["row"],
        "n_probes": manifest["n_probes"],
        "created": manifest["provenance"]["time"],
    }
    return {column.name: values[column.name] for column in RUN_COLUMNS}


def run_query(query: str, files: Files, manifests: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return the result of one SELECT over the views of some runs.

    Raises
    ------
    StoreError
        When the query is not one SELECT, does not fit the views, reads anything else, or a file that
        it needs is damaged.
    """
    import duckdb

    with duckdb.connect() as connection:
        try:
            _refuse_writing(duckdb.extract_statements(query), duckdb)
            _create_views(connection, files, manifests, _named_views(query))
            result: pl.DataFrame = connection.sql(query).pl()
            return result
        except duckdb.Error as error:
            reason = " ".join(str(error).split())
            raise StoreError(f"query failed: {reason}; views: {', '.join((*VIEWS, 'runs'))}") from None


def _refuse_writing(statements: Sequence[Any], library: Any) -> None:
    allowed = (library.StatementType.SELECT, library.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise StoreError("query: expected one SELECT statement; the store is read only")


def _named_views(query: str) -> set[str]:
    """Return the views whose names occur in a query; only their files are opened and checked.

    A view that is not named does not exist for the query, so none can be read by accident.
    """
    return set(re.findall(r"\w+", query.lower())) & {*VIEWS, "runs"}


def _create_views(
    connection: duckdb.DuckDBPyConnection,
    files: Files,
    manifests: Sequence[dict[str, Any]],
    needed: set[str],
) -> None:
    import pyarrow as pa

    if "runs" in needed:
        rows = [run_row(manifest) for manifest in manifests]
        connection.register("runs", pa.Table.from_pylist(rows, schema=arrow_schema("runs")))
    listed = {table: _listed(files, manifests, table) for table in needed - {"runs"}}
    paths = sorted({path for rows in listed.values() for path, _ in rows})
    connection.execute("SET allow_persistent_secrets = false")
    connection.execute(f"SET allowed_paths = {_literal(paths)}")
    connection.execute("SET enable_external_access = false")
    for table, found in listed.items():
        if found:
            _create_view(connection, table, found)
        else:
            connection.register(table, arrow_schema(table, run_id=True).empty_table())
    connection.execute("SET lock_configuration = true")


def _listed(files: Files, manifests: Sequence[dict[str, Any]], table: str) -> list[tuple[str, str]]:
    """Return (path, run id) of every listed file of a table."""
    pairs = [(str(path), m["run_id"]) for m in manifests for path in files.paths(m, table)]
    if special := next((path for path, _ in pairs if set(path) & set("*?[")), None):
        raise StoreError(f"{special}: DuckDB takes *, ? and [ in a path for patterns; rename the directory")
    return pairs


def _create_view(connection: duckdb.DuckDBPyConnection, table: str, found: list[tuple[str, str]]) -> None:
    import pyarrow as pa

    paths, ids = zip(*found, strict=True)
    connection.register(f"listed_{table}", pa.table({"path": list(paths), "run_id": list(ids)}))
    template = (resources.files("audit") / "sql" / "view.sql").read_text()
    columns = ", ".join(f"part.{column.name}" for column in TABLES[table])
    statement = template.format(table=table, columns=columns, paths=_literal(sorted(set(paths))))
    connection.execute(statement)


def _literal(paths: Sequence[str | Path]) -> str:
    quoted = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"[{quoted}]"
