from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.records import Cell, Comparison, Policy, Rule, RunSpec, Verdict
from audit.serialize import from_json, to_json
from tests.store_records import make_comparison, make_spec, make_verdict

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return JSON
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy_of, arguments))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(strategy_of, arguments))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=5), strategy_of(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: strategy_of(hints[f.name]) for f in dataclasses.fields(hint)})
    return st.from_type(hint)


@pytest.mark.parametrize("cls", [Cell, RunSpec, Verdict, Comparison])
def test_record_equals_itself_after_a_round_trip_through_json_text(cls: type) -> None:
    @settings(max_examples=12, deadline=None)
    @given(strategy_of(cls))
    def holds(record: Any) -> None:
        assert from_json(cls, json.loads(json.dumps(to_json(record)))) == record

    holds()


def test_record_with_nested_tests_and_confirmations_keeps_types() -> None:
    comparison, verdict = make_comparison(), make_verdict()
    back = from_json(Comparison, json.loads(json.dumps(to_json(comparison))))
    assert back == comparison
    assert isinstance(back.cells[0].interval, tuple)
    again = from_json(Verdict, json.loads(json.dumps(to_json(verdict))))
    assert again == verdict
    assert again.policy.digest == verdict.policy.digest
    assert again.outcome is verdict.outcome
    spec = make_spec()
    assert from_json(RunSpec, to_json(spec)).id == spec.id


def test_to_json_turns_numpy_numbers_into_plain_ones() -> None:
    found = to_json({"n": np.int64(3), "x": np.float32(0.5), "y": np.float64(0.1), "b": np.bool_(True)})
    assert json.dumps(found) == '{"n": 3, "x": 0.5, "y": 0.1, "b": true}'


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.float32("nan")])
def test_to_json_names_the_field_of_nan(bad: float) -> None:
    comparison = make_comparison(cells=(Cell("shift", "names", value=bad),))
    with pytest.raises(ValueError, match=r"Comparison\.cells\[0\]\.value: expected a finite number"):
        to_json(comparison)


def test_to_json_refuses_arrays_and_keys_that_are_no_strings() -> None:
    with pytest.raises(ValueError, match="got ndarray"):
        to_json(np.zeros(2))
    with pytest.raises(ValueError, match="expected keys of type str, got 1"):
        to_json({1: 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"kind": "wish"}, r"Rule\.kind: expected .*Literal.*, got 'wish'"),
        ({"fail": "much"}, r"Rule\.fail: expected float, got 'much'"),
        ({"layer": True}, r"Rule\.layer: expected int, got True"),
    ],
)
def test_from_json_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    data = {**to_json(Rule("names", "limit")), **change}
    with pytest.raises(ValueError, match=message):
        from_json(Rule, data)


def test_from_json_fills_defaults_and_names_missing_fields() -> None:
    assert from_json(Policy, {"rules": []}) == Policy(())
    with pytest.raises(ValueError, match="Rule: field 'kind' is missing"):
        from_json(Rule, {"region": "names"})


def test_serialize_and_store_import_no_engine() -> None:
    code = (
        "import sys, audit.serialize, audit.store, audit.schema;"
        "print(sorted({'duckdb', 'pyarrow', 'polars', 'torch', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
