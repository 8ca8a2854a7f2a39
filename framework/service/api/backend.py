"""What the API's routes work with, and how they get at it."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, HTTPException, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from framework.mesos.master import LeadingMaster
from framework.scheduler.records import JobRecord
from framework.scheduler.snapshot import Snapshot
from framework.service import queries
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import User, Users

FOLLOWER_LIMIT = 64
"""How many clients may follow outputs at a time; each asks the database twice a second."""

_BEARER = HTTPBearer(auto_error=False, description="A token that the service's operator has given out.")


@dataclass(frozen=True)
class Backend:
    """The service, as far as its clients get to see it.

    Attributes:
        submissions: takes wishes in.
        users: who may ask.
        master: the leading Mesos master.
        metrics: what the service counts.
        snapshot: what the service's loop published last.
        closing: set once the service ends.
        followers: places for those who follow outputs.
    """

    submissions: Submissions
    users: Users
    master: LeadingMaster
    metrics: ServiceMetrics
    snapshot: Callable[[], Snapshot]
    closing: threading.Event = field(default_factory=threading.Event)
    followers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(FOLLOWER_LIMIT))

    @property
    def store(self) -> ServiceStore:
        """The database."""
        return self.submissions.store


def _backend(request: Request) -> Backend:
    found = request.app.state.backend
    assert isinstance(found, Backend)
    return found


async def _signed_in(
    backend: Annotated[Backend, Depends(_backend)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> User:
    user = backend.users.signed_in(credentials.credentials) if credentials is not None else None
    if user is None:
        said = "This token is nobody's" if credentials is not None else "There is no token"
        raise HTTPException(401, f"{said}; send 'Authorization: Bearer TOKEN'.", {"WWW-Authenticate": "Bearer"})
    return user


async def _signed_in_if_at_all(
    backend: Annotated[Backend, Depends(_backend)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> User | None:
    return None if credentials is None else await _signed_in(backend, credentials)


def _job(
    # Signed in first: to others it is no matter which jobs there are.
    user: Annotated[User, Depends(_signed_in)],
    backend: Annotated[Backend, Depends(_backend)],
    job_id: Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")],
) -> JobRecord:
    return find_job(backend, job_id)


def _own_job(user: Annotated[User, Depends(_signed_in)], job: Annotated[JobRecord, Depends(_job)]) -> JobRecord:
    if not is_of(job, user):
        raise HTTPException(
            403, f"Job '{job.id}' belongs to {job.user}; only {job.user} or an administrator may do that."
        )
    return job


def find_job(backend: Backend, job_id: str) -> JobRecord:
    """One job; raises a 404 that names the nearest if there is none."""
    record = backend.store.job(job_id)
    if record is None:
        with backend.store.database.reading() as connection:
            near = difflib.get_close_matches(job_id, queries.newest_ids(connection), n=1)
        raise HTTPException(404, f"There is no job '{job_id}'" + (f"; did you mean '{near[0]}'?" if near else "."))
    return record


def is_of(job: JobRecord, user: User) -> bool:
    """Whether a user may do with a job whatever can be done."""
    return user.admin or job.user == user.name


Service = Annotated[Backend, Depends(_backend)]
SignedIn = Annotated[User, Depends(_signed_in)]
MaybeSignedIn = Annotated[User | None, Depends(_signed_in_if_at_all)]
Job = Annotated[JobRecord, Depends(_job)]
OwnJob = Annotated[JobRecord, Depends(_own_job)]
