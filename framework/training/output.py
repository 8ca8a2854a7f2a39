"""Applies executors' reports on a job's tasks: progress, checkpoints, placement, output.

Output is reassembled here: each byte once and in order, even if messages are lost.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dike import typed
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from executor.elastic_messages import ElasticStatus, decode_job_message
from executor.messages import STREAMS, LogChunk, Outcome, WantedOutput, decode_last_output
from framework.mesos.tasks import TaskState
from framework.scheduler.job import Message
from framework.training.observer import JobObserver
from framework.training.spec import MAX_VARIABLES, JobSpec, JobTask
from framework.training.state import JobRun, TrainingState

logger = logging.getLogger(__name__)

RESEND_INTERVAL_S = 1.0
"""Minimum interval between requests to an executor that has not answered."""
MAX_RESEND_INTERVAL_S = 60.0
"""The interval doubles up to this while there is no answer."""
GAP_TIMEOUT_S = 15.0
"""How long output may arrive beyond a gap before the gap is skipped."""
MAX_AHEAD_BYTES = 2**20
"""Maximum amount of such output kept per stream; the newest is kept."""
GAP_REPORT_INTERVAL_S = 60.0
"""Minimum interval between reports of gaps in one stream, as one written too fast has a gap every moment."""


class ReportListener:
    """Receives the reports that matter for the size of a job; this base class ignores them."""

    def progressed(self, task: JobTask) -> None: ...

    def saved(self, step: int) -> None: ...

    def resumed(self, step: int) -> None: ...

    def total(self, steps: int) -> None:
        """The script has reported its number of steps."""

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        """A task has reported speeds: worker index -> steps per second."""

    def status(self, status: ElasticStatus) -> None: ...


class ReportReader:
    """Applies executors' messages; malformed ones are logged and ignored.

    Args:
        state: receives the chief's progress and checkpoints, and the placement.
        listener: receives what matters for the size of the job.
    """

    def __init__(
        self,
        spec: JobSpec,
        state: TrainingState,
        observer: JobObserver,
        listener: ReportListener,
        output: OutputReader,
    ) -> None:
        self._spec = spec
        self._state = state
        self._observer = observer
        self._listener = listener
        self._output = output

    def read(self, data: str, tasks: Mapping[str, JobTask]) -> None:
        """Applies one framework message, in base64, from one of `tasks` (by id)."""
        try:
            message = decode_job_message(data)
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        task = tasks.get(message.task_id)
        if task is None or task.state.is_terminal():
            # The end of its output was part of its last status update.
            return
        if isinstance(message, LogChunk):
            self._output.read(task, message)
        elif isinstance(message, ElasticStatus):
            self._listener.status(message)
        else:
            self._report(task, message.content)

    def _report(self, task: JobTask, content: Mapping[str, Any]) -> None:
        match content.get("type"):
            case "progress":
                self._progress(task, content)
            case "placement":
                self._state.result.placement.update(
                    {str(name): str(device) for name, device in _mapping(content.get("variables")).items()}
                )
            case "checkpoint":
                step = _number(content.get("step"), int) or 0
                self._state.result.checkpoint_step = step
                self._observer.checkpoint(str(content.get("path", "")), step)
                self._listener.saved(step)
            case "resumed":
                self._listener.resumed(_number(content.get("step"), int) or 0)
            case "total":
                if (steps := _number(content.get("steps"), int)) is not None:
                    self._listener.total(steps)
            case "rates":
                self._rates(task, _mapping(content.get("workers")))
            case "cannot_split":
                why = str(content.get("why", ""))
                self._state.result.profile = dataclasses.replace(self._spec.profile, why_not_split=why)
            case "profile" if self._spec.profile_is_kept and self._spec.is_chief(task.planned):
                self._state.result.profile = _profile(content.get("profile"))

    def _progress(self, task: JobTask, content: Mapping[str, Any]) -> None:
        self._state.stepped = True
        task.step = _number(content.get("step"), int)
        task.loss = _number(content.get("loss"), float)
        task.samples_per_s = _number(content.get("samples_per_s"), float)
        if self._spec.is_chief(task.planned):
            self._state.result.steps, self._state.result.loss = task.step, task.loss
        self._observer.progress(task)
        self._listener.progressed(task)

    def _rates(self, task: JobTask, workers: Mapping[Any, Any]) -> None:
        read = {_number(index, int): _number(rate, float) for index, rate in workers.items()}
        known = {index: rate for index, rate in read.items() if index is not None and rate is not None and rate >= 0}
        if known:
            self._listener.rates(task, known)


@dataclasses.dataclass
class _Request:
    """A request to an executor to send output again.

    Attributes:
        pause_s: delay before it is sent again.
        ahead_s: when the first output beyond the gap arrived; None if none did.
        ahead: that output, used if the gap is skipped.
    """

    sent_s: float
    pause_s: float = RESEND_INTERVAL_S
    ahead_s: float | None = None
    ahead: deque[LogChunk] = dataclasses.field(default_factory=deque)
    ahead_bytes: int = 0

    def keep(self, chunk: LogChunk) -> None:
        self.ahead.append(chunk)
        self.ahead_bytes += len(chunk.data)
        while self.ahead_bytes > MAX_AHEAD_BYTES and len(self.ahead) > 1:
            self.ahead_bytes -= len(self.ahead.popleft().data)

    def is_over(self, now_s: float) -> bool:
        """Whether an answer is no longer expected."""
        return self.ahead_s is not None and now_s - self.ahead_s >= GAP_TIMEOUT_S


@dataclasses.dataclass
class _Gap:
    """A gap in a stream: missing bytes that were not reported yet, and the time of the last report."""

    missing: int = 0
    reported_s: float = -math.inf


class OutputReader:
    """Passes output on in order and requests missing output again.

    Args:
        outbox: receives messages for executors; delivery is not guaranteed.
    """

    def __init__(
        self, spec: JobSpec, run: JobRun, outbox: list[Message], observer: JobObserver, clock: Callable[[], float]
    ) -> None:
        self._spec = spec
        self._run = run
        self._outbox = outbox
        self._observer = observer
        self._clock = clock
        self._requests: dict[tuple[str, str], _Request] = {}
        self._gaps: dict[tuple[str, str], _Gap] = {}

    def subscribed(self) -> None:
        """Requests output from all tasks that stream it: messages sent while disconnected are lost."""
        self._requests.clear()
        for task in self._run.tasks.values():
            if self._spec.streams(task.planned) and not task.state.is_terminal():
                self._request(task, STREAMS)

    def tick(self) -> None:
        """Repeats unanswered requests and reports gaps."""
        now_s = self._clock()
        for (task_id, stream), gap in list(self._gaps.items()):
            if task_id not in self._run.tasks:
                del self._gaps[task_id, stream]
            elif now_s - gap.reported_s >= GAP_REPORT_INTERVAL_S:
                self._report_gap(self._run.tasks[task_id], stream, gap)
        due: defaultdict[str, list[str]] = defaultdict(list)
        for (task_id, stream), request in list(self._requests.items()):
            task = self._run.tasks.get(task_id)
            if task is None or task.state.is_terminal():
                del self._requests[task_id, stream]
            elif request.is_over(now_s):
                self._take(task, self._ahead(task, stream))
            elif now_s - request.sent_s >= request.pause_s:
                request.sent_s = now_s
                if request.ahead_s is None:
                    request.pause_s = min(2 * request.pause_s, MAX_RESEND_INTERVAL_S)
                due[task_id].append(stream)
        for task_id, streams in due.items():
            self._send_request(self._run.tasks[task_id], streams)

    def read(self, task: JobTask, chunk: LogChunk) -> None:
        if chunk.offset - chunk.skipped > task.received.get(chunk.stream, 0):
            now_s = self._clock()
            request = self._requests.get((task.task_id, chunk.stream))
            if request is None or request.ahead_s is None:
                # Restarts the backoff: the executor is reachable now.
                self._request(task, [chunk.stream])
                request = self._requests[task.task_id, chunk.stream]
                request.ahead_s = now_s
            request.keep(chunk)
            if request.is_over(now_s):
                self._take(task, self._ahead(task, chunk.stream))
            return
        # Output beyond the former gap is sent again.
        self._take(task, [chunk])

    def task_ended(self, task: JobTask, status: Mapping[str, Any]) -> None:
        """Applies the end of a task's output, which is part of its last status update."""
        chunks = [chunk for stream in STREAMS for chunk in self._ahead(task, stream)]
        try:
            chunks += decode_last_output(status["data"]) if status.get("data") else []
        except ValueError as error:
            logger.warning("last output of a task not readable: %s", error)
        self._take(task, chunks)
        for stream in STREAMS:
            if (gap := self._gaps.get((task.task_id, stream))) is not None:
                self._report_gap(task, stream, gap)

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
        if chunk.offset > received:
            gap = self._gaps.setdefault((task.task_id, chunk.stream), _Gap())
            gap.missing += chunk.offset - received
            if self._clock() - gap.reported_s >= GAP_REPORT_INTERVAL_S:
                self._report_gap(task, chunk.stream, gap)
        new = chunk.data[max(0, received - chunk.offset) :]
        task.received[chunk.stream] = chunk.end
        if new:
            self._observer.log(task, dataclasses.replace(chunk, offset=chunk.end - len(new), data=new))

    def _report_gap(self, task: JobTask, stream: str, gap: _Gap) -> None:
        if gap.missing:
            self._observer.notify(
                f"{gap.missing} bytes that {task.name} wrote to {stream} are missing here; "
                f"they are in its sandbox on {task.node}"
            )
            gap.missing, gap.reported_s = 0, self._clock()

    def _request(self, task: JobTask, streams: Sequence[str]) -> None:
        for stream in streams:
            self._requests[task.task_id, stream] = _Request(self._clock())
        self._send_request(task, streams)

    def _send_request(self, task: JobTask, streams: Sequence[str]) -> None:
        wanted = WantedOutput({stream: task.received.get(stream, 0) for stream in streams})
        self._outbox.append(Message(task.task_id, wanted.encode()))


def apply_status(task: JobTask, state: TaskState, status: Mapping[str, Any]) -> bool:
    """Applies a status update to its task; returns whether the state changed."""
    changed = task.state is not state
    task.state = state
    task.executor_seen = task.executor_seen or status.get("source") == "SOURCE_EXECUTOR"
    task.message = status.get("message", "")
    task.reason = status.get("reason", "")
    task.finished = task.finished or state is TaskState.FINISHED
    if status.get("data") and state.is_terminal():
        task.outcome = _read_outcome(status["data"])
    return changed


def _read_outcome(data: str) -> Outcome | None:
    try:
        return Outcome.decode(data)
    except ValueError as error:
        logger.warning("outcome of a task not readable: %s", error)
        return None


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    """The number that a task has sent; None if it is not one, or too large for a database."""
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(number, int) and abs(number) > typed.MAX_INT else number


def _profile(values: Any) -> ModelProfile | None:
    try:
        profile = ModelProfile.from_json(values)
    except BadInputError as error:
        logger.warning("profile ignored: %s", error)
        return None
    return profile if len(profile.variables) <= MAX_VARIABLES else None
