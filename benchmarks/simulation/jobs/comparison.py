"""Compares schedulers on the same jobs, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.measured import MeasuredModel
from benchmarks.simulation.jobs.scheduler import REFERENCE, scheduler_named
from benchmarks.simulation.jobs.step_times import PsModel, StepTimes
from benchmarks.simulation.jobs.workload import (
    JobModel,
    Request,
    SimulatedJob,
    make_jobs,
    poisson_requests,
    window,
)
from benchmarks.simulation.jobs.world import JobsOutcome, JobsSettings, JobsWorld
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.cli.profiles import load_saved_profile
from solver.hardware import known_hardware


@dataclass(frozen=True)
class Sources:
    """Models of the jobs.

    Attributes:
        profiles: models with parameter servers, by name.
    """

    measured: Mapping[str, MeasuredModel]
    profiles: Mapping[str, ModelProfile]
    machines: Machines
    _expected: dict[str, StepTimes] = field(default_factory=dict, repr=False, compare=False)
    _models: dict[int, dict[str, JobModel]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, tables: Path | None, profiles: Path | None, machines: Machines) -> Sources:
        """Reads a folder of tables and one of saved profiles; each profile stands for an async and a sync model.

        Raises:
            BadInputError: if they contain no model, or one cannot be read.
        """
        if tables is None and profiles is None:
            raise BadInputError(
                "There are no models; give measured speeds by --tables, profiles by --profiles, or both."
            )
        folders = () if tables is None else sorted(path.parent for path in tables.glob("*/placements.csv"))
        if tables is not None and not folders:
            raise BadInputError(f"There is no MODEL/placements.csv in {tables}; see benchmarks/simulate-jobs.md.")
        files = () if profiles is None else sorted(profiles.glob("*.json"))
        if profiles is not None and not files:
            raise BadInputError(f"There is no saved profile (.json) in {profiles}; make one by 'dike profile'.")
        of_profiles = {
            f"{file.stem}-{'sync' if synchronous else 'async'}": replace(
                load_saved_profile(str(file)), synchronous=synchronous
            )
            for file in files
            for synchronous in (False, True)
        }
        measured = {folder.name: MeasuredModel(folder, machines) for folder in folders}
        for model in measured.values():
            model.warm_start_from([other for other in measured.values() if other is not model])
        return cls(measured, of_profiles, machines)

    def models(self, seed: int) -> dict[str, JobModel]:
        """All models; the seed draws the true hardware speeds."""
        if seed not in self._models:
            models: dict[str, JobModel] = dict(self.measured)
            for number, (name, profile) in enumerate(self.profiles.items()):
                expected = self._expected.setdefault(name, StepTimes(profile, self.machines, known_hardware()))
                rng = np.random.default_rng((seed, number))
                models[name] = PsModel(name, profile, self.machines, expected, rng)
            self._models[seed] = models
        return self._models[seed]


@dataclass(frozen=True)
class Workload:
    """Jobs to draw.

    Attributes:
        per_hour: mean arrivals per hour; None: arrivals of the trace.
    """

    jobs: int = 40
    per_hour: float | None = None
    trace: tuple[Request, ...] = ()
    max_workers: int = 16

    def draw(self, models: Mapping[str, JobModel], machines: Machines, seed: int) -> tuple[SimulatedJob, ...]:
        """Draws the jobs of a seed.

        Raises:
            BadInputError: if the jobs are invalid.
        """
        rng = np.random.default_rng(seed)
        if self.per_hour is None:
            requests = window(self.trace, self.jobs, rng)
        else:
            requests = poisson_requests(self.jobs, self.per_hour, list(models), rng)
        return make_jobs(requests, models, machines, self.max_workers, rng)


@dataclass(frozen=True)
class SchedulerResult:
    """Outcomes of a scheduler, one for each seed; properties are means over the seeds."""

    name: str
    outcomes: tuple[JobsOutcome, ...]

    @property
    def mean_completion_s(self) -> float:
        """Mean time from a job's arrival to its end."""
        return fmean(outcome.mean_completion_s for outcome in self.outcomes)

    @property
    def p90_completion_s(self) -> float:
        return fmean(outcome.p90_completion_s for outcome in self.outcomes)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end."""
        return fmean(outcome.makespan_s for outcome in self.outcomes)

    @property
    def gpu_share(self) -> float:
        return fmean(outcome.gpu_share for outcome in self.outcomes)

    @property
    def resizes(self) -> float:
        """Changes of a running job's tasks or machines."""
        return fmean(outcome.resizes for outcome in self.outcomes)


def compare(
    sources: Sources,
    workload: Workload,
    policies: Sequence[str],
    settings: JobsSettings,
    seeds: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> tuple[SchedulerResult, ...]:
    """Runs every scheduler on the same jobs, once for each seed.

    Raises:
        BadInputError: if a scheduler is unknown, or the jobs are invalid.
        PolicyViolationError: if a scheduler assigns resources that are not free.
    """
    schedulers = [scheduler_named(name) for name in policies]
    outcomes: dict[str, list[JobsOutcome]] = {name: [] for name in policies}
    for seed in seeds:
        jobs = workload.draw(sources.models(seed), sources.machines, seed)
        for scheduler in schedulers:
            outcomes[scheduler.name].append(JobsWorld(jobs, sources.machines, scheduler, settings, seed).run())
            progress()
    return tuple(SchedulerResult(name, tuple(of_seeds)) for name, of_seeds in outcomes.items())


def reference(results: Sequence[SchedulerResult]) -> SchedulerResult:
    """The result to normalise by: optimus', or else that with the lowest mean completion time."""
    for result in results:
        if result.name == REFERENCE:
            return result
    return min(results, key=lambda result: result.mean_completion_s)
