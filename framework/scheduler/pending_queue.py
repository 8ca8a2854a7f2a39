"""Pending jobs: their order, waiting times, reservations and preemption; and a snapshot of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from framework.scheduler.agents import AgentDirectory, AgentFacts, OtherFrameworksUsage
from framework.scheduler.amounts import Amounts, subtract, total, totals
from framework.scheduler.fair_share import FairQueue, QueueCandidate
from framework.scheduler.feasibility import FitCache, nodes_for
from framework.scheduler.job import Countable, Excluding, JobEntry, Need, Preemptible, Resizable
from framework.scheduler.offer_pool import OfferPool
from framework.scheduler.preemption import Preemption, Room, UnknownPlaceError, may_preempt
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import TaskRecord
from framework.scheduler.reservation import Contender, Reservation, Reservations, StartLocation
from framework.scheduler.snapshot import JobFacts, Snapshot

PLACEMENT_TIMEOUT_S = 60.0
"""If no placement with preemption can be planned within this time, the job waits for tasks to end instead."""
GANG_CHECK_LIMIT = 3
"""Number of pending jobs that are checked for needing several agents at the same time."""


class PendingQueue:
    """Compares the jobs with each other; reviewed about once a second.

    Attributes:
        gang_waits: whether a pending job needs several agents at the same time, and would fit if it got them.
    """

    def __init__(
        self,
        jobs: Mapping[str, JobEntry],
        fair_queue: FairQueue,
        agents: AgentDirectory | None,
        reservations: Reservations,
        call_job: Callable[..., None],
        notify: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._jobs = jobs
        self._fair_queue = fair_queue
        self._directory = agents
        self._reservations = reservations
        self._call_job = call_job
        self._fit_cache = FitCache(clock)
        self._preemption = Preemption(jobs, call_job, notify)
        self._waits_since_s: dict[str, float] = {}
        self._unplaced_since_s: dict[str, float] = {}
        self._others = OtherFrameworksUsage()
        self.gang_waits = False

    def order(self, jobs: Sequence[JobEntry]) -> list[JobEntry]:
        """Returns the jobs that request offers, in service order."""
        now_s = time.time()
        requesting = [
            QueueCandidate(entry.job_id, entry.user, entry.number, need, entry.rank(now_s))
            for entry in jobs
            if (need := entry.job.need) is not Need.NOTHING
        ]
        ordered = self._fair_queue.order(requesting, self._allocated_by_user(), self._total())
        return [self._jobs[candidate.job_id] for candidate in ordered]

    def review(self, pool: OfferPool, now_s: float) -> bool:
        """Updates waiting times and the reservation, and preempts jobs for it.

        Returns:
            Whether agents that were reserved are free for all again.
        """
        self._others.observe(self._agents() or (), self._allocated_by_agent(), now_s)
        waiting = [entry for entry in self.order(list(self._jobs.values())) if _waits(entry)]
        self._waits_since_s = {entry.job_id: self._waits_since_s.get(entry.job_id, now_s) for entry in waiting}
        self._unplaced_since_s = {
            job_id: since_s for job_id, since_s in self._unplaced_since_s.items() if job_id in self._waits_since_s
        }
        self._drop_if_useless(pool, now_s)
        released = self._reservations.update(
            now_s, [self._contender(entry, now_s) for entry in waiting if entry.sizing]
        )
        reservation = self._reservations.current
        self._preemption.keep_only(self._waits_since_s.keys())
        self._preemption.request_tasks(reservation)
        if reservation is not None:
            for entry, job in self._preemptible_on(reservation.job_id, reservation.agents):
                self._call_job(entry, job.preempt, reservation.agents)
        # The reservation has used the planning budget first.
        self.gang_waits = self._gang_fits(_gangs(waiting)[:GANG_CHECK_LIMIT])
        self._fit_cache.keep_only(set(self._jobs))
        known = self._agents()
        pool.forget_gone_agents(None if known is None else {agent.agent_id for agent in known})
        return released

    def room(self) -> list[tuple[AgentFacts, Amounts]] | None:
        """Agents, and the part of each that other frameworks do not use; None if unknown."""
        agents = self._agents()
        if agents is None:
            return None
        return [(agent, subtract(agent.total, self._others.all.get(agent.agent_id, {}))) for agent in agents]

    def snapshot(self, pool: OfferPool, now_s: float, *, connected: bool) -> Snapshot:
        reservation = self._reservations.current
        return Snapshot(
            time_s=time.time(),
            connected=connected,
            agents=self._agents(),
            others=self._others.all,
            gone=() if self._directory is None else self._directory.gone,
            offers=dict(pool.last),
            last_offer_s=pool.last_offer_s,
            jobs={entry.job_id: self._facts(entry, now_s) for entry in self._jobs.values()},
            order=tuple(entry.job_id for entry in self.order(list(self._jobs.values()))),
            shares=self._shares(),
            reservation=reservation,
            reserved_for_s=0.0 if reservation is None else now_s - reservation.since_s,
        )

    def _facts(self, entry: JobEntry, now_s: float) -> JobFacts:
        since_s = self._waits_since_s.get(entry.job_id)
        return JobFacts(
            job_id=entry.job_id,
            user=entry.user,
            need=entry.job.need,
            is_ending=entry.is_ending,
            constraints=entry.parsed_constraints,
            sizing=entry.sizing,
            allocated=totals((task.agent_id, task.resources) for task in entry.tasks.values()),
            tasks=len(entry.tasks),
            waits_for_allocation=not entry.has_tasks
            and isinstance(entry.job, Resizable)
            and entry.job.waits_for_allocation,
            excluded=entry.job.excluded_agents() if isinstance(entry.job, Excluding) else {},
            waits_since_s=None if since_s is None else time.time() - (now_s - since_s),
            missing_tasks=entry.job.missing_tasks() if isinstance(entry.job, Countable) else None,
        )

    def _contender(self, entry: JobEntry, now_s: float) -> Contender:
        return Contender(
            entry.job_id,
            self._waits_since_s[entry.job_id],
            entry.offers.was_bypassed,
            lambda agents: any(True for _ in self._preemptible_on(entry.job_id, agents)),
            lambda: self._best_place(entry, now_s),
            is_urgent=entry.priority is Priority.HIGH,
        )

    def _gang_fits(self, gangs: Sequence[JobEntry]) -> bool:
        places = [self._place(entry, beside_others=False) for entry in gangs]
        # Keep the previous value while the places are unknown.
        return any(place is not None and len(place) > 1 for place in places) or (self.gang_waits and None in places)

    def _preemptible_on(self, job_id: str, agents: frozenset[str]) -> Iterator[tuple[JobEntry, Preemptible]]:
        """Other jobs with tasks on these agents that can vacate them."""
        waiting, now_s = self._jobs[job_id], time.time()
        running = [
            entry for entry in self._jobs.values() if any(task.agent_id in agents for task in entry.tasks.values())
        ]
        for entry in running:
            if entry is not waiting and isinstance(entry.job, Preemptible) and may_preempt(waiting, entry, now_s):
                yield entry, entry.job

    def _agents(self) -> tuple[AgentFacts, ...] | None:
        return None if self._directory is None else self._directory.current()

    def _drop_if_useless(self, pool: OfferPool, now_s: float) -> None:
        reservation = self._reservations.current
        entry = None if reservation is None else self._jobs.get(reservation.job_id)
        if (
            reservation is None
            or entry is None
            or entry.offers.seen_generation != pool.generation
            or entry.offers.locked
        ):
            return
        offered = pool.supply(pool.offers)
        busy = {task.agent_id for task in self._tasks()}
        if reservation.agents <= offered.keys() - busy or self._should_fit(entry, reservation, offered):
            self._reservations.mark_useless(now_s)

    def _should_fit(self, entry: JobEntry, reservation: Reservation, offered: Room) -> bool:
        """Whether all victims have ended, and the job fits into the offers of the reserved agents."""
        if not self._preemption.victims_have_ended(reservation):
            return False
        cleared = [agent for agent in self._usable(entry) if agent.agent_id in reservation.agents & offered.keys()]
        try:
            return bool(self._fits(entry, cleared, offered))
        except UnknownPlaceError:
            return False

    def _best_place(self, entry: JobEntry, now_s: float) -> StartLocation | None:
        """Where a job would start if others were preempted, or else ended; None if unknown now."""
        agents = self._place(entry, beside_others=True)
        if not agents:
            return None if agents is None else StartLocation()
        reservation = self._reservations.current
        mine = reservation if reservation is not None and reservation.job_id == entry.job_id else None
        usable, others = self._usable(entry), self._others.all

        def fits(room: Room) -> frozenset[str]:
            return self._fits(entry, usable, room)

        try:
            place = self._preemption.place(entry, usable, others, mine, self._shares, fits)
        except UnknownPlaceError:
            elapsed_s = now_s - self._unplaced_since_s.setdefault(entry.job_id, now_s)
            if elapsed_s < PLACEMENT_TIMEOUT_S or (mine is not None and mine.victim_tasks):
                return None
            place = StartLocation()
        self._unplaced_since_s.pop(entry.job_id, None)
        if place.agents:
            return place
        # Another place would waste what has become free on the reserved agents.
        if mine is not None and self._place(entry, beside_others=True, among=mine.agents) != frozenset():
            agents = mine.agents
        else:
            agents = self._preemption.earliest_agents(entry, usable, others, agents, fits)
        return StartLocation(agents, place.victim_tasks, awaits_task_ends=True)

    def _usable(self, entry: JobEntry) -> list[AgentFacts]:
        return [one for one in self._agents() or () if entry.parsed_constraints.admits(one.attributes, one.hostname)]

    def _fits(self, entry: JobEntry, agents: Sequence[AgentFacts], room: Room) -> frozenset[str]:
        """Ids of the agents that a job would use with this room."""
        assert entry.sizing is not None
        nodes = nodes_for(entry.sizing, [(agent, room[agent.agent_id]) for agent in agents])
        fit = self._fit_cache.fit(entry.job_id, entry.sizing, entry.job.equivalence_class, nodes)
        if fit is None:
            raise UnknownPlaceError
        return frozenset(agent.agent_id for agent in agents if agent.node in fit.nodes)

    def _place(
        self, entry: JobEntry, *, beside_others: bool, among: frozenset[str] | None = None
    ) -> frozenset[str] | None:
        """Ids of the agents that a job would use if no task of this framework ran, or (without `beside_others`) none of
        any framework.

        None if unknown now. `among` restricts the agents.
        """
        if self._agents() is None:
            return None
        if entry.sizing is None:
            return frozenset()
        others = self._others.all if beside_others else {}
        usable = [agent for agent in self._usable(entry) if among is None or agent.agent_id in among]
        room = {agent.agent_id: subtract(agent.total, others.get(agent.agent_id, {})) for agent in usable}
        try:
            return self._fits(entry, usable, room)
        except UnknownPlaceError:
            return None

    def _shares(self) -> dict[str, float]:
        """User -> dominant share of the cluster, divided by the user's weight."""
        return self._fair_queue.shares(
            {entry.user for entry in self._jobs.values()}, self._allocated_by_user(), self._total()
        )

    def _allocated_by_agent(self) -> dict[str, dict[str, float]]:
        return totals((task.agent_id, task.resources) for entry in self._jobs.values() for task in entry.tasks.values())

    def _tasks(self) -> Iterator[TaskRecord]:
        for entry in self._jobs.values():
            yield from entry.tasks.values()

    def _allocated_by_user(self) -> dict[str, dict[str, float]]:
        return totals((entry.user, task.resources) for entry in self._jobs.values() for task in entry.tasks.values())

    def _total(self) -> dict[str, float]:
        """Amounts of the cluster for this role; if unknown, the amounts of own tasks."""
        agents = self._agents()
        if agents:
            return total(agent.total for agent in agents)
        return total(self._allocated_by_user().values())


def _waits(entry: JobEntry) -> bool:
    """Whether no task of a job runs although it needs one."""
    return not entry.has_tasks and entry.job.need in (Need.REPLACE_LOST, Need.START)


def _gangs(jobs: Sequence[JobEntry]) -> list[JobEntry]:
    return [entry for entry in jobs if entry.sizing is not None and entry.sizing.is_gang]
