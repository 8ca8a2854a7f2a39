"""Changes the size of a running job: looks at what it could have now and then, and sees each change through.

Which size is better is for `autoscaler.py` to say; how a change goes is in `resize.py`. Workers that other jobs of the
service want are given up as they are asked for (`framework.scheduler.job.Resizable`).

An elastic job whose service has ended is adopted by the next one. A change of size may have been under way, and the
slots told of it, after the last that was written down. So the slots are listened to, which say of themselves how they
stand: only if each runs its process of the attempt that was written down does the job go on. Otherwise it starts again
from its checkpoint, at either size, after all has been ended.
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
from framework.training.elastic.resize import RunningResize, Stage, further_tasks
from framework.training.elastic.slots import ElasticSlots
from framework.training.elastic.stragglers import StragglerFinder
from framework.training.launch import DoesNotFitError, task_spec
from framework.training.observer import JobObserver
from framework.training.output import ReportListener
from framework.training.spec import JobResult, JobSpec, JobTask
from framework.training.state import ElasticState, JobRun
from solver import NodeClass, Plan

POLL_S = 1.0
"""How soon it is checked again whether the job's speed is known."""
GATHER_S = 6.0
"""How long offers are waited for."""
GIVEN_UP_S = 10.0
GIVEN_UP_WITHIN_S = 60.0
"""How soon, and for how long, it is looked again for what others are to give up for a job."""
SOON_S = 60.0
"""How long others can be asked to wait until the job may change its size again."""


@dataclass(frozen=True)
class _ResizeLaunch:
    """A change whose further tasks are being launched.

    Attributes:
        resize: makes it, once they are, at a time.
        new: the tasks.
        operations: agent's id -> what launches its part.
    """

    resize: Callable[[float], RunningResize]
    new: Sequence[JobTask]
    operations: Mapping[str, dict[str, Any]]


class Resizer(ReportListener):
    """Changes the size of one running job, one change at a time.

    Args:
        spec: the job.
        run: what runs of it.
        outbox: gets the messages for executors.
        observer: is notified.
        result: gets the changes.
        demand: says what other frameworks hold and want; None where that is not known.
        clock: seconds, monotonic.
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
        self._adoption: Adoption | None = None
        self._nodes: tuple[NodeClass, ...] = ()
        self._stragglers = StragglerFinder(run, observer, spec.resize_interval_s)
        self._straggler: JobTask | None = None
        self._resize: RunningResize | None = None
        self._gathering_since_s: float | None = None
        self._launching: _ResizeLaunch | None = None
        self._wanted_ids: frozenset[str] = frozenset()
        self._wanted_reason = ""
        self._resizable_from_s = math.inf
        self._next_s = math.inf
        self._saved_step: int | None = None
        self._resumed_step: int | None = None
        self._is_frozen = False
        self._decides_itself = True
        self._scaled_s = -math.inf
        self._sample_runs = 0
        self._samples: list[Size] | None = None
        self._is_sampling = False

    @property
    def wants_offers(self) -> bool:
        """Whether it is looking at what there is."""
        return self._gathering_since_s is not None

    @property
    def is_stopping(self) -> bool:
        """Whether processes of the job are being stopped for a change, so that whatever else ends breaks it off."""
        return self._resize is not None and self._resize.stage in (Stage.SAVING, Stage.CLEARING)

    # What happens to the job.

    def foreseen(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """Its tasks will be shaped as in this plan, which was made with these machines if nothing ran there."""
        self._autoscaler.foreseen(plan, nodes)

    def hold(self, sample_runs: int) -> None:
        """From now on its size is decided on elsewhere (`scale_to`).

        Args:
            sample_runs: at how many other sizes its speed is to be measured first.
        """
        self._decides_itself = False
        self._sample_runs = sample_runs

    @property
    def is_known(self) -> bool:
        """Whether its size can be decided on."""
        return self._autoscaler.is_known

    def view(self, *, runs: bool) -> JobView:
        """What is believed of the job, for a policy of jobs.

        Args:
            runs: whether it has tasks, or waits.
        """
        if not runs:
            return self._autoscaler.view(None, can_change=True, can_grow=True)
        if self._resize is not None:
            return self._autoscaler.view(self._resize.target.size, can_change=False, can_grow=True)
        assert self._run.plan is not None
        may_shrink = self._is_settled and not (self._is_frozen or self._samples) and self._adoption is None
        return self._autoscaler.view(size_of(self._run.plan), can_change=may_shrink, can_grow=not self._is_frozen)

    def scale_to(self, size: Size | None) -> None:
        """It is to have this size as soon as that can be; None: it is to wait, if nothing of it runs."""
        if size == self._autoscaler.allotted:
            return
        self._autoscaler.allotted = size
        self._scaled_s = self._clock()
        if math.isfinite(self._next_s):
            self._next_s = min(self._next_s, max(self._scaled_s, self._resizable_from_s))

    def begin(self, nodes: Sequence[NodeClass]) -> None:
        """All tasks of a plan are about to be launched, which was made with these machines on offer."""
        assert self._run.plan is not None
        self._nodes = tuple(nodes)
        self._autoscaler.launched(self._run.plan, nodes)
        self._stragglers.reset()
        self._cool_down(self._clock())

    def state(self) -> ElasticState:
        """What the next service has to know."""
        autoscaler = self._autoscaler
        return ElasticState(self._nodes, self._saved_step, autoscaler.total_steps, autoscaler.cost_s, self._is_frozen)

    def adopted(self, state: ElasticState) -> None:
        """The job runs, started by a service before this one."""
        self.begin(state.nodes)
        self._saved_step, self._is_frozen = state.saved_step, state.is_frozen
        # The service before this one has had them made.
        self._samples = []
        self._autoscaler.total_steps, self._autoscaler.cost_s = state.total_steps, state.cost_s
        self._adoption = Adoption(self._spec, self._run, self._slots)

    def stopped(self) -> None:
        """All of the job is being ended."""
        self._resize = self._straggler = self._adoption = None
        self._is_sampling = False
        self._next_s = math.inf
        self._gathering_since_s = None
        self._slots.clear()

    def lost(self, task: JobTask) -> None:
        """A task has ended, of the attempt or not; a change that has not begun is given up."""
        resize = self._resize
        if task.member:
            self._gathering_since_s = None
        if task is self._straggler:
            self._straggler = None
        if resize is not None and not resize.has_begun and (task.member or task in resize.new):
            if not task.member and not task.missed_executor:
                self._autoscaler.avoid(task.agent_id, self._clock())
            self._abandon(resize, f"{task.failure}{task.place_of_output}")
            if task.missed_executor:
                # It is tried again as soon as all of the job runs.
                self._next_s = self._clock()

    # What executors say.

    def status(self, status: ElasticStatus) -> None:
        self._slots.update(status)

    def saved(self, step: int) -> None:
        self._saved_step = step

    def resumed(self, step: int) -> None:
        self._resumed_step = step

    def total(self, steps: int) -> None:
        self._autoscaler.total_steps = steps

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        if not task.member or self._resize is not None or self._spec.stragglers == "ignore":
            return
        slow = self._stragglers.find(workers, self._clock())
        # A chief elsewhere might not find the checkpoints.
        if slow is not None and self._spec.stragglers == "replace" and not self._spec.is_chief(slow.planned):
            self._straggler = slow

    def progressed(self, task: JobTask) -> None:
        if task.step is None or not task.member or not self._spec.is_chief(task.planned):
            return
        now_s = self._clock()
        if self._resize is not None and self._resize.stage is Stage.STARTING:
            self._complete(self._resize, task.step, now_s)
        self._autoscaler.progressed(now_s, task.step, task.loss)

    # What is due by time.

    def tick(self, now_s: float, *, may_begin: bool) -> str:
        """Does what is due.

        Args:
            now_s: the time.
            may_begin: whether a change may be begun now.

        Returns:
            Why the job has to start again; empty if it need not.
        """
        self._slots.send(now_s)
        if self._adoption is not None:
            failure = self._adoption.tick()
            if self._adoption.is_over:
                self._adoption = None
            return failure
        if self._resize is not None:
            return self._advance(self._resize, now_s)
        if self._gathering_since_s is not None:
            if now_s - self._gathering_since_s >= GATHER_S:
                self.consider((), now_s)
        elif may_begin and not self._is_frozen and self._wanted_ids:
            # Nor does it grow again before it is asked no more.
            target = self._without_wanted(now_s) if self._is_settled else None
            if target is not None:
                self._begin(target, [], self._wanted_reason, now_s)
        elif may_begin and now_s >= self._next_s and not self._is_frozen:
            self._check_size(now_s)
        return ""

    @property
    def _is_settled(self) -> bool:
        """Whether all of the job runs, and has something to go on from."""
        running = all(task.state is TaskState.RUNNING for task in self._run.members)
        return running and self._saved_step is not None

    def _check_size(self, now_s: float) -> None:
        if not self._is_settled or not self._autoscaler.measure():
            self._next_s = now_s + POLL_S
            return
        if (sample := self._next_sample()) is not None:
            self._is_sampling = True
            self._begin(sample, [], "a sample run, to learn how fast it is then", now_s)
            return
        self._next_s = now_s + self._spec.resize_interval_s
        if self._decides_itself or self._autoscaler.allotted is not None:
            decision = self._autoscaler.choose(self._autoscaler.sizes(), now_s)
        else:
            decision = None
        if decision is not None and decision.needs_nothing:
            self._autoscale([], now_s)
        elif decision is not None or self._straggler is not None:
            # Others are not disturbed unless something might be gained.
            self._gathering_since_s = now_s

    def _next_sample(self) -> Layout | None:
        """The next size at which its speed is to be measured, before others decide on its size again."""
        if self._samples is None:
            self._samples = self._autoscaler.sample_sizes(self._sample_runs)
        while self._samples:
            found = self._autoscaler.smaller(self._samples.pop(0))
            assert self._run.plan is not None
            if found is not None and found.size != size_of(self._run.plan):
                return found
        return None

    # Preemption: workers that other jobs of the service want. The wish stands until it is taken back.

    def reclaimable(self) -> Reclaimable:
        """What it could give up, if it may change its size soon, and what it is giving up."""
        going = frozenset(task.task_id for task in self._run.tasks.values() if task.stop_requested and not task.member)
        if self._resize is not None:
            return Reclaimable(ending=self._resize.target.surplus | going)
        can_resize = self._is_settled and not self._is_frozen and self._adoption is None
        if not can_resize or self._clock() + SOON_S < self._resizable_from_s:
            return Reclaimable(ending=going)
        return dataclasses.replace(self._spare_workers(), ending=going)

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks for these tasks in place of any others; for none: asks no more.

        Args:
            task_ids: the tasks.
            reason: whose wish it is, as a sentence for the user.
        """
        if task_ids and not self._wanted_ids:
            self._gathering_since_s = None
        self._wanted_ids = task_ids
        self._wanted_reason = reason

    def _without_wanted(self, now_s: float) -> Layout | None:
        """The job without what it is asked for.

        None if that is gone already, or more than it may lose, or the job may not change yet.
        """
        spare = self._spare_workers()
        surplus = self._wanted_ids & frozenset(spare.task_ids)
        if now_s < self._resizable_from_s or not surplus or len(surplus) > spare.max_tasks:
            return None
        assert self._run.plan is not None
        return without(self._spec, self._run.plan, self._run.members, surplus)

    def _spare_workers(self) -> Reclaimable:
        """The workers that the job could do without, the last ones first."""
        run, spec = self._run, self._spec
        if spec.elastic is None or run.plan is None:
            return Reclaimable()
        workers = [task for task in run.members if task.planned.role == Role.WORKER]
        free = sorted((task for task in workers if not spec.is_chief(task.planned)), key=lambda t: -t.planned.index)
        most = max(0, min(len(free), len(workers) - spec.elastic[0]))
        return Reclaimable(tuple(task.task_id for task in free) if most else (), most)

    # What is launched for a change.

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> Launch | Decline:
        """Decides upon its size, these being the offers."""
        self._gathering_since_s = None
        self._decide(agents, now_s)
        if self._launching is None and self._resize is None and now_s - self._scaled_s < GIVEN_UP_WITHIN_S:
            self._next_s = min(self._next_s, now_s + GIVEN_UP_S)
        return Decline() if self._launching is None else Launch(self._launching.operations)

    def launched(self) -> None:
        """The master has taken the launch."""
        launch = self._launching
        assert launch is not None
        self._launching = None
        self._resize = launch.resize(self._clock())
        self._observer.launched(launch.new)

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master has not, or only a part of it, which is ended."""
        assert self._launching is not None
        for task in self._launching.new:
            task.stop_requested = True
        self._launching = None
        self._observer.notify(f"the size of the job stays as it is: {error}")

    def _decide(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        slow, self._straggler = self._straggler, None
        if slow is not None:
            target = self._autoscaler.replacement(slow, agents, now_s)
            self._stragglers.attempted(slow, now_s, has_room=target is not None)
            if target is not None:
                self._begin(target, agents, f"{slow.name} on {slow.node} is too slow", now_s)
                return
        self._autoscale(agents, now_s)

    def _autoscale(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        layouts = self._autoscaler.layouts(agents, now_s)
        decision = self._autoscaler.choose(layouts, now_s)
        if decision is not None:
            self._autoscaler.applied(decision, now_s)
            self._begin(layouts[decision.size], agents, decision.reason, now_s)

    def _begin(self, target: Layout, agents: Sequence[AgentOffer], reason: str, now_s: float) -> None:
        self._observer.resizing(target.size.workers, target.size.ps, reason)
        try:
            new, operations = further_tasks(self._spec, self._run, target, agents)
        except DoesNotFitError as error:
            self._observer.notify(f"the size of the job stays as it is: {error}")
            return
        self._run.add(new, operations.values())
        launch = _ResizeLaunch(
            functools.partial(RunningResize, self._spec, self._run, self._slots, target, new, reason), new, operations
        )
        if operations:
            self._launching = launch
        else:
            self._resize = launch.resize(now_s)

    # The course of a change.

    def _advance(self, resize: RunningResize, now_s: float) -> str:
        if (failure := resize.failure(now_s)) and resize.has_begun:
            return failure
        if failure:
            for task in resize.late:
                self._autoscaler.avoid(task.agent_id, now_s)
            self._abandon(resize, failure)
        elif resize.script_has_ended:
            # It ended by itself before it heard that it was to stop.
            resize.chief.finished = self._is_frozen = True
            self._abandon(resize, "the script has ended")
        elif resize.advance(now_s) is Stage.STARTING:
            self._resumed_step = self._straggler = None
            self._result.plan = self._run.plan
            self._result.addresses = {task.name: task.address for task in self._run.members}
            self._autoscaler.restarted()
            self._stragglers.reset()
        return ""

    def _complete(self, resize: RunningResize, step: int, now_s: float) -> None:
        self._resize = None
        saved = self._saved_step or 0
        self._autoscaler.cost_s = now_s - resize.stopped_s
        self._cool_down(now_s)
        if self._is_sampling:
            self._is_sampling = False
            # The next size follows as soon as this one's speed is known, and after the last one what it is given.
            self._next_s = self._resizable_from_s = now_s
        completed = resize.complete(saved, now_s)
        self._result.resizes.append(completed)
        self._observer.resized(completed)
        if step <= saved and (self._resumed_step is None or self._resumed_step < saved):
            self._is_frozen = True
            self._observer.notify(
                f"the script did not go on at step {saved}, where it was saved, but at step {step}: it cannot resume, "
                "so the size of the job stays as it is from now on"
            )

    def _abandon(self, resize: RunningResize, reason: str) -> None:
        resize.abandon()
        self._resize = None
        self._is_sampling = False
        self._cool_down(self._clock())
        self._observer.notify(f"the size of the job stays as it is: {reason}")

    def _cool_down(self, now_s: float) -> None:
        self._next_s = self._resizable_from_s = now_s + self._spec.resize_interval_s


class Adoption:
    """Waits until all slots of the attempt have said what they run.

    Args:
        spec: the job.
        run: what runs of it, as it was written down.
        slots: what the tasks report.
    """

    def __init__(self, spec: JobSpec, run: JobRun, slots: ElasticSlots) -> None:
        self._run = run
        self._slots = slots
        assert run.plan is not None
        for task in run.members:
            slots.adopt(task, task_spec(spec, run.plan, task.planned, run.cluster, run.attempt))
        self._open: Sequence[JobTask] = run.members
        for task in run.tasks.values():
            # It was getting ready for a change that is off, or was surplus.
            task.stop_requested = task.stop_requested or not task.member

    @property
    def is_over(self) -> bool:
        """Whether all are as they were written down."""
        return not self._open

    def tick(self) -> str:
        """Returns why the job has to start again; empty if it need not, or that is not known yet."""
        self._open = [task for task in self._open if not task.state.is_terminal()]
        reported = [task for task in self._open if task.state is TaskState.RUNNING and self._slots.has_reported(task)]
        for task in reported:
            if not self._slots.runs(task, self._run.attempt):
                return f"{task.name} was in the middle of a change of the job's size when the service ended"
        self._open = [task for task in self._open if task not in reported]
        return ""
