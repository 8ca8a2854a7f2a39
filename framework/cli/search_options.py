"""From the options of `dike tune` to a search."""

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
from dike.exceptions import BadInputError
from dike.trial.pickled import FUNCTION_SUFFIX
from framework.cli.mesos_options import MASTER_OPTIONS, MESOS_OPTIONS, PRIVATE_MESOS_OPTIONS
from framework.cli.option_groups import is_given
from framework.policies.trials.interface import PolicySettings
from framework.policies.trials.registry import check_learning, make_policy
from framework.project.entry_point import RUNS_FOLDER, EntryPoint, environment_for_tasks, find_entry_point
from framework.project.run_folders import absolute_folder, new_job_id
from framework.project.script_facts import script_facts
from framework.project.script_flags import ParamStyle
from framework.scheduler.task_options import check_name
from framework.search.migration_cost import DEFAULT_MOVE_S
from framework.search.pruners import parse_stop
from framework.search.records import MAX_TRIALS, Mode, SearchOptions, SearchSpec
from framework.search.samplers import EXHAUSTIVE, check_sampler, default_sampler, grid_size, write_object
from solver.described import Text, UserOption, described_fields, values_of

DEFAULT_TRIALS = 20
_SEARCHED = "What is searched"
_GAIN = re.compile(r"accuracy|(^|_)acc(\d|_|$)|auc|(^|_)f1|precision|recall|reward|score", re.IGNORECASE)
"""Metrics that nobody wants the least of."""


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """What a user says of a search that only the script, or its space, makes complete."""

    param_style: Annotated[
        ParamStyle | None,
        UserOption(
            "The script",
            "How the script takes parameters: as flags (--lr=0.1), as key=value (lr=0.1), or by dike.params().",
            default="what its source shows",
        ),
    ] = None
    param: Annotated[
        tuple[str, ...],
        UserOption(
            _SEARCHED,
            "NAME=a,b,c, NAME=1e-5:1e-1:log or NAME=2:8:int; repeatable.",
            metavar="NAME=VALUES",
            read=tuple,
            reads=list[str],
        ),
    ] = ()
    space: Annotated[
        Path | None, UserOption(_SEARCHED, "YAML file of parameters, NAME: [a, b] or NAME: 1e-5:1e-1:log.")
    ] = None
    trials: Annotated[
        int | None,
        Field(ge=1, le=MAX_TRIALS),
        UserOption(_SEARCHED, "Number of trials.", default=f"{DEFAULT_TRIALS}; of a grid, all its points"),
    ] = None
    sampler: Annotated[
        str | None,
        UserOption(
            _SEARCHED,
            "How points are chosen: grid, random, tpe, nsgaii, cmaes, gp, qmc or another of Optuna's.",
            default="grid for lists, else tpe",
        ),
    ] = None
    metric: Annotated[
        Text | None,
        UserOption(
            _SEARCHED,
            "The metric to optimise, such as loss, the training loss.",
            default="val_loss if the script calls fit with validation data, else loss",
        ),
    ] = None
    mode: Annotated[
        Mode | None,
        UserOption(_SEARCHED, "Whether the least or the greatest value is best.", default="min, for a loss"),
    ] = None
    name: Annotated[str | None, UserOption("The search", "The search's name.", default="made from the script's")] = None
    checkpoint_dir: Annotated[
        Text | None,
        UserOption("Checkpoints", "Folder for checkpoints, each search in its own; the same path on all agents."),
    ] = None


@dataclass(frozen=True)
class FunctionCall:
    """How `dike.tune` in a script or a notebook calls this command.

    Attributes:
        number: which of the script's calls this is; None for a search over a whole script.
        function: pickled function that the trials call; None for the script.
        earlier_results: what the calls before returned.
        sampler_object, space_function: pickled; empty for none.
        for_notebook: whether the view is that of a notebook.
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
    """Reads the files of a call."""
    results = () if earlier_results is None else json.loads(earlier_results.read_text(encoding="utf-8"))
    return FunctionCall(
        function_call,
        function,
        tuple(results),
        b"" if sampler_object is None else sampler_object.read_bytes(),
        b"" if space_function is None else space_function.read_bytes(),
        for_notebook,
    )


CHANGEABLE = {
    field.parameter: field.name for field in described_fields(SearchOptions).values() if field.option.settable_on_resume
}
"""Options that `--resume` takes anew, and their fields of a search: how it is run, not what is searched."""
_REMEMBERED = ("logdir", "constraint", "volume", *sorted(MESOS_OPTIONS))
"""Options that are no part of a search, but are the same again when it goes on."""


def run_options(context: typer.Context, before: Mapping[str, Any]) -> dict[str, Any]:
    """Where and how a search is to run, as JSON values: what was said before, and what is said now in its place.

    Args:
        context: of the command.
        before: the options with which the search was begun; empty for a new one.
    """
    given = {}
    for name in _REMEMBERED:
        source = context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            value = context.params[name]
            given[name] = os.path.abspath(value) if name in ("logdir", "secret_file") else value
    kept = dict(before)
    if given.keys() & PRIVATE_MESOS_OPTIONS or "master" in given:
        # Another Mesos: what was said of the one before does not go with it.
        for name in PRIVATE_MESOS_OPTIONS | MASTER_OPTIONS:
            kept.pop(name, None)
    return {**kept, **given}


def changed_spec(context: typer.Context, spec: SearchSpec, options: SearchOptions) -> SearchSpec:
    """A search that goes on, with what its user has now said of how it is to run."""
    given = {field: getattr(options, field) for name, field in CHANGEABLE.items() if is_given(context, name)}
    return dataclasses.replace(spec, **given)


def search_spec(
    script: Path | None,
    arguments: tuple[str, ...],
    asked: AskedOptions,
    options: SearchOptions,
    settings: PolicySettings,
    call: FunctionCall,
    *,
    is_module: bool,
    on_this_machine: bool,
    environment: Mapping[str, str],
) -> SearchSpec:
    """Checks what was asked for and puts it together.

    Raises:
        BadInputError: if it cannot be used.
    """
    # Late: it reads YAML, which --help need not wait for.
    from framework.search.space import check_space, parse_parameter, read_space

    name, trials, metric, mode = asked.name, asked.trials, asked.metric, asked.mode
    if name is not None:
        check_name(name, "search")
    if script is None:
        raise BadInputError("The script is missing; write dike tune SCRIPT, or dike tune --resume NAME.")
    entry = find_entry_point(script, is_module=is_module)
    space = (*(() if asked.space is None else read_space(asked.space)), *map(parse_parameter, asked.param))
    chosen = asked.sampler or default_sampler(space, trials)
    if not call.sampler_object:
        check_sampler(chosen)
    if options.stop:
        parse_stop(options.stop)
    if not call.space_function:
        check_space(space)
    elif chosen == "grid":
        raise BadInputError("A function has no grid to try; leave the sampler out, or take bruteforce.")
    if chosen in EXHAUSTIVE and not call.space_function and not call.sampler_object:
        size = grid_size(space)
        trials = size if trials is None else min(trials, size)
    name = name or new_job_id(entry.script)
    settings = dataclasses.replace(settings, seed=options.seed, move_s=DEFAULT_MOVE_S)
    make_policy(options.policy, settings)
    check_learning(options.policy, options.warm_start_from)
    param_style = asked.param_style if call.number is None else ParamStyle.NONE
    facts = script_facts(entry, {one.name: one.choices for one in space}, param_style)
    metric = metric or ("val_loss" if facts.validates else "loss")
    if mode is None and _GAIN.search(metric):
        raise BadInputError(
            f"More of the metric {metric} seems to be better; say --mode max, or --mode min if the least is best."
        )
    if mode == "max" and metric == "loss" and call.number is None:
        raise BadInputError("--mode max would look for the greatest training loss; name another figure by --metric.")
    return SearchSpec(
        **values_of(SearchOptions, options),
        name=name,
        script=str(entry.script),
        folder=str(entry.folder),
        flags=facts.flags,
        reads_params=facts.reads_params,
        space=space,
        sampler=chosen,
        sampler_object=_signed(call.sampler_object, "sampler", entry),
        space_function=_signed(call.space_function, "space", entry),
        trial_count=trials or DEFAULT_TRIALS,
        settings=settings,
        metric=metric,
        mode=mode or "min",
        checkpoint_dir=absolute_folder(f"{(asked.checkpoint_dir or RUNS_FOLDER).rstrip('/')}/{name}"),
        environment={
            **environment_for_tasks(entry, on_this_machine=on_this_machine),
            **entry.environment,
            **environment,
        },
        arguments=arguments,
        call=call.number,
        earlier_results=call.earlier_results,
    )


def _signed(pickled: bytes, kind: str, entry: EntryPoint) -> str:
    return write_object(pickled, kind, str(entry.folder)) if pickled else ""


@contextlib.contextmanager
def kept_function(function: Path | None, name: str | None, storage: str) -> Iterator[tuple[Path, str] | None]:
    """Puts a pickled function into the folder of its search, where one that goes on finds it.

    It is removed again if the context ends with `BadInputError` and has left no search that needs it.

    Args:
        function: its file; None if there is none.
        name: the search's name; None for one made from the file's.
        storage: URL of the database of searches.

    Yields:
        What trials call in the place of a script, and the search's name; None if there is no function.

    Raises:
        BadInputError: if it cannot be written.
    """
    if function is None:
        yield None
        return
    name = name or new_job_id(function)
    check_name(name, "search")
    data = function.read_bytes()
    # Another search of that name may be there, and this one be refused.
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
    """Refuses to go on with a search whose function others could have written: it is pickled, and runs as we.

    Raises:
        BadInputError: if it is such.
    """
    if not spec.entry.is_function:
        return
    with contextlib.suppress(FileNotFoundError):  # As for any script, that is said later.
        found = os.stat(spec.script)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadInputError(
                f"The function of search '{spec.name}', {spec.script}, is a file that other accounts may have written, "
                "so it is not run; begin the search anew, or have the account that began it go on with it."
            )


def _is_needed(function: Path, name: str, storage: str) -> bool:
    """Whether a search of that name calls the function."""
    from framework.search.store import Store

    try:
        with contextlib.closing(Store(storage, must_exist=True)) as store:
            return any(Path(search.spec.script).resolve() == function.resolve() for search in store.searches(name))
    except BadInputError:
        return False  # there is no such database, or none that can be used
