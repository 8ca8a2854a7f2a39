"""Makes room for the job that has a reservation: if searches vacate too little, elastic jobs shrink, and then jobs of a
lower priority that have a checkpoint wait.

Victims are jobs of the same or a lower priority: those of the lowest priority first, and among them those of the users
furthest above their share. As few jobs as possible, in that order, end only those tasks without which the pending job
does not fit. An elastic job is asked once for the same job, and does not grow again until that job runs or is gone.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from framework.scheduler.agents import AgentFacts
from framework.scheduler.amounts import Amounts, subtract, totals
from framework.scheduler.job import JobEntry, Preemptible, Reclaimable, Resizable
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import TaskRecord
from framework.scheduler.reservation import Reservation, StartLocation
from framework.scheduler.snapshot import JobFacts

MAX_VICTIMS = 8
"""Maximum number of victims per reservation. A job that needs more waits for tasks to end instead."""
MAX_FIRST_AGENTS = 16
"""Maximum number of agents, those with most room, that are tried as the first to clear."""
MAX_SPARE_CHECKS = 32
"""Maximum number of tasks that are checked one by one for being needed."""

Room = Mapping[str, Amounts]
"""Agent -> amounts that the job may use."""


def may_preempt(waiting: JobEntry, running: JobEntry, now_s: float) -> bool:
    """Whether a job may have to make room for another: not for one of a lower priority."""
    return waiting.rank(now_s) <= running.priority.rank


class UnknownPlaceError(Exception):
    """The place of a job is unknown now; raised and caught while searching for it."""


class Preemption:
    """Finds victims, and asks them to end tasks."""

    def __init__(
        self, jobs: Mapping[str, JobEntry], call_job: Callable[..., None], notify: Callable[[str, str], None]
    ) -> None:
        self._jobs = jobs
        self._call_job = call_job
        self._notify = notify
        self._asked: Mapping[str, frozenset[str]] = {}
        self._reclaimed_from: dict[str, set[str]] = {}

    def place(
        self,
        entry: JobEntry,
        agents: Sequence[AgentFacts],
        others: Room,
        reservation: Reservation | None,
        shares: Callable[[], Mapping[str, float]],
        fits: Callable[[Room], frozenset[str]],
    ) -> StartLocation:
        """Returns where a job would start if others were preempted.

        Args:
            entry: the job.
            agents: those that it may use.
            others: agent -> usage by other frameworks.
            reservation: the job's reservation, if it has one.
            shares: user -> dominant share, divided by the user's weight.
            fits: ids of the agents where it would start with this room.

        Returns:
            No agents if it would not fit, or no job can be preempted.

        Raises:
            UnknownPlaceError: if `fits` does.
        """
        now_s = time.time()
        reclaimables = {
            one.job_id: reclaimable
            for one, job in self._resizable()
            if one is not entry and may_preempt(entry, one, now_s)
            # A job that would lose all its tasks makes room only for one of a higher priority.
            if not (reclaimable := job.reclaimable()).is_whole or entry.priority.rank < one.priority.rank
        }
        ending = self._ending(reclaimables.values(), entry)
        before = {} if reservation is None else reservation.victim_tasks
        if not before and not ending and not any(reclaimable.max_tasks for reclaimable in reclaimables.values()):
            return StartLocation()
        staying = [task for task in self._tasks() if task.task_id not in ending]
        room = _room(agents, others, staying)
        here = {task.task_id: task for task in staying if task.agent_id in room}
        self._record_reclaimed(reservation)
        known = self._reclaimed_from.get(entry.job_id, set())
        done = {job_id: task_ids for job_id, task_ids in before.items() if job_id in known}
        if used := fits(room):
            return StartLocation(used, done)
        asked = {job_id: tasks for job_id, tasks in before.items() if _still_can(tasks, reclaimables.get(job_id))}
        if asked.keys() - done.keys():
            tasks = [here[task_id] for task_ids in asked.values() for task_id in task_ids if task_id in here]
            if used := fits(with_tasks(room, tasks)):
                return StartLocation(used, {**asked, **done})
        able = [job_id for job_id, reclaimable in reclaimables.items() if reclaimable.max_tasks and job_id not in known]
        of_user = shares() if able else {}
        found = select_victims(
            [
                PotentialVictim(
                    job_id,
                    of_user.get(self._jobs[job_id].user, 0.0),
                    [here[task_id] for task_id in reclaimables[job_id].task_ids if task_id in here],
                    reclaimables[job_id].max_tasks,
                    self._jobs[job_id].priority.rank,
                    is_whole=reclaimables[job_id].is_whole,
                )
                for job_id in able
            ],
            room,
            fits,
        )
        return dataclasses.replace(found, victim_tasks={**found.victim_tasks, **done})

    def earliest_agents(
        self,
        entry: JobEntry,
        agents: Sequence[AgentFacts],
        others: Room,
        anywhere: frozenset[str],
        fits: Callable[[Room], frozenset[str]],
    ) -> frozenset[str]:
        """Estimates where a job would start first, assuming that the tasks launched last end first.

        Durations are unknown, but tasks that have run longest are the least likely to end soon.

        Args:
            entry: the job.
            agents: those that it may use.
            others: agent -> usage by other frameworks.
            anywhere: ids of the agents that it would use if no task of this framework ran.
            fits: ids of the agents where it would start with this room.

        Returns:
            Ids of agents; the best found until then if `fits` raises `UnknownPlaceError`.
        """
        ending = self._ending([job.reclaimable() for _, job in self._resizable()], entry)
        ids = {agent.agent_id for agent in agents}
        tasks = [task for task in self._tasks() if task.agent_id in ids and task.task_id not in ending]
        tasks.sort(key=lambda task: (task.launched_s, task.task_id))
        found, stay, must_end = anywhere, 0, len(tasks) + 1
        while must_end - stay > 1:
            middle = (stay + must_end) // 2
            try:
                used = fits(_room(agents, others, tasks[:middle]))
            except UnknownPlaceError:
                return found
            if used:
                found, stay = used, middle
            else:
                must_end = middle
        return found

    def request_tasks(self, reservation: Reservation | None) -> None:
        """Asks the reservation's victims to end tasks, and withdraws requests that are no longer needed."""
        self._record_reclaimed(reservation)
        wanted: Mapping[str, frozenset[str]] = {} if reservation is None else reservation.victim_tasks
        for job_id in sorted(self._asked.keys() | wanted.keys()):
            entry = self._jobs.get(job_id)
            if entry is None or not isinstance(entry.job, Resizable):
                continue
            task_ids = wanted.get(job_id, frozenset())
            if reservation is None or not task_ids:
                self._call_job(entry, entry.job.reclaim, frozenset(), "")
                continue
            given = _given(entry.job.reclaimable(), task_ids)
            if job_id not in self._asked:
                self._notify(reservation.job_id, f"job {job_id} of {entry.user} ends {given} to make room")
            reason = f"job {reservation.job_id} goes first and fits once this job ends {given}"
            self._call_job(entry, entry.job.reclaim, task_ids, reason)
        self._asked = dict(wanted)

    def victims_have_ended(self, reservation: Reservation) -> bool:
        """Whether there are victims, and all their requested tasks have ended."""
        tasks = [task_id for task_ids in reservation.victim_tasks.values() for task_id in task_ids]
        running = {task.task_id for task in self._tasks()}
        return bool(tasks) and not running & set(tasks)

    def keep_only(self, waiting: Collection[str]) -> None:
        """Drops what is stored about other jobs."""
        self._reclaimed_from = {
            job_id: victims for job_id, victims in self._reclaimed_from.items() if job_id in waiting
        }

    def _record_reclaimed(self, reservation: Reservation | None) -> None:
        """Records the jobs that have ended requested tasks, or are ending them."""
        if reservation is None:
            return
        for job_id, task_ids in reservation.victim_tasks.items():
            entry = self._jobs.get(job_id)
            job = None if entry is None else entry.job
            ending: frozenset[str] = job.reclaimable().ending if isinstance(job, Resizable) else frozenset()
            if entry is None or not task_ids <= entry.tasks.keys() - ending:
                self._reclaimed_from.setdefault(reservation.job_id, set()).add(job_id)

    def _ending(self, reclaimables: Collection[Reclaimable], waiting: JobEntry) -> set[str]:
        """Ids of tasks that are ending, or would if their search were preempted for the waiting job."""
        now_s = time.time()
        ending = {task_id for reclaimable in reclaimables for task_id in reclaimable.ending}
        for entry in self._jobs.values():
            if entry.is_ending:
                ending |= entry.tasks.keys()
            elif isinstance(entry.job, Preemptible) and may_preempt(waiting, entry, now_s):
                ending |= entry.job.preemptible_tasks()
        return ending

    def _resizable(self) -> Iterator[tuple[JobEntry, Resizable]]:
        for entry in self._jobs.values():
            if isinstance(entry.job, Resizable) and entry.has_tasks and not entry.is_ending:
                yield entry, entry.job

    def _tasks(self) -> Iterator[TaskRecord]:
        for entry in self._jobs.values():
            yield from entry.tasks.values()


def shrink_reason(reservation: Reservation | None, job_id: str) -> str:
    """Sentence on the job that this one makes room for, to follow another sentence; empty if none."""
    if reservation is None or job_id not in reservation.victim_tasks:
        return ""
    given = _workers(reservation.victim_tasks[job_id])
    return f" It makes room for job {reservation.job_id}, which has waited long and fits without {given} of this one."


def describe_contribution(reservation: Reservation | None, job: JobFacts, waiting: str) -> str:
    """Sentence on how a job makes room for a pending one, to follow another sentence; empty if it does not.

    Args:
        reservation: the current reservation.
        job: the job that could make room.
        waiting: id of the pending job.
    """
    if reservation is None or reservation.job_id != waiting:
        return ""
    if job.job_id in reservation.victim_tasks:
        return f" It makes room, and ends {_workers(reservation.victim_tasks[job.job_id])}."
    is_search = job.sizing is not None and not job.sizing.is_gang
    return (
        " It is asked to vacate the agents reserved for this job."
        if is_search and job.allocated.keys() & reservation.agents
        else ""
    )


def _room(agents: Sequence[AgentFacts], others: Room, staying: Sequence[TaskRecord]) -> dict[str, Amounts]:
    """Room beside other frameworks and these tasks."""
    used = with_tasks({agent.agent_id: others.get(agent.agent_id, {}) for agent in agents}, staying)
    return {agent.agent_id: subtract(agent.total, used[agent.agent_id]) for agent in agents}


def _still_can(task_ids: frozenset[str], reclaimable: Reclaimable | None) -> bool:
    return reclaimable is not None and task_ids <= set(reclaimable.task_ids) and len(task_ids) <= reclaimable.max_tasks


def _given(reclaimable: Reclaimable, task_ids: Collection[str]) -> str:
    return "all its tasks" if reclaimable.is_whole else _workers(task_ids)


def _workers(task_ids: Collection[str]) -> str:
    return f"{len(task_ids)} worker{'' if len(task_ids) == 1 else 's'}"


@dataclass(frozen=True)
class PotentialVictim:
    """An elastic job that could end tasks.

    Attributes:
        job_id: the job.
        share: its user's dominant share of the cluster, divided by the user's weight.
        tasks: dispensable tasks, the least useful first.
        max_tasks: maximum number of them at the same time.
        rank: its place among the priorities, 0 for the highest.
        is_whole: whether it ends all tasks or none.
    """

    job_id: str
    share: float
    tasks: Sequence[TaskRecord]
    max_tasks: int
    rank: int = Priority.NORMAL.rank
    is_whole: bool = False


def select_victims(
    jobs: Iterable[PotentialVictim], room: Room, fits: Callable[[Room], frozenset[str]]
) -> StartLocation:
    """Selects the fewest jobs that have to end tasks for a job that does not fit, and the tasks.

    Args:
        jobs: the candidates.
        room: room without their tasks.
        fits: ids of the agents where the job would start; empty if there is too little room.

    Returns:
        No agents if the job would not fit even if all of them ended all they can.
    """
    able = [job for job in jobs if job.max_tasks > 0 and job.tasks]
    ranked = sorted(able, key=lambda job: (job.is_whole, -job.rank, -job.share, job.job_id))[:MAX_VICTIMS]
    if not ranked or not fits(with_tasks(room, (task for job in ranked for task in job.tasks))):
        return StartLocation()
    whole = {job.job_id for job in ranked if job.is_whole}
    for count in range(1, len(ranked) + 1):
        asked = ranked[:count]
        for agents in _orders(asked, room):
            given = {job.job_id: _tasks_to_end(job, agents) for job in asked}
            if used := fits(with_tasks(room, _all(given))):
                return _minimize(given, used, room, fits, whole)
    return StartLocation()


def with_tasks(room: Room, tasks: Iterable[TaskRecord]) -> dict[str, dict[str, float]]:
    """Room after these tasks have ended."""
    return totals([*room.items(), *((task.agent_id, task.resources) for task in tasks)])


def _orders(jobs: Sequence[PotentialVictim], room: Room) -> Iterator[list[str]]:
    """Orders in which to clear agents. If the jobs cannot end all tasks, each agent comes first in one of them."""

    def size(agent_id: str) -> tuple[float, ...]:
        return tuple(-room.get(agent_id, {}).get(name, 0.0) for name in ("gpus", "cpus", "mem"))

    agents = sorted({task.agent_id for job in jobs for task in job.tasks}, key=lambda one: (size(one), one))
    if all(job.max_tasks >= len(job.tasks) for job in jobs):
        yield agents
        return
    for first in agents[:MAX_FIRST_AGENTS]:
        yield [first, *(one for one in agents if one != first)]


def _tasks_to_end(job: PotentialVictim, agents: Sequence[str]) -> list[TaskRecord]:
    """Maximum number of the job's tasks, those on the first agents."""
    return sorted(job.tasks, key=lambda task: agents.index(task.agent_id))[: job.max_tasks]


def _minimize(
    given: Mapping[str, Sequence[TaskRecord]],
    used: frozenset[str],
    room: Room,
    fits: Callable[[Room], frozenset[str]],
    whole: Collection[str],
) -> StartLocation:
    """Drops tasks from the selection that the job does not need, first those of users with the smallest share.

    Jobs in `whole` keep all their tasks or none.
    """
    left = {
        job_id: [task for task in tasks if task.agent_id in used or job_id in whole] for job_id, tasks in given.items()
    }
    for job_id in reversed(left):
        tasks = left[job_id]
        if job_id in whole:
            if fits(with_tasks(room, _all({**left, job_id: ()}))):
                left[job_id] = []
            continue

        def is_enough(count: int, job_id: str = job_id, tasks: Sequence[TaskRecord] = tasks) -> bool:
            return bool(fits(with_tasks(room, _all({**left, job_id: tasks[:count]}))))

        left[job_id] = tasks[: bisect.bisect_left(range(len(tasks)), True, key=is_enough)]
    single = {job_id: tasks for job_id, tasks in left.items() if job_id not in whole}
    for task in list(_all(single))[::-1][:MAX_SPARE_CHECKS]:
        without = {job_id: [one for one in tasks if one is not task] for job_id, tasks in left.items()}
        if fits(with_tasks(room, _all(without))):
            left = without
    victim_tasks = {job_id: frozenset(task.task_id for task in tasks) for job_id, tasks in left.items() if tasks}
    return StartLocation(fits(with_tasks(room, _all(left))), victim_tasks)


def _all(given: Mapping[str, Sequence[TaskRecord]]) -> Iterator[TaskRecord]:
    for tasks in given.values():
        yield from tasks
