"""JSON values as dataclasses, checked field by field: whoever sent them may have sent anything."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Of integers: what databases can keep."""


def read(kind: type[T], values: Any) -> T:
    """Makes a dataclass of the object that `dataclasses.asdict` made of one.

    Fields may be plain values, text enumerations, other such dataclasses, tuples and dictionaries of these, and None.

    Raises:
        ValueError: if the values are no such object; the message says where.
    """
    return typing.cast(T, _object(kind, values, kind.__name__))


def _object(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where} is no object")
    hints = _hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{where} has no field {unknown[0]!r}")
    read_values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return kind(**read_values)
    except TypeError as error:
        raise ValueError(f"{where} is not complete: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(next(part for part in parts if part is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        every = parts[:1] * len(value) if parts[-1] is ... else parts
        if len(every) == len(value):
            return tuple(_value(part, one, f"{where}[]") for part, one in zip(every, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {str(name): _value(parts[1], one, f"{where}.{name}") for name, one in value.items()}
    elif hint is int and type(value) is int and abs(value) <= LARGEST:
        return value
    elif hint is float and type(value) in (int, float) and (isinstance(value, float) or abs(value) <= LARGEST):
        return float(value)
    elif hint in (str, bool) and isinstance(value, hint):
        return value
    elif isinstance(hint, enum.EnumType):
        return hint(value)
    raise ValueError(f"{where} is not of the kind it should be")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
