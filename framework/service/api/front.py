"""Where clients reach a service: a socket, and a web server on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import math
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dike.exceptions import BadInputError
from framework.mesos.master import LeadingMaster
from framework.service.api.app import make_app
from framework.service.api.backend import Backend, Proxy
from framework.service.service import Service
from framework.service.submission import Submissions
from framework.service.users import Users

PAGE = Path(__file__).parent.parent / "page"
CONNECTION_LIMIT = 512
ADDRESS_LIMIT = 64
"""How many connections an address may have that no user has signed in on."""
USER_LIMIT = 128
"""How many a user may have."""
AT_ONCE = 8
"""How many connections are taken in before the next look at what the others ask: few, so that a client that asks at
once has been read before so many others come that it is the oldest that waits."""
BACKLOG = 1024
"""How many the kernel keeps until then."""
LOG_INTERVAL_S = 60.0
REQUEST_TIMEOUT_S = 10.0
"""How long a connection may stand without a request whose head is complete; twice as long at most."""
START_TIMEOUT_S = 30.0
GRACE_S = 3
"""How long requests may go on when the service ends."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

logger = logging.getLogger(__name__)


class ApiFront:
    """The API of a service; called, it is a `framework.service.serve.Front`.

    Listens from its making until it is closed, so that an address that cannot be used is known before anything else is
    done, and clients wait for a service that follows another in this process.

    Args:
        listen: `HOST:PORT`; port 0 takes a free one.
        users: who may use it.
        advertised: host name or URL by which others are told to reach it; None if by nothing else than `listen`.
        proxy: who may sign users in; None for nobody.

    Attributes:
        url: where clients on this machine reach it.

    Raises:
        BadInputError: if the address makes no sense, or cannot be listened on.
    """

    def __init__(self, listen: str, users: Users, advertised: str | None = None, proxy: Proxy | None = None) -> None:
        host, port = _split(listen)
        self._users = users
        self._proxy = proxy
        self._socket = _listen(host, port)
        names = _LOCAL_NAMES | {host.lower()} | _names_in(advertised)
        self._hosts = names if _is_loopback(self._socket) else None
        address, bound = self._socket.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 (compared, not bound)
        self.url = f"http://[{shown}]:{bound}" if ":" in shown else f"http://{shown}:{bound}"

    @contextlib.contextmanager
    def __call__(self, submissions: Submissions, service: Service, master: LeadingMaster) -> Iterator[None]:
        """Answers clients while the context lasts."""
        backend = Backend(
            submissions=submissions,
            users=self._users,
            master=master,
            metrics=service.metrics,
            snapshot=lambda: service.scheduler.snapshot,
            proxy=self._proxy,
        )
        connections = Connections(self._proxy.is_at if self._proxy is not None else lambda _: False)
        config = uvicorn.Config(
            make_app(backend, PAGE, self._hosts),
            # No log of accesses: it would tell who looks at what, and addresses may hold what is nobody's business.
            access_log=False,
            http=functools.partial(_Connection, connections),  # type: ignore[arg-type]  # called like a class
            backlog=AT_ONCE,
            log_config=None,
            server_header=False,
            lifespan="on",
            proxy_headers=False,
            limit_concurrency=CONNECTION_LIMIT,
            timeout_graceful_shutdown=GRACE_S,
            ws="none",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([self._socket.dup()],), name="dike-api", daemon=True)
        thread.start()
        try:
            _wait_for(server, thread)
            self._socket.listen(BACKLOG)
            yield
        finally:
            backend.closing.set()
            server.should_exit = True
            thread.join(GRACE_S + START_TIMEOUT_S)

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()


class Connections:
    """The open connections, by who has them. Used by the web server's loop only.

    Args:
        is_exempt: whether connections of an address are not counted, such as a proxy's, behind which are many clients.
    """

    def __init__(self, is_exempt: Callable[[str], bool]) -> None:
        self._is_exempt = is_exempt
        self._of_address: defaultdict[str, dict[_Connection, None]] = defaultdict(dict)
        self._of_user: defaultdict[str, dict[_Connection, None]] = defaultdict(dict)
        self._closed: Counter[str] = Counter()
        self._logged_s = -math.inf

    def add(self, connection: _Connection) -> None:
        """Somebody has connected. Of an address that has too many without a user, the oldest that waits is closed."""
        if self._is_exempt(connection.address):
            return
        others = self._of_address[connection.address]
        if len(others) >= ADDRESS_LIMIT:
            oldest = next((one for one in others if one.is_waiting), connection)
            self.remove(oldest)
            oldest.transport.abort()
            self._log(connection.address)
            if oldest is connection:
                return
        self._of_address[connection.address][connection] = None

    def signed_in(self, connection: _Connection, user: str) -> bool:
        """A request on it is a user's; returns whether the user may have so many."""
        if self._is_exempt(connection.address) or connection.transport.is_closing():
            # A client may be gone before its request is looked at; nothing would remove the connection any more.
            return True
        self.remove(connection)
        ours = self._of_user[user]
        if len(ours) >= USER_LIMIT:
            self._of_address[connection.address][connection] = None
            return False
        ours[connection] = None
        connection.user = user
        return True

    def remove(self, connection: _Connection) -> None:
        """It is closed."""
        _discard(self._of_address, connection.address, connection)
        _discard(self._of_user, connection.user, connection)

    def _log(self, address: str) -> None:
        self._closed[address] += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            found = ", ".join(f"{count} of {one}" for one, count in self._closed.most_common(5))
            logger.warning("closed connections that asked for nothing, more than %d at once: %s", ADDRESS_LIMIT, found)
            self._closed.clear()


def _discard(groups: dict[str, dict[_Connection, None]], key: str, connection: _Connection) -> None:
    group = groups.get(key, {})
    group.pop(connection, None)
    if not group:
        groups.pop(key, None)


class _Connection(H11Protocol):
    """Is closed if it asks for nothing: connections count as requests do, and uvicorn waits for a first one.

    Of uvicorn's two parsers only this one bounds the head of a request, to 64 KiB; the other would take any number of
    headers, from anybody.

    Args:
        connections: all of them.
        uvicorn: what uvicorn makes one with.
    """

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._all = connections
        # Each request's `state` has it.
        self.app_state = {**self.app_state, "connection": self}
        self.address = ""
        self.user = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._all.add(self)
        self.loop.call_later(REQUEST_TIMEOUT_S, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def signed_in(self, user: str) -> bool:
        """Its request is a user's; returns whether the user may have so many connections."""
        return user == self.user or self._all.signed_in(self, user)

    def _look(self, answered: Any) -> None:
        """Looks for requests since the last look, when `answered` was the newest and had been answered (None: none)."""
        waits = self.is_waiting
        if waits and self.cycle is answered:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(REQUEST_TIMEOUT_S, self._look, self.cycle if waits else self)


def _wait_for(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise BadInputError("The API's server did not start; the log says more.")
        time.sleep(0.01)


def _split(listen: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})", listen, re.ASCII)
    if match is None or int(match["port"]) >= 2**16:
        raise BadInputError(f"'{listen}' is not an address to listen on; --listen takes HOST:PORT.")
    return match["six"] or match["host"], int(match["port"])


def _names_in(advertised: str | None) -> frozenset[str]:
    if advertised is None:
        return frozenset()
    try:
        name = urlsplit(advertised if "//" in advertised else f"//{advertised}").hostname
    except ValueError:
        return frozenset()
    return frozenset() if name is None else frozenset({name})


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadInputError(
            f"Nothing can listen at {host}:{port}: {error.strerror}; choose another address with --listen."
        ) from error
    # Connections inherit it. Without it the body of each answer waits for the client to acknowledge the head: 40 ms.
    # asyncio sets it for sockets that it makes itself.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
