"""What the user has given on the command line, and values that options of several commands have."""

from __future__ import annotations

import typer

from dike.exceptions import BadInputError
from solver.cli.option_groups import with_options
from solver.units import parse_duration

__all__ = ["is_given", "read_age", "with_options"]


def is_given(context: typer.Context, parameter: str) -> bool:
    """Whether the user has given an option or an argument on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def read_age(option: str, text: str) -> float:
    """Reads an option's value such as `30d` or `12h`, in seconds.

    Raises:
        BadInputError: if it is none.
    """
    try:
        return parse_duration(text)
    except ValueError as error:
        raise BadInputError(f"'{text}' is not a value of {option}: {error}.") from None
