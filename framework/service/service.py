"""A framework one can leave running: takes jobs out of the database, runs them, and goes on after it was killed."""

from __future__ import annotations

import dataclasses
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from dike.exceptions import DikeError
from framework.mesos import events
from framework.mesos.connection import FrameworkRemovedError
from framework.mesos.driver import MesosCalls
from framework.mesos.master import LeadingMaster
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.background import Background
from framework.scheduler.fair_share import FairQueue
from framework.scheduler.job import CANCELLED, INTERRUPTED, JobEntry, JobOutcome, LeaseOwner, Need
from framework.scheduler.job_sizes import JobSizes
from framework.scheduler.journal import Journal, ServiceLeaseLostError, StorageUnavailableError
from framework.scheduler.records import JobRecord, JobState, TaskRecord
from framework.scheduler.scheduler import Scheduler
from framework.service.job_factory import JobContext, make_job
from framework.service.metrics import ServiceMetrics
from framework.service.recorder import JobRecorder
from framework.service.store import ServiceStore

logger = logging.getLogger(__name__)

WRITE_S = 0.5
"""How often what jobs tell is written down."""


class StoredJournal(Journal):
    """Writes the scheduler's journal into a service's database.

    Args:
        store: the database.
        recorders: job -> what it has told, which may not be written yet.
    """

    def __init__(self, store: ServiceStore, recorders: Mapping[str, JobRecorder]) -> None:
        self._store = store
        self._recorders = recorders

    def subscribed(self, framework_id: str) -> None:
        self._store.set_framework_id(framework_id)

    def record_intent(self, job_id: str, tasks: Any, state: dict[str, Any]) -> None:
        self._store.save(tasks, {job_id: state})

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        for job_id in {task.job_id for task in tasks if task.ended_s is not None} & self._recorders.keys():
            # The end of a task's output comes with its last status update, which is not repeated any more after this.
            self._recorders[job_id].write()
        self._store.save(tasks, states)


class Service:
    """The jobs of a database on one Mesos (`framework.scheduler.session.Work`).

    New jobs and requests to end one come as events, `JobSubmitted` and `KillRequested`, after they were written to the
    database.

    Args:
        context: database and all else that jobs are given.
        mesos: the master.
        queue: who is served first.
        agents: knows the agents; None where nobody does.
        master: hears which master leads; None where nobody needs to know.
        background: where what takes long is done; None: at once.
        job_sizes: decides on the sizes of elastic jobs; None: each decides for itself.
    """

    def __init__(
        self,
        context: JobContext,
        mesos: MesosCalls,
        queue: FairQueue | None = None,
        agents: AgentDirectory | None = None,
        master: LeadingMaster | None = None,
        background: Background | None = None,
        job_sizes: JobSizes | None = None,
    ) -> None:
        self._context = context
        self._store = context.store
        self._recorders: dict[str, JobRecorder] = {}
        self._states: dict[str, JobState] = {}
        self._started: set[str] = set()
        self._killed_by: dict[str, str] = {}
        self._numbers = 0
        self._written_s = 0.0
        self._leaves = False
        self.metrics = ServiceMetrics(self._store)
        self.scheduler = Scheduler(
            mesos,
            metrics=self.metrics,
            journal=StoredJournal(self._store, self._recorders),
            log=logger.warning,
            ended=self._has_ended,
            failed=self._has_failed,
            notify=lambda job_id, text: self._recorders[job_id].event("note", text),
            queue=queue,
            agents=agents,
            master=master,
            background=background,
            job_sizes=job_sizes,
        )
        tasks: dict[str, list[TaskRecord]] = {}
        for task in self._store.tasks(live_only=True):
            tasks.setdefault(task.job_id, []).append(task)
        for record in self._store.open_jobs():
            self._admit(record, tasks.pop(record.id, []))
        for left_over in tasks.values():
            self.scheduler.disown(left_over)

    @property
    def done(self) -> bool:
        """Whether it was told to leave; never by itself."""
        return self._leaves

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            FrameworkRemovedError: if the master has ended the framework; that is noted, and a new service goes on with
                the jobs.
            BadInputError, JobFailedError: as `Scheduler.handle`.
        """
        match event:
            case events.JobSubmitted():
                record = self._store.job(event.job_id)
                if record is not None and self.scheduler.job(record.id) is None and not record.state.has_ended():
                    self._admit(record, [])
            case events.KillRequested():
                self._kill(event.job_id, event.user)
            case _:
                try:
                    self.scheduler.handle(event)
                except FrameworkRemovedError:
                    self._store.forget_framework()
                    self._leave()
                    raise

    def tick(self) -> None:
        """Does what is due by time."""
        begun_s = time.monotonic()
        self.scheduler.tick()
        self._note_states()
        now_s = time.monotonic()
        if now_s - self._written_s >= WRITE_S:
            self._written_s = now_s
            self._write()
        self.metrics.loop_iteration(time.monotonic() - begun_s)

    def cancel(self) -> None:
        """Leaves, and ends nothing: jobs go on without the service, and are found again by the next one."""
        self.scheduler.save()
        self._leave()

    def _leave(self) -> None:
        self._leaves = True
        self._write()
        for handle in self.scheduler.jobs:
            if isinstance(handle.job, LeaseOwner):
                handle.job.release_leases()

    def _write(self) -> None:
        # Each transaction waits for the disk.
        with self._store.database.together():
            for recorder in self._recorders.values():
                recorder.write()

    def _admit(self, record: JobRecord, tasks: list[TaskRecord]) -> None:
        self._numbers += 1
        recorder = self._recorders[record.id] = JobRecorder(self._store, record.id, record.waiting)
        self._states[record.id] = record.state
        logger.info("job %s of %s: %s", record.id, record.user, record.state)
        if record.started_s is not None:
            self._started.add(record.id)
        try:
            self._schedule(record, tasks, recorder)
        except ServiceLeaseLostError:
            raise
        except Exception as error:
            if self.scheduler.job(record.id) is not None:
                raise
            # One job that cannot be taken up must not keep the service from the others. If the database is away for
            # these too, that cannot be written, and the job is none the worse for it.
            self._failed(record.id, error)
            self.scheduler.disown(tasks)
            return
        if record.kill_requested:
            self._kill(record.id)

    def _schedule(self, record: JobRecord, tasks: list[TaskRecord], recorder: JobRecorder) -> None:
        for is_last in (False, True):
            try:
                self.scheduler.admit(
                    record.id,
                    record.user,
                    self._numbers,
                    lambda handle: make_job(record, handle, recorder, self._context),
                    constraints=record.constraints,
                    tasks=tasks,
                )
                return
            except StorageUnavailableError:
                # The database may have been away for a moment.
                if is_last or self.scheduler.job(record.id) is not None:
                    raise

    def _kill(self, job_id: str, user: str = "") -> None:
        if self.scheduler.job(job_id) is not None:
            if user and job_id not in self._killed_by:
                self._killed_by[job_id] = user
                self._recorders[job_id].event("note", f"{user} asked to end it")
            self._note_state(job_id, JobState.ENDING)
            self.scheduler.cancel_job(job_id)

    def _note_states(self) -> None:
        for handle in self.scheduler.jobs:
            if self._states[handle.job_id] is JobState.ENDING:
                continue
            if handle.has_tasks:
                self._note_state(handle.job_id, JobState.RUNNING)
            elif handle.job.need is not Need.NOTHING:
                self._note_state(handle.job_id, JobState.QUEUED)

    def _note_state(self, job_id: str, state: JobState) -> None:
        if self._states[job_id] is state:
            return
        self._states[job_id] = state
        logger.info("job %s: %s", job_id, state)
        if state is JobState.RUNNING and job_id not in self._started:
            self._started.add(job_id)
            now_s = time.time()
            self._store.change_job(job_id, state=state, started_s=now_s)
            record = self._store.job(job_id)
            if record is not None:
                self.metrics.job_waited(now_s - record.submitted_s)
        else:
            self._store.change_job(job_id, state=state)

    def _has_ended(self, handle: JobEntry) -> None:
        self._over(handle.job_id, handle.job.outcome())

    def _has_failed(self, handle: JobEntry, error: Exception) -> None:
        self._failed(handle.job_id, error)

    def _failed(self, job_id: str, error: Exception) -> None:
        if not isinstance(error, DikeError):
            logger.error("job %s: %s", job_id, "".join(traceback.format_exception(error)))
            error = DikeError(f"The service met an error of its own, {error!r}; its log says more.")
        self._over(job_id, JobOutcome(JobState.FAILED, str(error)))

    def _over(self, job_id: str, outcome: JobOutcome) -> None:
        user = self._killed_by.pop(job_id, "")
        if user and outcome.state is JobState.KILLED and outcome.failure in ("", CANCELLED, INTERRUPTED):
            outcome = dataclasses.replace(outcome, failure=f"killed by {user}")
        logger.info("job %s: %s", job_id, f"{outcome.state} {outcome.failure}".strip())
        recorder = self._recorders.pop(job_id)
        recorder.event("ended", outcome.failure or str(outcome.state))
        recorder.write()
        self._store.history.close(job_id)
        del self._states[job_id]
        self._started.discard(job_id)
        self._store.change_job(
            job_id,
            state=outcome.state,
            failure=outcome.failure,
            result=outcome.result,
            ended_s=time.time(),
            waiting="",
        )
