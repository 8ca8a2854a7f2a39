"""What executors say of a job's tasks: output, progress, checkpoints, placement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dike import typed
from executor.elastic_messages import ElasticStatus, decode_job_message
from executor.messages import LogChunk, Outcome
from framework.job import JobResult, JobSpec, JobTask, TaskState
from framework.observer import JobObserver
from framework.output import OutputReader

logger = logging.getLogger(__name__)


class ReportListener:
    """Hears what concerns the size of a job; this base class ignores it all."""

    def progressed(self, task: JobTask) -> None:
        """A task has reported a step; `task` has it."""

    def saved(self, step: int) -> None:
        """A checkpoint was written."""

    def resumed(self, step: int) -> None:
        """A checkpoint has been restored."""

    def total(self, steps: int) -> None:
        """The script has said how long it trains."""

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        """A task knows its own or others' speed: index of a worker -> steps a second."""

    def status(self, status: ElasticStatus) -> None:
        """The slot of an elastic job has said how it stands."""


class ReportReader:
    """Takes executors' messages in; whoever sends nonsense is logged and otherwise ignored.

    Args:
        spec: the job.
        result: gets the chief's progress and checkpoints, and the placement.
        observer: is told.
        listener: hears what concerns the size of the job.
        output: gets the output.
    """

    def __init__(
        self,
        spec: JobSpec,
        result: JobResult,
        observer: JobObserver,
        listener: ReportListener,
        output: OutputReader,
    ) -> None:
        self._spec = spec
        self._result = result
        self._observer = observer
        self._listener = listener
        self._output = output
        self.stepped = False
        """Whether any task has reported a step since this was last set to false."""

    def read(self, data: str, tasks: Mapping[str, JobTask]) -> None:
        """Reads one framework message, in base64, from one of `tasks` (by id)."""
        try:
            message = decode_job_message(data)
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        task = tasks.get(message.task_id)
        if task is None:
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
                self._result.placement.update(
                    {str(name): str(device) for name, device in _mapping(content.get("variables")).items()}
                )
            case "checkpoint":
                step = _number(content.get("step"), int) or 0
                self._result.checkpoint_step = step
                self._observer.checkpoint(str(content.get("path", "")), step)
                self._listener.saved(step)
            case "resumed":
                self._listener.resumed(_number(content.get("step"), int) or 0)
            case "total":
                if (steps := _number(content.get("steps"), int)) is not None:
                    self._listener.total(steps)
            case "rates":
                self._rates(task, _mapping(content.get("workers")))

    def _progress(self, task: JobTask, content: Mapping[str, Any]) -> None:
        self.stepped = True
        task.step = _number(content.get("step"), int)
        task.loss = _number(content.get("loss"), float)
        task.samples_per_s = _number(content.get("samples_per_s"), float)
        if self._spec.is_chief(task.planned):
            self._result.steps, self._result.loss = task.step, task.loss
        self._observer.progress(task)
        self._listener.progressed(task)

    def _rates(self, task: JobTask, workers: Mapping[Any, Any]) -> None:
        read = {_number(index, int): _number(rate, float) for index, rate in workers.items()}
        known = {index: rate for index, rate in read.items() if index is not None and rate is not None and rate >= 0}
        if known:
            self._listener.rates(task, known)


def take_status(task: JobTask, state: TaskState, status: Mapping[str, Any]) -> bool:
    """Takes a status update into its task; returns whether the state is another one."""
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
    """How a process ended, from the data of its last status update; None if that cannot be read."""
    try:
        return Outcome.decode(data)
    except ValueError as error:
        logger.warning("outcome of a task not readable: %s", error)
        return None


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    """The number that a task has sent; None if it is none, or no database can keep it."""
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(number, int) and abs(number) > typed.LARGEST else number
