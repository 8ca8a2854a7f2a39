"""Staying with a submitted job: its output as it comes, its end as an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import IO

from dike.exceptions import InterruptedByUserError, JobFailedError
from framework.cli.task_output import TaskOutput
from framework.service.api.schemas import JobDetails
from framework.service.client import ServiceClient
from framework.service.records import JobKind, JobState

Say = Callable[[str], None]
"""Prints one line of Dike's own."""


def print_output(
    client: ServiceClient, job: JobDetails, streams: dict[str, IO[str]], say: Say, *, task: str | None, follow: bool
) -> None:
    """Prints what a job's tasks have written, and with `follow` what they write until it has ended.

    Args:
        client: the service.
        job: whose output.
        streams: `stdout` and `stderr` -> where it goes.
        say: told when the connection is lost.
        task: only this task's; None for all.
        follow: whether to stay.
    """
    several = job.kind is JobKind.SEARCH or job.request is None or bool(job.request.get("stream_all_logs"))
    output = TaskOutput(streams)
    try:
        with leaving_is_fine(job.id):
            for chunk in client.logs(job.id, task=task, follow=follow, note=say):
                label = f"[{chunk.task}] " if several and task is None else ""
                output.write(chunk.task, chunk.stream, chunk.text, label)
    finally:
        output.finish()


@contextlib.contextmanager
def leaving_is_fine(job_id: str) -> Iterator[None]:
    """Ctrl-C ends the watching, not the job.

    Raises:
        InterruptedByUserError: after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUserError(
            f"The job {job_id} goes on without us; dike logs {job_id} -f shows it again, dike kill {job_id} ends it."
        ) from None


def check_success(job: JobDetails) -> None:
    """Does nothing for a job that has ended well.

    Raises:
        JobFailedError: if it has not.
    """
    if job.state is JobState.KILLED:
        raise JobFailedError(f"The job {job.id} was killed.")
    if job.state is not JobState.FINISHED:
        raise JobFailedError(f"The job {job.id} failed: {job.failure.rstrip('.')}.")
