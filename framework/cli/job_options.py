"""The options of a training job, for `dike run` and `dike submit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError
from framework.mesos.containers import parse_volumes
from framework.project.entry_point import EntryPoint, environment_for_tasks, find_entry_point
from framework.scheduler.constraints import parse_constraints
from solver.choices import Objective
from solver.cli.plan import module_option
from solver.text_files import read_text

if TYPE_CHECKING:
    from framework.training.run import RunRequest
    from framework.training.spec import Stragglers


@dataclass(frozen=True)
class JobOptions:
    """What was said of a training job; its script has not been looked at yet.

    Attributes:
        script, is_module, arguments: the script, or the name of a module, and its own arguments.
        plan_file: a plan to follow; None to make one.
        max_workers, objective, checkpoint_dir, checkpoint_interval_s, max_restarts, stream_all_logs, elastic,
            resize_interval_s, stragglers, constraints, environment, volumes: see `RunRequest`.
        batch_size: what to plan for; None for the script's own.
        outputs_limit: how much of what the script writes is brought back, as it was typed; None for the default.
        saved_profile: a profile of the script; None to make one.
    """

    script: Path
    is_module: bool
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
    outputs_limit: str | None
    volumes: tuple[str, ...]
    saved_profile: Path | None

    def request(
        self, *, on_this_machine: bool, handed_over: Path | None = None, zygotes: Callable[[], str] = lambda: ""
    ) -> RunRequest:
        """Reads the plan, packs what travels, gets the script's profile, and puts all of it together.

        Args:
            on_this_machine: whether the script's processes run on this machine.
            handed_over: a profile that was written for us alone; it is removed.
            zygotes: called when the script is known; returns the socket of a zygote server, or nothing.

        Raises:
            BadInputError: if something cannot be used.
        """
        from framework.project.profiling import Forks, load_profile, profile_of_job

        plan_text = None if self.plan_file is None else read_text(self.plan_file, "plan")
        entry = self._entry_point()
        environment = {
            **environment_for_tasks(entry, on_this_machine=on_this_machine),
            **outputs_environment(self.outputs_limit),
            **entry.environment,
            **self.environment,
        }
        server = zygotes()
        forks = Forks.of_job(server, entry, environment) if server else None
        from dike.checkpoints import fingerprint
        from framework.project import bundle
        from framework.training.run import RunRequest
        from solver import Plan

        plan = None if plan_text is None else Plan.loads(plan_text)
        archive = bundle.pack(entry.script, entry.folder)
        saved = handed_over or self.saved_profile
        if saved is None:
            profile = profile_of_job(
                entry, archive, self.arguments, environment, self.batch_size, self.checkpoint_dir, forks
            )
        else:
            profile = load_profile(str(saved), (), self.batch_size)
        if handed_over is not None:
            handed_over.unlink(missing_ok=True)
        if plan is not None and (plan.profile.api != profile.api or fingerprint(plan.profile) != fingerprint(profile)):
            raise BadInputError(
                f"The plan {self.plan_file} was made for another model than {self.script}'s; make one with --plan-only."
            )
        return RunRequest(
            entry=entry,
            archive=archive,
            arguments=self.arguments,
            profile=profile,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_interval_s=self.checkpoint_interval_s,
            max_restarts=self.max_restarts,
            objective=self.objective,
            max_workers=self.max_workers,
            plan=plan,
            stream_all_logs=self.stream_all_logs,
            environment=environment,
            elastic=self.elastic,
            resize_interval_s=self.resize_interval_s,
            stragglers=self.stragglers,
            constraints=self.constraints,
            volumes=self.volumes,
        )

    def _entry_point(self) -> EntryPoint:
        name = str(self.script)
        if self.script.suffix == ".json" or name.startswith("keras:"):
            raise BadInputError(f"'{name}' is not a training script; use 'dike plan {name}' to plan without running.")
        entry = find_entry_point(name, is_module=self.is_module)
        read_text(entry.script, "training script")
        return entry


JOB_PANELS = {
    "The script": ("module", "env", "outputs_limit", "batch_size", "saved_profile"),
    "The plan": ("plan", "max_workers", "objective", "constraint", "volume"),
    "Change the size while it trains": ("elastic", "resize_interval", "stragglers"),
    "Checkpoints and restarts": ("checkpoint_dir", "checkpoint_interval", "max_restarts"),
}
"""How `--help` shows the options of a training job."""


def constraint_option() -> Any:
    """How `--constraint` is declared."""
    return typer.Option(
        metavar="FIELD:OPERATOR:VALUE", help="Which agents to use, as in rack:IN:r1,r2 or hostname:LIKE:gpu-.*."
    )


def env_option() -> Any:
    """How `--env` is declared."""
    return typer.Option(
        metavar="NAME[=VALUE]", help="Set a variable for the script, or pass this shell's value on; repeatable."
    )


def outputs_limit_option() -> Any:
    """How `--outputs-limit` is declared."""
    return typer.Option(
        metavar="SIZE",
        help="Most that is brought back of the files the script writes, such as 500M, 20G or none.",
        show_default="1G",
    )


def volume_option() -> Any:
    """How `--volume` is declared."""
    return typer.Option(
        metavar="HOST[:CONTAINER][:ro]",
        help="Mount a folder of the agents into the tasks' container; a service allows the same path, /mnt and /data.",
    )


def job_options(
    *,
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    module: Annotated[bool, module_option("SCRIPT")] = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Follow this plan (JSON) instead of making one.")] = None,
    max_workers: Annotated[int | None, typer.Option(min=1, help="Use at most N workers.")] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to plan for: speed, or the paper's Eq. 1 (traffic).")
    ] = "throughput",
    constraint: Annotated[list[str] | None, constraint_option()] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Folder for checkpoints, and to resume from; the same path on all agents.")
    ] = None,
    checkpoint_interval: Annotated[float, typer.Option(min=1, help="Seconds between checkpoints.")] = 60.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts after failures, counted anew at each new checkpoint.")
    ] = 3,
    logs: Annotated[str, typer.Option(help="Whose output to show: chief or all.")] = "chief",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Plan for this batch size.", show_default="the script's own")
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Change the number of workers between MIN and MAX while it trains."),
    ] = None,
    resize_interval: Annotated[
        float, typer.Option(min=1, help="Least time between two changes of size, in seconds.")
    ] = 60.0,
    stragglers: Annotated[
        str | None, typer.Option(help="Workers of half the usual speed: replace (elastic only), report or ignore.")
    ] = None,
    env: Annotated[list[str] | None, env_option()] = None,
    outputs_limit: Annotated[str | None, outputs_limit_option()] = None,
    volume: Annotated[list[str] | None, volume_option()] = None,
    saved_profile: Annotated[Path | None, typer.Option("--profile", help="A saved profile of the script.")] = None,
) -> JobOptions:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    from framework.training.elastic.options import read_bounds, read_stragglers

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
        is_module=module,
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
        outputs_limit=outputs_limit,
        volumes=tuple(volume or ()),
        saved_profile=saved_profile,
    )


def variables(texts: Iterable[str]) -> dict[str, str]:
    """What `--env` was given.

    Raises:
        BadInputError: if one is no variable.
    """
    return dict(map(_variable, texts))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise BadInputError(f"'{text}' is not a value of --env; write NAME=VALUE, or NAME for its value here.")
    if not equals and name not in os.environ:
        raise BadInputError(f"--env {name} takes the value of {name} here, which is not set; write {name}=VALUE.")
    return name, value if equals else os.environ[name]


def outputs_environment(limit: str | None) -> dict[str, str]:
    """The variable by which executors know the limit of `--outputs-limit`; none for the default.

    Raises:
        BadInputError: if it is no size.
    """
    from executor.outputs import LIMIT_VARIABLE, read_limit

    if limit is None:
        return {}
    try:
        read_limit(limit)
    except ValueError as error:
        raise BadInputError(f"'{limit}' is not a value of --outputs-limit: {error}.") from None
    return {LIMIT_VARIABLE: limit}
