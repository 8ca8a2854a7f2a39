"""Messages between the framework and its executors: JSON in base64, the form of bytes in Mesos' JSON.

A `LaunchOrder` is sent in `TaskInfo.data`, a `Report` as a framework message, an `Outcome` in `TaskStatus.data`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dike import process, typed
from dike.profile import Api
from dike.roles import server
from dike.task import TaskSpec
from executor.environment import Setup
from executor.limits import RunLimits
from executor.mirror import RunFolder

LAUNCHER = "dike.launch"
"""Module that runs a process of a training job in a zygote's fork."""
LIBRARIES = {
    Api.GRAPH: ("tensorflow",),
    Api.KERAS: ("tensorflow", "keras"),
    # TF_USE_LEGACY_KERAS is read on TensorFlow's import, and the script may set it first.
    Api.TF_KERAS: (),
    Api.COORDINATOR: ("tensorflow",),
    Api.LOOP: (),
}
"""API -> modules that a zygote may safely import before any script that uses it."""
ELASTIC_SAVE_S = 60.0
"""Maximum time for a chief to finish its step and save, when the job is resized."""


@dataclass(frozen=True)
class LaunchOrder:
    """An executor's order to run a task of a training job.

    Attributes:
        task: what the process is to run.
        bundle_url: URL of the job's bundle, token included.
        script: path of the script inside the bundle.
        arguments: the script's arguments.
        environment: variables set for the process on top of the executor's own.
        cpus: CPUs that Mesos gave to the slot; sizes TensorFlow's thread pools.
        gpu_devices: device indices for `CUDA_VISIBLE_DEVICES`; None if Mesos isolates GPUs.
        stream_logs: whether output is also sent to the framework; it always goes to the sandbox.
        kill_grace_s: seconds between SIGTERM and SIGKILL; a chief that trains takes up to 5 s to save.
        elastic: whether the slot follows `WantedProcess` messages (`executor.elastic_messages`).
        standby: whether an elastic slot only prepares: its process is requested later, and `task` names only its role.
        preload: modules that the slot's zygote may import before the script does (`framework.project.script_facts`);
            None: those of its API in `LIBRARIES`.
        most_mem_mib: memory limit of its processes, in MiB; 0 for no limit.
        folder: how executors that do not see the checkpoint folder reach it; None if all see it.
    """

    task: TaskSpec
    bundle_url: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpu_devices: tuple[int, ...] | None = None
    stream_logs: bool = False
    kill_grace_s: float = 8.0
    elastic: bool = False
    standby: bool = False
    preload: tuple[str, ...] | None = None
    most_mem_mib: float = 0.0
    folder: RunFolder | None = None

    @property
    def limits(self) -> RunLimits:
        return RunLimits.of_slot(self.most_mem_mib, self.cpus, "--task-mem")

    @property
    def setup(self) -> Setup:
        preload = LIBRARIES[self.task.api] if self.preload is None else self.preload
        if server.is_server(self.task) and not {"tensorflow", "keras", "tf_keras"} & set(preload):
            preload = ("tensorflow",)
        own = {process.SAVE_TIMEOUT_VARIABLE: str(ELASTIC_SAVE_S)} if self.elastic else {}
        return Setup(LAUNCHER, preload, {**self.environment, **own}, self.cpus, self.gpu_devices)

    def encode(self) -> str:
        return encode({**dataclasses.asdict(self), "task": self.task.dumps()})

    @classmethod
    def decode(cls, data: str) -> LaunchOrder:
        values = decode(data)
        devices, preload = values["gpu_devices"], values["preload"]
        return cls(
            **{
                **values,
                "task": TaskSpec.loads(values["task"]),
                "arguments": tuple(values["arguments"]),
                "gpu_devices": None if devices is None else tuple(devices),
                "preload": None if preload is None else tuple(preload),
                "folder": RunFolder.read(values["folder"]),
            }
        )


T = TypeVar("T")

STREAMS = ("stdout", "stderr")
WANTED_OUTPUT = "wanted_output"


class OutputPiece:
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after this piece."""
        return self.offset + len(self.data)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "data": base64.b64encode(self.data).decode()}


@dataclass(frozen=True)
class LogChunk(OutputPiece):
    """A piece of a process' output.

    Attributes:
        stream: `stdout` or `stderr`.
        offset: number of bytes of that stream before it; a gap means that a message was lost.
        data: the bytes; empty if it only confirms that there are no more.
        skipped: number of bytes before it that the executor can no longer send.
    """

    task_id: str
    stream: str
    offset: int
    data: bytes
    skipped: int = 0

    def encode(self) -> str:
        return encode({"type": "log", **self.to_json()})

    @classmethod
    def from_json(cls, values: Any) -> LogChunk:
        """Reads what `to_json` wrote; raises ValueError."""
        read = read_message(_EncodedChunk, values)
        chunk = cls(read.task_id, read.stream, read.offset, base64.b64decode(read.data), read.skipped)
        if chunk.stream not in STREAMS or chunk.offset < 0 or chunk.end > typed.MAX_INT:
            raise ValueError(f"malformed message: output to {chunk.stream!r} at {chunk.offset}")
        return chunk


@dataclass(frozen=True)
class WantedOutput:
    """Stream -> offset from which the framework wants output; sent until a chunk at that offset arrives."""

    offsets: dict[str, int]

    def encode(self) -> str:
        return encode({"kind": WANTED_OUTPUT, **dataclasses.asdict(self)})

    @classmethod
    def decode(cls, data: str) -> WantedOutput:
        """Raises ValueError if it is another or a malformed message."""
        values = decode(data)
        if not isinstance(values, dict) or values.pop("kind", None) != WANTED_OUTPUT:
            raise ValueError("not a message for a slot of a job")
        return read_message(cls, values)


@dataclass(frozen=True)
class Addressed:
    """A message of the framework to one task of an executor; `data` is in base64."""

    task_id: str
    data: str

    def encode(self) -> str:
        return encode({"task": self.task_id, "data": self.data})

    @classmethod
    def decode(cls, data: str) -> Addressed:
        """Raises ValueError if it is another or a malformed message."""
        values = decode(data)
        if not isinstance(values, dict) or values.keys() != {"task", "data"}:
            raise ValueError("not addressed to a task")
        return cls(str(values["task"]), str(values["data"]))


@dataclass(frozen=True)
class Report:
    """A report line of a process (`dike.reporting`): progress, a checkpoint, where its variables are placed."""

    task_id: str
    content: dict[str, Any]

    def encode(self) -> str:
        return encode({"type": "report", **dataclasses.asdict(self)})


def read_message(kind: type[T], values: Any) -> T:
    """Reads a part of a message (`dike.typed.read`); raises ValueError, "malformed message"."""
    try:
        return typed.read(kind, values)
    except ValueError as error:
        raise ValueError(f"malformed message: {error}") from None


def decode_message(data: str) -> LogChunk | Report:
    """Reads a message of a slot that is not elastic; `executor.elastic_messages.decode_job_message` reads all.

    Raises ValueError.
    """
    values = decode(data)
    kind = values.pop("type", None) if isinstance(values, dict) else None
    if kind == "log":
        return LogChunk.from_json(values)
    if kind == "report":
        return read_message(Report, values)
    raise ValueError(f"unknown message type {kind!r}")


@dataclass(frozen=True)
class _EncodedChunk:
    task_id: str
    stream: str
    offset: int
    data: str
    skipped: int


@dataclass(frozen=True)
class Outcome:
    """How a process ended; sent in the data of its last status update.

    Attributes:
        exit_code: its exit code, or minus the signal that ended it; None if it never started.
        log_bytes: stream -> bytes written, by which the framework knows what is still missing.
        tail: the end of its output, both streams.
        sandbox: the folder on the agent that holds all of it.
    """

    exit_code: int | None
    log_bytes: dict[str, int]
    tail: str
    sandbox: str

    def encode(self, last_output: Sequence[LogChunk] = ()) -> str:
        """Encodes it with the end of each stream, in case no framework was connected when that was sent."""
        values = dataclasses.asdict(self)
        if last_output:
            values[_LAST_OUTPUT] = [chunk.to_json() for chunk in last_output]
        return encode(values)

    @classmethod
    def decode(cls, data: str) -> Outcome:
        """Reads what `encode` wrote, without the output; raises ValueError."""
        values = decode(data)
        if isinstance(values, dict):
            values.pop(_LAST_OUTPUT, None)
        return read_message(cls, values)


_LAST_OUTPUT = "last_output"


def decode_last_output(data: str) -> list[LogChunk]:
    """Reads the output that was sent with an outcome; raises ValueError."""
    values = decode(data)
    chunks = values.get(_LAST_OUTPUT, []) if isinstance(values, dict) else []
    if not isinstance(chunks, list):
        raise ValueError(f"malformed message: {_LAST_OUTPUT} is no list")
    return [LogChunk.from_json(chunk) for chunk in chunks]


def encode(values: Any) -> str:
    return base64.b64encode(json.dumps(values).encode()).decode()


def decode(data: str) -> Any:
    """Reads what `encode` wrote, made `storable`; raises ValueError."""
    content = base64.b64decode(data, validate=True)
    try:
        values = json.loads(content.decode("utf-8", "replace"))
        return storable(values) if _UNSTORABLE_ESCAPE.search(content) else values
    except RecursionError:
        raise ValueError("nested too deeply") from None


_UNSTORABLE_ESCAPE = re.compile(rb"\\u(0000|[dD][89a-fA-F])")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def storable(value: Any) -> Any:
    """Replaces by U+FFFD what databases cannot store in a text: NUL, and unpaired surrogates."""
    match value:
        case str():
            return _UNSTORABLE.sub("\ufffd", value)
        case list():
            return [storable(one) for one in value]
        case dict():
            return {storable(name): storable(one) for name, one in value.items()}
    return value
