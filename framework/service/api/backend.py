"""What the API's routes work with, and how they get at it."""

from __future__ import annotations

import asyncio
import difflib
import functools
import ipaddress
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, HTTPException, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from dike.exceptions import BadInputError
from framework.mesos.master import LeadingMaster
from framework.scheduler.records import JobRecord
from framework.scheduler.snapshot import Snapshot
from framework.service import queries
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import TokenExpiredError, User, Users

FOLLOWER_LIMIT = 64
"""How many clients may follow outputs at a time; each asks the database twice a second."""
USER_FOLLOWER_LIMIT = 16
"""How many of them may be one user's, so that others find a place."""

COMPARED_CHARACTERS = 400_000
"""Pairs of characters of two names that are compared for an answer: some tens of milliseconds."""

_BEARER = HTTPBearer(auto_error=False, description="A token that the service's operator has given out.")

OWN_HEADER = "X-Requested-With"
"""Whoever is signed in by a proxy has to send it to change something: a page of another site can have a browser send it
only where the service has allowed that, which it never does."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Proxy:
    """A proxy that signs users in, and says in a header of its own who they are.

    Attributes:
        header: the header's name.
        networks: where the proxy's requests come from; from elsewhere the header means nothing.
    """

    header: str
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

    @classmethod
    def of(cls, header: str, addresses: Sequence[str]) -> Proxy:
        """Reads what an operator has given.

        Raises:
            BadInputError: if the header cannot have that name, or something is neither an address nor a network.
        """
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", header):
            raise BadInputError(
                f"--proxy-user-header {header} is no name of a header; write letters, digits and '-', such as "
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
                raise BadInputError(f"--proxy-address {address} is everybody; name the proxy's own address.")
            networks.append(network)
        return cls(header, tuple(networks))

    def has_sent(self, request: Request) -> bool:
        """Whether the proxy has sent a request, and has signed somebody in."""
        if request.client is None or not any(request.headers.getlist(self.header)):
            return False
        return self.is_at(request.client.host)

    def is_at(self, host: str) -> bool:
        """Whether requests from an address are the proxy's."""
        peer = ipaddress.ip_address(host.partition("%")[0])
        # So a socket of IPv6 names those who speak IPv4.
        peer = getattr(peer, "ipv4_mapped", None) or peer
        return any(peer in network for network in self.networks)

    def user(self, request: Request, users: Users) -> User:
        """Whom the proxy has signed in; raises a 401 or 403 if that is nobody, or the request may be another site's.

        A proxy knows a browser by a cookie, which goes along with what pages of other sites have it send.
        """
        names = request.headers.getlist(self.header)
        if len(names) != 1:
            raise _unknown(
                f"The header {self.header} came {len(names)} times; the proxy has to replace what it is sent."
            )
        is_safe = request.method in SAFE_METHODS
        # Browsers say so of each request; 'none' is what somebody has typed or bookmarked.
        site = request.headers.get("sec-fetch-site", "same-origin")
        if site not in (("same-origin", "none") if is_safe else ("same-origin",)):
            raise HTTPException(403, "Whom a proxy signs in asks by the service's own page, and not by another site's.")
        if not is_safe and not request.headers.get(OWN_HEADER):
            raise HTTPException(403, f"Whom a proxy signs in changes something with the header '{OWN_HEADER}: dike'.")
        name = names[0].encode("latin-1").decode(errors="replace")
        user = users.named(name)
        if user is None:
            raise _unknown(
                f"The proxy has signed in '{name}', whom the service does not know; its operator adds users."
            )
        return user


class Followers:
    """The places for those who follow outputs; any thread may take one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, user: str) -> str:
        """Takes a place for a user; returns why there is none, empty if there is."""
        with self._lock:
            if self._held[user] >= USER_FOLLOWER_LIMIT:
                return f"You follow {USER_FOLLOWER_LIMIT} outputs, as many as a user may; end one of them."
            if self._held.total() >= FOLLOWER_LIMIT:
                return "Too many clients follow outputs; try again later."
            self._held[user] += 1
            return ""

    def give_back(self, user: str) -> None:
        """Gives up a place of a user's."""
        with self._lock:
            self._held[user] -= 1
            self._held += Counter()  # leaves out users who hold none


@dataclass(frozen=True)
class Backend:
    """The service, as far as its clients get to see it.

    Attributes:
        submissions: takes wishes in.
        users: who may ask.
        master: the leading Mesos master.
        metrics: what the service counts.
        snapshot: what the service's loop published last.
        proxy: who may sign users in; None for nobody.
        closing: set once the service ends.
        followers: places for those who follow outputs.
    """

    submissions: Submissions
    users: Users
    master: LeadingMaster
    metrics: ServiceMetrics
    snapshot: Callable[[], Snapshot]
    proxy: Proxy | None = None
    closing: threading.Event = field(default_factory=threading.Event)
    followers: Followers = field(default_factory=Followers)
    _submitting: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(functools.partial(asyncio.Semaphore, 1)), repr=False
    )

    def submitting(self, user: User) -> asyncio.Semaphore:
        """One submission of a user at a time is in memory and looked at: a bundle of many files keeps a thread busy."""
        return self._submitting[user.name]

    @property
    def store(self) -> ServiceStore:
        """The database."""
        return self.submissions.store


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
    connection = getattr(request.state, "connection", None)
    if connection is not None and not connection.signed_in(user.name):
        raise HTTPException(
            503, "You have as many connections as a user may; close some of them.", {"Retry-After": "10"}
        )
    return user


def _user(request: Request, backend: Backend, credentials: HTTPAuthorizationCredentials | None) -> User:
    if credentials is None and backend.proxy is not None and backend.proxy.has_sent(request):
        return backend.proxy.user(request, backend.users)
    try:
        user = backend.users.signed_in(credentials.credentials) if credentials is not None else None
    except TokenExpiredError as error:
        raise _unknown(str(error)) from None
    if user is None:
        said = "This token is nobody's" if credentials is not None else "There is no token"
        raise HTTPException(401, f"{said}; send 'Authorization: Bearer TOKEN'.", {"WWW-Authenticate": "Bearer"})
    return user


async def may_still(request: Request, job: JobRecord) -> bool:
    """Whether who has sent a request that is being answered may still do so with a job: tokens are taken away."""
    try:
        user = await _signed_in(request, _backend(request), await _BEARER(request))
    except HTTPException:
        return False
    return is_of(job, user)


def _unknown(detail: str) -> HTTPException:
    """A 401 that says more than that there is no token, or nobody's; clients are to show it."""
    return HTTPException(401, detail, {"WWW-Authenticate": 'Bearer error="invalid_token"'})


async def _signed_in_if_at_all(
    request: Request,
    backend: Annotated[Backend, Depends(_backend)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> User | None:
    return None if credentials is None else await _signed_in(request, backend, credentials)


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
            near = nearest(job_id, queries.newest_ids(connection))
        raise HTTPException(404, f"There is no job '{job_id}'" + (f"; did you mean '{near}'?" if near else "."))
    return record


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that is most like another; of many or long names only the first are looked at.

    Args:
        name: somebody's request has it, so it may be long, and come often.
        names: the newest first.
    """
    left, compared = COMPARED_CHARACTERS, []
    for one in names:
        # To compare two names takes time in proportion to both of their lengths.
        left -= len(name) * len(one)
        if left < 0:
            break
        compared.append(one)
    found = difflib.get_close_matches(name, compared, n=1)
    return found[0] if found else None


def is_of(job: JobRecord, user: User) -> bool:
    """Whether a user may do with a job whatever can be done."""
    return user.admin or job.user == user.name


Service = Annotated[Backend, Depends(_backend)]
SignedIn = Annotated[User, Depends(_signed_in)]
MaybeSignedIn = Annotated[User | None, Depends(_signed_in_if_at_all)]
Job = Annotated[JobRecord, Depends(_job)]
OwnJob = Annotated[JobRecord, Depends(_own_job)]
