"""Interface between the scheduler and a job: an event-driven state machine that is offered resources and can be
restored.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.feasibility import Sizing
from framework.scheduler.offer_pool import Offer
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import JobState, TaskRecord

if TYPE_CHECKING:
    from framework.policies.jobs.interface import Counts, JobView

CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
"""Failure of a training job, and of a search, that a user ended."""


RETRY_OFFERS_S = 10.0
"""Default time after which a job examines unchanged offers again: other conditions may have changed."""


class Need(enum.IntEnum):
    """Purpose for which a job requests offers; smaller values are served first."""

    REPLACE_LOST = 0
    """Replace lost tasks, unless the job fails repeatedly."""
    START = 1
    """Start the first tasks, or one more slot."""
    GROW = 2
    """Check whether more tasks would pay off; the job runs well without."""
    NOTHING = 3


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        state: one that `has_ended`.
        failure: why it failed or ended early, in one sentence; empty if it did neither.
        result: as printed by `dike run --format json` or `dike tune --format json`; None if there is none.
    """

    state: JobState
    failure: str = ""
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class Launch:
    """Launch these tasks, which are part of the job's state already.

    Attributes:
        operations: agent's id -> Mesos' LAUNCH operation, on all offers of the agent.
    """

    operations: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Decline:
    """The job cannot use these offers.

    Attributes:
        retry_after_s: seconds after which the job examines the same offers again.
    """

    retry_after_s: float = RETRY_OFFERS_S


@dataclass(frozen=True)
class Planning:
    """The job is planning in the background; the offers stay locked for it, and it is polled."""


Answer = Launch | Decline | Planning


@dataclass(frozen=True)
class Message:
    """A message to a task's executor, without delivery guarantee."""

    task_id: str
    data: str


class Job(Protocol):
    """A job's state machine: training (`framework.training.controller`) or a search (`framework.search.controller`).

    All calls are made on the scheduler's thread. The job never calls the scheduler. Its answers and its state are
    stored before the master receives them.
    """

    @property
    def done(self) -> bool:
        """Whether all of its tasks have ended."""

    @property
    def need(self) -> Need: ...

    @property
    def equivalence_class(self) -> Hashable:
        """Pending jobs of the same class fit the same offers; None if unique."""

    def wanted_tasks(self) -> Set[str]:
        """Ids of the tasks that shall run; the scheduler kills its other tasks."""

    def handle(self, event: events.Event) -> None:
        """Handles an event about the connection or one of its tasks."""

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        """Decides what to launch on these offers.

        A job that answered `Planning` is called again with the offers that are still valid, which may be none. After a
        `Launch`, `launched` or `refused` is called immediately.
        """

    def launched(self) -> None:
        """The master accepted the launch."""

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master may not have received all of the launch; some of the tasks may run anyway."""

    def messages(self) -> list[Message]:
        """Returns the messages to its executors, each message once."""

    def tick(self) -> None:
        """Performs what is due by time."""

    def cancel(self) -> None:
        """Kills all its tasks; `done` becomes true once they have ended."""

    def to_state(self) -> dict[str, Any]:
        """Returns the state from which it can be restored, as JSON values; small, because it is stored often."""

    def outcome(self) -> JobOutcome:
        """Returns how it ended; called once it is `done`."""

    def close(self) -> None:
        """Releases its resources, such as a lease; called once, when its entry is removed, `done` or not."""


class FailedJob:
    """Replaces a job's state machine that has raised (a `Job`), until the scheduler removes the job; does nothing."""

    done = False
    need = Need.NOTHING
    equivalence_class = None

    def __init__(self, job: Job) -> None:
        self._job = job

    def wanted_tasks(self) -> Set[str]:
        return frozenset()

    def handle(self, event: events.Event) -> None: ...

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        return Decline()

    def launched(self) -> None: ...

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None: ...

    def messages(self) -> list[Message]:
        return []

    def tick(self) -> None: ...

    def cancel(self) -> None: ...

    def to_state(self) -> dict[str, Any]:
        return {}

    def outcome(self) -> JobOutcome:
        raise AssertionError("a failed job has no outcome of its own")

    def close(self) -> None:
        self._job.close()


@runtime_checkable
class Preemptible(Protocol):
    """A job that can vacate agents without losing progress."""

    def preemptible_tasks(self) -> frozenset[str]:
        """Ids of the tasks that it would end now if it were preempted, and of those that it is ending."""

    def preempt(self, agent_ids: frozenset[str]) -> None:
        """Ends its tasks on these agents as soon as possible; may be called repeatedly."""


@dataclass(frozen=True)
class Reclaimable:
    """Tasks that a job could give up for another.

    Attributes:
        task_ids: dispensable tasks, the least useful first.
        max_tasks: maximum number of them at the same time.
        ending: tasks that it is ending already.
        is_whole: whether it gives up all or none, for a job of a higher priority only, and waits then.
    """

    task_ids: tuple[str, ...] = ()
    max_tasks: int = 0
    ending: frozenset[str] = frozenset()
    is_whole: bool = False


@runtime_checkable
class Resizable(Protocol):
    """A job that can change its number of tasks: for another job, or as a central policy decides."""

    def reclaimable(self) -> Reclaimable:
        """Tasks that it could give up now or soon."""

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks it to end these tasks as soon as possible, and not to grow until then; may be called repeatedly.

        Args:
            task_ids: the tasks, some of which may have ended; empty withdraws the request.
            reason: why it is asked, as a sentence for the job's user.
        """

    @property
    def is_scalable(self) -> bool:
        """Whether its size can be allocated centrally (`framework.scheduler.job_sizes`)."""

    @property
    def has_estimate(self) -> bool:
        """Whether enough is known about it to choose its size."""

    @property
    def waits_for_allocation(self) -> bool: ...

    def enter_central_allocation(self, competing_jobs: Callable[[], int], sample_runs: int) -> None:
        """Lets a central policy choose its size: it neither starts nor changes its size by itself.

        Args:
            competing_jobs: returns the number of such jobs.
            sample_runs: number of other sizes at which its speed is measured before its size is first changed.
        """

    def scale_view(self) -> JobView | None:
        """Estimates for the policy; None if it needs nothing, or nothing is known yet.

        The caller fills in its id, user, arrival and waiting time. An unknown number of samples is NaN.
        """

    def scale_to(self, counts: Counts) -> None:
        """Sets its numbers of workers and parameter servers; with none it waits.

        The change is made as soon as possible. A running job grows once there is room, if the change pays off by then.
        """


@runtime_checkable
class Countable(Protocol):
    """A job that counts the tasks that it lacks."""

    def missing_tasks(self) -> int:
        """Number of further tasks that it could use now."""


@runtime_checkable
class Excluding(Protocol):
    """A job that does not use agents for a while after failures there (agent cooldown)."""

    def excluded_agents(self) -> dict[str, float]:
        """Agent's id -> remaining seconds of its cooldown."""


@runtime_checkable
class LeaseOwner(Protocol):
    """A job that owns leases in the name of this service."""

    def release_leases(self) -> None:
        """Releases them, because another service takes over the job; nothing is called afterwards."""


@dataclass
class OfferState:
    """What a job has done with offers.

    Attributes:
        locked: id -> offer that is locked while the job plans.
        seen_generation: the pool's generation that it examined last.
        retry_s: when it examines that generation again, on the scheduler's clock.
        was_bypassed: whether a job behind it in the order has launched tasks since this one waits.
    """

    locked: dict[str, Offer] = field(default_factory=dict)
    seen_generation: int | None = None
    retry_s: float = 0.0
    was_bypassed: bool = False


@dataclass
class StoredState:
    """What of a job is stored.

    Attributes:
        must_save: whether its state has to be stored.
        state: its state as stored last.
    """

    must_save: bool = False
    state: dict[str, Any] | None = None


class JobEntry:
    """The scheduler's record of one job.

    Attributes:
        job_id, user: the job and its user.
        number: order of arrival.
        priority: its priority in the queue.
        submitted_s: time of its submission, seconds since the epoch.
        constraints: which agents it may use (`JobRecord.constraints`).
        parsed_constraints: the same, parsed.
        job: its state machine.
        sizing: its minimum size, set by the creator of the job; None if unknown.
        background: runs the job's long work.
        tasks: id -> task, of those that have not ended.
        offers: what it has done with offers; changed by the matcher only.
        stored: what of it is stored; changed by the task tracker only, as `tasks` is.
        is_ending: whether it has been cancelled, or has failed.
        error: what its state machine raised; None if it has not failed. Like `is_ending`, the scheduler changes it.

    Raises:
        BadInputError: if the constraints are malformed.
    """

    def __init__(
        self,
        job_id: str,
        user: str,
        number: int,
        constraints: Sequence[str] = (),
        tasks: Iterable[TaskRecord] = (),
        background: Background | None = None,
        priority: Priority = Priority.NORMAL,
        submitted_s: float = 0.0,
    ) -> None:
        self.job_id = job_id
        self.priority = priority
        self.submitted_s = submitted_s
        self.user = user
        self.number = number
        self.constraints = tuple(constraints)
        self.parsed_constraints = parse_constraints(constraints)
        self.job: Job
        self.sizing: Sizing | None = None
        self.background = background or InlineBackground()
        self.tasks = {task.task_id: task for task in tasks}
        self.offers = OfferState()
        self.stored = StoredState()
        self.is_ending = False
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Replaces the state machine, which has raised; the scheduler removes the job after its loop."""
        self.is_ending = True
        self.error = error
        self.job = FailedJob(self.job)

    def rank(self, now_s: float) -> int:
        """Its place among the priorities at `now_s`, seconds since the epoch: 0 for the highest."""
        return self.priority.aged_rank(now_s - self.submitted_s)

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks)
