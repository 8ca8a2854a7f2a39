"""The commands `python -m benchmarks simulate` and `simulate-jobs`."""

from __future__ import annotations

import typer

from benchmarks.simulation import simulate, simulate_jobs
from solver.cli.help import MAX_WIDTH, with_panels

NAMES = ("simulate", "simulate-jobs")
PROGRAM = "python -m benchmarks"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": MAX_WIDTH},
    help="Plays policies and schedulers in virtual time.",
)
app.command(NAMES[0], cls=with_panels(simulate.PANELS))(simulate.simulate_policies)
app.command(NAMES[1], cls=with_panels(simulate_jobs.PANELS))(simulate_jobs.simulate_jobs)
