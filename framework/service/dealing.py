"""Offers and jobs: who looks at which offers, in which order, what is kept for whom, what is given back.

Jobs that want offers look at all that they may use, one after the other (`framework.service.queueing`), and take what
they can. Only when all have looked, the rest is given back: at once if nobody could use more of it, after a short
while if a job of several tasks waits for more agents, after a longer one if it has a reservation
(`framework.service.reservation`). What is given back carries a finite filter, so that it is soon offered again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

from framework import events
from framework.driver import CallRefusedError, MasterUnavailableError
from framework.mesos_calls import MesosCalls, try_now
from framework.offers import attributes_of
from framework.service.lending import Lending
from framework.service.metrics import Metrics
from framework.service.offer_pool import Offer, OfferPool, Supply, agent_id, offer_id
from framework.service.reservation import Reservations
from framework.service.seat import Seat
from framework.service.standing import Standing
from framework.service.tenant import Need

logger = logging.getLogger(__name__)

REFUSE_S = 2.0
"""How long Mesos keeps back what was declined while some job wants more."""
GATHER_S = 3.0
"""How long offers are held at most while a job that needs several agents at a time waits for more of them."""
GATHER_REFUSE_S = 5.0
"""How long Mesos keeps back what was held so: others have it longer than we do."""
ROUND_S = 0.5
"""How long jobs may look at offers before events are seen to again."""
REVIVE_PAUSE_S = 1.0
REVIVE_AGAIN_S = 60.0
"""After so long without an offer Mesos is told again that we want some."""

Guarded = Callable[..., None]
"""Makes a call of a job's state machine; see `Hub`."""


class Dealing:
    """Deals offers out to jobs.

    Args:
        mesos: the master.
        seats: the jobs, by id; the hub's own.
        standing: how the jobs stand towards each other.
        reservations: what is kept for whom.
        guarded: makes a call of a job's state machine.
        metrics: counts what happens.
        clock: seconds, monotonic.

    Attributes:
        pool: the offers in hand.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        seats: Mapping[str, Seat],
        standing: Standing,
        reservations: Reservations,
        guarded: Guarded,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._mesos = mesos
        self._seats = seats
        self._standing = standing
        self._reservations = reservations
        self._guarded = guarded
        self._metrics = metrics
        self._clock = clock
        self._unwanted: dict[float, list[str]] = {}
        self._suppressed = False
        self._must_revive = False
        self._revived_s = clock() - REVIVE_PAUSE_S
        self._offered_s = clock()
        self.pool = OfferPool()
        self._lending = Lending(self.pool, seats, guarded, metrics)

    # What Mesos says.

    def subscribed(self) -> None:
        """Mesos makes offers from now on."""
        self._suppressed = False
        self._offered_s = self._clock()

    def disconnected(self) -> None:
        """The connection is gone, and all offers with it."""
        self.pool.clear()
        self._unwanted.clear()
        for seat in self._seats.values():
            seat.lent.clear()

    def arrived(self, event: events.OffersArrived) -> None:
        """Offers have come."""
        self._offered_s = self._clock()
        self._metrics.offers_received(len(event.offers))
        self.pool.add(event.offers, self._offered_s)

    def rescinded(self, event: events.OfferRescinded) -> None:
        """An offer is void, whether or not a job looks at it."""
        self.pool.void(event.offer_id)
        for seat in list(self._seats.values()):
            if seat.lent.pop(event.offer_id, None) is not None:
                self._guarded(seat, seat.tenant.handle, event)

    def returned(self, seat: Seat, offers: Sequence[Offer]) -> None:
        """A job gives back offers that it has looked at."""
        self._lending.returned(seat, offers)

    def is_planning(self, seat: Seat) -> bool:
        """Whether a job plans on what it has looked at, in the background."""
        return self._lending.is_planning(seat)

    def not_used(self, offers: Sequence[Offer]) -> None:
        """A launch on offers went wrong, and the master may still hold them for us; it does not mind if not."""
        self._unwanted.setdefault(REFUSE_S, []).extend(offer_id(offer) for offer in offers)

    def revive(self) -> None:
        """Filters of earlier refusals must not hold back what can be used now."""
        self._must_revive = True

    def forget(self, now_s: float) -> None:
        """Forgets what jobs could not use long ago."""
        self._lending.forget(now_s)

    # What is due by time.

    def tick(self, now_s: float, *, connected: bool) -> None:
        """Lets jobs look at offers, gives back what is not wanted, asks for more or for none."""
        self._lending.tick(now_s)
        if self.pool.settled(now_s) and self._let_all_look(now_s):
            self.pool.settle()
            self._release(now_s)
        if connected:
            self._want_or_not(now_s)
        self._give_back()
        self._metrics.offers_held(len(self.pool))

    def _let_all_look(self, now_s: float) -> bool:
        """Lets jobs look, one after the other, as long as there is time; whether all have looked."""
        until_s = time.monotonic() + ROUND_S
        views: dict[Hashable, tuple[int, list[Offer], Supply]] = {}
        passed: list[Seat] = []
        line = self._line()
        while line:
            seat = line.popleft()
            # An earlier look may have ended this job, or changed its mind.
            if seat.job_id not in self._seats or seat.tenant.need is Need.NOTHING:
                continue
            if self._has_looked(seat):
                # In an earlier round, or before another job has launched.
                passed.append(seat)
                continue
            key = (seat.constraints, self._is_bound(seat), seat.job_id if self._is_favoured(seat) else None)
            version, offers, supply = views.get(key, (-1, [], {}))
            if version != self.pool.version:
                offers = [offer for offer in self.pool.offers if self._may_use(seat, offer)]
                supply = self.pool.supply(offers)
                views[key] = (self.pool.version, offers, supply)
            if not offers or self._lending.is_hopeless(seat, supply, now_s):
                seat.looked_at = self.pool.generation
                passed.append(seat)
                continue
            if time.monotonic() >= until_s:
                return False
            if self._lending.let_look(seat, offers, supply, passed, now_s):
                passed.clear()
                # Its user has a larger share now.
                line = self._line()
            else:
                passed.append(seat)
        return True

    def _line(self) -> deque[Seat]:
        """The jobs in their order, if any has to look at what there is yet."""
        seats = list(self._seats.values())
        if not self.pool or all(self._has_looked(seat) or seat.tenant.need is Need.NOTHING for seat in seats):
            return deque()
        return deque(self._standing.order(seats))

    def _has_looked(self, seat: Seat) -> bool:
        return seat.looked_at == self.pool.generation or self.is_planning(seat)

    def _is_bound(self, seat: Seat) -> bool:
        """Whether it has to leave alone what is kept for others."""
        return seat.tenant.need in (Need.START, Need.GROW)

    def _is_favoured(self, seat: Seat) -> bool:
        current = self._reservations.current
        return current is not None and current.job_id == seat.job_id

    def _may_use(self, seat: Seat, offer: Offer) -> bool:
        if self._is_bound(seat) and self._reservations.keeps_from(seat.job_id, agent_id(offer)):
            return False
        if not seat.admitted.all:
            return True
        return seat.admitted.admits(attributes_of(offer.get("attributes", ())), offer["hostname"])

    def _release(self, now_s: float) -> None:
        """Everyone has looked: decides what is held on to, and for how long the rest is refused."""
        kept = self._reservations.current
        gathers = self._standing.gathers
        others_since_s = min(
            (
                self.pool.held_since_s(offer)
                for offer in self.pool.offers
                if kept is None or agent_id(offer) not in kept.agents
            ),
            default=now_s,
        )
        if kept is not None and not kept.is_holding(now_s):
            self._refuse(lambda offer: agent_id(offer) in kept.agents, max(REFUSE_S, kept.turns_s(now_s)))
        # All at once, so that they are offered again at once too, whenever each of them came.
        if not gathers or now_s - others_since_s >= GATHER_S:
            self._refuse(
                lambda offer: kept is None or agent_id(offer) not in kept.agents,
                GATHER_REFUSE_S if gathers else REFUSE_S,
            )

    def _refuse(self, which: Callable[[Offer], bool], refuse_s: float) -> None:
        ids = self.pool.take(which)
        if ids:
            self._unwanted.setdefault(refuse_s, []).extend(ids)

    def _want_or_not(self, now_s: float) -> None:
        """Asks for offers while any job wants some, and for none otherwise."""
        if not any(seat.tenant.need is not Need.NOTHING for seat in self._seats.values()):
            self._refuse(lambda offer: True, REFUSE_S)
            if not self._suppressed and try_now(self._mesos.suppressOffers):
                self._suppressed = True
            return
        silent = not self.pool and now_s - max(self._offered_s, self._revived_s) >= REVIVE_AGAIN_S
        wanted = self._suppressed or self._must_revive or silent
        if wanted and now_s - self._revived_s >= REVIVE_PAUSE_S and try_now(self._mesos.reviveOffers):
            self._suppressed = self._must_revive = False
            self._revived_s = now_s

    def _give_back(self) -> None:
        """Declines what is not wanted; what the master did not take stays noted for the next time."""
        for refuse_s, ids in list(self._unwanted.items()):
            try:
                self._mesos.declineOffer([{"value": one} for one in ids], {"refuse_seconds": refuse_s})
            except MasterUnavailableError as error:
                logger.info("%s", error)
                return
            except CallRefusedError as error:
                # Void offers: a master that was just restarted does not know the subscription they came by.
                logger.info("%s", error)
            del self._unwanted[refuse_s]
