"""How the jobs stand towards each other: their order, who waits since when, what all of it looks like from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from framework.service.agents import AgentDirectory, AgentFacts
from framework.service.concession import Place, Room
from framework.service.making_way import MakingWay, UnknownPlaceError
from framework.service.offer_pool import OfferPool
from framework.service.others import Others, left_of
from framework.service.places import Places
from framework.service.queueing import Candidate, FairQueue
from framework.service.records import TaskRecord
from framework.service.reservation import Contender, Reservation, Reservations
from framework.service.seat import Seat
from framework.service.sizing import nodes_for
from framework.service.snapshot import JobFacts, Snapshot
from framework.service.tenant import Excluding, Need, Vacating

SOUGHT_S = 60.0
"""So long it may stay open where a job would start, if there is no time to plan it; then what is known has to do."""
FIRST = 3
"""How many of the jobs that wait are asked whether they need several agents at a time."""


class Standing:
    """The jobs, compared with each other; reviewed once a second or so.

    Args:
        seats: the jobs, by id; the hub's own.
        queue: their order.
        agents: knows the agents; None where nobody does.
        reservations: what is kept for whom.
        guarded: makes a call of a job's state machine.
        tell: tells those who watch a job something, by the job's id.
        clock: seconds, monotonic.

    Attributes:
        gathers: whether a job waits that needs several agents at a time, and would fit if it had them.
    """

    def __init__(
        self,
        seats: Mapping[str, Seat],
        queue: FairQueue,
        agents: AgentDirectory | None,
        reservations: Reservations,
        guarded: Callable[..., None],
        tell: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._seats = seats
        self._queue = queue
        self._directory = agents
        self._reservations = reservations
        self._guarded = guarded
        self._places = Places(clock)
        self._making_way = MakingWay(seats, guarded, tell)
        self._waits_since_s: dict[str, float] = {}
        self._sought_since_s: dict[str, float] = {}
        self._others = Others()
        self.gathers = False

    def order(self, seats: Sequence[Seat]) -> list[Seat]:
        """Those that want offers, who is served first first."""
        wanting = [
            Candidate(seat.job_id, seat.user, seat.number, need)
            for seat in seats
            if (need := seat.tenant.need) is not Need.NOTHING
        ]
        ordered = self._queue.order(wanting, self._held_by_users(), self._total())
        return [self._seats[candidate.job_id] for candidate in ordered]

    def review(self, pool: OfferPool, now_s: float) -> bool:
        """Looks who waits since when, and so who gets a reservation; jobs that can make way do.

        Returns:
            Whether agents that were kept are free for all again.
        """
        self._others.observe(self._agents() or (), self._held_on_agents(), now_s)
        waiting = [seat for seat in self.order(list(self._seats.values())) if _waits(seat)]
        self._waits_since_s = {seat.job_id: self._waits_since_s.get(seat.job_id, now_s) for seat in waiting}
        self._sought_since_s = {
            job_id: since_s for job_id, since_s in self._sought_since_s.items() if job_id in self._waits_since_s
        }
        self._drop_if_useless(pool, now_s)
        released = self._reservations.update(now_s, [self._contender(seat, now_s) for seat in waiting if seat.sizing])
        kept = self._reservations.current
        self._making_way.forget(self._waits_since_s.keys())
        self._making_way.ask(kept)
        if kept is not None:
            for seat, tenant in self._in_the_way(kept.job_id, kept.agents):
                self._guarded(seat, tenant.vacate, kept.agents)
        # What time there is to plan is for the reservation first.
        self.gathers = self._gathers(_gangs(waiting)[:FIRST])
        self._places.forget(set(self._seats))
        known = self._agents()
        pool.forget(None if known is None else {agent.agent_id for agent in known})
        return released

    def snapshot(self, pool: OfferPool, now_s: float, *, connected: bool) -> Snapshot:
        """All of it as it is now."""
        kept = self._reservations.current
        return Snapshot(
            time_s=time.time(),
            connected=connected,
            agents=self._agents(),
            others=self._others.all,
            gone=() if self._directory is None else self._directory.gone,
            offers=dict(pool.last),
            last_offer_s=pool.last_offer_s,
            held_offers=len(pool),
            jobs={seat.job_id: _facts(seat) for seat in self._seats.values()},
            order=tuple(seat.job_id for seat in self.order(list(self._seats.values()))),
            shares=self._shares(),
            reservation=kept,
            kept_s=0.0 if kept is None else now_s - kept.since_s,
        )

    def _contender(self, seat: Seat, now_s: float) -> Contender:
        return Contender(
            seat.job_id,
            self._waits_since_s[seat.job_id],
            seat.is_overtaken,
            lambda agents: any(True for _ in self._in_the_way(seat.job_id, agents)),
            lambda: self._best_place(seat, now_s),
        )

    def _gathers(self, gangs: Sequence[Seat]) -> bool:
        places = [self._place(seat, beside_others=False) for seat in gangs]
        # As long as it is not known it stays as it was.
        return any(place is not None and len(place) > 1 for place in places) or (self.gathers and None in places)

    def _in_the_way(self, job_id: str, agents: frozenset[str]) -> Iterator[tuple[Seat, Vacating]]:
        """Other jobs that hold something on these agents and can leave them."""
        there = [seat for seat in self._seats.values() if any(task.agent_id in agents for task in seat.tasks.values())]
        for seat in there:
            if seat.job_id != job_id and isinstance(seat.tenant, Vacating):
                yield seat, seat.tenant

    def _agents(self) -> tuple[AgentFacts, ...] | None:
        return None if self._directory is None else self._directory.current()

    def _drop_if_useless(self, pool: OfferPool, now_s: float) -> None:
        kept = self._reservations.current
        seat = None if kept is None else self._seats.get(kept.job_id)
        if kept is None or seat is None or seat.looked_at != pool.generation or seat.lent:
            return
        offered = pool.supply(pool.offers)
        busy = {task.agent_id for task in self._tasks()}
        if kept.agents <= offered.keys() - busy or self._should_fit(seat, kept, offered):
            self._reservations.did_not_help(now_s)

    def _should_fit(self, seat: Seat, kept: Reservation, offered: Room) -> bool:
        """Whether all has ended that others were to give up for it, and is on offer."""
        if not self._making_way.has_made_way(kept):
            return False
        there = [agent for agent in self._usable(seat) if agent.agent_id in kept.agents & offered.keys()]
        try:
            return bool(self._fits(seat, there, offered))
        except UnknownPlaceError:
            return False

    def _best_place(self, seat: Seat, now_s: float) -> Place | None:
        """Where a job would start if others made way, or else ended; None if that is not known now."""
        agents = self._place(seat, beside_others=True)
        if not agents:
            return None if agents is None else Place()
        kept = self._reservations.current
        mine = kept if kept is not None and kept.job_id == seat.job_id else None
        usable, others = self._usable(seat), self._others.all

        def fits(room: Room) -> frozenset[str]:
            return self._fits(seat, usable, room)

        try:
            place = self._making_way.place(seat, usable, others, mine, self._shares, fits)
        except UnknownPlaceError:
            sought_s = now_s - self._sought_since_s.setdefault(seat.job_id, now_s)
            if sought_s < SOUGHT_S or (mine is not None and mine.gives_up):
                return None
            place = Place()
        self._sought_since_s.pop(seat.job_id, None)
        if place.agents:
            return place
        # What has come free so far would be lost elsewhere.
        if mine is not None and self._place(seat, beside_others=True, among=mine.agents) != frozenset():
            agents = mine.agents
        else:
            agents = self._making_way.soonest(usable, others, agents, fits)
        return Place(agents, place.gives_up, awaits_ends=True)

    def _usable(self, seat: Seat) -> list[AgentFacts]:
        return [one for one in self._agents() or () if seat.admitted.admits(one.attributes, one.hostname)]

    def _fits(self, seat: Seat, agents: Sequence[AgentFacts], room: Room) -> frozenset[str]:
        """Ids of the agents that a job would use if there were this much of them."""
        assert seat.sizing is not None
        fit = self._places.fit(seat, nodes_for(seat.sizing, [(agent, room[agent.agent_id]) for agent in agents]))
        if fit is None:
            raise UnknownPlaceError
        return frozenset(agent.agent_id for agent in agents if agent.node in fit.nodes)

    def _place(self, seat: Seat, *, beside_others: bool, among: frozenset[str] | None = None) -> frozenset[str] | None:
        """Ids of the agents that a job would use if nothing of ours ran anywhere, or nothing of anybody's.

        None if that is not known now. If `among` is given, there are no other agents.
        """
        if self._agents() is None:
            return None
        if seat.sizing is None:
            return frozenset()
        others = self._others.all if beside_others else {}
        usable = [agent for agent in self._usable(seat) if among is None or agent.agent_id in among]
        room = {agent.agent_id: left_of(agent, others.get(agent.agent_id, {})) for agent in usable}
        try:
            return self._fits(seat, usable, room)
        except UnknownPlaceError:
            return None

    def _shares(self) -> dict[str, float]:
        """User -> dominant share of the cluster, divided by the user's weight."""
        return self._queue.shares({seat.user for seat in self._seats.values()}, self._held_by_users(), self._total())

    def _held_on_agents(self) -> dict[str, dict[str, float]]:
        return _added_by(
            (task.agent_id, task.resources) for seat in self._seats.values() for task in seat.tasks.values()
        )

    def _tasks(self) -> Iterator[TaskRecord]:
        for seat in self._seats.values():
            yield from seat.tasks.values()

    def _held_by_users(self) -> dict[str, dict[str, float]]:
        return _added_by((seat.user, task.resources) for seat in self._seats.values() for task in seat.tasks.values())

    def _total(self) -> dict[str, float]:
        """What our role may use of the cluster; what we hold, where the master does not say."""
        agents = self._agents()
        if agents:
            return added(agent.total for agent in agents)
        return added(self._held_by_users().values())


def _waits(seat: Seat) -> bool:
    """Whether nothing of a job runs although it wants to."""
    return not seat.has_tasks and seat.tenant.need in (Need.COME_BACK, Need.START)


def _gangs(seats: Sequence[Seat]) -> list[Seat]:
    return [seat for seat in seats if seat.sizing is not None and seat.sizing.is_gang]


def _facts(seat: Seat) -> JobFacts:
    return JobFacts(
        job_id=seat.job_id,
        user=seat.user,
        need=seat.tenant.need,
        is_ending=seat.is_ending,
        constraints=seat.admitted,
        sizing=seat.sizing,
        held=_added_by((task.agent_id, task.resources) for task in seat.tasks.values()),
        tasks=len(seat.tasks),
        excluded=seat.tenant.excluded_agents() if isinstance(seat.tenant, Excluding) else {},
    )


def _added_by(parts: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Name -> resource -> sum of the amounts given under that name."""
    sums: dict[str, dict[str, float]] = {}
    for key, amounts in parts:
        sum_of = sums.setdefault(key, {})
        for name, amount in amounts.items():
            sum_of[name] = sum_of.get(name, 0.0) + amount
    return sums


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Resource -> sum of the amounts."""
    return _added_by(("", amounts) for amounts in parts).get("", {})
