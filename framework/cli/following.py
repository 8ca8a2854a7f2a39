"""From a submitted job's name to its end: its output as it comes, how it ended as an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import IO

from rich.console import Console

from dike.exceptions import InterruptedByUserError, JobFailedError
from framework.cli.task_output import TaskOutput
from framework.service.api.schemas import JobDetails, Submitted
from framework.service.client import ServiceClient
from framework.service.records import JobKind, JobState

Note = Callable[[str], None]
"""Tells the user something."""


def tell(submitted: Submitted, out: Console) -> None:
    """Says under which name a job was taken in, and what its user should know."""
    for warning in submitted.warnings:
        say(out, f"warning: {warning}")
    say(out, f"submitted {submitted.id}")


def say(out: Console, text: str) -> None:
    """Prints one line of Dike's own."""
    out.print(f"dike: {text}", markup=False, soft_wrap=True)


def print_output(
    client: ServiceClient, job: JobDetails, streams: dict[str, IO[str]], note: Note, *, task: str | None, follow: bool
) -> None:
    """Prints what a job's tasks have written, and with `follow` what they write until it has ended.

    Args:
        client: the service.
        job: whose output.
        streams: `stdout` and `stderr` -> where it goes.
        note: told when the connection is lost.
        task: only this task's; None for all.
        follow: whether to stay.
    """
    several = job.kind is JobKind.SEARCH or job.request is None or bool(job.request.get("stream_all_logs"))
    output = TaskOutput(streams)
    try:
        with leaving_is_fine(job.id):
            for chunk in client.logs(job.id, task=task, follow=follow, note=note):
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
