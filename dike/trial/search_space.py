"""Converts search spaces from Python values to the YAML of `dike tune --space`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dike.exceptions import BadInputError
from dike.trial.spec import Value

_RANGE = "(low, high), (low, high, 'log') or (low, high, 'int')"
_RANGE_OPTIONS = ("log", "int")


def to_yaml(space: Mapping[str, Any]) -> str:
    """Converts a space to YAML.

    Args:
        space: name -> a list of values; a tuple `(low, high)` for a range, which is of integers if both are, with
            optional `"log"`, `"int"` or both after them; or one value.

    Raises:
        BadInputError: if an item is none of these; the command checks the rest.
    """
    if not isinstance(space, Mapping) or not space:
        raise BadInputError("The search space is empty; pass a dictionary such as {'lr': [0.1, 0.01]}.")
    return "".join(f"{json.dumps(str(name))}: {_values(str(name), values)}\n" for name, values in space.items())


def grid_to_yaml(grid: Mapping[str, Any]) -> str:
    """Raises BadInputError if a parameter has no list of values."""
    for name, values in grid.items() if isinstance(grid, Mapping) else ():
        if isinstance(values, tuple | str) or not isinstance(values, Iterable):
            raise BadInputError(f"A grid needs a list of values of '{name}', not {values!r}.")
    return to_yaml(grid)


def _values(name: str, values: Any) -> str:
    if isinstance(values, tuple):
        return json.dumps(_range(name, values))
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    return f"[{', '.join(_text(name, value) for value in values)}]"


def _range(name: str, values: tuple[Any, ...]) -> str:
    bounds = [plain_value(name, value) for value in values[:2]]
    options = list(values[2:])
    are_numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds)
    if len(bounds) < 2 or not are_numbers or any(option not in _RANGE_OPTIONS for option in options):
        raise BadInputError(f"The range of '{name}' is {values!r}; write {_RANGE}, or a list to choose from.")
    if all(isinstance(bound, int) for bound in bounds) and "int" not in options:
        options.append("int")
    return ":".join([*(_text(name, bound) for bound in bounds), *options])


def _text(name: str, value: Any) -> str:
    return json.dumps(value) if isinstance(value := plain_value(name, value), str | bool) else repr(value)


def plain_value(name: str, value: Any) -> Value:
    """Converts a value, which may be a NumPy scalar, to a plain Python type.

    Raises:
        BadInputError: if a parameter cannot have this value.
    """
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float | str):
        raise BadInputError(f"The parameter '{name}' takes numbers, booleans and text, not {value!r}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInputError(f"The parameter '{name}' is {value}; use finite numbers.")
    return value
