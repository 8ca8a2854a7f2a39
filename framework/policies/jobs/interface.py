"""The interface of policies for training jobs, and the account of resources they allocate from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from solver.calibration.nnls import Floats
from solver.jobs.free_capacity import NOTHING, plus
from solver.resources import Amounts

Counts = tuple[int, int]
"""Workers and parameter servers of a job; no parameter servers with all-reduce."""
Allocation = dict[int, Counts]
"""Job id -> counts, of the jobs that run, in the order of placement."""
Limits = Mapping[str, float]
"""User -> maximum dominant share of all resources for the user's jobs together; users not listed have no limit."""


@dataclass(frozen=True)
class TaskNeeds:
    """Resources of one worker and of one parameter server (`NOTHING` if the job has none)."""

    worker: Amounts
    ps: Amounts = NOTHING

    def of(self, workers: int, ps: int) -> Amounts:
        return plus(plus(NOTHING, self.worker, workers), self.ps, ps)


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as a policy sees it.

    Attributes:
        id: its position in the order of arrival.
        needs: resources of its tasks.
        chief: resources needed once, whatever the size.
        min_workers: with fewer workers it waits.
        max_workers: equals `min_workers` if the job's size is fixed.
        min_ps: minimum parameter servers, if it can use any.
        max_ps: maximum parameter servers; 0 for one task, and for a gang whose workers sum their gradients.
        now: current counts; (0, 0) while it waits.
        kept: current counts that cannot be taken from it, as it cannot be stopped; (0, 0) if it can.
        samples_left: estimated samples until it converges.
        samples_per_s: estimated speeds, indexed [ps - 1, workers - 1], up to the maxima; without parameter servers
            [0, workers - 1].
        young: whether little is known about it yet.
        waited: consecutive rounds in which it got nothing.
        change_s: seconds of training lost when its tasks change.
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
        workers, ps = counts
        return self.samples_left / float(self.samples_per_s[max(1, ps) - 1, workers - 1])

    def one_to_one(self, workers: int) -> Counts:
        """Returns counts with as many parameter servers as workers, within the job's bounds."""
        return workers, min(max(workers, self.min_ps, self.kept[1]), self.max_ps)

    @property
    def least(self) -> Counts:
        """Minimum counts with which it runs."""
        return self.one_to_one(max(self.min_workers, self.kept[0]))

    def need(self, counts: Counts) -> Amounts:
        """Returns the resources of these counts, with the chief."""
        return plus(self.needs.of(*counts), self.chief) if counts[0] else NOTHING


class Allocate(Protocol):
    """A policy: a pure function of the jobs, without clock or memory, so that equal inputs give equal allocations."""

    def __call__(self, jobs: Sequence[JobView], total: Amounts, limits: Limits = ...) -> Allocation:
        """Allocates resources to jobs.


        Returns:
            The jobs that run, each within its minimum and maximum. Beside what is kept, they need no more than `total`.
            A user without resources may start one job regardless of the limit.
        """


class Account:
    """What is allocated in a round, and what is free.

    Args:
        jobs: the jobs; what they keep is allocated from the start.
        total: resources of all machines.
        limits: maximum shares of users.

    Attributes:
        counts: counts allocated to each job so far.
        left: free resources; negative if jobs keep more than there is.
        used: user -> resources of the user's jobs.
    """

    def __init__(self, jobs: Sequence[JobView], total: Amounts, limits: Limits) -> None:
        self._total = total
        self._limits = limits
        self.counts: Allocation = {}
        self.left = total
        self.used: dict[str, Amounts] = {}
        for job in jobs:
            if job.kept[0]:
                self.give(job, job.kept)

    def fits(self, job: JobView, counts: Counts) -> bool:
        """Returns whether these counts fit the free resources and the user's limit, in place of what the job has."""
        more, used = self._more(job, counts), self.used.get(job.user, NOTHING)
        if not fits(more, self.left):
            return False
        return used == NOTHING or share_of(plus(used, more), self._total) <= self._limits.get(job.user, math.inf)

    def give(self, job: JobView, counts: Counts) -> None:
        """Replaces the job's allocation by these counts."""
        more = self._more(job, counts)
        self.left = plus(self.left, more, -1)
        self.used[job.user] = plus(self.used.get(job.user, NOTHING), more)
        self.counts[job.id] = counts

    def give_next(self, job: JobView) -> Counts | None:
        """Gives the job one more worker and ps, or its minimum; returns None if it cannot use them or lacks room."""
        following = job.one_to_one(max(self.counts.get(job.id, (0, 0))[0] + 1, job.min_workers))
        if following[0] > job.max_workers or not self.fits(job, following):
            return None
        self.give(job, following)
        return following

    def _more(self, job: JobView, counts: Counts) -> Amounts:
        return plus(job.need(counts), job.need(self.counts.get(job.id, (0, 0))), -1)


def fits(need: Amounts, have: Amounts) -> bool:
    """Returns whether every needed resource is available; others may be overcommitted (negative)."""
    # Unrolled, as this is in the inner loop.
    return (
        (need[0] <= have[0] or need[0] <= 0)
        and (need[1] <= have[1] or need[1] <= 0)
        and (need[2] <= have[2] or need[2] <= 0)
        and (need[3] <= have[3] or need[3] <= 0)
    )


def share_of(need: Amounts, total: Amounts) -> float:
    """Returns the dominant share: the largest share of any resource."""
    return max((amount / available for amount, available in zip(need, total, strict=True) if available), default=0.0)
