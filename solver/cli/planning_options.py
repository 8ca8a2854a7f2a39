"""The options that say how to plan, for `dike plan`, `dike run` and `dike submit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver.cli.option_groups import merged_panels, options_of, panels_of, with_options
from solver.settings import PlanOptions, PlanSettings

if TYPE_CHECKING:
    from solver.network import Network


def network_option() -> Any:
    """How `--network` is declared."""
    return typer.Option(
        metavar="FILE",
        help="Speeds of the network links (YAML), as written by dike agents measure.",
        show_default=False,
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


@with_options(options=options_of(PlanOptions))
def plan_settings(
    *,
    options: PlanOptions,
    measurements: Annotated[
        Path | None, typer.Option(help="Measured step times (CSV), to calibrate the prediction with.")
    ] = None,
) -> PlanSettings:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if one of them cannot be used.
    """
    options.check_rules()
    rows: tuple[Any, ...] = ()
    if measurements is not None:
        from solver.calibration import read_measurements

        rows = read_measurements(measurements)
    return PlanSettings.of(options, rows)


PLAN_PANELS = merged_panels(panels_of(PlanOptions), {"The plan": ("measurements",)})
"""How `--help` shows the options of `plan_settings`."""
