"""What the scheduler writes down, and when; this base keeps nothing, as suits a framework that ends with its job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dike.exceptions import BadInputError, JobFailedError
from framework.scheduler.records import TaskRecord


class Journal:
    """Hears of everything that has to outlive the service.

    Each call is durable when it returns. `intends` is called before the master is: what it has not written is never
    launched. `changed` is called before the status updates behind it are acknowledged.
    """

    def subscribed(self, framework_id: str) -> None:
        """The master knows us under this id."""

    def record_intent(self, job_id: str, tasks: Sequence[TaskRecord], state: dict[str, Any]) -> None:
        """A job is about to launch these tasks; `state` is its `Job.to_state`."""

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        """Tasks have other states, and jobs too: job -> its `Job.to_state`."""

    def record_unknown_task(self, task_id: str, agent_id: str) -> None:
        """The master names a task that no job knows; it is being killed."""


class LeaseLostError(JobFailedError):
    """Another process has taken over what this one was to write; nothing more may be done in its name."""


class ServiceLeaseLostError(LeaseLostError):
    """What was taken over is the service, and with it all its jobs."""

    exit_code = os.EX_TEMPFAIL


class StorageUnavailableError(BadInputError):
    """The database cannot be reached, or cannot write: no fault of what was to be written."""
