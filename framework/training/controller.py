"""The state machine of a training job, driven by events and a clock.

All tasks start or none does. Any failure restarts the job from its last checkpoint; only a lost worker of an
asynchronous job is replaced alone. An elastic job also changes its size (`elastic/`). After a restart of the service
the job resumes from its saved state (`state.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dike.exceptions import BadInputError
from dike.task import Role
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import TaskState
from framework.project.failure_summary import no_restart_reason
from framework.project.tensorflow_noise import without_noise
from framework.scheduler.agents import AllAgents
from framework.scheduler.background import Background, InlineBackground
from framework.scheduler.demand import Demand
from framework.scheduler.job import CANCELLED, Answer, Decline, JobOutcome, Launch, Message, Need, Reclaimable
from framework.training.elastic.stragglers import StragglerReporter
from framework.training.launch import DoesNotFitError, choose_executor, cluster_spec, launch_operation
from framework.training.observer import JobObserver
from framework.training.output import OutputReader, ReportListener, ReportReader, apply_status
from framework.training.planning import PlannedLaunch, Planner
from framework.training.spec import JobResult, JobSpec, JobTask
from framework.training.state import JobRun, Phase, StateWriter, TrainingState, read_state

if TYPE_CHECKING:
    from framework.policies.jobs.interface import Counts, JobView
    from framework.training.elastic.resizer import Resizer

logger = logging.getLogger(__name__)

STALE_OFFERS = "REASON_INVALID_OFFERS"
REPLACEMENT_TIMEOUT_S = 20.0
"""Maximum time for an agent to offer the resources of a lost worker again."""


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt; its remaining tasks are to be killed.

    Attributes:
        reason: why the job restarts; empty if its script has succeeded.
        task: the task that failed; None if none did.
        counts: whether the failure counts towards `max_restarts`.
    """

    reason: str = ""
    task: JobTask | None = None
    counts: bool = True


class TrainingJob:
    """One training job.

    Pass every event to `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        all_agents: lists every agent with its total resources, used or not; None if unknown. Distinguishes a job that
            has to wait from one that can never start. Called from any thread.
        demand: framework id -> what all other frameworks use and request; None if unknown.
        state: result of `to_state` in an earlier service; None for a new job.
        launched: ids of the tasks that may still run; all others never started or have ended. None: as in `state`.
        patient: whether a job that fits none of the existing agents waits for others; else that is an error.
        background: runs the planner; None plans synchronously.

    Raises:
        BadInputError: `state` cannot be read.
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
        self._must_adopt = state is not None
        self._connection = Connection(observer.notify)
        self._outbox: list[Message] = []
        self._submitted_spec = spec
        self._yields = False
        """Whether its last attempt has ended for a job of higher priority."""
        self._is_centrally_allocated = False
        self._competing_jobs: Callable[[], int] = lambda: 1
        self._sample_runs = 0
        self._build_components()
        if launched is not None:
            self._run.forget_unlaunched(launched)

    def _build_components(self) -> None:
        """Builds the collaborators, which depend on the effective spec. No task may be running."""
        run, observer, clock = self._run, self._observer, self._clock
        self._spec = spec = self._effective_spec()
        self._writer = StateWriter(spec)
        self._planner = Planner(spec, run, observer, self._all_agents, self._background, clock(), patient=self._patient)
        self._replacement = WorkerReplacement(spec, run, observer)
        self._resizer: Resizer | None = None
        listener: ReportListener = StragglerReporter(observer) if spec.on_straggler != "ignore" else ReportListener()
        if spec.elastic is not None:
            # Imported late: it takes half a second, and most jobs are not elastic.
            from framework.training.elastic.resizer import Resizer

            listener = self._resizer = Resizer(
                spec, run, self._outbox, observer, self.result, lambda: self._demand(self._framework_id), clock
            )
            if self._is_centrally_allocated:
                self._resizer.hold(self._sample_runs)
        self._is_planned_ahead = False
        self._launching: WorkerReplacement | Resizer | None = None
        self._output = OutputReader(spec, run, self._outbox, observer, clock)
        self._reports = ReportReader(spec, self._state, observer, listener, self._output)

    def _effective_spec(self) -> JobSpec:
        """The submitted spec, updated with what the chief has reported about the model and its checkpoints."""
        spec = dataclasses.replace(self._submitted_spec, plain=self._state.plain)
        return spec if self._state.profile is None else spec.with_profile(self._state.profile)

    @property
    def done(self) -> bool:
        """Whether all tasks have ended and `result` is complete."""
        return self._state.phase is Phase.DONE

    @property
    def tasks(self) -> list[JobTask]:
        """The tasks of the current attempt, in the order of the plan."""
        return self._run.members

    def wanted_tasks(self) -> Set[str]:
        """Ids of the tasks that should run; the scheduler kills any other."""
        return {task.task_id for task in self._run.tasks.values() if not task.stop_requested}

    @property
    def need(self) -> Need:
        if self.waits_for_allocation:
            return Need.NOTHING
        if self._state.phase is Phase.WAITING:
            # A job that fails repeatedly must not be served first each time.
            is_first = self._run.attempt and self._state.failures < 2 and not self._yields
            return Need.REPLACE_LOST if is_first else Need.START
        if self._state.phase is not Phase.RUNNING:
            return Need.NOTHING
        if self._replacement.active:
            return Need.REPLACE_LOST
        return Need.NOTHING if self._launcher is None else Need.GROW

    @property
    def equivalence_class(self) -> Hashable:
        return self._planner.equivalence_class if self._state.phase is Phase.WAITING else None

    def reclaimable(self) -> Reclaimable:
        """The tasks it could release for other jobs; none while a lost worker is being replaced.

        A job that is not elastic could release all of them once it has a checkpoint.
        """
        live = tuple(self._run.live())
        if self._yields and self._state.phase is Phase.STOPPING:
            return Reclaimable(ending=frozenset(live), is_whole=True)
        if self._state.phase is not Phase.RUNNING or self._replacement.active:
            return Reclaimable()
        if self._resizer is not None:
            return self._resizer.reclaimable()
        count = len(live) if self.result.checkpoint_step is not None else 0
        return Reclaimable(live[:count], count, is_whole=True)

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        """Requests a shrink by these tasks and no growth meanwhile; an empty set withdraws the request.

        A job that is not elastic saves, ends and waits.
        """
        if self._resizer is not None:
            self._resizer.reclaim(task_ids, reason)
        elif task_ids and self._state.phase is Phase.RUNNING:
            self._yields = True
            self._end_attempt(AttemptEnd(f"it makes room: {reason}", counts=False))

    # Central allocation.

    @property
    def is_scalable(self) -> bool:
        return self._spec.elastic is not None

    @property
    def has_estimate(self) -> bool:
        """Whether its speeds are known, measured or predicted, and it is not about to end."""
        going = self._state.phase is Phase.RUNNING or (self._state.phase is Phase.WAITING and self._is_planned_ahead)
        return going and self._resizer is not None and self._resizer.is_known

    @property
    def waits_for_allocation(self) -> bool:
        """Whether it is waiting for the central allocation."""
        waits = self._state.phase is Phase.WAITING and self._is_centrally_allocated and self.is_scalable
        return waits and (self._planner.allotted is None or not self._is_planned_ahead)

    def enter_central_allocation(self, competing_jobs: Callable[[], int], sample_runs: int) -> None:
        """Hands the decision on its size to the central allocation; no-op for a job that is not elastic.

        First the speeds of `sample_runs` other sizes are measured.
        """
        self._is_centrally_allocated, self._competing_jobs, self._sample_runs = True, competing_jobs, sample_runs
        if self._resizer is not None:
            self._resizer.hold(sample_runs)

    def scale_view(self) -> JobView | None:
        """The job as the allocation policy sees it; None if it is ending or nothing is known yet."""
        if not self.has_estimate or self._resizer is None:
            return None
        return self._resizer.view(runs=self._state.phase is Phase.RUNNING)

    def scale_to(self, counts: Counts) -> None:
        """Sets the allocated numbers of workers and ps; with zero workers it waits."""
        # Imported late: most jobs are not elastic.
        from framework.training.elastic.layout import Size

        size = Size(*counts) if counts[0] else None
        if self._resizer is not None:
            self._resizer.scale_to(size)
        if size is None and self._state.phase is Phase.WAITING:
            self._observer.waiting("The allocation currently gives all workers to other jobs.")
        self._planner.allotted = size

    def to_state(self) -> dict[str, Any]:
        if self._state.phase is Phase.RUNNING and self._resizer is not None:
            self._state.elastic = self._resizer.state()
        return self._writer.write(self._state)

    def outcome(self) -> JobOutcome:
        return self._state.outcome()

    def close(self) -> None:
        self._planner.abandon()

    # Events.

    def handle(self, event: events.Event) -> None:
        """Applies one event.

        Raises:
            BadInputError: the job can never fit.
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
        if self._must_adopt:
            self._must_adopt = False
            if self._state.phase is Phase.RUNNING:
                self._end_attempt(self._adopt_tasks())
        self._output.subscribed()

    def _adopt_tasks(self) -> AttemptEnd | None:
        lost = [task for task in self._run.members if task.state.is_terminal() and not task.finished]
        for task in lost:
            if not self._is_replaceable(task):
                return AttemptEnd(task.failure, task, counts=False)
        for task in lost:
            self._replacement.start(task, self._clock())
        if self._resizer is not None and self._state.elastic is not None:
            self._resizer.adopt(self._state.elastic)
        return None

    def _status_update(self, event: events.StatusUpdate) -> None:
        state = TaskState.of(event.state)
        task = self._run.tasks.get(event.task_id)
        if task is None or task.state.is_terminal():
            return
        was_interrupted = task.launch_was_interrupted
        changed = apply_status(task, state, event.status)
        if state.is_terminal():
            self._output.task_ended(task, event.status)
        if changed:
            self._observer.task_changed(task)
        if task.executor_has_ended or task.missed_executor:
            self._run.executors.pop(task.executor_id, None)
        if state.is_terminal() and self._state.phase is Phase.RUNNING:
            self._end_attempt(self._task_ended(task, counts=not was_interrupted and not task.missed_executor))

    def _task_ended(self, task: JobTask, *, counts: bool) -> AttemptEnd | None:
        """Decides whether the end of a task ends the attempt; `counts`: as a failure, if it has not finished."""
        resizer = self._resizer
        if resizer is not None:
            resizer.task_ended(task)
        if not task.member:
            del self._run.tasks[task.task_id]
        elif resizer is not None and resizer.is_stopping and not self._ended_with_script(task, resizer):
            reason = f"{task.failure}, while the job changed its size"
            return AttemptEnd(reason, task, counts=counts and not task.finished)
        elif task.finished and self._spec.computes(task.planned):
            return AttemptEnd() if self._script_has_ended() else None
        elif task.planned.is_plain and any(self._spec.is_chief(one.planned) and one.finished for one in self.tasks):
            # The other workers' results do not count.
            return AttemptEnd()
        else:
            gone = self._lost_with(task)
            if all(map(self._is_replaceable, (task, *gone))) and (not counts or self._may_lose_another()):
                self._replace(task, counts=counts)
            else:
                with_it = f"; {', '.join(other.name for other in gone)} ended with it" if gone else ""
                return AttemptEnd(f"{task.failure}{with_it}", task, counts=counts)
        return None

    def _ended_with_script(self, task: JobTask, resizer: Resizer) -> bool:
        """Whether a task that ended during a change of size did so because the script has ended."""
        if not task.finished or not self._spec.computes(task.planned):
            return False
        # The chief may be past its last step, too, and then does not save and stop but ends.
        return self._script_has_ended() or resizer.is_saving

    def _lost_with(self, task: JobTask) -> list[JobTask]:
        """Other tasks that ended with this one's executor or agent; Mesos is about to report each of them."""
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
        """Runs what is due.

        Raises:
            BadInputError: the job can never fit the existing agents.
        """
        now = self._clock()
        self._output.tick()
        match self._state.phase:
            case Phase.WAITING if (
                self._is_centrally_allocated and self._resizer is not None and not self._is_planned_ahead
            ):
                self._plan_ahead(self._resizer, now)
            case Phase.WAITING if not self.waits_for_allocation:
                self._planner.tick(now, connected=self._connection.connected)
            case Phase.RUNNING:
                self._end_attempt(self._tick_running(now))
            case Phase.STOPPING if not self._run.live():
                self._finish_stopping()

    def _plan_ahead(self, resizer: Resizer, now_s: float) -> None:
        found = self._planner.plan_ahead(now_s, self._competing_jobs())
        if found is not None:
            resizer.plan_ahead(*found)
            self._is_planned_ahead = True

    def _tick_running(self, now_s: float) -> AttemptEnd | None:
        failure = self._replacement.tick(now_s) if self._replacement.active else ""
        if not failure and self._resizer is not None:
            failure = self._resizer.tick(now_s, may_begin=not self._replacement.active)
            if self._script_has_ended():
                return AttemptEnd()
        return AttemptEnd(failure, counts=False) if failure else None

    def messages(self) -> list[Message]:
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    # Offers.

    @property
    def _launcher(self) -> WorkerReplacement | Resizer | None:
        if self._replacement.active:
            return self._replacement
        return self._resizer if self._resizer is not None and self._resizer.wants_offers else None

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        """Answers with what to launch on these offers.

        Raises:
            BadInputError: the job can never fit the existing agents.
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
        self._yields = False
        if self._launching is not None:
            self._launching.launched()
        else:
            self._observer.launched(self._run.members)

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        if self._launching is not None:
            self._launching.refused(error)
        elif isinstance(error, CallRefusedError):
            self._end_attempt(AttemptEnd(f"the launch was refused: {error}"))
        else:
            # Tasks that the master did launch are killed; it reports the others as unknown.
            self._end_attempt(AttemptEnd(f"the launch was interrupted: {error}", counts=False))

    # Worker replacement.

    def _is_replaceable(self, task: JobTask) -> bool:
        """Whether the other tasks can train on while this one is replaced."""
        return (
            task.planned.role == Role.WORKER
            and not self._spec.is_chief(task.planned)
            and not (self._spec.profile.synchronous or task.planned.is_plain)
            and self._state.stepped
            and task.reason != "REASON_AGENT_REMOVED"
        )

    def _may_lose_another(self) -> bool:
        return self._replacement.active or self._state.may_fail(self._spec.max_restarts)

    def _replace(self, task: JobTask, *, counts: bool) -> None:
        # Workers lost together count as one failure.
        if counts and not self._replacement.active:
            self._state.count_failure()
        failure = f"{task.failure}{task.output_location}"
        self._observer.restarting(failure, self._state.failures, self._spec.max_restarts)
        self._replacement.start(task, self._clock())

    # Restart policy.

    def _try_restart(self, end: AttemptEnd) -> bool:
        """Applies the restart policy; returns whether the job restarts. If not, sets the result's failure."""
        refusal = self._count_or_refuse_restart(end)
        if refusal:
            self.result.failure = refusal
            if end.task is not None and end.task.outcome is not None:
                self.result.failed_tail = without_noise(end.task.outcome.tail)
                self.result.last_words = end.task.script_failure
        return not refusal

    def _count_or_refuse_restart(self, end: AttemptEnd) -> str:
        limit = self._spec.max_restarts
        output = "" if end.task is None else end.task.output_location
        stale = end.task is not None and end.task.reason == STALE_OFFERS
        if self._spec.profile_is_kept and end.task is not None and end.task.found_other_model:
            return self._handle_other_model(end.task)
        if end.task is not None and end.task.found_other_layout:
            return self._handle_other_layout(end.task)
        if end.task is not None and end.task.cannot_split:
            return self._handle_unsplit(end.task)
        if stale or not end.counts:
            self._observer.notify(f"{end.reason}; starting again")
        elif end.task is not None and end.task.is_fenced:
            return f"{end.reason}; another job uses its checkpoint folder {self._spec.checkpoint_dir}{output}"
        elif why := self._check_deterministic_failure(end.task):
            return f"{end.reason}; {why}{output}"
        elif not self._state.may_fail(limit):
            bound = f"{limit} in a row without a newer checkpoint"
            return f"{end.reason}; no more restarts than {bound} (--max-restarts){output}"
        else:
            self._state.count_failure()
            self._observer.restarting(f"{end.reason}{output}", self._state.failures, limit)
        return ""

    def _handle_other_model(self, task: JobTask) -> str:
        """Handles a chief that found another model than the planned one; returns why the job fails, if it does."""
        script = self._spec.script
        if self._spec.plan is not None:
            return f"{task.failure}; the plan was made for another model than {script}'s, make one with --plan-only"
        if self.result.profile is None:
            # Its report was lost. The chief reads the model again, a limited number of times.
            if not self._state.may_fail(max(1, self._spec.max_restarts)):
                return f"{task.failure}; the model of {script} changed; give --refresh-profile{task.output_location}"
            self._state.count_failure()
        self._observer.notify(
            f"the model of {script} has changed although the script has not: it depends on something outside of the "
            "bundle; planning again"
        )
        return ""

    def _handle_unsplit(self, task: JobTask) -> str:
        """Handles workers that cannot share the batches; returns why the job fails, if it does."""
        spec, found = self._spec, self.result.profile
        why = found.why_not_split if found is not None and found.why_not_split else task.failure
        if spec.plan is not None or spec.planning.strategy != "auto" or (spec.worker_bounds[0] or 1) > 1:
            return (
                f"several workers cannot share the batches of {spec.script}: {why}; --strategy one trains it in one "
                "task, --strategy ps with parameter servers, asynchronously"
            )
        is_report_lost = found is None or not found.why_not_split
        if is_report_lost and not self._state.may_fail(max(1, spec.max_restarts)):
            return f"{task.failure}{task.output_location}"
        if is_report_lost:
            self._state.count_failure()
        self._observer.notify(f"several workers cannot share the batches of {spec.script}: {why}; planning again")
        return ""

    def _handle_other_layout(self, task: JobTask) -> str:
        """Handles checkpoints of a job with ps, or without, unlike this one; returns why the job fails, if it does."""
        spec, plain = self._spec, not task.planned.is_plain
        kind = f"a job {'without' if plain else 'with'} parameter servers"
        if spec.plan is not None:
            instead = "leave out --plan, or name another folder with --checkpoint-dir"
            return f"the checkpoints in {spec.checkpoint_dir} are of {kind}; {instead}"
        try:
            fewest, most = spec.worker_bounds
            is_elastic = spec.elastic is not None
            spec.planning.strategies(
                spec.profile, min_workers=fewest, max_workers=most, plain=plain, elastic=is_elastic
            )
        except BadInputError as error:
            return f"{task.name} cannot resume from {spec.checkpoint_dir}. {str(error).rstrip('.')}"
        if self._state.plain is not None:
            return f"{task.failure}; the checkpoints in {spec.checkpoint_dir} are of both kinds{task.output_location}"
        self._state.plain = plain
        self._observer.notify(f"the checkpoints in {spec.checkpoint_dir} are of {kind}; planning again")
        return ""

    def _check_deterministic_failure(self, task: JobTask | None) -> str:
        """Records the failure's signature; returns why the script would fail again, empty if it may not."""
        state = self._state
        failure = "" if task is None else task.failure_signature
        again = bool(failure) and failure == state.failure_signature and not state.has_progressed
        state.failure_signature = failure
        if task is None or not failure:
            return ""
        # Output before a signal is unrelated to the signal.
        output = task.outcome.tail if task.outcome and task.failed_by_itself else ""
        trained = state.result.steps is not None or state.result.checkpoint_step is not None
        return no_restart_reason(output, has_ever_trained=trained, stepped=state.stepped, again=again)

    # Teardown.

    def cancel(self) -> None:
        if self.result.succeeded or self.done:
            return
        self._state.cancelled = True
        self.result.failure = self.result.failure or CANCELLED
        self._stop(will_restart=False)

    def _end_attempt(self, end: AttemptEnd | None) -> None:
        if end is None:
            return
        self.result.succeeded = not end.reason
        self._stop(will_restart=bool(end.reason) and self._try_restart(end))

    def _stop(self, *, will_restart: bool) -> None:
        self._state.phase = Phase.STOPPING
        self._state.will_restart = will_restart
        self._planner.abandon()
        self._replacement.clear()
        if self._resizer is not None:
            self._resizer.stop()
        self._run.stop()

    def _finish_stopping(self) -> None:
        if self._state.will_restart:
            self._run.clear()
            found = self.result.profile
            if found is not None and found != self._state.profile:
                self._state.profile, self._run.plan = found, None
            if self._spec.elastic is None and self.result.checkpoint_step is not None and self._run.plan is not None:
                # Checkpoints of one kind cannot be restored by the other.
                self._state.plain = self._run.plan.is_plain
            if self._effective_spec() != self._spec:
                self._build_components()
            self._state.phase = Phase.WAITING
            self._planner.wait(self._clock())
            return
        self._report_lost_output()
        self._state.phase = Phase.DONE

    def _report_lost_output(self) -> None:
        for task in self._run.members:
            if not task.logs_complete and self._spec.is_chief(task.planned) and task.outcome is not None:
                lost = f"a part of {task.name}'s output was lost in transit"
                if task.adopted:
                    lost = f"the output that {task.name} wrote while no service was running is missing here"
                self._observer.notify(f"{lost}; it is in {task.outcome.sandbox} on {task.node}")


@dataclass(frozen=True)
class _Lost:
    """A lost worker.

    Attributes:
        deadline_s: time limit for its agent's offer.
        replacement: the task being launched in its place; None before.
    """

    task: JobTask
    deadline_s: float
    replacement: JobTask | None = None


class WorkerReplacement:
    """Replaces lost workers of an asynchronous job one by one, each at its old address."""

    def __init__(self, spec: JobSpec, run: JobRun, observer: JobObserver) -> None:
        self._spec = spec
        self._run = run
        self._observer = observer
        self._lost: dict[str, _Lost] = {}

    @property
    def active(self) -> bool:
        return bool(self._lost)

    def clear(self) -> None:
        self._lost.clear()

    def start(self, task: JobTask, now_s: float) -> None:
        """Starts waiting for the agent of a lost worker to offer its resources again."""
        self._lost[task.name] = _Lost(task, now_s + REPLACEMENT_TIMEOUT_S)

    def tick(self, now_s: float) -> str:
        for lost in self._lost.values():
            if now_s > lost.deadline_s:
                waited = f"within {REPLACEMENT_TIMEOUT_S:g} s"
                return f"{lost.task.failure}; its agent did not offer its resources again {waited}"
        return ""

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> Launch | Decline:
        """Relaunches lost workers where possible."""
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
        for lost in self._being_launched:
            assert lost.replacement is not None
            del self._lost[lost.task.name]
            self._observer.launched([lost.replacement])

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """Waits for offers again; tasks that the master may have launched are killed, being unknown to the job."""
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
