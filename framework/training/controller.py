"""A training job from its first offer to its end: a state machine fed with events.

All tasks start or none does. A failure of any task restarts the job from its last checkpoint; a worker of a job whose
workers do not wait for each other is replaced alone. An elastic job changes its size meanwhile (`elastic/`). A service
that is started again goes on with the job as it was written down (`state.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dike.task import Role
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import TaskState
from framework.project.last_words import why_hopeless
from framework.project.tensorflow_noise import without_noise
from framework.scheduler.agents import AllAgents
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.demand import Demand
from framework.scheduler.job import CANCELLED, Answer, Decline, JobOutcome, Launch, Message, Need, Reclaimable
from framework.training.elastic.stragglers import StragglerReporter
from framework.training.launch import DoesNotFitError, choose_executor, cluster_spec, launch_operation
from framework.training.observer import JobObserver
from framework.training.output import OutputReader, ReportListener, ReportReader, take_status
from framework.training.planning import PlannedLaunch, Planner
from framework.training.spec import JobResult, JobSpec, JobTask
from framework.training.state import JobRun, Phase, StateWriter, TrainingState, read_state

if TYPE_CHECKING:
    from framework.policies.jobs.interface import Counts, JobView
    from framework.training.elastic.resizer import Resizer

logger = logging.getLogger(__name__)

STALE_OFFERS = "REASON_INVALID_OFFERS"
REPLACEMENT_TIMEOUT_S = 20.0
"""How long a lost worker may wait for its agent to offer its place again."""


@dataclass(frozen=True)
class AttemptEnd:
    """An attempt is over: its tasks that still run are to end.

    Attributes:
        reason: why the job has to start again; empty if its script has ended well.
        task: whose failure it was; None if it was no task's.
        counts: whether it is one of the failures that a job survives only so often.
    """

    reason: str = ""
    task: JobTask | None = None
    counts: bool = True


class TrainingJob:
    """One training job.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        spec: what to run.
        observer: who is notified.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known; tells a
            job that has to wait from one that can never start; may be called by any thread.
        clock: seconds, monotonic.
        demand: what the frameworks other than the one of this id hold and want, or None where that is not known.
        state: what `to_state` of a service before this one said; None for a new job.
        launched: ids of its tasks that may still run, the others having ended or never been launched; None: what
            `state` says.
        patient: whether it waits for other agents where it fits none that there are, instead of being an error.
        background: plans; None: at once.

    Raises:
        BadInputError: if `state` cannot be read.
    """

    def __init__(
        self,
        spec: JobSpec,
        observer: JobObserver,
        all_agents: AllAgents,
        clock: Callable[[], float] = time.monotonic,
        demand: Callable[[str], Demand | None] = lambda framework_id: None,
        *,
        state: Mapping[str, Any] | None = None,
        launched: Collection[str] | None = None,
        patient: bool = False,
        background: Background | None = None,
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._framework_id = ""
        self._all_agents = all_agents
        self._demand = demand
        self._patient = patient
        self._background = background or InlineBackground()
        if state is None:
            self._state = TrainingState(JobRun(plan=spec.plan), JobResult(checkpoint_dir=spec.checkpoint_dir))
        else:
            self._state = read_state(state, spec)
        self.result = self._state.result
        self._run = self._state.run
        self._must_take_up = state is not None
        self._connection = Connection(observer.notify)
        self._outbox: list[Message] = []
        self._given = spec
        self._is_governed = False
        self._sharing: Callable[[], int] = lambda: 1
        self._sample_runs = 0
        self._prepare()
        if launched is not None:
            self._run.forget_unlaunched(launched)

    def _prepare(self) -> None:
        """Makes all that depends on what was asked for and what was found, of which nothing runs."""
        run, observer, clock = self._run, self._observer, self._clock
        self._spec = spec = self._wanted()
        self._writer = StateWriter(spec)
        self._planner = Planner(spec, run, observer, self._all_agents, self._background, clock(), patient=self._patient)
        self._replacement = WorkerReplacement(spec, run, observer)
        self._resizer: Resizer | None = None
        listener: ReportListener = StragglerReporter(observer) if spec.stragglers != "ignore" else ReportListener()
        if spec.elastic is not None:
            # Late: most jobs keep their size, and what decides on another takes half a second to import.
            from framework.training.elastic.resizer import Resizer

            listener = self._resizer = Resizer(
                spec, run, self._outbox, observer, self.result, lambda: self._demand(self._framework_id), clock
            )
            if self._is_governed:
                self._resizer.hold(self._sample_runs)
        self._is_foreseen = False
        self._launching: WorkerReplacement | Resizer | None = None
        self._output = OutputReader(spec, run, self._outbox, observer, clock)
        self._reports = ReportReader(spec, self._state, observer, listener, self._output)

    def _wanted(self) -> JobSpec:
        """What was asked for, with what was found of it."""
        spec = dataclasses.replace(self._given, plain=self._state.plain)
        return spec if self._state.profile is None else spec.with_profile(self._state.profile)

    @property
    def done(self) -> bool:
        """Whether nothing of the job runs any more and `result` is complete."""
        return self._state.phase is Phase.DONE

    @property
    def tasks(self) -> list[JobTask]:
        """The tasks of the current attempt, in the order of the plan."""
        return self._run.members

    def wanted_tasks(self) -> Set[str]:
        """Ids of the tasks that are to run; whatever else of it still does is ended."""
        return {task.task_id for task in self._run.tasks.values() if not task.stop_requested}

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""
        if self.waits_for_allocation:
            return Need.NOTHING
        if self._state.phase is Phase.WAITING:
            # One that fails again and again must not come before all others each time.
            return Need.REPLACE_LOST if self._run.attempt and self._state.failures < 2 else Need.START
        if self._state.phase is not Phase.RUNNING:
            return Need.NOTHING
        if self._replacement.active:
            return Need.REPLACE_LOST
        return Need.NOTHING if self._launcher is None else Need.GROW

    @property
    def equivalence_class(self) -> Hashable:
        """Equal for jobs that fit the same offers."""
        return self._planner.equivalence_class if self._state.phase is Phase.WAITING else None

    def reclaimable(self) -> Reclaimable:
        """What it could give up for others; nothing while it waits for a task that it has lost."""
        if self._state.phase is not Phase.RUNNING or self._resizer is None or self._replacement.active:
            return Reclaimable()
        return self._resizer.reclaimable()

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks it to shrink by these tasks, and not to grow meanwhile; for none: asks no more.

        A job that is not elastic keeps them.
        """
        if self._resizer is not None:
            self._resizer.reclaim(task_ids, reason)

    # Its size, where somebody else decides on it.

    @property
    def is_scalable(self) -> bool:
        """Whether it can have several sizes."""
        return self._spec.elastic is not None

    @property
    def has_estimate(self) -> bool:
        """Whether its speeds are known, as far as they are before it runs, and it is not about to end."""
        going = self._state.phase is Phase.RUNNING or (self._state.phase is Phase.WAITING and self._is_foreseen)
        return going and self._resizer is not None and self._resizer.is_known

    @property
    def waits_for_allocation(self) -> bool:
        """Whether it waits for workers to be given to it."""
        waits = self._state.phase is Phase.WAITING and self._is_governed and self.is_scalable
        return waits and (self._planner.allotted is None or not self._is_foreseen)

    def enter_central_allocation(self, competing_jobs: Callable[[], int], sample_runs: int) -> None:
        """From now on its size is decided on elsewhere; a job that is not elastic goes on as it does.

        Args:
            competing_jobs: how many jobs share the agents.
            sample_runs: at how many other sizes its speed is to be measured before the first decision on one that runs.
        """
        self._is_governed, self._sharing, self._sample_runs = True, competing_jobs, sample_runs
        if self._resizer is not None:
            self._resizer.hold(sample_runs)

    def scale_view(self) -> JobView | None:
        """What is believed of it; None where it ends, or nothing is known yet."""
        if not self.has_estimate or self._resizer is None:
            return None
        return self._resizer.view(runs=self._state.phase is Phase.RUNNING)

    def scale_to(self, counts: Counts) -> None:
        """It is to have so many workers and parameter servers as soon as that can be; with none it waits."""
        # Late: most jobs keep their size.
        from framework.training.elastic.layout import Size

        size = Size(*counts) if counts[0] else None
        if self._resizer is not None:
            self._resizer.scale_to(size)
        if size is None and self._state.phase is Phase.WAITING:
            self._observer.waiting("The allocation gives all workers to other jobs at the moment.")
        self._planner.allotted = size

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service."""
        if self._state.phase is Phase.RUNNING and self._resizer is not None:
            self._state.elastic = self._resizer.state()
        return self._writer.write(self._state)

    def outcome(self) -> JobOutcome:
        """How it ended; asked once it is `done`."""
        return self._state.outcome()

    def close(self) -> None:
        """Plans no more."""
        self._planner.abandon()

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the job can never fit.
        """
        match event:
            case events.Subscribed():
                self._subscribed(event)
            case events.Disconnected():
                self._connection.disconnected()
            case events.StatusUpdate():
                self._status_update(event)
            case events.MessageArrived():
                self._reports.read(event.data, self._run.tasks)

    def _subscribed(self, event: events.Subscribed) -> None:
        self._framework_id = event.framework_id
        self._connection.subscribed()
        if self._must_take_up:
            self._must_take_up = False
            if self._state.phase is Phase.RUNNING:
                self._end_attempt(self._take_up())
        self._output.subscribed()

    def _take_up(self) -> AttemptEnd | None:
        """Goes on with what a service before this one has started."""
        lost = [task for task in self._run.members if task.state.is_terminal() and not task.finished]
        for task in lost:
            if not self._is_replaceable(task):
                return AttemptEnd(task.failure, task, counts=False)
        for task in lost:
            self._replacement.start(task, self._clock())
        if self._resizer is not None and self._state.elastic is not None:
            self._resizer.adopted(self._state.elastic)
        return None

    def _status_update(self, event: events.StatusUpdate) -> None:
        state = TaskState.of(event.state)
        task = self._run.tasks.get(event.task_id)
        if task is None or task.state.is_terminal():
            return
        left_behind = task.was_left_behind
        changed = take_status(task, state, event.status)
        if state.is_terminal():
            self._output.ended(task, event.status)
        if changed:
            self._observer.task_changed(task)
        if task.executor_has_ended or task.missed_executor:
            self._run.executors.pop(task.executor_id, None)
        if state.is_terminal() and self._state.phase is Phase.RUNNING:
            self._end_attempt(self._task_ended(task, counts=not left_behind and not task.missed_executor))

    def _task_ended(self, task: JobTask, *, counts: bool) -> AttemptEnd | None:
        """What the end of a task means, of the attempt or not, while the job runs.

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
            return AttemptEnd(reason, task, counts=counts and not task.finished)
        elif task.finished and self._spec.computes(task.planned):
            return AttemptEnd() if self._script_has_ended() else None
        else:
            gone = self._gone_with(task)
            if all(map(self._is_replaceable, (task, *gone))) and (not counts or self._may_lose_another()):
                self._replace(task, counts=counts)
            else:
                with_it = f"; {', '.join(other.name for other in gone)} ended with it" if gone else ""
                return AttemptEnd(f"{task.failure}{with_it}", task, counts=counts)
        return None

    def _gone_with(self, task: JobTask) -> list[JobTask]:
        """The others that have ended with a task's executor or agent, as Mesos is about to say of each of them."""
        if task.agent_has_gone:
            mates = [other for other in self._run.members if other.agent_id == task.agent_id]
        elif task.executor_has_ended and not task.missed_executor:
            mates = [other for other in self._run.members if other.executor_id == task.executor_id]
        else:
            return []
        return [other for other in mates if not other.state.is_terminal()]

    def _script_has_ended(self) -> bool:
        return self._run.script_has_ended(self._spec)

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if the job can never fit any cluster of the agents there are.
        """
        now = self._clock()
        self._output.tick()
        match self._state.phase:
            case Phase.WAITING if self._is_governed and self._resizer is not None and not self._is_foreseen:
                self._foresee(self._resizer, now)
            case Phase.WAITING if not self.waits_for_allocation:
                self._planner.tick(now, connected=self._connection.connected)
            case Phase.RUNNING:
                self._end_attempt(self._tick_running(now))
            case Phase.STOPPING if not self._run.live():
                self._stopped()

    def _foresee(self, resizer: Resizer, now_s: float) -> None:
        found = self._planner.foresee(now_s, self._sharing())
        if found is not None:
            resizer.foreseen(*found)
            self._is_foreseen = True

    def _tick_running(self, now_s: float) -> AttemptEnd | None:
        failure = self._replacement.tick(now_s) if self._replacement.active else ""
        if not failure and self._resizer is not None:
            failure = self._resizer.tick(now_s, may_begin=not self._replacement.active)
            if self._script_has_ended():
                return AttemptEnd()
        return AttemptEnd(failure, counts=False) if failure else None

    def messages(self) -> list[Message]:
        """The messages for its executors."""
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    # Offers.

    @property
    def _launcher(self) -> WorkerReplacement | Resizer | None:
        """What looks at offers while the job runs, if anything does."""
        if self._replacement.active:
            return self._replacement
        return self._resizer if self._resizer is not None and self._resizer.wants_offers else None

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        """What it launches on these offers.

        Raises:
            BadInputError: if it can never fit any cluster of the agents there are.
        """
        now = self._clock()
        if self._state.phase is Phase.RUNNING:
            self._launching = self._launcher
            return Decline() if self._launching is None else self._launching.consider(agents, now)
        if self._state.phase is not Phase.WAITING:
            return Decline()
        answer = self._planner.consider(agents, now)
        return self._begin_attempt(answer) if isinstance(answer, PlannedLaunch) else answer

    def _begin_attempt(self, launch: PlannedLaunch) -> Launch | Decline:
        if self._spec.plan_only:
            self.result.plan = launch.plan
            self.result.succeeded = True
            self._state.phase = Phase.DONE
            return Decline()
        run, tasks = self._run, launch.tasks
        self.result.plan = run.plan = launch.plan
        self.result.addresses = {task.name: task.address for task in tasks}
        run.tasks = {}
        run.add(tasks, launch.operations.values())
        run.cluster = cluster_spec(tasks)
        run.used_ports = {task.port for task in tasks}
        self._observer.planned(launch.plan)
        self._state.stepped = False
        if self._resizer is not None:
            self._resizer.begin(launch.nodes)
        self._launching = None
        self._state.phase = Phase.RUNNING
        return Launch(launch.operations)

    def launched(self) -> None:
        """The master has taken its launch."""
        if self._launching is not None:
            self._launching.launched()
        else:
            self._observer.launched(self._run.members)

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master has not taken all of its launch."""
        if self._launching is not None:
            self._launching.refused(error)
        elif isinstance(error, CallRefusedError):
            self._end_attempt(AttemptEnd(f"the launch was refused: {error}"))
        else:
            # What the master did take is ended; of the rest it says that it knows nothing.
            self._end_attempt(AttemptEnd(f"the launch was interrupted: {error}", counts=False))

    # Worker replacement.

    def _is_replaceable(self, task: JobTask) -> bool:
        """Whether the others can train on until this one is back."""
        return (
            task.planned.role == Role.WORKER
            and not self._spec.is_chief(task.planned)
            and not self._spec.profile.synchronous
            and self._state.stepped
            and task.reason != "REASON_AGENT_REMOVED"
        )

    def _may_lose_another(self) -> bool:
        return self._replacement.active or self._state.may_fail(self._spec.max_restarts)

    def _replace(self, task: JobTask, *, counts: bool) -> None:
        # Workers that are lost together are one failure.
        if counts and not self._replacement.active:
            self._state.count_failure()
        failure = f"{task.failure}{task.place_of_output}"
        self._observer.restarting(failure, self._state.failures, self._spec.max_restarts)
        self._replacement.start(task, self._clock())

    # Restart policy.

    def _may_restart(self, end: AttemptEnd) -> bool:
        """Takes a failure in; whether the job starts again. Its result says why, if it does not."""
        refusal = self._why_no_restart(end)
        if refusal:
            self.result.failure = refusal
            if end.task is not None and end.task.outcome is not None:
                self.result.failed_tail = without_noise(end.task.outcome.tail)
                self.result.last_words = end.task.last_words
        return not refusal

    def _why_no_restart(self, end: AttemptEnd) -> str:
        limit = self._spec.max_restarts
        output = "" if end.task is None else end.task.place_of_output
        stale = end.task is not None and end.task.reason == STALE_OFFERS
        if self._spec.profile_is_kept and end.task is not None and end.task.found_other_model:
            return self._why_not_planned_again(end.task)
        if end.task is not None and end.task.found_other_layout:
            return self._why_not_of_other_layout(end.task)
        if stale or not end.counts:
            self._observer.notify(f"{end.reason}; starting again")
        elif end.task is not None and end.task.is_fenced:
            return f"{end.reason}; another job uses its checkpoint folder {self._spec.checkpoint_dir}{output}"
        elif why := self._why_hopeless(end.task):
            return f"{end.reason}; {why}{output}"
        elif not self._state.may_fail(limit):
            bound = f"{limit} in a row without a newer checkpoint"
            return f"{end.reason}; no more restarts than {bound} (--max-restarts){output}"
        else:
            self._state.count_failure()
            self._observer.restarting(f"{end.reason}{output}", self._state.failures, limit)
        return ""

    def _why_not_planned_again(self, task: JobTask) -> str:
        """Takes in that the chief has found another model than was planned for; why that is the job's end, if it is."""
        script = self._spec.script
        if self._spec.plan is not None:
            return f"{task.failure}; the plan was made for another model than {script}'s, make one with --plan-only"
        if self.result.profile is None:
            # What it has read was lost on its way. It reads again, but not for ever.
            if not self._state.may_fail(max(1, self._spec.max_restarts)):
                return (
                    f"{task.failure}; the model of {script} has changed, --profile-again reads it{task.place_of_output}"
                )
            self._state.count_failure()
        self._observer.notify(
            f"the model of {script} is not what it was, though the script is: it reads something that does not travel; "
            "planning again"
        )
        return ""

    def _why_not_of_other_layout(self, task: JobTask) -> str:
        """Takes in that the checkpoints are of a job with parameter servers, or without; why that is its end, if so."""
        spec, plain = self._spec, not task.planned.is_plain
        kind = "one plain task" if plain else "a job with parameter servers"
        if spec.plan is not None or (plain and (spec.min_workers is not None or spec.elastic is not None)):
            asked = "--plan" if spec.plan else "--min-workers" if spec.elastic is None else "--elastic"
            instead = f"leave out {asked}, or name another folder with --checkpoint-dir"
            return f"the checkpoints in {spec.checkpoint_dir} are of {kind}; {instead}"
        if self._state.plain is not None:
            return f"{task.failure}; the checkpoints in {spec.checkpoint_dir} are of both kinds{task.place_of_output}"
        self._state.plain = plain
        self._observer.notify(f"the checkpoints in {spec.checkpoint_dir} are of {kind}; planning again")
        return ""

    def _why_hopeless(self, task: JobTask | None) -> str:
        """Why no restart will help: the script itself is wrong; empty if one may."""
        state = self._state
        failure = "" if task is None else task.own_failure
        again = bool(failure) and failure == state.own_failure and not state.has_progressed
        state.own_failure = failure
        if task is None or not failure:
            return ""
        # What was written last before a signal has nothing to do with it.
        output = task.outcome.tail if task.outcome and task.ended_itself else ""
        trained = state.result.steps is not None or state.result.checkpoint_step is not None
        return why_hopeless(output, has_ever_trained=trained, stepped=state.stepped, again=again)

    # Teardown.

    def cancel(self) -> None:
        """Ends all tasks; `done` follows when they have ended."""
        if self.result.succeeded or self.done:
            return
        self._state.cancelled = True
        self.result.failure = self.result.failure or CANCELLED
        self._stop(comes_back=False)

    def _end_attempt(self, end: AttemptEnd | None) -> None:
        if end is None:
            return
        self.result.succeeded = not end.reason
        self._stop(comes_back=bool(end.reason) and self._may_restart(end))

    def _stop(self, *, comes_back: bool) -> None:
        self._state.phase = Phase.STOPPING
        self._state.comes_back = comes_back
        self._planner.abandon()
        self._replacement.clear()
        if self._resizer is not None:
            self._resizer.stopped()
        self._run.stop()

    def _stopped(self) -> None:
        if self._state.comes_back:
            self._run.clear()
            found = self.result.profile
            if found is not None and self._spec.profile_is_kept:
                self._state.profile, self._run.plan = found, None
            if self._spec.elastic is None and self.result.checkpoint_step is not None and self._run.plan is not None:
                # It goes on as it has begun.
                self._state.plain = self._run.plan.is_plain
            if self._wanted() != self._spec:
                self._prepare()
            self._state.phase = Phase.WAITING
            self._planner.wait(self._clock())
            return
        self._report_lost_output()
        self._state.phase = Phase.DONE

    def _report_lost_output(self) -> None:
        """Says where the output is that has not come."""
        for task in self._run.members:
            if not task.logs_complete and self._spec.is_chief(task.planned) and task.outcome is not None:
                lost = f"a part of {task.name}'s output was lost on its way"
                if task.adopted:
                    lost = f"what {task.name} wrote while no service was there has not come here"
                self._observer.notify(f"{lost}; the whole is in {task.outcome.sandbox} on {task.node}")


@dataclass(frozen=True)
class _Lost:
    """A worker that is to come back.

    Attributes:
        task: the one that was lost.
        deadline_s: until when its place may be offered.
        replacement: the one that is being launched for it; None before.
    """

    task: JobTask
    deadline_s: float
    replacement: JobTask | None = None


class WorkerReplacement:
    """Lost workers of a job whose workers do not wait for each other: each comes back alone, under its old address.

    Args:
        spec: the job.
        run: what runs of it.
        observer: is notified.
    """

    def __init__(self, spec: JobSpec, run: JobRun, observer: JobObserver) -> None:
        self._spec = spec
        self._run = run
        self._observer = observer
        self._lost: dict[str, _Lost] = {}

    @property
    def active(self) -> bool:
        """Whether any worker is waited for."""
        return bool(self._lost)

    def clear(self) -> None:
        """All of the job is being ended."""
        self._lost.clear()

    def start(self, task: JobTask, now_s: float) -> None:
        """Begins to wait for the agent of a lost worker to offer its place again."""
        self._lost[task.name] = _Lost(task, now_s + REPLACEMENT_TIMEOUT_S)

    def tick(self, now_s: float) -> str:
        """Returns why the job has to start again, or nothing."""
        for lost in self._lost.values():
            if now_s > lost.deadline_s:
                waited = f"within {REPLACEMENT_TIMEOUT_S:g} s"
                return f"{lost.task.failure}; its agent did not offer its place again {waited}"
        return ""

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> Launch | Decline:
        """Brings back whom it can."""
        offered = {agent.agent_id: agent for agent in agents}
        operations: dict[str, dict[str, Any]] = {}
        for name, lost in self._lost.items():
            agent = offered.get(lost.task.agent_id)
            if agent is None:
                continue
            task = self._replacement_of(lost.task)
            others = self._run.tasks.values()
            new_executor = f"{self._spec.job_id}.executor-{len(operations)}.{self._run.serial}"
            choose_executor(self._spec, task, agent, others, self._run.executors, new_executor)
            assert self._run.plan is not None
            try:
                operation = launch_operation(
                    self._spec,
                    self._run.plan,
                    [task],
                    self._run.cluster,
                    agent,
                    self._run.attempt,
                    executors=self._run.executors,
                )
            except DoesNotFitError:
                continue
            operations[agent.agent_id] = operation
            self._lost[name] = dataclasses.replace(lost, replacement=task)
            del offered[agent.agent_id]
        for lost in self._being_launched:
            del self._run.tasks[lost.task.task_id]
        replacements = [lost.replacement for lost in self._being_launched if lost.replacement is not None]
        self._run.add(replacements, operations.values())
        return Launch(operations) if operations else Decline()

    def launched(self) -> None:
        """The master has taken the launch."""
        for lost in self._being_launched:
            assert lost.replacement is not None
            del self._lost[lost.task.name]
            self._observer.launched([lost.replacement])

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master has not: they are waited for again, and whatever it may have launched is ended."""
        logger.warning("replacement of workers interrupted: %s", error)
        for lost in self._being_launched:
            assert lost.replacement is not None
            del self._run.tasks[lost.replacement.task_id]
            self._run.add([lost.task], ())
            self._lost[lost.task.name] = dataclasses.replace(lost, replacement=None)

    @property
    def _being_launched(self) -> list[_Lost]:
        return [lost for lost in self._lost.values() if lost.replacement is not None]

    def _replacement_of(self, lost: JobTask) -> JobTask:
        return JobTask(
            task_id=f"{self._spec.job_id}.{lost.planned.role}-{lost.planned.index}.{self._run.serial}",
            planned=lost.planned,
            agent_id=lost.agent_id,
            node=lost.node,
            host=lost.host,
            port=lost.port,
            gpu_devices=lost.gpu_devices,
        )
