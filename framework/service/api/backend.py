"""What the API's routes work with, as FastAPI dependencies."""

from __future__ import annotations

import asyncio
import difflib
import functools
import ipaddress
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, HTTPException, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.engine import Connection, Engine

from dike.exceptions import BadInputError
from framework.mesos.master import LeadingMaster
from framework.scheduler.records import JobRecord
from framework.scheduler.snapshot import Snapshot
from framework.search.store import Store
from framework.service import queries
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import TokenExpiredError, User, Users

FOLLOWER_LIMIT = 64
"""Maximum number of clients that follow output; each queries the database twice a second."""
USER_FOLLOWER_LIMIT = 16
"""Maximum per user, so that one user cannot occupy all."""

MAX_COMPARED_PAIRS = 400_000
"""Maximum pairs of characters compared to suggest a name: some tens of milliseconds."""

_BEARER = HTTPBearer(auto_error=False, description="A token from the service's operator.")

CSRF_HEADER = "X-Requested-With"
"""Required of users signed in by a proxy for requests that change something: a browser sends it from another site's
page only if the service allows that by CORS, which it never does."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Proxy:
    """A proxy that signs users in and passes their name in a header, which is ignored from other addresses."""

    header: str
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

    @classmethod
    def of(cls, header: str, addresses: Sequence[str]) -> Proxy:
        """Parses the operator's options; raises `BadInputError` if the header's name or an address is invalid."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", header):
            raise BadInputError(
                f"--proxy-user-header {header} is not a valid header name; use letters, digits and '-', such as "
                "X-Forwarded-User."
            )
        networks = []
        for address in addresses:
            try:
                network = ipaddress.ip_network(address)
            except ValueError:
                raise BadInputError(
                    f"--proxy-address {address} is neither an address nor a network; write 10.0.0.5 or 10.0.0.0/28."
                ) from None
            if network.prefixlen == 0:
                raise BadInputError(f"--proxy-address {address} matches every address; give the proxy's own address.")
            networks.append(network)
        return cls(header, tuple(networks))

    def has_sent(self, request: Request) -> bool:
        """Whether a request comes from the proxy and names a user."""
        if request.client is None or not any(request.headers.getlist(self.header)):
            return False
        return self.is_at(request.client.host)

    def is_at(self, host: str) -> bool:
        peer = ipaddress.ip_address(host.partition("%")[0])
        # An IPv6 socket reports IPv4 peers in this form.
        peer = getattr(peer, "ipv4_mapped", None) or peer
        return any(peer in network for network in self.networks)

    def user(self, request: Request, users: Users) -> User:
        """The user that the proxy signed in; raises a 401 or 403 if unknown, or if another site may have caused the
        request.

        A proxy identifies a browser by a cookie, which the browser also sends with requests that other sites' pages
        cause.
        """
        names = request.headers.getlist(self.header)
        if len(names) != 1:
            raise _unauthorized(
                f"The header {self.header} came {len(names)} times; the proxy must replace those that clients send."
            )
        is_safe = request.method in SAFE_METHODS
        # Browsers send it with each request; 'none' means a typed or bookmarked address.
        site = request.headers.get("sec-fetch-site", "same-origin")
        if site not in (("same-origin", "none") if is_safe else ("same-origin",)):
            raise HTTPException(
                403, "Users signed in by a proxy must send requests from the service's own page, not another site's."
            )
        if not is_safe and not request.headers.get(CSRF_HEADER):
            raise HTTPException(
                403, f"Users signed in by a proxy must send changes with the header '{CSRF_HEADER}: dike'."
            )
        name = names[0].encode("latin-1").decode(errors="replace")
        user = users.named(name)
        if user is None:
            raise _unauthorized(f"The proxy signed in '{name}', an unknown user; ask the service's operator to add it.")
        return user


class Followers:
    """Counts the clients that follow output. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def acquire(self, user: str) -> str:
        """Adds a follower of a user; returns the reason if a limit is reached, else an empty string."""
        with self._lock:
            if self._counts[user] >= USER_FOLLOWER_LIMIT:
                return f"You follow {USER_FOLLOWER_LIMIT} outputs, the maximum of a user; close one of them."
            if self._counts.total() >= FOLLOWER_LIMIT:
                return "Too many clients follow outputs; try again later."
            self._counts[user] += 1
            return ""

    def release(self, user: str) -> None:
        with self._lock:
            self._counts[user] -= 1
            self._counts += Counter()  # drops users without followers


@dataclass(frozen=True)
class SearchDatabase:
    """A database of searches: that of the service, or one that a page shows (`framework.service.search_page`)."""

    url: str
    engine: Engine

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection for read queries."""
        return Store(self.url, engine=self.engine).reading()

    def opened(self, name: str) -> Store | None:
        """Opens a search for reading; None before it has begun."""
        store = Store(self.url, engine=self.engine)
        if not store.has_search(name):
            return None
        store.open_search(name)
        return store


@dataclass(frozen=True)
class Backend:
    """The service as the API sees it.

    Attributes:
        master: None for a page that shows stored searches; it has no cluster and accepts no changes.
        searches: where the searches are.
        closing: set when it shuts down.
    """

    submissions: Submissions
    users: Users
    master: LeadingMaster | None
    metrics: ServiceMetrics
    snapshot: Callable[[], Snapshot]
    searches: SearchDatabase
    proxy: Proxy | None = None
    closing: threading.Event = field(default_factory=threading.Event)
    followers: Followers = field(default_factory=Followers)
    _submission_locks: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(functools.partial(asyncio.Semaphore, 1)), repr=False
    )

    def submission_lock(self, user: User) -> asyncio.Semaphore:
        """Allows one submission of a user at a time in memory: checking a bundle of many files keeps a thread busy."""
        return self._submission_locks[user.name]

    @property
    def store(self) -> ServiceStore:
        return self.submissions.store

    @property
    def is_read_only(self) -> bool:
        return self.master is None


def _backend(request: Request) -> Backend:
    found = request.app.state.backend
    assert isinstance(found, Backend)
    return found


async def _signed_in(
    request: Request,
    backend: Annotated[Backend, Depends(_backend)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> User:
    user = _user(request, backend, credentials)
    if backend.is_read_only and request.method not in SAFE_METHODS:
        raise HTTPException(403, "This page only shows searches; change them with the commands of dike.")
    connection = getattr(request.state, "connection", None)
    if connection is not None and not connection.assign_user(user.name):
        raise HTTPException(
            503,
            "You have reached the maximum number of connections of a user; close some of them.",
            {"Retry-After": "10"},
        )
    return user


def _user(request: Request, backend: Backend, credentials: HTTPAuthorizationCredentials | None) -> User:
    if credentials is None and backend.proxy is not None and backend.proxy.has_sent(request):
        return backend.proxy.user(request, backend.users)
    try:
        user = backend.users.authenticate(credentials.credentials) if credentials is not None else None
    except TokenExpiredError as error:
        raise _unauthorized(str(error)) from None
    if user is None:
        problem = "This token is unknown" if credentials is not None else "There is no token"
        raise HTTPException(401, f"{problem}; send 'Authorization: Bearer TOKEN'.", {"WWW-Authenticate": "Bearer"})
    return user


async def is_still_allowed(request: Request, job: JobRecord) -> bool:
    """Whether the sender of a request in progress may still manage the job: tokens can be revoked meanwhile."""
    try:
        user = await _signed_in(request, _backend(request), await _BEARER(request))
    except HTTPException:
        return False
    return may_manage(job, user)


def _unauthorized(detail: str) -> HTTPException:
    """A 401 with a message for the user, other than for a missing or unknown token; clients show it."""
    return HTTPException(401, detail, {"WWW-Authenticate": 'Bearer error="invalid_token"'})


async def _optional_user(
    request: Request,
    backend: Annotated[Backend, Depends(_backend)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> User | None:
    return None if credentials is None else await _signed_in(request, backend, credentials)


def _job(
    # First, so that only users learn which jobs exist.
    user: Annotated[User, Depends(_signed_in)],
    backend: Annotated[Backend, Depends(_backend)],
    job_id: Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")],
) -> JobRecord:
    return find_job(backend, job_id)


def _own_job(user: Annotated[User, Depends(_signed_in)], job: Annotated[JobRecord, Depends(_job)]) -> JobRecord:
    if not may_manage(job, user):
        raise HTTPException(
            403, f"Job '{job.id}' belongs to {job.user}; only {job.user} or an administrator may do that."
        )
    return job


def find_job(backend: Backend, job_id: str) -> JobRecord:
    """The job; raises a 404 that suggests the nearest id if there is none."""
    record = backend.store.job(job_id)
    if record is None:
        with backend.store.database.reading() as connection:
            near = nearest(job_id, queries.newest_ids(connection))
        raise HTTPException(404, f"There is no job '{job_id}'" + (f"; did you mean '{near}'?" if near else "."))
    return record


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar name; compares only the first ones if names are many or long, as `name` comes from a request."""
    left, compared = MAX_COMPARED_PAIRS, []
    for one in names:
        # Comparing two names takes time proportional to the product of their lengths.
        left -= len(name) * len(one)
        if left < 0:
            break
        compared.append(one)
    found = difflib.get_close_matches(name, compared, n=1)
    return found[0] if found else None


def may_manage(job: JobRecord, user: User) -> bool:
    """Whether a user has full access to a job."""
    return user.admin or job.user == user.name


Service = Annotated[Backend, Depends(_backend)]
SignedIn = Annotated[User, Depends(_signed_in)]
MaybeSignedIn = Annotated[User | None, Depends(_optional_user)]
Job = Annotated[JobRecord, Depends(_job)]
OwnJob = Annotated[JobRecord, Depends(_own_job)]
