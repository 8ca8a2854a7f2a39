"""What the user has given on the command line."""

from __future__ import annotations

import typer

from solver.cli.option_groups import with_options

__all__ = ["is_given", "with_options"]


def is_given(context: typer.Context, parameter: str) -> bool:
    """Whether the user has given an option or an argument on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
