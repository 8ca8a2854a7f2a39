"""Planning options of `dike plan`, `dike run` and `dike submit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver.cli.option_groups import merged_panels, options_of, panels_of, with_options
from solver.settings import PlanOptions, PlanSettings

if TYPE_CHECKING:
    from solver.network import Network


def network_option() -> Any:
    return typer.Option(
        metavar="FILE",
        help="Speeds of the network links (YAML), as written by dike agents measure.",
        show_default=False,
    )


def read_network_option(path: Path | None) -> Network | None:
    """Reads the file given by `--network`.

    Raises:
        BadInputError: if the file is unreadable or invalid.
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
    """Validates the options and combines them.

    Raises:
        BadInputError: if one of them is invalid.
    """
    options.check_rules()
    rows: tuple[Any, ...] = ()
    if measurements is not None:
        from solver.calibration import read_measurements

        rows = read_measurements(measurements)
    return PlanSettings.of(options, rows)


PLAN_PANELS = merged_panels(panels_of(PlanOptions), {"The plan": ("measurements",)})
"""Panels of `--help` with the options of `plan_settings`."""
