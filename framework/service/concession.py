"""Which elastic jobs give up which tasks, so that another job has room.

Those of the users furthest above their share come first; as few jobs as can be, in that order, and none of their
tasks that the job would fit without.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from framework.service.agents import Amounts
from framework.service.records import TaskRecord

MOST_JOBS = 8
"""So many jobs, the first in the order, are asked at most: whoever waits for more waits better for one to end."""
MOST_AGENTS = 16
"""On so many agents, those with most room, it is tried to make room before all others."""
MOST_TRIED = 32
"""Of so many tasks it is tried one by one whether it would do without."""

Room = Mapping[str, Amounts]
"""Agent -> what there is of it for the job."""


@dataclass(frozen=True)
class Shrinkable:
    """An elastic job that could give tasks up.

    Attributes:
        job_id: which.
        share: its user's dominant share of the cluster, divided by the user's weight.
        tasks: those that it could do without, those that it misses least first.
        most: how many of them at the same time.
    """

    job_id: str
    share: float
    tasks: Sequence[TaskRecord]
    most: int


@dataclass(frozen=True)
class Place:
    """Where a job would start.

    Attributes:
        agents: their ids; none if it would not fit.
        gives_up: elastic job -> ids of the tasks that it gives up for that.
        awaits_ends: whether tasks have to end there as well that nobody can ask to.
    """

    agents: frozenset[str] = frozenset()
    gives_up: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_ends: bool = False


def who_gives_up(jobs: Iterable[Shrinkable], room: Room, fits: Callable[[Room], frozenset[str]]) -> Place:
    """The fewest jobs that have to give tasks up for a job that does not fit, and which tasks.

    Args:
        jobs: those that could.
        room: what there is without them.
        fits: where the job would start, as ids of agents; none if there is too little room.

    Returns:
        No agents if the job would not fit whatever they gave up.
    """
    able = [job for job in jobs if job.most > 0 and job.tasks]
    ranked = sorted(able, key=lambda job: (-job.share, job.job_id))[:MOST_JOBS]
    if not ranked or not fits(with_tasks(room, (task for job in ranked for task in job.tasks))):
        return Place()
    for count in range(1, len(ranked) + 1):
        asked = ranked[:count]
        for agents in _orders(asked, room):
            given = {job.job_id: _first(job, agents) for job in asked}
            if used := fits(with_tasks(room, _all(given))):
                return _least(given, used, room, fits)
    return Place()


def with_tasks(room: Room, tasks: Iterable[TaskRecord]) -> dict[str, dict[str, float]]:
    """The room there is once these tasks have ended."""
    more = {agent_id: dict(amounts) for agent_id, amounts in room.items()}
    for task in tasks:
        amounts = more.setdefault(task.agent_id, {})
        for name, amount in task.resources.items():
            amounts[name] = round(amounts.get(name, 0.0) + amount, 3)
    return more


def _orders(jobs: Sequence[Shrinkable], room: Room) -> Iterator[list[str]]:
    """In which order agents are to be cleared: each before all others once, if not all tasks can go."""

    def size(agent_id: str) -> tuple[float, ...]:
        return tuple(-room.get(agent_id, {}).get(name, 0.0) for name in ("gpus", "cpus", "mem"))

    agents = sorted({task.agent_id for job in jobs for task in job.tasks}, key=lambda one: (size(one), one))
    if all(job.most >= len(job.tasks) for job in jobs):
        yield agents
        return
    for first in agents[:MOST_AGENTS]:
        yield [first, *(one for one in agents if one != first)]


def _first(job: Shrinkable, agents: Sequence[str]) -> list[TaskRecord]:
    """As many of its tasks as it can do without, those on the first agents."""
    return sorted(job.tasks, key=lambda task: agents.index(task.agent_id))[: job.most]


def _least(
    given: Mapping[str, Sequence[TaskRecord]],
    used: frozenset[str],
    room: Room,
    fits: Callable[[Room], frozenset[str]],
) -> Place:
    """Leaves to the jobs what the job would fit without, to those of users with the smallest share first."""
    left = {job_id: [task for task in tasks if task.agent_id in used] for job_id, tasks in given.items()}
    for job_id in reversed(left):
        tasks = left[job_id]

        def holds(count: int, job_id: str = job_id, tasks: Sequence[TaskRecord] = tasks) -> bool:
            return bool(fits(with_tasks(room, _all({**left, job_id: tasks[:count]}))))

        left[job_id] = tasks[: bisect.bisect_left(range(len(tasks)), True, key=holds)]
    for task in list(_all(left))[::-1][:MOST_TRIED]:
        without = {job_id: [one for one in tasks if one is not task] for job_id, tasks in left.items()}
        if fits(with_tasks(room, _all(without))):
            left = without
    gives_up = {job_id: frozenset(task.task_id for task in tasks) for job_id, tasks in left.items() if tasks}
    return Place(fits(with_tasks(room, _all(left))), gives_up)


def _all(given: Mapping[str, Sequence[TaskRecord]]) -> Iterator[TaskRecord]:
    for tasks in given.values():
        yield from tasks
