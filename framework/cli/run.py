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
from framework.cli.mesos_options import mesos_access
from framework.profiling import load_profile
from framework.runner import RunRequest, environment_for_tasks, run_training
from solver import Objective, Plan
from solver.cli.output import Format, console, print_json
from solver.cli.tables import print_plan, print_profile

# What follows SCRIPT belongs to the script, options included.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    master: Annotated[
        str | None,
        typer.Option(
            envvar="DIKE_MASTER", help="HOST:PORT or zk://HOST:PORT/PATH; without it, a private Mesos on this machine."
        ),
    ] = None,
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
    role: Annotated[str, typer.Option(help="Mesos role.")] = "*",
    principal: Annotated[str | None, typer.Option(help="Mesos principal.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="File that holds the principal's secret.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image for the tasks (Mesos containerizer).")] = None,
    agent_python: Annotated[str | None, typer.Option(help="Python on the agents that has Dike installed.")] = None,
    connect_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the master.")] = 10.0,
    agents: Annotated[int, typer.Option(min=1, help="Private Mesos: how many agents.")] = 1,
    resources: Annotated[
        str, typer.Option(help="Private Mesos: what each agent declares, as in 'cpus:4;mem:4096;gpus:1'.")
    ] = "",
    attributes: Annotated[str, typer.Option(help="Private Mesos: attributes of each agent, as in 'rack:r1'.")] = "",
    saved_profile: Annotated[Path | None, typer.Option("--profile", help="A saved profile of the script.")] = None,
    handed_over: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Plans and runs a training job: reads the model, looks at what Mesos offers, places the tasks and trains."""
    if logs not in ("chief", "all"):
        raise BadInputError(f"'{logs}' is not a value of --logs; say chief or all.")
    started = time.monotonic()
    mesos = mesos_access(
        master=master,
        agents=agents,
        resources=resources,
        attributes=attributes,
        connect_timeout=connect_timeout,
        role=role,
        principal=principal,
        secret_file=secret_file,
        image=image,
        agent_python=agent_python,
    )
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
