"""What whoever watches a job is notified of."""

from __future__ import annotations

from collections.abc import Sequence

from executor.messages import LogChunk
from framework.training.spec import JobTask, Resize
from solver import Plan


class JobObserver:
    """Is notified of everything worth showing; this base class ignores it all.

    All methods are called on the job's thread and must return soon.
    """

    def waiting(self, reason: str) -> None:
        """The job cannot start yet; `reason` says per resource and agent what is missing."""

    def planned(self, plan: Plan) -> None:
        """A plan was made and is about to be launched."""

    def launched(self, tasks: Sequence[JobTask]) -> None:
        """The tasks were handed to Mesos."""

    def task_changed(self, task: JobTask) -> None:
        """A task has another state."""

    def progress(self, task: JobTask) -> None:
        """A task reported a step."""

    def log(self, task: JobTask, chunk: LogChunk) -> None:
        """A piece of a task's output has come."""

    def checkpoint(self, path: str, step: int) -> None:
        """A checkpoint was written."""

    def resizing(self, workers: int, ps: int, reason: str) -> None:
        """The job is about to change to so many workers and parameter servers."""

    def resized(self, resize: Resize) -> None:
        """A change of size is complete: the job trains again."""

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        """A failure is survived: all tasks, or the one that was lost, start again."""

    def notify(self, text: str) -> None:
        """Anything else a user should know."""
