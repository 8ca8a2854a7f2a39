"""Makes room for the job that has a reservation: where it is too little that searches leave, elastic jobs shrink.

An elastic job is asked once for the same job, and does not grow again until that one runs or is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from framework.service.agents import AgentFacts, Amounts
from framework.service.concession import Place, Room, Shrinkable, who_gives_up, with_tasks
from framework.service.others import left_of
from framework.service.records import TaskRecord
from framework.service.reservation import Reservation
from framework.service.seat import Seat
from framework.service.snapshot import JobFacts
from framework.service.tenant import Shrinking, Spare, Vacating


class UnknownPlaceError(Exception):
    """It cannot be said now where a job would start; raised while it is looked for, and caught there."""


class MakingWay:
    """Knows what the jobs could leave to others, and asks them to.

    Args:
        seats: the jobs, by id; the hub's own.
        guarded: makes a call of a job's state machine.
        tell: tells those who watch a job something, by the job's id.
    """

    def __init__(
        self, seats: Mapping[str, Seat], guarded: Callable[..., None], tell: Callable[[str, str], None]
    ) -> None:
        self._seats = seats
        self._guarded = guarded
        self._tell = tell
        self._asked: Mapping[str, frozenset[str]] = {}
        self._has_made_way: dict[str, set[str]] = {}

    def place(
        self,
        seat: Seat,
        agents: Sequence[AgentFacts],
        others: Room,
        kept: Reservation | None,
        shares: Callable[[], Mapping[str, float]],
        fits: Callable[[Room], frozenset[str]],
    ) -> Place:
        """Where a job would start if others made way.

        Args:
            seat: the job.
            agents: those that it may use.
            others: agent -> what other frameworks hold there.
            kept: its reservation, if it has one.
            shares: user -> dominant share, divided by the user's weight.
            fits: where it would start with this room, as ids of agents.

        Returns:
            No agents if it would not fit then, or nobody can make way.

        Raises:
            UnknownPlaceError: if `fits` does.
        """
        spares = {one.job_id: tenant.spare() for one, tenant in self._shrinking() if one is not seat}
        soon = self._ending(spares.values())
        before = {} if kept is None else kept.gives_up
        if not before and not soon and not any(spare.most for spare in spares.values()):
            return Place()
        staying = [task for task in self._tasks() if task.task_id not in soon]
        room = _room(agents, others, staying)
        here = {task.task_id: task for task in staying if task.agent_id in room}
        self._note(kept)
        known = self._has_made_way.get(seat.job_id, set())
        made = {job_id: task_ids for job_id, task_ids in before.items() if job_id in known}
        if there := fits(room):
            return Place(there, made)
        asked = {job_id: tasks for job_id, tasks in before.items() if _still_can(tasks, spares.get(job_id))}
        if asked.keys() - made.keys():
            tasks = [here[task_id] for task_ids in asked.values() for task_id in task_ids if task_id in here]
            if there := fits(with_tasks(room, tasks)):
                return Place(there, {**asked, **made})
        able = [job_id for job_id, spare in spares.items() if spare.most and job_id not in known]
        of_user = shares() if able else {}
        found = who_gives_up(
            [
                Shrinkable(
                    job_id,
                    of_user.get(self._seats[job_id].user, 0.0),
                    [here[task_id] for task_id in spares[job_id].task_ids if task_id in here],
                    spares[job_id].most,
                )
                for job_id in able
            ],
            room,
            fits,
        )
        return dataclasses.replace(found, gives_up={**found.gives_up, **made})

    def soonest(
        self,
        agents: Sequence[AgentFacts],
        others: Room,
        anywhere: frozenset[str],
        fits: Callable[[Room], frozenset[str]],
    ) -> frozenset[str]:
        """Where a job would start first if tasks ended in the order in which those launched last end first.

        Nobody knows how long tasks last; but those that have run longest are the least likely to end soon.

        Args:
            agents: those that it may use.
            others: agent -> what other frameworks hold there.
            anywhere: ids of the agents that it would use if no task of ours ran.
            fits: where it would start with this room, as ids of agents.

        Returns:
            Ids of agents; the best found so far if `fits` raises `UnknownPlaceError`.
        """
        soon = self._ending([tenant.spare() for _, tenant in self._shrinking()])
        ids = {agent.agent_id for agent in agents}
        there = [task for task in self._tasks() if task.agent_id in ids and task.task_id not in soon]
        there.sort(key=lambda task: (task.launched_s, task.task_id))
        found, stay, must_end = anywhere, 0, len(there) + 1
        while must_end - stay > 1:
            middle = (stay + must_end) // 2
            try:
                used = fits(_room(agents, others, there[:middle]))
            except UnknownPlaceError:
                return found
            if used:
                found, stay = used, middle
            else:
                must_end = middle
        return found

    def ask(self, kept: Reservation | None) -> None:
        """Asks for what the reservation needs, and tells those who need not make way any more."""
        self._note(kept)
        wanted: Mapping[str, frozenset[str]] = {} if kept is None else kept.gives_up
        for job_id in sorted(self._asked.keys() | wanted.keys()):
            seat = self._seats.get(job_id)
            if seat is None or not isinstance(seat.tenant, Shrinking):
                continue
            task_ids = wanted.get(job_id, frozenset())
            if kept is None or not task_ids:
                self._guarded(seat, seat.tenant.give_up, frozenset(), "")
                continue
            if job_id not in self._asked:
                self._tell(kept.job_id, f"job {job_id} of {seat.user} makes way: it gives up {_workers(task_ids)}")
            reason = f"job {kept.job_id} has waited long, and fits once this one has given up {_workers(task_ids)}"
            self._guarded(seat, seat.tenant.give_up, task_ids, reason)
        self._asked = dict(wanted)

    def has_made_way(self, kept: Reservation) -> bool:
        """Whether all has ended that was asked for, and there was something."""
        tasks = [task_id for task_ids in kept.gives_up.values() for task_id in task_ids]
        running = {task.task_id for task in self._tasks()}
        return bool(tasks) and not running & set(tasks)

    def forget(self, waiting: Collection[str]) -> None:
        """Only these jobs wait."""
        self._has_made_way = {job_id: made for job_id, made in self._has_made_way.items() if job_id in waiting}

    def _note(self, kept: Reservation | None) -> None:
        """Remembers who has given something up for the job, or is giving it up."""
        if kept is None:
            return
        for job_id, task_ids in kept.gives_up.items():
            seat = self._seats.get(job_id)
            tenant = None if seat is None else seat.tenant
            leaving: frozenset[str] = tenant.spare().leaving if isinstance(tenant, Shrinking) else frozenset()
            if seat is None or not task_ids <= seat.tasks.keys() - leaving:
                self._has_made_way.setdefault(kept.job_id, set()).add(job_id)

    def _ending(self, spares: Collection[Spare]) -> set[str]:
        """Tasks that end soon, or would if their search were asked to."""
        ending = {task_id for spare in spares for task_id in spare.leaving}
        for seat in self._seats.values():
            if seat.is_ending:
                ending |= seat.tasks.keys()
            elif isinstance(seat.tenant, Vacating):
                ending |= seat.tenant.vacatable()
        return ending

    def _shrinking(self) -> Iterator[tuple[Seat, Shrinking]]:
        for seat in self._seats.values():
            if isinstance(seat.tenant, Shrinking) and seat.has_tasks and not seat.is_ending:
                yield seat, seat.tenant

    def _tasks(self) -> Iterator[TaskRecord]:
        for seat in self._seats.values():
            yield from seat.tasks.values()


def why_it_shrinks(kept: Reservation | None, job_id: str) -> str:
    """For whom a job gives up tasks, as a sentence that follows another; empty if for nobody."""
    if kept is None or job_id not in kept.gives_up:
        return ""
    given = _workers(kept.gives_up[job_id])
    return f" It makes way for job {kept.job_id}, which has waited long and fits without {given} of this one."


def what_it_leaves(kept: Reservation | None, job: JobFacts, waiting: str) -> str:
    """What a job leaves to one that waits, as a sentence that follows another; empty if nothing.

    Args:
        kept: what is kept for whom.
        job: the one that could leave something.
        waiting: id of the one that waits.
    """
    if kept is None or kept.job_id != waiting:
        return ""
    if job.job_id in kept.gives_up:
        return f" It makes way, and gives up {_workers(kept.gives_up[job.job_id])}."
    is_search = job.sizing is not None and not job.sizing.is_gang
    return " It is asked to leave what is kept for this one." if is_search and job.held.keys() & kept.agents else ""


def _room(agents: Sequence[AgentFacts], others: Room, staying: Sequence[TaskRecord]) -> dict[str, Amounts]:
    """What there is of agents beside others and these tasks of ours."""
    held = with_tasks({agent.agent_id: others.get(agent.agent_id, {}) for agent in agents}, staying)
    return {agent.agent_id: left_of(agent, held[agent.agent_id]) for agent in agents}


def _still_can(task_ids: frozenset[str], spare: Spare | None) -> bool:
    return spare is not None and task_ids <= set(spare.task_ids) and len(task_ids) <= spare.most


def _workers(task_ids: Collection[str]) -> str:
    return f"{len(task_ids)} worker{'' if len(task_ids) == 1 else 's'}"
