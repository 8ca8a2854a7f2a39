"""Keeps agents for the job that has waited longest out of turn, so that small jobs do not starve large ones.

Jobs that fit go ahead of jobs that do not (backfilling). A job that is first in the order and has waited long gets the
agents that it would use if others made way (`preemption.py`), or else those that are likely to come free
first: nobody else of us starts there any more, and what is free there is kept from other frameworks for a while, given
back for as long, and so on.

Nobody knows when tasks end, so a reservation that waits for that is tried for a while only, and elsewhere then, longer
each time. In between other jobs have their turns, longer each time by comparison; so jobs that never can start take
less and less of the time, and each that can gets a turn that is long enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

RESERVE_AFTER_S = 60.0
KEEP_S = 30.0
RECHECK_S = 30.0
"""How often it is looked whether the agents of a reservation are still the right ones."""
PLACEMENT_INTERVAL_S = 5.0
"""How long after one job was asked where it would go the next one is."""
USELESS_COOLDOWN_S = 600.0
"""How long a job gets no reservation after it had one that did not help."""
FIRST_TURN_S = 180.0
"""How long a job's first reservation waits for tasks to end; each that follows waits twice as long."""
FIRST_PREEMPTION_TURN_S = 600.0
"""How long it waits, if instead of that elastic jobs are to give up tasks for it."""


@dataclass(frozen=True)
class Place:
    """Where a job would start.

    Attributes:
        agents: their ids; none if it would not fit.
        victim_tasks: elastic job -> ids of the tasks that it gives up for that.
        awaits_task_ends: whether tasks have to end there as well that nobody can ask to.
    """

    agents: frozenset[str] = frozenset()
    victim_tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_task_ends: bool = False


@dataclass(frozen=True)
class Contender:
    """A job of which nothing runs and which wants to start, or start again.

    Attributes:
        job_id: which.
        since_s: since when it waits.
        was_bypassed: whether a job behind it has started meanwhile.
        has_preemptible: whether a job on one of these agents can be preempted.
        place: where it would start if others made way, or else ended; no agents if it would not fit even then, None if
            that is not known at the moment.
    """

    job_id: str
    since_s: float
    was_bypassed: bool
    has_preemptible: Callable[[frozenset[str]], bool]
    place: Callable[[], Place | None]


@dataclass(frozen=True)
class Reservation:
    """Agents that are kept for a job.

    Attributes:
        job_id: for which.
        agents: their ids.
        since_s: since when.
        keep_s: how long what is free there is held, and then given back.
        victim_tasks: elastic job -> ids of the tasks that it gives up, or has given up, for the job.
        awaits_task_ends: whether tasks have to end there as well that nobody can ask to.
    """

    job_id: str
    agents: frozenset[str]
    since_s: float
    keep_s: float = KEEP_S
    victim_tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_task_ends: bool = False

    def keeps_offers(self, now_s: float) -> bool:
        """Whether offers of its agents are held against other frameworks just now."""
        return int((now_s - self.since_s) // self.keep_s) % 2 == 0

    def phase_left_s(self, now_s: float) -> float:
        """Seconds until that changes."""
        return self.keep_s - (now_s - self.since_s) % self.keep_s


@dataclass(frozen=True)
class _FailedTurns:
    """Reservations that a job had in vain, since the tasks that they waited for did not end, or nobody made way.

    Attributes:
        count: how many.
        rests_until_s: so long other jobs go first.
    """

    count: int = 0
    rests_until_s: float = -math.inf


class Reservations:
    """Decides who has the reservation; there is one at a time.

    Args:
        after_s: how long a job has waited before it gets one.
        keep_s: see `Reservation`.

    Attributes:
        current: the reservation; None if nobody has one.
    """

    def __init__(self, after_s: float = RESERVE_AFTER_S, keep_s: float = KEEP_S) -> None:
        self._after_s = after_s
        self._keep_s = keep_s
        self._useless_until_s: dict[str, float] = {}
        self._failed_turns: dict[str, _FailedTurns] = {}
        self._checked_s = -math.inf
        self.current: Reservation | None = None

    def is_reserved_for_other(self, job_id: str, agent_id: str) -> bool:
        """Whether an agent is kept for another job than this one."""
        return self.current is not None and self.current.job_id != job_id and agent_id in self.current.agents

    def update(self, now_s: float, contenders: Sequence[Contender]) -> bool:
        """Gives, keeps or takes back the reservation; asks one job at most where it would go.

        Args:
            now_s: the time.
            contenders: those that wait, in the order in which they are served.

        Returns:
            Whether agents that were kept are not any more.
        """
        before = self.current
        waiting = {one.job_id: one for one in contenders}
        self._useless_until_s = {
            job_id: until_s
            for job_id, until_s in self._useless_until_s.items()
            if job_id in waiting and now_s < until_s
        }
        self._failed_turns = {job_id: turns for job_id, turns in self._failed_turns.items() if job_id in waiting}
        if self.current is not None and self.current.job_id not in waiting:
            self.current = None
            self._checked_s = -math.inf
        self._end_turn(now_s)
        if self.current is None and now_s - self._checked_s >= PLACEMENT_INTERVAL_S:
            entitled = [
                one
                for one in contenders
                if now_s - one.since_s >= self._after_s and one.job_id not in self._useless_until_s
            ]
            if entitled:
                self._place(
                    min(entitled, key=lambda one: now_s < self._failed_turns_of(one.job_id).rests_until_s), now_s
                )
        elif self.current is not None and now_s - self._checked_s >= RECHECK_S:
            self._place(waiting[self.current.job_id], now_s)
        now = frozenset() if self.current is None else self.current.agents
        return before is not None and not before.agents <= now

    def mark_useless(self, now_s: float) -> None:
        """The job has seen all of its agents free, and has not started."""
        if self.current is not None:
            self._useless_until_s[self.current.job_id] = now_s + USELESS_COOLDOWN_S
            self.current = None
            self._checked_s = -math.inf

    def _failed_turns_of(self, job_id: str) -> _FailedTurns:
        return self._failed_turns.get(job_id, _FailedTurns())

    def _end_turn(self, now_s: float) -> None:
        """Takes back a reservation that has waited for others in vain; the next may be for the same job."""
        reservation = self.current
        if reservation is None or not (reservation.awaits_task_ends or reservation.victim_tasks):
            return
        turn_s, count = now_s - reservation.since_s, self._failed_turns_of(reservation.job_id).count
        if turn_s >= (FIRST_TURN_S if reservation.awaits_task_ends else FIRST_PREEMPTION_TURN_S) * 2**count:
            self._failed_turns[reservation.job_id] = _FailedTurns(count + 1, now_s + (count + 1) * turn_s)
            self.current = None
            self._checked_s = -math.inf

    def _place(self, contender: Contender, now_s: float) -> None:
        place = contender.place()
        if place is None:
            return
        self._checked_s = now_s
        agents, victim_tasks, awaits_task_ends = place.agents, place.victim_tasks, place.awaits_task_ends
        helps = contender.was_bypassed or len(agents) > 1 or victim_tasks or contender.has_preemptible(agents)
        if not agents or not helps:
            # It does not fit yet, or is simply the next: whatever becomes free is offered to it first.
            self._useless_until_s[contender.job_id] = now_s + self._after_s
            self.current = None
        elif self.current is not None:
            self.current = dataclasses.replace(
                self.current, agents=agents, victim_tasks=victim_tasks, awaits_task_ends=awaits_task_ends
            )
        else:
            self.current = Reservation(contender.job_id, agents, now_s, self._keep_s, victim_tasks, awaits_task_ends)
