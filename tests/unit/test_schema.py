from __future__ import annotations

import math

import pyarrow as pa
import pytest

from audit.schema import RUN_COLUMNS, TABLES, arrow_schema, check_values


@pytest.mark.parametrize("table", TABLES)
def test_schema_has_unique_described_columns_in_lists_not_fixed_size(table: str) -> None:
    schema = arrow_schema(table)
    assert len(set(schema.names)) == len(schema.names)
    assert all(column.meaning for column in TABLES[table])
    assert not any(pa.types.is_fixed_size_list(field.type) for field in schema)


def test_schema_stores_weights_as_lists_of_float32() -> None:
    assert arrow_schema("maps").field("weights").type == pa.list_(pa.float32())
    assert arrow_schema("layer_maps").field("weights").type == pa.list_(pa.float32())


def test_schema_of_views_begins_with_run_id() -> None:
    assert arrow_schema("layers", run_id=True).names[0] == "run_id"
    assert arrow_schema("runs").names == [column.name for column in RUN_COLUMNS]


def test_schema_holds_no_probe_content() -> None:
    names = {column.name for columns in TABLES.values() for column in columns}
    assert not names & {"text", "text_pair", "messages", "image", "audio", "tokens_text"}


def test_schema_of_unknown_table_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of maps, .* or runs, got 'mops'"):
        arrow_schema("mops")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (pa.float64(), lambda x: x),
        (pa.float32(), lambda x: x),
        (pa.list_(pa.float32()), lambda x: [0.5, x]),
        (pa.list_(pa.list_(pa.float64())), lambda x: [[x]]),
        (pa.map_(pa.string(), pa.float64()), lambda x: [("entropy", x)]),
    ],
)
def test_check_values_names_the_column_of_nan_and_infinity(kind: pa.DataType, wrap, bad: float) -> None:
    table = pa.table({"fine": [1.0, 2.0], "wrong": pa.array([wrap(0.5), wrap(bad)], kind)})
    with pytest.raises(ValueError, match=r"column 'wrong': .* got 1 NaN"):
        check_values(table)


def test_check_values_accepts_null_in_numbers_and_lists() -> None:
    check_values(pa.table({"x": [1.0, None], "y": pa.array([None, [1.0]], pa.list_(pa.float32()))}))


def test_check_values_refuses_null_where_the_schema_does() -> None:
    schema = arrow_schema("layer_maps")
    table = pa.table([[None], ["input"], [0], [[1.0]]], schema=schema)
    with pytest.raises(ValueError, match=r"column 'probe_id': .* got 1 nulls"):
        check_values(table, schema=schema)
