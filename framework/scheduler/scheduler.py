"""One subscription for many jobs: routes events to them, lets them deal with offers, writes down before it acts.

A launch is written down before the master hears of it, and a status update is acknowledged after what follows from it
has been written down; so a service that is killed at any moment can be taken up again, and nothing runs that the
database does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from executor.messages import Addressed
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.driver import MesosCalls, try_call
from framework.mesos.master import LeadingMaster
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.fair_share import FairQueue
from framework.scheduler.job import Job, JobEntry, Need, Scalable
from framework.scheduler.journal import Journal, ServiceLeaseLostError, StorageUnavailableError
from framework.scheduler.metrics import Metrics
from framework.scheduler.offer_matcher import OfferMatcher
from framework.scheduler.offer_pool import OfferPool
from framework.scheduler.pending_queue import PendingQueue
from framework.scheduler.records import TaskRecord
from framework.scheduler.reservation import Reservations
from framework.scheduler.snapshot import Snapshot
from framework.scheduler.task_tracker import TaskTracker

if TYPE_CHECKING:
    from framework.scheduler.job_sizes import JobSizes

logger = logging.getLogger(__name__)

IDLE_TICKS = 5
"""How many jobs of which nothing runs are looked after in one tick."""
REVIEW_S = 1.0
"""How often it is looked how jobs stand towards each other."""


class Scheduler:
    """The jobs of one framework.

    Feed it every event with `entry` and call `tick` a few times a second, from one thread (`session.Work`).

    Args:
        mesos: the master.
        journal: keeps what has to outlive us.
        log: tells whoever watches something that concerns no job in particular.
        ended: called when nothing of a job runs any more; the scheduler does not know it any more then.
        failed: called when a job's state machine has raised; may raise. Its tasks are killed.
        notify: tells those who watch a job something, by the job's id.
        metrics: counts what happens.
        queue: who is served first.
        agents: knows the agents; None where nobody needs to.
        reservations: decides for whom agents are kept.
        master: hears which master leads; None where nobody needs to know.
        background: where what takes long is done; None: at once.
        job_sizes: decides on the sizes of elastic jobs; None: each decides for itself.
        clock: seconds, monotonic.

    Attributes:
        snapshot: how everything stood about a second ago; may be read from any thread.
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
            # An empty one is false.
            OfferPool() if pool is None else pool,
        )
        self._next_idle = 0
        self._reviewed_s = clock()
        self._framework_id = ""
        self.snapshot = Snapshot(time.time())

    @property
    def jobs(self) -> list[JobEntry]:
        """The jobs that have not ended, in the order of their arrival."""
        return sorted(self._jobs.values(), key=lambda entry: entry.number)

    @property
    def done(self) -> bool:
        """Whether no job is left."""
        return not self._jobs

    @property
    def pool(self) -> OfferPool:
        """The offers in hand."""
        return self._matcher.pool

    def job(self, job_id: str) -> JobEntry | None:
        """A job that has not ended; None if it has, or never was."""
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
    ) -> JobEntry:
        """Takes a job in.

        Args:
            job_id: unique.
            user: whose share it counts to.
            number: order of arrival.
            make: makes the job's state machine.
            constraints: which agents it may use.
            tasks: those of its tasks that may still run, of a job that goes on.

        Raises:
            BadInputError: if the constraints make no sense; whatever `make` raises.
        """
        entry = JobEntry(job_id, user, number, constraints, tasks, self._background)
        entry.job = make(entry)
        if self._job_sizes is not None and isinstance(entry.job, Scalable):
            entry.job.enter_central_allocation(self._scalable, self._job_sizes.sample_runs)
        self._jobs[job_id] = entry
        self._tracker.assign(entry, tasks)
        if self._connection.connected:
            self._call_job(entry, entry.job.handle, events.Subscribed(self._framework_id, ""))
        # Filters of earlier refusals must not hold back what a new job could use.
        self._matcher.revive()
        return entry

    def disown(self, tasks: Sequence[TaskRecord]) -> None:
        """Ends tasks that may still run and whose jobs have ended; how they end is written down."""
        self._tracker.disown(tasks)

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

    def tick(self) -> None:
        """Does what is due by time, and writes down what has changed."""
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
        """Ends all jobs; `done` follows when their tasks have ended."""
        for entry in self.jobs:
            self.cancel_job(entry.job_id)

    def cancel_job(self, job_id: str) -> None:
        """Ends one job, if it has not ended."""
        entry = self._jobs.get(job_id)
        if entry is not None:
            entry.must_save = entry.is_ending = True
            self._call_job(entry, entry.job.cancel)

    def save(self) -> None:
        """Writes down what has changed, then acknowledges the status updates behind it."""
        self._tracker.save(self.jobs, self._clock(), self._call_job)
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

    def _status_updates(self, sifted: Sequence[events.StatusUpdate]) -> None:
        for event in sifted:
            if (entry := self._tracker.apply_update(event)) is not None:
                self._call_job(entry, entry.job.handle, event)
                # It may have use now for what it had none for.
                entry.seen_generation = None
            self._tracker.acknowledge(event.status)

    # Jobs.

    def _review(self, now_s: float) -> None:
        if self._queue.review(self.pool, now_s):
            for entry in self._jobs.values():
                entry.seen_generation = None
            self._matcher.revive()
        self._matcher.drop_expired(now_s)
        if self._job_sizes is not None:
            self._job_sizes.review(self.jobs, self._queue.room(), self._background, self._call_job, now_s)
        self.snapshot = self._queue.snapshot(self.pool, now_s, connected=self._connection.connected)

    def _scalable(self) -> int:
        """How many jobs share by the allocation."""
        return sum(isinstance(one.job, Scalable) and one.job.is_scalable for one in self._jobs.values())

    def _tick_jobs(self) -> None:
        """Looks after all jobs of which something runs, and in turn after the others, one of those alike."""
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
        """Makes a call of a job's state machine, and sends what its executors are to be told.

        Whatever the call raises ends that job only. A service that can write nothing any more is no fault of the job's,
        which goes on without it.

        Returns:
            What the call returns; None if the job has ended.
        """
        if self._jobs.get(entry.job_id) is not entry:
            # An earlier call has ended it.
            return None
        try:
            answer = call(*arguments)
        except (StorageUnavailableError, ServiceLeaseLostError):
            raise
        except Exception as error:
            logger.info("job %s has raised", entry.job_id, exc_info=True)
            self._remove(entry)
            self._failed(entry, error)
            return None
        for message in entry.job.messages():
            task = entry.tasks.get(message.task_id)
            if task is not None:
                self._send(task, message.data)
        return answer

    def _send(self, task: TaskRecord, data: str) -> None:
        executor_id, agent_id = {"value": task.executor_id}, {"value": task.agent_id}
        try_call(self._mesos.sendFrameworkMessage, executor_id, agent_id, Addressed(task.task_id, data).encode())

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
