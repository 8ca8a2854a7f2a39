"""Converts search spaces from Python values to the YAML of `dike tune --space`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dike.exceptions import BadInputError
from dike.trial.spec import Value

_RANGE = "(low, high), (low, high, 'log'), (low, high, 'int') or (low, high, 'step=X')"
_RANGE_OPTIONS = ("log", "int")
_STEP = "step="


def to_yaml(space: Any) -> str:
    """Converts a space to YAML.

    Args:
        space: name -> a list of values; a tuple `(low, high)` for a range, which is of integers if both are, with
            optional `"log"`, `"int"` and `"step=X"` after them; one value; or an Optuna distribution. Or a mapping of
            `values`, one of these, and `when`, which maps other names to the values for which the parameter is used.
            Or KerasTuner's `HyperParameters`.

    Raises:
        BadInputError: if an item is none of these; the command checks the rest.
    """
    items = as_mapping(space)
    return "".join(f"{json.dumps(str(name))}: {_item(str(name), item)}\n" for name, item in items.items())


def as_mapping(space: Any) -> Mapping[str, Any]:
    """Returns a space that is none of KerasTuner's; see `to_yaml`."""
    if _is_of(space, "keras_tuner"):
        space = _of_keras_tuner(space)
    if not isinstance(space, Mapping) or not space:
        raise BadInputError("The search space is empty; pass a dictionary such as {'lr': [0.1, 0.01]}.")
    return space


def is_conditional(item: Any) -> bool:
    """Whether not all trials have the parameter."""
    return isinstance(item, Mapping) and bool(item.get("when"))


def grid_to_yaml(grid: Mapping[str, Any]) -> str:
    """Raises BadInputError if a parameter has no list of values."""
    for name, values in grid.items() if isinstance(grid, Mapping) else ():
        if isinstance(values, tuple | str) or not isinstance(values, Iterable):
            raise BadInputError(f"A grid needs a list of values of '{name}', not {values!r}.")
    return to_yaml(grid)


def _item(name: str, item: Any) -> str:
    if not isinstance(item, Mapping):
        return _values(name, item)
    if "values" not in item or item.keys() - {"values", "when"} or not isinstance(item.get("when", {}), Mapping):
        raise BadInputError(
            f"The parameter '{name}' is {item!r}; write {{'values': [1, 2], 'when': {{'other': [3]}}}}."
        )
    others = ", ".join(
        f"{json.dumps(str(other))}: {_values(name, when)}" for other, when in item.get("when", {}).items()
    )
    return f"{{values: {_values(name, item['values'])}, when: {{{others}}}}}"


def _values(name: str, values: Any) -> str:
    if _is_of(values, "optuna"):
        values = _of_optuna(name, values)
    if isinstance(values, tuple):
        return json.dumps(_range(name, values))
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    return f"[{', '.join(_text(name, value) for value in values)}]"


def _range(name: str, values: tuple[Any, ...]) -> str:
    bounds = [plain_value(name, value) for value in values[:2]]
    options = list(values[2:])
    are_numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds)
    are_known = all(option in _RANGE_OPTIONS or str(option).startswith(_STEP) for option in options)
    if len(bounds) < 2 or not are_numbers or not are_known:
        raise BadInputError(f"The range of '{name}' is {values!r}; write {_RANGE}, or a list to choose from.")
    if all(isinstance(bound, int) for bound in bounds) and "int" not in options:
        options.append("int")
    return ":".join([*(_text(name, bound) for bound in bounds), *options])


def _is_of(value: Any, library: str) -> bool:
    return type(value).__module__.partition(".")[0] == library


def _of_optuna(name: str, distribution: Any) -> Any:
    """Converts a distribution of `optuna.distributions` to a list of values or a range."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    if not hasattr(distribution, "low"):
        raise BadInputError(f"The parameter '{name}' is {distribution!r}; use a distribution of optuna.distributions.")
    return _range_of(distribution.low, distribution.high, distribution.step, is_log=distribution.log)


def _of_keras_tuner(hyper_parameters: Any) -> dict[str, Any]:
    """Converts KerasTuner's `HyperParameters` to a mapping.

    Raises:
        BadInputError: if it has no counterpart here.
    """
    space: dict[str, Any] = {}
    for one in hyper_parameters.space:
        when = {each.name: list(each.values) for each in one.conditions}
        values: Any
        match type(one).__name__:
            case "Fixed":
                values = [one.value]
            case "Choice":
                values = list(one.values)
            case "Boolean":
                values = [False, True]
            case "Int" | "Float" if one.sampling in (None, "linear", "log"):
                # The step of a logarithmic range is a factor there.
                is_log = one.sampling == "log"
                values = _range_of(one.min_value, one.max_value, None if is_log else one.step, is_log=is_log)
            case kind:
                raise BadInputError(
                    f"The parameter '{one.name}' of KerasTuner is {kind} with sampling {one.sampling}, "
                    "which Dike does not know; use linear or log."
                )
        space[one.name] = {"values": values, "when": when} if when else values
    return space


def _range_of(low: float, high: float, step: float | None, *, is_log: bool) -> tuple[Any, ...]:
    """The range of another library's distribution; whole numbers have a step of 1 anyway."""
    is_integer = isinstance(low, int)
    has_step = step is not None and not (is_integer and step == 1)
    options = [
        *(["int"] if is_integer else []),
        *(["log"] if is_log else []),
        *([f"{_STEP}{step!r}"] if has_step else []),
    ]
    return (low, high, *options)


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
