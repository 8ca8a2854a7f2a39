"""Options that several commands share: declared once, or derived from the fields that describe them."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from dike.described import MAX_ITEMS, DescribedField, described_fields, refusal
from dike.exceptions import BadInputError

Command = Callable[..., Any]
Described = TypeVar("Described")


def with_options(**groups: Callable[..., Any]) -> Callable[[Command], Command]:
    """Gives a command the parameters of each group in place of the parameter that has the group's name.

    Args:
        groups: parameter of the command -> function that makes its value from options, declared as for typer. Its
            return type need not be imported by the command's module.

    Returns:
        A decorator for commands, and for functions that are groups themselves.
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
        def with_groups(**values: Any) -> Any:
            made = {}
            for name, group in groups.items():
                made[name] = group(**{option: values.pop(option) for option in options[name]})
            return command(**values, **made)

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = own.replace(
            parameters=[one.replace(kind=keyword, annotation=hints_of_all[one.name]) for one in parameters],
            return_annotation=None,
        )
        with_groups.__signature__ = signature  # type: ignore[attr-defined]
        with_groups.__annotations__ = {one.name: hints_of_all[one.name] for one in parameters}
        return with_groups

    return decorate


def options_of(described: type[Described]) -> Callable[..., Described]:
    """Makes a group with one option per described field of a dataclass; its value is an instance."""
    fields = described_fields(typing.cast("typing.Hashable", described))

    def group(**values: Any) -> Described:
        return described(**{name: _value(field, values[field.parameter]) for name, field in fields.items()})

    parameters = [
        inspect.Parameter(field.parameter, inspect.Parameter.KEYWORD_ONLY, default=_typed_default(field))
        for field in fields.values()
    ]
    group.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.__annotations__ = {field.parameter: _declared(field) for field in fields.values()}
    return group


def panels_of(*described: type) -> dict[str, tuple[str, ...]]:
    """Returns title in `--help` -> parameters."""
    panels: dict[str, tuple[str, ...]] = {}
    for one in described:
        for field in described_fields(one).values():
            panels[field.option.panel] = (*panels.get(field.option.panel, ()), field.parameter)
    return panels


def merged_panels(*panels: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Merges panels; titles keep the order of their first occurrence."""
    merged: dict[str, tuple[str, ...]] = {}
    for one in panels:
        for title, names in one.items():
            merged[title] = (*merged.get(title, ()), *names)
    return merged


def _typed_default(field: DescribedField) -> Any:
    return None if field.option.read is not None else field.default


def _declared(field: DescribedField) -> Any:
    option = field.option
    shown: dict[str, Any] = {"show_default": option.default} if option.default else {}
    if option.variable:
        shown["envvar"] = option.variable
    if option.metavar is not None:
        shown["metavar"] = option.metavar
    if field.type is bool:
        # Without an explicit name, typer would add --no-NAME.
        return Annotated[bool, typer.Option(field.flag, help=option.help, **shown)]
    if field.minimum is not None:
        shown["min"] = field.minimum
    if field.maximum is not None and field.maximum < MAX_ITEMS:
        # Very large bounds only guard against nonsense; --help does not show them.
        shown["max"] = field.maximum
    typed = field.type if option.read is None else option.reads
    return Annotated[
        typed if _typed_default(field) is not None else typed | None, typer.Option(help=option.help, **shown)
    ]


def _value(field: DescribedField, typed: Any) -> Any:
    if typed is None or typed == _typed_default(field) or typed == []:
        return field.default
    value = typed if field.option.read is None else field.option.read(typed)
    try:
        return TypeAdapter(field.hint).validate_python(value)
    except ValidationError as error:
        raise BadInputError(f"{refusal(field.flag, error.errors()[0])}.") from error


def _hints(function: Callable[..., Any], left_out: typing.Collection[str] = ()) -> dict[str, Any]:
    """Resolves the types of a function's parameters, except `left_out`, whose types may not be imported."""
    wanted = {name: hint for name, hint in function.__annotations__.items() if name not in {*left_out, "return"}}
    declared = SimpleNamespace(__annotations__=wanted)
    return typing.get_type_hints(declared, vars(sys.modules[function.__module__]), include_extras=True)
