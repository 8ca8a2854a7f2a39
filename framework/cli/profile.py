"""`dike profile`: reads a model's parameters, FLOPs and longest path."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from dike.exceptions import BadInputError
from solver.cli.output import Format, console, print_json, say
from solver.cli.plan import module_option, refresh_profile_option


def profile(
    model: Annotated[str, typer.Argument(help="A training script, keras:NAME or a saved profile (.json).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after '--'.", show_default=False)
    ] = None,
    module: Annotated[bool, module_option("MODEL")] = False,
    refresh_profile: Annotated[bool, refresh_profile_option()] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the profile to this file (JSON).")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Batch size, samples per step.", show_default="the script's own")
    ] = None,
    format: Annotated[Format, typer.Option(help="How to print the result.")] = Format.TABLE,  # noqa: A002
) -> None:
    """Reads a model's parameters, FLOPs and longest path.

    Nothing is trained.
    """
    from framework.project.profiling import load_profile

    notify = functools.partial(say, console(stderr=True))
    found = load_profile(model, arguments or (), batch_size, is_module=module, refresh=refresh_profile, notify=notify)
    if output is not None:
        try:
            output.write_text(found.dumps() + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"The profile cannot be saved to {output}: {error.strerror}.") from error
    if format is Format.JSON:
        if found.uncounted_ops:
            names = ", ".join(f"{name} x {count}" for name, count in found.uncounted_ops.items())
            print(f"warning: the FLOPs of these operations are unknown and not counted: {names}.", file=sys.stderr)
        print_json(found.to_json())
    else:
        from solver.cli.tables import print_profile

        print_profile(console(), found)
