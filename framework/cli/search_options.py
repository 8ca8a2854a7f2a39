"""Makes a search from the options of `dike tune`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from dike.checkpoints import make_private
from dike.described import Text, UserOption, described_fields, values_of
from dike.exceptions import BadInputError
from dike.trial.pickled import FUNCTION_SUFFIX
from framework.cli.mesos_options import MASTER_OPTIONS, MESOS_OPTIONS, PRIVATE_MESOS_OPTIONS
from framework.cli.option_groups import is_given
from framework.policies.trials.interface import PolicySettings
from framework.project.entry_point import RUNS_FOLDER, EntryPoint, environment_for_tasks, find_entry_point
from framework.project.run_folders import absolute_folder, new_job_id
from framework.project.script_facts import script_facts
from framework.project.script_flags import ParamStyle
from framework.scheduler.task_options import check_name
from framework.search.limits import check_options
from framework.search.migration_cost import DEFAULT_MOVE_S
from framework.search.records import MAX_TRIALS, Mode, Parameter, SearchOptions, SearchSpec
from framework.search.samplers import EXHAUSTIVE, check_sampler, default_sampler, grid_size, write_object

DEFAULT_TRIALS = 20
_SEARCHED = "What to search"
_MAXIMIZED = re.compile(r"accuracy|(^|_)acc(\d|_|$)|auc|(^|_)f1|precision|recall|reward|score", re.IGNORECASE)
"""Metrics whose greatest value is best."""


@dataclass(frozen=True, kw_only=True)
class UnresolvedOptions:
    """Options of a search whose defaults depend on its script or its space."""

    param_style: Annotated[
        ParamStyle | None,
        UserOption(
            "The script",
            "How the script reads parameters: from flags (--lr=0.1), from key=value arguments (lr=0.1), or from "
            "dike.params() alone (none).",
            default="detected in its source",
        ),
    ] = None
    param: Annotated[
        tuple[str, ...],
        UserOption(
            _SEARCHED,
            "A parameter and its values: NAME=a,b,c, NAME=1e-5:1e-1:log, NAME=2:8:int or NAME=0:1:step=0.1; with a "
            "condition: 'NAME=2:8:int if OTHER=a,b'. Repeatable.",
            metavar="NAME=VALUES",
            read=tuple,
            reads=list[str],
        ),
    ] = ()
    space: Annotated[
        Path | None,
        UserOption(
            _SEARCHED,
            "YAML file of parameters, with lines NAME: [a, b], NAME: 1e-5:1e-1:log or "
            "NAME: {values: 2:8:int, when: {OTHER: [a, b]}}.",
        ),
    ] = None
    trials: Annotated[
        int | None,
        Field(ge=1, le=MAX_TRIALS),
        UserOption(
            _SEARCHED,
            "Number of trials; with --resume, of further ones.",
            default=f"{DEFAULT_TRIALS}; for a grid, all its points",
        ),
    ] = None
    sampler: Annotated[
        str | None,
        UserOption(
            _SEARCHED,
            "How to choose points: grid, random, tpe, nsgaii, cmaes, gp, qmc or another sampler of Optuna.",
            default="grid if all parameters are lists, else tpe",
        ),
    ] = None
    metric: Annotated[
        Text | None,
        UserOption(
            _SEARCHED,
            "Metric to optimise, such as val_loss; loss is the training loss.",
            default="val_loss if the script calls fit with validation data, else loss",
        ),
    ] = None
    mode: Annotated[
        Mode | None,
        UserOption(_SEARCHED, "Minimise or maximise the metric.", default="min; required for metrics such as accuracy"),
    ] = None
    name: Annotated[
        str | None, UserOption("The search", "Name of the search.", default="made from the script's name")
    ] = None
    checkpoint_dir: Annotated[
        Text | None,
        UserOption(
            "Checkpoints",
            "Folder for checkpoints, with a subfolder per search. It must have the same path on all agents.",
            default="dike-runs; with --detach, that of the service",
        ),
    ] = None


@dataclass(frozen=True)
class FunctionCall:
    """A call of this command by `dike.tune` in a script or a notebook.

    Attributes:
        number: index of the call in the script; None for a search over a whole script.
        function: pickled function that the trials call; None for the script.
        earlier_results: results of the earlier calls.
        sampler_object, space_function: pickled; empty for none.
        for_notebook: whether to print for a notebook.
    """

    number: int | None
    function: Path | None
    earlier_results: tuple[dict[str, Any], ...]
    sampler_object: bytes
    space_function: bytes
    for_notebook: bool


def function_call(
    *,
    function_call: Annotated[int | None, typer.Option(hidden=True)] = None,
    earlier_results: Annotated[Path | None, typer.Option(hidden=True)] = None,
    function: Annotated[Path | None, typer.Option(hidden=True)] = None,
    for_notebook: Annotated[bool, typer.Option("--for-notebook", hidden=True)] = False,
    sampler_object: Annotated[Path | None, typer.Option(hidden=True)] = None,
    space_function: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> FunctionCall:
    """Reads the files that `dike.tune` has written for the call."""
    results = () if earlier_results is None else json.loads(earlier_results.read_text(encoding="utf-8"))
    return FunctionCall(
        function_call,
        function,
        tuple(results),
        b"" if sampler_object is None else sampler_object.read_bytes(),
        b"" if space_function is None else space_function.read_bytes(),
        for_notebook,
    )


SETTABLE_ON_RESUME = {
    field.parameter: field.name for field in described_fields(SearchOptions).values() if field.option.settable_on_resume
}
"""Option that `--resume` can change -> field of `SearchSpec`: how a search runs, not what it searches."""
_RESTORED_OPTIONS = ("logdir", "mlflow", "constraint", "volume", *sorted(MESOS_OPTIONS))
"""Options outside `SearchSpec` that a resumed search restores."""


def run_options(context: typer.Context, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of where to run a search, as JSON values: the stored ones, updated by the given ones.

    Args:
        context: the command's context.
        before: stored options of the search; empty for a new one.
    """
    given = {}
    for name in _RESTORED_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            value = context.params[name]
            given[name] = os.path.abspath(value) if name in ("logdir", "secret_file") else value
    kept = dict(before)
    if given.keys() & PRIVATE_MESOS_OPTIONS or "master" in given:
        # Options of the previous Mesos do not apply to another one.
        for name in PRIVATE_MESOS_OPTIONS | MASTER_OPTIONS:
            kept.pop(name, None)
    return {**kept, **given}


def changed_spec(
    context: typer.Context, spec: SearchSpec, options: SearchOptions, unresolved: UnresolvedOptions
) -> SearchSpec:
    """Returns a search that is resumed, with the given options changed.

    Raises:
        BadInputError: if the search cannot have the given trials or values.
    """
    from framework.search.space import extended

    given = {field: getattr(options, field) for name, field in SETTABLE_ON_RESUME.items() if is_given(context, name)}
    changed = dataclasses.replace(extended(spec, unresolved.trials, given_space(unresolved)), **given)
    check_options(changed)
    if changed.slots_per_gpu != spec.slots_per_gpu and changed.budget.strip().lower().endswith("gpuh"):
        raise BadInputError(
            f"The --budget of the search counts GPUs as shared by --slots-per-gpu {spec.slots_per_gpu}; leave "
            "--slots-per-gpu out, or give --budget in hours of CPUs."
        )
    return changed


def given_space(unresolved: UnresolvedOptions) -> tuple[Parameter, ...]:
    """Returns the parameters of `--space` and `--param`."""
    # Imported late: it imports PyYAML, which --help does not need.
    from framework.search.space import parse_parameter, read_space

    listed = () if unresolved.space is None else read_space(unresolved.space)
    return (*listed, *map(parse_parameter, unresolved.param))


def search_spec(
    script: Path | None,
    arguments: tuple[str, ...],
    unresolved: UnresolvedOptions,
    options: SearchOptions,
    settings: PolicySettings,
    call: FunctionCall,
    *,
    is_module: bool,
    on_this_machine: bool,
    environment: Mapping[str, str],
) -> SearchSpec:
    """Checks the options and makes the search.

    Raises:
        BadInputError: if an option, the script or a file cannot be used.
    """
    from framework.search.space import check_policy, check_space

    name, trials, metric, mode = unresolved.name, unresolved.trials, unresolved.metric, unresolved.mode
    if name is not None:
        check_name(name, "search")
    if script is None:
        raise BadInputError("The script is missing; write dike tune SCRIPT, or dike tune --resume NAME.")
    entry = find_entry_point(script, is_module=is_module)
    space = given_space(unresolved)
    chosen = unresolved.sampler or default_sampler(space, trials, options.policy)
    if not call.sampler_object:
        check_sampler(chosen)
    check_options(options)
    if space or not call.space_function:
        check_space(space)
    if call.space_function and chosen == "grid":
        raise BadInputError("A space that is a function has no grid; leave the sampler out, or use bruteforce.")
    if chosen in EXHAUSTIVE and not call.space_function and not call.sampler_object:
        size = grid_size(space)
        trials = size if trials is None else min(trials, size)
    name = name or new_job_id(entry.script)
    settings = dataclasses.replace(settings, seed=options.seed, move_s=DEFAULT_MOVE_S)
    param_style = unresolved.param_style if call.number is None else ParamStyle.NONE
    facts = script_facts(entry, {one.name: one.choices for one in space}, param_style)
    metric = metric or ("val_loss" if facts.validates else "loss")
    if mode is None and _MAXIMIZED.search(metric):
        raise BadInputError(
            f"A greater {metric} seems to be better; give --mode max, or --mode min if the least value is best."
        )
    if mode == "max" and metric == "loss" and call.number is None:
        raise BadInputError("--mode max would maximise the training loss; name another metric with --metric.")
    spec = SearchSpec(
        **values_of(SearchOptions, options),
        name=name,
        script=str(entry.script),
        folder=str(entry.folder),
        flags=facts.flags,
        reads_params=facts.reads_params,
        distributes_itself=facts.distributes_itself,
        space=space,
        sampler=chosen,
        sampler_object=_signed(call.sampler_object, "sampler", entry),
        space_function=_signed(call.space_function, "space", entry),
        trial_count=trials or DEFAULT_TRIALS,
        settings=settings,
        metric=metric,
        mode=mode or "min",
        checkpoint_dir=absolute_folder(f"{(unresolved.checkpoint_dir or RUNS_FOLDER).rstrip('/')}/{name}"),
        environment={
            **environment_for_tasks(entry, on_this_machine=on_this_machine),
            **entry.environment,
            **environment,
        },
        arguments=arguments,
        call=call.number,
        earlier_results=call.earlier_results,
    )
    check_policy(spec)
    return spec


def _signed(pickled: bytes, kind: str, entry: EntryPoint) -> str:
    return write_object(pickled, kind, str(entry.folder)) if pickled else ""


@contextlib.contextmanager
def stored_function(function: Path | None, name: str | None, storage: str) -> Iterator[tuple[Path, str] | None]:
    """Copies a pickled function into the folder of its search, so that the search can be resumed.

    If the context ends with `BadInputError`, the copy is deleted again unless a stored search needs it.

    Args:
        function: its file; None if there is none.
        name: the search's name; None to make one from the file's name.
        storage: URL of the database of searches.

    Yields:
        The copy, which trials call instead of a script, and the search's name; None if there is no function.

    Raises:
        BadInputError: if the copy cannot be written.
    """
    if function is None:
        yield None
        return
    name = name or new_job_id(function)
    check_name(name, "search")
    data = function.read_bytes()
    # The hash keeps the function of an existing search of that name, in case this search is refused.
    kept = Path(RUNS_FOLDER, name, "function", f"{function.stem}-{hashlib.sha256(data).hexdigest()[:12]}")
    kept = kept.with_suffix(FUNCTION_SUFFIX)
    was_there = kept.exists()
    try:
        make_private(str(kept.parent))
        kept.write_bytes(data)
        kept.chmod(0o600)
    except OSError as error:
        raise BadInputError(
            f"The function cannot be written to {kept}: {error.strerror}; change to a folder of your own (os.chdir)."
        ) from error
    try:
        yield kept, name
    except BadInputError:
        if not was_there and not _is_needed(kept, name, storage):
            with contextlib.suppress(OSError):
                kept.unlink()
                for folder in (kept.parent, kept.parent.parent):
                    folder.rmdir()  # unless something else is in it
        raise


def check_function(spec: SearchSpec) -> None:
    """Raises `BadInputError` if other accounts could have written the pickled function, which runs as this one."""
    if not spec.entry.is_function:
        return
    with contextlib.suppress(FileNotFoundError):  # Reported later, as for any script.
        found = os.stat(spec.script)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadInputError(
                f"The function of search '{spec.name}', {spec.script}, is a file that other accounts may have written, "
                "so it is not run. Start a new search, or resume this one with the account that started it."
            )


def _is_needed(function: Path, name: str, storage: str) -> bool:
    """Returns whether a stored search of that name calls the function."""
    from framework.search.store import Store

    try:
        with contextlib.closing(Store(storage, must_exist=True)) as store:
            return any(Path(search.spec.script).resolve() == function.resolve() for search in store.searches(name))
    except BadInputError:
        return False  # no such database, or an unusable one
