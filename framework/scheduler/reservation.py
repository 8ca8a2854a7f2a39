"""Reserves agents for one job that has waited long, so that small jobs do not starve large ones.

Jobs that fit start before jobs that do not (backfilling). A job that is first in the order and has waited long gets a
reservation of the agents that it would use if others were preempted (`preemption.py`), or else of those that are likely
to become free first. Other jobs of this framework do not start there. Free resources there are kept from other
frameworks and declined alternately, for equal times.

Task durations are unknown, so a reservation that depends on them ends after a while, and the next one may be for other
agents; each lasts longer. In between other jobs get reservations, for times that grow faster. So jobs that can never
start take less and less of the time, and each other job gets a turn that is long enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

RESERVE_AFTER_S = 60.0
URGENT_AFTER_S = 5.0
"""The same for jobs of high priority: offers of free agents may come first."""
KEEP_S = 30.0
"""Time for which free resources of a reservation are kept from other frameworks, and then offered to them."""
RECHECK_S = 30.0
"""Interval after which a reservation's agents are chosen again."""
PLACEMENT_INTERVAL_S = 5.0
"""Minimum interval between searches for a place."""
USELESS_COOLDOWN_S = 600.0
"""Time without a reservation for a job after one that did not help."""
FIRST_TURN_S = 180.0
"""Duration of a job's first reservation that depends on tasks ending; doubles each time."""
FIRST_PREEMPTION_TURN_S = 600.0
"""The same, if it depends on elastic jobs ending requested tasks."""


@dataclass(frozen=True)
class StartLocation:
    """Where a job would start.

    Attributes:
        agents: their ids; empty if it would not fit.
        victim_tasks: elastic job -> ids of the tasks that it has to end.
        awaits_task_ends: whether other tasks have to end as well that cannot be preempted.
    """

    agents: frozenset[str] = frozenset()
    victim_tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_task_ends: bool = False


@dataclass(frozen=True)
class Contender:
    """A pending job, for the first time or again.

    Attributes:
        job_id: the job.
        since_s: time since which it is pending.
        was_bypassed: whether a job behind it in the order has started since.
        has_preemptible: whether a job on one of these agents can be preempted.
        place: returns where it would start if others were preempted or ended; no agents if it would not fit even then,
            None if unknown now.
        is_urgent: whether it need not have waited long first, and takes the reservation of another that is not.
    """

    job_id: str
    since_s: float
    was_bypassed: bool
    has_preemptible: Callable[[frozenset[str]], bool]
    place: Callable[[], StartLocation | None]
    is_urgent: bool = False


@dataclass(frozen=True)
class Reservation:
    """Agents reserved for a job.

    Attributes:
        job_id: the job.
        agents: their ids.
        since_s: start time.
        keep_s: duration of each phase in which its free resources are kept or declined.
        victim_tasks: elastic job -> ids of the tasks that it ends, or has ended, for the job.
        awaits_task_ends: whether other tasks have to end as well that cannot be preempted.
    """

    job_id: str
    agents: frozenset[str]
    since_s: float
    keep_s: float = KEEP_S
    victim_tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaits_task_ends: bool = False

    def keeps_offers(self, now_s: float) -> bool:
        """Whether offers of its agents are kept from other frameworks in this phase."""
        return int((now_s - self.since_s) // self.keep_s) % 2 == 0

    def phase_left_s(self, now_s: float) -> float:
        """Seconds until that changes."""
        return self.keep_s - (now_s - self.since_s) % self.keep_s


@dataclass(frozen=True)
class _FailedTurns:
    """A job's reservations that ended without success.

    Attributes:
        count: their number.
        rests_until_s: time until which other jobs get reservations first.
    """

    count: int = 0
    rests_until_s: float = -math.inf


class Reservations:
    """Assigns the reservation; there is one at a time.

    Args:
        after_s: time for which a job has to be pending first.
        keep_s: see `Reservation`.

    Attributes:
        current: the reservation; None if there is none.
    """

    def __init__(self, after_s: float = RESERVE_AFTER_S, keep_s: float = KEEP_S) -> None:
        self._after_s = after_s
        self._keep_s = keep_s
        self._useless_until_s: dict[str, float] = {}
        self._failed_turns: dict[str, _FailedTurns] = {}
        self._checked_s = -math.inf
        self.current: Reservation | None = None

    def is_reserved_for_other(self, job_id: str, agent_id: str) -> bool:
        return self.current is not None and self.current.job_id != job_id and agent_id in self.current.agents

    def update(self, now_s: float, contenders: Sequence[Contender]) -> bool:
        """Starts, updates or ends the reservation; searches the place of at most one job.

        Args:
            now_s: the time.
            contenders: pending jobs in service order.

        Returns:
            Whether agents have been released.
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
        entitled = [
            one
            for one in contenders
            if now_s - one.since_s >= (URGENT_AFTER_S if one.is_urgent else self._after_s)
            and one.job_id not in self._useless_until_s
        ]
        is_taken = self.current is not None and not waiting[self.current.job_id].is_urgent
        if is_taken and any(one.is_urgent for one in entitled):
            self.current = None
            self._checked_s = -math.inf
        if self.current is None and now_s - self._checked_s >= PLACEMENT_INTERVAL_S:
            if entitled:
                self._place(
                    min(
                        entitled,
                        key=lambda one: (
                            now_s < self._failed_turns_of(one.job_id).rests_until_s,
                            not one.is_urgent,
                        ),
                    ),
                    now_s,
                )
        elif self.current is not None and now_s - self._checked_s >= RECHECK_S:
            self._place(waiting[self.current.job_id], now_s)
        now = frozenset() if self.current is None else self.current.agents
        return before is not None and not before.agents <= now

    def mark_useless(self, now_s: float) -> None:
        """Ends the reservation because all its agents were free and the job did not start."""
        if self.current is not None:
            self._useless_until_s[self.current.job_id] = now_s + USELESS_COOLDOWN_S
            self.current = None
            self._checked_s = -math.inf

    def _failed_turns_of(self, job_id: str) -> _FailedTurns:
        return self._failed_turns.get(job_id, _FailedTurns())

    def _end_turn(self, now_s: float) -> None:
        """Ends a reservation that has waited too long for tasks to end; the next may be for the same job."""
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
            # It does not fit on any agents yet, or is simply next: free resources are offered to it first.
            self._useless_until_s[contender.job_id] = now_s + self._after_s
            self.current = None
        elif self.current is not None:
            self.current = dataclasses.replace(
                self.current, agents=agents, victim_tasks=victim_tasks, awaits_task_ends=awaits_task_ends
            )
        else:
            self.current = Reservation(contender.job_id, agents, now_s, self._keep_s, victim_tasks, awaits_task_ends)
