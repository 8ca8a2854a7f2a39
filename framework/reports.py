"""What executors say of a job's tasks: output, progress, checkpoints, placement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from executor.messages import LogChunk, Outcome, Report, decode_message
from framework.job import JobResult, JobSpec, JobTask
from framework.observer import JobObserver

logger = logging.getLogger(__name__)


class ReportReader:
    """Takes executors' messages in; whoever sends nonsense is logged and otherwise ignored.

    Args:
        spec: the job.
        result: gets the chief's progress and placement.
        observer: is told.
    """

    def __init__(self, spec: JobSpec, result: JobResult, observer: JobObserver) -> None:
        self._spec = spec
        self._result = result
        self._observer = observer
        self.stepped = False
        """Whether any task has reported a step since this was last set to false."""

    def read(self, data: str, tasks: Mapping[str, JobTask]) -> None:
        """Reads one framework message, in base64, from one of `tasks` (by id)."""
        try:
            message = decode_message(data)
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        task = tasks.get(message.task_id)
        if task is None:
            return
        if isinstance(message, LogChunk):
            self._log(task, message)
        else:
            self._report(task, message)

    def _log(self, task: JobTask, chunk: LogChunk) -> None:
        missing = chunk.offset - task.received.get(chunk.stream, 0)
        if missing:
            self._observer.note(f"{missing} bytes of {task.name}'s {chunk.stream} were lost on their way")
        task.received[chunk.stream] = chunk.offset + len(chunk.data)
        self._observer.log(task, chunk)

    def _report(self, task: JobTask, report: Report) -> None:
        content = report.content
        match content.get("type"):
            case "progress":
                self.stepped = True
                task.step = _number(content.get("step"), int)
                task.loss = _number(content.get("loss"), float)
                task.samples_per_s = _number(content.get("samples_per_s"), float)
                if self._spec.is_chief(task.planned):
                    self._result.steps, self._result.loss = task.step, task.loss
                self._observer.progress(task)
            case "placement":
                variables = content.get("variables")
                variables = variables if isinstance(variables, dict) else {}
                self._result.placement.update({str(name): str(device) for name, device in variables.items()})
            case "checkpoint":
                self._observer.checkpoint(str(content.get("path", "")), _number(content.get("step"), int) or 0)


def read_outcome(data: str) -> Outcome | None:
    """How a process ended, from the data of its last status update; None if that cannot be read."""
    try:
        return Outcome.decode(data)
    except (ValueError, TypeError) as error:
        logger.warning("outcome of a task not readable: %s", error)
        return None


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        return None
