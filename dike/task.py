"""What a process of a training job knows about itself; travels in the environment variable `DIKE_TASK`."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dike.profile import Api

VARIABLE = "DIKE_TASK"


class Role(enum.StrEnum):
    """Part that a process plays in a training job."""

    PS = "ps"
    """Holds variables; runs a TensorFlow server and none of the user's code."""
    WORKER = "worker"
    """Computes steps."""
    CHIEF = "chief"
    """Runs the user's script and hands steps to the workers (Keras and coordinator jobs only)."""


def is_chief(api: Api, role: str, index: int) -> bool:
    """Whether the process of this role and index initialises variables, writes checkpoints and speaks for the job."""
    return role == Role.CHIEF if api.has_separate_chief else role == Role.WORKER and index == 0


@dataclass(frozen=True)
class TaskSpec:
    """One process of one training job.

    Attributes:
        job_id: the job's identifier, the same in all its processes.
        role: the part it plays.
        index: its number among the processes of that role.
        cluster: role -> `host:port` of each of its processes, in the order of their index.
        api: how the script trains.
        variables: variable name -> index of the ps it lives on. A variable not named here goes to the ps given by
            `ps_of`.
        checkpoint_dir: where checkpoints go; any path `tf.io.gfile` understands, the same in all processes.
        checkpoint_interval_s: seconds between periodic checkpoints.
        attempt: how many times the job was started before this.
        fingerprint: `dike.checkpoints.fingerprint` of the model that was planned; empty to check nothing.
        kept_batch_size: samples per step that were planned for, where the model's profile was read for an earlier
            command, and the chief has to make sure that it still is the model; None where it was read for this job.
        batch_size: samples per step that were planned for; 0 where that is not known.
        replicas: gradients that make one step of a synchronous job, whatever its number of workers, so that the global
            batch stays the same when that number changes; None: one of each worker.
        gpus: GPUs that it was given.
        report_fd: file descriptor to which `dike.reporting` writes JSON lines; None to report nothing.
    """

    job_id: str
    role: Role
    index: int
    cluster: dict[str, list[str]]
    api: Api
    variables: dict[str, int] = field(default_factory=dict)
    checkpoint_dir: str = ""
    checkpoint_interval_s: float = 60.0
    attempt: int = 0
    fingerprint: str = ""
    kept_batch_size: int | None = None
    batch_size: int = 0
    replicas: int | None = None
    gpus: int = 0
    report_fd: int | None = None

    @property
    def name(self) -> str:
        """Role and index, such as `worker:0`."""
        return f"{self.role}:{self.index}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the job's only process: without parameter servers it trains as `python` would."""
        return not self.ps_count

    @property
    def is_chief(self) -> bool:
        """Whether this process initialises variables and writes checkpoints."""
        return self.is_plain or is_chief(self.api, self.role, self.index)

    @property
    def worker_count(self) -> int:
        return len(self.cluster.get(Role.WORKER, ()))

    @property
    def ps_count(self) -> int:
        return len(self.cluster.get(Role.PS, ()))

    def ps_of(self, name: str) -> int:
        """Index of the ps that holds the variable `name`: the planned one, or one that depends on the name alone."""
        planned = self.variables.get(name)
        return zlib.crc32(name.encode()) % self.ps_count if planned is None else planned

    @property
    def tf_config(self) -> dict[str, Any]:
        """Value of `TF_CONFIG` for this process."""
        return {"cluster": self.cluster, "task": {"type": str(self.role), "index": self.index}}

    def dumps(self) -> str:
        """The task as JSON text, for the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> TaskSpec:
        """Reads what `dumps` wrote."""
        values = json.loads(text)
        return cls(**{**values, "role": Role(values["role"]), "api": Api(values["api"])})


def current(environ: Mapping[str, str] = os.environ) -> TaskSpec | None:
    """The task this process is, or None when it is not part of a Dike job."""
    text = environ.get(VARIABLE)
    return TaskSpec.loads(text) if text else None
