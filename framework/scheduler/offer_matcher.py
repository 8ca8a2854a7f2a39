"""Matches offers with jobs: order of the jobs, which offers to keep, which to decline.

Jobs that request offers examine all offers that they may use, one job at a time (`fair_share.py`), and launch what they
can. While a job plans in the background, its offers are locked. Launches are stored before ACCEPT, and the job learns
immediately whether the call succeeded. When all jobs have examined them, the remaining offers are declined: immediately
if no job can use more offers, after a short time if a gang waits for more agents, and after a longer time if it has a
reservation (`framework.scheduler.reservation`). Declines carry a short filter, so that the resources are offered again
soon.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
"""Mesos' filter for declined offers while some job requests more."""
GANG_KEEP_S = 3.0
"""Maximum time for which offers are kept for a job that needs several agents at the same time."""
GANG_REFUSE_S = 5.0
"""Mesos' filter for declined offers that were kept so; longer, so that other frameworks get them for longer."""
MATCHING_BUDGET_S = 0.5
"""Maximum time for which jobs examine offers before events are handled again."""
MIN_REVIVE_INTERVAL_S = 1.0
REVIVE_WHEN_SILENT_S = 60.0
"""Without an offer for this time, Mesos is asked for offers again."""
PLANNING_LOCK_S = 120.0
"""Maximum time for which offers are locked while a job plans; solvers exceed their time limits
(`solver.milp.solve`).
"""
NEGATIVE_CACHE_S = 120.0
"""Time after which a job examines a supply again that an equivalent job could not use."""
SUPPLIES_PER_CLASS = 4
"""Number of useless supplies that are cached per class of jobs."""

CallJob = Callable[..., Any]
"""Calls a job's state machine; see `Scheduler`."""


@dataclass(frozen=True)
class _MatchAttempt:
    """A job examines offers.

    Attributes:
        key: the job's `Job.equivalence_class`.
        supply: the offers' resources.
        offers: their ids.
        bypassed: jobs earlier in the order that did not launch on them.
        begun_s: start time, monotonic.
    """

    key: Hashable
    supply: Supply
    offers: tuple[str, ...]
    bypassed: tuple[JobEntry, ...]
    begun_s: float


@dataclass
class _PlanningJob:
    """A job that plans on offers in the background.

    Attributes:
        attempt: the attempt.
        until_s: when the lock of the offers expires.
        seen_by: jobs that have examined these offers already; to all others they are new when they are unlocked.
        was_stopped: whether the lock expired, in which case a decline is not cached.
    """

    attempt: _MatchAttempt
    until_s: float
    seen_by: frozenset[JobEntry]
    was_stopped: bool = False


@dataclass(frozen=True)
class _OfferView:
    """The offers that jobs with the same constraints see.

    Attributes:
        version: of the pool.
        offers: those that are not locked.
        agents: the same, by agent.
        supply: their resources.
    """

    version: int = -1
    offers: Sequence[Offer] = ()
    agents: Sequence[AgentOffer] = ()
    supply: Supply = field(default_factory=dict)


class NegativeCache:
    """Caches supplies that a job of a class (`Job.equivalence_class`) could not use."""

    def __init__(self) -> None:
        self._useless: dict[Hashable, deque[tuple[Supply, float]]] = {}

    def remember(self, key: Hashable, supply: Supply, now_s: float) -> None:
        self._useless.setdefault(key, deque(maxlen=SUPPLIES_PER_CLASS)).append((supply, now_s))

    def is_known_useless(self, key: Hashable, supply: Supply, now_s: float) -> bool:
        """Whether a job of this class recently could not use this supply or a larger one; false for None (unique)."""
        return any(
            now_s - time_s < NEGATIVE_CACHE_S and is_within(supply, useless)
            for useless, time_s in self._useless.get(key, ())
        )

    def drop_expired(self, now_s: float) -> None:
        self._useless = {
            key: supplies for key, supplies in self._useless.items() if now_s - supplies[-1][1] < NEGATIVE_CACHE_S
        }


class OfferMatcher:
    """Matches offers with jobs.

    Attributes:
        pool: the unused offers.
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
        self._filtered_until_s: dict[str, float] = {}
        self._revived_s = clock() - MIN_REVIVE_INTERVAL_S
        self._offered_s = clock()
        self.pool = pool
        self._negative_cache = NegativeCache()
        self._planning: dict[JobEntry, _PlanningJob] = {}

    # Events.

    def subscribed(self) -> None:
        self._suppressed = False
        self._offered_s = self._clock()

    def disconnected(self) -> None:
        """Drops all offers, which are void."""
        self.pool.clear()
        self._to_decline.clear()
        for entry in self._jobs.values():
            entry.offers.locked.clear()

    def arrived(self, event: events.OffersArrived) -> None:
        self._offered_s = self._clock()
        self._metrics.offers_received(len(event.offers))
        self.pool.add(event.offers, self._offered_s)
        here = {agent_id(offer) for offer in self.pool.offers}
        gets_others_later = any(
            self._offered_s < until_s for agent, until_s in self._filtered_until_s.items() if agent not in here
        )
        if gets_others_later and any(_starts_together(entry) for entry in self._jobs.values()):
            # Offers declined at different times would return at different times forever, never together.
            self.revive()

    def rescinded(self, event: events.OfferRescinded) -> None:
        """Drops an offer, even if it is locked for a job."""
        self.pool.void(event.offer_id)
        for entry in self._jobs.values():
            entry.offers.locked.pop(event.offer_id, None)

    def is_planning(self, entry: JobEntry) -> bool:
        """Whether a job is planning in the background."""
        return entry in self._planning

    def remove(self, entry: JobEntry) -> None:
        """Forgets a job that has ended."""
        if entry in self._planning:
            self._end_planning(entry)

    def revive(self) -> None:
        """Removes the filters of earlier declines at the next tick, because jobs can use more now."""
        self._must_revive = True

    def offer_again(self, entries: Iterable[JobEntry]) -> None:
        """Offers these jobs again what they have declined."""
        for entry in entries:
            entry.offers.seen_generation = None

    def drop_expired(self, now_s: float) -> None:
        self._negative_cache.drop_expired(now_s)
        self._filtered_until_s = {
            agent: until_s for agent, until_s in self._filtered_until_s.items() if now_s < until_s
        }

    # Matching.

    def tick(self, now_s: float, *, connected: bool) -> None:
        """Lets jobs match offers, declines unused ones, and revives or suppresses offers."""
        for entry in self._jobs.values():
            if entry.job.need is Need.NOTHING:
                # When it requests offers again, it examines all of them.
                entry.offers.seen_generation = None
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

    def _offer_to_all(self, now_s: float, selects: Callable[[JobEntry], bool] = lambda _: True) -> bool:
        """Lets these jobs match offers in order while time remains; returns whether all have."""
        until_s = time.monotonic() + MATCHING_BUDGET_S
        views: dict[Hashable, _OfferView] = {}
        bypassed: list[JobEntry] = []
        pending = self._pending(now_s, selects)
        while pending:
            entry = pending.popleft()
            # An earlier match may have changed its need.
            if entry.job.need is Need.NOTHING:
                continue
            if self._has_seen(entry, now_s):
                # It has examined them in an earlier round, or before another job launched.
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
                # Shares have changed.
                pending = self._pending(now_s, selects)
            else:
                bypassed.append(entry)
        return True

    def _offer_to(self, entry: JobEntry, view: _OfferView, bypassed: Sequence[JobEntry], now_s: float) -> bool:
        """Lets one job match offers; returns whether it launched anything."""
        # Idle jobs tick rarely, so tick this one before matching.
        self._call_job(entry, entry.job.tick)
        if entry.job.need is Need.NOTHING:
            return False
        ids = tuple(offer_id(offer) for offer in view.offers)
        attempt = _MatchAttempt(entry.job.equivalence_class, view.supply, ids, tuple(bypassed), time.monotonic())
        self._mark_seen(entry, now_s)
        answer = self._call_job(entry, entry.job.match_offers, view.agents)
        if isinstance(answer, Planning):
            self.pool.lock(view.offers)
            entry.offers.locked.update(zip(ids, view.offers, strict=True))
            seen_by = (one for one in self._jobs.values() if one.offers.seen_generation == self.pool.generation)
            self._planning[entry] = _PlanningJob(attempt, now_s + PLANNING_LOCK_S, frozenset(seen_by))
            return False
        return self._apply_answer(entry, attempt, answer, view.offers, now_s)

    def _poll_planning(self, now_s: float) -> None:
        """Polls the jobs that are planning."""
        for entry, planned in list(self._planning.items()):
            if entry.offers.locked and now_s >= planned.until_s:
                logger.info("job %s is still planning; unlocking its %d offers", entry.job_id, len(entry.offers.locked))
                self._unlock(entry)
                planned.was_stopped = True
            answer = self._call_job(entry, entry.job.match_offers, by_agent(entry.offers.locked.values()))
            if isinstance(answer, Planning):
                continue
            offers = self._end_planning(entry)
            entry.offers.retry_s = now_s + RETRY_OFFERS_S
            if isinstance(answer, Launch) or not (entry.is_ending or planned.was_stopped):
                self._apply_answer(entry, planned.attempt, answer, offers, now_s)

    def _apply_answer(
        self, entry: JobEntry, attempt: _MatchAttempt, answer: Answer | None, offers: Sequence[Offer], now_s: float
    ) -> bool:
        """Carries out a job's answer; returns whether it was a launch."""
        if isinstance(answer, Launch):
            self._launch(entry, answer, offers, now_s)
            entry.offers.was_bypassed = False
            for other in attempt.bypassed:
                other.offers.was_bypassed = not other.has_tasks
            self._metrics.placed(time.monotonic() - attempt.begun_s)
            return True
        if isinstance(answer, Decline):
            entry.offers.retry_s = now_s + answer.retry_after_s
            if attempt.key is not None and all(one in self.pool for one in attempt.offers):
                self._negative_cache.remember(attempt.key, attempt.supply, now_s)
        return False

    def _launch(self, entry: JobEntry, launch: Launch, offers: Sequence[Offer], now_s: float) -> None:
        """Stores tasks, sends ACCEPT, and notifies their job."""
        offered: dict[str, list[Offer]] = {}
        for offer in offers:
            offered.setdefault(agent_id(offer), []).append(offer)
        state = self._call_job(entry, entry.job.to_state)
        if state is None:
            return
        tasks = self._tracker.record_launch(entry, state, offered, launch.operations, now_s)
        for agent, operation in launch.operations.items():
            launched = [task.resources for task in tasks if task.agent_id == agent]
            ids = [offer_id(offer) for offer in offered[agent]]
            self.pool.used(offered[agent], total(launched))
            try:
                # No filter: another job may use the rest immediately.
                self._mesos.acceptOffers([{"value": one} for one in ids], [operation], {"refuse_seconds": 0.0})
            except (MasterUnavailableError, CallRefusedError) as error:
                # The offers may still be valid; declining void ones is harmless.
                self._to_decline.setdefault(REFUSE_S, []).extend(ids)
                entry.offers.seen_generation = None
                self._call_job(entry, entry.job.refused, error)
                return
            self._metrics.launched(len(launched))
        self._call_job(entry, entry.job.launched)

    def _end_planning(self, entry: JobEntry) -> list[Offer]:
        """Unlocks and returns the offers of a job that was planning."""
        offers = list(entry.offers.locked.values())
        self._unlock(entry)
        del self._planning[entry]
        return offers

    def _unlock(self, entry: JobEntry) -> None:
        """Unlocks a planning job's offers for all jobs that have not examined them."""
        if not entry.offers.locked:
            return
        self.pool.unlock(entry.offers.locked.values())
        entry.offers.locked.clear()
        # These offers need not wait for newer ones again.
        self.pool.settle()
        for other in self._jobs.values():
            if other not in self._planning[entry].seen_by:
                other.offers.seen_generation = None

    def _pending(self, now_s: float, selects: Callable[[JobEntry], bool]) -> deque[JobEntry]:
        """Returns these jobs in order; empty if none has anything new to examine."""
        jobs = list(filter(selects, self._jobs.values()))
        if not self.pool or all(self._has_seen(entry, now_s) or entry.job.need is Need.NOTHING for entry in jobs):
            return deque()
        return deque(self._queue.order(jobs))

    def _mark_seen(self, entry: JobEntry, now_s: float) -> None:
        entry.offers.seen_generation = self.pool.generation
        entry.offers.retry_s = now_s + RETRY_OFFERS_S

    def _has_seen(self, entry: JobEntry, now_s: float) -> bool:
        is_new = entry.offers.seen_generation != self.pool.generation or now_s >= entry.offers.retry_s
        return self.is_planning(entry) or not is_new

    def _respects_reservation(self, entry: JobEntry) -> bool:
        """Whether other jobs' reservations apply to it."""
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
        """Once all jobs have examined the offers: decides which to keep, and how long to filter the rest."""
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
            self._schedule_decline(
                lambda offer: agent_id(offer) in reservation.agents, max(REFUSE_S, reservation.phase_left_s(now_s))
            )
        # Decline all together, so that they are offered again together, whenever each of them arrived.
        if not gang_waits or now_s - others_since_s >= GANG_KEEP_S:
            refuse_s = GANG_REFUSE_S if gang_waits else REFUSE_S
            declined = self._schedule_decline(
                lambda offer: reservation is None or agent_id(offer) not in reservation.agents, refuse_s
            )
            self._filtered_until_s |= {agent_id(offer): now_s + refuse_s for offer in declined}

    def _schedule_decline(self, which: Callable[[Offer], bool], refuse_s: float) -> list[Offer]:
        offers = self.pool.take(which)
        if offers:
            self._to_decline.setdefault(refuse_s, []).extend(map(offer_id, offers))
        return offers

    def _revive_or_suppress(self, now_s: float) -> None:
        """Requests offers while any job needs some, and suppresses them otherwise."""
        if not any(entry.job.need is not Need.NOTHING for entry in self._jobs.values()):
            self._schedule_decline(lambda offer: True, REFUSE_S)
            if not self._suppressed and try_call(self._mesos.suppressOffers):
                self._suppressed = True
            return
        silent = not self.pool and now_s - max(self._offered_s, self._revived_s) >= REVIVE_WHEN_SILENT_S
        wanted = self._suppressed or self._must_revive or silent
        if wanted and now_s - self._revived_s >= MIN_REVIVE_INTERVAL_S and try_call(self._mesos.reviveOffers):
            self._suppressed = self._must_revive = False
            self._filtered_until_s.clear()
            self._revived_s = now_s

    def _decline_unwanted(self) -> None:
        """Sends the declines; those that could not be delivered are repeated at the next tick."""
        for refuse_s, ids in list(self._to_decline.items()):
            try:
                self._mesos.declineOffer([{"value": one} for one in ids], {"refuse_seconds": refuse_s})
            except MasterUnavailableError as error:
                logger.info("%s", error)
                return
            except CallRefusedError as error:
                # Void offers: a restarted master does not know the subscription that received them.
                logger.info("%s", error)
            del self._to_decline[refuse_s]


def _starts_together(entry: JobEntry) -> bool:
    """Whether it needs room for all its tasks at the same time, maybe on several agents; assumed of a job without
    sizing.
    """
    return entry.job.need is Need.START and (entry.sizing is None or entry.sizing.is_gang)


def _replaces_tasks(entry: JobEntry) -> bool:
    """Whether it runs and replaces a lost task. It never waits for more offers, because any agent will do."""
    return entry.has_tasks and entry.job.need is Need.REPLACE_LOST
