"""Serves the API: a listening socket, and a web server on a thread."""

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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dike.exceptions import BadInputError
from framework.mesos.master import LeadingMaster
from framework.service.api.app import make_app
from framework.service.api.backend import Backend, Proxy, SearchDatabase
from framework.service.service import Service
from framework.service.submission import Submissions
from framework.service.users import Users

PAGE = Path(__file__).parent.parent / "page"
CONNECTION_LIMIT = 512
ADDRESS_LIMIT = 64
"""Maximum connections of an address that are not signed in."""
USER_LIMIT = 128
ACCEPT_BATCH = 8
"""Connections accepted before requests of the others are read again: few, so that a client that sends its request
immediately is read before enough others arrive to make it the oldest idle one."""
BACKLOG = 1024
"""Connections that the kernel queues until then."""
LOG_INTERVAL_S = 60.0
REQUEST_TIMEOUT_S = 10.0
"""Time without a complete request head after which a connection is closed; checked at this interval, so up to twice."""
START_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 3
"""Time for open requests at shutdown."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

logger = logging.getLogger(__name__)


class ApiFront:
    """The API of a service; a `framework.service.serve.Front` when called.

    Listens from construction until it is closed: an unusable address is reported before anything else starts, and
        clients
    wait for the next service in this process.

    Args:
        listen: `HOST:PORT`; port 0 takes a free one.
        users: the users.
        advertised: further host name or URL by which clients may reach it.
        proxy: the proxy that may sign users in.
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

    def __call__(
        self, submissions: Submissions, service: Service, master: LeadingMaster
    ) -> AbstractContextManager[None]:
        database = submissions.store.database
        return self.serving(
            Backend(
                submissions=submissions,
                users=self._users,
                master=master,
                metrics=service.metrics,
                snapshot=lambda: service.scheduler.snapshot,
                searches=SearchDatabase(database.url, database.engine),
                proxy=self._proxy,
            )
        )

    @contextlib.contextmanager
    def serving(self, backend: Backend) -> Iterator[None]:
        """Answers clients within the context."""
        connections = Connections(self._proxy.is_at if self._proxy is not None else lambda _: False)
        config = uvicorn.Config(
            make_app(backend, PAGE, self._hosts),
            # Without an access log: it would reveal what each user looks at, and URLs may hold private data.
            access_log=False,
            http=functools.partial(_Connection, connections),  # type: ignore[arg-type]  # called like a class
            backlog=ACCEPT_BATCH,
            log_config=None,
            server_header=False,
            lifespan="on",
            proxy_headers=False,
            limit_concurrency=CONNECTION_LIMIT,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
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
            thread.join(SHUTDOWN_TIMEOUT_S + START_TIMEOUT_S)

    def close(self) -> None:
        self._socket.close()


class Connections:
    """The open connections by address and user; for the web server's loop only.

    Connections of exempt addresses are unlimited, such as a proxy's, which serves many clients.
    """

    def __init__(self, is_exempt: Callable[[str], bool]) -> None:
        self._is_exempt = is_exempt
        self._of_address: defaultdict[str, dict[_Connection, None]] = defaultdict(dict)
        self._of_user: defaultdict[str, dict[_Connection, None]] = defaultdict(dict)
        self._closed: Counter[str] = Counter()
        self._logged_s = -math.inf

    def add(self, connection: _Connection) -> None:
        """Adds a new connection; beyond `ADDRESS_LIMIT` of its address without a user, closes the oldest idle one."""
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

    def assign_user(self, connection: _Connection, user: str) -> bool:
        """Counts a connection as a user's; returns False if the user has reached `USER_LIMIT`."""
        if self._is_exempt(connection.address) or connection.transport.is_closing():
            # A connection that is already closed would never be removed.
            return True
        self.remove(connection)
        users_connections = self._of_user[user]
        if len(users_connections) >= USER_LIMIT:
            self._of_address[connection.address][connection] = None
            return False
        users_connections[connection] = None
        connection.user = user
        return True

    def remove(self, connection: _Connection) -> None:
        _discard(self._of_address, connection.address, connection)
        _discard(self._of_user, connection.user, connection)

    def _log(self, address: str) -> None:
        self._closed[address] += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            found = ", ".join(f"{count} of {one}" for one, count in self._closed.most_common(5))
            logger.warning("closed idle connections, more than %d of an address: %s", ADDRESS_LIMIT, found)
            self._closed.clear()


def _discard(groups: dict[str, dict[_Connection, None]], key: str, connection: _Connection) -> None:
    group = groups.get(key, {})
    group.pop(connection, None)
    if not group:
        groups.pop(key, None)


class _Connection(H11Protocol):
    """A connection that is closed when idle: uvicorn waits for a first request forever, and idle connections count.

    Of uvicorn's two parsers only h11 bounds the head of a request, to 64 KiB; the other accepts any number of headers.
    """

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        # uvicorn copies it to each request's `state`.
        self.app_state = {**self.app_state, "connection": self}
        self.address = ""
        self.user = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._connections.add(self)
        self.loop.call_later(REQUEST_TIMEOUT_S, self._check_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def assign_user(self, user: str) -> bool:
        return user == self.user or self._connections.assign_user(self, user)

    def _check_idle(self, answered: Any) -> None:
        """Closes the connection if idle since the last check, when `answered` was its newest request (None: none)."""
        waits = self.is_waiting
        if waits and self.cycle is answered:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(REQUEST_TIMEOUT_S, self._check_idle, self.cycle if waits else self)


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
    # Inherited by connections. Without it the body of each answer waits 40 ms for the client to acknowledge the head.
    # asyncio sets it only on sockets that it creates.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
