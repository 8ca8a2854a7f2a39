"""A client of a service's REST API (`framework.service.api.app`)."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from backports import tarfile  # Python's own has filters since 3.11.4; Debian 12 has 3.11.2

from dike.exceptions import BadInputError, DikeError
from framework.scheduler.records import JobState, OutputChunk, TaskRecord
from framework.service.api.client_http import ServiceHttp, ServiceUnavailableError
from framework.service.api.cluster_schemas import ClusterView, UsageList, UsageView
from framework.service.api.schemas import (
    EventList,
    EventView,
    ImportanceView,
    JobDetails,
    JobList,
    JobView,
    Me,
    OutputFileView,
    OutputList,
    PlanView,
    Submitted,
    TaskList,
    TrialList,
)
from framework.service.explanation import Explanation

if TYPE_CHECKING:
    from framework.service.requests import Resumption, SearchJobRequest, TrainingRequest

RECONNECT_TIMEOUT_S = 600.0
"""Maximum time that a follower waits for a service that is away."""
RECONNECT_PAUSE_S = 1.0
POLL_INTERVAL_S = 0.5
PAGE_SIZE = 200


class ServiceClient:
    """The client behind `dike submit`, `jobs`, `logs`, `kill` and `explain`.

    Raises:
        BadInputError: from every method, if no service answers or it refuses the request.
        DikeError: from every method, if the service fails.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._http = ServiceHttp(url, token)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        return self._http.url

    def me(self) -> Me:
        return self._http.get("/me", Me)

    def submit_request(self, request: TrainingRequest | SearchJobRequest, bundle: bytes) -> Submitted:
        """Submits a job with its bundle; it is durable when this returns."""
        return self._http.post(
            "/jobs",
            Submitted,
            data={"request": request.dumps()},
            files={"bundle": ("bundle.tar.gz", io.BytesIO(bundle), "application/gzip")},
        )

    def usage(self, weeks: int) -> list[UsageView]:
        return self._http.get("/usage", UsageList, {"weeks": weeks}).usage

    def release(self, job_id: str) -> JobView:
        """Lets a held job start."""
        return self._http.post(f"{_path(job_id)}/release", JobView)

    def resume(self, job_id: str, resumption: Resumption) -> Submitted:
        """Resumes a search that has ended."""
        return self._http.post(f"{_path(job_id)}/resume", Submitted, json=resumption.model_dump(mode="json"))

    def jobs(self, *, user: str | None = None, states: tuple[JobState, ...] = ()) -> Iterator[JobView]:
        """Jobs, newest first; with all states if `states` is empty."""
        for page in self.job_pages(user=user, states=states):
            yield from page.jobs

    def job_pages(
        self,
        *,
        user: str | None = None,
        states: Collection[JobState] = (),
        order: Literal["newest", "queue"] = "newest",
        limit: int = PAGE_SIZE,
    ) -> Iterator[JobList]:
        """Jobs, page by page; at least one page, which may be empty. For `order` see `GET /jobs`."""
        wanted: dict[str, Any] = {"limit": limit, "state": [str(state) for state in states], "order": order}
        if user is not None:
            wanted["user"] = user
        while True:
            page = self._http.get("/jobs", JobList, wanted)
            yield page
            if page.before is None:
                return
            wanted["before"] = page.before

    def job(self, job_id: str) -> JobDetails:
        return self._http.get(_path(job_id), JobDetails)

    def find(self, job_id: str) -> JobDetails | None:
        return self._http.get_or_none(_path(job_id), JobDetails)

    def kill(self, job_id: str) -> JobView:
        return self._http.post(f"{_path(job_id)}/kill", JobView)

    def tasks(self, job_id: str) -> list[TaskRecord]:
        return self._http.get(f"{_path(job_id)}/tasks", TaskList).tasks

    def events(self, job_id: str, *, after: int = 0) -> list[EventView]:
        """Events of a job with numbers above `after`, oldest first."""
        found: list[EventView] = []
        while True:
            page = self._http.get(f"{_path(job_id)}/events", EventList, {"after": after, "limit": PAGE_SIZE})
            found += page.events
            if not page.events:
                return found
            after = page.after

    def plan(self, job_id: str) -> dict[str, Any] | None:
        """The plan of a training job; None before it is planned."""
        return self._http.get(f"{_path(job_id)}/plan", PlanView).plan

    def trials(self, job_id: str) -> TrialList:
        return self._http.get(f"{_path(job_id)}/trials", TrialList)

    def importance(self, job_id: str) -> ImportanceView:
        return self._http.get(f"{_path(job_id)}/importance", ImportanceView)

    def outputs(self, job_id: str) -> OutputList:
        """The files that a job's script has written."""
        return self._http.get(f"{_path(job_id)}/outputs", OutputList)

    def output_content(self, job_id: str, path: str) -> Iterator[bytes]:
        return self._http.blocks(f"{_path(job_id)}/outputs/content", {"path": path})

    def download(
        self, job_id: str, folder: str | os.PathLike[str], files: Iterable[OutputFileView] | None = None
    ) -> list[Path]:
        """Downloads files that a job's script has written below `folder`, keeping their relative paths; None for all.

        Returns:
            The local files; without those that the script has removed meanwhile.

        Raises:
            BadInputError: if the service cannot provide any, or they cannot be written.
        """
        if files is None:
            found = self.outputs(job_id)
            if found.unreachable and not found.files:
                raise BadInputError(found.unreachable)
            files = found.files
        copies = []
        try:
            for file in files:
                path = PurePosixPath(file.path)
                if path.is_absolute() or ".." in path.parts:
                    raise BadInputError(f"The service names an output '{path}', which is no path in a folder.")
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                if self._copy(job_id, file.path, target):
                    copies.append(target)
        except OSError as error:
            raise BadInputError(f"The outputs cannot be written to {folder}: {error.strerror}.") from error
        return copies

    def _copy(self, job_id: str, path: str, target: Path) -> bool:
        partial = target.with_name(f"{target.name}.part")
        try:
            with partial.open("wb") as local:
                local.writelines(self.output_content(job_id, path))
            partial.replace(target)
        except ServiceUnavailableError:
            raise
        except BadInputError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        return True

    def model(self, job_id: str, folder: Path, trial: int | None = None, epoch: str | None = None) -> None:
        """Downloads the checkpoint folder of a model into `folder`.

        Args:
            job_id: a training job or a search.
            folder: the local parent.
            trial: the trial, of a search.
            epoch: `best` or `last`; None for the best, or the last if no best one was kept.
        """
        wanted = {name: value for name, value in {"trial": trial, "epoch": epoch}.items() if value is not None}
        with tempfile.TemporaryFile() as archive:
            archive.writelines(self._http.blocks(f"{_path(job_id)}/model", wanted))
            archive.seek(0)
            with tarfile.open(fileobj=archive) as files:
                files.extractall(folder, filter="data")

    def cluster(self) -> ClusterView:
        return self._http.get("/cluster", ClusterView)

    def runs_here(self) -> bool:
        """Whether the service's tasks run on this machine under this account."""
        # Imported late: only needed to submit a job.
        from framework.scheduler.mesos_access import this_machine

        return self.cluster().machine == this_machine()

    def explain(self, job_id: str) -> Explanation:
        return self._http.get(f"{_path(job_id)}/explain", Explanation)

    def logs(
        self,
        job_id: str,
        *,
        task: str | None = None,
        trial: int | None = None,
        after: int = 0,
        follow: bool = False,
        note: Callable[[str], None] | None = None,
    ) -> Iterator[OutputChunk]:
        """Streams a job's output, each chunk once.

        Args:
            job_id: the job.
            task: only this task's, such as `worker:0`.
            trial: output of this trial of a search; None for that of the job itself.
            after: only chunks with numbers above it.
            follow: whether to continue until the job or trial has ended; retries while the service is away.
            note: called with a message when the connection is lost and when it is back.
        """
        notify = note or (lambda text: None)
        lost_s: float | None = None
        while True:
            asked = {"task": task, "trial": trial, "after": after, "follow": follow}
            wanted = {name: value for name, value in asked.items() if value is not None}
            try:
                for line in self._http.lines(f"{_path(job_id)}/logs", wanted):
                    if lost_s is not None:
                        notify("the service is back")
                        lost_s = None
                    if "ended" in line:
                        return
                    if line:
                        after = int(line["number"])
                        yield OutputChunk(after, line["task"], line["stream"], line["text"])
                if not follow:
                    return
            except ServiceUnavailableError:
                if not follow or (lost_s is not None and time.monotonic() - lost_s > RECONNECT_TIMEOUT_S):
                    raise
            if lost_s is None:
                lost_s = time.monotonic()
                notify(f"the connection to the service at {self.url} is lost; trying again")
            time.sleep(RECONNECT_PAUSE_S)

    def wait_for_end(self, job_id: str, note: Callable[[str], None], timeout_s: float | None = None) -> JobDetails:
        """Waits until a job has ended and returns it; retries while the service is away.

        `note` is called with a message when it goes away and when it is back. Raises `DikeError` after the timeout.
        """
        lost_s: float | None = None
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                job = self.job(job_id)
            except ServiceUnavailableError:
                if lost_s is None:
                    lost_s = time.monotonic()
                    note(f"the service at {self.url} does not answer; trying again")
                elif time.monotonic() - lost_s > RECONNECT_TIMEOUT_S:
                    raise
            else:
                if lost_s is not None:
                    note("the service is back")
                    lost_s = None
                if job.state.has_ended():
                    return job
            if until_s is not None and time.monotonic() > until_s:
                raise DikeError(f"The job {job_id} has not ended within {timeout_s:g} s; it keeps running.")
            time.sleep(POLL_INTERVAL_S)


def _path(job_id: str) -> str:
    # An id from the shell may contain bytes that are not UTF-8.
    return f"/jobs/{quote(job_id, safe='', errors='surrogateescape')}"
