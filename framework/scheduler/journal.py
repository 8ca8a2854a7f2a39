"""Interface of durable storage; this base class stores nothing, for a framework that ends with its job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dike.exceptions import BadInputError, JobFailedError
from framework.scheduler.records import TaskRecord


class Journal:
    """Stores everything that must survive a restart of the service.

    Each call is durable when it returns. `record_intent` is called before ACCEPT, so that every running task is stored,
    and `record_changes` before the status updates behind the changes are acknowledged.
    """

    def subscribed(self, framework_id: str) -> None:
        """Stores the id that the master assigned to this framework."""

    def record_intent(self, job_id: str, tasks: Sequence[TaskRecord], state: dict[str, Any]) -> None:
        """Stores tasks that a job is about to launch, and the job's `Job.to_state`."""

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        """Stores changed tasks and the changed `Job.to_state` of jobs."""

    def record_unknown_task(self, task_id: str, agent_id: str) -> None:
        """Notes a task that the master reports and no job knows; it is being killed."""


class LeaseLostError(JobFailedError):
    """Another process has taken over the row; this one must not write it any more."""


class ServiceLeaseLostError(LeaseLostError):
    """Another process has taken over the service, and all its jobs."""

    exit_code = os.EX_TEMPFAIL


class StorageUnavailableError(BadInputError):
    """The database cannot be reached or written; no fault of the data."""
