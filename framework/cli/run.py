"""`dike run SCRIPT [ARGS]`: plan and run a training job."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dike.exceptions import JobFailedError
from framework.cli.console import LiveObserver, PlainObserver
from framework.cli.job_options import JobOptions, with_job_options
from framework.cli.mesos_options import with_mesos_options
from framework.runner import run_training
from framework.session import MesosAccess
from solver.cli.output import Format, console, print_json
from solver.cli.tables import print_plan, print_profile


@with_mesos_options
@with_job_options
def run(
    *,
    job: JobOptions,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Show the plan and stop.")] = False,
    mesos: MesosAccess,
    handed_over: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Plans and runs a training job: reads the model, looks at what Mesos offers, places the tasks and trains."""
    started = time.monotonic()
    request = dataclasses.replace(job.request(handed_over), mesos=mesos, plan_only=plan_only)
    as_json = output_format is Format.JSON
    with contextlib.ExitStack() as stack:
        observer: PlainObserver
        if sys.stdout.isatty() and sys.stderr.isatty() and not as_json:
            observer = stack.enter_context(LiveObserver(console(), request.profile))
        else:
            # With --format json standard output is the result's alone.
            stdout = sys.stderr if as_json else sys.stdout
            output: dict[str, Any] = {"stdout": stdout, "stderr": sys.stderr}
            observer = PlainObserver(console(stderr=as_json), request.profile, output, verbose=not as_json)
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
        raise JobFailedError(f"The job failed: {result.failure}.")
