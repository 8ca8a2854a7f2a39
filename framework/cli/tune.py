"""`dike tune SCRIPT`: runs a hyper-parameter search."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.described import described_fields, values_of
from dike.exceptions import BadInputError, JobFailedError
from framework.cli.job_names import find_job, with_job_ids
from framework.cli.job_options import outputs_environment, outputs_limit_for, outputs_limit_option
from framework.cli.mesos_options import MESOS_OPTIONS, MESOS_PANELS, access_from_options, mesos_access
from framework.cli.option_groups import is_given, with_options
from framework.cli.search_options import (
    SETTABLE_ON_RESUME,
    FunctionCall,
    UnresolvedOptions,
    changed_spec,
    check_function,
    function_call,
    given_space,
    run_options,
    search_spec,
    stored_function,
)
from framework.cli.service_options import SERVICE_OPTIONS, SERVICE_PANELS, ServiceAccess, service_access
from framework.cli.trials import FormatOption, StorageOption, shown_in_browser
from framework.mesos.containers import needs_mount, parse_volumes
from framework.policies.trials.interface import PolicySettings
from framework.scheduler.queue_options import QueueOptions
from framework.scheduler.task_options import TaskOptions, task_values
from framework.search.records import SearchOptions
from solver.cli.option_groups import merged_panels, options_of, panels_of
from solver.cli.output import Format, console, print_json
from solver.cli.plan import module_option

if TYPE_CHECKING:
    from framework.cli.following import FollowMode
    from framework.scheduler.mesos_access import MesosAccess
    from framework.search.records import SearchOutcome, SearchSpec
    from framework.search.run import SearchRequest

EXTENDING = ("trials", "param", "space")
"""Options by which `--resume` gives a search more to try."""
ALLOWED_ON_RESUME = {
    *(
        "resume",
        "storage",
        "page",
        "logdir",
        "mlflow",
        "on_end",
        "constraint",
        "volume",
        "for_notebook",
        "output_format",
    ),
    *EXTENDING,
    *MESOS_OPTIONS,
    *SETTABLE_ON_RESUME,
}
"""Options that `--resume` accepts: where and how the search runs, and how it is printed."""
ALLOWED_ON_DETACHED_RESUME = {
    *("resume", "detach", "follow", "wait", "constraint", "output_format"),
    *EXTENDING,
    *SERVICE_OPTIONS,
}
NOT_WITH_DETACH = (
    *("storage", "logdir", "mlflow", "on_end", "page", "function_call", "sampler_object", "space_function"),
    *sorted(MESOS_OPTIONS),
)

QUEUE_OPTIONS = tuple(field.parameter for field in described_fields(QueueOptions).values())

PANELS = merged_panels(
    {"The script": ("module", "outputs_limit")},
    panels_of(UnresolvedOptions, SearchOptions, PolicySettings, TaskOptions),
    {
        "The search": ("resume", "storage", "page", "logdir", "mlflow", "on_end", "output_format"),
        "On a service": ("detach", "wait", "follow", *SERVICE_PANELS["Which service"]),
        **panels_of(QueueOptions),
    },
    MESOS_PANELS,
)


@with_options(
    unresolved=options_of(UnresolvedOptions),
    options=options_of(SearchOptions),
    settings=options_of(PolicySettings),
    tasks=options_of(TaskOptions),
    call=function_call,
    access=service_access,
    queue=options_of(QueueOptions),
    mesos=mesos_access,
)
def tune(
    *,
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="The training script.", show_default=False)] = None,
    module: Annotated[bool, module_option("SCRIPT")] = False,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments that every trial passes to the script, after '--'.", show_default=False),
    ] = None,
    unresolved: UnresolvedOptions,
    options: SearchOptions,
    settings: PolicySettings,
    tasks: TaskOptions,
    outputs_limit: Annotated[str | None, outputs_limit_option()] = None,
    resume: Annotated[str | None, typer.Option(help="Resume the search of this name instead of starting one.")] = None,
    storage: StorageOption = None,
    logdir: Annotated[Path | None, typer.Option(help="Folder for TensorBoard logs with HParams.")] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(help="MLflow server or database to send trials to, such as http://HOST:5000.", metavar="URI"),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Show the search in a browser while it runs; later: dike trials NAME --page.")
    ] = False,
    on_end: Annotated[
        str | None,
        typer.Option(
            help="What to do when the search ends: a command for the shell, which finds the result as JSON in its "
            "input, or a URL to which it is posted.",
            metavar="COMMAND|URL",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit the search to a service (dike serve) and return.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="With --detach: wait until the search ends.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --detach: wait, and show the last output of failed trials.")
    ] = False,
    call: FunctionCall,
    access: ServiceAccess,
    queue: QueueOptions,
    mesos: MesosAccess,
    output_format: FormatOption = Format.TABLE,
) -> None:
    """Searches hyper-parameters.

    Trials share the slots in time slices: after each quantum, the policy chooses which trials run next.
    """
    from framework.search.database import default_storage

    as_json = output_format is Format.JSON
    url = storage or default_storage()
    _check_service_options(context, detach=detach, waits=wait or follow)
    if resume is not None:
        _check_resume_options(context, resume, ALLOWED_ON_DETACHED_RESUME if detach else ALLOWED_ON_RESUME)
    follow_mode = _follow_mode(wait, follow, as_json=as_json) if detach else None
    if follow_mode is not None and resume is not None:
        from framework.service.requests import Resumption

        with access.client() as client:
            resumption = Resumption(
                constraints=tasks.constraints or None, trials=unresolved.trials, space=given_space(unresolved)
            )
            submitted = client.resume(find_job(client, resume).id, resumption)
            follow_mode.after(client, submitted, resumed=True)
        return
    with stored_function(call.function, unresolved.name, url) as kept:
        if kept is not None:
            script, unresolved = kept[0], dataclasses.replace(unresolved, name=kept[1])
        if resume is None:
            remembered = run_options(context, {})
            if follow_mode is None:
                outputs_limit = outputs_limit_for(outputs_limit, mesos, unresolved.checkpoint_dir)
            spec = search_spec(
                script,
                tuple(arguments or ()),
                unresolved,
                options,
                settings,
                call,
                is_module=module,
                on_this_machine=mesos.runs_here if follow_mode is None else _runs_here(access),
                environment={**outputs_environment(outputs_limit), **tasks.environment},
            )
        else:
            spec, remembered = _stored_search(context, resume, url, options, unresolved)
            mesos, tasks = access_from_options(remembered), task_values(remembered)
            logdir = Path(remembered["logdir"]) if "logdir" in remembered else None
            mlflow = remembered.get("mlflow")
        if follow_mode is not None:
            if unresolved.checkpoint_dir is None:
                spec = dataclasses.replace(spec, checkpoint_dir="")
            _submit(spec, tasks, queue, access, follow_mode)
            return
        chosen_here = resume is None and unresolved.checkpoint_dir is None
        if mesos.image is not None and chosen_here and needs_mount(spec.checkpoint_dir, parse_volumes(tasks.volumes)):
            raise BadInputError(
                "--image needs --checkpoint-dir, a folder that all agents share: trials leave their containers and "
                "resume in others."
            )
        with contextlib.ExitStack() as stack:
            mesos = stack.enter_context(mesos.starting())
            if mesos.zygotes:
                _import_for_trials(spec, mesos.zygotes)
            # Imported late, so that Mesos starts and trials' imports begin first.
            from framework.search.run import SearchRequest

            if page:
                stack.enter_context(shown_in_browser(url, spec.name))
            constraints, volumes = tasks.constraints, tasks.volumes
            request = SearchRequest(
                spec, url, resume is not None, mesos, logdir, mlflow or "", constraints, volumes, remembered
            )
            result = _run(stack, request, as_json=as_json, in_notebook=call.for_notebook)
        if on_end:
            from framework.cli.search_report import announce_end

            announce_end(on_end, result)
        _report(result, spec, url, as_json=as_json)


def _check_service_options(context: typer.Context, *, detach: bool, waits: bool) -> None:
    """Raises `BadInputError` for options of a service without `--detach`, and for local ones with it."""
    if detach:
        if given := [option for option in NOT_WITH_DETACH if is_given(context, option)]:
            raise BadInputError(
                "With --detach the service chooses where the search runs and is stored; leave out "
                f"{', '.join(map(_option_name, given))}."
            )
    elif given := [option for option in (*sorted(SERVICE_OPTIONS), *QUEUE_OPTIONS) if is_given(context, option)]:
        raise BadInputError(
            f"{_option_name(given[0])} is for a search that a service runs; add --detach, or leave it out."
        )
    elif waits:
        raise BadInputError("--wait and --follow are for a search that a service runs (--detach); leave them out.")


def _check_resume_options(context: typer.Context, name: str, changeable: set[str]) -> None:
    given = [option for option in context.params if is_given(context, option) and option not in changeable]
    if given:
        raise BadInputError(
            f"--resume {name} continues the search with its first options; leave out "
            f"{', '.join(map(_option_name, given))}."
        )


def _follow_mode(wait: bool, follow: bool, *, as_json: bool) -> FollowMode:
    # Imported late: its HTTP client is needed with --detach only.
    from framework.cli.following import FollowMode

    return FollowMode(wait, follow, as_json)


def _stored_search(
    context: typer.Context, name: str, url: str, options: SearchOptions, unresolved: UnresolvedOptions
) -> tuple[SearchSpec, dict[str, Any]]:
    """Loads a search with its changed options, and the options of where to run it."""
    from framework.search.store import Store

    with contextlib.closing(Store(url, must_exist=True)) as store:
        spec = changed_spec(context, store.open_search(name), options, unresolved)
        check_function(spec)
        return spec, run_options(context, store.options)


def _run(stack: contextlib.ExitStack, request: SearchRequest, *, as_json: bool, in_notebook: bool) -> SearchOutcome:
    from framework.cli.search_view import LiveSearchView, NotebookSearchView, PlainSearchView
    from framework.search.run import run_search

    out = console(stderr=as_json)
    view = PlainSearchView(out, request.spec)
    if in_notebook:
        view = NotebookSearchView(out, request.spec)
    elif sys.stdout.isatty() and not as_json:
        view = stack.enter_context(LiveSearchView(out, request.spec))
    return run_search(request, view)


def _report(result: SearchOutcome, spec: SearchSpec, url: str, *, as_json: bool) -> None:
    """Prints the result.

    Raises:
        JobFailedError: if the search has ended early, or no trial has succeeded.
    """
    from framework.cli.search_report import report

    if as_json:
        print_json(result.to_json())
    else:
        report(console(), result, spec, url)
    if result.failure:
        raise JobFailedError(
            f"The search has ended early: {result.failure}; dike tune --resume {spec.name} resumes it."
        )
    if result.best is None:
        raise JobFailedError(
            f"No trial of the search {spec.name} has succeeded; dike trials {spec.name} shows why."
            + _parameter_hint(spec, result)
        )


def _parameter_hint(spec: SearchSpec, result: SearchOutcome) -> str:
    """Returns advice about the parameters if no trial has done a step: the script may have refused them."""
    from framework.project.script_flags import script_arguments

    words = (
        [word for part in script_arguments(spec.flags, result.trials[0].parameters) for word in part]
        if result.trials
        else []
    )
    if not words or any(trial.step for trial in result.trials):
        return ""
    return (
        f" No trial has done a step: if the script does not accept '{shlex.join(words)}', use the script's names of "
        "parameters, or set --param-style."
    )


def _import_for_trials(spec: SearchSpec, zygotes: str) -> None:
    """Makes the zygote server of a private Mesos import what the trials need."""
    from executor.slot_order import SlotOrder
    from executor.zygote_pool import warm_soon
    from framework.project.script_facts import script_facts

    if spec.entry.script.is_file():
        order = SlotOrder(spec.name, "", "", script_facts(spec.entry).preload, spec.environment)
        warm_soon(zygotes, order.setup.kind({}))


def _runs_here(access: ServiceAccess) -> bool:
    with access.client() as client:
        return client.runs_here()


def _submit(
    spec: SearchSpec, tasks: TaskOptions, queue: QueueOptions, access: ServiceAccess, follow_mode: FollowMode
) -> None:
    """Submits the search to a service."""
    from framework.project import bundle
    from framework.project.script_facts import script_facts
    from framework.service.requests import search_request

    entry = spec.entry
    facts = script_facts(entry)
    with access.client() as client:
        earlier = tuple(find_job(client, name).id for name in spec.warm_start_from)
        spec = dataclasses.replace(spec, warm_start_from=earlier)
        request = search_request(
            spec,
            entry.path,
            facts.preload,
            constraints=tasks.constraints,
            volumes=tasks.volumes,
            **values_of(QueueOptions, with_job_ids(queue, client)),
        )
        follow_mode.after(client, client.submit_request(request, bundle.pack(entry.script, entry.folder)))


def _option_name(parameter: str) -> str:
    return f"the {parameter}" if parameter in ("script", "arguments") else f"--{parameter.replace('_', '-')}"
