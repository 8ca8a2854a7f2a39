"""What a service keeps of its jobs: who asked for what, how it stands, which tasks it has."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from framework.scheduler.amounts import Amounts, missing

NEWEST = "last"
"""What commands call a user's newest job."""
INTENDED = "intended"
"""State of a task that has been written down and not heard of."""


class JobKind(enum.StrEnum):
    """What a job is."""

    TRAINING = "training"
    SEARCH = "search"


class JobState(enum.StrEnum):
    """Where a job of a service stands."""

    QUEUED = "queued"
    """Nothing of it runs: it waits for its turn or for resources, for the first time or again."""
    RUNNING = "running"
    """At least one task has been launched and has not ended."""
    ENDING = "ending"
    """Its end was asked for; tasks may still run."""
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"

    def has_ended(self) -> bool:
        """Whether nothing of it will run any more, unless it is a search and somebody asks that it goes on."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.KILLED)

    @property
    def verb(self) -> str:
        """What has happened to the job, after its name in a sentence."""
        if self is JobState.KILLED:
            return f"was {self}"
        return str(self) if self.has_ended() else f"is {self}"


@dataclass(frozen=True)
class JobRecord:
    """One job as the database has it.

    Attributes:
        id: unique, part of its tasks' ids; its name, or `new_job_id` for a training job without one.
        kind: what it is.
        user: who asked for it.
        script: name of the script inside its bundle.
        request: what was asked for, as JSON values (`framework.service.requests`).
        constraints: which agents it may use, in the form `rack:IN:r1,r2` (`framework.scheduler.constraints`).
        state: where it stands.
        submitted_s, started_s, ended_s: seconds since the epoch; None while that has not come.
        kill_requested: whether somebody has asked for its end.
        waiting: why it does not run, or does not run yet, in one sentence; empty if nothing is in the way.
        failure: why it failed; empty if it did not.
        result: how it ended, as `dike run --format json` or `dike tune --format json` prints it; None before.
        bundle_token: names its bundle in the URL that executors fetch.
        state_data: what its state machine needs after a restart of the service; None before its first launch.
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
    state_data: dict[str, Any] | None = None

    @property
    def folder_name(self) -> str:
        """What its checkpoint folder is called, and what a training job's chiefs claim that as.

        Checkpoints outlive their jobs' records: those of an earlier job of its name are none of this one's.
        """
        if self.kind is JobKind.TRAINING and self.request.get("name") is None:
            return self.id
        return dated_folder(self.id, self.submitted_s)


def dated_folder(job_id: str, submitted_s: float) -> str:
    """What the checkpoint folder of a job of that name is called, which another job may have had before."""
    return f"{job_id}-{datetime.fromtimestamp(submitted_s, UTC):%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class TaskRecord:
    """One Mesos task of a job. Written before it is launched, so that no task is ever unknown.

    Attributes:
        task_id: Mesos' id of it.
        job_id: whose it is.
        agent_id: Mesos' id of its agent.
        node, address: the agent for people, and its IP address or host name.
        name: what it is in its job, such as `worker:0` or `slot 3`.
        state: Mesos' name of its last state, less `TASK_`, in lower case; `intended` before the launch.
        resources: name -> amount of `cpus`, `mem` (MiB), `disk` (MiB), `gpus`, `ports` it holds; what the executor has
            counts to the task that it was launched with.
        launched_s, ended_s: seconds since the epoch; None while it has not ended.
        message: what Mesos or the executor said with the last state.
        executor_id: Mesos' id of its executor.
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
    """Something worth telling of a job.

    Attributes:
        number: counts up over all jobs.
        job_id: whose it is.
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
    """A piece of what a task of a job wrote.

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
    """One report of a training job's chief.

    Attributes:
        step: training steps done.
        time_s: seconds since the epoch.
        loss: None where it was not reported, or is not finite.
        samples_per_s: None where it was not reported.
    """

    step: int
    time_s: float
    loss: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class TaskNeed:
    """What one of a job's tasks takes at least.

    Attributes:
        name: such as `worker`, `parameter server`, `chief` or `slot`.
        count: how many of them there have to be at least.
        cpus: CPU cores.
        mem: MiB.
        disk: MiB.
        gpus: whole GPUs.
        ports: how many.
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
        """Resource -> amount, of those that it needs."""
        all_of_them = {
            "cpus": self.cpus,
            "mem": self.mem,
            "disk": self.disk,
            "gpus": self.gpus,
            "ports": float(self.ports),
        }
        return {name: amount for name, amount in all_of_them.items() if amount > 0}

    def missing(self, free: Amounts) -> dict[str, float]:
        """Resource -> by how much these amounts are too little for one such task; empty if they are not."""
        return missing(self.amounts, free)

    def shortage_ratio(self, free: Amounts) -> float:
        """Which part (0 to 1) of the resource that is scarcest for one such task these amounts lack."""
        return max((short / self.amounts[name] for name, short in self.missing(free).items()), default=0.0)
