"""Records that a service stores of its jobs and tasks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from framework.scheduler.amounts import Amounts, missing
from framework.scheduler.queue_options import Priority

NEWEST = "last"
"""Name by which commands refer to a user's newest job."""
INTENDED = "intended"
"""State of a task that has been stored, with no update from Mesos yet."""


class JobKind(enum.StrEnum):
    TRAINING = "training"
    SEARCH = "search"


class JobState(enum.StrEnum):
    QUEUED = "queued"
    """No task runs: it waits for other jobs or for resources, for the first time or again."""
    RUNNING = "running"
    """At least one task has been launched and has not ended."""
    ENDING = "ending"
    """Its end was requested; tasks may still run."""
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"

    def has_ended(self) -> bool:
        """Whether it will not run again, unless it is a search that a user resumes."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.KILLED)

    @property
    def verb(self) -> str:
        """The state as a predicate, to follow the job's name in a sentence."""
        if self is JobState.KILLED:
            return f"was {self}"
        return str(self) if self.has_ended() else f"is {self}"


@dataclass(frozen=True)
class JobRecord:
    """A job in the database.

    Attributes:
        id: unique, part of its tasks' ids; its name, or `new_job_id` for a training job without one.
        kind: training or search.
        user: its owner.
        script: name of the script inside its bundle.
        request: the request, as JSON values (`framework.service.requests`).
        constraints: which agents it may use, in the form `rack:IN:r1,r2` (`framework.scheduler.constraints`).
        state: its state.
        submitted_s, started_s, ended_s: seconds since the epoch; None if in the future.
        kill_requested: whether a user has asked to kill it.
        waiting: why it does not run, in one sentence; empty if nothing prevents it.
        failure: why it failed; empty if it did not.
        result: as printed by `dike run --format json` or `dike tune --format json`; None until it ends.
        bundle_token: names its bundle in the URL from which executors fetch it.
        priority: its priority in the queue.
        state_data: state of its state machine for a restart of the service; None before its first launch.
    """

    id: str
    kind: JobKind
    user: str
    script: str
    request: dict[str, Any]
    constraints: tuple[str, ...] = ()
    state: JobState = JobState.QUEUED
    submitted_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    kill_requested: bool = False
    waiting: str = ""
    failure: str = ""
    result: dict[str, Any] | None = None
    bundle_token: str = ""
    priority: Priority = Priority.NORMAL
    state_data: dict[str, Any] | None = None

    @property
    def folder_name(self) -> str:
        """Name of its checkpoint folder, and of the checkpoint owner of a training job's chiefs.

        Checkpoints are kept longer than records, so the name distinguishes jobs of the same name.
        """
        if self.kind is JobKind.TRAINING and self.request.get("name") is None:
            return self.id
        return dated_folder(self.id, self.submitted_s)


def dated_folder(job_id: str, submitted_s: float) -> str:
    """Returns the name of a job's checkpoint folder, with the time, because job names can be reused."""
    return f"{job_id}-{datetime.fromtimestamp(submitted_s, UTC):%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class TaskRecord:
    """A Mesos task of a job. Stored before it is launched, so that no running task is unknown.

    Attributes:
        task_id: its id in Mesos.
        job_id: its job.
        agent_id: its agent's id in Mesos.
        node, address: the agent for people, and its IP address or host name.
        name: its name in the job, such as `worker:0` or `slot 3`.
        state: Mesos' name of its last state, less `TASK_`, in lower case; `intended` before the launch.
        resources: amounts of `cpus`, `mem` (MiB), `disk` (MiB), `gpus`, `ports`; the executor's share counts to the
            task with which the executor was launched.
        launched_s, ended_s: seconds since the epoch; None if in the future.
        message: message of Mesos or the executor with the last state.
        executor_id: its executor's id in Mesos.
    """

    task_id: str
    job_id: str
    agent_id: str
    node: str
    address: str
    name: str
    state: str
    resources: dict[str, float] = field(default_factory=dict)
    launched_s: float = 0.0
    ended_s: float | None = None
    message: str = ""
    executor_id: str = field(kw_only=True)

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None


@dataclass(frozen=True)
class JobEvent:
    """An event of a job, for its users.

    Attributes:
        number: counts up over all jobs.
        job_id: the job.
        time_s: seconds since the epoch.
        kind: `note`, `waiting`, `planned`, `launched`, `task`, `restarting`, `checkpoint`, `resized`, `trial`, `ended`.
        text: one or more sentences.
    """

    number: int
    job_id: str
    time_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class OutputChunk:
    """A piece of a task's output.

    Attributes:
        number: counts up over all jobs.
        task: name of the task in its job, such as `worker:0`.
        stream: `stdout` or `stderr`.
        text: undecodable bytes are replaced.
    """

    number: int
    task: str
    stream: str
    text: str


@dataclass(frozen=True)
class ProgressPoint:
    """A report of a training job's chief.

    Attributes:
        step: training steps done.
        time_s: seconds since the epoch.
        loss: None if not reported, or not finite.
        samples_per_s: None if not reported.
    """

    step: int
    time_s: float
    loss: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class TaskNeed:
    """Minimum resources of one of a job's tasks.

    Attributes:
        name: such as `worker`, `parameter server`, `chief` or `slot`.
        count: minimum number of such tasks.
        cpus: CPU cores.
        mem: MiB.
        disk: MiB.
        gpus: whole GPUs.
        ports: number of ports.
    """

    name: str
    count: int = 1
    cpus: float = 0.0
    mem: float = 0.0
    disk: float = 0.0
    gpus: float = 0.0
    ports: int = 0

    @property
    def amounts(self) -> dict[str, float]:
        """Amounts above 0, by resource."""
        all_of_them = {
            "cpus": self.cpus,
            "mem": self.mem,
            "disk": self.disk,
            "gpus": self.gpus,
            "ports": float(self.ports),
        }
        return {name: amount for name, amount in all_of_them.items() if amount > 0}

    def missing(self, free: Amounts) -> dict[str, float]:
        """Amounts by which `free` is too little for one such task; empty if it is not."""
        return missing(self.amounts, free)

    def shortage_ratio(self, free: Amounts) -> float:
        """Missing part (0 to 1) of the scarcest resource for one such task."""
        return max((short / self.amounts[name] for name, short in self.missing(free).items()), default=0.0)
