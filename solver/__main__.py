"""`python -m solver`: plans from saved profiles, without the framework or TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dike.exceptions import BadInputError, DikeError
from dike.profile import ModelProfile
from solver.choices import Strategy
from solver.cli.help import with_panels
from solver.cli.plan import PANELS, plan
from solver.cli.profiles import load_saved_profile


def main() -> None:
    """Runs the command. Exit codes as for `dike`: 0 success, 1 failure, 2 bad input, 130 interrupted."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
    app.command(cls=with_panels(PANELS))(plan)
    try:
        app(prog_name="python -m solver", obj=_load_profile)
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _load_profile(
    model: str,
    batch_size: int | None = None,
    /,
    *,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    again: bool = False,
    strategy: Strategy = "auto",
) -> ModelProfile:
    del strategy  # says nothing about a saved profile
    if arguments or is_module or again:
        raise BadInputError("python -m solver runs no script; give a saved profile (.json), or use dike plan.")
    return load_saved_profile(model, batch_size)


if __name__ == "__main__":
    main()
