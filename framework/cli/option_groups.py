"""Finds out which options are given on the command line."""

from __future__ import annotations

import typer

from solver.cli.option_groups import with_options

__all__ = ["is_given", "with_options"]


def is_given(context: typer.Context, parameter: str) -> bool:
    """Returns whether an option or argument is given on the command line, not by default or environment."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
