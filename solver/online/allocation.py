"""Workers and ps of many jobs, by marginal gain on learned models (Optimus, EuroSys 2018, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats
from solver.jobs.allocation import Counts, GrowableJob, grow_by_gain
from solver.jobs.free_capacity import NOTHING
from solver.jobs.job import check_names
from solver.jobs.speed import GainTable, Ints, JobTaskAmounts
from solver.resources import Amounts

YOUNG_GAIN_FACTOR = 0.95
"""Factor on the gains of young jobs, whose predictions are the least certain (Optimus, section 4.1)."""

NO_LIMITS: Mapping[str, float] = {}
ROUNDING = 1e-6
"""Tolerance for limits that amount to a whole unit of a resource."""


@dataclass(frozen=True)
class OnlineJob:
    """A job as the scheduler sees it at the start of a round.

    Attributes:
        samples_left: samples still to train, as predicted.
        samples_per_s: predicted speed with each number of parameter servers and workers: [ps - 1, workers - 1]; of a
            gang [0, workers - 1].
        chief: fixed additional resources of the job.
        kept: workers and parameter servers that cannot be taken from it; (0, 0) for none.
        user: the user whose limit applies.
        weight: weight of its remaining time.
        young: whether its predictions are still uncertain; its gains are then discounted.
        waited: consecutive rounds without resources.
        is_gang: whether its workers sum their gradients without parameter servers, of which it then gets 0.
    """

    name: str
    samples_left: float
    samples_per_s: Floats
    worker: Amounts
    ps: Amounts
    chief: Amounts = NOTHING
    min_workers: int = 1
    min_ps: int = 1
    kept: Counts = (0, 0)
    user: str = ""
    weight: float = 1.0
    young: bool = False
    waited: int = 0
    is_gang: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.samples_left < math.inf:
            raise BadInputError(f"Job '{self.name}' has {self.samples_left:g} samples left; give 0 or more.")
        if not 0 < self.weight < math.inf:
            raise BadInputError(f"Job '{self.name}': weight is {self.weight:g}; it must be above 0 and finite.")
        if (
            self.samples_per_s.ndim != 2
            or not self.samples_per_s.size
            or not (np.isfinite(self.samples_per_s) & (self.samples_per_s > 0)).all()
        ):
            raise BadInputError(f"Job '{self.name}': its speeds must be a table of numbers above 0.")
        if self.is_gang and len(self.samples_per_s) != 1:
            raise BadInputError(f"Job '{self.name}': the speeds of a gang must be a single row.")


def allocate(jobs: Sequence[OnlineJob], total: Amounts, limits: Mapping[str, float] = NO_LIMITS) -> dict[str, Counts]:
    """Allocates resources to the jobs.

    Jobs keep their `kept` tasks. Then minimums are allocated, `min_workers` and `min_ps`: to the job that has waited
    longest, then by weight, then as listed; jobs that do not fit are skipped. Then the started jobs grow by marginal
    gain. So no job gets more before every minimum that fits is allocated, and of n jobs, each of which fits the cluster
    alone, each runs at least once in any n rounds, however large the others are, if none keeps anything.

    Args:
        jobs: all unfinished jobs.
        total: resources of all machines, in sum.
        limits: user -> maximum dominant share of the user's jobs together; other users have no limit. A user without
            resources may start one job regardless of the limit.

    Returns:
        Workers and parameter servers by name, no parameter servers for gangs; waiting jobs are left out.

    Raises:
        BadInputError: if two jobs share a name.
    """
    check_names(jobs)
    tables = [_table(job, total) for job in jobs]
    account = _Account(total, limits)
    counts: dict[int, Counts] = {}
    for position, job in enumerate(jobs):
        if job.kept[0]:
            kept = (job.kept[0], 1) if job.is_gang else job.kept
            account.take(job.user, tables[position].needs(*kept))
            counts[position] = kept
    for position in sorted(range(len(jobs)), key=lambda at: (-jobs[at].waited, -jobs[at].weight)):
        job, table = jobs[position], tables[position]
        if position not in counts and job.min_workers <= table.max_workers:
            least_ps = 1 if job.is_gang else job.min_ps
            need = table.needs(job.min_workers, least_ps)
            if account.may_start(job.user, need):
                account.take(job.user, need)
                counts[position] = job.min_workers, least_ps
    started = sorted(counts)

    def take(at: int, more: Amounts) -> bool:
        user = jobs[started[at]].user
        if not account.has(user, np.array(more)):
            return False
        account.take(user, np.array(more))
        return True

    def available(at: int) -> Amounts:
        cpus, memory, disk, gpus = account.left_for(jobs[started[at]].user).tolist()
        return cpus, memory, disk, gpus

    growing = [
        GrowableJob(tables[position], counts[position], tables[position].max_workers, _work(jobs[position]))
        for position in started
    ]
    grown = grow_by_gain(growing, take, available)
    return {
        jobs[position].name: (workers, 0) if jobs[position].is_gang else (workers, ps)
        for position, (workers, ps) in zip(started, grown, strict=True)
    }


class _Account:
    def __init__(self, total: Amounts, limits: Mapping[str, float]) -> None:
        self._left = np.array(total)
        self._limits = {
            user: np.floor(share * self._left + ROUNDING).astype(np.int64) for user, share in limits.items()
        }
        self._held: dict[str, Ints] = {}

    def left_for(self, user: str) -> Ints:
        if user not in self._limits:
            return self._left
        return np.minimum(self._left, self._limits[user] - self._held.get(user, np.array(NOTHING)))

    def has(self, user: str, more: Ints) -> bool:
        """Whether the user may get that much more; remaining resources may be negative where `more` is 0."""
        return bool(((more <= self.left_for(user)) | (more <= 0)).all())

    def may_start(self, user: str, need: Ints) -> bool:
        if user not in self._held:
            return bool(((need <= self._left) | (need <= 0)).all())
        return self.has(user, need)

    def take(self, user: str, more: Ints) -> None:
        self._left = self._left - more
        self._held[user] = self._held.get(user, np.array(NOTHING)) + more


def _work(job: OnlineJob) -> float:
    """Value of saving a second for each of its samples."""
    return job.weight * job.samples_left * (YOUNG_GAIN_FACTOR if job.young else 1.0)


def _table(job: OnlineJob, total: Amounts) -> GainTable:
    # The only row of a gang, which elsewhere stands for one ps, stands for none.
    each_ps = NOTHING if job.is_gang else job.ps
    needs = JobTaskAmounts(job.worker, (each_ps,) * len(job.samples_per_s), job.chief)
    return GainTable(1 / job.samples_per_s, needs, total)
