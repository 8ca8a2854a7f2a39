"""Numbers of workers and parameter servers of many jobs (Optimus, EuroSys 2018, section 4.2).

Every job starts with its minimum. Then tasks with the largest gain are added repeatedly: seconds of remaining time
saved, times the job's weight, per share of the dominant resource that the tasks take. Only sums of resources are
counted here, not machines: `packing` gives a job less where the sums promise too much.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from solver.jobs.forms import Form
from solver.jobs.free_capacity import NOTHING, FreeCapacity
from solver.jobs.job import PlanJob
from solver.jobs.speed import Addition, GainTable
from solver.resources import Amounts
from solver.units import SPEED_TIE_SHARE

Counts = tuple[int, int]
"""Workers and parameter servers."""


@dataclass(frozen=True)
class StartedJob:
    """A job with at least its minimum."""

    index: int
    job: PlanJob
    form: Form
    counts: Counts


class FormChooser:
    """Spreads jobs over the GPU models of a cluster.

    A job's best machines depend on the demand of the others. Jobs choose one after the other; each takes the form that
    is fastest with its expected share of the machines. If time falls as 1 / share, the sum of weighted times is least
    when shares are proportional to the square roots of weighted work, so that is a job's demand.
    """

    def __init__(self) -> None:
        self._demands: dict[bytes, float] = {}
        self._paths: dict[tuple[Form, int, int], tuple[list[float], list[float]]] = {}

    def rank(self, job: PlanJob, forms: Sequence[Form]) -> list[Form]:
        """The forms that can hold the job's minimum, the most promising first."""
        able = [form for form in forms if job.min_workers <= form.most_workers(job)]
        expected = {form: self._expected_s(job, form) for form in able}
        # Among equally good pools the job takes the one with the least demand from others.
        floor = min(expected.values(), default=0.0) / (1 - SPEED_TIE_SHARE)
        return sorted(able, key=lambda form: (max(expected[form], floor), self._demands.get(form.pool, 0.0)))

    def record(self, job: PlanJob, form: Form) -> None:
        """Records the job's form, so that the next jobs expect less there."""
        self._demands[form.pool] = self._demands.get(form.pool, 0.0) + self._demand(job, form)

    def _expected_s(self, job: PlanJob, form: Form) -> float:
        shares, times = self._path(job, form)
        demand = self._demand(job, form)
        expected = demand / (self._demands.get(form.pool, 0.0) + demand)
        reached = bisect_right(shares, expected) - 1
        # Below the minimum's share all jobs slow down in proportion, or wait.
        return times[reached] if reached >= 0 else times[0] * shares[0] / expected

    def _demand(self, job: PlanJob, form: Form) -> float:
        _, times = self._path(job, form)
        return math.sqrt(job.weight * job.samples * times[0])

    def _path(self, job: PlanJob, form: Form) -> tuple[list[float], list[float]]:
        """Shares of the job as it grows from its minimum, and its seconds per sample with each."""
        key = form, job.min_workers, form.most_workers(job)
        if key not in self._paths:
            shares: list[float] = []
            times: list[float] = []
            counts: Counts | None = (job.min_workers, 1)
            while counts is not None:
                shares.append(form.table.share(form.table.needs(*counts)))
                times.append(form.table.s_per_sample(*counts))
                more = form.table.next_tasks(counts, form.most_workers(job))
                counts = None if more is None else more.counts
            self._paths[key] = shares, times
        return self._paths[key]


@dataclass(frozen=True)
class GrowableJob:
    """A job that may grow.

    Attributes:
        table: its speed with any number of tasks.
        work: samples still to train, times the job's weight.
    """

    table: GainTable
    counts: Counts
    max_workers: int
    work: float


def grow_by_gain(
    jobs: Sequence[GrowableJob],
    take: Callable[[int, Amounts], bool],
    left: Callable[[int], Amounts],
) -> list[Counts]:
    """Adds the tasks with the largest marginal gain repeatedly, until none fit or none gain.

    Args:
        jobs: the jobs; the first of equal gains wins.
        take: reserves an amount for the job at that position; returns whether it was available.
        left: amount still available to the job at that position.

    Returns:
        Counts of each job, in their order, at least the current ones.
    """
    counts = [job.counts for job in jobs]
    heap: list[tuple[float, int, Addition]] = []

    def push(position: int, limit: Amounts | None) -> None:
        """Puts the job's next tasks on the heap, if there are any that gain and fit."""
        job = jobs[position]
        addition = job.table.next_tasks(counts[position], job.max_workers, limit)
        if addition is not None:
            heapq.heappush(heap, (-job.work * addition.gain, position, addition))

    for position in range(len(jobs)):
        push(position, None)
    while heap:
        _, position, addition = heapq.heappop(heap)
        if take(position, addition.needs):
            counts[position] = addition.counts
            push(position, None)
        else:
            push(position, left(position))
    return counts


def grow_counts(started: Sequence[StartedJob], free: FreeCapacity) -> list[Counts]:
    """Distributes the free resources over the jobs by marginal gain.

    Returns:
        Counts of each job, in their order, at least the current ones.
    """
    pools = _Pools(free)
    growing = [
        GrowableJob(
            entry.form.table, entry.counts, entry.form.most_workers(entry.job), entry.job.weight * entry.job.samples
        )
        for entry in started
    ]
    return grow_by_gain(
        growing,
        lambda position, more: pools.take(started[position].form, more),
        lambda position: pools.largest(started[position].form),
    )


class _Pools:
    """Sums of the remaining resources by GPU model; machines without GPUs are one more pool."""

    def __init__(self, free: FreeCapacity) -> None:
        self._free = free
        models = {(kind.gpus > 0, kind.gpu_model): None for kind in free.kinds}
        # Jobs without GPUs take machines without GPUs first.
        self._keys = sorted(models, key=lambda key: key[0])
        self._left: list[list[int]] = []
        for key in self._keys:
            of_pool = np.array([(kind.gpus > 0, kind.gpu_model) == key for kind in free.kinds])
            self._left.append(list(free.total(of_pool)))
        self._pools_of: dict[Form, list[int]] = {}

    def take(self, form: Form, more: Sequence[int]) -> bool:
        """Reserves an amount in one pool of the form; False if none has it."""
        for pool in self._of(form):
            left = self._left[pool]
            if all(have >= need for have, need in zip(left, more, strict=True)):
                self._left[pool] = [have - need for have, need in zip(left, more, strict=True)]
                return True
        return False

    def largest(self, form: Form) -> Amounts:
        """Remaining resources of the form's pool with most CPUs."""
        cpus, memory, disk, gpus = max((self._left[pool] for pool in self._of(form)), default=list(NOTHING))
        return cpus, memory, disk, gpus

    def _of(self, form: Form) -> list[int]:
        if form not in self._pools_of:
            keys = {
                (kind.gpus > 0, kind.gpu_model)
                for kind, usable in zip(self._free.kinds, form.usable, strict=True)
                if usable
            }
            self._pools_of[form] = [pool for pool, key in enumerate(self._keys) if key in keys]
        return self._pools_of[form]
