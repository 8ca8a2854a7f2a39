"""Follows a submitted job until it ends: prints its output, and converts its end to an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO
from urllib.parse import quote

from rich.console import Console

from dike.exceptions import BadInputError, InterruptedByUserError, JobFailedError
from framework.cli.task_output import TaskOutput
from framework.project.tensorflow_noise import is_noise, without_noise
from framework.scheduler.records import JobKind, JobState, OutputChunk
from framework.service.access import DEFAULT_SERVICE, SERVICE_VARIABLE
from framework.service.api.client import ServiceClient
from framework.service.api.schemas import JobDetails, Submitted
from solver.cli.output import console, print_json, say

Note = Callable[[str], None]
"""Prints a line for the user."""


def report_submission(submitted: Submitted, out: Console, what: str) -> None:
    """Prints the name of a submitted job, and the service's warnings."""
    for warning in submitted.warnings:
        say(out, f"warning: {warning}")
    say(out, f"{what} {submitted.id}")


def print_next_commands(submitted: Submitted, out: Console, url: str) -> None:
    """Prints the commands for a submitted job, and the address of its page."""
    is_usual = url == os.environ.get(SERVICE_VARIABLE, DEFAULT_SERVICE).rstrip("/")
    end = submitted.id if is_usual else f"{submitted.id} --service {url}"
    commands = {"its output": "logs -f", "why it waits": "explain", "kill it": "kill"}
    if submitted.kind is JobKind.SEARCH:
        commands = {"its trials": "jobs", **commands}
    for what, command in commands.items():
        say(out, f"{f'{what}:':14}dike {command} {end}")
    say(out, f"{'page:':14}{url}/#/jobs/{quote(submitted.id, safe='')}")


@dataclass(frozen=True)
class FollowMode:
    """What a command does after it has submitted a job.

    Attributes:
        wait: whether it waits for the job's end.
        follow: whether it waits and prints the job's output.
        as_json: whether it prints the job as JSON; nothing else goes to standard output then.
    """

    wait: bool
    follow: bool
    as_json: bool

    @property
    def out(self) -> Console:
        """Console for Dike's own lines: standard error if a job's output or JSON goes to standard output."""
        return console(stderr=self.as_json or self.follow)

    def after(self, client: ServiceClient, submitted: Submitted, *, resumed: bool = False) -> None:
        """Reports the submission, and waits for the job's end if asked to.

        Args:
            client: the service.
            submitted: its answer.
            resumed: whether the job was resumed; earlier output is not printed again.

        Raises:
            InterruptedByUserError: after Ctrl-C; the job continues.
            JobFailedError: the job failed or was killed.
        """
        report_submission(submitted, self.out, "resumed" if resumed else "submitted")
        last: Submitted | JobDetails = submitted
        if not self.wait and not self.follow:
            print_next_commands(submitted, self.out, client.url)
        else:
            last = self._end_of(client, submitted.id, tail=0 if resumed else None)
        if self.as_json:
            print_json(last.model_dump(mode="json"))
        if isinstance(last, JobDetails):
            check_success(last)
            say(self.out, f"{last.id} finished")

    def _end_of(self, client: ServiceClient, job_id: str, tail: int | None) -> JobDetails:
        def note(text: str) -> None:
            say(self.out, text)

        if self.follow:
            streams = {"stdout": sys.stderr if self.as_json else sys.stdout, "stderr": sys.stderr}
            print_output(client, client.job(job_id), streams, note, follow=True, tail=tail)
        with detach_on_interrupt(job_id):
            return client.wait_for_end(job_id, note)


def print_output(
    client: ServiceClient,
    job: JobDetails,
    streams: dict[str, IO[str]],
    note: Note,
    *,
    task: str | None = None,
    trial: int | None = None,
    follow: bool,
    tail: int | None = None,
) -> None:
    """Prints the output of a job's tasks.

    Args:
        client: the service.
        job: the job.
        streams: `stdout` and `stderr` -> stream to print to.
        note: called when the connection is lost.
        task: the only task to print; None for all.
        trial: number of a search's trial to print; None for the output of the search itself.
        follow: whether to print new output until the job ends.
        tail: maximum number of lines of earlier output; None for all.

    Raises:
        BadInputError: if the job has no such task.
    """
    if task is not None:
        _check_task(client, job, task)
    several = job.kind is JobKind.SEARCH or job.request is None or bool(job.request.get("stream_all_logs"))
    output = TaskOutput(streams)
    try:
        with detach_on_interrupt(job.id):
            for chunk in _chunks(client, job.id, note, task, trial, follow=follow, tail=tail):
                label = f"[{chunk.task}] " if several and task is None and trial is None else ""
                # A trial's two streams are one.
                text = chunk.text if trial is None else without_noise(chunk.text)
                output.write(chunk.task, chunk.stream, text, label)
    finally:
        output.finish()


def _check_task(client: ServiceClient, job: JobDetails, name: str) -> None:
    # A search has one source, the last output of failed trials; `--trial` selects a trial's own output.
    of_a_search = ["trials"] if job.kind is JobKind.SEARCH else []
    known = of_a_search or sorted({task.name for task in client.tasks(job.id)})
    if name not in known:
        raise BadInputError(f"Job {job.id} has no task {name}; it has {', '.join(known) or 'none yet'}.")


def _chunks(
    client: ServiceClient,
    job_id: str,
    note: Note,
    task: str | None,
    trial: int | None,
    *,
    follow: bool,
    tail: int | None,
) -> Iterator[OutputChunk]:
    after = 0
    if tail is not None:
        so_far = list(client.logs(job_id, task=task, trial=trial, note=note))
        yield from last_lines(so_far, tail)
        if not follow:
            return
        after = so_far[-1].number if so_far else 0
    yield from client.logs(job_id, task=task, trial=trial, after=after, follow=follow, note=note)


def last_lines(chunks: Sequence[OutputChunk], count: int) -> list[OutputChunk]:
    """Returns the last lines of an output, unfinished ones last, without TensorFlow's usual messages."""
    lines: list[OutputChunk] = []
    begun: dict[tuple[str, str], str] = {}
    for chunk in chunks:
        source = chunk.task, chunk.stream
        *ended, begun[source] = (begun.get(source, "") + chunk.text).split("\n")
        shown = [line for line in ended if chunk.stream != "stderr" or not is_noise(line.encode())]
        lines += [dataclasses.replace(chunk, text=f"{line}\n") for line in shown]
    number = chunks[-1].number if chunks else 0
    lines += [OutputChunk(number, task, stream, text) for (task, stream), text in begun.items() if text]
    return lines[max(0, len(lines) - count) :]


@contextlib.contextmanager
def detach_on_interrupt(job_id: str) -> Iterator[None]:
    """Converts Ctrl-C to `InterruptedByUserError`: it ends the command, not the job."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUserError(
            f"Interrupted; the job {job_id} continues. dike logs {job_id} -f shows its output, dike kill {job_id} ends "
            "it."
        ) from None


def check_success(job: JobDetails) -> None:
    """Raises `JobFailedError` unless an ended job has finished."""
    if job.state is JobState.KILLED:
        raise JobFailedError(f"The job {job.id} was killed.")
    if job.state is not JobState.FINISHED:
        raise JobFailedError(f"The job {job.id} failed: {job.failure.rstrip('.')}.")
