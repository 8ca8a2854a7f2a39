"""Workers and ps of many jobs, by marginal gain on learned models (Optimus, EuroSys 2018, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats
from solver.jobs.allocation import Counts, Growing, grown_by_gain
from solver.jobs.free_capacity import NOTHING, Amounts
from solver.jobs.job import check_names
from solver.jobs.speed import GainTable, TaskNeeds

YOUNG_DISCOUNT = 0.95
"""Gains of young jobs count so much: their predictions are the least certain (Optimus, section 4.1)."""


@dataclass(frozen=True)
class OnlineJob:
    """A job as the scheduler sees it at the start of a round.

    Attributes:
        name: unique among the jobs.
        samples_left: samples still to train, as predicted.
        samples_per_s: predicted speed with each number of parameter servers and workers: [ps - 1, workers - 1].
        worker: what each worker takes.
        ps: what each parameter server takes.
        chief: what else the job takes once, whatever its size.
        min_workers: with fewer it waits.
        weight: its remaining time counts so many times.
        young: whether its predictions are still uncertain; its gains are then discounted.
        waited: rounds in a row in which it had nothing.
    """

    name: str
    samples_left: float
    samples_per_s: Floats
    worker: Amounts
    ps: Amounts
    chief: Amounts = NOTHING
    min_workers: int = 1
    weight: float = 1.0
    young: bool = False
    waited: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.samples_left < math.inf:
            raise BadInputError(f"Job '{self.name}' has {self.samples_left:g} samples left; say how many, 0 or more.")
        if not 0 < self.weight < math.inf:
            raise BadInputError(f"Job '{self.name}': weight is {self.weight:g}; it must be above 0 and finite.")
        if (
            self.samples_per_s.ndim != 2
            or not self.samples_per_s.size
            or not (np.isfinite(self.samples_per_s) & (self.samples_per_s > 0)).all()
        ):
            raise BadInputError(f"Job '{self.name}': its speeds must be a table of numbers above 0.")


def allocate(jobs: Sequence[OnlineJob], total: Amounts) -> dict[str, Counts]:
    """Shares resources out.

    First minimums are handed out, `min_workers` and one ps: to the job that has waited longest, then by weight, then as
    listed; one that does not fit is passed over. Then those that have theirs grow by marginal gain. So no job gets more
    before every minimum that fits has been handed out, and of n jobs, each of which fits the cluster alone, each runs
    at least once in any n rounds, however large the others are.

    Args:
        jobs: all jobs that are not finished.
        total: resources of all machines, in sum.

    Returns:
        Workers and parameter servers by name; jobs that wait are left out.

    Raises:
        BadInputError: if two jobs share a name.
    """
    check_names(jobs)
    left = np.array(total)
    tables = [_table(job, total) for job in jobs]
    started: list[int] = []
    for position in sorted(range(len(jobs)), key=lambda at: (-jobs[at].waited, -jobs[at].weight)):
        job, table = jobs[position], tables[position]
        if job.min_workers <= table.max_workers:
            need = table.needs(job.min_workers, 1)
            if (need <= left).all():
                left = left - need
                started.append(position)
    started.sort()

    def take(_: int, more: Amounts) -> bool:
        nonlocal left
        if (left < more).any():
            return False
        left = left - more
        return True

    def what_is_left(_: int) -> Amounts:
        cpus, memory, disk, gpus = left.tolist()
        return cpus, memory, disk, gpus

    growing = [
        Growing(tables[position], (jobs[position].min_workers, 1), tables[position].max_workers, _work(jobs[position]))
        for position in started
    ]
    counts = grown_by_gain(growing, take, what_is_left)
    return {jobs[position].name: of_job for position, of_job in zip(started, counts, strict=True)}


def _work(job: OnlineJob) -> float:
    """What saving a second for each of its samples is worth."""
    return job.weight * job.samples_left * (YOUNG_DISCOUNT if job.young else 1.0)


def _table(job: OnlineJob, total: Amounts) -> GainTable:
    needs = TaskNeeds(job.worker, (job.ps,) * len(job.samples_per_s), job.chief)
    return GainTable(1 / job.samples_per_s, needs, total)
