"""The tasks of all jobs: whose each one is, what has to be written down of it, and what the master is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from framework import events
from framework.job import TaskState
from framework.mesos_calls import MesosCalls, try_now
from framework.service.hearsay import Hearsay
from framework.service.journal import Journal
from framework.service.metrics import Metrics
from framework.service.offer_pool import Offer
from framework.service.orphans import Orphans
from framework.service.reconciliation import Reconciliation
from framework.service.records import TaskRecord
from framework.service.seat import Seat, intended_tasks, updated

SAVE_S = 1.0
"""How often jobs' states are looked at for changes that came with time alone."""


class Ledger:
    """Keeps account of tasks.

    Args:
        mesos: the master.
        journal: keeps what has to outlive us.
        metrics: counts what happens.
        now_s: the time, on any clock that only moves forward.
    """

    def __init__(self, mesos: MesosCalls, journal: Journal, metrics: Metrics, now_s: float) -> None:
        self._mesos = mesos
        self._journal = journal
        self._metrics = metrics
        self._owners: dict[str, Seat] = {}
        self._orphans = Orphans(mesos, journal)
        self._reconciliation = Reconciliation()
        self._hearsay = Hearsay()
        self._unsaved: dict[str, TaskRecord] = {}
        self._acknowledgements: list[dict[str, Any]] = []
        self._saved_s = now_s

    # Whose a task is.

    def owner(self, task_id: str) -> Seat | None:
        """The job of a task, or of the executor of that id; None if it is none's any more."""
        return self._owners.get(task_id)

    def owns(self, seat: Seat, task_ids: Iterable[str]) -> None:
        """A job has these tasks, or asks for them; it hears what the master says of them."""
        for task_id in task_ids:
            self._owners.setdefault(task_id, seat)

    def disown(self, tasks: Sequence[TaskRecord]) -> None:
        """Ends tasks whose jobs have ended; how they end is written down."""
        self._orphans.take_in(tasks)

    def dismiss(self, seat: Seat) -> None:
        """A job has ended; what still runs of it is ended too."""
        for task_id in [task_id for task_id, owner in self._owners.items() if owner is seat]:
            del self._owners[task_id]
        self._acknowledgements += seat.acknowledgements
        seat.acknowledgements = []
        self.disown(list(seat.tasks.values()))

    # What happens to tasks.

    def intends(self, seat: Seat, offers: Sequence[Offer], operations: Sequence[dict[str, Any]]) -> list[TaskRecord]:
        """Writes down the tasks that a job is about to launch on offers of one agent."""
        tasks = intended_tasks(seat.job_id, offers, operations)
        state = seat.tenant.to_state()
        self._journal.intends(seat.job_id, tasks, state)
        seat.saved = state
        seat.launched += 1
        for task in tasks:
            seat.tasks[task.task_id] = task
            self._owners[task.task_id] = seat
        return tasks

    def doubts(self, tasks: Sequence[TaskRecord]) -> None:
        """It is not known whether the master has launched these; it is asked, until it says so."""
        self._reconciliation.doubt(task.task_id for task in tasks)

    def sift(self, event: events.StatusUpdate, now_s: float) -> list[events.StatusUpdate]:
        """What of a status update is to be taken in now; nothing if a better one is to come (`Hearsay`)."""
        self._reconciliation.heard(event.task_id, now_s)
        return self._hearsay.sift(event, now_s)

    def believed(self, now_s: float) -> list[events.StatusUpdate]:
        """Status updates to be taken in after all, since no better ones have come; there is a connection."""
        return self._hearsay.believed(now_s)

    def heard(self, event: events.StatusUpdate) -> Seat | None:
        """Takes in what Mesos says of a task.

        Returns:
            Whose it is, who has to hear of it.
        """
        seat = self._owners.get(event.task_id)
        state = TaskState.of(event.state)
        if seat is None:
            changed = self._orphans.heard(event, state)
            if changed is not None:
                self._unsaved[event.task_id] = changed
            self._acknowledgements.append(event.status)
            return None
        known = seat.tasks.get(event.task_id)
        if known is not None:
            changed = seat.tasks[event.task_id] = self._unsaved[event.task_id] = updated(known, event, state)
            if state.is_terminal():
                del seat.tasks[event.task_id]
                if state not in (TaskState.FINISHED, TaskState.KILLED):
                    self._metrics.task_failed()
                if state is TaskState.LOST:
                    self._orphans.may_come_back(changed)
        seat.must_save = True
        if state.is_terminal():
            del self._owners[event.task_id]
        return seat

    # What is due.

    def subscribed(self, now_s: float) -> None:
        """The master has taken us in, for the first time or again."""
        self._reconciliation.begin([*self._owners, *self._orphans.agents], now_s)
        self._hearsay.subscribed(now_s)

    def disconnected(self) -> None:
        """The connection is gone."""
        self._reconciliation.stop()

    def ask(self, now_s: float) -> None:
        """Asks the master what is to be asked, and kills what is to end; there is a connection to it."""
        everything, due = self._reconciliation.everything(now_s), self._reconciliation.explicit(now_s)
        if everything or due:
            agents = dict(self._orphans.agents)
            for task_id, seat in self._owners.items():
                if task_id in seat.tasks:
                    agents[task_id] = seat.tasks[task_id].agent_id
            asked = {task_id: agent_id for task_id, agent_id in agents.items() if everything or task_id in due}
            if asked:
                try_now(self._mesos.reconcile, asked)
        if self._reconciliation.implicit(now_s):
            try_now(self._mesos.reconcile, {})
        self._orphans.kill(now_s)

    def save(self, seats: Collection[Seat], now_s: float, guarded: Callable[..., None]) -> None:
        """Writes down what has changed, then acknowledges the status updates behind it.

        Args:
            seats: all of them.
            now_s: the time.
            guarded: makes a call of a job's state machine.
        """
        look_at_all = now_s - self._saved_s >= SAVE_S
        if look_at_all:
            self._saved_s = now_s
        looked_at = [seat for seat in seats if seat.must_save or (look_at_all and seat.has_tasks)]
        states: dict[Seat, dict[str, Any]] = {}
        for seat in looked_at:
            guarded(seat, _note_state, seat, states)
        for seat in seats:
            self._acknowledgements += seat.acknowledgements
            seat.acknowledgements = []
        if states or self._unsaved:
            tasks = list(self._unsaved.values())
            self._journal.changed(tasks, {seat.job_id: state for seat, state in states.items()})
            self._unsaved.clear()
        for seat, state in states.items():
            seat.saved = state
        for seat in looked_at:
            seat.must_save = False
        for status in self._acknowledgements:
            # What is not delivered is sent by the agent again.
            try_now(self._mesos.acknowledgeStatusUpdate, status)
        self._acknowledgements.clear()


def _note_state(seat: Seat, states: dict[Seat, dict[str, Any]]) -> None:
    state = seat.tenant.to_state()
    if state != seat.saved:
        states[seat] = state
