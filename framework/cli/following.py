"""From a submitted job's name to its end: its output as it comes, how it ended as an exit code."""

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
"""Tells the user something."""


def tell(submitted: Submitted, out: Console, what: str) -> None:
    """Says under which name a job was taken in, and what its user should know."""
    for warning in submitted.warnings:
        say(out, f"warning: {warning}")
    say(out, f"{what} {submitted.id}")


def tell_what_next(submitted: Submitted, out: Console, url: str) -> None:
    """Says which commands go on with a job, and where the page shows it.

    Args:
        submitted: the job.
        out: where to.
        url: the service's address.
    """
    is_usual = url == os.environ.get(SERVICE_VARIABLE, DEFAULT_SERVICE).rstrip("/")
    end = submitted.id if is_usual else f"{submitted.id} --service {url}"
    commands = {"its output": "logs -f", "why it waits": "explain", "end it": "kill"}
    if submitted.kind is JobKind.SEARCH:
        commands = {"its trials": "jobs", **commands}
    for what, command in commands.items():
        say(out, f"{f'{what}:':14}dike {command} {end}")
    say(out, f"{'page:':14}{url}/#/jobs/{quote(submitted.id, safe='')}")


@dataclass(frozen=True)
class Staying:
    """What is done when a service has taken a job in.

    Attributes:
        wait: whether to stay until the job has ended.
        follow: whether to stay and show what it prints.
        as_json: whether to print what the service knows of it; standard output is for that alone.
    """

    wait: bool
    follow: bool
    as_json: bool

    @property
    def out(self) -> Console:
        """Where Dike's own lines go: what a job prints, and JSON, have standard output to themselves."""
        return console(stderr=self.as_json or self.follow)

    def after(self, client: ServiceClient, submitted: Submitted, *, resumed: bool = False) -> None:
        """Tells the user, and stays until the job has ended if that was asked for.

        Args:
            client: the service.
            submitted: what it has answered.
            resumed: whether the job has been there before; what it printed then is not shown again.

        Raises:
            InterruptedByUserError: after Ctrl-C; the job goes on.
            JobFailedError: if it has not ended well.
        """
        tell(submitted, self.out, "resumed" if resumed else "submitted")
        last: Submitted | JobDetails = submitted
        if not self.wait and not self.follow:
            tell_what_next(submitted, self.out, client.url)
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
        with leaving_is_fine(job_id):
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
    """Prints what a job's tasks have written, and with `follow` what they write until it has ended.

    Args:
        client: the service.
        job: whose output.
        streams: `stdout` and `stderr` -> where it goes.
        note: told when the connection is lost.
        task: only this task's; None for all.
        trial: of a search, what the trial of this number has printed; None for what the search itself tells.
        follow: whether to stay.
        tail: of what has been written so far, only so many lines; None for all.

    Raises:
        BadInputError: if the job has no such task.
    """
    if task is not None:
        _check_task(client, job, task)
    several = job.kind is JobKind.SEARCH or job.request is None or bool(job.request.get("stream_all_logs"))
    output = TaskOutput(streams)
    try:
        with leaving_is_fine(job.id):
            for chunk in _chunks(client, job.id, note, task, trial, follow=follow, tail=tail):
                label = f"[{chunk.task}] " if several and task is None and trial is None else ""
                # A trial's two streams are one.
                text = chunk.text if trial is None else without_noise(chunk.text)
                output.write(chunk.task, chunk.stream, text, label)
    finally:
        output.finish()


def _check_task(client: ServiceClient, job: JobDetails, name: str) -> None:
    # What its failed trials printed last is in one; what each trial prints, `--trial` shows.
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
    """The last lines of an output, those that have not ended last; what TensorFlow always says does not count."""
    lines: list[OutputChunk] = []
    begun: dict[tuple[str, str], str] = {}
    for chunk in chunks:
        source = chunk.task, chunk.stream
        *ended, begun[source] = (begun.get(source, "") + chunk.text).split("\n")
        told = [line for line in ended if chunk.stream != "stderr" or not is_noise(line.encode())]
        lines += [dataclasses.replace(chunk, text=f"{line}\n") for line in told]
    number = chunks[-1].number if chunks else 0
    lines += [OutputChunk(number, task, stream, text) for (task, stream), text in begun.items() if text]
    return lines[max(0, len(lines) - count) :]


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
            f"Interrupted; the job {job_id} goes on. dike logs {job_id} -f shows it again, dike kill {job_id} ends it."
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
