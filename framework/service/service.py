"""A framework one can leave running: takes jobs out of the database, runs them, and goes on after it was killed."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

from dike.exceptions import DikeError
from framework import events
from framework.job import JobResult
from framework.mesos_calls import MesosCalls
from framework.service.hub import Hub
from framework.service.journal import Journal
from framework.service.queueing import FairQueue
from framework.service.records import JobRecord, JobState, TaskRecord
from framework.service.seat import Seat
from framework.service.store import ServiceStore
from framework.service.tenants import Surroundings, make_tenant
from framework.service.watchers import Notebook
from framework.training import TrainingJob

logger = logging.getLogger(__name__)

WRITE_S = 0.5
"""How often what jobs tell is written down."""


class StoredJournal(Journal):
    """Writes the hub's journal into a service's database."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store

    def subscribed(self, framework_id: str) -> None:
        self._store.set_framework_id(framework_id)

    def intends(self, job_id: str, tasks: Any, state: dict[str, Any]) -> None:
        self._store.save(tasks, {job_id: state})

    def changed(self, tasks: Any, states: dict[str, dict[str, Any]]) -> None:
        self._store.save(tasks, states)


class Service:
    """The jobs of a database on one Mesos (`framework.session.Work`).

    New jobs and requests to end one come as events, `JobSubmitted` and `KillRequested`, after they were written to the
    database.

    Args:
        around: database and all else that jobs are given.
        mesos: the master.
        queue: who is served first.
    """

    def __init__(self, around: Surroundings, mesos: MesosCalls, queue: FairQueue | None = None) -> None:
        self._around = around
        self._store = around.store
        self._books: dict[str, Notebook] = {}
        self._started: set[str] = set()
        self._numbers = 0
        self._written_s = 0.0
        self.hub = Hub(
            mesos,
            journal=StoredJournal(self._store),
            note=logger.warning,
            ended=self._ended,
            failed=self._failed,
            queue=queue,
        )
        tasks: dict[str, list[TaskRecord]] = {}
        for task in self._store.tasks(live_only=True):
            tasks.setdefault(task.job_id, []).append(task)
        for record in self._store.open_jobs():
            self._admit(record, tasks.get(record.id, []))

    @property
    def done(self) -> bool:
        """Never by itself."""
        return False

    def handle(self, event: events.Event) -> None:
        """Takes one event in; raises as `Hub.handle` does."""
        match event:
            case events.JobSubmitted():
                record = self._store.job(event.job_id)
                if record is not None and self.hub.seat(record.id) is None and not record.state.has_ended():
                    self._admit(record, [])
            case events.KillRequested():
                self._kill(event.job_id)
            case _:
                self.hub.handle(event)

    def tick(self) -> None:
        """Does what is due by time."""
        self.hub.tick()
        self._note_started()
        now_s = time.monotonic()
        if now_s - self._written_s >= WRITE_S:
            self._written_s = now_s
            for book in self._books.values():
                book.write()

    def cancel(self) -> None:
        """Ends nothing: jobs go on without the service, and are found again by the next one."""

    def _admit(self, record: JobRecord, tasks: list[TaskRecord]) -> None:
        self._numbers += 1
        book = self._books[record.id] = Notebook(self._store, record.id)
        if record.state is not JobState.QUEUED:
            self._started.add(record.id)
        try:
            self.hub.admit(
                record.id,
                record.user,
                self._numbers,
                lambda seat: make_tenant(record, seat, book, self._around),
                constraints=record.constraints,
                tasks=tasks,
            )
        except DikeError as error:
            self._over(record.id, JobState.FAILED, str(error), None)
            return
        if record.kill_requested:
            self._kill(record.id)

    def _kill(self, job_id: str) -> None:
        seat = self.hub.seat(job_id)
        if seat is not None:
            self._store.change_job(job_id, state=JobState.ENDING)
            self.hub.cancel_job(job_id)

    def _note_started(self) -> None:
        for seat in self.hub.seats:
            if seat.has_tasks and seat.job_id not in self._started:
                self._started.add(seat.job_id)
                self._store.change_job(seat.job_id, state=JobState.RUNNING, started_s=time.time())

    def _ended(self, seat: Seat) -> None:
        record = self._store.job(seat.job_id)
        result = seat.tenant.result if isinstance(seat.tenant, TrainingJob) else None
        if isinstance(result, JobResult):
            state = JobState.FINISHED if result.succeeded else JobState.FAILED
            if record is not None and record.kill_requested and not result.succeeded:
                state = JobState.KILLED
            self._over(seat.job_id, state, result.failure, result.to_json())

    def _failed(self, seat: Seat, error: Exception) -> None:
        if not isinstance(error, DikeError):
            logger.error("job %s: %s", seat.job_id, "".join(traceback.format_exception(error)))
            error = DikeError(f"The service met an error of its own, {error!r}; its log says more.")
        self._over(seat.job_id, JobState.FAILED, str(error), None)

    def _over(self, job_id: str, state: JobState, failure: str, result: dict[str, Any] | None) -> None:
        book = self._books.pop(job_id, None)
        if book is not None:
            book.event("ended", failure or str(state))
            book.write()
        self._started.discard(job_id)
        self._store.change_job(job_id, state=state, failure=failure, result=result, ended_s=time.time(), waiting="")
