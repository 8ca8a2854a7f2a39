"""Reads files of many jobs (YAML)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.jobs.job import DEFAULT_STEPS, JobStrategy, PlanJob
from solver.strict_yaml import StrictModel, YamlFile, read_yaml

MAX_JOBS = 100_000
_KERAS = "keras:"

Positive = Annotated[int, Field(ge=1, le=10**12)]


class _Job(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 1
    batch_size: Positive | None = None
    min_workers: Positive = 1
    max_workers: Positive | None = None
    steps: Positive = DEFAULT_STEPS
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    gpus_per_worker: Annotated[int, Field(ge=0)] | None = None
    strategy: JobStrategy = "ps"

    @property
    def names(self) -> Iterator[str]:
        return iter((self.name,)) if self.count == 1 else (f"{self.name}-{index}" for index in range(self.count))


class _File(StrictModel):
    jobs: Annotated[list[_Job], Field(min_length=1)]


def read_jobs(path: Path, load_profile: Callable[[str, int | None], ModelProfile]) -> tuple[PlanJob, ...]:
    """Reads a file of jobs; `docs/planning.md` has the format.

    Args:
        path: the file.
        load_profile: model and batch size (None for the model's own) -> its profile; called once for each pair. The
            model is `keras:NAME` or the path of a file; in the file of jobs that is relative to its folder.

    Raises:
        BadInputError: if the file is unreadable or invalid, or a model has no profile; names the line.
    """
    file = read_yaml(path, _File, "jobs file", {"jobs": _Job})
    entries = file.content.jobs
    _refuse_repeated_names(file)
    for index, entry in enumerate(entries):
        if entry.max_workers is not None and entry.max_workers < entry.min_workers:
            message = f"max_workers is {entry.max_workers}, less than min_workers, {entry.min_workers}; raise it."
            raise file.error(("jobs", index, "max_workers"), message)
    profiles: dict[tuple[str, int | None], ModelProfile] = {}
    jobs: list[PlanJob] = []
    for index, entry in enumerate(entries):
        model = entry.model if entry.model.startswith(_KERAS) else str(path.parent / entry.model)
        key = model, entry.batch_size
        if key not in profiles:
            try:
                profiles[key] = load_profile(*key)
            except BadInputError as error:
                raise file.error(("jobs", index, "model"), str(error)) from error
        jobs += [
            PlanJob(
                name=name,
                profile=profiles[key],
                min_workers=entry.min_workers,
                max_workers=entry.max_workers,
                steps=entry.steps,
                weight=entry.weight,
                gpus_per_worker=entry.gpus_per_worker,
                strategy=entry.strategy,
            )
            for name in entry.names
        ]
    return tuple(jobs)


def _refuse_repeated_names(file: YamlFile[_File]) -> None:
    owners: dict[str, int] = {}
    for index, entry in enumerate(file.content.jobs):
        if len(owners) + entry.count > MAX_JOBS:
            raise file.error(("jobs", index), f"there are more than {MAX_JOBS:,} jobs; plan them in parts.")
        for name in entry.names:
            if name in owners:
                other = file.line(("jobs", owners[name], "name"))
                raise file.error(
                    ("jobs", index, "name"), f"the job name '{name}' is taken by line {other}; rename one."
                )
            owners[name] = index
