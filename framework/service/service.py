"""The framework as a service: runs the jobs of a database and recovers them after a crash."""

from __future__ import annotations

import dataclasses
import logging
import math
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
from framework.scheduler.queue_options import QueueOptions
from framework.scheduler.records import JobRecord, JobState, TaskRecord
from framework.scheduler.scheduler import Scheduler
from framework.service.blocked import why_blocked
from framework.service.job_factory import JobContext, make_job
from framework.service.metrics import ServiceMetrics
from framework.service.recorder import JobRecorder
from framework.service.store import ServiceStore

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5


@dataclasses.dataclass
class _TimeLimit:
    """The time limit of a job; it is not reached before `earliest_s`, seconds since the epoch."""

    limit_s: float
    earliest_s: float = 0.0


class StoredJournal(Journal):
    """Writes the scheduler's journal to the database; `recorders` may hold unwritten output of jobs."""

    def __init__(self, store: ServiceStore, recorders: Mapping[str, JobRecorder]) -> None:
        self._store = store
        self._recorders = recorders

    def subscribed(self, framework_id: str) -> None:
        self._store.set_framework_id(framework_id)

    def record_intent(self, job_id: str, tasks: Any, state: dict[str, Any]) -> None:
        self._store.save(tasks, {job_id: state})

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        for job_id in {task.job_id for task in tasks if task.ended_s is not None} & self._recorders.keys():
            # The last status update carries the end of the task's output, and is not repeated once this returns.
            self._recorders[job_id].write()
        self._store.save(tasks, states)


class Service:
    """Runs the jobs of a database on one Mesos cluster (`framework.scheduler.session.Work`).

    Submitted jobs and kill requests arrive as `JobSubmitted` and `KillRequested` once they are in the database. Without
    `background`, slow work runs in the loop; without `job_sizes`, each elastic job sizes itself.
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
        self._blocked: dict[str, None] = {}
        """Ids of jobs that are held or wait for others, in order; the scheduler does not know them."""
        self._time_limits: dict[str, _TimeLimit] = {}
        self._ended_by: dict[str, str] = {}
        """Job that is being ended -> why, to follow its name."""
        self._admitted_count = 0
        self._written_s = 0.0
        self._is_shut_down = False
        self.metrics = ServiceMetrics(self._store)
        self.scheduler = Scheduler(
            mesos,
            metrics=self.metrics,
            journal=StoredJournal(self._store, self._recorders),
            log=logger.warning,
            ended=self._job_ended,
            failed=self._job_failed,
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
        return self._is_shut_down

    def handle(self, event: events.Event) -> None:
        """Handles one event as `Scheduler.handle`; records a removal of the framework, so that a new service resumes
        the jobs.
        """
        match event:
            case events.JobSubmitted():
                record = self._store.job(event.job_id)
                if record is not None and record.id not in self._recorders and not record.state.has_ended():
                    self._admit(record, [])
            case events.JobReleased():
                self._unblock()
            case events.KillRequested():
                self._kill(event.job_id, event.user)
            case _:
                try:
                    self.scheduler.handle(event)
                except FrameworkRemovedError:
                    self._store.forget_framework()
                    self._shut_down()
                    raise

    def tick(self) -> None:
        start_s = time.monotonic()
        self.scheduler.tick()
        self._update_states()
        self._end_overdue()
        now_s = time.monotonic()
        if now_s - self._written_s >= WRITE_INTERVAL_S:
            self._written_s = now_s
            self._write()
        self.metrics.loop_iteration(time.monotonic() - start_s)

    def cancel(self) -> None:
        """Shuts the service down without ending tasks; the next service recovers the jobs."""
        self.scheduler.save()
        self._shut_down()

    def _shut_down(self) -> None:
        self._is_shut_down = True
        self._write()
        for entry in self.scheduler.jobs:
            if isinstance(entry.job, LeaseOwner):
                entry.job.release_leases()

    def _write(self) -> None:
        # One transaction: each waits for the disk.
        with self._store.database.joint_transaction():
            for recorder in self._recorders.values():
                recorder.write()

    def _admit(self, record: JobRecord, tasks: list[TaskRecord]) -> None:
        self._admitted_count += 1
        self._recorders[record.id] = JobRecorder(self._store, record.id, record.waiting)
        self._states[record.id] = record.state
        logger.info("job %s of %s: %s", record.id, record.user, record.state)
        if record.started_s is not None:
            self._started.add(record.id)
        if tasks:
            self._start(record, tasks)
        else:
            self._start_unless_blocked(record)

    def _unblock(self) -> None:
        """Starts the jobs whose conditions hold now, and ends those that can never start."""
        for job_id in list(self._blocked):
            # One that ends may end others.
            record = self._store.job(job_id) if job_id in self._blocked else None
            if record is not None:
                self._start_unless_blocked(record)

    def _start_unless_blocked(self, record: JobRecord) -> None:
        blocked = why_blocked(record, self._store.job)
        if blocked is None:
            if record.id in self._blocked:
                del self._blocked[record.id]
                self._recorders[record.id].waiting = ""
            self._start(record, [])
            return
        self._blocked[record.id] = None
        if blocked.is_final:
            self._finish(record.id, JobOutcome(JobState.KILLED, blocked.reason))
        elif record.kill_requested:
            self._kill(record.id)
        else:
            self._recorders[record.id].set_waiting(blocked.reason)

    def _end_overdue(self) -> None:
        """Ends the jobs that have run longer than their time limit."""
        now_s = time.time()
        for job_id, limit in list(self._time_limits.items()):
            if self._states[job_id] is not JobState.RUNNING or now_s < limit.earliest_s:
                continue
            left_s = limit.limit_s - _ran_s(self._store.tasks(job_id=job_id), now_s)
            if left_s <= 0:
                self._end(job_id, f"reached its time limit of {limit.limit_s:g} s (--time-limit)")
            else:
                limit.earliest_s = now_s + left_s

    def _start(self, record: JobRecord, tasks: list[TaskRecord]) -> None:
        """Hands a job over to the scheduler."""
        recorder = self._recorders[record.id]
        limit_s = QueueOptions.of(record.request).time_limit_s
        if limit_s is not None:
            self._time_limits[record.id] = _TimeLimit(limit_s)
        try:
            self._schedule(record, tasks, recorder)
        except ServiceLeaseLostError:
            raise
        except Exception as error:
            if self.scheduler.job(record.id) is not None:
                raise
            # One job that cannot be admitted must not stop the others. If the cause is an unavailable database, the
            # failure cannot be written either, and the job stays unchanged.
            self._fail(record.id, error)
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
                    self._admitted_count,
                    lambda entry: make_job(record, entry, recorder, self._context),
                    constraints=record.constraints,
                    tasks=tasks,
                    priority=record.priority,
                    submitted_s=record.submitted_s,
                )
                return
            except StorageUnavailableError:
                # The database may be back already: one retry.
                if is_last or self.scheduler.job(record.id) is not None:
                    raise

    def _kill(self, job_id: str, user: str = "") -> None:
        if job_id in self._blocked:
            self._finish(job_id, JobOutcome(JobState.KILLED, f"killed by {user}" if user else ""))
        elif self.scheduler.job(job_id) is not None:
            if user and job_id not in self._ended_by:
                self._recorders[job_id].event("note", f"kill requested by {user}")
            self._end(job_id, f"killed by {user}" if user else "")

    def _end(self, job_id: str, why: str) -> None:
        if why:
            self._ended_by.setdefault(job_id, why)
        self._set_state(job_id, JobState.ENDING)
        self.scheduler.cancel_job(job_id)

    def _update_states(self) -> None:
        for entry in self.scheduler.jobs:
            if self._states[entry.job_id] is JobState.ENDING:
                continue
            if entry.has_tasks:
                self._set_state(entry.job_id, JobState.RUNNING)
            elif entry.job.need is not Need.NOTHING:
                self._set_state(entry.job_id, JobState.QUEUED)

    def _set_state(self, job_id: str, state: JobState) -> None:
        if self._states[job_id] is state:
            return
        self._states[job_id] = state
        logger.info("job %s: %s", job_id, state)
        if state is JobState.RUNNING and job_id not in self._started:
            self._started.add(job_id)
            now_s = time.time()
            record = self._store.start_job(job_id, now_s)
            if record is not None:
                self.metrics.job_waited(now_s - record.submitted_s)
        else:
            self._store.change_job(job_id, state=state)

    def _job_ended(self, entry: JobEntry) -> None:
        self._finish(entry.job_id, entry.job.outcome())

    def _job_failed(self, entry: JobEntry, error: Exception) -> None:
        self._fail(entry.job_id, error)

    def _fail(self, job_id: str, error: Exception) -> None:
        if not isinstance(error, DikeError):
            logger.error("job %s: %s", job_id, "".join(traceback.format_exception(error)))
            error = DikeError(f"The service failed with an internal error, {error!r}; see its log.")
        self._finish(job_id, JobOutcome(JobState.FAILED, str(error)))

    def _finish(self, job_id: str, outcome: JobOutcome) -> None:
        why = self._ended_by.pop(job_id, "")
        if why and outcome.state is JobState.KILLED and outcome.failure in ("", CANCELLED, INTERRUPTED):
            outcome = dataclasses.replace(outcome, failure=why)
        self._blocked.pop(job_id, None)
        self._time_limits.pop(job_id, None)
        logger.info("job %s: %s", job_id, f"{outcome.state} {outcome.failure}".strip())
        recorder = self._recorders.pop(job_id)
        recorder.event("ended", outcome.failure or str(outcome.state))
        recorder.write()
        self._store.history.close(job_id)
        if (record := self._store.job(job_id)) is not None:
            self._context.forget_bundle(record.bundle_token)
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
        self._unblock()


def _ran_s(tasks: Sequence[TaskRecord], now_s: float) -> float:
    """Seconds during which at least one of the tasks ran."""
    ran_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted((task.launched_s, task.ended_s or now_s) for task in tasks):
        ran_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return ran_s
