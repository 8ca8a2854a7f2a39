"""Options that several commands share, declared once."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Command = Callable[..., None]


def with_options(**groups: Callable[..., Any]) -> Callable[[Command], Command]:
    """Gives a command the parameters of each group in the place of the parameter that has the group's name.

    Args:
        groups: parameter of the command -> what checks a group of options and puts them together; its parameters are
            declared as typer's. What it returns need not be known to the command's module but to type checkers.

    Returns:
        A decorator.
    """
    options = {name: inspect.signature(group).parameters for name, group in groups.items()}
    hints = {key: hint for group in groups.values() for key, hint in _hints(group).items()}

    def decorate(command: Command) -> Command:
        own = inspect.signature(command)
        hints_of_all = {**hints, **_hints(command, groups)}
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options[parameter.name].values() if parameter.name in groups else [parameter]

        @functools.wraps(command)
        def with_groups(**values: Any) -> None:
            made = {}
            for name, group in groups.items():
                made[name] = group(**{option: values.pop(option) for option in options[name]})
            command(**values, **made)

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = own.replace(
            parameters=[one.replace(kind=keyword, annotation=hints_of_all[one.name]) for one in parameters],
            return_annotation=None,
        )
        with_groups.__signature__ = signature  # type: ignore[attr-defined]
        with_groups.__annotations__ = {one.name: hints_of_all[one.name] for one in parameters}
        return with_groups

    return decorate


def _hints(function: Callable[..., Any], left_out: typing.Collection[str] = ()) -> dict[str, Any]:
    """The types of a function's parameters but those left out: where these are imported is of no concern here."""
    wanted = {name: hint for name, hint in function.__annotations__.items() if name not in {*left_out, "return"}}
    declared = SimpleNamespace(__annotations__=wanted)
    return typing.get_type_hints(declared, vars(sys.modules[function.__module__]), include_extras=True)
