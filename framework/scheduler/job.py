"""A job as the scheduler sees it: a state machine that is fed events, asked about offers, and can be taken up again."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.feasibility import Sizing
from framework.scheduler.offer_pool import Offer
from framework.scheduler.records import JobState, TaskRecord

if TYPE_CHECKING:
    from framework.policies.jobs.interface import Counts, JobView

CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
"""Failures of a training job and of a search that did nothing wrong, and that somebody has ended."""


RETRY_OFFERS_S = 10.0
"""So soon a job looks again at offers that it could not use: something else may have changed."""


class Need(enum.IntEnum):
    """What a job wants offers for; the smaller, the sooner it is served."""

    REPLACE_LOST = 0
    """A job that has run wants back what it has lost, unless it fails again and again."""
    START = 1
    """Its first tasks, or one more slot."""
    GROW = 2
    """It runs well, and looks whether more would pay."""
    NOTHING = 3


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        state: one that `has_ended`.
        failure: why it failed or ended early, in one sentence; empty if it did neither.
        result: as `dike run --format json` or `dike tune --format json` prints it; None where there is none.
    """

    state: JobState
    failure: str = ""
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class Launch:
    """Launch these tasks: they are part of the job's state by now.

    Attributes:
        operations: agent's id -> Mesos' LAUNCH operation, on all that the agent offers.
    """

    operations: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Decline:
    """There is no use for these offers.

    Attributes:
        retry_after_s: after how many seconds the job wants to look at the very same ones again.
    """

    retry_after_s: float = RETRY_OFFERS_S


@dataclass(frozen=True)
class Planning:
    """The job plans; the offers are locked for it meanwhile, and it is asked again and again."""


Answer = Launch | Decline | Planning


@dataclass(frozen=True)
class Message:
    """What a task's executor is to be told; it may get lost.

    Attributes:
        task_id: the task.
        data: what to tell it.
    """

    task_id: str
    data: str


class Job(Protocol):
    """A job's state machine: of training (`framework.training.controller`) or a search (`framework.search.controller`).

    All of it runs on the scheduler's thread. The scheduler asks, the job answers; it never calls the
    scheduler. What it answers is written down, with its state, before the master hears of it.
    """

    @property
    def done(self) -> bool:
        """Whether nothing of it runs any more."""

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""

    @property
    def equivalence_class(self) -> Hashable:
        """Jobs of equal keys that want to start fit the same offers or do not; None for one like no other."""

    def wanted_tasks(self) -> Set[str]:
        """Ids of the tasks that it wants to run or to go on running; the scheduler ends all its others."""

    def handle(self, event: events.Event) -> None:
        """Takes one event in: those that concern its own tasks and the connection."""

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        """What it launches on these offers, which have settled.

        A job that has answered `Planning` is asked again with those of the offers that are still there, which may be none.
        After a `Launch` it hears at once, by `launched` or `refused`, how that went.
        """

    def launched(self) -> None:
        """The master has taken its launch."""

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master has not taken all of its launch, as far as is known; some of the tasks may run all the same."""

    def messages(self) -> list[Message]:
        """What its executors are to be told; each message is handed over once."""

    def tick(self) -> None:
        """Does what is due by time."""

    def cancel(self) -> None:
        """Ends all its tasks; `done` follows."""

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service, as JSON values; small enough to write often."""

    def outcome(self) -> JobOutcome:
        """How it ended; asked once it is `done`."""

    def close(self) -> None:
        """Lets go of what it holds, such as a lease; called once, when its entry is gone, `done` or not."""


@runtime_checkable
class Preemptible(Protocol):
    """A job that can leave agents to others without losing anything."""

    def preemptible_tasks(self) -> frozenset[str]:
        """Ids of the tasks that it would end at the moment if it were asked to, and of those that it is ending."""

    def preempt(self, agent_ids: frozenset[str]) -> None:
        """Gives back what it holds on these agents, as soon as it can; may be asked for again and again."""


@dataclass(frozen=True)
class Reclaimable:
    """What an elastic job could give up.

    Attributes:
        task_ids: tasks that it could do without, those that it misses least first.
        max_tasks: how many of them at the same time.
        ending: tasks that it is giving up already.
    """

    task_ids: tuple[str, ...] = ()
    max_tasks: int = 0
    ending: frozenset[str] = frozenset()


@runtime_checkable
class Resizable(Protocol):
    """A job that can go on with fewer tasks."""

    def reclaimable(self) -> Reclaimable:
        """What it could give up now, or soon."""

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks it to end these tasks as soon as it can, and not to grow meanwhile; may be asked again and again.

        Args:
            task_ids: which; those that have ended may be among them. None: it is not asked any more.
            reason: whose wish that is, as a sentence for its user.
        """


@runtime_checkable
class Scalable(Protocol):
    """A job whose size somebody else may decide on (`framework.scheduler.job_sizes`)."""

    @property
    def is_scalable(self) -> bool:
        """Whether it can have several sizes."""

    @property
    def has_estimate(self) -> bool:
        """Whether enough is known of it to decide on its size."""

    @property
    def waits_for_allocation(self) -> bool:
        """Whether it waits for workers to be given to it."""

    def enter_central_allocation(self, competing_jobs: Callable[[], int], sample_runs: int) -> None:
        """From now on its size is decided on elsewhere: it does not start before, nor change its size by itself.

        Args:
            sharing: how many such jobs there are.
            sample_runs: at how many other sizes its speed is to be measured before the first decision on one that runs.
        """

    def scale_view(self) -> JobView | None:
        """What is believed of it; None where it needs nothing, or nothing is known yet.

        Its id, user, arrival and how long it has waited are for others to say. Samples that nobody knows are NaN.
        """

    def scale_to(self, counts: Counts) -> None:
        """It is to have so many workers and parameter servers as soon as that can be; with none it waits.

        One that runs and becomes larger has more of them once there is room, if they are worth the change then.
        """


@runtime_checkable
class Excluding(Protocol):
    """A job that leaves agents out for a while after failures there."""

    def excluded_agents(self) -> dict[str, float]:
        """Id of each such agent -> for how many seconds it still is left out."""


@runtime_checkable
class LeaseOwner(Protocol):
    """A job that holds something in the name of this service, such as a lease."""

    def release_leases(self) -> None:
        """Lets go of it: another service goes on with the job. Nothing else is called after that."""


class JobEntry:
    """What the scheduler knows of one job; made by the scheduler.

    Attributes:
        job_id, user: whose it is.
        number: order of arrival.
        constraints: which agents it may use (`JobRecord.constraints`).
        admitted: the same, read.
        job: its state machine.
        sizing: what it takes; None where nobody has said. Whoever makes the job sets it.
        background: where the job may do what takes long.
        tasks: id -> task, those that have not ended.
        locked_offers: id -> offer that is locked for it while it plans.
        seen_generation: the pool's generation that it has looked at last.
        retry_s: when it wants to look at that again, on the scheduler's clock.
        must_save: whether its state has to be written down.
        saved: its state as it was written down last.
        was_bypassed: whether a job behind it has launched since it began to wait.
        is_ending: whether its end was asked for.

    Raises:
        BadInputError: if the constraints make no sense.
    """

    def __init__(
        self,
        job_id: str,
        user: str,
        number: int,
        constraints: Sequence[str] = (),
        tasks: Iterable[TaskRecord] = (),
        background: Background | None = None,
    ) -> None:
        self.job_id = job_id
        self.user = user
        self.number = number
        self.constraints = tuple(constraints)
        self.parsed_constraints = parse_constraints(constraints)
        self.job: Job
        self.sizing: Sizing | None = None
        self.background = background or InlineBackground()
        self.tasks = {task.task_id: task for task in tasks}
        self.locked_offers: dict[str, Offer] = {}
        self.seen_generation: int | None = None
        self.retry_s = 0.0
        self.must_save = False
        self.saved_state: dict[str, Any] | None = None
        self.was_bypassed = False
        self.is_ending = False

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks)
