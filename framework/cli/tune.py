"""`dike tune SCRIPT`: a hyper-parameter search."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError, JobFailedError
from framework.cli.job_names import find_job
from framework.cli.job_options import (
    constraint_option,
    env_option,
    outputs_environment,
    outputs_limit_for,
    outputs_limit_option,
    variables,
    volume_option,
)
from framework.cli.mesos_options import MESOS_OPTIONS, MESOS_PANELS, mesos_access, remembered_access
from framework.cli.option_groups import is_given, with_options
from framework.cli.service_options import SERVICE_OPTIONS, SERVICE_PANELS, ServiceAccess, service_access
from framework.cli.trials import StorageOption
from framework.mesos.containers import needs_mount, parse_volumes
from framework.policies.trials.interface import MILESTONES, QUANTUM_GROWTH
from framework.policies.trials.registry import POLICIES
from framework.project.script_flags import ParamStyle
from framework.scheduler.constraints import parse_constraints
from solver.cli.output import Format, console, print_json
from solver.cli.plan import module_option

if TYPE_CHECKING:
    from framework.cli.following import Staying
    from framework.scheduler.mesos_access import MesosAccess
    from framework.search.records import SearchResult, SearchSpec


class Mode(enum.StrEnum):
    """Which values of the metric are good."""

    MIN = "min"
    MAX = "max"


class ValueKind(enum.StrEnum):
    """Which of the values that a trial reports is its own."""

    LAST = "last"
    BEST = "best"


class OnFailure(enum.StrEnum):
    """What a failed trial means for the others."""

    CONTINUE = "continue"
    ABORT = "abort"


class Suspend(enum.StrEnum):
    """What becomes of a trial's process when it gives its slot back, its checkpoint written."""

    AUTO = "auto"
    MEMORY = "memory"
    CHECKPOINT = "checkpoint"


MAY_CHANGE = {"resume", "storage", "logdir", "constraint", "volume", "for_notebook", "output_format", *MESOS_OPTIONS}
"""What `--resume` may be given besides: where to run it and how to print it. `RUN_OPTIONS` come on top."""
MAY_CHANGE_DETACHED = {"resume", "detach", "follow", "wait", "constraint", "output_format", *SERVICE_OPTIONS}
NOT_WITH_DETACH = ("storage", "logdir", "function_call", "sampler_object", "space_function", *sorted(MESOS_OPTIONS))


PANELS = {
    "The script": ("module", "param_style", "env", "outputs_limit"),
    "What is searched": ("param", "space", "trials", "sampler", "seed", "metric", "mode", "value"),
    "Which trials run first, and which are stopped": (
        *("policy", "learn_from", "quantum", "jobs_per_gpu", "milestones", "quantum_growth", "stop", "timeout"),
    ),
    "The search": ("name", "resume", "storage", "logdir", "output_format"),
    "Failures": ("on_failure", "trial_timeout", "stall_timeout", "blacklist_for"),
    "Slots": ("slots", "slot_cpus", "slot_mem", "slot_gpus", "constraint", "volume"),
    "Checkpoints": ("checkpoint_dir", "checkpoint_interval", "suspend", "suspend_timeout"),
    "On a service": ("detach", "wait", "follow", *SERVICE_PANELS["Which service"]),
    **MESOS_PANELS,
}


@with_options(access=service_access, mesos=mesos_access)
def tune(
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="The training script.", show_default=False)] = None,
    module: Annotated[bool, module_option("SCRIPT")] = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for every trial, after '--'.", show_default=False)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(help="NAME=a,b,c, NAME=1e-5:1e-1:log or NAME=2:8:int; repeatable."),
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file of parameters, NAME: [a, b] or NAME: 1e-5:1e-1:log.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials.", show_default="20; of a grid, all its points")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="How points are chosen: grid, random, tpe, nsgaii, cmaes, gp, qmc or another of Optuna's.",
            show_default="grid for lists, else tpe",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler and the policy.")] = 0,
    policy: Annotated[
        str,
        typer.Option(
            help="No policy stops a trial: each says which trials run first, and all are trained to their end, unless "
            f"--stop is given. One of {', '.join(sorted(POLICIES))}."
        ),
    ] = "dike",
    learn_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name an earlier search of the same model: the trials that it trained to their end say which trials "
            "of this one are likely to come far (dike); repeatable.",
        ),
    ] = None,
    stop: Annotated[
        str,
        typer.Option(
            help="End trials for good that promise little: asha, asha=N, median, patience=N or threshold=X, in epochs "
            "or reports. Nothing is stopped by default."
        ),
    ] = "",
    quantum: Annotated[float, typer.Option(min=0.1, help="Seconds between two decisions on a slot.")] = 10.0,
    jobs_per_gpu: Annotated[
        int, typer.Option(min=1, help="Trials for each slot by turns: bound to it, or asked of a sampler that learns.")
    ] = 4,
    milestones: Annotated[
        str,
        typer.Option(help="Longer quanta for trials that have come far (hermes, hermes2): 50%:2x or 50%:20s, or none."),
    ] = ",".join(map(str, MILESTONES)),
    quantum_growth: Annotated[
        float,
        typer.Option(
            min=0.0, max=100.0, help="With each preemption a trial's quantum grows by so much (hermes, hermes2)."
        ),
    ] = QUANTUM_GROWTH,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric to optimise, such as loss, the training loss. By default val_loss if the script calls fit "
            "with validation data, else loss.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="Whether the least or the greatest value is best; it need not be said for a loss.  [default: min]"
        ),
    ] = None,
    value: Annotated[
        ValueKind, typer.Option(help="Judge a trial by the last value of the metric that it reports, or by its best.")
    ] = ValueKind.LAST,
    name: Annotated[str | None, typer.Option(help="The search's name.", show_default="made from the script's")] = None,
    resume: Annotated[str | None, typer.Option(help="Resume the search of this name.")] = None,
    storage: StorageOption = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Use at most N slots.")] = None,
    slot_cpus: Annotated[float, typer.Option(min=0.1, help="CPUs of a slot. With GPUs: at least.")] = 1.0,
    slot_mem: Annotated[float, typer.Option(min=64, help="Memory of a slot, MiB. With GPUs: at least.")] = 2048.0,
    slot_gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of a slot.", show_default="1 where agents have GPUs")
    ] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(help="Folder for checkpoints, each search in one of its name there; the same path on all agents."),
    ] = None,
    checkpoint_interval: Annotated[float, typer.Option(min=1, help="Seconds between a trial's checkpoints.")] = 60.0,
    suspend: Annotated[
        Suspend,
        typer.Option(
            help="Whether the process of a trial that gives its slot back stays in memory beside its checkpoint, or "
            "ends (checkpoint). On GPUs, auto: whichever is expected to be sooner; memory: it stays, if the driver can."
        ),
    ] = Suspend.AUTO,
    suspend_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds a trial may take to save before it is killed.")
    ] = 30.0,
    blacklist_for: Annotated[
        float, typer.Option(min=0, help="Seconds for which an agent is not used after failures.")
    ] = 300.0,
    on_failure: Annotated[
        OnFailure, typer.Option(help="Whether the search goes on when a trial fails.")
    ] = OnFailure.CONTINUE,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="End the search after X seconds, its trials suspended. With --detach they count from the first slot.",
        ),
    ] = None,
    param_style: Annotated[
        ParamStyle | None,
        typer.Option(
            help="How the script takes parameters: as flags (--lr=0.1), as key=value (lr=0.1), or by dike.params().",
            show_default="what its source shows",
        ),
    ] = None,
    trial_timeout: Annotated[
        float | None,
        typer.Option(min=1, help="A trial that has run for X seconds, suspensions aside, has failed."),
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option(min=1, help="So has one that for X seconds reports and prints nothing and uses no CPU."),
    ] = None,
    logdir: Annotated[Path | None, typer.Option(help="Write TensorBoard logs with HParams there.")] = None,
    constraint: Annotated[list[str] | None, constraint_option()] = None,
    env: Annotated[list[str] | None, env_option()] = None,
    outputs_limit: Annotated[str | None, outputs_limit_option()] = None,
    volume: Annotated[list[str] | None, volume_option()] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Hand the search to a service (dike serve) and return.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="With --detach: wait until the search ends.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --detach: wait, and show what failing trials print.")
    ] = False,
    *,
    access: ServiceAccess,
    mesos: MesosAccess,
    function_call: Annotated[int | None, typer.Option(hidden=True)] = None,
    earlier_results: Annotated[Path | None, typer.Option(hidden=True)] = None,
    function: Annotated[Path | None, typer.Option(hidden=True)] = None,
    for_notebook: Annotated[bool, typer.Option("--for-notebook", hidden=True)] = False,
    sampler_object: Annotated[Path | None, typer.Option(hidden=True)] = None,
    space_function: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Searches hyper-parameters.

    Many trials share the slots by turns; the policy says which of them run first.
    """
    from framework.cli.search_options import (
        RUN_OPTIONS,
        changed_spec,
        check_function,
        kept_function,
        milestones_of,
        run_options,
        search_spec,
    )
    from framework.search.database import default_storage

    url = storage or default_storage()
    constraints = tuple(constraint or ())
    parse_constraints(constraints)
    volumes = tuple(volume or ())
    parse_volumes(volumes)
    as_json = output_format is Format.JSON
    if detach:
        # With what speaks to a service, which a search of one's own need not wait for.
        from framework.cli.following import Staying

        staying = Staying(wait, follow, as_json)
        given = [option for option in NOT_WITH_DETACH if is_given(context, option)]
        if given:
            options = ", ".join(map(_as_typed, given))
            raise BadInputError(
                f"With --detach the service says where the search runs and is kept; leave out {options}."
            )
    elif given := [option for option in sorted(SERVICE_OPTIONS) if is_given(context, option)]:
        raise BadInputError(
            f"{_as_typed(given[0])} is for a search that a service runs; add --detach, or leave it out."
        )
    elif wait or follow:
        raise BadInputError("--wait and --follow are for a search that a service runs (--detach); leave them out.")
    with kept_function(function, name, url) as kept:
        if kept is not None:
            script, name = kept
        if resume is not None:
            changeable = MAY_CHANGE_DETACHED if detach else MAY_CHANGE | RUN_OPTIONS.keys()
            given = [option for option in context.params if is_given(context, option) and option not in changeable]
            if given:
                options = ", ".join(_as_typed(option) for option in given)
                raise BadInputError(
                    f"--resume {resume} goes on as the search was first asked for; leave out {options}."
                )
            if detach:
                with access.client() as client:
                    submitted = client.resume(find_job(client, resume).id, constraints or None)
                    staying.after(client, submitted, resumed=True)
                return
            from framework.search.store import Store

            with contextlib.closing(Store(url, must_exist=True)) as store:
                spec = changed_spec(context, store.open_search(resume))
                check_function(spec)
                remembered = run_options(context, store.options)
            mesos = remembered_access(remembered)
            constraints, volumes = tuple(remembered.get("constraint", ())), tuple(remembered.get("volume", ()))
            logdir = Path(remembered["logdir"]) if "logdir" in remembered else None
        else:
            remembered = run_options(context, {})
            if not detach:
                outputs_limit = outputs_limit_for(outputs_limit, mesos, checkpoint_dir)
            spec = search_spec(
                script=script,
                is_module=module,
                on_this_machine=_runs_here(access) if detach else mesos.runs_here,
                arguments=tuple(arguments or ()),
                param=param or [],
                space_file=space,
                trials=trials,
                sampler=sampler,
                sampler_object=_read_object(sampler_object),
                space_function=_read_object(space_function),
                stop=stop,
                seed=seed,
                policy=policy,
                learn_from=tuple(learn_from or ()),
                quantum_s=quantum,
                jobs_per_slot=jobs_per_gpu,
                milestones=milestones_of(milestones),
                quantum_growth=quantum_growth,
                metric=metric,
                mode=None if mode is None else mode.value,
                value=value.value,
                name=name,
                param_style=param_style if function_call is None else ParamStyle.NONE,
                max_slots=slots,
                slot_cpus=slot_cpus,
                slot_mem_mib=slot_mem,
                slot_gpus=slot_gpus,
                checkpoint_dir=checkpoint_dir,
                environment={**outputs_environment(outputs_limit), **variables(env or ())},
                checkpoint_interval_s=checkpoint_interval,
                suspend=suspend.value,
                suspend_timeout_s=suspend_timeout,
                blacklist_s=blacklist_for,
                on_failure=on_failure.value,
                timeout_s=timeout,
                trial_timeout_s=trial_timeout,
                stall_timeout_s=stall_timeout,
                call=function_call,
                earlier_results=_read_results(earlier_results),
            )
        if detach:
            if checkpoint_dir is None:
                spec = dataclasses.replace(spec, checkpoint_dir="")
            _hand_over(spec, constraints, volumes, access, staying)
            return
        chosen_here = resume is None and checkpoint_dir is None
        if mesos.image is not None and chosen_here and needs_mount(spec.checkpoint_dir, parse_volumes(volumes)):
            raise BadInputError(
                "--image needs --checkpoint-dir, a folder that all agents share: trials leave their containers, and go "
                "on in others."
            )
        with contextlib.ExitStack() as stack:
            mesos = stack.enter_context(mesos.starting())
            if mesos.zygotes:
                _import_for_trials(spec, mesos.zygotes)
            # Late, as all that is not needed to begin with the start of Mesos and the imports of the trials.
            from framework.cli.search_report import report
            from framework.cli.search_view import LiveSearchView, NotebookSearchView, PlainSearchView
            from framework.search.run import SearchRequest, run_search

            request = SearchRequest(spec, url, resume is not None, mesos, logdir, constraints, volumes, remembered)
            out = console(stderr=as_json)
            view = PlainSearchView(out, spec)
            if for_notebook:
                view = NotebookSearchView(out, spec)
            elif sys.stdout.isatty() and not as_json:
                view = stack.enter_context(LiveSearchView(out, spec))
            result = run_search(request, view)
        if as_json:
            print_json(result.to_json())
        else:
            report(out, result, spec, url)
        if result.failure:
            raise JobFailedError(
                f"The search has ended early: {result.failure}; dike tune --resume {spec.name} goes on."
            )
        if result.best is None:
            raise JobFailedError(
                f"No trial of the search {spec.name} has succeeded; dike trials {spec.name} says more."
                + _how_parameters_came(spec, result)
            )


def _how_parameters_came(spec: SearchSpec, result: SearchResult) -> str:
    """How the script got its parameters, where none of its trials has come to a step: it may have refused them."""
    from framework.project.script_flags import script_arguments

    words = (
        [word for part in script_arguments(spec.flags, result.trials[0].parameters) for word in part]
        if result.trials
        else []
    )
    if not words or any(trial.step for trial in result.trials):
        return ""
    return (
        f" None has come to a step: if the script does not take '{shlex.join(words)}', name the parameters as it does, "
        "or see --param-style."
    )


def _import_for_trials(spec: SearchSpec, zygotes: str) -> None:
    """Has an embedded Mesos' zygote server begin to import what the trials need."""
    from executor.slot_order import SlotOrder
    from executor.zygote_pool import warm_soon
    from framework.project.script_facts import script_facts

    if spec.entry.script.is_file():
        order = SlotOrder(spec.name, "", "", script_facts(spec.entry).preload, spec.environment)
        warm_soon(zygotes, order.setup.kind({}))


def _runs_here(access: ServiceAccess) -> bool:
    with access.client() as client:
        return client.runs_here()


def _hand_over(
    spec: SearchSpec, constraints: tuple[str, ...], volumes: tuple[str, ...], access: ServiceAccess, staying: Staying
) -> None:
    """Submits a search to a service."""
    from framework.project import bundle
    from framework.project.script_facts import script_facts
    from framework.service.requests import search_request

    entry = spec.entry
    facts = script_facts(entry)
    more = {"constraints": list(constraints), "volumes": list(volumes)}
    with access.client() as client:
        spec = dataclasses.replace(spec, learn_from=tuple(find_job(client, name).id for name in spec.learn_from))
        request = search_request(spec, entry.path, facts.preload, **more)
        staying.after(client, client.submit_request(request, bundle.pack(entry.script, entry.folder)))


def _as_typed(parameter: str) -> str:
    return f"the {parameter}" if parameter in ("script", "arguments") else f"--{parameter.replace('_', '-')}"


def _read_object(path: Path | None) -> bytes:
    return b"" if path is None else path.read_bytes()


def _read_results(path: Path | None) -> tuple[dict[str, Any], ...]:
    return () if path is None else tuple(json.loads(path.read_text(encoding="utf-8")))
