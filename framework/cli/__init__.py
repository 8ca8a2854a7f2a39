"""The `dike` command: one module for each subcommand, one place where errors become exit codes."""

from __future__ import annotations

import atexit
import logging
import os
import sys

import typer

from dike.exceptions import DikeError
from dike.process_end import end_process
from dike.profile import ModelProfile
from framework.background import is_busy
from framework.cli import mesos
from framework.cli.agents import agents
from framework.cli.explain import explain
from framework.cli.job_options import CONTEXT_SETTINGS
from framework.cli.jobs import jobs
from framework.cli.kill import kill
from framework.cli.logs import logs
from framework.cli.plot import plot
from framework.cli.profile import profile
from framework.cli.run import run
from framework.cli.serve import serve_command
from framework.cli.simulate import simulate_policies
from framework.cli.simulate_jobs import simulate_jobs
from framework.cli.slices import slices
from framework.cli.submit import submit
from framework.cli.trials import trials
from framework.cli.tune import tune
from framework.profiling import load_profile
from solver.cli.plan import plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="dike",
    help="Plans and runs deep-learning work on an Apache Mesos cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("run", context_settings=CONTEXT_SETTINGS)(run)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("tune")(tune)
app.command("trials")(trials)
app.command("slices")(slices)
app.command("plot")(plot)
app.command("serve")(serve_command)
app.command("submit", context_settings=CONTEXT_SETTINGS)(submit)
app.command("jobs")(jobs)
app.command("agents")(agents)
app.command("logs")(logs)
app.command("kill")(kill)
app.command("explain")(explain)
app.command("simulate")(simulate_policies)
app.command("simulate-jobs")(simulate_jobs)
app.add_typer(mesos.app, name="mesos")


def main() -> None:
    """Entry point of the `dike` console script. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    _log_to_file_only()
    try:
        _run_command()
    except SystemExit as end:
        if is_busy():
            # All that the command had begun is closed: a plan that nobody wants any more is left behind.
            atexit._run_exitfuncs()
            end_process(int(end.code or 0))
        raise


def _run_command() -> None:
    try:
        app(obj=_profile_to_plan_for)
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _profile_to_plan_for(model: str, batch_size: int | None) -> ModelProfile:
    return load_profile(model, batch_size=batch_size)


def _log_to_file_only() -> None:
    """Keeps log records off the terminal; `$DIKE_LOG` names a file that gets them."""
    path = os.environ.get("DIKE_LOG")
    if path:
        logging.basicConfig(filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    else:
        logging.getLogger().addHandler(logging.NullHandler())
