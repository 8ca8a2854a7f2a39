"""Changes the size of a running job: looks at what it could have now and then, and sees each change through.

Which size is better is for `framework.elastic.judge` to say; how a change goes is in `framework.elastic.change`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from executor.elastic_messages import ElasticStatus
from framework.driver import CallRefusedError, MasterUnavailableError
from framework.elastic.adoption import Adoption, ElasticMemory
from framework.elastic.change import Change, Stage
from framework.elastic.demand import Demand
from framework.elastic.giving_way import GivingWay
from framework.elastic.joining import launch_further
from framework.elastic.judge import Judge
from framework.elastic.layout import Layout
from framework.elastic.looking import Looking
from framework.elastic.slots import ElasticSlots
from framework.elastic.stragglers import StragglerFinder
from framework.job import JobResult, JobSpec, JobTask, TaskState
from framework.job_run import JobRun
from framework.launching import DoesNotFitError
from framework.mesos_calls import MesosCalls
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer
from framework.reports import ReportListener
from framework.service.tenant import Spare
from framework.stopping import LeftOver
from solver import NodeClass

LOOK_AGAIN_S = 1.0
"""How soon it is looked again whether the job's speed is known."""


class Resizer(ReportListener):
    """Changes the size of one running job.

    Args:
        spec: the job.
        run: what runs of it.
        mesos: where it runs.
        desk: offers in hand.
        observer: is told.
        result: gets the changes.
        demand: says what other frameworks hold and want; None where that is not known.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: JobRun,
        mesos: MesosCalls,
        desk: OfferDesk,
        observer: JobObserver,
        result: JobResult,
        demand: Callable[[], Demand | None],
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._run = run
        self._mesos = mesos
        self._desk = desk
        self._observer = observer
        self._result = result
        self._clock = clock
        self._judge = Judge(spec, run, demand)
        self._slots = ElasticSlots(mesos)
        self._adoption: Adoption | None = None
        self._nodes: tuple[NodeClass, ...] = ()
        self._stragglers = StragglerFinder(run, observer, spec.resize_interval_s)
        self._straggler: JobTask | None = None
        self._change: Change | None = None
        self._looking = Looking(mesos, desk)
        self._giving_way = GivingWay(spec, run)
        self._next_s = math.inf
        self._left_over = LeftOver(run, mesos)
        self._saved_step: int | None = None
        self._resumed_step: int | None = None
        self._is_frozen = False

    @property
    def wants_offers(self) -> bool:
        """Whether it is looking at what there is."""
        return self._looking.is_on

    @property
    def is_stopping(self) -> bool:
        """Whether processes of the job are being stopped for a change, so that whatever else ends breaks it off."""
        return self._change is not None and self._change.stage in (Stage.SAVING, Stage.CLEARING)

    # What happens to the job.

    def launched(self, nodes: Sequence[NodeClass]) -> None:
        """All tasks of a plan have been launched, which was made with these machines on offer."""
        assert self._run.plan is not None
        self._nodes = tuple(nodes)
        self._judge.launched(self._run.plan, nodes)
        self._stragglers.forget()
        self._rest(self._clock())

    def memory(self) -> ElasticMemory:
        """What the next service has to know."""
        judge = self._judge
        return ElasticMemory(self._nodes, self._saved_step, judge.total_steps, judge.cost_s, self._is_frozen)

    def adopted(self, memory: ElasticMemory) -> None:
        """The job runs, started by a service before this one."""
        self.launched(memory.nodes)
        self._saved_step, self._is_frozen = memory.saved_step, memory.is_frozen
        self._judge.total_steps, self._judge.cost_s = memory.total_steps, memory.cost_s
        self._adoption = Adoption(self._spec, self._run, self._slots)

    def stopped(self) -> None:
        """All of the job is being ended."""
        self._change = self._straggler = self._adoption = None
        self._next_s = math.inf
        self._looking.forget()
        self._slots.forget()

    def lost(self, task: JobTask) -> None:
        """A task has ended, of the attempt or not; a change that has not begun is given up."""
        change = self._change
        if task.member:
            self._looking.end()
        if task is self._straggler:
            self._straggler = None
        if change is not None and not change.has_begun and (task.member or task in change.new):
            if not task.member:
                self._judge.avoid(task.agent_id, self._clock())
            self._give_up(change, f"{task.failure}{task.place_of_output}")

    # What executors say.

    def status(self, status: ElasticStatus) -> None:
        self._slots.heard(status)

    def saved(self, step: int) -> None:
        self._saved_step = step

    def resumed(self, step: int) -> None:
        self._resumed_step = step

    def total(self, steps: int) -> None:
        self._judge.total_steps = steps

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        if not task.member or self._change is not None or self._spec.stragglers == "ignore":
            return
        slow = self._stragglers.find(workers, self._clock())
        # A chief elsewhere might not find the checkpoints.
        if slow is not None and self._spec.stragglers == "replace" and not self._spec.is_chief(slow.planned):
            self._straggler = slow

    def progressed(self, task: JobTask) -> None:
        if task.step is None or not task.member or not self._spec.is_chief(task.planned):
            return
        now_s = self._clock()
        if self._change is not None and self._change.stage is Stage.STARTING:
            self._complete(self._change, task.step, now_s)
        self._judge.progressed(now_s, task.step, task.loss)

    def spare(self) -> Spare:
        """What it could give up, if it may change its size soon."""
        can = self._is_settled and not self._is_frozen and self._adoption is None
        return self._giving_way.spare(self._change, self._clock(), can_change=can)

    def give_up(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks for tasks; for none: asks no more."""
        if task_ids and not self._giving_way.is_asked:
            self._looking.end()
        self._giving_way.ask(task_ids, reason)

    # What is due by time.

    def tick(self, now_s: float, *, may_begin: bool) -> str:
        """Does what is due.

        Args:
            now_s: the time.
            may_begin: whether a change may be begun now.

        Returns:
            Why the job has to start again; empty if it need not.
        """
        self._slots.tell(now_s)
        self._left_over.kill(now_s)
        if self._adoption is not None:
            failure = self._adoption.tick()
            if self._adoption.is_over:
                self._adoption = None
            return failure
        if self._change is not None:
            return self._advance(self._change, now_s)
        if self._looking.is_on:
            if self._looking.is_complete(now_s):
                self._decide(self._desk.gathering.agents, now_s)
                self._looking.end()
        elif may_begin and not self._is_frozen and self._giving_way.is_asked:
            # Nor does it grow again before it is asked no more.
            target = self._giving_way.target(now_s) if self._is_settled else None
            if target is not None:
                self._begin(target, [], self._giving_way.reason, now_s)
        elif may_begin and now_s >= self._next_s and not self._is_frozen:
            self._consider(now_s)
        return ""

    @property
    def _is_settled(self) -> bool:
        """Whether all of the job runs, and has something to go on from."""
        running = all(task.state is TaskState.RUNNING for task in self._run.members)
        return running and self._saved_step is not None

    def _consider(self, now_s: float) -> None:
        if not self._is_settled or not self._judge.measure():
            self._next_s = now_s + LOOK_AGAIN_S
            return
        self._next_s = now_s + self._spec.resize_interval_s
        choice = self._judge.choose(self._judge.sizes(), now_s)
        if choice is not None and choice.beneficiaries:
            self._resize([], now_s)
        elif choice is not None or self._straggler is not None:
            # Others are not disturbed unless something might be gained.
            self._looking.begin(now_s)

    def _decide(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        slow, self._straggler = self._straggler, None
        if slow is not None:
            target = self._judge.replacement(slow, agents, now_s)
            self._stragglers.tried(slow, now_s, has_room=target is not None)
            if target is not None:
                self._begin(target, agents, f"{slow.name} on {slow.node} is too slow", now_s)
                return
        self._resize(agents, now_s)

    def _resize(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        layouts = self._judge.layouts(agents, now_s)
        choice = self._judge.choose(layouts, now_s)
        if choice is not None:
            self._judge.follows(choice, now_s)
            self._begin(layouts[choice.size], agents, choice.reason, now_s)

    def _begin(self, target: Layout, agents: Sequence[AgentOffer], reason: str, now_s: float) -> None:
        self._observer.resizing(target.size.workers, target.size.ps, reason)
        try:
            new = launch_further(self._spec, self._run, self._desk, target, agents)
        except (DoesNotFitError, MasterUnavailableError, CallRefusedError) as error:
            self._observer.note(f"the size of the job stays as it is: {error}")
            return
        self._change = Change(self._spec, self._run, self._mesos, self._slots, target, new, reason, now_s)
        if new:
            self._observer.launched(new)

    # The course of a change.

    def _advance(self, change: Change, now_s: float) -> str:
        if (failure := change.failure(now_s)) and change.has_begun:
            return failure
        if failure:
            for task in change.late:
                self._judge.avoid(task.agent_id, now_s)
            self._give_up(change, failure)
        elif change.script_has_ended:
            # It ended by itself before it heard that it was to stop.
            change.chief.finished = self._is_frozen = True
            self._give_up(change, "the script has ended")
        elif change.advance(now_s) is Stage.STARTING:
            self._resumed_step = self._straggler = None
            self._left_over.killed(now_s)
            self._result.plan = self._run.plan
            self._result.addresses = {task.name: task.address for task in self._run.members}
            self._judge.restarted()
            self._stragglers.forget()
        return ""

    def _complete(self, change: Change, step: int, now_s: float) -> None:
        self._change = None
        saved = self._saved_step or 0
        self._judge.cost_s = now_s - change.stopped_s
        self._rest(now_s)
        resize = change.complete(saved, now_s)
        self._result.resizes.append(resize)
        self._observer.resized(resize)
        if step <= saved and (self._resumed_step is None or self._resumed_step < saved):
            self._is_frozen = True
            self._observer.note(
                f"the script did not go on at step {saved}, where it was saved, but at step {step}: it cannot resume, "
                "so the size of the job stays as it is from now on"
            )

    def _give_up(self, change: Change, reason: str) -> None:
        change.abandon()
        self._change = None
        self._rest(self._clock())
        self._observer.note(f"the size of the job stays as it is: {reason}")

    def _rest(self, now_s: float) -> None:
        self._next_s = now_s + self._spec.resize_interval_s
        self._giving_way.rests_until(self._next_s)
