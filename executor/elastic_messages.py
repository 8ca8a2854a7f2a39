"""What the framework and a slot of an elastic training job say to each other.

Such a slot outlives the process that it runs: when the job changes its size, the process is stopped and one of the next
attempt is forked from the slot's zygote. As in a search (`executor.trial_messages`) both sides say what is, and repeat
it until the other has said that it knows.

A process that ends by itself, or is killed, ends its slot's Mesos task, as in any job; only one that was stopped
because the framework wants another attempt, or none, is reported by `ProcessEnd`. Exit code 0 there means that it had
finished before it could be stopped.

`decode_job_message` reads whatever a job's slot sends, elastic or not.
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
    """What the framework wants a slot to run; sent to the executor, repeated until answered.

    Attributes:
        number: grows with each change; an executor ignores what is older than it knows.
        task: the process to run; one of another attempt is stopped first, and an attempt that has ended is not started
            again. None: no process; a chief that is stopped saves first.
        known_ends: attempts whose end the framework has recorded.
    """

    number: int
    task: TaskSpec | None = None
    known_ends: tuple[int, ...] = ()

    def encode(self) -> str:
        """The message as base64 text."""
        task = None if self.task is None else self.task.dumps()
        return encode(
            {"kind": "wanted_process", "number": self.number, "task": task, "known_ends": list(self.known_ends)}
        )

    @classmethod
    def decode(cls, data: str) -> WantedProcess:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        values = decode(data)
        try:
            if values["kind"] != "wanted_process":
                raise ValueError(f"not what a slot of a job is told: {values['kind']!r}")
            task = values["task"]
            return cls(
                number=int(values["number"]),
                task=None if task is None else TaskSpec.loads(task),
                known_ends=tuple(int(attempt) for attempt in values["known_ends"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed message for a slot of a job: {error}") from error


def decode_wish(data: str) -> WantedProcess | WantedOutput:
    """Reads what the framework says to a slot of an elastic job.

    Raises:
        ValueError: if it is neither.
    """
    values = decode(data)
    is_output = isinstance(values, dict) and values.get("kind") == WANTED_OUTPUT
    return WantedOutput.decode(data) if is_output else WantedProcess.decode(data)


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended that was stopped on request.

    Attributes:
        attempt: the attempt of the job that it belonged to.
        outcome: exit code and output.
    """

    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class ElasticStatus:
    """How a slot stands; sent to the framework when it changes and whenever the framework speaks.

    Attributes:
        task_id: the slot's Mesos task.
        number: the newest `WantedProcess` that it knows; 0 before the first.
        ready: whether its zygote has imported what it should.
        attempt: the attempt of the process that runs or is being forked; None if there is none.
        ends: ends that the framework has not yet said it knows.
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
    """Reads a framework message of a training job's slot.

    Raises:
        ValueError: if it is none of these.
    """
    values = decode(data)
    if not isinstance(values, dict) or values.pop("type", None) != "elastic":
        return decode_message(data)
    return read_message(ElasticStatus, values)
