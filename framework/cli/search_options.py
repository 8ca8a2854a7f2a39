"""From the options of `dike tune` to a search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dike.exceptions import BadInputError
from framework.policies.interface import Milestone, PolicySettings
from framework.policies.registry import make_policy
from framework.runner import RUNS_FOLDER, absolute_folder, environment_for_tasks, new_job_id
from framework.search.moves import DEFAULT_MOVE_S
from framework.search.records import Mode, Sampler, SearchSpec
from framework.search.script_facts import script_facts
from framework.search.space import check_space, parse_parameter, read_space
from framework.search.study import default_sampler, grid_size

DEFAULT_TRIALS = 20
_MILESTONE = re.compile(r"(?P<percent>\d+(\.\d+)?)%:(?P<seconds>\d+(\.\d+)?)s?")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


def milestones_of(text: str) -> tuple[Milestone, ...]:
    """Reads `50%:20s,75%:40s`.

    Raises:
        BadInputError: if it is something else.
    """
    milestones = []
    for part in filter(None, text.split(",")):
        match = _MILESTONE.fullmatch(part.strip())
        if match is None or not 0 < float(match["percent"]) <= 100 or float(match["seconds"]) <= 0:
            raise BadInputError(
                f"'{part}' in --milestones is no milestone; write a decrease of the loss and a quantum, as in 50%:20s."
            )
        milestones.append(Milestone(float(match["percent"]) / 100, float(match["seconds"])))
    return tuple(sorted(milestones, key=lambda milestone: milestone.decrease))


def search_spec(
    *,
    script: Path | None,
    param: Sequence[str],
    space_file: Path | None,
    trials: int | None,
    sampler: Sampler | None,
    seed: int,
    policy: str,
    quantum_s: float,
    jobs_per_slot: int,
    milestones: tuple[Milestone, ...],
    mode: Mode,
    name: str | None,
    use_flags: bool,
    checkpoint_dir: str | None,
    environment: Mapping[str, str],
    **others: Any,
) -> SearchSpec:
    """Checks what was asked for and puts it together; `others` go into the search as they are.

    Raises:
        BadInputError: if it cannot be used.
    """
    if script is None:
        raise BadInputError("The script is missing; write dike tune SCRIPT, or dike tune --resume NAME.")
    if not script.is_file():
        raise BadInputError(f"There is no script {script}.")
    if name is not None and not _NAME.fullmatch(name):
        raise BadInputError(f"'{name}' is no name for a search; use letters, digits, '-', '_' and '.'.")
    space = (*(() if space_file is None else read_space(space_file)), *map(parse_parameter, param))
    check_space(space)
    chosen = sampler or default_sampler(space, trials)
    if chosen == "grid":
        size = grid_size(space)
        trials = size if trials is None else min(trials, size)
    # The bundle is the folder the script really is in, wherever a link to it may be.
    script = script.resolve()
    name = name or new_job_id(script)
    settings = PolicySettings(quantum_s, jobs_per_slot, milestones, seed, move_s=DEFAULT_MOVE_S)
    make_policy(policy, settings)
    return SearchSpec(
        name=name,
        script=str(script),
        flags=script_facts(script, [parameter.name for parameter in space]).flags if use_flags else {},
        space=space,
        sampler=chosen,
        trial_count=trials or DEFAULT_TRIALS,
        seed=seed,
        policy=policy,
        settings=settings,
        mode=mode,
        checkpoint_dir=absolute_folder(checkpoint_dir or f"{RUNS_FOLDER}/{name}"),
        environment={**environment_for_tasks(), **environment},
        **others,
    )
