"""The jobs that want offers: their order, who waits since when and for which agents, and a snapshot of all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from framework.scheduler.agents import AgentDirectory, AgentFacts, Others
from framework.scheduler.amounts import Amounts, left, total, totals
from framework.scheduler.fair_share import Candidate, FairQueue
from framework.scheduler.feasibility import FitCache, nodes_for
from framework.scheduler.job import Excluding, JobHandle, Need, Preemptible, Scalable
from framework.scheduler.offer_pool import OfferPool
from framework.scheduler.preemption import Preemption, Room, UnknownPlaceError
from framework.scheduler.records import TaskRecord
from framework.scheduler.reservation import Contender, Place, Reservation, Reservations
from framework.scheduler.snapshot import JobFacts, Snapshot

SOUGHT_S = 60.0
"""So long it may stay open where a job would start, if there is no time to plan it; then what is known has to do."""
FIRST = 3
"""How many of the jobs that wait are asked whether they need several agents at a time."""


class PendingQueue:
    """The jobs, compared with each other; reviewed once a second or so.

    Args:
        jobs: the jobs, by id; the scheduler's own.
        fair_queue: their order.
        agents: knows the agents; None where nobody does.
        reservations: what is kept for whom.
        isolated: makes a call of a job's state machine.
        notify: tells those who watch a job something, by the job's id.
        clock: seconds, monotonic.

    Attributes:
        gang_waits: whether a job waits that needs several agents at a time, and would fit if it had them.
    """

    def __init__(
        self,
        jobs: Mapping[str, JobHandle],
        fair_queue: FairQueue,
        agents: AgentDirectory | None,
        reservations: Reservations,
        isolated: Callable[..., None],
        notify: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._jobs = jobs
        self._fair_queue = fair_queue
        self._directory = agents
        self._reservations = reservations
        self._isolated = isolated
        self._fit_cache = FitCache(clock)
        self._preemption = Preemption(jobs, isolated, notify)
        self._waits_since_s: dict[str, float] = {}
        self._sought_since_s: dict[str, float] = {}
        self._others = Others()
        self.gang_waits = False

    def order(self, jobs: Sequence[JobHandle]) -> list[JobHandle]:
        """Those that want offers, who is served first first."""
        wanting = [
            Candidate(handle.job_id, handle.user, handle.number, need)
            for handle in jobs
            if (need := handle.job.need) is not Need.NOTHING
        ]
        ordered = self._fair_queue.order(wanting, self._held_by_users(), self._total())
        return [self._jobs[candidate.job_id] for candidate in ordered]

    def review(self, pool: OfferPool, now_s: float) -> bool:
        """Looks who waits since when, and so who gets a reservation; jobs that can be preempted are.

        Returns:
            Whether agents that were kept are free for all again.
        """
        self._others.observe(self._agents() or (), self._held_on_agents(), now_s)
        waiting = [handle for handle in self.order(list(self._jobs.values())) if _waits(handle)]
        self._waits_since_s = {handle.job_id: self._waits_since_s.get(handle.job_id, now_s) for handle in waiting}
        self._sought_since_s = {
            job_id: since_s for job_id, since_s in self._sought_since_s.items() if job_id in self._waits_since_s
        }
        self._drop_if_useless(pool, now_s)
        released = self._reservations.update(
            now_s, [self._contender(handle, now_s) for handle in waiting if handle.sizing]
        )
        reservation = self._reservations.current
        self._preemption.forget(self._waits_since_s.keys())
        self._preemption.ask(reservation)
        if reservation is not None:
            for handle, job in self._preemptible_on(reservation.job_id, reservation.agents):
                self._isolated(handle, job.preempt, reservation.agents)
        # What time there is to plan is for the reservation first.
        self.gang_waits = self._gang_fits(_gangs(waiting)[:FIRST])
        self._fit_cache.forget(set(self._jobs))
        known = self._agents()
        pool.forget(None if known is None else {agent.agent_id for agent in known})
        return released

    def room(self) -> list[tuple[AgentFacts, Amounts]] | None:
        """The agents, and what there is of each beside what other frameworks hold; None where they are not known."""
        agents = self._agents()
        if agents is None:
            return None
        return [(agent, left(agent.total, self._others.all.get(agent.agent_id, {}))) for agent in agents]

    def snapshot(self, pool: OfferPool, now_s: float, *, connected: bool) -> Snapshot:
        """All of it as it is now."""
        reservation = self._reservations.current
        return Snapshot(
            time_s=time.time(),
            connected=connected,
            agents=self._agents(),
            others=self._others.all,
            gone=() if self._directory is None else self._directory.gone,
            offers=dict(pool.last),
            last_offer_s=pool.last_offer_s,
            jobs={handle.job_id: self._facts(handle, now_s) for handle in self._jobs.values()},
            order=tuple(handle.job_id for handle in self.order(list(self._jobs.values()))),
            shares=self._shares(),
            reservation=reservation,
            kept_s=0.0 if reservation is None else now_s - reservation.since_s,
        )

    def _facts(self, handle: JobHandle, now_s: float) -> JobFacts:
        since_s = self._waits_since_s.get(handle.job_id)
        return JobFacts(
            job_id=handle.job_id,
            user=handle.user,
            need=handle.job.need,
            is_ending=handle.is_ending,
            constraints=handle.admitted,
            sizing=handle.sizing,
            held=totals((task.agent_id, task.resources) for task in handle.tasks.values()),
            tasks=len(handle.tasks),
            is_held=not handle.has_tasks and isinstance(handle.job, Scalable) and handle.job.is_held,
            excluded=handle.job.excluded_agents() if isinstance(handle.job, Excluding) else {},
            waits_since_s=None if since_s is None else time.time() - (now_s - since_s),
        )

    def _contender(self, handle: JobHandle, now_s: float) -> Contender:
        return Contender(
            handle.job_id,
            self._waits_since_s[handle.job_id],
            handle.is_overtaken,
            lambda agents: any(True for _ in self._preemptible_on(handle.job_id, agents)),
            lambda: self._best_place(handle, now_s),
        )

    def _gang_fits(self, gangs: Sequence[JobHandle]) -> bool:
        places = [self._place(handle, beside_others=False) for handle in gangs]
        # As long as it is not known it stays as it was.
        return any(place is not None and len(place) > 1 for place in places) or (self.gang_waits and None in places)

    def _preemptible_on(self, job_id: str, agents: frozenset[str]) -> Iterator[tuple[JobHandle, Preemptible]]:
        """Other jobs that hold something on these agents and can leave them."""
        there = [
            handle for handle in self._jobs.values() if any(task.agent_id in agents for task in handle.tasks.values())
        ]
        for handle in there:
            if handle.job_id != job_id and isinstance(handle.job, Preemptible):
                yield handle, handle.job

    def _agents(self) -> tuple[AgentFacts, ...] | None:
        return None if self._directory is None else self._directory.current()

    def _drop_if_useless(self, pool: OfferPool, now_s: float) -> None:
        reservation = self._reservations.current
        handle = None if reservation is None else self._jobs.get(reservation.job_id)
        if reservation is None or handle is None or handle.seen_generation != pool.generation or handle.locked_offers:
            return
        offered = pool.supply(pool.offers)
        busy = {task.agent_id for task in self._tasks()}
        if reservation.agents <= offered.keys() - busy or self._should_fit(handle, reservation, offered):
            self._reservations.did_not_help(now_s)

    def _should_fit(self, handle: JobHandle, reservation: Reservation, offered: Room) -> bool:
        """Whether all has ended that others were to give up for it, and is on offer."""
        if not self._preemption.has_made_way(reservation):
            return False
        there = [agent for agent in self._usable(handle) if agent.agent_id in reservation.agents & offered.keys()]
        try:
            return bool(self._fits(handle, there, offered))
        except UnknownPlaceError:
            return False

    def _best_place(self, handle: JobHandle, now_s: float) -> Place | None:
        """Where a job would start if others made way, or else ended; None if that is not known now."""
        agents = self._place(handle, beside_others=True)
        if not agents:
            return None if agents is None else Place()
        reservation = self._reservations.current
        mine = reservation if reservation is not None and reservation.job_id == handle.job_id else None
        usable, others = self._usable(handle), self._others.all

        def fits(room: Room) -> frozenset[str]:
            return self._fits(handle, usable, room)

        try:
            place = self._preemption.place(handle, usable, others, mine, self._shares, fits)
        except UnknownPlaceError:
            sought_s = now_s - self._sought_since_s.setdefault(handle.job_id, now_s)
            if sought_s < SOUGHT_S or (mine is not None and mine.gives_up):
                return None
            place = Place()
        self._sought_since_s.pop(handle.job_id, None)
        if place.agents:
            return place
        # What has come free so far would be lost elsewhere.
        if mine is not None and self._place(handle, beside_others=True, among=mine.agents) != frozenset():
            agents = mine.agents
        else:
            agents = self._preemption.soonest(usable, others, agents, fits)
        return Place(agents, place.gives_up, awaits_ends=True)

    def _usable(self, handle: JobHandle) -> list[AgentFacts]:
        return [one for one in self._agents() or () if handle.admitted.admits(one.attributes, one.hostname)]

    def _fits(self, handle: JobHandle, agents: Sequence[AgentFacts], room: Room) -> frozenset[str]:
        """Ids of the agents that a job would use if there were this much of them."""
        assert handle.sizing is not None
        nodes = nodes_for(handle.sizing, [(agent, room[agent.agent_id]) for agent in agents])
        fit = self._fit_cache.fit(handle.job_id, handle.sizing, handle.job.demand_key, nodes)
        if fit is None:
            raise UnknownPlaceError
        return frozenset(agent.agent_id for agent in agents if agent.node in fit.nodes)

    def _place(
        self, handle: JobHandle, *, beside_others: bool, among: frozenset[str] | None = None
    ) -> frozenset[str] | None:
        """Ids of the agents that a job would use if nothing of ours ran anywhere, or nothing of anybody's.

        None if that is not known now. If `among` is given, there are no other agents.
        """
        if self._agents() is None:
            return None
        if handle.sizing is None:
            return frozenset()
        others = self._others.all if beside_others else {}
        usable = [agent for agent in self._usable(handle) if among is None or agent.agent_id in among]
        room = {agent.agent_id: left(agent.total, others.get(agent.agent_id, {})) for agent in usable}
        try:
            return self._fits(handle, usable, room)
        except UnknownPlaceError:
            return None

    def _shares(self) -> dict[str, float]:
        """User -> dominant share of the cluster, divided by the user's weight."""
        return self._fair_queue.shares(
            {handle.user for handle in self._jobs.values()}, self._held_by_users(), self._total()
        )

    def _held_on_agents(self) -> dict[str, dict[str, float]]:
        return totals(
            (task.agent_id, task.resources) for handle in self._jobs.values() for task in handle.tasks.values()
        )

    def _tasks(self) -> Iterator[TaskRecord]:
        for handle in self._jobs.values():
            yield from handle.tasks.values()

    def _held_by_users(self) -> dict[str, dict[str, float]]:
        return totals((handle.user, task.resources) for handle in self._jobs.values() for task in handle.tasks.values())

    def _total(self) -> dict[str, float]:
        """What our role may use of the cluster; what we hold, where the master does not say."""
        agents = self._agents()
        if agents:
            return total(agent.total for agent in agents)
        return total(self._held_by_users().values())


def _waits(handle: JobHandle) -> bool:
    """Whether nothing of a job runs although it wants to."""
    return not handle.has_tasks and handle.job.need in (Need.COME_BACK, Need.START)


def _gangs(jobs: Sequence[JobHandle]) -> list[JobHandle]:
    return [handle for handle in jobs if handle.sizing is not None and handle.sizing.is_gang]
