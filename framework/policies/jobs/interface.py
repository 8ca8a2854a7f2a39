"""What a policy of jobs sees and says, and the account that it keeps of what is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from solver.calibration.nnls import Floats
from solver.jobs.free_capacity import NOTHING, Amounts, plus

Counts = tuple[int, int]
"""Workers and parameter servers of a job; no parameter servers where it adds gradients up by all-reduce."""
Allocation = dict[int, Counts]
"""Counts of the jobs that run, by their ids, in the order in which they are to be placed."""
Limits = Mapping[str, float]
"""User -> dominant share of all resources that the user's jobs may hold together; nobody else has a limit."""


@dataclass(frozen=True)
class TaskNeeds:
    """What the tasks of a job take.

    Attributes:
        worker: each worker.
        ps: each parameter server; nothing where the job has none.
    """

    worker: Amounts
    ps: Amounts = NOTHING

    def of(self, workers: int, ps: int) -> Amounts:
        """What so many take together."""
        return plus(plus(NOTHING, self.worker, workers), self.ps, ps)


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What a policy sees of a job.

    Attributes:
        id: its place in the order of arrival.
        user: whose it is.
        arrival_s: when it came.
        needs: what its tasks take.
        chief: what else it takes once, whatever its size.
        requested: workers that the user asks for.
        min_workers: fewest workers; with fewer it waits.
        max_workers: most workers; a job whose size is fixed has no others than `min_workers`.
        min_ps: fewest parameter servers, if it has any use for them.
        max_ps: most parameter servers; 0 where there are none.
        now: what it has; (0, 0) where it waits.
        kept: what it has and cannot be without, since it cannot be stopped; (0, 0) where it can.
        samples_left: those that it is believed to need still.
        samples_per_s: speeds that are believed: [ps - 1, workers - 1], for all numbers up to the most.
        young: whether little is known of it yet.
        waited: rounds in a row in which it had nothing.
        change_s: for how long it does not train when its tasks change.
    """

    id: int
    user: str = ""
    arrival_s: float
    needs: TaskNeeds
    chief: Amounts = NOTHING
    requested: int
    min_workers: int = 1
    max_workers: int
    min_ps: int = 1
    max_ps: int
    now: Counts = (0, 0)
    kept: Counts = (0, 0)
    samples_left: float
    samples_per_s: Floats
    young: bool
    waited: int
    change_s: float

    def seconds_left(self, counts: Counts) -> float:
        """How long it is believed to take with so many tasks."""
        workers, ps = counts
        return self.samples_left / float(self.samples_per_s[max(1, ps) - 1, workers - 1])

    def one_to_one(self, workers: int) -> Counts:
        """So many workers and as many parameter servers, if it has any use for them."""
        return workers, min(max(workers, self.min_ps, self.kept[1]), self.max_ps)

    @property
    def least(self) -> Counts:
        """With fewer it does not run."""
        return self.one_to_one(max(self.min_workers, self.kept[0]))

    def need(self, counts: Counts) -> Amounts:
        """What so many tasks take."""
        return plus(self.needs.of(*counts), self.chief) if counts[0] else NOTHING


class Allocate(Protocol):
    """A policy. It knows no clock and keeps nothing from one round to the next: the same jobs get the same."""

    def __call__(self, jobs: Sequence[JobView], total: Amounts, limits: Limits = ...) -> Allocation:
        """Shares resources out.

        Args:
            jobs: all that are not finished.
            total: resources of all machines.
            limits: what users may hold.

        Returns:
            The jobs that run. Together they take no more than there is, beside what is kept; each has its least at
            least and its most at most. Whoever holds nothing may begin with one job, whatever the limit.
        """


class Account:
    """What has been given out in a round, and what is left.

    Args:
        jobs: the jobs; what they keep is given out already.
        total: resources of all machines.
        limits: what users may hold.

    Attributes:
        counts: what each job has so far.
        left: what is left of everything; below 0 where jobs keep more than there is.
        held: user -> what the user's jobs have.
    """

    def __init__(self, jobs: Sequence[JobView], total: Amounts, limits: Limits) -> None:
        self._total = total
        self._limits = limits
        self.counts: Allocation = {}
        self.left = total
        self.held: dict[str, Amounts] = {}
        for job in jobs:
            if job.kept[0]:
                self.give(job, job.kept)

    def fits(self, job: JobView, counts: Counts) -> bool:
        """Whether the job can have these instead of what it has so far."""
        more, held = self._more(job, counts), self.held.get(job.user, NOTHING)
        if not fits(more, self.left):
            return False
        return held == NOTHING or share_of(plus(held, more), self._total) <= self._limits.get(job.user, math.inf)

    def give(self, job: JobView, counts: Counts) -> None:
        """Gives the job these instead of what it has so far."""
        more = self._more(job, counts)
        self.left = plus(self.left, more, -1)
        self.held[job.user] = plus(self.held.get(job.user, NOTHING), more)
        self.counts[job.id] = counts

    def give_next(self, job: JobView) -> Counts | None:
        """Gives the job a worker and a ps more, or its least; None if it cannot use them or there is no room."""
        following = job.one_to_one(max(self.counts.get(job.id, (0, 0))[0] + 1, job.min_workers))
        if following[0] > job.max_workers or not self.fits(job, following):
            return None
        self.give(job, following)
        return following

    def _more(self, job: JobView, counts: Counts) -> Amounts:
        return plus(job.need(counts), job.need(self.counts.get(job.id, (0, 0))), -1)


def fits(need: Amounts, have: Amounts) -> bool:
    """Whether there is that much of every resource; of what is not needed there may be less than nothing."""
    # Asked so often that a loop would be felt.
    return (
        (need[0] <= have[0] or need[0] <= 0)
        and (need[1] <= have[1] or need[1] <= 0)
        and (need[2] <= have[2] or need[2] <= 0)
        and (need[3] <= have[3] or need[3] <= 0)
    )


def share_of(need: Amounts, total: Amounts) -> float:
    """Share of the dominant resource: the one of which `need` is the largest part."""
    return max((wanted / there for wanted, there in zip(need, total, strict=True) if there), default=0.0)
