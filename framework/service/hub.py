"""One subscription for many jobs: routes events to them, lets them deal with offers, writes down before it acts.

A launch is written down before the master hears of it, and a status update is acknowledged after what follows from it
has been written down; so a service that is killed at any moment can be taken up again, and nothing runs that the
database does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from framework import events
from framework.background import AtOnce, Background
from framework.connection import Connection
from framework.lease import ServiceLeaseLostError
from framework.master import LeadingMaster
from framework.mesos_calls import MesosCalls
from framework.search.database import StorageUnavailableError
from framework.service.agents import AgentDirectory
from framework.service.dealing import Dealing
from framework.service.journal import Journal
from framework.service.ledger import Ledger
from framework.service.metrics import Metrics
from framework.service.offer_pool import OfferPool
from framework.service.queueing import FairQueue
from framework.service.records import TaskRecord
from framework.service.reservation import Reservations
from framework.service.seat import Seat
from framework.service.seat_calls import SeatCalls
from framework.service.snapshot import Snapshot
from framework.service.standing import Standing
from framework.service.tenant import Need, Tenant

logger = logging.getLogger(__name__)

IDLE_TICKS = 5
"""How many jobs of which nothing runs are looked after in one tick."""
REVIEW_S = 1.0
"""How often it is looked how jobs stand towards each other."""


class Hub:
    """The jobs of one framework.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread (`framework.session.Work`).

    Args:
        mesos: the master.
        journal: keeps what has to outlive us.
        note: tells whoever watches something that concerns no job in particular.
        ended: called when nothing of a job runs any more; the seat is gone then.
        failed: called when a job's state machine has raised; may raise. Its tasks are killed.
        tell: tells those who watch a job something, by the job's id.
        metrics: counts what happens.
        queue: who is served first.
        agents: knows the agents; None where nobody needs to.
        reservations: decides for whom agents are kept.
        master: hears which master leads; None where nobody needs to know.
        background: where what takes long is done; None: at once.
        clock: seconds, monotonic.

    Attributes:
        snapshot: how everything stood about a second ago; may be read from any thread.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        *,
        journal: Journal,
        note: Callable[[str], None],
        ended: Callable[[Seat], None],
        failed: Callable[[Seat, Exception], None],
        tell: Callable[[str, str], None] = lambda job_id, text: None,
        metrics: Metrics | None = None,
        queue: FairQueue | None = None,
        agents: AgentDirectory | None = None,
        reservations: Reservations | None = None,
        master: LeadingMaster | None = None,
        background: Background | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mesos = mesos
        self._journal = journal
        self._ended = ended
        self._failed = failed
        self._metrics = metrics or Metrics()
        self._master = master
        self._background = background or AtOnce()
        self._clock = clock
        self._connection = Connection(note)
        self._seats: dict[str, Seat] = {}
        self._ledger = Ledger(mesos, journal, self._metrics, clock())
        kept = reservations or Reservations()
        self._standing = Standing(self._seats, queue or FairQueue(), agents, kept, self._guarded, tell, clock)
        self._dealing = Dealing(mesos, self._seats, self._standing, kept, self._guarded, self._metrics, clock)
        self._calls = SeatCalls(mesos, self._ledger, self._dealing, self._metrics)
        self._next_idle = 0
        self._reviewed_s = clock()
        self._framework_id = ""
        self.snapshot = Snapshot(time.time())

    @property
    def seats(self) -> list[Seat]:
        """The jobs that have not ended, in the order of their arrival."""
        return sorted(self._seats.values(), key=lambda seat: seat.number)

    @property
    def done(self) -> bool:
        """Whether no job is left."""
        return not self._seats

    @property
    def pool(self) -> OfferPool:
        """The offers in hand."""
        return self._dealing.pool

    def seat(self, job_id: str) -> Seat | None:
        """A job's seat, while it has one."""
        return self._seats.get(job_id)

    def admit(
        self,
        job_id: str,
        user: str,
        number: int,
        make: Callable[[Seat], Tenant],
        *,
        constraints: Sequence[str] = (),
        tasks: Sequence[TaskRecord] = (),
    ) -> Seat:
        """Gives a job a seat.

        Args:
            job_id: unique.
            user: whose share it counts to.
            number: order of arrival.
            make: makes the job's state machine, which uses the seat as its Mesos.
            constraints: which agents it may use.
            tasks: those of its tasks that may still run, of a job that goes on.

        Raises:
            BadInputError: if the constraints make no sense; whatever `make` raises.
        """
        seat = Seat(self._calls, job_id, user, number, constraints, tasks, self._background)
        seat.tenant = make(seat)
        self._seats[job_id] = seat
        self._ledger.owns(seat, seat.tasks)
        if self._connection.connected:
            self._guarded(seat, seat.tenant.handle, events.Subscribed(self._framework_id, ""))
        # Filters of earlier refusals must not hold back what a new job could use.
        self._dealing.revive()
        return seat

    def disown(self, tasks: Sequence[TaskRecord]) -> None:
        """Ends tasks that may still run and whose jobs have ended; how they end is written down."""
        self._ledger.disown(tasks)

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the master refuses the framework.
            JobFailedError: if the master has thrown the framework out.
        """
        match event:
            case events.Subscribed():
                self._subscribed(event)
            case events.Disconnected():
                self._disconnected(event)
            case events.OffersArrived():
                self._dealing.arrived(event)
            case events.OfferRescinded():
                self._dealing.rescinded(event)
            case events.StatusUpdate():
                self._status_updates(self._ledger.sift(event, self._clock()))
            case events.MessageArrived():
                if (seat := self._ledger.owner(event.executor_id)) is not None:
                    self._guarded(seat, seat.tenant.handle, event)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                event.log(logger)

    def tick(self) -> None:
        """Does what is due by time, and writes down what has changed."""
        now_s = self._clock()
        if self._connection.connected:
            self._ledger.ask(now_s)
            self._status_updates(self._ledger.believed(now_s))
        self._tick_seats()
        if now_s - self._reviewed_s >= REVIEW_S:
            self._reviewed_s = now_s
            self._review(now_s)
        self._dealing.tick(now_s, connected=self._connection.connected)
        self.save()

    def cancel(self) -> None:
        """Ends all jobs; `done` follows when their tasks have ended."""
        for seat in self.seats:
            self.cancel_job(seat.job_id)

    def cancel_job(self, job_id: str) -> None:
        """Ends one job, if it has not ended."""
        seat = self._seats.get(job_id)
        if seat is not None:
            seat.must_save = seat.is_ending = True
            self._guarded(seat, seat.tenant.cancel)

    def save(self) -> None:
        """Writes down what has changed, then acknowledges the status updates behind it."""
        self._ledger.save(self.seats, self._clock(), self._guarded)
        self._remove_ended()

    # The connection.

    def _subscribed(self, event: events.Subscribed) -> None:
        self._framework_id = event.framework_id
        if self._master is not None:
            self._master.subscribed_at(event.master, event.version)
        self._journal.subscribed(event.framework_id)
        self._connection.subscribed(self._clock())
        self._metrics.connected(True)
        self._dealing.subscribed()
        self._ledger.subscribed(self._clock())
        for seat in self.seats:
            self._guarded(seat, seat.tenant.handle, event)

    def _disconnected(self, event: events.Disconnected) -> None:
        self._connection.disconnected()
        self._metrics.connected(False)
        self._dealing.disconnected()
        self._ledger.disconnected()
        for seat in self.seats:
            self._guarded(seat, seat.tenant.handle, event)

    def _status_updates(self, sifted: Sequence[events.StatusUpdate]) -> None:
        for event in sifted:
            if (seat := self._ledger.heard(event)) is not None:
                self._guarded(seat, seat.tenant.handle, event)

    # Jobs.

    def _review(self, now_s: float) -> None:
        if self._standing.review(self.pool, now_s):
            for seat in self._seats.values():
                seat.looked_at = None
            self._dealing.revive()
        self._dealing.forget(now_s)
        self.snapshot = self._standing.snapshot(self.pool, now_s, connected=self._connection.connected)

    def _tick_seats(self) -> None:
        """Looks after all jobs of which something runs, and in turn after the others, one of those alike."""
        idle: dict[Hashable, Seat] = {}
        for seat in self.seats:
            is_busy = seat.has_tasks or seat.lent or self._dealing.is_planning(seat)
            if is_busy or seat.tenant.need is Need.NOTHING:
                self._guarded(seat, seat.tenant.tick)
            else:
                key = seat.tenant.demand_key
                idle.setdefault(seat.job_id if key is None else (key, seat.constraints), seat)
        waiting = list(idle.values())
        for _ in range(min(IDLE_TICKS, len(waiting))):
            self._next_idle = (self._next_idle + 1) % len(waiting)
            self._guarded(waiting[self._next_idle], waiting[self._next_idle].tenant.tick)

    def _guarded(self, seat: Seat, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call of a job's state machine; whatever it raises ends that job only.

        A service that can write nothing any more is no fault of the job's, which goes on without it.
        """
        if self._seats.get(seat.job_id) is not seat:
            # An earlier call has ended it.
            return
        try:
            call(*arguments)
        except (StorageUnavailableError, ServiceLeaseLostError):
            raise
        except Exception as error:
            logger.info("job %s has raised", seat.job_id, exc_info=True)
            self._remove(seat)
            self._failed(seat, error)

    def _remove_ended(self) -> None:
        for seat in self.seats:
            if seat.tenant.done:
                self._remove(seat)
                self._ended(seat)

    def _remove(self, seat: Seat) -> None:
        del self._seats[seat.job_id]
        self._ledger.dismiss(seat)
        self._dealing.returned(seat, list(seat.lent.values()))
        seat.lent.clear()
        seat.tenant.close()
