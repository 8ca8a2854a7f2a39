"""Offers that jobs look at: lent to one job after the other, for longer to one that plans on them in the background."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from framework import events
from framework.job_plan import PLAN_TIME_LIMIT_S
from framework.service.fruitless import Fruitless
from framework.service.metrics import Metrics
from framework.service.offer_pool import Offer, OfferPool, Supply, offer_id
from framework.service.seat import Seat
from framework.service.tenant import Planning

logger = logging.getLogger(__name__)

LOAN_S = 10.0
"""How long a job may keep offers that it looks at."""
PLANNING_LOAN_S = 4 * PLAN_TIME_LIMIT_S
"""And how long if it plans on them: solvers keep their limit only roughly (`solver.milp.solve`)."""


@dataclass(frozen=True)
class _Look:
    """A job looks at offers.

    Attributes:
        key: of the job (`Tenant.demand_key`).
        supply: what the offers hold together.
        offers: their ids.
        passed: the jobs before it that wanted none of them.
        launched: how often the job had launched tasks before.
        begun_s: when it began, monotonic.
    """

    key: Hashable
    supply: Supply
    offers: tuple[str, ...]
    passed: tuple[Seat, ...]
    launched: int
    begun_s: float


@dataclass(frozen=True)
class _Planned:
    """A look that lasts.

    Attributes:
        look: the look.
        had_looked: the jobs that have seen these offers already; to all others it is as if there were none.
        was_stopped: whether it took too long, which says nothing of what jobs like it can use.
    """

    look: _Look
    had_looked: frozenset[Seat]
    was_stopped: bool = False


class Lending:
    """Lends offers to jobs.

    Args:
        pool: the offers in hand.
        seats: the jobs, by id; the hub's own.
        guarded: makes a call of a job's state machine.
        metrics: counts what happens.
    """

    def __init__(
        self, pool: OfferPool, seats: Mapping[str, Seat], guarded: Callable[..., None], metrics: Metrics
    ) -> None:
        self._pool = pool
        self._seats = seats
        self._guarded = guarded
        self._metrics = metrics
        self._fruitless = Fruitless()
        self._looking: Seat | None = None
        self._planning: dict[Seat, _Planned] = {}

    def is_hopeless(self, seat: Seat, supply: Supply, now_s: float) -> bool:
        """Whether a job like this one could not use as much before."""
        return self._fruitless.is_hopeless(seat.tenant.demand_key, supply, now_s)

    def is_planning(self, seat: Seat) -> bool:
        """Whether a job plans on what it has looked at."""
        return seat in self._planning

    def let_look(
        self, seat: Seat, offers: Sequence[Offer], supply: Supply, passed: Sequence[Seat], now_s: float
    ) -> bool:
        """Lets one job look.

        Args:
            seat: the job.
            offers: what it may use.
            supply: what they hold.
            passed: the jobs before it that wanted none of them.
            now_s: the time.

        Returns:
            Whether it has launched anything.
        """
        lent = {offer_id(offer): offer for offer in offers}
        look = _Look(seat.tenant.demand_key, supply, tuple(lent), tuple(passed), seat.launched, time.monotonic())
        seat.looked_at = self._pool.generation
        seat.looked_s = now_s
        self._pool.lend(offers)
        seat.lent.update(lent)
        self._looking = seat
        self._guarded(seat, seat.tenant.handle, events.OffersArrived(tuple(offers)))
        self._guarded(seat, seat.tenant.tick)
        self._looking = None
        if _plans(seat):
            had_looked = (one for one in self._seats.values() if one.looked_at == self._pool.generation)
            self._planning[seat] = _Planned(look, frozenset(had_looked))
            return False
        return self._has_launched(seat, look, now_s)

    def returned(self, seat: Seat, offers: Sequence[Offer]) -> None:
        """A job gives back offers that it has looked at; it does not see them again before others have."""
        self._pool.put_back(offers)
        if not offers or self._looking is seat:
            return
        if seat in self._planning:
            # It has waited long enough, although more may have come just now.
            self._pool.settle()
            for other in self._seats.values():
                if other not in self._planning[seat].had_looked:
                    other.looked_at = None
        else:
            self._pool.shown_anew()
            seat.looked_at = self._pool.generation

    def tick(self, now_s: float) -> None:
        """Does what is due by time."""
        for seat, planned in list(self._planning.items()):
            if not _plans(seat):
                if seat.lent:
                    # With one of an agent's offers a job forgets the others, and may look at those again.
                    self._end_loan(seat)
                    seat.looked_at = None
                del self._planning[seat]
                if self._seats.get(seat.job_id) is seat and not seat.is_ending and not planned.was_stopped:
                    self._has_launched(seat, planned.look, now_s)
        for seat in list(self._seats.values()):
            limit_s = PLANNING_LOAN_S if self.is_planning(seat) else LOAN_S
            if seat.lent and seat.looked_s is not None and now_s - seat.looked_s >= limit_s:
                logger.info("job %s has kept %d offers too long", seat.job_id, len(seat.lent))
                self._end_loan(seat)
                if self.is_planning(seat):
                    self._planning[seat] = dataclasses.replace(self._planning[seat], was_stopped=True)

    def forget(self, now_s: float) -> None:
        """Forgets what jobs could not use long ago."""
        self._fruitless.forget(now_s)

    def _has_launched(self, seat: Seat, look: _Look, now_s: float) -> bool:
        """Whether a job that has looked at offers has launched anything; it and others are judged by that."""
        if seat.launched > look.launched:
            seat.is_overtaken = False
            for other in look.passed:
                other.is_overtaken = not other.has_tasks
            self._metrics.placed(time.monotonic() - look.begun_s)
            return True
        if look.key is not None and not seat.lent and all(one in self._pool for one in look.offers):
            self._fruitless.remember(look.key, look.supply, now_s)
        return False

    def _end_loan(self, seat: Seat) -> None:
        offers = list(seat.lent.values())
        seat.lent.clear()
        self.returned(seat, offers)
        for offer in offers:
            self._guarded(seat, seat.tenant.handle, events.OfferRescinded(offer_id(offer)))


def _plans(seat: Seat) -> bool:
    return isinstance(seat.tenant, Planning) and seat.tenant.is_planning
