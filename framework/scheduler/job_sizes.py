"""Decides on the sizes of all elastic jobs together, in rounds, by a policy of jobs (`framework.policies.jobs`).

A round comes at every interval, and when a job has come or gone. The policy runs in the background on what the jobs
believe at that moment; what it says is then handed to each job, which changes its size as soon as it can: those that
become smaller at once, the others when they are offered what they need.
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
from framework.scheduler.job import JobHandle, Need, Scalable
from solver.jobs.free_capacity import Amounts as TaskAmounts

logger = logging.getLogger(__name__)

UNKNOWN_S = 1800.0
"""How long a job counts as long as nothing is known of the length of any."""
DIGITS = 6
"""Amounts are rounded to so many digits before they are counted in whole thousandths."""

Room = Sequence[tuple[AgentFacts, Amounts]]
"""Agents, and what there is of each beside what other frameworks hold."""


@dataclass(frozen=True)
class _Round:
    """A round that is being decided.

    Attributes:
        decided: the policy's answer.
        views: what it was asked about, by the job's id.
    """

    decided: Future[Allocation]
    views: Mapping[str, JobView]


class JobSizes:
    """Gives the elastic jobs of a framework their sizes.

    Args:
        name: the policy's.
        interval_s: from one round to the next.
        weight: user -> weight, above 0: what a user's jobs get together.
        sample_runs: at how many other sizes the speed of a job is measured before its size is decided on again; none
            with a policy that does not ask for it.

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
        jobs: Sequence[JobHandle],
        room: Room | None,
        background: Background,
        isolated: Callable[..., object],
        now_s: float,
    ) -> None:
        """Takes up what has been decided, and begins the next round if it is time.

        Args:
            jobs: those that have not ended.
            room: the agents; None as long as they are not known.
            background: where the policy runs.
            isolated: makes a call of a job's state machine.
            now_s: the time.
        """
        if self._round is not None and self._round.decided.done():
            self._hand_out(self._round, jobs, isolated)
            self._round = None
        if self._round is not None or room is None:
            return
        of = frozenset((handle.job_id, _is_elastic(handle)) for handle in jobs if not handle.is_ending)
        if of == self._decided_of and now_s - self._decided_s < self._interval_s:
            return
        self._decided_of, self._decided_s = of, now_s
        if not any(is_elastic for _, is_elastic in of):
            return
        views = self._views([handle for handle in jobs if not handle.is_ending], room, isolated)
        weights = {view.user: self._weight(view.user) for view in views.values()}
        work = functools.partial(_decide, self._policy, list(views.values()), _whole(room), weights)
        self._round = _Round(background.start(work), views)

    def _views(self, jobs: Sequence[JobHandle], room: Room, isolated: Callable[..., Any]) -> dict[str, JobView]:
        """What is believed of each job that takes part: it runs or wants to, and is known."""
        found: dict[str, JobView] = {}
        alike: dict[Hashable, JobView] = {}
        for handle in jobs:
            key = handle.job_id if handle.has_tasks or handle.job.demand_key is None else handle.job.demand_key
            view = alike.get((key, handle.constraints)) or _view(handle, room, isolated)
            if view is not None:
                if not _is_elastic(handle):
                    alike[key, handle.constraints] = view
                found[handle.job_id] = dataclasses.replace(
                    view,
                    id=handle.number,
                    user=handle.user,
                    arrival_s=float(handle.number),
                    waited=self._waited.get(handle.job_id, 0),
                )
        known = [view.seconds_left(view.least) for view in found.values() if math.isfinite(view.samples_left)]
        typical_s = statistics.median(known) if known else UNKNOWN_S
        return {
            job_id: view if math.isfinite(view.samples_left) else _as_long_as(view, typical_s)
            for job_id, view in found.items()
        }

    def _hand_out(self, round_: _Round, jobs: Sequence[JobHandle], isolated: Callable[..., object]) -> None:
        error = round_.decided.exception()
        if error is not None:
            logger.error("the policy %s has failed; all jobs keep their sizes", self.name, exc_info=error)
            return
        counts = round_.decided.result()
        self._waited = {
            job_id: self._waited.get(job_id, 0) + 1 for job_id, view in round_.views.items() if view.id not in counts
        }
        for handle in jobs:
            view = round_.views.get(handle.job_id)
            if view is not None and isinstance(handle.job, Scalable) and _is_elastic(handle):
                isolated(handle, handle.job.scale_to, counts.get(view.id, (0, 0)))


def _decide(
    policy: Allocate, views: Sequence[JobView], there_is: TaskAmounts, weights: Mapping[str, float]
) -> Allocation:
    limits = user_limits(views, there_is, weights.__getitem__)
    return drop_unprofitable_changes(views, policy(views, there_is, limits), there_is)


def _is_elastic(handle: JobHandle) -> bool:
    """Whether its size can be decided on, and enough is known for that."""
    return isinstance(handle.job, Scalable) and handle.job.is_scalable and handle.job.is_known


def _view(handle: JobHandle, room: Room, isolated: Callable[..., Any]) -> JobView | None:
    if isinstance(handle.job, Scalable) and handle.job.is_scalable:
        view: JobView | None = isolated(handle, handle.job.scale_view)
        return view
    if handle.has_tasks:
        return _fixed(total(task.resources for task in handle.tasks.values()), runs=True)
    if handle.job.need in (Need.COME_BACK, Need.START) and handle.sizing is not None:
        admitted = [(agent, there) for agent, there in room if handle.admitted.admits(agent.attributes, agent.hostname)]
        try:
            needs = handle.sizing.needs(nodes_for(handle.sizing, admitted))
        except Exception as error:
            # Whatever is wrong with one job is for itself to find out when it plans; the others go on.
            logger.warning("it cannot be said what job %s takes: %r", handle.job_id, error)
            return None
        return _fixed(total(need.amounts for need in needs for _ in range(need.count)), runs=False)
    return None


def _fixed(takes: Amounts, *, runs: bool) -> JobView:
    """A job whose size nobody changes: one worker that is all of it."""
    one = (1, 0)
    return JobView(
        id=0,
        arrival_s=0.0,
        needs=TaskNeeds(_needed(takes)),
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


def _as_long_as(view: JobView, seconds: float) -> JobView:
    """The same job, with so much time left as it is believed to have with its least size."""
    s_per_sample = dataclasses.replace(view, samples_left=1.0).seconds_left(view.least)
    return dataclasses.replace(view, samples_left=seconds / s_per_sample)


def _whole(room: Room) -> TaskAmounts:
    there_is = total(there for _, there in room)
    return (
        math.floor(round(1000 * there_is.get("cpus", 0.0), DIGITS)),
        math.floor(there_is.get("mem", 0.0)),
        math.floor(there_is.get("disk", 0.0)),
        math.floor(there_is.get("gpus", 0.0)),
    )


def _needed(takes: Amounts) -> TaskAmounts:
    return (
        math.ceil(round(1000 * takes.get("cpus", 0.0), DIGITS)),
        math.ceil(takes.get("mem", 0.0)),
        math.ceil(takes.get("disk", 0.0)),
        math.ceil(takes.get("gpus", 0.0)),
    )
