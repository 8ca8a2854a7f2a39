"""One subscription for many jobs: routes events to them, deals offers out in turn, writes down before it acts.

A launch is written down before the master hears of it, and a status update is acknowledged after what follows from it
has been written down; so a service that is killed at any moment can be taken up again, and nothing runs that the
database does not know.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from framework import events
from framework.connection import Connection
from framework.driver import CallRefusedError, MasterUnavailableError
from framework.job import TaskState
from framework.mesos_calls import MesosCalls, try_now
from framework.service.journal import Journal
from framework.service.offer_pool import Offer, OfferPool, offer_id
from framework.service.queueing import Candidate, FairQueue
from framework.service.records import TaskRecord
from framework.service.seat import Seat, ids_of, intended_tasks
from framework.service.tenant import Need, Tenant

logger = logging.getLogger(__name__)

REFUSE_S = 2.0
"""How long Mesos keeps back what was declined while some job wants more."""
ROUND_S = 0.5
"""How long jobs may look at offers before events are seen to again."""
IDLE_TICKS = 5
"""How many jobs of which nothing runs are looked after in one tick."""
SAVE_S = 1.0
"""How often jobs' states are looked at for changes that came with time alone."""


class Hub:
    """The jobs of one framework.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread (`framework.session.Work`).

    Args:
        mesos: the master.
        journal: keeps what has to outlive us.
        note: tells whoever watches something that concerns no job in particular.
        ended: called when nothing of a job runs any more; the seat is gone then.
        failed: called when a job's state machine has raised; may raise. Its tasks are killed.
        queue: who is served first.
        total: resource -> amount in the cluster.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        *,
        journal: Journal,
        note: Callable[[str], None],
        ended: Callable[[Seat], None],
        failed: Callable[[Seat, Exception], None],
        queue: FairQueue | None = None,
        total: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mesos = mesos
        self._journal = journal
        self._ended = ended
        self._failed = failed
        self._queue = queue or FairQueue()
        self._total = total
        self._clock = clock
        self._connection = Connection(note)
        self._pool = OfferPool()
        self._seats: dict[str, Seat] = {}
        self._seat_of_task: dict[str, Seat] = {}
        self._doomed: dict[str, str] = {}
        self._unsaved_tasks: dict[str, TaskRecord] = {}
        self._acknowledgements: list[dict[str, Any]] = []
        self._unwanted: list[str] = []
        self._suppressed = False
        self._revive = False
        self._next_idle = 0
        self._saved_s = clock()
        self._framework_id = ""

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
        return self._pool

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
        """
        seat = Seat(self, job_id, user, number, constraints, tasks)
        seat.tenant = make(seat)
        self._seats[job_id] = seat
        self._seat_of_task.update(dict.fromkeys(seat.tasks, seat))
        if self._connection.connected:
            self._guarded(seat, seat.tenant.handle, events.Subscribed(self._framework_id, ""))
        # Filters of earlier refusals must not hold back what a new job could use.
        self._revive = True
        return seat

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
                self._pool.add(event.offers, self._clock())
            case events.OfferRescinded():
                self._rescinded(event)
            case events.StatusUpdate():
                self._status_update(event)
            case events.MessageArrived():
                seat = self._seat_of_task.get(event.executor_id)
                if seat is not None:
                    self._guarded(seat, seat.tenant.handle, event)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                # Mesos also sends a status update for each task that went with it.
                logger.info("%s", event)

    def tick(self) -> None:
        """Does what is due by time, and writes down what has changed."""
        now_s = self._clock()
        if self._connection.must_reconcile(now_s):
            # Explicitly by the jobs themselves; this also names tasks that nobody knows.
            try_now(self._mesos.reconcile, {})
        self._tick_seats()
        self._deal(now_s)
        self._want_or_not()
        self._give_back()
        self.save()

    def cancel(self) -> None:
        """Ends all jobs; `done` follows when their tasks have ended."""
        for seat in self.seats:
            self.cancel_job(seat.job_id)

    def cancel_job(self, job_id: str) -> None:
        """Ends one job, if it has not ended."""
        seat = self._seats.get(job_id)
        if seat is not None:
            seat.must_save = True
            self._guarded(seat, seat.tenant.cancel)

    def save(self) -> None:
        """Writes down what has changed, then acknowledges the status updates behind it."""
        now_s = self._clock()
        look_at_all = now_s - self._saved_s >= SAVE_S
        if look_at_all:
            self._saved_s = now_s
        states = {}
        for seat in self._seats.values():
            if seat.must_save or (look_at_all and seat.has_tasks):
                seat.must_save = False
                state = seat.tenant.to_state()
                if state != seat.saved:
                    states[seat.job_id] = seat.saved = state
        if states or self._unsaved_tasks:
            self._journal.changed(list(self._unsaved_tasks.values()), states)
            self._unsaved_tasks.clear()
        for seat in self._seats.values():
            self._acknowledgements += seat.acknowledgements
            seat.acknowledgements = []
        while self._acknowledgements:
            # What is not delivered is sent by the agent again.
            try_now(self._mesos.acknowledgeStatusUpdate, self._acknowledgements.pop())
        self._remove_ended()

    # The connection.

    def _subscribed(self, event: events.Subscribed) -> None:
        self._framework_id = event.framework_id
        self._journal.subscribed(event.framework_id)
        self._connection.subscribed(self._clock())
        self._suppressed = False
        for seat in self.seats:
            self._guarded(seat, seat.tenant.handle, event)

    def _disconnected(self, event: events.Disconnected) -> None:
        self._pool.clear()
        self._unwanted.clear()
        self._connection.disconnected()
        for seat in self.seats:
            seat.lent.clear()
            self._guarded(seat, seat.tenant.handle, event)

    # Tasks.

    def _status_update(self, event: events.StatusUpdate) -> None:
        seat = self._seat_of_task.get(event.task_id)
        state = TaskState.of(event.state)
        if seat is None:
            self._unknown_task(event, state)
            return
        known = seat.tasks.get(event.task_id)
        if known is not None:
            message = str(event.status.get("message", ""))
            name = event.state.removeprefix("TASK_").lower()
            ended_s = time.time() if state.is_terminal() else None
            changed = dataclasses.replace(known, state=name, message=message, ended_s=ended_s)
            self._unsaved_tasks[event.task_id] = seat.tasks[event.task_id] = changed
            if state.is_terminal():
                del seat.tasks[event.task_id]
        seat.must_save = True
        self._guarded(seat, seat.tenant.handle, event)
        if state.is_terminal():
            self._seat_of_task.pop(event.task_id, None)

    def _unknown_task(self, event: events.StatusUpdate, state: TaskState) -> None:
        agent_id = event.status.get("agent_id", {}).get("value", "")
        if state.is_terminal():
            self._doomed.pop(event.task_id, None)
        elif agent_id:
            if event.task_id not in self._doomed:
                logger.warning("task %s is not ours any more: ending it", event.task_id)
            self._doomed[event.task_id] = agent_id
            try_now(self._mesos.kill, event.task_id, agent_id)
        self._acknowledgements.append(event.status)

    # What seats ask for.

    def launch(self, seat: Seat, offers: Sequence[Offer], operations: Sequence[dict[str, Any]]) -> None:
        """Launches tasks of a job, on offers of one agent, after having written that down.

        Raises:
            MasterUnavailableError: if the call could not be delivered.
            CallRefusedError: if the master refused it, or the offers are void.
        """
        if not offers:
            raise CallRefusedError("The offers were withdrawn before they could be used.")
        tasks = intended_tasks(seat.job_id, offers, operations)
        state = seat.tenant.to_state()
        self._journal.intends(seat.job_id, tasks, state)
        seat.saved = state
        for task in tasks:
            seat.tasks[task.task_id] = task
            self._seat_of_task[task.task_id] = seat
        self._pool.used(offer_id(offer) for offer in offers)
        # No filter: another job may want the rest at once.
        self._mesos.acceptOffers(ids_of(offers), operations, {"refuse_seconds": 0.0})

    def give_back(self, seat: Seat, offers: Sequence[Offer]) -> None:
        """A job does not want offers that it has looked at."""
        self._pool.put_back(offers)

    def kill(self, task_id: str, agent_id: str) -> None:
        self._mesos.kill(task_id, agent_id)

    def reconcile(self, tasks: dict[str, str]) -> None:
        self._mesos.reconcile(tasks)

    def send(self, executor_id: Any, agent_id: Any, data: str) -> None:
        self._mesos.sendFrameworkMessage(executor_id, agent_id, data)

    # Offers.

    def _rescinded(self, event: events.OfferRescinded) -> None:
        self._pool.used([event.offer_id])
        for seat in self._seats.values():
            if seat.lent.pop(event.offer_id, None) is not None:
                self._guarded(seat, seat.tenant.handle, event)

    def _deal(self, now_s: float) -> None:
        """Lets the jobs that want offers look at them, one after the other."""
        if not self._pool.settled(now_s):
            return
        until_s = time.monotonic() + ROUND_S
        fruitless: set[Any] = set()
        while time.monotonic() < until_s and self._pool.offers:
            seat = self._next_to_look(fruitless)
            if seat is None:
                self._decline_rest()
                return
            self._let_look(seat, now_s, fruitless)

    def _next_to_look(self, fruitless: set[Any]) -> Seat | None:
        waiting = {
            seat.job_id: Candidate(seat.job_id, seat.user, seat.number, seat.tenant.need)
            for seat in self._seats.values()
            if seat.looked_at != self._pool.generation and seat.tenant.need is not Need.NOTHING
        }
        for candidate in self._queue.order(list(waiting.values()), self._held_by_users(), self._total()):
            seat = self._seats[candidate.job_id]
            if (seat.tenant.demand_key, seat.constraints) not in fruitless:
                return seat
            seat.looked_at = self._pool.generation
        return None

    def _let_look(self, seat: Seat, now_s: float, fruitless: set[Any]) -> None:
        seat.looked_at = self._pool.generation
        seat.looked_s = now_s
        offers = self._pool.offers
        before = len(seat.tasks)
        self._pool.lend(offers)
        seat.lent.update({offer_id(offer): offer for offer in offers})
        self._guarded(seat, seat.tenant.handle, events.OffersArrived(tuple(offers)))
        self._guarded(seat, seat.tenant.tick)
        if len(seat.tasks) == before and seat.tenant.demand_key is not None:
            fruitless.add((seat.tenant.demand_key, seat.constraints))

    def _held_by_users(self) -> dict[str, dict[str, float]]:
        held: dict[str, dict[str, float]] = {}
        for seat in self._seats.values():
            amounts = held.setdefault(seat.user, {})
            for name, amount in seat.held().items():
                amounts[name] = amounts.get(name, 0.0) + amount
        return held

    def _decline_rest(self) -> None:
        self._unwanted += self._pool.take(lambda offer: True)

    def _want_or_not(self) -> None:
        """Asks for offers while any job wants some, and for none otherwise."""
        wanted = any(seat.tenant.need is not Need.NOTHING for seat in self._seats.values())
        if not self._connection.connected:
            return
        if wanted and (self._suppressed or self._revive):
            if try_now(self._mesos.reviveOffers):
                self._suppressed = self._revive = False
        elif not wanted:
            self._decline_rest()
            if not self._suppressed and try_now(self._mesos.suppressOffers):
                self._suppressed = True

    def _give_back(self) -> None:
        """Declines what is not wanted; what the master did not take stays noted for the next time."""
        if not self._unwanted:
            return
        try:
            self._mesos.declineOffer([{"value": one} for one in self._unwanted], {"refuse_seconds": REFUSE_S})
        except MasterUnavailableError as error:
            logger.info("%s", error)
            return
        except CallRefusedError as error:
            # Void offers: a master that was just restarted does not know the subscription they came by.
            logger.info("%s", error)
        self._unwanted = []

    # Jobs.

    def _tick_seats(self) -> None:
        idle = []
        for seat in self.seats:
            if seat.has_tasks or seat.lent or seat.tenant.need is Need.NOTHING:
                self._guarded(seat, seat.tenant.tick)
            else:
                idle.append(seat)
        for _ in range(min(IDLE_TICKS, len(idle))):
            self._next_idle = (self._next_idle + 1) % len(idle)
            self._guarded(idle[self._next_idle], idle[self._next_idle].tenant.tick)

    def _guarded(self, seat: Seat, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call of a job's state machine; whatever it raises ends that job only."""
        try:
            call(*arguments)
        except Exception as error:
            logger.info("job %s has raised", seat.job_id, exc_info=True)
            self._remove(seat)
            for task in seat.tasks.values():
                self._doomed[task.task_id] = task.agent_id
                try_now(self._mesos.kill, task.task_id, task.agent_id)
            self._failed(seat, error)

    def _remove_ended(self) -> None:
        for seat in self.seats:
            if seat.tenant.done:
                self._remove(seat)
                self._ended(seat)

    def _remove(self, seat: Seat) -> None:
        del self._seats[seat.job_id]
        for task_id in [task_id for task_id, owner in self._seat_of_task.items() if owner is seat]:
            del self._seat_of_task[task_id]
        self._acknowledgements += seat.acknowledgements
        self._pool.put_back(seat.lent.values())
        seat.lent.clear()
