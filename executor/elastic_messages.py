"""Messages between the framework and a slot of an elastic training job.

Such a slot runs several attempts: when the job is resized, the slot stops its process and forks the next attempt from
its zygote. As in a search (`executor.trial_messages`), each side sends its full state until the other acknowledges it.

A process that ends on its own or is killed ends its slot's Mesos task, as in any job. `ProcessEnd` reports only a
process that was stopped because the framework wants another attempt, or none; exit code 0 there means that it had
finished before it could be stopped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dike.task import TaskSpec
from executor.messages import (
    WANTED_OUTPUT,
    LogChunk,
    Outcome,
    Report,
    WantedOutput,
    decode,
    decode_message,
    encode,
    read_message,
)


@dataclass(frozen=True)
class WantedProcess:
    """The desired state of a slot; sent to the executor until acknowledged.

    Attributes:
        number: grows with each change; executors ignore smaller ones than their newest.
        task: the process to run. A process of another attempt is stopped first; an attempt that has ended is not
            started again. None: no process. A chief that is stopped saves a checkpoint first.
        acknowledged_ends: attempts whose end the framework has recorded.
    """

    number: int
    task: TaskSpec | None = None
    acknowledged_ends: tuple[int, ...] = ()

    def encode(self) -> str:
        task = None if self.task is None else self.task.dumps()
        return encode(
            {
                "kind": "wanted_process",
                "number": self.number,
                "task": task,
                "acknowledged_ends": list(self.acknowledged_ends),
            }
        )

    @classmethod
    def decode(cls, data: str) -> WantedProcess:
        """Raises ValueError if it is another or a malformed message."""
        values = decode(data)
        try:
            if values["kind"] != "wanted_process":
                raise ValueError(f"unknown message kind for a slot of a job: {values['kind']!r}")
            task = values["task"]
            return cls(
                number=int(values["number"]),
                task=None if task is None else TaskSpec.loads(task),
                acknowledged_ends=tuple(int(attempt) for attempt in values["acknowledged_ends"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed message for a slot of a job: {error}") from error


def decode_wanted(data: str) -> WantedProcess | WantedOutput:
    """Reads a message to a slot of an elastic job; raises ValueError."""
    values = decode(data)
    is_output = isinstance(values, dict) and values.get("kind") == WANTED_OUTPUT
    return WantedOutput.decode(data) if is_output else WantedProcess.decode(data)


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process that was stopped on request."""

    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class ElasticStatus:
    """State of a slot; sent on each change, every second, and as the answer to each message.

    Attributes:
        task_id: the slot's Mesos task.
        number: of the newest `WantedProcess` received; 0 before the first.
        ready: whether its zygote has imported its modules.
        attempt: attempt of the process that runs or is being forked.
        ends: ends that the framework has not yet acknowledged.
    """

    task_id: str
    number: int
    ready: bool
    attempt: int | None = None
    ends: tuple[ProcessEnd, ...] = ()

    def encode(self) -> str:
        """The message as base64 text."""
        return encode({"type": "elastic", **dataclasses.asdict(self)})


def decode_job_message(data: str) -> LogChunk | Report | ElasticStatus:
    """Reads a message of a training job's slot, elastic or not; raises ValueError."""
    values = decode(data)
    if not isinstance(values, dict) or values.pop("type", None) != "elastic":
        return decode_message(data)
    return read_message(ElasticStatus, values)
