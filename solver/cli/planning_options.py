"""The options that say how to plan, for `dike plan`, `dike run` and `dike submit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError
from solver.choices import MOST_TASK_MEM_MIB, RULES, Objective, Sharding

if TYPE_CHECKING:
    from solver.network import Network
    from solver.settings import PlanSettings

PLANNING = ("objective", "rules", "sharding", "gpus_per_task", "task_mem", "time_limit", "measurements")
"""Names of the parameters of `plan_settings`."""


def min_workers_option() -> Any:
    """How `--min-workers` is declared."""
    return typer.Option(
        min=1, help="Use parameter servers and at least N workers.", show_default="one task alone if that is faster"
    )


def network_option() -> Any:
    """How `--network` is declared."""
    return typer.Option(
        metavar="FILE", help="What is known of the links (YAML), as dike agents measure writes it.", show_default=False
    )


def read_network_option(path: Path | None) -> Network | None:
    """What `--network` was given.

    Raises:
        BadInputError: if the file cannot be read or something in it is wrong.
    """
    if path is None:
        return None
    from solver.cluster_file import read_network

    return read_network(path)


def plan_settings(
    *,
    objective: Annotated[
        Objective, typer.Option(help="What to plan for: speed, or the paper's Eq. 1 (traffic).")
    ] = "throughput",
    rules: Annotated[
        str,
        typer.Option(
            help=f"Rules that prune the options: default, all, none, paper, -NAME, or some of {', '.join(RULES)}."
        ),
    ] = "default",
    sharding: Annotated[
        Sharding, typer.Option(help="How variables are distributed over the parameter servers.")
    ] = "greedy",
    gpus_per_task: Annotated[
        int, typer.Option(min=1, help="One plain task may have N GPUs: they share the batches of Keras' fit.")
    ] = 1,
    task_mem: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_TASK_MEM_MIB, help="Memory of each task, MiB: at least.", show_default="what its role needs"
        ),
    ] = 0,
    time_limit: Annotated[
        float | None, typer.Option(help="Plan for at most X seconds.", show_default="30, kept roughly")
    ] = None,
    measurements: Annotated[
        Path | None, typer.Option(help="Measured step times (CSV), to calibrate the prediction with.")
    ] = None,
) -> PlanSettings:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if one of them cannot be used.
    """
    from solver.settings import PlanSettings

    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise BadInputError(f"--time-limit is {time_limit:g} s; it must be more than 0.")
    rows: tuple[Any, ...] = ()
    if measurements is not None:
        from solver.calibration import read_measurements

        rows = read_measurements(measurements)
    settings = PlanSettings(
        objective, rules, sharding, time_limit, rows, gpus_per_task=gpus_per_task, task_mem_mb=task_mem
    )
    settings.check()
    return settings
