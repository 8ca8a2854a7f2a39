"""`dike plot NAME`: draws a search."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.trials import StorageOption
from solver.cli.output import console


def plot(
    name: Annotated[str, typer.Argument(help="Name of the search.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write: .png, .svg or .pdf.", show_default="NAME.png"),
    ] = None,
    storage: StorageOption = None,
) -> None:
    """Draws a search's losses, slots, and best value over time."""
    from framework.search.database import default_storage
    from framework.search.plots import plot_search
    from framework.search.store import Store

    path = output or Path(f"{name}.png")
    with contextlib.closing(Store(storage or default_storage(), must_exist=True)) as store:
        spec = store.open_search(name)
        plot_search(spec, store.load_trials(), store.load_slices(), store.load_losses(), path)
    console().print(f"wrote {path}", markup=False, soft_wrap=True)
