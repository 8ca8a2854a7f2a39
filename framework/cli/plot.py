"""`dike plot NAME`: a search as a picture."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.trials import StorageOption
from solver.cli.output import console


def plot(
    name: Annotated[str, typer.Argument(help="The search.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.", show_default="NAME.png")
    ] = None,
    storage: StorageOption = None,
) -> None:
    """Draws a search: losses, slots, and the best value over time."""
    from framework.search.database import default_storage
    from framework.search.plots import plot_search
    from framework.search.store import Store

    path = output or Path(f"{name}.png")
    with contextlib.closing(Store(storage or default_storage(), must_exist=True)) as store:
        spec = store.open_search(name)
        plot_search(spec, store.load_trials(), store.load_slices(), store.load_losses(), path)
    console().print(f"The picture is in {path}.", markup=False, soft_wrap=True)
