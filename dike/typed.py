"""Converts JSON values to dataclasses with type checks, for input from untrusted senders."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INT = 2**63 - 1
"""Largest integer that databases can store."""


def read(kind: type[T], values: Any) -> T:
    """Converts the output of `dataclasses.asdict` back to a dataclass.

    Fields may be plain values, text enumerations, such dataclasses, tuples and dictionaries of these, and None.

    Raises:
        ValueError: if the values do not match; the message says where.
    """
    return typing.cast(T, _object(kind, values, kind.__name__))


def _object(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where} is not an object")
    hints = _hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{where} has no field {unknown[0]!r}")
    read_values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return kind(**read_values)
    except TypeError as error:
        raise ValueError(f"{where} is incomplete: {error}") from error


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
    elif hint is int and type(value) is int and abs(value) <= MAX_INT:
        return value
    elif hint is float and type(value) in (int, float) and (isinstance(value, float) or abs(value) <= MAX_INT):
        return float(value)
    elif hint in (str, bool) and isinstance(value, hint):
        return value
    elif isinstance(hint, enum.EnumType):
        return hint(value)
    raise ValueError(f"{where} has the wrong type")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
