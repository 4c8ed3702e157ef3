"""Turn records into JSON values and back, exactly, with the standard library alone."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def to_json(record: Any, *, where: str = "") -> Any:
    """Return a record as JSON values: objects, lists, strings, numbers, booleans and null.

    Parameters
    ----------
    record : dataclass, mapping with string keys, sequence, enum, NumPy scalar or plain value
    where : str
        Name of the value in error messages.

    Returns
    -------
    JSON value
        ``from_json(type(record), to_json(record)) == record`` for every record of
        :mod:`audit.records` that holds no array. Sequences inside free mappings come back as lists.

    Raises
    ------
    ValueError
        For NaN, infinity, a key that is no string, or a type that JSON does not have.

    Examples
    --------
    >>> from audit.records import Column
    >>> to_json(Column("names", layer=3))
    {'region': 'names', 'stream': 'input', 'layer': 3}
    """
    if isinstance(record, Enum):
        return record.value
    if record is None or isinstance(record, str | bool | int):
        return record
    if isinstance(record, float):
        return _finite(record, where)
    if is_dataclass(record) and not isinstance(record, type):
        where = where or type(record).__name__
        return {f.name: to_json(getattr(record, f.name), where=f"{where}.{f.name}") for f in fields(record)}
    if isinstance(record, Mapping):
        return {_key(key, where): to_json(value, where=f"{where}.{key}") for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(value, where=f"{where}[{i}]") for i, value in enumerate(record)]
    if hasattr(record, "item") and getattr(record, "ndim", None) == 0:
        return to_json(record.item(), where=where)
    raise ValueError(f"{where or 'value'}: expected a record or a JSON value, got {type(record).__name__}")


def from_json(cls: type[Record], data: Any) -> Record:
    """Return the record of type `cls` that :func:`to_json` wrote.

    Raises
    ------
    ValueError
        When a field is missing, unknown, or of another type than the record declares.

    Examples
    --------
    >>> from audit.records import Column
    >>> from_json(Column, {"region": "names", "stream": "input", "layer": 3})
    Column(region='names', stream='input', layer=3)
    """
    record: Record = _read(cls, data, cls.__name__)
    return record


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{where or 'value'}: expected a finite number or None, got {value}")
    return float(value)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where or 'mapping'}: expected keys of type str, got {key!r}")
    return key


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(expected: Any, data: Any, where: str) -> Any:
    origin = get_origin(expected)
    if expected is Any:
        return data
    if origin in (Union, types.UnionType):
        return _read_union(get_args(expected), data, where)
    if origin is Literal:
        return _checked(data in get_args(expected), data, expected, where)
    if origin is tuple:
        return _read_tuple(get_args(expected), data, where)
    if origin is not None:
        return _read_mapping(origin, get_args(expected), data, where)
    if is_dataclass(expected):
        return _read_record(expected, data, where)
    if issubclass(expected, Enum):
        _checked(data in [member.value for member in expected], data, expected, where)
        return expected(data)
    return _read_plain(expected, data, where)


def _checked(fits: bool, data: Any, expected: Any, where: str) -> Any:
    if not fits:
        raise ValueError(f"{where}: expected {getattr(expected, '__name__', expected)}, got {data!r}")
    return data


def _read_plain(expected: Any, data: Any, where: str) -> Any:
    if expected is float:
        _checked(isinstance(data, float | int) and not isinstance(data, bool), data, expected, where)
        return float(data)
    return _checked(type(data) is expected, data, expected, where)


def _read_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problem = None
    for option in options:
        if option is type(None):
            continue
        try:
            return _read(option, data, where)
        except ValueError as error:
            problem = error
    raise problem or ValueError(f"{where}: expected {options}, got {data!r}")


def _read_tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _checked(isinstance(data, list), data, "a list", where)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(data)
    _checked(len(items) == len(data), data, f"{len(items)} items", where)
    return tuple(
        _read(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(zip(items, data, strict=True))
    )


def _read_mapping(origin: Any, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not (isinstance(origin, type) and issubclass(origin, Mapping)):
        raise ValueError(f"{where}: {origin} cannot be read from JSON")
    _checked(isinstance(data, dict), data, "an object", where)
    return {key: _read(arguments[1], value, f"{where}.{key}") for key, value in data.items()}


def _read_record(cls: Any, data: Any, where: str) -> Any:
    _checked(isinstance(data, dict), data, "an object", where)
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    for name, f in known.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}: field {name!r} is missing")
    hints = _hints(cls)
    return cls(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in data.items()})
