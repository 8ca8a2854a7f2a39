"""Drives changes of a running job's size.

`autoscaler.py` chooses the size; `resize.py` carries out one change. Workers requested by other jobs of the service are
released on request (`framework.scheduler.job.Resizable`).

After a restart of the service the job is adopted. A change of size may have been under way after the state was last
saved, so the slots are asked for their status: the job continues only if each runs its process of the saved attempt.
Otherwise all tasks are killed and the job restarts from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.task import Role
from executor.elastic_messages import ElasticStatus
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import TaskState
from framework.policies.jobs.interface import JobView
from framework.scheduler.demand import Demand
from framework.scheduler.job import Decline, Launch, Message, Reclaimable
from framework.training.elastic.autoscaler import Autoscaler
from framework.training.elastic.layout import Layout, Size, size_of, without
from framework.training.elastic.phases import CHANGING, Event, Phase, SizePhase
from framework.training.elastic.resize import RunningResize, additional_tasks
from framework.training.elastic.slots import ElasticSlots
from framework.training.elastic.stragglers import StragglerFinder
from framework.training.launch import DoesNotFitError, task_spec
from framework.training.observer import JobObserver
from framework.training.output import ReportListener
from framework.training.spec import JobResult, JobSpec, JobTask
from framework.training.state import ElasticState, JobRun
from solver import NodeClass, Plan

SPEED_POLL_INTERVAL_S = 1.0
"""Interval of checks whether the job's speed is measured."""
OFFER_TIMEOUT_S = 6.0
"""Maximum time to wait for offers."""
RELEASE_POLL_INTERVAL_S = 10.0
RELEASE_POLL_TIMEOUT_S = 60.0
"""Interval and duration of checks for resources that other jobs are releasing for this one."""
RECLAIM_HORIZON_S = 60.0
"""A job is reclaimable if it may change its size within this time."""


@dataclass(frozen=True)
class _ResizeLaunch:
    """A change whose additional tasks are being launched.

    Attributes:
        resize: starts the change, after the launch.
        operations: agent id -> its launch operation.
    """

    resize: Callable[[], RunningResize]
    new: Sequence[JobTask]
    operations: Mapping[str, dict[str, Any]]


class Resizer(ReportListener):
    """Changes the size of one running job, one change at a time.

    Args:
        outbox: receives messages for executors.
        result: receives the completed changes.
        demand: returns what other frameworks use and request; None if unknown.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: JobRun,
        outbox: list[Message],
        observer: JobObserver,
        result: JobResult,
        demand: Callable[[], Demand | None],
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._run = run
        self._observer = observer
        self._result = result
        self._clock = clock
        self._autoscaler = Autoscaler(spec, run, demand)
        self._slots = ElasticSlots(outbox)
        self._size = SizePhase()
        self._adoption: Adoption | None = None
        """While adopting."""
        self._nodes: tuple[NodeClass, ...] = ()
        self._stragglers = StragglerFinder(run, observer, spec.resize_interval_s)
        self._straggler: JobTask | None = None
        self._launching: _ResizeLaunch | None = None
        """While launching."""
        self._resize: RunningResize | None = None
        """While a change is under way."""
        self._reclaimed_ids: frozenset[str] = frozenset()
        self._reclaim_reason = ""
        self._resizable_from_s = math.inf
        self._next_s = math.inf
        self._saved_step: int | None = None
        self._resumed_step: int | None = None
        self._is_size_fixed = False
        self._decides_size = True
        self._scaled_s = -math.inf
        self._sample_runs = 0
        self._samples: list[Size] | None = None
        self._is_sampling = False

    @property
    def wants_offers(self) -> bool:
        return self._size.phase is Phase.GATHERING

    @property
    def is_stopping(self) -> bool:
        """Whether a change is stopping the job's processes, so that any other end of a task breaks it off."""
        return self._size.phase in (Phase.SAVING, Phase.CLEARING)

    @property
    def is_saving(self) -> bool:
        """Whether only the chief has been asked to stop."""
        return self._size.phase is Phase.SAVING

    def validate(self) -> None:
        """Checks what holds in each phase.

        Raises:
            RuntimeError: something does not hold, which is a defect.
        """
        phase = self._size.phase
        holds = (
            (self._adoption is not None) == (phase is Phase.ADOPTING)
            and (self._launching is not None) == (phase is Phase.LAUNCHING)
            and (self._resize is not None) == (phase in CHANGING)
        )
        if not holds:
            raise RuntimeError(f"the size of the job is {phase}, but its parts say otherwise")

    # Events of the job.

    def plan_ahead(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        self._autoscaler.plan_ahead(plan, nodes)

    def hold(self, sample_runs: int) -> None:
        """Hands the decision on its size to the central allocation, after `sample_runs` other sizes were measured."""
        self._decides_size = False
        self._sample_runs = sample_runs

    @property
    def is_known(self) -> bool:
        return self._autoscaler.is_known

    def view(self, *, runs: bool) -> JobView:
        if not runs:
            return self._autoscaler.view(None, can_change=True, can_grow=True)
        if self._resize is not None:
            return self._autoscaler.view(self._resize.target.size, can_change=False, can_grow=True)
        assert self._run.plan is not None
        may_shrink = self._is_settled and not (self._is_size_fixed or self._samples) and self._adoption is None
        return self._autoscaler.view(size_of(self._run.plan), can_change=may_shrink, can_grow=not self._is_size_fixed)

    def scale_to(self, size: Size | None) -> None:
        """Sets the allocated size; None: to wait, if no task runs."""
        if size == self._autoscaler.allotted:
            return
        self._autoscaler.allotted = size
        self._scaled_s = self._clock()
        if math.isfinite(self._next_s):
            self._next_s = min(self._next_s, max(self._scaled_s, self._resizable_from_s))

    def begin(self, nodes: Sequence[NodeClass]) -> None:
        """Prepares for the launch of a whole plan, made with these machines on offer."""
        assert self._run.plan is not None
        self._nodes = tuple(nodes)
        self._autoscaler.launched(self._run.plan, nodes)
        self._stragglers.reset()
        self._size.happened(Event.BEGIN, self._clock())
        self._cool_down(self._clock())

    def state(self) -> ElasticState:
        autoscaler = self._autoscaler
        return ElasticState(
            self._nodes, self._saved_step, autoscaler.total_steps, autoscaler.cost_s, self._is_size_fixed
        )

    def adopt(self, state: ElasticState) -> None:
        self.begin(state.nodes)
        self._saved_step, self._is_size_fixed = state.saved_step, state.is_frozen
        # The earlier service has made the sample runs.
        self._samples = []
        self._autoscaler.total_steps, self._autoscaler.cost_s = state.total_steps, state.cost_s
        self._adoption = Adoption(self._spec, self._run, self._slots)
        self._size.happened(Event.ADOPT, self._clock())

    def stop(self) -> None:
        self._resize = self._straggler = self._adoption = self._launching = None
        self._is_sampling = False
        self._next_s = math.inf
        self._size.happened(Event.STOP, self._clock())
        self._slots.clear()

    def task_ended(self, task: JobTask) -> None:
        """Handles the end of any task; cancels a change that has not begun."""
        resize = self._resize
        if task.member:
            self._end_gathering()
        if task is self._straggler:
            self._straggler = None
        if resize is not None and not resize.has_begun and (task.member or task in resize.new):
            if not task.member and not task.missed_executor:
                self._autoscaler.avoid(task.agent_id, self._clock())
            self._abandon(resize, f"{task.failure}{task.output_location}")
            if task.missed_executor:
                # Retried as soon as all tasks run.
                self._next_s = self._clock()

    # Reports of executors.

    def status(self, status: ElasticStatus) -> None:
        self._slots.update(status)

    def saved(self, step: int) -> None:
        self._saved_step = step

    def resumed(self, step: int) -> None:
        self._resumed_step = step

    def total(self, steps: int) -> None:
        self._autoscaler.total_steps = steps

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        if not task.member or self._resize is not None or self._spec.on_straggler == "ignore":
            return
        slow = self._stragglers.find(workers, self._clock())
        # A chief on another agent might not find the checkpoints.
        if slow is not None and self._spec.on_straggler == "replace" and not self._spec.is_chief(slow.planned):
            self._straggler = slow

    def progressed(self, task: JobTask) -> None:
        if task.step is None or not task.member or not self._spec.is_chief(task.planned):
            return
        now_s = self._clock()
        if self._resize is not None and self._size.phase is Phase.STARTING:
            self._complete(self._resize, task.step, now_s)
        self._autoscaler.progressed(now_s, task.step, task.loss)

    # Timed work.

    def tick(self, now_s: float, *, may_begin: bool) -> str:
        """Runs what is due; returns why the job has to restart, empty if it need not."""
        self._slots.send(now_s)
        self.validate()
        if self._adoption is not None:
            failure = self._adoption.tick()
            if self._adoption.is_over:
                self._adoption = None
                self._size.happened(Event.ADOPTED, now_s)
            return failure
        if self._resize is not None:
            return self._advance(self._resize, now_s)
        if self._size.phase is Phase.GATHERING:
            if now_s - self._size.since_s >= OFFER_TIMEOUT_S:
                self.consider((), now_s)
        elif self._size.phase is not Phase.STEADY:
            return ""
        elif may_begin and not self._is_size_fixed and self._reclaimed_ids:
            # It does not grow before the request is withdrawn.
            target = self._without_reclaimed(now_s) if self._is_settled else None
            if target is not None:
                self._begin(target, [], self._reclaim_reason, now_s)
        elif may_begin and now_s >= self._next_s and not self._is_size_fixed:
            self._check_size(now_s)
        return ""

    @property
    def _is_settled(self) -> bool:
        """Whether all tasks run and there is a checkpoint to resume from."""
        running = all(task.state is TaskState.RUNNING for task in self._run.members)
        return running and self._saved_step is not None

    def _check_size(self, now_s: float) -> None:
        if not self._is_settled or not self._autoscaler.measure():
            self._next_s = now_s + SPEED_POLL_INTERVAL_S
            return
        if (sample := self._next_sample()) is not None:
            self._is_sampling = True
            self._begin(sample, [], "a sample run, to measure its speed at that size", now_s)
            return
        self._next_s = now_s + self._spec.resize_interval_s
        if self._decides_size or self._autoscaler.allotted is not None:
            decision = self._autoscaler.choose(self._autoscaler.sizes(), now_s)
        else:
            decision = None
        if decision is not None and decision.needs_no_offers:
            self._autoscale([], now_s)
        elif decision is not None or self._straggler is not None:
            # Offers are withheld from other frameworks only if the job may gain.
            self._size.happened(Event.GATHER, now_s)

    def _next_sample(self) -> Layout | None:
        """The next size to measure before the central allocation decides again."""
        if self._samples is None:
            self._samples = self._autoscaler.sample_sizes(self._sample_runs)
        while self._samples:
            found = self._autoscaler.smaller(self._samples.pop(0))
            assert self._run.plan is not None
            if found is not None and found.size != size_of(self._run.plan):
                return found
        return None

    # Preemption by other jobs of the service. A request is valid until it is withdrawn.

    def reclaimable(self) -> Reclaimable:
        """The tasks it could release, if it may change its size soon, and those it is releasing."""
        going = frozenset(task.task_id for task in self._run.tasks.values() if task.stop_requested and not task.member)
        if self._resize is not None:
            return Reclaimable(ending=self._resize.target.surplus | going)
        can_resize = self._is_settled and not self._is_size_fixed and self._adoption is None
        if not can_resize or self._clock() + RECLAIM_HORIZON_S < self._resizable_from_s:
            return Reclaimable(ending=going)
        return dataclasses.replace(self._spare_workers(), ending=going)

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Requests the release of exactly these tasks; an empty set withdraws the request."""
        if task_ids and not self._reclaimed_ids:
            self._end_gathering()
        self._reclaimed_ids = task_ids
        self._reclaim_reason = reason

    def _without_reclaimed(self, now_s: float) -> Layout | None:
        """The layout without the requested tasks; None if they are gone, too many, or the job may not change yet."""
        spare = self._spare_workers()
        surplus = self._reclaimed_ids & frozenset(spare.task_ids)
        if now_s < self._resizable_from_s or not surplus or len(surplus) > spare.max_tasks:
            return None
        assert self._run.plan is not None
        return without(self._spec, self._run.plan, self._run.members, surplus)

    def _spare_workers(self) -> Reclaimable:
        """The workers that the job could do without, the highest index first."""
        run, spec = self._run, self._spec
        if spec.elastic is None or run.plan is None:
            return Reclaimable()
        workers = [task for task in run.members if task.planned.role == Role.WORKER]
        free = sorted((task for task in workers if not spec.is_chief(task.planned)), key=lambda t: -t.planned.index)
        most = max(0, min(len(free), len(workers) - spec.elastic[0]))
        return Reclaimable(tuple(task.task_id for task in free) if most else (), most)

    # Launches.

    def _end_gathering(self) -> None:
        if self._size.phase is Phase.GATHERING:
            self._size.happened(Event.DECIDE, self._clock())

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> Launch | Decline:
        self._end_gathering()
        self._decide(agents, now_s)
        if self._launching is None and self._resize is None and now_s - self._scaled_s < RELEASE_POLL_TIMEOUT_S:
            self._next_s = min(self._next_s, now_s + RELEASE_POLL_INTERVAL_S)
        return Decline() if self._launching is None else Launch(self._launching.operations)

    def launched(self) -> None:
        launch = self._launching
        assert launch is not None
        self._launching = None
        self._resize = launch.resize()
        self._size.happened(Event.LAUNCHED, self._clock())
        self._observer.launched(launch.new)

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """Cancels the change; tasks that the master may have launched are stopped."""
        assert self._launching is not None
        for task in self._launching.new:
            task.stop_requested = True
        self._launching = None
        self._size.happened(Event.REFUSED, self._clock())
        self._observer.notify(f"the job keeps its size: {error}")

    def _decide(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        slow, self._straggler = self._straggler, None
        if slow is not None:
            target = self._autoscaler.replacement(slow, agents, now_s)
            self._stragglers.start_backoff(slow, now_s, has_room=target is not None)
            if target is not None:
                self._begin(target, agents, f"{slow.name} on {slow.node} is too slow", now_s)
                return
        self._autoscale(agents, now_s)

    def _autoscale(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        layouts = self._autoscaler.layouts(agents, now_s)
        decision = self._autoscaler.choose(layouts, now_s)
        if decision is not None:
            self._autoscaler.record(decision, now_s)
            self._begin(layouts[decision.size], agents, decision.reason, now_s)

    def _begin(self, target: Layout, agents: Sequence[AgentOffer], reason: str, now_s: float) -> None:
        self._observer.resizing(target.size.workers, target.size.ps, reason)
        try:
            new, operations = additional_tasks(self._spec, self._run, target, agents)
        except DoesNotFitError as error:
            self._observer.notify(f"the job keeps its size: {error}")
            return
        self._run.add(new, operations.values())
        launch = _ResizeLaunch(
            functools.partial(RunningResize, self._spec, self._run, self._slots, self._size, target, new, reason),
            new,
            operations,
        )
        if operations:
            self._launching = launch
            self._size.happened(Event.LAUNCH, now_s)
        else:
            self._resize = launch.resize()
            self._size.happened(Event.CHANGE, now_s)

    # Progress of a change.

    def _advance(self, resize: RunningResize, now_s: float) -> str:
        if (failure := resize.failure(now_s)) and resize.has_begun:
            return failure
        if failure:
            for task in resize.late:
                self._autoscaler.avoid(task.agent_id, now_s)
            self._abandon(resize, failure)
        elif resize.script_has_ended:
            # It finished before the stop request arrived.
            resize.chief.finished = self._is_size_fixed = True
            self._abandon(resize, "the script has ended")
        else:
            is_starting = self._size.phase is Phase.STARTING
            resize.advance(now_s)
            if self._size.phase is Phase.STARTING and not is_starting:
                self._resumed_step = self._straggler = None
                self._result.plan = self._run.plan
                self._result.addresses = {task.name: task.address for task in self._run.members}
                self._autoscaler.restarted()
                self._stragglers.reset()
        return ""

    def _complete(self, resize: RunningResize, step: int, now_s: float) -> None:
        self._resize = None
        self._size.happened(Event.STEP, now_s)
        saved = self._saved_step or 0
        self._autoscaler.cost_s = now_s - resize.stopped_s
        self._cool_down(now_s)
        if self._is_sampling:
            self._is_sampling = False
            # The next sample, or the allocated size, follows as soon as this size's speed is known.
            self._next_s = self._resizable_from_s = now_s
        completed = resize.complete(saved, now_s)
        self._result.resizes.append(completed)
        self._observer.resized(completed)
        if step <= saved and (self._resumed_step is None or self._resumed_step < saved):
            self._is_size_fixed = True
            self._observer.notify(
                f"the script resumed from step {step} instead of {saved}, where it was saved: it cannot resume, "
                "so the job keeps its size from now on"
            )

    def _abandon(self, resize: RunningResize, reason: str) -> None:
        resize.abandon()
        self._resize = None
        self._size.happened(Event.ABANDON, self._clock())
        self._is_sampling = False
        self._cool_down(self._clock())
        self._observer.notify(f"the job keeps its size: {reason}")

    def _cool_down(self, now_s: float) -> None:
        self._next_s = self._resizable_from_s = now_s + self._spec.resize_interval_s


class Adoption:
    """Waits until all slots of the attempt have reported what they run.

    Args:
        run: the saved attempt.
    """

    def __init__(self, spec: JobSpec, run: JobRun, slots: ElasticSlots) -> None:
        self._run = run
        self._slots = slots
        assert run.plan is not None
        for task in run.members:
            slots.adopt(task, task_spec(spec, run.plan, task.planned, run.cluster, run.attempt))
        self._open: Sequence[JobTask] = run.members
        for task in run.tasks.values():
            # It was warming up for a cancelled change, or was surplus.
            task.stop_requested = task.stop_requested or not task.member

    @property
    def is_over(self) -> bool:
        return not self._open

    def tick(self) -> str:
        """Returns why the job has to restart; empty if it need not, or that is not known yet."""
        self._open = [task for task in self._open if not task.state.is_terminal()]
        reported = [task for task in self._open if task.state is TaskState.RUNNING and self._slots.has_reported(task)]
        for task in reported:
            if not self._slots.runs(task, self._run.attempt):
                return f"{task.name} was in the middle of a change of the job's size when the service ended"
        self._open = [task for task in self._open if task not in reported]
        return ""
