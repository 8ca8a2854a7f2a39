"""A training job's data: what was asked for, its tasks, how it ended."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import BadInputError
from dike.process import EXIT_CODE_FENCED, EXIT_CODE_OTHER_LAYOUT, EXIT_CODE_OTHER_MODEL
from dike.profile import ModelProfile
from dike.task import Role, is_chief
from executor.messages import Outcome
from framework.mesos.containers import Container
from framework.mesos.tasks import TaskState, ended_with_executor, why_ended
from framework.project.last_words import error_words, same_again
from framework.training.options import TrainingOptions
from solver import Plan, PlannedTask
from solver.plain import can_share
from solver.settings import GPUS_PER_WORKER, PlanSettings

logger = logging.getLogger(__name__)

MORE_MEMORY = "--task-mem MIB gives each task at least that"
MAX_VARIABLES = 20_000
"""Of a model that somebody has sent: planning more takes longer than a service can wait for it."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(TrainingOptions):
    """A training job as its controller runs it: the user's options, and what the command or the service adds.

    Attributes:
        job_id: unique identifier, part of its tasks' names.
        script, arguments: path of the script inside its bundle, and its arguments.
        profile: the model's numbers.
        profile_is_kept: whether they were read for an earlier command, so that the chief has to compare them.
        checkpoint_dir: where checkpoints go, the same path on all agents.
        planning: how it is planned.
        plain: whether it is one plain task without parameter servers, as its checkpoints are; None where there are
            none yet.
        plan: a plan to follow; None to make one.
        bundle_url: where executors fetch the script's folder.
        python: interpreter that runs the executor on the agents.
        container: what tasks run in; None for the agent's own file system.
        plan_only: whether the job ends with its plan, without a launch.
        hand_out_gpus: whether the framework assigns GPU devices, for agents that neither isolate nor announce them.
        stream_all_logs: whether every task's output is sent to the framework, not only the chief's.
        preload: modules that the zygotes of its tasks import before its script does; None for what its API needs.
        claims_as: what its chiefs claim the checkpoint folder as, never another job's; empty for `job_id`.
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
    stream_all_logs: bool = False
    preload: tuple[str, ...] | None = None
    claims_as: str = ""
    profile_is_kept: bool = False

    @property
    def replicas(self) -> int | None:
        """Gradients that make one step of a synchronous elastic job; None where that is one of each worker."""
        return self.elastic[1] if self.elastic is not None and self.profile.synchronous else None

    def with_profile(self, profile: ModelProfile) -> JobSpec:
        """The same job, of the model that its chief has read."""
        return dataclasses.replace(self, profile=profile, profile_is_kept=False)

    def is_chief(self, planned: PlannedTask) -> bool:
        """Whether this task's output and progress are the job's."""
        return planned.is_plain or is_chief(self.profile.api, planned.role, planned.index)

    def streams(self, planned: PlannedTask) -> bool:
        """Whether this task's output is sent to us."""
        return self.stream_all_logs or self.is_chief(planned)

    def computes(self, planned: PlannedTask) -> bool:
        """Whether this task runs the user's script, and so may end by itself."""
        return self.is_chief(planned) or (planned.role == Role.WORKER and not self.profile.api.has_separate_chief)


def check_can_run(plan: Plan) -> None:
    """Refuses a plan that no job can follow, whatever the agents have.

    Raises:
        BadInputError: if a task has GPUs that it cannot use, or variables are planned that the model does not have.
    """
    for task in plan.tasks:
        most = GPUS_PER_WORKER if task.role == Role.WORKER else 0
        if task.gpus > most and not (task.is_plain and can_share(plan.profile, task.gpus)):
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
        task_id: Mesos' id of it.
        planned: the plan's line it carries out.
        agent_id, node: where it runs, for Mesos and for people.
        host, port: where its TensorFlow server listens.
        gpu_devices: device indices it was given; empty if none.
        state: the last one reported.
        message: what Mesos or the executor said with it.
        reason: Mesos' reason, such as `REASON_AGENT_REMOVED`; empty if none was given.
        executor_seen: whether its executor ever reported.
        stop_requested: whether we asked for its end.
        outcome: how its process ended; None while it runs, or when nobody could tell.
        step, loss, samples_per_s: the last progress it reported.
        received: stream -> bytes of output received here, or given up.
        member: whether it is part of the job's current attempt; one that waits to join is not yet.
        finished: whether its process has ended well by itself.
        adopted: whether it was started by a service before this one.
        executor_id: Mesos' id of its executor, which other tasks of the job on its agent may share; where none is
            given, the task's own id.
        joined: whether it was launched into an executor that was there already.
        hosts_executor: whether what its executor has for itself is a part of what was planned for this task.
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
        """Role and index, such as `worker:0`."""
        return f"{self.planned.role}:{self.planned.index}"

    @property
    def shown_state(self) -> str:
        """Its state for people: a task that was ended because its job was over has not been "killed"."""
        return "ended" if self._was_ended else str(self.state)

    @property
    def shown_verb(self) -> str:
        """What has happened to it, after its name in a sentence for people; see `shown_state`."""
        return "ended" if self._was_ended else self.state.verb

    @property
    def _was_ended(self) -> bool:
        return self.stop_requested and self.state is TaskState.KILLED

    @property
    def address(self) -> str:
        """`host:port` of its TensorFlow server."""
        return f"{self.host}:{self.port}"

    @property
    def logs_complete(self) -> bool:
        """Whether everything its process wrote, as far as is known, has been received."""
        if self.outcome is None:
            return True
        return all(self.received.get(stream, 0) >= size for stream, size in self.outcome.log_bytes.items())

    @property
    def was_left_behind(self) -> bool:
        """Whether a service before this one was about to launch it, or ended before its script could be fetched."""
        return self.adopted and self.state in (TaskState.STAGING, TaskState.STARTING)

    @property
    def is_lost(self) -> bool:
        """Whether it ended by the end of something around it, if `reason` says so."""
        return self.state in (TaskState.FAILED, TaskState.LOST)

    @property
    def executor_has_ended(self) -> bool:
        """Whether it ended with its executor, and so with all tasks of that."""
        return ended_with_executor(self.state, self.reason)

    @property
    def agent_has_gone(self) -> bool:
        """Whether it ended with its agent, and so with all tasks there; one that had not begun may have missed it."""
        return self.is_lost and self.executor_seen and self.reason.startswith("REASON_AGENT_")

    @property
    def missed_executor(self) -> bool:
        """Whether the executor that it was to join had ended before it came there: nobody's failure.

        A master that knows of that end wants to start an executor, and has no room for what that would have for itself.
        """
        return self.joined and not self.executor_seen and (self.executor_has_ended or self.state is TaskState.ERROR)

    @property
    def is_fenced(self) -> bool:
        """Whether it ended because another process uses its checkpoint folder."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_FENCED

    @property
    def found_other_model(self) -> bool:
        """Whether it ended because the script's model is not the one that was planned for."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_OTHER_MODEL

    @property
    def found_other_layout(self) -> bool:
        """Whether it ended because its checkpoint folder is that of a job with parameter servers, or of one without."""
        return self.outcome is not None and self.outcome.exit_code == EXIT_CODE_OTHER_LAYOUT

    @property
    def own_failure(self) -> str:
        """What kind of failure this is, if it is the script's or the installation's; empty if it may be chance."""
        if self.outcome is not None:
            return f"{self.outcome.exit_code} {same_again(self.outcome.tail)}" if self.ended_itself else ""
        return "no executor" if self.state is TaskState.FAILED and not self.executor_seen and not self.joined else ""

    @property
    def ended_itself(self) -> bool:
        """Whether its process has failed without anybody's doing."""
        return self.outcome is not None and (self.outcome.exit_code or 0) > 0

    @property
    def failure(self) -> str:
        """Why it ended, in one sentence that names task and agent; `place_of_output` may follow."""
        seen = self.executor_seen or self.joined
        why = why_ended(self.state, self.message, self.reason, executor_seen=seen, more_memory=MORE_MEMORY)
        return f"{self.name} {self.state.verb} on {self.node}: {why}"

    @property
    def last_words(self) -> str:
        """The error that its script has ended with; empty if it has not ended by itself."""
        # What was written last before a signal has nothing to do with it.
        return error_words(self.outcome.tail) if self.outcome and self.ended_itself else ""

    @property
    def place_of_output(self) -> str:
        """Where all that it wrote is, as the end of a sentence; empty if it never started."""
        return f"; its output is in {self.outcome.sandbox} on {self.node}" if self.outcome else ""


@dataclass(frozen=True)
class Resize:
    """One change of a job's size.

    Attributes:
        from_workers, from_ps: counts before.
        to_workers, to_ps: counts after.
        reason: why.
        step: the step that was saved.
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
    """What became of a job; what `dike run --format json` prints.

    Attributes:
        succeeded: whether the script ran to its end.
        restarts: how many failures were survived.
        plan: the last plan followed; None if none was made.
        addresses: task -> `host:port` of its TensorFlow server in the last attempt.
        placement: variable -> device it was really found on, as the chief reported.
        steps, loss: the last progress the chief reported.
        checkpoint_dir, checkpoint_step: where the checkpoints are, and the newest one's step; None before the first.
        failure: why it failed; empty if it did not.
        failed_tail: the end of the failed task's output.
        last_words: the error in there that the script has ended with; empty if it has not ended by itself.
        profile: the model that the chief has found, where it was another than the planned one; None where it was not.
        resizes: changes of size, in their order.
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
        """The result as JSON values."""
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
