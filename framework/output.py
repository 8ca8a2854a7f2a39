"""Puts the output of a job's tasks together: each byte once and in its order, whatever gets lost on its way."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executor.messages import STREAMS, LogChunk, WantedOutput, decode_last_output
from framework.job import JobSpec, JobTask
from framework.job_run import JobRun
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
"""How soon an executor is asked again that has not answered."""
LONGEST_REPEAT_S = 60.0
"""As long as nothing is heard, each time takes twice as long, up to this."""
PATIENCE_S = 15.0
"""How long an executor may send on without an answer; one of the version before never answers."""


@dataclasses.dataclass
class _Request:
    """An executor was asked to send again.

    Attributes:
        told_s: when it was asked last.
        pause_s: how long until it is asked again.
        ahead_s: when something came first that is of no use yet; None if nothing did.
    """

    told_s: float
    pause_s: float = REPEAT_S
    ahead_s: float | None = None


class OutputReader:
    """Has executors send again what did not come, and passes on the rest.

    Args:
        spec: the job.
        run: what runs of it.
        mesos: delivers messages, or not.
        observer: gets the output.
        clock: seconds, monotonic.
    """

    def __init__(
        self, spec: JobSpec, run: JobRun, mesos: MesosCalls, observer: JobObserver, clock: Callable[[], float]
    ) -> None:
        self._spec = spec
        self._run = run
        self._mesos = mesos
        self._observer = observer
        self._clock = clock
        self._requests: dict[tuple[str, str], _Request] = {}

    def subscribed(self) -> None:
        """What was sent while nobody listened is lost: all who send output are to say what there is."""
        self._requests.clear()
        for task in self._run.tasks.values():
            if self._spec.streams(task.planned) and not task.state.is_terminal():
                self._request(task, STREAMS)

    def tick(self) -> None:
        """Asks those again who have not answered."""
        now_s = self._clock()
        due: defaultdict[str, list[str]] = defaultdict(list)
        for (task_id, stream), request in list(self._requests.items()):
            task = self._run.tasks.get(task_id)
            if task is None or task.state.is_terminal():
                del self._requests[task_id, stream]
            elif now_s - request.told_s >= request.pause_s:
                request.told_s = now_s
                if request.ahead_s is None:
                    request.pause_s = min(2 * request.pause_s, LONGEST_REPEAT_S)
                due[task_id].append(stream)
        for task_id, streams in due.items():
            self._tell(self._run.tasks[task_id], streams)

    def read(self, task: JobTask, chunk: LogChunk) -> None:
        """Takes in a piece of a task's output."""
        if chunk.offset - chunk.skipped > task.received.get(chunk.stream, 0):
            now_s = self._clock()
            request = self._requests.get((task.task_id, chunk.stream))
            if request is None or request.ahead_s is None:
                # Its executor is there, even if it was not when it was asked.
                self._request(task, [chunk.stream])
                request = self._requests[task.task_id, chunk.stream]
                request.ahead_s = now_s
            if now_s - request.ahead_s < PATIENCE_S:
                return
        self._take(task, chunk)

    def ended(self, task: JobTask, status: Mapping[str, Any]) -> None:
        """Takes in the end of a task's output, which has come with its last status update."""
        try:
            chunks = decode_last_output(status["data"]) if status.get("data") else []
        except ValueError as error:
            logger.warning("last output of a task not readable: %s", error)
            return
        for chunk in chunks:
            self._take(task, chunk)

    def _take(self, task: JobTask, chunk: LogChunk) -> None:
        received = task.received.get(chunk.stream, 0)
        if chunk.end < received:
            return
        self._requests.pop((task.task_id, chunk.stream), None)
        if chunk.offset > received:
            self._observer.note(
                f"{chunk.offset - received} bytes that {task.name} wrote to {chunk.stream} have not come here; "
                f"they are in its sandbox on agent {task.node}"
            )
        new = chunk.data[max(0, received - chunk.offset) :]
        task.received[chunk.stream] = chunk.end
        if new:
            self._observer.log(task, dataclasses.replace(chunk, offset=chunk.end - len(new), data=new))

    def _request(self, task: JobTask, streams: Sequence[str]) -> None:
        for stream in streams:
            self._requests[task.task_id, stream] = _Request(self._clock())
        self._tell(task, streams)

    def _tell(self, task: JobTask, streams: Sequence[str]) -> None:
        wanted = WantedOutput({stream: task.received.get(stream, 0) for stream in streams})
        where = {"value": task.task_id}, {"value": task.agent_id}
        try_now(self._mesos.sendFrameworkMessage, *where, wanted.encode())
