"""From the options of `dike tune` to a search."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from dike.checkpoints import make_private
from dike.exceptions import BadInputError
from dike.trial.pickled import FUNCTION_SUFFIX
from framework.cli.mesos_options import MASTER_OPTIONS, MESOS_OPTIONS, PRIVATE_MESOS_OPTIONS
from framework.cli.option_groups import is_given
from framework.policies.trials.interface import Milestone, PolicySettings
from framework.policies.trials.registry import check_learning, make_policy
from framework.project.entry_point import RUNS_FOLDER, environment_for_tasks, find_entry_point
from framework.project.run_folders import absolute_folder, new_job_id
from framework.project.script_facts import script_facts
from framework.project.script_flags import ParamStyle
from framework.search.migration_cost import DEFAULT_MOVE_S
from framework.search.pruners import parse_stop
from framework.search.records import Mode, SearchSpec, Suspend
from framework.search.samplers import EXHAUSTIVE, check_sampler, default_sampler, grid_size, write_object
from framework.search.space import check_space, parse_parameter, read_space

DEFAULT_TRIALS = 20
_MILESTONE = re.compile(r"(?P<percent>\d+(\.\d+)?)%:(?P<length>\d+(\.\d+)?)(?P<unit>[sx]?)")
_GAIN = re.compile(r"accuracy|(^|_)acc(\d|_|$)|auc|(^|_)f1|precision|recall|reward|score", re.IGNORECASE)
"""Metrics that nobody wants the least of."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


RUN_OPTIONS = {
    "slots": "max_slots",
    "slot_cpus": "slot_cpus",
    "slot_mem": "slot_mem_mib",
    "slot_gpus": "slot_gpus",
    "checkpoint_interval": "checkpoint_interval_s",
    "suspend": "suspend",
    "suspend_timeout": "suspend_timeout_s",
    "blacklist_for": "blacklist_s",
    "on_failure": "on_failure",
    "timeout": "timeout_s",
    "trial_timeout": "trial_timeout_s",
    "stall_timeout": "stall_timeout_s",
}
"""Options that `--resume` may be given anew, and their fields of a search: how it is run, not what is searched."""
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


def changed_spec(context: typer.Context, spec: SearchSpec) -> SearchSpec:
    """A search that goes on, with what its user has now said of how it is to run."""
    fields = {field: name for name, field in RUN_OPTIONS.items() if is_given(context, name)}
    return dataclasses.replace(spec, **{field: context.params[name] for field, name in fields.items()})


def milestones_of(text: str) -> tuple[Milestone, ...]:
    """Reads `50%:20s,75%:40s`, `50%:2x,75%:4x` (multiples of the quantum), or `none`.

    Raises:
        BadInputError: if it is something else.
    """
    milestones = []
    for part in () if text == "none" else filter(None, text.split(",")):
        match = _MILESTONE.fullmatch(part.strip())
        if match is None or not 0 < float(match["percent"]) <= 100 or float(match["length"]) <= 0:
            raise BadInputError(
                f"'{part}' in --milestones is no milestone; write a decrease of the loss and a quantum, as in 50%:20s "
                "or 50%:2x, or none."
            )
        decrease, length = float(match["percent"]) / 100, float(match["length"])
        milestones.append(Milestone(decrease, times=length) if match["unit"] == "x" else Milestone(decrease, length))
    return tuple(sorted(milestones, key=lambda milestone: milestone.decrease))


def search_spec(
    *,
    script: Path | None,
    is_module: bool,
    on_this_machine: bool,
    param: Sequence[str],
    space_file: Path | None,
    trials: int | None,
    sampler: str | None,
    sampler_object: bytes,
    space_function: bytes,
    stop: str,
    seed: int,
    policy: str,
    learn_from: tuple[str, ...],
    quantum_s: float,
    jobs_per_slot: int,
    milestones: tuple[Milestone, ...],
    quantum_growth: float,
    metric: str | None,
    mode: Mode | None,
    name: str | None,
    param_style: ParamStyle | None,
    checkpoint_dir: str | None,
    environment: Mapping[str, str],
    suspend: Suspend,
    slot_gpus: int | None,
    **others: Any,
) -> SearchSpec:
    """Checks what was asked for and puts it together; `others` go into the search as they are.

    Raises:
        BadInputError: if it cannot be used.
    """
    if name is not None:
        check_name(name)
    if script is None:
        raise BadInputError("The script is missing; write dike tune SCRIPT, or dike tune --resume NAME.")
    entry = find_entry_point(script, is_module=is_module)
    space = (*(() if space_file is None else read_space(space_file)), *map(parse_parameter, param))
    chosen = sampler or default_sampler(space, trials)
    if not sampler_object:
        check_sampler(chosen)
    if stop:
        parse_stop(stop)
    if not space_function:
        check_space(space)
    elif chosen == "grid":
        raise BadInputError("A function has no grid to try; leave the sampler out, or take bruteforce.")
    if chosen in EXHAUSTIVE and not space_function and not sampler_object:
        size = grid_size(space)
        trials = size if trials is None else min(trials, size)
    name = name or new_job_id(entry.script)
    settings = PolicySettings(
        quantum_s, jobs_per_slot, milestones, seed, move_s=DEFAULT_MOVE_S, quantum_growth=quantum_growth
    )
    make_policy(policy, settings)
    check_learning(policy, learn_from)
    facts = script_facts(entry, {one.name: one.choices for one in space}, param_style)
    metric = metric or ("val_loss" if facts.validates else "loss")
    if mode is None and _GAIN.search(metric):
        raise BadInputError(
            f"More of the metric {metric} seems to be better; say --mode max, or --mode min if the least is best."
        )
    if mode == "max" and metric == "loss" and others.get("call") is None:
        raise BadInputError("--mode max would look for the greatest training loss; name another figure by --metric.")
    return SearchSpec(
        name=name,
        script=str(entry.script),
        folder=str(entry.folder),
        flags=facts.flags,
        reads_params=facts.reads_params,
        space=space,
        sampler=chosen,
        sampler_object=write_object(sampler_object, "sampler", str(entry.folder)) if sampler_object else "",
        space_function=write_object(space_function, "space", str(entry.folder)) if space_function else "",
        stop=stop,
        trial_count=trials or DEFAULT_TRIALS,
        seed=seed,
        policy=policy,
        learn_from=learn_from,
        settings=settings,
        metric=metric,
        mode=mode or "min",
        suspend=suspend,
        slot_gpus=slot_gpus,
        checkpoint_dir=absolute_folder(f"{(checkpoint_dir or RUNS_FOLDER).rstrip('/')}/{name}"),
        environment={
            **environment_for_tasks(entry, on_this_machine=on_this_machine),
            **entry.environment,
            **environment,
        },
        **others,
    )


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
    check_name(name)
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


def check_name(name: str) -> None:
    """Refuses what is no name for a search.

    Raises:
        BadInputError: if it is none.
    """
    if not _NAME.fullmatch(name):
        raise BadInputError(f"'{name}' is no name for a search; use letters, digits, '-', '_' and '.'.")
