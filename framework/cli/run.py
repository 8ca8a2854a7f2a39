"""`dike run SCRIPT [ARGS]`: plan and run a training job."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dike.checkpoints import fingerprint
from dike.exceptions import BadInputError, JobFailedError
from dike.profile import ModelProfile
from framework.cli.console import LiveObserver, PlainObserver
from framework.cli.mesos_options import with_mesos_options
from framework.elastic.options import read_bounds, read_stragglers
from framework.profiling import load_profile
from framework.runner import RunRequest, environment_for_tasks, run_training
from framework.session import MesosAccess
from solver import Objective, Plan
from solver.cli.output import Format, console, print_json
from solver.cli.tables import print_plan, print_profile

# What follows SCRIPT belongs to the script, options included.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@with_mesos_options
def run(
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    plan: Annotated[Path | None, typer.Option(help="Follow this plan (JSON) instead of making one.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Show the plan and stop.")] = False,
    max_workers: Annotated[int | None, typer.Option(min=1, help="At most this many workers.")] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to plan for: speed, or the paper's Eq. 1 (traffic).")
    ] = "throughput",
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Where checkpoints go and are resumed from; the same path on all agents.")
    ] = None,
    checkpoint_interval: Annotated[float, typer.Option(min=1, help="Seconds between checkpoints.")] = 60.0,
    max_restarts: Annotated[int, typer.Option(min=0, help="How many failures to survive.")] = 3,
    logs: Annotated[str, typer.Option(help="Whose output to show: chief or all.")] = "chief",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Plan for this batch, not the script's.")] = None,
    elastic: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Change the number of workers between these as it pays.")
    ] = None,
    resize_interval: Annotated[float, typer.Option(min=1, help="Least seconds between changes of size.")] = 60.0,
    stragglers: Annotated[
        str | None, typer.Option(help="Workers of half the usual speed: replace (elastic only), report or ignore.")
    ] = None,
    *,
    mesos: MesosAccess,
    saved_profile: Annotated[Path | None, typer.Option("--profile", help="A saved profile of the script.")] = None,
    handed_over: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Plans and runs a training job: reads the model, looks at what Mesos offers, places the tasks and trains."""
    if logs not in ("chief", "all"):
        raise BadInputError(f"'{logs}' is not a value of --logs; say chief or all.")
    bounds = read_bounds(elastic, max_workers=max_workers, has_plan=plan is not None)
    about_stragglers = read_stragglers(stragglers, is_elastic=bounds is not None)
    started = time.monotonic()
    fixed_plan = _read_plan(plan) if plan is not None else None
    profile = _profile(script, arguments or [], batch_size, handed_over or saved_profile)
    if handed_over is not None:
        # `DIKE_MASTER=... python train.py` has written it for us alone.
        handed_over.unlink(missing_ok=True)
    if fixed_plan is not None and (
        fixed_plan.profile.api != profile.api or fingerprint(fixed_plan.profile) != fingerprint(profile)
    ):
        raise BadInputError(f"The plan {plan} was made for another model than {script}'s; make one with --plan-only.")
    request = RunRequest(
        script=script,
        arguments=tuple(arguments or ()),
        profile=profile,
        mesos=mesos,
        checkpoint_dir=checkpoint_dir,
        checkpoint_interval_s=checkpoint_interval,
        max_restarts=max_restarts,
        objective=objective,
        max_workers=max_workers,
        plan=fixed_plan,
        plan_only=plan_only,
        stream_all_logs=logs == "all",
        environment=environment_for_tasks(),
        elastic=bounds,
        resize_interval_s=resize_interval,
        stragglers=about_stragglers,
    )
    as_json = output_format is Format.JSON
    with contextlib.ExitStack() as stack:
        observer: PlainObserver
        if sys.stdout.isatty() and sys.stderr.isatty() and not as_json:
            observer = stack.enter_context(LiveObserver(console(), profile))
        else:
            # With --format json standard output is the result's alone.
            stdout = sys.stderr if as_json else sys.stdout
            output: dict[str, Any] = {"stdout": stdout, "stderr": sys.stderr}
            observer = PlainObserver(console(stderr=as_json), profile, output, verbose=not as_json)
        result = run_training(request, observer)
    if plan_only and result.plan is not None:
        if as_json:
            print_json(result.plan.to_json())
        else:
            print_profile(console(), profile)
            print_plan(console(), result.plan)
        return
    if as_json:
        print_json(result.to_json())
    observer.finished(result, time.monotonic() - started)
    if not result.succeeded:
        raise JobFailedError(f"The job failed: {result.failure}.")


def _profile(script: Path, arguments: list[str], batch_size: int | None, saved: Path | None) -> ModelProfile:
    if script.suffix == ".json" or str(script).startswith("keras:"):
        raise BadInputError(f"'{script}' is not a training script; use 'dike plan {script}' to plan without running.")
    if saved is None:
        return load_profile(str(script), arguments, batch_size)
    if not script.is_file():
        raise BadInputError(f"There is no script {script}.")
    return load_profile(str(saved), (), batch_size)


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The plan {path} is not text.") from error
