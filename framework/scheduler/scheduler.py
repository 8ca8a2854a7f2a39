"""Multiplexes one Mesos subscription over many jobs. Intent is stored before every action.

A launch is stored before ACCEPT, and a status update is acknowledged after its consequences have been stored. So a
service that is killed at any moment can be restarted, and no task runs that is missing in the database.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from executor.messages import Addressed
from framework.cluster.demand import PilotNotice
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.driver import MesosCalls, try_call
from framework.mesos.master import LeadingMaster
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.fair_share import FairQueue
from framework.scheduler.job import Job, JobEntry, Need, Resizable
from framework.scheduler.journal import Journal, ServiceLeaseLostError, StorageUnavailableError
from framework.scheduler.metrics import Metrics
from framework.scheduler.offer_matcher import OfferMatcher
from framework.scheduler.offer_pool import OfferPool
from framework.scheduler.pending_queue import PendingQueue
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import TaskRecord
from framework.scheduler.reservation import Reservations
from framework.scheduler.snapshot import Snapshot
from framework.scheduler.task_tracker import TaskTracker

if TYPE_CHECKING:
    from framework.scheduler.job_sizes import JobSizes

logger = logging.getLogger(__name__)

IDLE_TICKS = 5
"""Maximum number of idle jobs that tick in one iteration."""
REVIEW_S = 1.0
"""Interval of reviews of the pending queue."""


class Scheduler:
    """The jobs of one framework.

    Pass every event to `handle` and call `tick` a few times a second, on one thread (`session.Work`).

    Args:
        mesos: the master.
        journal: durable storage.
        log: receives lines that concern no particular job.
        ended: called after the scheduler has dropped a job that is done.
        failed: called after the scheduler has dropped a job whose state machine raised; may raise. Its tasks are
            killed.
        notify: sends a message to the watchers of a job, by its id.
        metrics: receives metrics.
        queue: order of the jobs.
        agents: the agents; None if not needed.
        reservations: reservations of agents for jobs.
        master: is updated with the leading master; None if not needed.
        background: runs long work; None: inline.
        job_sizes: allocates the sizes of elastic jobs; None: each job chooses its own.
        clock: seconds, monotonic.
        pool: holds the unused offers; None: a new one.

    Attributes:
        snapshot: state about a second ago; may be read from any thread.
        pilots: returns the Slurm jobs that bring further machines, for the snapshot; must not block.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        *,
        journal: Journal,
        log: Callable[[str], None],
        ended: Callable[[JobEntry], None],
        failed: Callable[[JobEntry, Exception], None],
        notify: Callable[[str, str], None] = lambda job_id, text: None,
        metrics: Metrics | None = None,
        queue: FairQueue | None = None,
        agents: AgentDirectory | None = None,
        reservations: Reservations | None = None,
        master: LeadingMaster | None = None,
        background: Background | None = None,
        job_sizes: JobSizes | None = None,
        clock: Callable[[], float] = time.monotonic,
        pool: OfferPool | None = None,
    ) -> None:
        self._mesos = mesos
        self._journal = journal
        self._ended = ended
        self._failed = failed
        self._metrics = metrics or Metrics()
        self._master = master
        self._background = background or InlineBackground()
        self._job_sizes = job_sizes
        self._clock = clock
        self._connection = Connection(log)
        self._jobs: dict[str, JobEntry] = {}
        self._tracker = TaskTracker(mesos, journal, self._metrics, clock())
        reservations = reservations or Reservations()
        self._queue = PendingQueue(
            self._jobs, queue or FairQueue(), agents, reservations, self._call_job, notify, clock
        )
        self._matcher = OfferMatcher(
            mesos,
            self._jobs,
            self._queue,
            reservations,
            self._tracker,
            self._call_job,
            self._metrics,
            clock,
            # An empty pool is falsy.
            OfferPool() if pool is None else pool,
        )
        self._next_idle = 0
        self._reviewed_s = clock()
        self._framework_id = ""
        self.pilots: Callable[[], PilotNotice | None] = lambda: None
        self.snapshot = Snapshot(time.time())

    @property
    def jobs(self) -> list[JobEntry]:
        """Jobs that have not ended, in order of arrival."""
        return sorted(self._jobs.values(), key=lambda entry: entry.number)

    @property
    def done(self) -> bool:
        """Whether no job is left."""
        return not self._jobs

    @property
    def pool(self) -> OfferPool:
        return self._matcher.pool

    def job(self, job_id: str) -> JobEntry | None:
        """Returns a job that has not ended; None if there is none of this id."""
        return self._jobs.get(job_id)

    def admit(
        self,
        job_id: str,
        user: str,
        number: int,
        make: Callable[[JobEntry], Job],
        *,
        constraints: Sequence[str] = (),
        tasks: Sequence[TaskRecord] = (),
        priority: Priority = Priority.NORMAL,
        submitted_s: float | None = None,
    ) -> JobEntry:
        """Adds a job.

        Args:
            job_id: unique.
            user: its share counts to this user.
            number: order of arrival.
            make: creates the job's state machine.
            constraints: which agents it may use.
            tasks: tasks of a restored job that may still run.
            priority: its priority in the queue.
            submitted_s: since when it waits for its first task, seconds since the epoch; None for now.

        Raises:
            BadInputError: if the constraints are malformed; also anything that `make` raises.
        """
        since_s = time.time() if submitted_s is None else submitted_s
        entry = JobEntry(job_id, user, number, constraints, tasks, self._background, priority, since_s)
        entry.job = make(entry)
        if self._job_sizes is not None and isinstance(entry.job, Resizable):
            entry.job.enter_central_allocation(self._scalable, self._job_sizes.sample_runs)
        self._jobs[job_id] = entry
        self._tracker.assign(entry, tasks)
        if self._connection.connected:
            self._call_job(entry, entry.job.handle, events.Subscribed(self._framework_id, ""))
        # The new job may use resources that earlier declines have filtered.
        self._matcher.revive()
        self._remove_failed()
        return entry

    def disown(self, tasks: Sequence[TaskRecord]) -> None:
        """Kills tasks that may still run though their jobs have ended; stores their last states."""
        self._tracker.disown(tasks)

    # Events.

    def handle(self, event: events.Event) -> None:
        """Handles one event.

        Raises:
            BadInputError: if the master refuses the framework.
            JobFailedError: if the master has removed the framework.
        """
        match event:
            case events.Subscribed():
                self._subscribed(event)
            case events.Disconnected():
                self._disconnected(event)
            case events.OffersArrived():
                self._matcher.arrived(event)
            case events.OfferRescinded():
                self._matcher.rescinded(event)
            case events.StatusUpdate():
                self._status_updates(self._tracker.filter_update(event, self._clock()))
            case events.MessageArrived():
                if (entry := self._tracker.owner(event.executor_id)) is not None:
                    self._call_job(entry, entry.job.handle, event)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                event.log(logger)
        self._remove_failed()

    def tick(self) -> None:
        """Performs what is due by time, and stores changes."""
        now_s = self._clock()
        if self._connection.connected:
            self._tracker.reconcile(now_s)
            self._status_updates(self._tracker.take_overdue(now_s))
        self._tick_jobs()
        if now_s - self._reviewed_s >= REVIEW_S:
            self._reviewed_s = now_s
            self._review(now_s)
        self._matcher.tick(now_s, connected=self._connection.connected)
        self.save()
        if self._connection.connected:
            self._tracker.kill_unwanted(self.jobs, now_s)

    def cancel(self) -> None:
        """Kills all jobs. `done` becomes true once their tasks have terminated."""
        for entry in self.jobs:
            self.cancel_job(entry.job_id)

    def cancel_job(self, job_id: str) -> None:
        """Kills one job, if it has not ended."""
        entry = self._jobs.get(job_id)
        if entry is not None:
            entry.is_ending = True
            self._tracker.must_save(entry)
            self._call_job(entry, entry.job.cancel)
            self._remove_failed()

    def save(self) -> None:
        """Stores changes, then acknowledges the status updates behind them."""
        self._remove_failed()
        self._tracker.save(self.jobs, self._clock(), self._call_job)
        self._remove_failed()
        self._remove_ended()

    # The connection.

    def _subscribed(self, event: events.Subscribed) -> None:
        self._framework_id = event.framework_id
        if self._master is not None:
            self._master.on_subscribed(event.master, event.version)
        self._journal.subscribed(event.framework_id)
        self._connection.subscribed()
        self._metrics.connected(True)
        self._matcher.subscribed()
        self._tracker.subscribed(self._clock(), event.master_age_s)
        for entry in self.jobs:
            self._call_job(entry, entry.job.handle, event)

    def _disconnected(self, event: events.Disconnected) -> None:
        self._connection.disconnected()
        self._metrics.connected(False)
        self._matcher.disconnected()
        for entry in self.jobs:
            self._call_job(entry, entry.job.handle, event)

    def _status_updates(self, updates: Sequence[events.StatusUpdate]) -> None:
        for event in updates:
            if (entry := self._tracker.apply_update(event)) is not None:
                self._call_job(entry, entry.job.handle, event)
                # It may now need offers that it declined before.
                self._matcher.offer_again([entry])
            self._tracker.acknowledge(event.status)

    # Jobs.

    def _review(self, now_s: float) -> None:
        if self._queue.review(self.pool, now_s):
            self._matcher.offer_again(self._jobs.values())
            self._matcher.revive()
        self._matcher.drop_expired(now_s)
        if self._job_sizes is not None:
            self._job_sizes.review(self.jobs, self._queue.room(), self._background, self._call_job, now_s)
        snapshot = self._queue.snapshot(self.pool, now_s, connected=self._connection.connected)
        self.snapshot = dataclasses.replace(snapshot, pilots=self.pilots())

    def _scalable(self) -> int:
        """Number of jobs that the central allocation covers."""
        return sum(isinstance(one.job, Resizable) and one.job.is_scalable for one in self._jobs.values())

    def _tick_jobs(self) -> None:
        """Ticks all active jobs, and a few idle ones in rotation, one per equivalence class."""
        idle: dict[Hashable, JobEntry] = {}
        for entry in self.jobs:
            is_busy = entry.has_tasks or self._matcher.is_planning(entry)
            if is_busy or entry.job.need is Need.NOTHING:
                self._call_job(entry, entry.job.tick)
            else:
                key = entry.job.equivalence_class
                idle.setdefault(entry.job_id if key is None else (key, entry.constraints), entry)
        waiting = list(idle.values())
        for _ in range(min(IDLE_TICKS, len(waiting))):
            self._next_idle = (self._next_idle + 1) % len(waiting)
            self._call_job(waiting[self._next_idle], waiting[self._next_idle].job.tick)

    def _call_job(self, entry: JobEntry, call: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a job's state machine, and sends its messages to executors.

        An exception ends this job only, unless the service itself cannot store anything any more. The job is removed
        later, by `_remove_failed`, so that callers may iterate over jobs.

        Returns:
            The result of the call; None if the job has failed.
        """
        if entry.error is not None:
            return None
        try:
            answer = call(*arguments)
        except (StorageUnavailableError, ServiceLeaseLostError):
            raise
        except Exception as error:
            logger.info("job %s raised an error; killing its tasks", entry.job_id, exc_info=True)
            entry.fail(error)
            return None
        for message in entry.job.messages():
            task = entry.tasks.get(message.task_id)
            if task is not None:
                self._send(task, message.data)
        return answer

    def _send(self, task: TaskRecord, data: str) -> None:
        executor_id, agent_id = {"value": task.executor_id}, {"value": task.agent_id}
        try_call(self._mesos.sendFrameworkMessage, executor_id, agent_id, Addressed(task.task_id, data).encode())

    def _remove_failed(self) -> None:
        """Removes the jobs that have failed. Not while jobs are iterated over."""
        # One at a time: the end of a job may start others.
        while (entry := next((one for one in self.jobs if one.error is not None), None)) is not None:
            assert entry.error is not None
            self._remove(entry)
            self._failed(entry, entry.error)

    def _remove_ended(self) -> None:
        for entry in self.jobs:
            if entry.job.done:
                self._remove(entry)
                self._ended(entry)

    def _remove(self, entry: JobEntry) -> None:
        del self._jobs[entry.job_id]
        self._tracker.remove(entry)
        self._matcher.remove(entry)
        entry.job.close()
