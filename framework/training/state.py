"""State of a training job, and its JSON form, from which the next service resumes the job.

Not stored is what can be learned again: progress of a running job, offers, speeds. The amount of output received is
stored with the output and only read here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.mesos.tasks import TaskState, executor_of
from framework.scheduler.job import JobOutcome
from framework.scheduler.records import JobState
from framework.training.spec import JobResult, JobSpec, JobTask, Resize
from solver import NodeClass, Plan

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION: Literal[1] = 1
_TRANSIENT = ("step", "loss", "samples_per_s", "received", "adopted")


class Phase(enum.StrEnum):
    WAITING = "waiting"
    """Waiting for offers."""
    RUNNING = "running"
    """All tasks were launched."""
    STOPPING = "stopping"
    """Stopping the remaining tasks, to restart or to finish."""
    DONE = "done"


@dataclass
class JobRun:
    """The current attempt, shared by all components that start and stop tasks of the job.

    Attributes:
        attempt: number of earlier starts, at any size.
        serial: number of the next launch, part of its task ids.
        plan: the plan followed; None before the first.
        tasks: id -> task, including tasks outside of the attempt (`JobTask.member`).
        used_ports: ports that failed before, used again only if there is no other.
        executors: id -> Mesos' ExecutorInfo of shared executors; Mesos requires the same one in each later launch.
    """

    attempt: int = 0
    serial: int = 0
    plan: Plan | None = None
    tasks: dict[str, JobTask] = field(default_factory=dict)
    cluster: dict[str, list[str]] = field(default_factory=dict)
    used_ports: set[int] = field(default_factory=set)
    executors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def members(self) -> list[JobTask]:
        """The tasks of the attempt, in the order of the plan."""
        return [task for task in self.tasks.values() if task.member]

    def live(self) -> dict[str, str]:
        """Task id -> agent id of all tasks that have not ended."""
        return {task.task_id: task.agent_id for task in self.tasks.values() if not task.state.is_terminal()}

    def stop(self) -> None:
        for task_id in self.live():
            self.tasks[task_id].stop_requested = True

    def forget_unlaunched(self, launched: Collection[str]) -> None:
        """Marks live tasks other than these as lost: they were never launched, or ended unobserved."""
        for task_id in self.live().keys() - set(launched):
            task = self.tasks[task_id]
            task.state, task.message = TaskState.LOST, "it was never launched, or ended while no service was running"
            if not task.member:
                del self.tasks[task_id]

    def script_has_ended(self, spec: JobSpec) -> bool:
        """Whether all tasks that run the script have succeeded."""
        return all(task.finished for task in self.members if spec.computes(task.planned))

    def clear(self) -> None:
        self.attempt += 1
        for task in self.members:
            task.member = False
        self.tasks = {}
        self.executors = {}

    def sort(self) -> None:
        """Sorts the tasks of the attempt into the plan's order, with all others after them."""
        assert self.plan is not None
        place = {planned.name: number for number, planned in enumerate(self.plan.tasks)}
        self.tasks = dict(
            sorted(self.tasks.items(), key=lambda item: place[item[1].name] if item[1].member else len(place))
        )

    def add(self, tasks: Iterable[JobTask], operations: Iterable[Mapping[str, Any]]) -> None:
        self.tasks.update({task.task_id: task for task in tasks})
        self.serial += 1
        for operation in operations:
            for info in operation["launch"]["task_infos"]:
                self.executors[executor_of(info)] = info["executor"]
        # An executor with its task's id accepts no other task.
        shared = {task.executor_id for task in self.tasks.values() if not task.state.is_terminal()} - self.tasks.keys()
        self.executors = {name: info for name, info in self.executors.items() if name in shared}


@dataclass(frozen=True)
class ElasticState:
    """Knowledge of an elastic job that cannot be measured again.

    Attributes:
        nodes: the machines that the job was planned for.
        saved_step: the last checkpoint; None before the first.
        total_steps: number of steps that the script trains; None until it is reported.
        cost_s: cost of a change in seconds.
        is_frozen: whether the script cannot resume, so that the job keeps its size.
    """

    nodes: tuple[NodeClass, ...]
    saved_step: int | None
    total_steps: int | None
    cost_s: float
    is_frozen: bool


@dataclass
class TrainingState:
    """Full state of a training job's state machine.

    Attributes:
        will_restart: whether it restarts when all tasks have stopped.
        cancelled: whether its end was requested.
        stepped: whether the attempt has made a step.
        failure_signature: signature of the previous failure, if that may be the script's fault.
        failures: number of failures since the last progress.
        failed_step: the newest checkpoint at the last of them; None if there was none.
        elastic: knowledge of an elastic job; None for any other.
        profile: the planned model, if the chief has found another than the submitted one.
        plain: whether it has no parameter servers, as the job of its checkpoints; None while there are none.
    """

    run: JobRun = field(default_factory=JobRun)
    result: JobResult = field(default_factory=JobResult)
    phase: Phase = Phase.WAITING
    will_restart: bool = False
    cancelled: bool = False
    stepped: bool = False
    failure_signature: str = ""
    failures: int = 0
    failed_step: int | None = None
    elastic: ElasticState | None = None
    profile: ModelProfile | None = None
    plain: bool | None = None

    def may_fail(self, limit: int) -> bool:
        """Whether one more failure is within `limit`, the maximum without a newer checkpoint in between."""
        return self._failures_in_a_row() < limit

    def count_failure(self) -> None:
        self.failures = self._failures_in_a_row() + 1
        self.failed_step = self.result.checkpoint_step
        self.result.restarts += 1

    @property
    def has_progressed(self) -> bool:
        """Whether there is a newer checkpoint than at the last failure."""
        saved = self.result.checkpoint_step
        return saved is not None and (self.failed_step is None or saved > self.failed_step)

    def _failures_in_a_row(self) -> int:
        # A long job survives many lost machines; a faulty one makes no progress.
        return 0 if self.has_progressed else self.failures

    def outcome(self) -> JobOutcome:
        state = JobState.KILLED if self.cancelled else JobState.FAILED
        if self.result.succeeded:
            state = JobState.FINISHED
        return JobOutcome(state, self.result.failure, self.result.to_json())


@dataclass(frozen=True)
class _StoredResult:
    succeeded: bool
    restarts: int
    steps: int | None
    loss: float | None
    addresses: dict[str, str]
    placement: dict[str, str]
    failure: str
    failed_tail: str
    resizes: list[Resize]
    last_words: str
    checkpoint_step: int | None


@dataclass(frozen=True)
class _Stored:
    version: Literal[1]
    checkpoint_dir: str
    phase: Phase
    comes_back: bool
    cancelled: bool
    stepped: bool
    early_failure: str
    attempt: int
    serial: int
    plan: dict[str, Any] | None
    tasks: list[JobTask]
    cluster: dict[str, list[str]]
    used_ports: list[int]
    result: _StoredResult
    elastic: ElasticState | None
    failures: int
    failed_step: int | None
    executors: dict[str, dict[str, Any]]
    profile: dict[str, Any] | None
    plain: bool | None
    received: dict[str, dict[str, int]] = field(default_factory=dict)


class StateWriter:
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._plan: Plan | None = None
        self._plan_values: dict[str, Any] | None = None

    def write(self, state: TrainingState) -> dict[str, Any]:
        """The state as JSON values, which must not be modified; equal if nothing relevant has changed."""
        run = state.run
        return {
            "version": VERSION,
            "checkpoint_dir": self._spec.checkpoint_dir,
            "phase": str(state.phase),
            "comes_back": state.will_restart,
            "cancelled": state.cancelled,
            "stepped": state.stepped,
            "early_failure": state.failure_signature,
            "failures": state.failures,
            "failed_step": state.failed_step,
            "profile": None if state.profile is None else state.profile.to_json(),
            "plain": state.plain,
            "attempt": run.attempt,
            "serial": run.serial,
            "plan": self._written_plan(run.plan),
            "tasks": [_task_values(task) for task in run.tasks.values()],
            "cluster": {role: list(addresses) for role, addresses in run.cluster.items()},
            "used_ports": sorted(run.used_ports),
            "executors": dict(run.executors),
            "result": _result_values(state),
            "elastic": None if state.elastic is None else _elastic_values(state.elastic),
        }

    def _written_plan(self, plan: Plan | None) -> dict[str, Any] | None:
        # Plans are large and change seldom.
        if plan is not self._plan:
            self._plan = plan
            self._plan_values = None if plan is None else plan.to_json()
            if plan is not None and self._plan_values is not None and plan.profile == self._spec.profile:
                del self._plan_values["profile"]
        return self._plan_values


@functools.cache
def _stored() -> TypeAdapter[_Stored]:
    from pydantic import TypeAdapter

    return TypeAdapter(_Stored)


def read_state(values: Mapping[str, Any], spec: JobSpec) -> TrainingState:
    """Decodes a result of `StateWriter.write`.

    The values also contain the amounts of output stored, as `received`: task -> stream -> bytes.

    Raises:
        BadInputError: they are malformed or of another version.
    """
    # Imported late: only a restarted service needs pydantic.
    from pydantic import ValidationError

    try:
        stored = _stored().validate_python(dict(values))
        profile = None if stored.profile is None else ModelProfile.from_json(stored.profile)
        spec = spec if profile is None else spec.with_profile(profile)
        plan = None if stored.plan is None else Plan.from_json({"profile": spec.profile.to_json(), **stored.plan})
    except (ValidationError, BadInputError) as error:
        raise BadInputError(
            f"The stored state of job {spec.job_id} was written by another version of Dike and cannot be read, so its "
            "tasks are stopped; submit it again with the same --checkpoint-dir to resume from its checkpoints "
            f"({spec.checkpoint_dir})."
        ) from error
    run = JobRun(
        attempt=stored.attempt,
        serial=stored.serial,
        plan=plan,
        tasks={
            task.task_id: dataclasses.replace(task, adopted=True, received=stored.received.get(task.task_id, {}))
            for task in stored.tasks
        },
        cluster=stored.cluster,
        used_ports=set(stored.used_ports),
        executors=stored.executors,
    )
    parts = {entry.name: getattr(stored.result, entry.name) for entry in dataclasses.fields(_StoredResult)}
    result = JobResult(**parts, plan=plan if run.serial else None, checkpoint_dir=spec.checkpoint_dir)
    return TrainingState(
        run=run,
        result=result,
        phase=stored.phase,
        will_restart=stored.comes_back,
        cancelled=stored.cancelled,
        stepped=stored.stepped,
        failure_signature=stored.early_failure,
        failures=stored.failures,
        failed_step=stored.failed_step,
        elastic=stored.elastic,
        profile=profile,
        plain=stored.plain,
    )


def stored_checkpoint_dir(values: Mapping[str, Any] | None) -> str | None:
    found = None if values is None else values.get("checkpoint_dir")
    return found if isinstance(found, str) else None


def _task_values(task: JobTask) -> dict[str, Any]:
    # `dataclasses.asdict` takes twenty times as long, and this is called every second for each task.
    values = {name: value for name, value in vars(task).items() if name not in _TRANSIENT}
    values["planned"] = dict(vars(task.planned))
    values["gpu_devices"] = list(task.gpu_devices)
    values["state"] = str(task.state)
    values["outcome"] = None if task.outcome is None else dataclasses.asdict(task.outcome)
    return values


def _result_values(state: TrainingState) -> dict[str, Any]:
    result = state.result
    # While it runs these change with each report, and the next report restores them.
    settled = state.phase is not Phase.RUNNING
    loss = result.loss if settled and result.loss is not None and math.isfinite(result.loss) else None
    return {
        "succeeded": result.succeeded,
        "restarts": result.restarts,
        "checkpoint_step": result.checkpoint_step,
        "steps": result.steps if settled else None,
        "loss": loss,
        "addresses": dict(result.addresses),
        "placement": dict(result.placement),
        "failure": result.failure,
        "failed_tail": result.failed_tail,
        "last_words": result.last_words,
        "resizes": [dataclasses.asdict(resize) for resize in result.resizes],
    }


def _elastic_values(elastic: ElasticState) -> dict[str, Any]:
    return {**vars(elastic), "nodes": [dict(vars(node)) for node in elastic.nodes]}
