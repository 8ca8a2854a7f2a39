"""The page of a service for the searches of a database, without a service: `dike tune --page`, `dike trials --page`.

The API reads jobs from the database of a service. Here that is a temporary one, with a job for each search; what the
page shows of a search comes from the database of searches. Clients can change nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

from dike.exceptions import BadInputError
from framework.scheduler.records import JobKind, JobRecord, JobState
from framework.scheduler.snapshot import Snapshot
from framework.search.database import open_database
from framework.search.store import SearchSummary, Store
from framework.service.api.backend import Backend, SearchDatabase
from framework.service.api.front import ApiFront
from framework.service.metrics import ServiceMetrics
from framework.service.requests import request_of_search
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import User, Users, account_name, digest, new_token

logger = logging.getLogger(__name__)

LISTEN = "127.0.0.1:0"
UPDATE_INTERVAL_S = 1.0
_CHANGING = ("state", "failure", "ended_s", "request")
"""Fields of a job that a search may change."""


@contextlib.contextmanager
def search_page(url: str, name: str | None = None) -> Iterator[str]:
    """Serves the page for the searches of a database within the context.

    Args:
        url: an SQLAlchemy URL.
        name: search that the page shows first, even if it does not exist yet; None for the list.

    Yields:
        The page's address, which signs in.

    Raises:
        BadInputError: if the database cannot be used.
    """
    token = new_token()
    user = User(account_name(), admin=True)
    engine = open_database(url)
    with contextlib.ExitStack() as stack:
        searches = stack.enter_context(contextlib.closing(Store(url, engine=engine)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dike-page-"))
        jobs = stack.enter_context(contextlib.closing(ServiceStore(f"sqlite:///{folder}/jobs.db")))
        backend = Backend(
            submissions=Submissions(jobs, queue.SimpleQueue()),
            users=Users(lambda: {digest(token): user}),
            master=None,
            metrics=ServiceMetrics(jobs),
            snapshot=lambda: Snapshot(time.time()),
            searches=SearchDatabase(url, engine),
        )
        front = stack.enter_context(contextlib.closing(ApiFront(LISTEN, backend.users)))
        stack.enter_context(_updated(jobs, searches, user.name))
        stack.enter_context(front.serving(backend))
        shown = "" if name is None else f"/jobs/{quote(name, safe='')}"
        yield f"{front.url}/#token={token}{shown}"


@contextlib.contextmanager
def _updated(jobs: ServiceStore, searches: Store, user: str) -> Iterator[None]:
    """Keeps the jobs equal to the searches within the context, in a thread."""
    ending = threading.Event()
    update_jobs(jobs, searches, user)

    def update() -> None:
        while not ending.wait(UPDATE_INTERVAL_S):
            try:
                update_jobs(jobs, searches, user)
            except BadInputError as error:
                logger.warning("the page is not up to date: %s", error)

    thread = threading.Thread(target=update, name="dike-page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def update_jobs(jobs: ServiceStore, searches: Store, user: str) -> None:
    """Adds a job for each new search, changes those of others, and deletes those of deleted ones."""
    known = {record.id: record for record in jobs.jobs()}
    records = [job_of(summary, user) for summary in searches.searches()]
    begun_s = {record.id: record.submitted_s for record in records}
    gone = [name for name, record in known.items() if begun_s.get(name) != record.submitted_s]
    for name in gone:
        del known[name]
        jobs.change_job(name, ended_s=0.0)
    if gone:
        jobs.delete_jobs(math.inf, gone)
    for record in records:
        if record.id not in known:
            jobs.add_job(record, b"")
        elif changes := {
            name: new for name in _CHANGING if (new := getattr(record, name)) != getattr(known[record.id], name)
        }:
            jobs.change_job(record.id, **changes)


def job_of(summary: SearchSummary, user: str) -> JobRecord:
    """A search as the record of a job."""
    spec, failure = summary.spec, summary.failure
    state = JobState.FAILED if failure else JobState.FINISHED
    if summary.is_running:
        state, failure = JobState.RUNNING, ""
    elif summary.ended_s is None:
        state, failure = JobState.KILLED, f"interrupted; dike tune --resume {spec.name} resumes it"
    return JobRecord(
        id=spec.name,
        kind=JobKind.SEARCH,
        user=user,
        script=spec.entry.path,
        bundle_token=spec.name,  # there is no bundle, and tokens are unique
        request=request_of_search(spec),
        constraints=(),
        submitted_s=summary.created_s,
        state=state,
        started_s=summary.created_s,
        ended_s=None if summary.is_running else summary.ended_s,
        failure=failure,
    )
