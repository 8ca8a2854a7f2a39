"""`dike run SCRIPT [ARGS]`: plans and runs a training job."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import JobFailedError
from framework.cli.job_options import JOB_PANELS, job_options, outputs_limit_for
from framework.cli.mesos_options import MESOS_PANELS, mesos_access
from framework.cli.option_groups import with_options
from framework.project.entry_point import hint
from solver.cli.output import Format, console, print_json, say
from solver.cli.planning_options import network_option, plan_settings, read_network_option

if TYPE_CHECKING:
    from framework.cli.job_options import JobOptions
    from framework.scheduler.mesos_access import MesosAccess
    from solver.settings import PlanSettings


PANELS = {
    **JOB_PANELS,
    "The plan": (*JOB_PANELS["The plan"], "network"),
    "Output": ("plan_only", "logs", "output_format"),
    **MESOS_PANELS,
}


@with_options(mesos=mesos_access, job=job_options, planning=plan_settings)
def run(
    *,
    job: JobOptions,
    planning: PlanSettings,
    network: Annotated[Path | None, network_option()] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print the plan and exit; nothing is trained.")
    ] = False,
    mesos: MesosAccess,
    handed_over: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Plans and runs a training job.

    Reads the script's model, waits for offers of Mesos, chooses and places the tasks, and trains.
    """
    started = time.monotonic()
    as_json = output_format is Format.JSON

    def notify(text: str) -> None:
        if not as_json:
            say(console(stderr=True), text)

    with contextlib.ExitStack() as stack:

        def start_mesos() -> str:
            nonlocal mesos
            mesos = stack.enter_context(mesos.starting())
            # With --plan-only no task starts, and a cached profile needs no import either.
            return "" if plan_only else mesos.zygotes

        job = dataclasses.replace(job, outputs_limit=outputs_limit_for(job.outputs_limit, mesos, job.checkpoint_dir))
        planning = dataclasses.replace(planning, network=read_network_option(network))
        request = job.request(
            planning, on_this_machine=mesos.runs_here, notify=notify, handed_over=handed_over, zygotes=start_mesos
        )
        # Imported late, so that Mesos starts and tasks' imports begin first.
        from framework.cli.console import LiveObserver, PlainObserver
        from framework.training.run import run_training
        from solver.cli.tables import print_plan, print_profile

        request = dataclasses.replace(request, mesos=mesos, plan_only=plan_only)
        folder = request.entry.folder if mesos.runs_here else None
        observer: PlainObserver
        if sys.stdout.isatty() and sys.stderr.isatty() and not as_json:
            observer = stack.enter_context(LiveObserver(console(), request.profile, folder))
        else:
            # With --format json, only the result goes to standard output.
            stdout = sys.stderr if as_json else sys.stdout
            output = {"stdout": stdout, "stderr": sys.stderr}
            out = console(stderr=as_json)
            observer = PlainObserver(out, request.profile, output, verbose=not as_json, script_folder=folder)
        result = run_training(request, observer)
    if plan_only and result.plan is not None:
        if as_json:
            print_json(result.plan.to_json())
        else:
            print_profile(console(), request.profile)
            print_plan(console(), result.plan)
        return
    if as_json:
        print_json(result.to_json())
    observer.finished(result, time.monotonic() - started)
    if not result.succeeded:
        error = observer.with_local_paths(result.last_words)
        reason = f"{error}; {result.failure}" if error else result.failure
        advice = hint(error, request.entry, request.environment)
        raise JobFailedError(f"The job failed: {reason}. {advice}".rstrip())
