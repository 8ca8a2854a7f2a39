"""What the framework and its executors say to each other, beside Mesos' own status updates.

An order travels in `TaskInfo.data`, a report as a framework message, an outcome in `TaskStatus.data`; all are JSON.
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
from executor.limits import Limits

LAUNCHER = "dike.launch"
"""Turns a zygote's fork into a process of a training job."""
LIBRARIES = {
    Api.GRAPH: ("tensorflow",),
    Api.KERAS: ("tensorflow", "keras"),
    # TF_USE_LEGACY_KERAS counts only before TensorFlow's import, and the script may be about to set it.
    Api.TF_KERAS: (),
    Api.COORDINATOR: ("tensorflow",),
    Api.LOOP: (),
}
"""API -> what a zygote may import before any script of it, as far as is known."""
ELASTIC_SAVE_S = 60.0
"""How long a chief has to end its step and save when the job changes its size."""


@dataclass(frozen=True)
class LaunchOrder:
    """What an executor has to run.

    Attributes:
        task: what the process has to know of the job and of itself.
        bundle_url: where the script's folder can be fetched, token included.
        script: path of the script inside the bundle.
        arguments: the script's arguments.
        environment: variables set for the process on top of the executor's own.
        cpus: CPUs that Mesos gave to the slot; sizes TensorFlow's thread pools.
        gpu_devices: device indices for `CUDA_VISIBLE_DEVICES`; None where Mesos isolates GPUs itself.
        stream_logs: whether output is sent to the framework as it comes; it always goes to the sandbox.
        kill_grace_s: seconds between SIGTERM and SIGKILL; a chief that trains takes up to 5 s to save.
        elastic: whether the slot changes its process when it is told to (`executor.elastic_messages`).
        standby: whether an elastic slot only gets ready: `task` says who it will be, and its process is still to come.
        preload: modules that the slot's zygote may import before the script does (`framework.project.script_facts`);
            None: those that its API is known to need.
        most_mem_mib: memory that its processes may use, in MiB; 0 for no limit.
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

    @property
    def limits(self) -> Limits:
        """What its processes may use."""
        return Limits.of_slot(self.most_mem_mib, self.cpus, "--task-mem")

    @property
    def setup(self) -> Setup:
        """How its processes are set up."""
        preload = LIBRARIES[self.task.api] if self.preload is None else self.preload
        if server.is_server(self.task) and not {"tensorflow", "keras", "tf_keras"} & set(preload):
            preload = ("tensorflow",)
        own = {process.SAVE_TIMEOUT_VARIABLE: str(ELASTIC_SAVE_S)} if self.elastic else {}
        return Setup(LAUNCHER, preload, {**self.environment, **own}, self.cpus, self.gpu_devices)

    def encode(self) -> str:
        """The order as base64 text, the form of bytes in Mesos' JSON."""
        return encode({**dataclasses.asdict(self), "task": self.task.dumps()})

    @classmethod
    def decode(cls, data: str) -> LaunchOrder:
        """Reads what `encode` wrote."""
        values = decode(data)
        devices, preload = values["gpu_devices"], values["preload"]
        return cls(
            **{
                **values,
                "task": TaskSpec.loads(values["task"]),
                "arguments": tuple(values["arguments"]),
                "gpu_devices": None if devices is None else tuple(devices),
                "preload": None if preload is None else tuple(preload),
            }
        )


T = TypeVar("T")

STREAMS = ("stdout", "stderr")
WANTED_OUTPUT = "wanted_output"


class OutputPiece:
    """A piece of output, whose fields a dataclass has."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """How many bytes of the output there are up to its end."""
        return self.offset + len(self.data)

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON values."""
        return {**vars(self), "data": base64.b64encode(self.data).decode()}


@dataclass(frozen=True)
class LogChunk(OutputPiece):
    """A piece of a process' output.

    Attributes:
        task_id: the Mesos task it comes from.
        stream: `stdout` or `stderr`.
        offset: how many bytes of that stream came before it; a gap means that a message was lost.
        data: the bytes; none if it only says that no more came.
        skipped: how many bytes before it the executor cannot send again any more.
    """

    task_id: str
    stream: str
    offset: int
    data: bytes
    skipped: int = 0

    def encode(self) -> str:
        """The chunk as base64 text."""
        return encode({"type": "log", **self.to_json()})

    @classmethod
    def from_json(cls, values: Any) -> LogChunk:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is something else, or there can be no such piece.
        """
        read = read_message(_EncodedChunk, values)
        chunk = cls(read.task_id, read.stream, read.offset, base64.b64decode(read.data), read.skipped)
        if chunk.stream not in STREAMS or chunk.offset < 0 or chunk.end > typed.MAX_INT:
            raise ValueError(f"malformed message: output to {chunk.stream!r} at {chunk.offset}")
        return chunk


@dataclass(frozen=True)
class WantedOutput:
    """From where on the framework wants output; sent to the executor, repeated until a chunk has come from there.

    Attributes:
        offsets: stream -> how many bytes of it the framework has; the others are not asked for.
    """

    offsets: dict[str, int]

    def encode(self) -> str:
        """The message as base64 text."""
        return encode({"kind": WANTED_OUTPUT, **dataclasses.asdict(self)})

    @classmethod
    def decode(cls, data: str) -> WantedOutput:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        values = decode(data)
        if not isinstance(values, dict) or values.pop("kind", None) != WANTED_OUTPUT:
            raise ValueError("not what a slot of a job is told")
        return read_message(cls, values)


@dataclass(frozen=True)
class Addressed:
    """What the framework says to an executor, for one of its tasks.

    Attributes:
        task_id: the Mesos task it is for.
        data: the message, in base64.
    """

    task_id: str
    data: str

    def encode(self) -> str:
        """The message as base64 text."""
        return encode({"task": self.task_id, "data": self.data})

    @classmethod
    def decode(cls, data: str) -> Addressed:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        values = decode(data)
        if not isinstance(values, dict) or values.keys() != {"task", "data"}:
            raise ValueError("not addressed to a task")
        return cls(str(values["task"]), str(values["data"]))


@dataclass(frozen=True)
class Report:
    """A line the process wrote with `dike.reporting`: progress, a checkpoint, where its variables are.

    Attributes:
        task_id: the Mesos task it comes from.
        content: the line; its `type` says which report it is.
    """

    task_id: str
    content: dict[str, Any]

    def encode(self) -> str:
        """The report as base64 text."""
        return encode({"type": "report", **dataclasses.asdict(self)})


def read_message(kind: type[T], values: Any) -> T:
    """`dike.typed.read` for a part of a message; says of what it refuses that it is a malformed message."""
    try:
        return typed.read(kind, values)
    except ValueError as error:
        raise ValueError(f"malformed message: {error}") from None


def decode_message(data: str) -> LogChunk | Report:
    """Reads a framework message; those of elastic slots too are read by `executor.elastic_messages.decode_job_message`.

    Raises:
        ValueError: if it is none of the messages above.
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
    """How a process ended; travels in the data of its last status update.

    Attributes:
        exit_code: its exit code, or minus the signal that ended it; None if it never started.
        log_bytes: stream -> bytes written, so that the framework knows what it has yet to receive.
        tail: the end of its output, both streams.
        sandbox: the folder on the agent that holds all of it.
    """

    exit_code: int | None
    log_bytes: dict[str, int]
    tail: str
    sandbox: str

    def encode(self, last_output: Sequence[LogChunk] = ()) -> str:
        """The outcome as base64 text.

        Args:
            last_output: the end of each stream, since nobody may have listened when it was sent.
        """
        values = dataclasses.asdict(self)
        if last_output:
            values[_LAST_OUTPUT] = [chunk.to_json() for chunk in last_output]
        return encode(values)

    @classmethod
    def decode(cls, data: str) -> Outcome:
        """Reads what `encode` wrote, without the output.

        Raises:
            ValueError: if it is something else.
        """
        values = decode(data)
        if isinstance(values, dict):
            values.pop(_LAST_OUTPUT, None)
        return read_message(cls, values)


_LAST_OUTPUT = "last_output"


def decode_last_output(data: str) -> list[LogChunk]:
    """The output that came with an outcome.

    Raises:
        ValueError: if it cannot be read.
    """
    values = decode(data)
    chunks = values.get(_LAST_OUTPUT, []) if isinstance(values, dict) else []
    if not isinstance(chunks, list):
        raise ValueError(f"malformed message: {_LAST_OUTPUT} is no list")
    return [LogChunk.from_json(chunk) for chunk in chunks]


def encode(values: Any) -> str:
    """JSON values as base64 text."""
    return base64.b64encode(json.dumps(values).encode()).decode()


def decode(data: str) -> Any:
    """Reads what `encode` wrote; text that databases cannot keep (NUL, half characters) has U+FFFD instead.

    Raises:
        ValueError: if it is not base64 of JSON.
    """
    content = base64.b64decode(data, validate=True)
    try:
        values = json.loads(content.decode("utf-8", "replace"))
        return storable(values) if _UNSTORABLE_ESCAPE.search(content) else values
    except RecursionError:
        raise ValueError("nested too deeply") from None


_UNSTORABLE_ESCAPE = re.compile(rb"\\u(0000|[dD][89a-fA-F])")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def storable(value: Any) -> Any:
    """JSON values with U+FFFD for what databases cannot keep in a text: NUL, and halves of surrogate pairs."""
    match value:
        case str():
            return _UNSTORABLE.sub("\ufffd", value)
        case list():
            return [storable(one) for one in value]
        case dict():
            return {storable(name): storable(one) for name, one in value.items()}
    return value
