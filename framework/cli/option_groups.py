"""Options that several commands share, declared once."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

Command = Callable[..., None]


def with_options(name: str, group: Callable[..., Any]) -> Callable[[Command], Command]:
    """Gives a command the parameters of `group` in the place of its parameter `name`.

    Args:
        name: the parameter of the command; its value is what `group` makes of what was typed.
        group: checks a group of options and puts them together; its parameters are declared as typer's.

    Returns:
        A decorator.
    """
    options = inspect.signature(group).parameters

    def decorate(command: Command) -> Command:
        own = inspect.signature(command)
        hints = {
            **typing.get_type_hints(group, include_extras=True),
            **typing.get_type_hints(command, include_extras=True),
        }
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options.values() if parameter.name == name else [parameter]

        @functools.wraps(command)
        def with_group(**values: Any) -> None:
            given = {option: values.pop(option) for option in options}
            command(**values, **{name: group(**given)})

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = own.replace(
            parameters=[one.replace(kind=keyword, annotation=hints[one.name]) for one in parameters],
            return_annotation=None,
        )
        with_group.__signature__ = signature  # type: ignore[attr-defined]
        with_group.__annotations__ = {one.name: hints[one.name] for one in parameters}
        return with_group

    return decorate
