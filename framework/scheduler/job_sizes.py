"""Allocates sizes to all elastic jobs together, by a policy of `framework.policies.jobs`.

A round starts at every interval, and when a job arrives or ends. The policy runs in the background on the jobs' current
estimates. Its decision is then passed to each job: jobs shrink immediately, and grow when they are offered the
resources.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from framework.policies.jobs.interface import Allocate, Allocation, JobView, TaskNeeds
from framework.policies.jobs.registry import NEED_ESTIMATES, POLICIES
from framework.policies.jobs.rules import drop_unprofitable_changes
from framework.policies.jobs.users import user_limits
from framework.scheduler.agents import AgentFacts
from framework.scheduler.amounts import Amounts, total
from framework.scheduler.background import Background
from framework.scheduler.feasibility import nodes_for
from framework.scheduler.job import JobEntry, Need, Resizable
from solver.resources import Amounts as TaskAmounts

logger = logging.getLogger(__name__)

DEFAULT_REMAINING_S = 1800.0
"""Assumed remaining time of jobs if it is known of none."""
DIGITS = 6
"""Decimals to which amounts are rounded before they are converted to whole thousandths."""

Room = Sequence[tuple[AgentFacts, Amounts]]
"""Agents, and the part of each that other frameworks do not use."""


@dataclass(frozen=True)
class _Round:
    """A round in progress."""

    decided: Future[Allocation]
    views: Mapping[str, JobView]


class JobSizes:
    """Allocates sizes to the elastic jobs of a framework.

    Args:
        name: the policy's name.
        interval_s: interval between rounds.
        weight: user -> weight, above 0, of all jobs of the user together.
        sample_runs: number of other sizes at which a job's speed is measured before its size is changed; ignored by
            policies that do not learn speeds.

    Attributes:
        name, sample_runs: as given.
    """

    def __init__(self, name: str, interval_s: float, weight: Callable[[str], float], sample_runs: int = 0) -> None:
        self.name = name
        self.sample_runs = sample_runs if name in NEED_ESTIMATES else 0
        self._policy = POLICIES[name]
        self._interval_s = interval_s
        self._weight = weight
        self._round: _Round | None = None
        self._decided_s = -math.inf
        self._decided_of: frozenset[tuple[str, bool]] = frozenset()
        self._waited: dict[str, int] = {}

    def review(
        self,
        jobs: Sequence[JobEntry],
        room: Room | None,
        background: Background,
        call_job: Callable[..., object],
        now_s: float,
    ) -> None:
        """Applies a finished round, and starts the next one when it is due."""
        if self._round is not None and self._round.decided.done():
            self._apply(self._round, jobs, call_job)
            self._round = None
        if self._round is not None or room is None:
            return
        of = frozenset((entry.job_id, _is_elastic(entry)) for entry in jobs if not entry.is_ending)
        if of == self._decided_of and now_s - self._decided_s < self._interval_s:
            return
        self._decided_of, self._decided_s = of, now_s
        if not any(is_elastic for _, is_elastic in of):
            return
        views = self._views([entry for entry in jobs if not entry.is_ending], room, call_job)
        weights = {view.user: self._weight(view.user) for view in views.values()}
        work = functools.partial(_decide, self._policy, list(views.values()), _capacity_of(room), weights)
        self._round = _Round(background.start(work), views)

    def _views(self, jobs: Sequence[JobEntry], room: Room, call_job: Callable[..., Any]) -> dict[str, JobView]:
        """Collects the estimates of all jobs that run or are pending, if known."""
        found: dict[str, JobView] = {}
        alike: dict[Hashable, JobView] = {}
        for entry in jobs:
            key = (
                entry.job_id if entry.has_tasks or entry.job.equivalence_class is None else entry.job.equivalence_class
            )
            view = alike.get((key, entry.constraints)) or _view(entry, room, call_job)
            if view is not None:
                if not _is_elastic(entry):
                    alike[key, entry.constraints] = view
                found[entry.job_id] = dataclasses.replace(
                    view,
                    id=entry.number,
                    user=entry.user,
                    arrival_s=float(entry.number),
                    waited=self._waited.get(entry.job_id, 0),
                )
        known = [view.seconds_left(view.least) for view in found.values() if math.isfinite(view.samples_left)]
        typical_s = statistics.median(known) if known else DEFAULT_REMAINING_S
        return {
            job_id: view if math.isfinite(view.samples_left) else _with_seconds_left(view, typical_s)
            for job_id, view in found.items()
        }

    def _apply(self, round_: _Round, jobs: Sequence[JobEntry], call_job: Callable[..., object]) -> None:
        error = round_.decided.exception()
        if error is not None:
            logger.error("the policy %s failed; all jobs keep their sizes", self.name, exc_info=error)
            return
        counts = round_.decided.result()
        self._waited = {
            job_id: self._waited.get(job_id, 0) + 1 for job_id, view in round_.views.items() if view.id not in counts
        }
        for entry in jobs:
            view = round_.views.get(entry.job_id)
            if view is not None and isinstance(entry.job, Resizable) and _is_elastic(entry):
                call_job(entry, entry.job.scale_to, counts.get(view.id, (0, 0)))


def _decide(
    policy: Allocate, views: Sequence[JobView], capacity: TaskAmounts, weights: Mapping[str, float]
) -> Allocation:
    limits = user_limits(views, capacity, weights.__getitem__)
    return drop_unprofitable_changes(views, policy(views, capacity, limits), capacity)


def _is_elastic(entry: JobEntry) -> bool:
    """Whether its size can be chosen, and enough is known for that."""
    return isinstance(entry.job, Resizable) and entry.job.is_scalable and entry.job.has_estimate


def _view(entry: JobEntry, room: Room, call_job: Callable[..., Any]) -> JobView | None:
    if isinstance(entry.job, Resizable) and entry.job.is_scalable:
        view: JobView | None = call_job(entry, entry.job.scale_view)
        return view
    if entry.has_tasks:
        return _fixed(total(task.resources for task in entry.tasks.values()), runs=True)
    if entry.job.need in (Need.REPLACE_LOST, Need.START) and entry.sizing is not None:
        admitted = [
            (agent, amounts)
            for agent, amounts in room
            if entry.parsed_constraints.admits(agent.attributes, agent.hostname)
        ]
        try:
            needs = entry.sizing.needs(nodes_for(entry.sizing, admitted))
        except Exception as error:
            # The job itself will raise the error when it plans; other jobs are not affected.
            logger.warning("cannot predict what job %s needs: %r", entry.job_id, error)
            return None
        return _fixed(total(need.amounts for need in needs for _ in range(need.count)), runs=False)
    return None


def _fixed(takes: Amounts, *, runs: bool) -> JobView:
    """View of a job of fixed size: one worker that stands for all its tasks."""
    one = (1, 0)
    return JobView(
        id=0,
        arrival_s=0.0,
        needs=TaskNeeds(_needs_of(takes)),
        requested=1,
        max_workers=1,
        max_ps=0,
        now=one if runs else (0, 0),
        kept=one if runs else (0, 0),
        samples_left=math.nan,
        samples_per_s=np.ones((1, 1)),
        young=True,
        waited=0,
        change_s=0.0,
    )


def _with_seconds_left(view: JobView, seconds: float) -> JobView:
    """Sets its remaining time at its minimum size."""
    s_per_sample = dataclasses.replace(view, samples_left=1.0).seconds_left(view.least)
    return dataclasses.replace(view, samples_left=seconds / s_per_sample)


def _capacity_of(room: Room) -> TaskAmounts:
    capacity = total(amounts for _, amounts in room)
    return (
        math.floor(round(1000 * capacity.get("cpus", 0.0), DIGITS)),
        math.floor(capacity.get("mem", 0.0)),
        math.floor(capacity.get("disk", 0.0)),
        math.floor(capacity.get("gpus", 0.0)),
    )


def _needs_of(takes: Amounts) -> TaskAmounts:
    return (
        math.ceil(round(1000 * takes.get("cpus", 0.0), DIGITS)),
        math.ceil(takes.get("mem", 0.0)),
        math.ceil(takes.get("disk", 0.0)),
        math.ceil(takes.get("gpus", 0.0)),
    )
