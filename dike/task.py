"""Description of a process of a training job, passed to it in the environment variable `DIKE_TASK`."""

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
    PS = "ps"
    """Stores variables; runs a TensorFlow server and none of the user's code."""
    WORKER = "worker"
    """Computes steps."""
    CHIEF = "chief"
    """Runs the user's script and hands steps to the workers (Keras and coordinator jobs only)."""


def is_chief(api: Api, role: str, index: int, *, is_plain: bool) -> bool:
    """Whether the process of this role and index initialises variables, writes checkpoints and reports for the job.

    `is_plain`: whether the job has no parameter servers.
    """
    if is_plain:
        return index == 0
    return role == Role.CHIEF if api.has_separate_chief else role == Role.WORKER and index == 0


@dataclass(frozen=True)
class TaskSpec:
    """One process of a training job.

    Attributes:
        cluster: role -> `host:port` of each of its processes, by index.
        variables: variable name -> index of its ps. A variable not in it goes to the ps given by `ps_of`.
        checkpoint_dir: any path that `tf.io.gfile` understands, the same in all processes.
        checkpoint_interval_s: seconds between periodic checkpoints.
        attempt: number of earlier attempts of the job.
        fingerprint: `dike.checkpoints.fingerprint` of the planned model; empty for no check.
        cached_batch_size: planned samples per step if the model's profile was cached by an earlier command, so that the
            chief has to compare the model with it; None if the profile was read for this job.
        batch_size: planned samples per step; 0 if unknown.
        replicas: gradients per step of a synchronous job, so that the global batch stays the same when the number of
            workers changes; None for one per worker.
        distributes_itself: whether the script expects the variables by which its library finds the other processes.
        report_fd: file descriptor for `dike.reporting`; None to report nothing.
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
    cached_batch_size: int | None = None
    batch_size: int = 0
    replicas: int | None = None
    gpus: int = 0
    distributes_itself: bool = False
    report_fd: int | None = None

    @property
    def name(self) -> str:
        """Such as `worker:0`."""
        return f"{self.role}:{self.index}"

    @property
    def is_plain(self) -> bool:
        """Whether the job has no parameter servers: its processes train as `python` does."""
        return not self.ps_count

    @property
    def is_synchronous(self) -> bool:
        """Whether it is one of several workers that train synchronously, without parameter servers."""
        return self.is_plain and self.worker_count > 1

    @property
    def is_chief(self) -> bool:
        return is_chief(self.api, self.role, self.index, is_plain=self.is_plain)

    @property
    def worker_count(self) -> int:
        return len(self.cluster.get(Role.WORKER, ()))

    @property
    def ps_count(self) -> int:
        return len(self.cluster.get(Role.PS, ()))

    def ps_of(self, name: str) -> int:
        """Index of the ps for the variable `name`: the planned one, or else a hash of the name."""
        planned = self.variables.get(name)
        return zlib.crc32(name.encode()) % self.ps_count if planned is None else planned

    @property
    def tf_config(self) -> dict[str, Any]:
        return {"cluster": self.cluster, "task": {"type": str(self.role), "index": self.index}}

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> TaskSpec:
        values = json.loads(text)
        return cls(**{**values, "role": Role(values["role"]), "api": Api(values["api"])})


def current(environ: Mapping[str, str] = os.environ) -> TaskSpec | None:
    """None if this process is not part of a Dike job."""
    text = environ.get(VARIABLE)
    return TaskSpec.loads(text) if text else None
