"""Puts the output of a job's tasks together: each byte once and in its order, whatever gets lost on its way."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
AHEAD_BYTES = 2**20
"""How much of what it sends meanwhile is kept of each stream, the newest."""
TELL_S = 60.0
"""How often it is told of one stream that some of it has not come; one written too fast has a gap each moment."""


@dataclasses.dataclass
class _Request:
    """An executor was asked to send again.

    Attributes:
        told_s: when it was asked last.
        pause_s: how long until it is asked again.
        ahead_s: when something came first that is of no use yet; None if nothing did.
        ahead: that, in case nothing better comes.
    """

    told_s: float
    pause_s: float = REPEAT_S
    ahead_s: float | None = None
    ahead: deque[LogChunk] = dataclasses.field(default_factory=deque)
    ahead_bytes: int = 0

    def keep(self, chunk: LogChunk) -> None:
        """Something came first."""
        self.ahead.append(chunk)
        self.ahead_bytes += len(chunk.data)
        while self.ahead_bytes > AHEAD_BYTES and len(self.ahead) > 1:
            self.ahead_bytes -= len(self.ahead.popleft().data)

    def is_over(self, now_s: float) -> bool:
        """Whether it is not to be expected any more that it will be answered."""
        return self.ahead_s is not None and now_s - self.ahead_s >= PATIENCE_S


@dataclasses.dataclass
class _Gap:
    """What of a stream has not come: bytes that nobody was told of yet, and when somebody was."""

    missing: int = 0
    told_s: float = -math.inf


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
        self._gaps: dict[tuple[str, str], _Gap] = {}

    def subscribed(self) -> None:
        """What was sent while nobody listened is lost: all who send output are to say what there is."""
        self._requests.clear()
        for task in self._run.tasks.values():
            if self._spec.streams(task.planned) and not task.state.is_terminal():
                self._request(task, STREAMS)

    def tick(self) -> None:
        """Asks those again who have not answered."""
        now_s = self._clock()
        for (task_id, stream), gap in list(self._gaps.items()):
            if task_id not in self._run.tasks:
                del self._gaps[task_id, stream]
            elif now_s - gap.told_s >= TELL_S:
                self._tell_gap(self._run.tasks[task_id], stream, gap)
        due: defaultdict[str, list[str]] = defaultdict(list)
        for (task_id, stream), request in list(self._requests.items()):
            task = self._run.tasks.get(task_id)
            if task is None or task.state.is_terminal():
                del self._requests[task_id, stream]
            elif request.is_over(now_s):
                self._take(task, self._ahead(task, stream))
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
            request.keep(chunk)
            if request.is_over(now_s):
                self._take(task, self._ahead(task, chunk.stream))
            return
        # Whatever came ahead of it comes again.
        self._take(task, [chunk])

    def ended(self, task: JobTask, status: Mapping[str, Any]) -> None:
        """Takes in the end of a task's output, which has come with its last status update."""
        chunks = [chunk for stream in STREAMS for chunk in self._ahead(task, stream)]
        try:
            chunks += decode_last_output(status["data"]) if status.get("data") else []
        except ValueError as error:
            logger.warning("last output of a task not readable: %s", error)
        self._take(task, chunks)
        for stream in STREAMS:
            if (gap := self._gaps.get((task.task_id, stream))) is not None:
                self._tell_gap(task, stream, gap)

    def _ahead(self, task: JobTask, stream: str) -> list[LogChunk]:
        request = self._requests.get((task.task_id, stream))
        return list(request.ahead) if request is not None else []

    def _take(self, task: JobTask, chunks: Iterable[LogChunk]) -> None:
        for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
            self._take_one(task, chunk)

    def _take_one(self, task: JobTask, chunk: LogChunk) -> None:
        received = task.received.get(chunk.stream, 0)
        if chunk.end < received:
            return
        self._requests.pop((task.task_id, chunk.stream), None)
        # Who adopted a task of the version before does not know how much of it was there already.
        is_known = not task.adopted or chunk.stream in task.received or chunk.skipped
        if chunk.offset > received and is_known:
            gap = self._gaps.setdefault((task.task_id, chunk.stream), _Gap())
            gap.missing += chunk.offset - received
            if self._clock() - gap.told_s >= TELL_S:
                self._tell_gap(task, chunk.stream, gap)
        new = chunk.data[max(0, received - chunk.offset) :]
        task.received[chunk.stream] = chunk.end
        if new:
            self._observer.log(task, dataclasses.replace(chunk, offset=chunk.end - len(new), data=new))

    def _tell_gap(self, task: JobTask, stream: str, gap: _Gap) -> None:
        if gap.missing:
            self._observer.note(
                f"{gap.missing} bytes that {task.name} wrote to {stream} have not come here; "
                f"they are in its sandbox on agent {task.node}"
            )
            gap.missing, gap.told_s = 0, self._clock()

    def _request(self, task: JobTask, streams: Sequence[str]) -> None:
        for stream in streams:
            self._requests[task.task_id, stream] = _Request(self._clock())
        self._tell(task, streams)

    def _tell(self, task: JobTask, streams: Sequence[str]) -> None:
        wanted = WantedOutput({stream: task.received.get(stream, 0) for stream in streams})
        where = {"value": task.task_id}, {"value": task.agent_id}
        try_now(self._mesos.sendFrameworkMessage, *where, wanted.encode())
