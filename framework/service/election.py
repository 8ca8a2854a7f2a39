"""Of several services on one database one leads, the others stand by: elected through ZooKeeper.

The election only finds out quickly that a leader is gone. Who may write is decided by the lease in the database
(`ServiceStore.lock`), so two that both believe that they lead do no harm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.recipe.lock import Lock
from kazoo.security import make_digest_acl

from dike.exceptions import BadInputError

SESSION_S = 10.0
"""A leader of which ZooKeeper has heard nothing for so long leads no more."""
CONNECT_TIMEOUT_S = 15.0
EXIT_CODE = os.EX_TEMPFAIL
"""Of a service that leads no more: it is to be started again, and stands by then."""


@dataclass(frozen=True)
class Ensemble:
    """Where leaders are elected.

    Attributes:
        hosts: `host:port` of ZooKeeper's servers, separated by commas.
        path: node below which the candidates stand.
        user, password: for ZooKeeper's `digest` scheme, nobody else can then touch the nodes; empty for none.
    """

    hosts: str
    path: str
    user: str = ""
    password: str = ""

    @classmethod
    def parse(cls, uri: str) -> Ensemble:
        """Reads `zk://[user:password@]host:port[,host:port...]/path`.

        Raises:
            BadInputError: if it is none; the message does not show it, for there may be a password in it.
        """
        found = re.fullmatch(r"zk://(?:([^:@/]+):([^@/]+)@)?([\w.-]+:[0-9]+(?:,[\w.-]+:[0-9]+)*)(/[\w./-]*[\w-])", uri)
        if found is None or "//" in found[4] or {".", ".."} & set(found[4].split("/")):
            raise BadInputError(
                "--ha takes zk://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PATH, such as zk://zk1:2181/dike."
            )
        return cls(hosts=found[3], path=found[4], user=found[1] or "", password=found[2] or "")

    def client(self) -> KazooClient:
        """A client that has not been started."""
        if not self.user:
            return KazooClient(self.hosts, timeout=SESSION_S)
        return KazooClient(
            self.hosts,
            timeout=SESSION_S,
            auth_data=[("digest", f"{self.user}:{self.password}")],
            default_acl=[make_digest_acl(self.user, self.password, all=True)],
        )


@contextlib.contextmanager
def elected(
    ha: str | None,
    note: Callable[[str], None],
    lost: Callable[[str], None],
    identity: str | None = None,
) -> Iterator[None]:
    """Waits until this process leads; it does while the context lasts.

    Args:
        ha: where, as in `Ensemble.parse`; None where there are no others.
        note: is told who leads meanwhile.
        lost: called, on another thread, when ZooKeeper has given us up or cannot be reached for as long as that takes.
        identity: what others are told of us; None for host and process.

    Raises:
        BadInputError: if ZooKeeper cannot be used.
    """
    if ha is None:
        yield
        return
    ensemble = Ensemble.parse(ha)
    # Its warnings about each server that does not answer say no more than the sentence that follows.
    for name in ("kazoo", "kazoo.client", "kazoo.protocol.connection"):
        # The last two by name: pymesos gives them levels of their own.
        logging.getLogger(name).setLevel(logging.ERROR)
    client = ensemble.client()
    with contextlib.ExitStack() as stack:
        # Ends the session, and with it our place among the candidates.
        stack.callback(client.close)
        stack.callback(client.stop)
        try:
            client.start(CONNECT_TIMEOUT_S)
            lock = client.Lock(ensemble.path, identity or f"{socket.gethostname()} process {os.getpid()}")
            if others := lock.contenders():
                note(f"standing by: {others[0]} leads")
            lock.acquire()
        except KazooTimeoutError as error:
            raise BadInputError(
                f"ZooKeeper at {ensemble.hosts} did not answer within {CONNECT_TIMEOUT_S:g} s; check --ha."
            ) from error
        except KazooException as error:
            reason = str(error) or type(error).__name__
            raise BadInputError(f"ZooKeeper at {ensemble.hosts} lets nobody be elected: {reason}.") from error
        watch = _Watch(lost)
        stack.callback(watch.end)
        client.add_listener(watch)
        stack.callback(client.remove_listener, watch)
        _require_place(client, lock, ensemble)
        note(f"leading, elected at {ensemble.hosts}")
        yield


def end_at_once(reason: str) -> NoReturn:
    """Ends this process from any thread, without another word to Mesos or the database: somebody else leads now.

    Tasks go on, and whoever leads finds them again.
    """
    print(f"dike serve: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class _Watch:
    """Hears how the session with ZooKeeper stands; called on a thread that must not be held up."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._timer: threading.Timer | None = None

    def __call__(self, state: KazooState) -> None:
        if state == KazooState.LOST:
            self._lost("ZooKeeper has given this service up; another one leads, or will.")
        elif state == KazooState.SUSPENDED and self._timer is None:
            # Without a connection kazoo does not learn that its session is over.
            self._timer = threading.Timer(SESSION_S, self._lost, [f"no ZooKeeper was heard for {SESSION_S:g} s."])
            self._timer.daemon = True
            self._timer.start()
        elif state == KazooState.CONNECTED:
            self.end()

    def end(self) -> None:
        """Waits for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _require_place(client: Any, lock: Lock, ensemble: Ensemble) -> None:
    """Our session may have ended between the election and the moment from which we would hear of that."""
    try:
        holds = client.retry(client.exists, f"{ensemble.path}/{lock.node}")
    except KazooException as error:
        raise BadInputError(f"ZooKeeper at {ensemble.hosts} was lost during the election: {error}.") from error
    if not holds:
        raise BadInputError(f"ZooKeeper at {ensemble.hosts} ended our session during the election; start again.")
