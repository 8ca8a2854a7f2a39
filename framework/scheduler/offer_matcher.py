"""Offers and jobs: selects looks at which offers, in which order, what is pooled for whom, what is given back.

Jobs that want offers attempt at all that they may use, one after the other (`fair_share.py`), and take what
they can; one that plans on them in the background has them locked for it meanwhile. What a job launches is written down
before the master hears of it, and the job hears at once how that went. Only when all have looked, the rest is given
back: at once if nobody could use more of it, after a short while if a job of several tasks waits for more agents, after
a longer one if it has a reservation (`framework.scheduler.reservation`). What is given back carries a finite filter, so
that it is soon offered again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError, MesosCalls, try_call
from framework.mesos.offers import AgentOffer, attributes_of, by_agent
from framework.scheduler.amounts import total
from framework.scheduler.job import RETRY_OFFERS_S, Answer, Decline, JobEntry, Launch, Need, Planning
from framework.scheduler.metrics import Metrics
from framework.scheduler.offer_pool import Offer, OfferPool, Supply, agent_id, is_within, offer_id
from framework.scheduler.pending_queue import PendingQueue
from framework.scheduler.reservation import Reservations
from framework.scheduler.task_tracker import TaskTracker

logger = logging.getLogger(__name__)

REFUSE_S = 2.0
"""How long Mesos keeps back what was declined while some job wants more."""
GANG_KEEP_S = 3.0
"""How long offers are pooled at most while a job that needs several agents at a time waits for more of them."""
GANG_REFUSE_S = 5.0
"""How long Mesos keeps back what was pooled so: others have it longer than we do."""
MATCHING_BUDGET_S = 0.5
"""How long jobs may attempt at offers before events are seen to again."""
MIN_REVIVE_INTERVAL_S = 1.0
REVIVE_WHEN_SILENT_S = 60.0
"""After so long without an offer Mesos is told again that we want some."""
PLANNING_LOCK_S = 120.0
"""So long offers are locked for a job that plans: solvers keep their limit only roughly (`solver.milp.solve`)."""
NEGATIVE_CACHE_S = 120.0
"""After so long a job may attempt again at offers that one like it could not use: it may have changed."""
SUPPLIES_PER_CLASS = 4
"""How many different supplies are remembered that a kind of job could not use."""

CallJob = Callable[..., Any]
"""Makes a call of a job's state machine; see `Scheduler`."""


@dataclass(frozen=True)
class _MatchAttempt:
    """A job looks at offers.

    Attributes:
        key: of the job (`Job.equivalence_class`).
        supply: what the offers hold together.
        offers: their ids.
        bypassed: the jobs before it that wanted none of them.
        begun_s: when it began, monotonic.
    """

    key: Hashable
    supply: Supply
    offers: tuple[str, ...]
    bypassed: tuple[JobEntry, ...]
    begun_s: float


@dataclass
class _PlanningJob:
    """A attempt that lasts, for its job plans.

    Attributes:
        attempt: the attempt.
        until_s: until when the offers are locked for it.
        seen_by: the jobs that have seen these offers already; to all others it is as if there were none.
        was_stopped: whether it took too long, which says nothing of what jobs like it can use.
    """

    attempt: _MatchAttempt
    until_s: float
    seen_by: frozenset[JobEntry]
    was_stopped: bool = False


@dataclass(frozen=True)
class _OfferView:
    """What jobs that may use the same offers see.

    Attributes:
        version: of the pool.
        offers: those that are not locked.
        agents: the same, by agent.
        supply: what they hold.
    """

    version: int = -1
    offers: Sequence[Offer] = ()
    agents: Sequence[AgentOffer] = ()
    supply: Supply = field(default_factory=dict)


class NegativeCache:
    """Looks at offers after which nothing was launched, by kind of job (`Job.equivalence_class`)."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, deque[tuple[Supply, float]]] = {}

    def remember(self, key: Hashable, supply: Supply, now_s: float) -> None:
        """A job of this kind had no use for this supply."""
        self._looks.setdefault(key, deque(maxlen=SUPPLIES_PER_CLASS)).append((supply, now_s))

    def is_known_useless(self, key: Hashable, supply: Supply, now_s: float) -> bool:
        """Whether a job of this kind could not use as much before; never for one like no other (None)."""
        return any(
            now_s - time_s < NEGATIVE_CACHE_S and is_within(supply, looked_at)
            for looked_at, time_s in self._looks.get(key, ())
        )

    def drop_expired(self, now_s: float) -> None:
        """Forgets what is long ago."""
        self._looks = {key: looks for key, looks in self._looks.items() if now_s - looks[-1][1] < NEGATIVE_CACHE_S}


class OfferMatcher:
    """Deals offers out to jobs.

    Args:
        mesos: the master.
        jobs: the jobs, by id; the scheduler's own.
        queue: how the jobs stand towards each other.
        reservations: selects has the reservation.
        tracker: the tasks.
        call_job: makes a call of a job's state machine.
        metrics: counts what happens.
        clock: seconds, monotonic.
        pool: for the offers in hand.

    Attributes:
        pool: the offers in hand.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        jobs: Mapping[str, JobEntry],
        queue: PendingQueue,
        reservations: Reservations,
        tracker: TaskTracker,
        call_job: CallJob,
        metrics: Metrics,
        clock: Callable[[], float],
        pool: OfferPool,
    ) -> None:
        self._mesos = mesos
        self._jobs = jobs
        self._queue = queue
        self._reservations = reservations
        self._tracker = tracker
        self._call_job = call_job
        self._metrics = metrics
        self._clock = clock
        self._to_decline: dict[float, list[str]] = {}
        self._suppressed = False
        self._must_revive = False
        self._refused: dict[str, float] = {}
        self._revived_s = clock() - MIN_REVIVE_INTERVAL_S
        self._offered_s = clock()
        self.pool = pool
        self._negative_cache = NegativeCache()
        self._planning: dict[JobEntry, _PlanningJob] = {}

    # What Mesos says.

    def subscribed(self) -> None:
        """Mesos makes offers from now on."""
        self._suppressed = False
        self._offered_s = self._clock()

    def disconnected(self) -> None:
        """The connection is gone, and all offers with it."""
        self.pool.clear()
        self._to_decline.clear()
        for entry in self._jobs.values():
            entry.locked_offers.clear()

    def arrived(self, event: events.OffersArrived) -> None:
        """Offers have come."""
        self._offered_s = self._clock()
        self._metrics.offers_received(len(event.offers))
        self.pool.add(event.offers, self._offered_s)
        here = {agent_id(offer) for offer in self.pool.offers}
        is_apart = any(self._offered_s < until_s for agent, until_s in self._refused.items() if agent not in here)
        if is_apart and any(_starts_together(entry) for entry in self._jobs.values()):
            # What was given back at another time would come at another time again and again, never beside these.
            self.revive()

    def rescinded(self, event: events.OfferRescinded) -> None:
        """An offer is void, whether or not it is locked for a job."""
        self.pool.void(event.offer_id)
        for entry in self._jobs.values():
            entry.locked_offers.pop(event.offer_id, None)

    def is_planning(self, entry: JobEntry) -> bool:
        """Whether a job plans on what it has looked at, in the background."""
        return entry in self._planning

    def remove(self, entry: JobEntry) -> None:
        """A job has ended."""
        if entry in self._planning:
            self._end_planning(entry)

    def revive(self) -> None:
        """Filters of earlier refusals must not hold back what can be used now."""
        self._must_revive = True

    def drop_expired(self, now_s: float) -> None:
        """Forgets what jobs could not use long ago."""
        self._negative_cache.drop_expired(now_s)
        self._refused = {agent: until_s for agent, until_s in self._refused.items() if now_s < until_s}

    # What is due by time.

    def tick(self, now_s: float, *, connected: bool) -> None:
        """Lets jobs attempt at offers, gives back what is not wanted, asks for more or for none."""
        for entry in self._jobs.values():
            if entry.job.need is Need.NOTHING:
                # Once it wants some again, it looks at all there is.
                entry.seen_generation = None
        self._poll_planning(now_s)
        if not self.pool.is_settled(now_s):
            self._offer_to_all(now_s, _replaces_tasks)
        elif self._offer_to_all(now_s):
            self.pool.settle()
            self._keep_or_decline(now_s)
        if connected:
            self._revive_or_suppress(now_s)
        self._decline_unwanted()
        self._metrics.unused_offers(len(self.pool))

    # Who looks at what.

    def _offer_to_all(self, now_s: float, selects: Callable[[JobEntry], bool] = lambda _: True) -> bool:
        """Lets these jobs attempt, one after the other, as long as there is time; whether all have looked."""
        until_s = time.monotonic() + MATCHING_BUDGET_S
        views: dict[Hashable, _OfferView] = {}
        bypassed: list[JobEntry] = []
        pending = self._pending(now_s, selects)
        while pending:
            entry = pending.popleft()
            # An earlier attempt may have ended this job, or changed its mind.
            if entry.job_id not in self._jobs or entry.job.need is Need.NOTHING:
                continue
            if self._has_seen(entry, now_s):
                # In an earlier round, or before another job has launched.
                bypassed.append(entry)
                continue
            key = (
                entry.constraints,
                self._respects_reservation(entry),
                entry.job_id if self._has_reservation(entry) else None,
            )
            view = views.get(key, _OfferView())
            if view.version != self.pool.version:
                offers = [offer for offer in self.pool.offers if self._may_use(entry, offer)]
                view = views[key] = _OfferView(self.pool.version, offers, by_agent(offers), self.pool.supply(offers))
            if not view.offers or self._negative_cache.is_known_useless(
                entry.job.equivalence_class, view.supply, now_s
            ):
                self._mark_seen(entry, now_s)
                bypassed.append(entry)
                continue
            if time.monotonic() >= until_s:
                return False
            if self._offer_to(entry, view, bypassed, now_s):
                bypassed.clear()
                # Its user has a larger share now.
                pending = self._pending(now_s, selects)
            else:
                bypassed.append(entry)
        return True

    def _offer_to(self, entry: JobEntry, view: _OfferView, bypassed: Sequence[JobEntry], now_s: float) -> bool:
        """Lets one job attempt; whether it has launched anything."""
        # One of which nothing runs may not have been looked after for long.
        self._call_job(entry, entry.job.tick)
        if self._jobs.get(entry.job_id) is not entry or entry.job.need is Need.NOTHING:
            return False
        ids = tuple(offer_id(offer) for offer in view.offers)
        attempt = _MatchAttempt(entry.job.equivalence_class, view.supply, ids, tuple(bypassed), time.monotonic())
        self._mark_seen(entry, now_s)
        answer = self._call_job(entry, entry.job.match_offers, view.agents)
        if isinstance(answer, Planning):
            self.pool.lock(view.offers)
            entry.locked_offers.update(zip(ids, view.offers, strict=True))
            seen_by = (one for one in self._jobs.values() if one.seen_generation == self.pool.generation)
            self._planning[entry] = _PlanningJob(attempt, now_s + PLANNING_LOCK_S, frozenset(seen_by))
            return False
        return self._apply_answer(entry, attempt, answer, view.offers, now_s)

    def _poll_planning(self, now_s: float) -> None:
        """Asks those that plan on what they have looked at for their answers."""
        for entry, planned in list(self._planning.items()):
            if entry.locked_offers and now_s >= planned.until_s:
                logger.info("job %s has kept %d offers too long", entry.job_id, len(entry.locked_offers))
                self._unlock(entry)
                planned.was_stopped = True
            answer = self._call_job(entry, entry.job.match_offers, by_agent(entry.locked_offers.values()))
            if isinstance(answer, Planning) or entry not in self._planning:
                continue
            offers = self._end_planning(entry)
            entry.retry_s = now_s + RETRY_OFFERS_S
            if isinstance(answer, Launch) or not (entry.is_ending or planned.was_stopped):
                self._apply_answer(entry, planned.attempt, answer, offers, now_s)

    def _apply_answer(
        self, entry: JobEntry, attempt: _MatchAttempt, answer: Answer | None, offers: Sequence[Offer], now_s: float
    ) -> bool:
        """Does what a job has answered; whether that was a launch."""
        if isinstance(answer, Launch):
            self._launch(entry, answer, offers, now_s)
            entry.was_bypassed = False
            for other in attempt.bypassed:
                other.was_bypassed = not other.has_tasks
            self._metrics.placed(time.monotonic() - attempt.begun_s)
            return True
        if isinstance(answer, Decline):
            entry.retry_s = now_s + answer.retry_after_s
            if attempt.key is not None and all(one in self.pool for one in attempt.offers):
                self._negative_cache.remember(attempt.key, attempt.supply, now_s)
        return False

    def _launch(self, entry: JobEntry, launch: Launch, offers: Sequence[Offer], now_s: float) -> None:
        """Writes tasks down, has the master launch them, and tells their job."""
        offered: dict[str, list[Offer]] = {}
        for offer in offers:
            offered.setdefault(agent_id(offer), []).append(offer)
        state = self._call_job(entry, entry.job.to_state)
        if state is None:
            return
        tasks = self._tracker.record_launch(entry, state, offered, launch.operations, now_s)
        for agent, operation in launch.operations.items():
            here = [task.resources for task in tasks if task.agent_id == agent]
            ids = [offer_id(offer) for offer in offered[agent]]
            self.pool.used(offered[agent], total(here))
            try:
                # No filter: another job may want the rest at once.
                self._mesos.acceptOffers([{"value": one} for one in ids], [operation], {"refuse_seconds": 0.0})
            except (MasterUnavailableError, CallRefusedError) as error:
                # It may still hold the offers for us, and does not mind if not.
                self._to_decline.setdefault(REFUSE_S, []).extend(ids)
                entry.seen_generation = None
                self._call_job(entry, entry.job.refused, error)
                return
            self._metrics.launched(len(here))
        self._call_job(entry, entry.job.launched)

    def _end_planning(self, entry: JobEntry) -> list[Offer]:
        """A job does not plan any more; the offers that were locked for it, which are in hand again."""
        offers = list(entry.locked_offers.values())
        self._unlock(entry)
        del self._planning[entry]
        return offers

    def _unlock(self, entry: JobEntry) -> None:
        """What was locked for a job that plans is there for all others that have not seen it."""
        if not entry.locked_offers:
            return
        self.pool.unlock(entry.locked_offers.values())
        entry.locked_offers.clear()
        # It has waited long enough, although more may have come just now.
        self.pool.settle()
        for other in self._jobs.values():
            if other not in self._planning[entry].seen_by:
                other.seen_generation = None

    def _pending(self, now_s: float, selects: Callable[[JobEntry], bool]) -> deque[JobEntry]:
        """These jobs in their order, if any has to attempt at what there is yet."""
        jobs = list(filter(selects, self._jobs.values()))
        if not self.pool or all(self._has_seen(entry, now_s) or entry.job.need is Need.NOTHING for entry in jobs):
            return deque()
        return deque(self._queue.order(jobs))

    def _mark_seen(self, entry: JobEntry, now_s: float) -> None:
        entry.seen_generation = self.pool.generation
        entry.retry_s = now_s + RETRY_OFFERS_S

    def _has_seen(self, entry: JobEntry, now_s: float) -> bool:
        is_new = entry.seen_generation != self.pool.generation or now_s >= entry.retry_s
        return self.is_planning(entry) or not is_new

    def _respects_reservation(self, entry: JobEntry) -> bool:
        """Whether it has to leave alone what is kept for others."""
        return entry.job.need in (Need.START, Need.GROW)

    def _has_reservation(self, entry: JobEntry) -> bool:
        current = self._reservations.current
        return current is not None and current.job_id == entry.job_id

    def _may_use(self, entry: JobEntry, offer: Offer) -> bool:
        if self._respects_reservation(entry) and self._reservations.is_reserved_for_other(
            entry.job_id, agent_id(offer)
        ):
            return False
        if not entry.parsed_constraints.all:
            return True
        return entry.parsed_constraints.admits(attributes_of(offer.get("attributes", ())), offer["hostname"])

    def _keep_or_decline(self, now_s: float) -> None:
        """Everyone has looked: decides what is pooled on to, and for how long the rest is refused."""
        reservation = self._reservations.current
        gang_waits = self._queue.gang_waits
        others_since_s = min(
            (
                self.pool.received_s(offer)
                for offer in self.pool.offers
                if reservation is None or agent_id(offer) not in reservation.agents
            ),
            default=now_s,
        )
        if reservation is not None and not reservation.keeps_offers(now_s):
            self._refuse(
                lambda offer: agent_id(offer) in reservation.agents, max(REFUSE_S, reservation.phase_left_s(now_s))
            )
        # All at once, so that they are offered again at once too, whenever each of them came.
        if not gang_waits or now_s - others_since_s >= GANG_KEEP_S:
            refuse_s = GANG_REFUSE_S if gang_waits else REFUSE_S
            refused = self._refuse(
                lambda offer: reservation is None or agent_id(offer) not in reservation.agents, refuse_s
            )
            self._refused |= {agent_id(offer): now_s + refuse_s for offer in refused}

    def _refuse(self, which: Callable[[Offer], bool], refuse_s: float) -> list[Offer]:
        offers = self.pool.take(which)
        if offers:
            self._to_decline.setdefault(refuse_s, []).extend(map(offer_id, offers))
        return offers

    def _revive_or_suppress(self, now_s: float) -> None:
        """Asks for offers while any job wants some, and for none otherwise."""
        if not any(entry.job.need is not Need.NOTHING for entry in self._jobs.values()):
            self._refuse(lambda offer: True, REFUSE_S)
            if not self._suppressed and try_call(self._mesos.suppressOffers):
                self._suppressed = True
            return
        silent = not self.pool and now_s - max(self._offered_s, self._revived_s) >= REVIVE_WHEN_SILENT_S
        wanted = self._suppressed or self._must_revive or silent
        if wanted and now_s - self._revived_s >= MIN_REVIVE_INTERVAL_S and try_call(self._mesos.reviveOffers):
            self._suppressed = self._must_revive = False
            self._refused.clear()
            self._revived_s = now_s

    def _decline_unwanted(self) -> None:
        """Declines what is not wanted; what the master did not take stays noted for the next time."""
        for refuse_s, ids in list(self._to_decline.items()):
            try:
                self._mesos.declineOffer([{"value": one} for one in ids], {"refuse_seconds": refuse_s})
            except MasterUnavailableError as error:
                logger.info("%s", error)
                return
            except CallRefusedError as error:
                # Void offers: a master that was just restarted does not know the subscription they came by.
                logger.info("%s", error)
            del self._to_decline[refuse_s]


def _starts_together(entry: JobEntry) -> bool:
    """Whether it waits for all its tasks' places at a time, maybe on several agents; a lone job does not say."""
    return entry.job.need is Need.START and (entry.sizing is None or entry.sizing.is_gang)


def _replaces_tasks(entry: JobEntry) -> bool:
    """Whether it trains on and wants a lost task again: the first place for it is as good as any, so it never waits."""
    return entry.has_tasks and entry.job.need is Need.REPLACE_LOST
