"""The `plan` command, for `dike plan` and `python -m solver`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.choices import METHODS, Order, Strategy
from solver.cli.option_groups import merged_panels, options_of, panels_of, with_options
from solver.cli.output import Format
from solver.cli.planning_options import PLAN_PANELS, network_option, plan_settings, read_network_option
from solver.drawing.figure_files import check_picture_path
from solver.settings import WorkerBounds

if TYPE_CHECKING:
    from solver.settings import PlanSettings

NOT_FOR_MANY_JOBS = (
    *(
        "method",
        "strategy",
        "rules",
        "sharding",
        "gpus_per_task",
        "task_mem",
        "objective",
        "min_workers",
        "max_workers",
        "gpus_per_worker",
        "batch_size",
        "measurements",
    ),
)
"""Options that a jobs file sets per job, or that do not apply to its jobs."""

PANELS = merged_panels(
    {"Model and cluster": ("module", "refresh_profile", "cluster", "network", "batch_size")},
    panels_of(WorkerBounds),
    PLAN_PANELS,
    {
        "The plan": ("gpus_per_worker", "method"),
        "More questions": ("compare", "what_if", "sweep", "jobs", "order"),
        "Output": ("picture", "output_format"),
    },
)
"""Panels of `--help`."""


def module_option(argument: str) -> Any:
    """Declares `-m`."""
    return typer.Option("-m", "--module", help=f"{argument} is the name of a module, as for python -m.")


def refresh_profile_option() -> Any:
    return typer.Option("--refresh-profile", help="Read the script's model again, even if the script is unchanged.")


class LoadProfile(Protocol):
    """Loads the profile of a model; the application passes one as the context's object."""

    def __call__(
        self,
        model: str,
        batch_size: int | None = None,
        /,
        *,
        arguments: Sequence[str] = (),
        is_module: bool = False,
        again: bool = False,
        strategy: Strategy = "auto",
    ) -> ModelProfile:
        """Loads the profile.

        Args:
            model: the model argument.
            batch_size: samples per step; None for the model's own.
            arguments: a script's own arguments.
            is_module: whether the model is named as a module, as for `python -m`.
            again: whether to bypass the profile cache.
            strategy: the user's; by `allreduce` a script may say that it distributes itself.
        """


@with_options(settings=plan_settings, workers=options_of(WorkerBounds))
def plan(
    *,
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A saved profile (.json); 'dike plan' also takes a script or keras:NAME.", show_default=False
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after '--'.", show_default=False)
    ] = None,
    module: Annotated[bool, module_option("MODEL")] = False,
    refresh_profile: Annotated[bool, refresh_profile_option()] = False,
    cluster: Annotated[Path | None, typer.Option(help="The cluster file (YAML). Required.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Samples per step; with parameter servers, of each worker.")
    ] = None,
    settings: PlanSettings,
    workers: WorkerBounds,
    gpus_per_worker: Annotated[
        int, typer.Option(min=1, help="What if a worker could use N GPUs? At run time it uses 1.")
    ] = 1,
    network: Annotated[Path | None, network_option()] = None,
    method: Annotated[str, typer.Option(help=f"Planning method: {', '.join(METHODS)}.")] = "dike",
    compare: Annotated[bool, typer.Option("--compare", help="Show all planning methods side by side.")] = False,
    what_if: Annotated[
        list[str] | None, typer.Option(help="'add 2 x CLASS', 'remove 1 x CLASS', 'CLASS.FIELD=VALUE'; repeatable.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Make one plan for each value, as in network_gbps=1,10,25.")] = None,
    jobs: Annotated[Path | None, typer.Option(help="Plan all jobs of this file (YAML) together.")] = None,
    order: Annotated[Order, typer.Option(help="With --jobs: plan them by marginal gain, or as given.")] = "gain",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan or the variants into this file (.png or .svg).")
    ] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the tasks that a training job would get on a cluster.

    Also shows where they would run and their predicted speed. Needs only a YAML file that describes the cluster.
    """
    load_profile: LoadProfile = context.obj
    chosen = _mode(compare=compare, what_if=bool(what_if), sweep=sweep is not None, jobs=jobs is not None)
    if cluster is None:
        raise BadInputError("--cluster is missing; name the cluster file (YAML).")
    if method not in METHODS:
        raise BadInputError(f"There is no method '{method}'; there are {', '.join(METHODS)}.")
    if picture is not None:
        if chosen in ("--compare", "--jobs"):
            raise BadInputError(f"--picture draws a plan, a sweep or a what-if, but not {chosen}; leave one out.")
        check_picture_path(picture)
    # Imported late, here and below, so that `--help` does not load the planner, nor a simple plan the other modes.
    from solver.cli.answers import Answers
    from solver.cluster_file import read_cluster
    from solver.strategies import possible_strategies

    answers = Answers(method, settings.plan_timeout_s, picture, output_format)
    # Small files are checked before a model is loaded, which is slow.
    machines = read_cluster(cluster)
    settings = dataclasses.replace(settings, network=read_network_option(network))
    if settings.network is not None:
        settings.network.check_names(machines)
    if jobs is not None:
        if model is not None:
            raise BadInputError(f"--jobs names the models; remove '{model}'.")
        _refuse(context, "--jobs", NOT_FOR_MANY_JOBS)
        from solver.jobs import read_jobs

        many = read_jobs(jobs, functools.partial(load_profile, again=refresh_profile))
        answers.jobs(many, settings.cluster(machines), order)
        return
    _refuse(context, "a single job", ("order",))
    if compare:
        _refuse(context, chosen, ("method",))
    if model is None:
        raise BadInputError("The model is missing; give one, or a file of many jobs with --jobs.")
    profile = load_profile(
        model,
        batch_size,
        arguments=arguments or (),
        is_module=module,
        again=refresh_profile,
        strategy=settings.strategy,
    )
    request = settings.request(
        profile,
        machines,
        min_workers=workers.min_workers,
        max_workers=workers.max_workers,
        gpus_per_worker=gpus_per_worker,
    )
    if compare or (not chosen and settings.strategy != "auto"):
        request = dataclasses.replace(request, shown=possible_strategies(profile) - request.strategies)
    elif chosen:
        request = dataclasses.replace(request, shown=frozenset())
    if chosen and not profile.is_measurable:
        raise BadInputError(f"{chosen} compares speeds. {profile.why_alone}")
    if profile.why_alone and compare:
        raise BadInputError(f"{chosen} compares plans of several tasks. {profile.why_alone}")
    if compare:
        answers.comparison(request)
    elif sweep is not None:
        from solver.variants import sweep as sweep_requests

        answers.variants(sweep_requests(request, sweep), sweep)
    elif what_if:
        from solver.variants import what_if as what_if_requests

        answers.variants(what_if_requests(request, what_if), "What if")
    else:
        answers.plan(request)


def _refuse(context: typer.Context, beside: str, names: tuple[str, ...]) -> None:
    """Rejects options that would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadInputError(f"--{name.replace('_', '-')} cannot be used with {beside}; remove one.")


def _mode(**given: bool) -> str:
    """The special mode requested; empty for a simple plan."""
    asked = ["--" + name.replace("_", "-") for name, here in given.items() if here]
    if len(asked) > 1:
        raise BadInputError(f"{asked[0]} and {asked[1]} cannot be combined; use one of them.")
    return asked[0] if asked else ""
