"""A training job while its tasks run: what becomes of it when one ends, or when time passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.task import Role
from framework.elastic.demand import Demand
from framework.elastic.resizer import Resizer
from framework.elastic.stragglers import StragglerReporter
from framework.job import JobSpec, JobTask, TaskState
from framework.job_state import JobMemory
from framework.mesos_calls import MesosCalls
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.output import OutputReader
from framework.rejoining import Rejoining
from framework.reports import ReportListener, ReportReader, take_status
from framework.service.tenant import Spare
from solver import NodeClass


@dataclass(frozen=True)
class Turn:
    """The tasks that still run are to end.

    Attributes:
        reason: why the job has to start again; empty if its script has ended well.
        task: whose failure it was; None if it was no task's.
        counts: whether it is one of the failures that a job survives only so often.
    """

    reason: str = ""
    task: JobTask | None = None
    counts: bool = True


class Running:
    """Watches over the tasks of the attempt.

    Args:
        spec: the job.
        memory: what is known of it.
        mesos: where it runs.
        desk: offers in hand.
        observer: is told.
        demand: what other frameworks hold and want; None where that is not known.
        clock: seconds, monotonic.

    Attributes:
        output: puts the output together.
    """

    def __init__(
        self,
        spec: JobSpec,
        memory: JobMemory,
        mesos: MesosCalls,
        desk: OfferDesk,
        observer: JobObserver,
        demand: Callable[[], Demand | None],
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._run = memory.run
        self._observer = observer
        self._clock = clock
        self._rejoining = Rejoining(spec, self._run, mesos, desk, observer)
        self._resizer: Resizer | None = None
        listener: ReportListener = StragglerReporter(observer) if spec.stragglers != "ignore" else ReportListener()
        if spec.elastic is not None:
            listener = self._resizer = Resizer(spec, self._run, mesos, desk, observer, memory.result, demand, clock)
        self.output = OutputReader(spec, self._run, mesos, observer, clock)
        self._reports = ReportReader(spec, memory.result, observer, listener, self.output)
        self._reports.stepped = memory.stepped

    @property
    def stepped(self) -> bool:
        """Whether the attempt has made a step."""
        return self._reports.stepped

    @property
    def is_short(self) -> bool:
        """Whether a task that is lost is waited for."""
        return self._rejoining.active

    @property
    def wants_offers(self) -> bool:
        """Whether it looks at what there is."""
        return self._rejoining.active or (self._resizer is not None and self._resizer.wants_offers)

    def spare(self) -> Spare:
        """What the job could give up; nothing while it waits for a task that it has lost."""
        return Spare() if self._resizer is None or self._rejoining.active else self._resizer.spare()

    def give_up(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks for tasks (`framework.service.tenant.Shrinking`); a job that is not elastic keeps them."""
        if self._resizer is not None:
            self._resizer.give_up(task_ids, reason)

    def remember(self) -> None:
        """Brings the memory up to date."""
        self._memory.stepped = self._reports.stepped
        if self._resizer is not None:
            self._memory.elastic = self._resizer.memory()

    def begin(self, nodes: Sequence[NodeClass]) -> None:
        """All tasks of a plan are about to be launched, which was made for these machines."""
        self._reports.stepped = False
        if self._resizer is not None:
            self._resizer.launched(nodes)

    def take_up(self) -> Turn | None:
        """Goes on with what a service before this one has started."""
        lost = [task for task in self._run.members if task.state.is_terminal() and not task.finished]
        for task in lost:
            if not self._is_replaceable(task):
                return Turn(task.failure, task, counts=False)
        for task in lost:
            self._rejoining.start(task, self._clock())
        if self._resizer is not None and self._memory.elastic is not None:
            self._resizer.adopted(self._memory.elastic)
        return None

    def end(self) -> None:
        """All of the job is being ended."""
        self._rejoining.forget()
        if self._resizer is not None:
            self._resizer.stopped()

    def read(self, message: str) -> None:
        """Takes in what an executor says."""
        self._reports.read(message, self._run.tasks)

    def take_status(self, task: JobTask, state: TaskState, status: Mapping[str, Any]) -> None:
        """Takes in how a task stands, and with its end the end of its output."""
        changed = take_status(task, state, status)
        if state.is_terminal():
            self.output.ended(task, status)
        if changed:
            self._observer.task_changed(task)

    def tick(self, now_s: float) -> Turn | None:
        """Does what is due by time."""
        failure = self._rejoining.tick(now_s) if self._rejoining.active else ""
        if not failure and self._resizer is not None:
            failure = self._resizer.tick(now_s, may_begin=not self._rejoining.active)
            if self._script_has_ended():
                return Turn()
        return Turn(failure, counts=False) if failure else None

    def ended(self, task: JobTask, *, counts: bool) -> Turn | None:
        """A task has ended, of the attempt or not.

        Args:
            task: the task.
            counts: whether that is a failure, if it has not finished.
        """
        resizer = self._resizer
        if resizer is not None:
            resizer.lost(task)
        if not task.member:
            del self._run.tasks[task.task_id]
        elif resizer is not None and resizer.is_stopping and not (task.finished and self._script_has_ended()):
            reason = f"{task.failure}, while the job changed its size"
            return Turn(reason, task, counts=counts and not task.finished)
        elif task.finished and self._spec.computes(task.planned):
            return Turn() if self._script_has_ended() else None
        elif self._is_replaceable(task) and (not counts or self._may_lose_another()):
            self._start_rejoin(task, counts=counts)
        else:
            return Turn(task.failure, task, counts=counts)
        return None

    def _script_has_ended(self) -> bool:
        return self._run.script_has_ended(self._spec)

    def _is_replaceable(self, task: JobTask) -> bool:
        """Whether the others can train on until this one is back."""
        return (
            task.planned.role == Role.WORKER
            and not self._spec.is_chief(task.planned)
            and not self._spec.profile.synchronous
            and self._reports.stepped
            and task.reason != "REASON_AGENT_REMOVED"
        )

    def _may_lose_another(self) -> bool:
        return self._rejoining.active or self._memory.may_fail(self._spec.max_restarts)

    def _start_rejoin(self, task: JobTask, *, counts: bool) -> None:
        # Workers that are lost together are one failure.
        if counts and not self._rejoining.active:
            self._memory.count_failure()
        failure = f"{task.failure}{task.place_of_output}"
        self._observer.restarting(failure, self._memory.failures, self._spec.max_restarts)
        self._rejoining.start(task, self._clock())
