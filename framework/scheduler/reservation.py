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
HOLD_S = 30.0
RECHECK_S = 30.0
"""How often it is looked whether the agents of a reservation are still the right ones."""
PAUSE_S = 5.0
"""How long after one job was asked where it would go the next one is."""
USELESS_S = 600.0
"""How long a job gets no reservation after it had one that did not help."""
TURN_S = 180.0
"""How long a job's first reservation waits for tasks to end; each that follows waits twice as long."""
MAKES_WAY_S = 600.0
"""How long it waits, if instead of that elastic jobs are to give up tasks for it."""


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


@dataclass(frozen=True)
class Contender:
    """A job of which nothing runs and which wants to start, or start again.

    Attributes:
        job_id: which.
        since_s: since when it waits.
        is_overtaken: whether a job behind it has started meanwhile.
        can_be_helped: whether a job on one of these agents can be preempted.
        place: where it would start if others made way, or else ended; no agents if it would not fit even then, None if
            that is not known at the moment.
    """

    job_id: str
    since_s: float
    is_overtaken: bool
    can_be_helped: Callable[[frozenset[str]], bool]
    place: Callable[[], Place | None]


@dataclass(frozen=True)
class Reservation:
    """Agents that are kept for a job.

    Attributes:
        job_id: for which.
        agents: their ids.
        since_s: since when.
        hold_s: how long what is free there is held, and then given back.
        gives_up: elastic job -> ids of the tasks that it gives up, or has given up, for the job.
        awaits_ends: whether tasks have to end there as well that nobody can ask to.
    """

    job_id: str
    agents: frozenset[str]
    since_s: float
    hold_s: float = HOLD_S
    gives_up: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_ends: bool = False

    def is_holding(self, now_s: float) -> bool:
        """Whether offers of its agents are held against other frameworks just now."""
        return int((now_s - self.since_s) // self.hold_s) % 2 == 0

    def turns_s(self, now_s: float) -> float:
        """Seconds until that changes."""
        return self.hold_s - (now_s - self.since_s) % self.hold_s


@dataclass(frozen=True)
class _Turns:
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
        hold_s: see `Reservation`.

    Attributes:
        current: the reservation; None if nobody has one.
    """

    def __init__(self, after_s: float = RESERVE_AFTER_S, hold_s: float = HOLD_S) -> None:
        self._after_s = after_s
        self._hold_s = hold_s
        self._useless_until_s: dict[str, float] = {}
        self._turns: dict[str, _Turns] = {}
        self._checked_s = -math.inf
        self.current: Reservation | None = None

    def keeps_from(self, job_id: str, agent_id: str) -> bool:
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
        self._turns = {job_id: turns for job_id, turns in self._turns.items() if job_id in waiting}
        if self.current is not None and self.current.job_id not in waiting:
            self.current = None
            self._checked_s = -math.inf
        self._end_turn(now_s)
        if self.current is None and now_s - self._checked_s >= PAUSE_S:
            entitled = [
                one
                for one in contenders
                if now_s - one.since_s >= self._after_s and one.job_id not in self._useless_until_s
            ]
            if entitled:
                self._place(min(entitled, key=lambda one: now_s < self._turns_of(one.job_id).rests_until_s), now_s)
        elif self.current is not None and now_s - self._checked_s >= RECHECK_S:
            self._place(waiting[self.current.job_id], now_s)
        now = frozenset() if self.current is None else self.current.agents
        return before is not None and not before.agents <= now

    def did_not_help(self, now_s: float) -> None:
        """The job has seen all of its agents free, and has not started."""
        if self.current is not None:
            self._useless_until_s[self.current.job_id] = now_s + USELESS_S
            self.current = None
            self._checked_s = -math.inf

    def _turns_of(self, job_id: str) -> _Turns:
        return self._turns.get(job_id, _Turns())

    def _end_turn(self, now_s: float) -> None:
        """Takes back a reservation that has waited for others in vain; the next may be for the same job."""
        reservation = self.current
        if reservation is None or not (reservation.awaits_ends or reservation.gives_up):
            return
        turn_s, count = now_s - reservation.since_s, self._turns_of(reservation.job_id).count
        if turn_s >= (TURN_S if reservation.awaits_ends else MAKES_WAY_S) * 2**count:
            self._turns[reservation.job_id] = _Turns(count + 1, now_s + (count + 1) * turn_s)
            self.current = None
            self._checked_s = -math.inf

    def _place(self, contender: Contender, now_s: float) -> None:
        place = contender.place()
        if place is None:
            return
        self._checked_s = now_s
        agents, gives_up, awaits_ends = place.agents, place.gives_up, place.awaits_ends
        helps = contender.is_overtaken or len(agents) > 1 or gives_up or contender.can_be_helped(agents)
        if not agents or not helps:
            # It does not fit yet, or is simply the next: whatever becomes free is offered to it first.
            self._useless_until_s[contender.job_id] = now_s + self._after_s
            self.current = None
        elif self.current is not None:
            self.current = dataclasses.replace(self.current, agents=agents, gives_up=gives_up, awaits_ends=awaits_ends)
        else:
            self.current = Reservation(contender.job_id, agents, now_s, self._hold_s, gives_up, awaits_ends)
