"""Data of a training job: its specification, tasks and result."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import BadInputError
from dike.process import EXIT_CODE_CANNOT_SPLIT, EXIT_CODE_FENCED, EXIT_CODE_OTHER_LAYOUT, EXIT_CODE_OTHER_MODEL
from dike.profile import ModelProfile
from dike.task import Role, is_chief
from executor.messages import Outcome
from executor.mirror import RunFolder
from framework.mesos.containers import Container
from framework.mesos.tasks import TaskState, ended_with_executor, why_ended
from framework.project.failure_summary import error_summary, failure_signature_of
from framework.training.options import TrainingOptions
from solver import Plan, PlannedTask
from solver.settings import GPUS_PER_WORKER, PlanSettings

logger = logging.getLogger(__name__)

MORE_MEMORY_HINT = "--task-mem MIB gives each task at least that"
MAX_VARIABLES = 20_000
"""Limit for submitted models, as planning a larger one would block a service for too long."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(TrainingOptions):
    """A training job as its controller runs it: the user's options, and what the command or the service adds.

    Attributes:
        job_id: unique identifier, part of its tasks' names.
        script, arguments: path of the script inside its bundle, and its arguments.
        profile_is_kept: whether the profile was read for an earlier command, so that the chief has to compare it.
        checkpoint_dir: folder for checkpoints, the same path on all agents.
        plain: whether it has no parameter servers, as the job of its checkpoints; None while there are none.
        plan: the plan to follow; None to make one.
        container: container of the tasks; None for the agent's own file system.
        plan_only: whether the job ends with its plan, without a launch.
        hand_out_gpus: whether Dike assigns GPU devices, for agents that neither isolate nor announce them.
        folder: how executors that do not see the checkpoint folder reach it; None if all see it.
        stream_all_logs: whether every task streams its output, not only the chief.
        preload: modules that the zygotes of its tasks may import in advance; None for those its API needs.
        checkpoint_owner: unique owner of the checkpoint folder, for fencing; empty for `job_id`.
    """

    job_id: str
    script: str
    arguments: tuple[str, ...]
    profile: ModelProfile
    checkpoint_dir: str
    bundle_url: str
    python: str
    planning: PlanSettings = field(default_factory=PlanSettings)
    plain: bool | None = None
    plan: Plan | None = None
    container: Container | None = None
    plan_only: bool = False
    hand_out_gpus: bool = False
    folder: RunFolder | None = None
    stream_all_logs: bool = False
    preload: tuple[str, ...] | None = None
    checkpoint_owner: str = ""
    profile_is_kept: bool = False

    @property
    def replicas(self) -> int | None:
        """Gradients in one step of a synchronous elastic job; None if that is one per worker."""
        return self.elastic[1] if self.elastic is not None and self.profile.synchronous else None

    @property
    def worker_bounds(self) -> tuple[int | None, int | None]:
        """Minimum and maximum number of workers; None for no limit."""
        return (self.min_workers, self.max_workers) if self.elastic is None else self.elastic

    def check_tasks(self) -> None:
        """Raises `BadInputError` if the script cannot train with the requested tasks."""
        if self.plan is None:
            self.planning.check_tasks(self.profile, self.min_workers, self.max_workers, elastic=self.elastic)

    def with_profile(self, profile: ModelProfile) -> JobSpec:
        return dataclasses.replace(self, profile=profile, profile_is_kept=False)

    def is_chief(self, planned: PlannedTask) -> bool:
        """Whether this task's output and progress are the job's."""
        return is_chief(self.profile.api, planned.role, planned.index, is_plain=planned.is_plain)

    def streams(self, planned: PlannedTask) -> bool:
        """Whether this task's output is sent to the scheduler."""
        return self.stream_all_logs or self.is_chief(planned)

    def computes(self, planned: PlannedTask) -> bool:
        """Whether this task runs the user's script, and so may end by itself."""
        has_script = planned.is_plain or not self.profile.api.has_separate_chief
        return self.is_chief(planned) or (planned.role == Role.WORKER and has_script)


def check_can_run(plan: Plan) -> None:
    """Refuses a plan that no job can follow, whatever the agents have.

    Raises:
        BadInputError: a task has GPUs that it cannot use, or the plan has variables that the model has not.
    """
    for task in plan.tasks:
        most = GPUS_PER_WORKER if task.role == Role.WORKER else 0
        if task.gpus > most and not (task.is_plain and not plan.profile.is_measurable):
            raise BadInputError(
                f"This plan cannot be run: {task.name} has {task.gpus} GPU{'s' if task.gpus > 1 else ''} in it and can "
                f"use {most}; make one with dike plan without --gpus-per-worker and --gpus-per-task."
            )
    if unknown := plan.variables.keys() - {variable.name for variable in plan.profile.variables}:
        raise BadInputError(
            f"This plan cannot be run: its model has no variable '{min(unknown)}'; make one for this model."
        )


@dataclass
class JobTask:
    """One Mesos task of a job.

    Attributes:
        agent_id, node: where it runs, for Mesos and for people.
        host, port: address of its TensorFlow server.
        gpu_devices: indices of its devices; empty if none.
        state: the last one reported.
        message: text that Mesos or the executor sent with it.
        reason: Mesos' reason, such as `REASON_AGENT_REMOVED`; empty if none was given.
        executor_seen: whether its executor ever reported.
        stop_requested: whether the job has requested its end.
        outcome: how its process ended; None while it runs, or if unknown.
        step, loss, samples_per_s: the last progress it reported.
        received: stream -> bytes of output received, or skipped.
        member: whether it is part of the current attempt; False while it waits to join.
        finished: whether its process has succeeded.
        adopted: whether an earlier service started it.
        executor_id: Mesos' id of its executor, which other tasks of the job on its agent may share; defaults to the
            task's own id.
        joined: whether it was launched into an existing executor.
        hosts_executor: whether its planned resources include those of its executor.
    """

    task_id: str
    planned: PlannedTask
    agent_id: str
    node: str
    host: str
    port: int
    gpu_devices: tuple[int, ...] = ()
    state: TaskState = TaskState.STAGING
    message: str = ""
    reason: str = ""
    executor_seen: bool = False
    stop_requested: bool = False
    outcome: Outcome | None = None
    step: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    received: dict[str, int] = field(default_factory=dict)
    member: bool = True
    finished: bool = False
    adopted: bool = False
    executor_id: str = ""
    joined: bool = False
    hosts_executor: bool = True

    def __post_init__(self) -> None:
        self.executor_id = self.executor_id or self.task_id

    @property
    def name(self) -> str:
        return f"{self.planned.role}:{self.planned.index}"

    @property
    def shown_state(self) -> str:
        """Its state for people: a task killed on request has "ended"."""
        return "ended" if self._was_stopped else str(self.state)

    @property
    def shown_verb(self) -> str:
        return "ended" if self._was_stopped else self.state.verb

    @property
    def _was_stopped(self) -> bool:
        return self.stop_requested and self.state is TaskState.KILLED

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def logs_complete(self) -> bool:
        """Whether all known output of its process has been received."""
        if self.outcome is None:
            return True
        return all(self.received.get(stream, 0) >= size for stream, size in self.outcome.log_bytes.items())

    @property
    def launch_was_interrupted(self) -> bool:
        """Whether an earlier service ended while launching it or serving its bundle."""
        return self.adopted and self.state in (TaskState.STAGING, TaskState.STARTING)

    @property
    def is_lost(self) -> bool:
        """Whether it may have ended with its executor or agent; `reason` says which."""
        return self.state in (TaskState.FAILED, TaskState.LOST)

    @property
    def executor_has_ended(self) -> bool:
        return ended_with_executor(self.state, self.reason)

    @property
    def agent_has_gone(self) -> bool:
        """Whether it ended with its agent, and so with all tasks there, not merely before it began."""
        return self.is_lost and self.executor_seen and self.reason.startswith("REASON_AGENT_")

    @property
    def missed_executor(self) -> bool:
        """Whether the executor that it was to join ended before; not a failure.

        A master that has seen that end tries to start an executor, for whose own resources the launch has no room.
        """
        return self.joined and not self.executor_seen and (self.executor_has_ended or self.state is TaskState.ERROR)

    @property
    def is_fenced(self) -> bool:
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_FENCED

    @property
    def found_other_model(self) -> bool:
        """Whether it ended because the script's model is not the planned one."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_OTHER_MODEL

    @property
    def found_other_layout(self) -> bool:
        """Whether it ended because the checkpoints are of a job with ps and this one has none, or the reverse."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_OTHER_LAYOUT

    @property
    def cannot_split(self) -> bool:
        """Whether it ended because several workers cannot share the batches of the model."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_CANNOT_SPLIT

    @property
    def failure_signature(self) -> str:
        """Signature of a failure of the script or the installation; empty if it may be transient."""
        if self.outcome is not None:
            return (
                f"{self.outcome.exit_code} {failure_signature_of(self.outcome.tail)}" if self.failed_by_itself else ""
            )
        return "no executor" if self.state is TaskState.FAILED and not self.executor_seen and not self.joined else ""

    @property
    def failed_by_itself(self) -> bool:
        """Whether its process failed without being asked to stop."""
        return self.outcome is not None and (self.outcome.exit_code or 0) > 0

    @property
    def failure(self) -> str:
        """Why it ended, in one sentence that names task and agent; `output_location` may follow."""
        seen = self.executor_seen or self.joined
        why = why_ended(self.state, self.message, self.reason, executor_seen=seen, more_memory=MORE_MEMORY_HINT)
        return f"{self.name} {self.state.verb} on {self.node}: {why}"

    @property
    def script_failure(self) -> str:
        """The error with which its script failed; empty if it was stopped, or ended by Dike."""
        # Output before a signal is unrelated to the signal.
        is_of_script = self.failed_by_itself and not self.cannot_split
        return error_summary(self.outcome.tail) if self.outcome and is_of_script else ""

    @property
    def output_location(self) -> str:
        """Where its output is stored, as the end of a sentence; empty if it never started."""
        return f"; its output is in {self.outcome.sandbox} on {self.node}" if self.outcome else ""


@dataclass(frozen=True)
class Resize:
    """One change of a job's size.

    Attributes:
        step: the saved step.
        cost_s: seconds from the chief's stop to the first step after it.
    """

    from_workers: int
    from_ps: int
    to_workers: int
    to_ps: int
    reason: str
    step: int
    cost_s: float


@dataclass
class JobResult:
    """Result of a job, as printed by `dike run --format json`.

    Attributes:
        succeeded: whether the script ran to its end.
        restarts: number of failures survived.
        plan: the last plan followed; None if none was made.
        addresses: task -> `host:port` of its TensorFlow server in the last attempt.
        placement: variable -> device on which the chief found it.
        steps, loss: the last progress that the chief reported.
        checkpoint_dir, checkpoint_step: the checkpoint folder, and the newest checkpoint's step; None before the first.
        failed_tail: the end of the failed task's output.
        last_words: the script's error in there; empty if the script was stopped.
        profile: the model that the chief has found, if it differs from the planned one.
    """

    succeeded: bool = False
    restarts: int = 0
    plan: Plan | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    placement: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    loss: float | None = None
    checkpoint_dir: str = ""
    checkpoint_step: int | None = None
    failure: str = ""
    failed_tail: str = ""
    resizes: list[Resize] = field(default_factory=list)
    last_words: str = ""
    profile: ModelProfile | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "succeeded": self.succeeded,
            "restarts": self.restarts,
            "steps": self.steps,
            "loss": self.loss if self.loss is None or math.isfinite(self.loss) else str(self.loss),
            "checkpoint_dir": self.checkpoint_dir,
            "checkpoint_step": self.checkpoint_step,
            "failure": self.failure,
            "failed_tail": self.failed_tail,
            "last_words": self.last_words,
            "addresses": self.addresses,
            "placement": self.placement,
            "resizes": [dataclasses.asdict(resize) for resize in self.resizes],
            "plan": self.plan.to_json() if self.plan else None,
        }
