"""The options of a training job, for `dike run` and `dike submit`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dike.checkpoints import fingerprint
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.cli.option_groups import with_options
from framework.containers import parse_volumes
from framework.elastic.options import read_bounds, read_stragglers
from framework.job import Stragglers
from framework.profiling import load_profile
from framework.runner import RunRequest, environment_for_tasks
from framework.service.constraints import parse_constraints
from solver import Objective, Plan
from solver.text_files import read_text

# What follows SCRIPT belongs to the script, options included.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@dataclass(frozen=True)
class JobOptions:
    """What was said of a training job; its script has not been looked at yet.

    Attributes:
        script, arguments: the script and its own arguments.
        plan_file: a plan to follow; None to make one.
        max_workers, objective, checkpoint_dir, checkpoint_interval_s, max_restarts, stream_all_logs, elastic,
            resize_interval_s, stragglers, constraints, environment, volumes: see `RunRequest`.
        batch_size: what to plan for; None for the script's own.
        saved_profile: a profile of the script; None to make one.
    """

    script: Path
    arguments: tuple[str, ...]
    plan_file: Path | None
    max_workers: int | None
    objective: Objective
    checkpoint_dir: str | None
    checkpoint_interval_s: float
    max_restarts: int
    stream_all_logs: bool
    batch_size: int | None
    elastic: tuple[int, int] | None
    resize_interval_s: float
    stragglers: Stragglers
    constraints: tuple[str, ...]
    environment: dict[str, str]
    volumes: tuple[str, ...]
    saved_profile: Path | None

    def request(self, handed_over: Path | None = None) -> RunRequest:
        """Reads the plan, gets the script's profile, and puts all of it together.

        Args:
            handed_over: a profile that was written for us alone; it is removed.

        Raises:
            BadInputError: if something cannot be used.
        """
        plan = None if self.plan_file is None else Plan.loads(read_text(self.plan_file, "plan"))
        profile = _profile(self.script, list(self.arguments), self.batch_size, handed_over or self.saved_profile)
        if handed_over is not None:
            handed_over.unlink(missing_ok=True)
        if plan is not None and (plan.profile.api != profile.api or fingerprint(plan.profile) != fingerprint(profile)):
            raise BadInputError(
                f"The plan {self.plan_file} was made for another model than {self.script}'s; make one with --plan-only."
            )
        return RunRequest(
            script=self.script,
            arguments=self.arguments,
            profile=profile,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_interval_s=self.checkpoint_interval_s,
            max_restarts=self.max_restarts,
            objective=self.objective,
            max_workers=self.max_workers,
            plan=plan,
            stream_all_logs=self.stream_all_logs,
            environment={**environment_for_tasks(), **self.environment},
            elastic=self.elastic,
            resize_interval_s=self.resize_interval_s,
            stragglers=self.stragglers,
            constraints=self.constraints,
            volumes=self.volumes,
        )


def constraint_option() -> Any:
    """How `--constraint` is declared."""
    return typer.Option(
        metavar="FIELD:OPERATOR:VALUE", help="Which agents to use, as in rack:IN:r1,r2 or hostname:LIKE:gpu-.*."
    )


def env_option() -> Any:
    """How `--env` is declared."""
    return typer.Option(metavar="NAME=VALUE", help="A variable for the script; repeatable.")


def volume_option() -> Any:
    """How `--volume` is declared."""
    return typer.Option(
        metavar="HOST[:CONTAINER][:ro]",
        help="A folder of the agents to mount, where tasks run in an image; by a service there or below /mnt, /data.",
    )


def job_options(
    *,
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    plan: Annotated[Path | None, typer.Option(help="Follow this plan (JSON) instead of making one.")] = None,
    max_workers: Annotated[int | None, typer.Option(min=1, help="At most this many workers.")] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to plan for: speed, or the paper's Eq. 1 (traffic).")
    ] = "throughput",
    constraint: Annotated[list[str] | None, constraint_option()] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Where checkpoints go and are resumed from; the same path on all agents.")
    ] = None,
    checkpoint_interval: Annotated[float, typer.Option(min=1, help="Seconds between checkpoints.")] = 60.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How many failures to survive without a newer checkpoint in between.")
    ] = 3,
    logs: Annotated[str, typer.Option(help="Whose output to show: chief or all.")] = "chief",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Plan for this batch, not the script's.")] = None,
    elastic: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Change the number of workers between these as it pays.")
    ] = None,
    resize_interval: Annotated[float, typer.Option(min=1, help="Least seconds between changes of size.")] = 60.0,
    stragglers: Annotated[
        str | None, typer.Option(help="Workers of half the usual speed: replace (elastic only), report or ignore.")
    ] = None,
    env: Annotated[list[str] | None, env_option()] = None,
    volume: Annotated[list[str] | None, volume_option()] = None,
    saved_profile: Annotated[Path | None, typer.Option("--profile", help="A saved profile of the script.")] = None,
) -> JobOptions:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    if logs not in ("chief", "all"):
        raise BadInputError(f"'{logs}' is not a value of --logs; say chief or all.")
    if str(script).startswith("-"):
        # Whatever is not an option of ours belongs to the script, and this stands where the script should.
        option = str(script).partition("=")[0]
        raise BadInputError(f"There is no option {option}; see dike {context.info_name} --help.")
    parse_constraints(constraint or ())
    parse_volumes(volume or ())
    bounds = read_bounds(elastic, max_workers=max_workers, has_plan=plan is not None)
    return JobOptions(
        script=script,
        arguments=tuple(arguments or ()),
        plan_file=plan,
        max_workers=max_workers,
        objective=objective,
        checkpoint_dir=checkpoint_dir,
        checkpoint_interval_s=checkpoint_interval,
        max_restarts=max_restarts,
        stream_all_logs=logs == "all",
        batch_size=batch_size,
        elastic=bounds,
        resize_interval_s=resize_interval,
        stragglers=read_stragglers(stragglers, is_elastic=bounds is not None),
        constraints=tuple(constraint or ()),
        environment=variables(env or ()),
        volumes=tuple(volume or ()),
        saved_profile=saved_profile,
    )


with_job_options = with_options("job", job_options)
"""Gives a command these options in the place of its parameter `job`."""


def variables(texts: Iterable[str]) -> dict[str, str]:
    """What `--env` was given.

    Raises:
        BadInputError: if one is no variable.
    """
    return dict(map(_variable, texts))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise BadInputError(f"'{text}' is not a value of --env; write NAME=VALUE.")
    return name, value


def _profile(script: Path, arguments: list[str], batch_size: int | None, saved: Path | None) -> ModelProfile:
    if script.suffix == ".json" or str(script).startswith("keras:"):
        raise BadInputError(f"'{script}' is not a training script; use 'dike plan {script}' to plan without running.")
    if saved is None:
        return load_profile(str(script), arguments, batch_size)
    if not script.is_file():
        raise BadInputError(f"There is no script {script}.")
    return load_profile(str(saved), (), batch_size)
