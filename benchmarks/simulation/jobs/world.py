"""Virtual time: jobs arrive, get machines in rounds, and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.jobs.estimates import (
    SAMPLE_RUNS,
    EstimateSettings,
    NoProgress,
    NoSpeeds,
    ProgressEstimate,
    SpeedEstimate,
    make_progress,
    make_speeds,
)
from benchmarks.simulation.jobs.machines import Hosts, Machines, counts_of, layout_of
from benchmarks.simulation.jobs.placement import used_by
from benchmarks.simulation.jobs.scheduler import PlacedJob, Scheduler
from benchmarks.simulation.jobs.workload import SimulatedJob
from benchmarks.simulation.world import PolicyViolationError
from framework.policies.jobs.interface import fits
from solver.jobs.free_capacity import plus

SAMPLE_RUN_S = 10.0
"""Length of one of the short runs that measure a job's speed."""


@dataclass(frozen=True)
class JobsSettings:
    """Settings independent of the scheduler.

    Attributes:
        interval_s: seconds from one round to the next (Optimus: 600).
        resize_s: seconds without training when a job starts or its tasks or machines change.
    """

    interval_s: float = 600.0
    resize_s: float = 30.0
    estimates: EstimateSettings = field(default_factory=EstimateSettings)


@dataclass(frozen=True)
class JobsOutcome:
    """Outcome of one scheduler.

    Attributes:
        completion_s: seconds from arrival to end, in order of arrival.
        gpu_share: used share of all GPUs, over the makespan.
        resizes: number of times that a running job changed tasks or machines, or was stopped.
    """

    completion_s: tuple[float, ...]
    makespan_s: float
    gpu_share: float
    resizes: int

    @property
    def mean_completion_s(self) -> float:
        return fmean(self.completion_s)

    @property
    def p90_completion_s(self) -> float:
        return sorted(self.completion_s)[math.ceil(0.9 * len(self.completion_s)) - 1]


class Stretch(NamedTuple):
    """Time in which a job had machines: a round, or the part of it until the job ended.

    Attributes:
        workers: number of workers, each with a GPU.
        start_s, end_s: seconds since the start of the simulation; includes the cost of a change.
    """

    job: int
    workers: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Running:
    """An active job.

    Attributes:
        trains_from_s: when it starts or resumes training.
        waited: consecutive rounds without machines.
    """

    job: SimulatedJob
    progress: ProgressEstimate
    speeds: SpeedEstimate
    done: float = 0.0
    hosts: Hosts = ()
    trains_from_s: float = 0.0
    waited: int = 0
    started: bool = False


@dataclass(slots=True)
class _Totals:
    ends_s: dict[int, float] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    resizes: int = 0


class JobsWorld:
    """Runs one scheduler on a list of jobs until all have ended.

    Rounds are at multiples of the interval. Arrived jobs wait for the next round, and resources of ended jobs are
    assigned in the next round.

    Args:
        jobs: in order of arrival.
        seed: of the measurement noise and the errors of estimates.
        watch: called with each time span of a job, round by round.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        machines: Machines,
        scheduler: Scheduler,
        settings: JobsSettings,
        seed: int,
        watch: Callable[[Stretch], object] = lambda _: None,
    ) -> None:
        self._coming = list(jobs)
        self._machines = machines
        self._scheduler = scheduler
        self._settings = settings
        self._seed = seed
        self._watch = watch
        self._active: dict[int, _Running] = {}
        self._totals = _Totals()

    def run(self) -> JobsOutcome:
        """Runs all jobs.

        Raises:
            PolicyViolationError: if the scheduler assigns resources that are not free, or leaves all jobs waiting.
        """
        jobs = list(self._coming)
        now_s = 0.0
        while self._coming or self._active:
            if not self._active:
                interval_s = self._settings.interval_s
                now_s = max(now_s, math.ceil(self._coming[0].arrival_s / interval_s) * interval_s)
            while self._coming and self._coming[0].arrival_s <= now_s:
                self._arrive(self._coming.pop(0))
            self._decide(now_s)
            until_s = now_s + self._settings.interval_s
            for running in list(self._active.values()):
                self._train(running, now_s, until_s)
            now_s = until_s
        ends_s = self._totals.ends_s
        makespan_s = max(ends_s.values()) - jobs[0].arrival_s
        gpus = self._machines.count * self._machines.gpus
        return JobsOutcome(
            completion_s=tuple(ends_s[job.id] - job.arrival_s for job in jobs),
            makespan_s=makespan_s,
            gpu_share=self._totals.gpu_seconds / (gpus * makespan_s),
            resizes=self._totals.resizes,
        )

    def _arrive(self, job: SimulatedJob) -> None:
        # The same draws for every scheduler.
        rng = np.random.default_rng((self._seed, job.id))
        settings, scheduler = self._settings.estimates, self._scheduler
        if scheduler.learns:
            progress = make_progress(job, settings, rng)
            speeds = make_speeds(job, self._machines.capacity, settings, rng, sharding=scheduler.sharding)
            self._active[job.id] = _Running(job, progress, speeds)
        else:
            self._active[job.id] = _Running(job, NoProgress(), NoSpeeds(job))

    def _decide(self, now_s: float) -> None:
        decided = self._scheduler.schedule([self._view(running) for running in self._active.values()], self._machines)
        self._check(decided, now_s)
        for id_, running in self._active.items():
            hosts = decided.get(id_, ())
            if hosts != running.hosts:
                self._totals.resizes += bool(running.hosts)
                running.hosts = hosts
                running.trains_from_s = now_s + self._settings.resize_s
                if self._scheduler.learns and not running.started:
                    running.trains_from_s += SAMPLE_RUNS * SAMPLE_RUN_S
            running.started = running.started or bool(hosts)
            running.waited = 0 if hosts else running.waited + 1

    def _view(self, running: _Running) -> PlacedJob:
        job = running.job
        return PlacedJob(
            id=job.id,
            arrival_s=job.arrival_s,
            needs=job.model.needs,
            requested=job.requested,
            max_workers=job.max_workers,
            max_ps=job.model.max_ps,
            now=counts_of(running.hosts),
            hosts=running.hosts,
            samples_left=running.progress.samples_left(running.done / job.samples),
            samples_per_s=running.speeds.table(),
            young=running.progress.young,
            waited=running.waited,
            change_s=self._settings.resize_s,
        )

    def _check(self, decided: Mapping[int, Hosts], now_s: float) -> None:
        def refuse(reason: str) -> PolicyViolationError:
            return PolicyViolationError(f"{self._scheduler.name} {reason} at {now_s:g} s")

        if not decided and not self._coming:
            raise refuse(f"leaves {len(self._active)} jobs waiting")
        free = [self._machines.capacity] * self._machines.count
        for id_, hosts in decided.items():
            if id_ not in self._active:
                raise refuse(f"gives machines to job {id_}, which is not active,")
            job = self._active[id_].job
            workers, ps = counts_of(hosts)
            if not 1 <= workers <= job.max_workers or not min(1, job.model.max_ps) <= ps <= job.model.max_ps:
                raise refuse(f"gives job {id_} {workers} workers and {ps} parameter servers")
            for host in hosts:
                need = used_by(job.model.needs, host)
                if not fits(need, free[host.machine]):
                    raise refuse(f"puts more on machine {host.machine} than it has")
                free[host.machine] = plus(free[host.machine], need, -1)

    def _train(self, running: _Running, now_s: float, until_s: float) -> None:
        job, counts = running.job, counts_of(running.hosts)
        if not running.hosts:
            return
        speed = job.model.samples_per_s(layout_of(running.hosts), job.batch_size, sharding=self._scheduler.sharding)
        ends_s = max(running.trains_from_s, now_s) + (job.samples - running.done) / speed
        stretch = Stretch(job.id, counts[0], now_s, min(ends_s, until_s))
        self._totals.gpu_seconds += stretch.workers * (stretch.end_s - stretch.start_s)
        self._watch(stretch)
        if ends_s <= until_s:
            self._totals.ends_s[job.id] = ends_s
            del self._active[job.id]
            return
        before, trained_s = running.done, until_s - max(running.trains_from_s, now_s)
        if trained_s > 0:
            running.done += speed * trained_s
            running.progress.observe(before / job.samples, running.done / job.samples)
            running.speeds.observe(counts, speed)
