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
from solver.choices import METHODS, Order
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
"""A file of jobs says these of each job, or nobody can say them of its jobs."""

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
"""How `--help` shows the options."""


def module_option(argument: str) -> Any:
    """How `-m` is declared.

    Args:
        argument: what names the script without it.
    """
    return typer.Option("-m", "--module", help=f"{argument} is the name of a module, as for python -m.")


def refresh_profile_option() -> Any:
    """How `--refresh-profile` is declared."""
    return typer.Option("--refresh-profile", help="Read the script's model again, even if the script is unchanged.")


class LoadProfile(Protocol):
    """Gets the profile of a model; the application passes one as the context's object."""

    def __call__(
        self,
        model: str,
        batch_size: int | None = None,
        /,
        *,
        arguments: Sequence[str] = (),
        is_module: bool = False,
        again: bool = False,
    ) -> ModelProfile:
        """The profile.

        Args:
            model: what was named.
            batch_size: samples per worker and step; None for the model's own.
            arguments: a script's own arguments.
            is_module: whether the model is named as a module, as for `python -m`.
            again: whether it is read even if its profile is kept.
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
    batch_size: Annotated[int | None, typer.Option(min=1, max=10**9, help="Samples per worker and step.")] = None,
    settings: PlanSettings,
    workers: WorkerBounds,
    gpus_per_worker: Annotated[
        int, typer.Option(min=1, help="What if a worker could use N GPUs? One that runs uses 1.")
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
    """Shows which tasks a training job would get on a cluster.

    Shows where they would run and how fast they would be, too. It needs a YAML file that describes it, not the cluster.
    """
    load_profile: LoadProfile = context.obj
    chosen = _mode(compare=compare, what_if=bool(what_if), sweep=sweep is not None, jobs=jobs is not None)
    if cluster is None:
        raise BadInputError("--cluster is missing; name the cluster file (YAML).")
    if method not in METHODS:
        raise BadInputError(f"There is no method '{method}'; there are {', '.join(METHODS)}.")
    if picture is not None:
        if chosen in ("--compare", "--jobs"):
            raise BadInputError(f"--picture draws a plan, a sweep or a what-if, nothing for {chosen}; leave one out.")
        check_picture_path(picture)
    # Late, here and below: who asks for the options does not wait for the planner, nor a plan for other questions.
    from solver.cli.answers import Answers
    from solver.cluster_file import read_cluster

    answers = Answers(method, settings.time_limit_s, picture, output_format)
    # The quick checks of small files come before the slow look at a model.
    machines = read_cluster(cluster)
    settings = dataclasses.replace(settings, network=read_network_option(network))
    if settings.network is not None:
        settings.network.check_names(machines)
    if jobs is not None:
        if model is not None:
            raise BadInputError(f"--jobs names the models itself; leave out '{model}'.")
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
    profile = load_profile(model, batch_size, arguments=arguments or (), is_module=module, again=refresh_profile)
    request = settings.request(
        profile,
        machines,
        min_workers=workers.min_workers,
        max_workers=workers.max_workers,
        gpus_per_worker=gpus_per_worker,
    )
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
    """Refuses options that would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadInputError(f"--{name.replace('_', '-')} does not go with {beside}; leave one out.")


def _mode(**given: bool) -> str:
    """The one special question that was asked; empty for a plain plan."""
    asked = ["--" + name.replace("_", "-") for name, here in given.items() if here]
    if len(asked) > 1:
        raise BadInputError(f"{asked[0]} and {asked[1]} do not go together; give one of them.")
    return asked[0] if asked else ""
