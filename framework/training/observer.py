"""Notifications about a training job."""

from __future__ import annotations

from collections.abc import Sequence

from executor.messages import LogChunk
from framework.training.spec import JobTask, Resize
from solver import Plan


class JobObserver:
    """Receives all notifications of a job; this base class ignores them.

    Methods are called on the job's thread and must return soon.
    """

    def waiting(self, reason: str) -> None:
        """The job cannot start; `reason` lists what is missing per resource and agent."""

    def planned(self, plan: Plan) -> None:
        """A plan is about to be launched."""

    def launched(self, tasks: Sequence[JobTask]) -> None:
        """The tasks were passed to Mesos."""

    def task_changed(self, task: JobTask) -> None: ...

    def progress(self, task: JobTask) -> None: ...

    def log(self, task: JobTask, chunk: LogChunk) -> None: ...

    def checkpoint(self, path: str, step: int) -> None: ...

    def resizing(self, workers: int, ps: int, reason: str) -> None:
        """A change to these counts begins."""

    def resized(self, resize: Resize) -> None:
        """A change of size is complete: the job trains again."""

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        """A failure is survived: all tasks, or the lost one, restart."""

    def notify(self, text: str) -> None:
        """Any other message for the user."""
