"""Elects the leader of several services on one database through ZooKeeper; the others stand by.

The election only detects a lost leader quickly. The lease in the database (`ServiceDatabase.lock`) decides which
process may write, so two processes that both assume they lead do no harm.
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

SESSION_TIMEOUT_S = 10.0
"""ZooKeeper drops a leader from which it receives nothing for this time."""
CONNECT_TIMEOUT_S = 15.0
EXIT_CODE = os.EX_TEMPFAIL
"""Of a service that lost its leadership: it is to be restarted, and then stands by."""


@dataclass(frozen=True)
class Ensemble:
    """A ZooKeeper ensemble: its servers, the parent node of the candidates, and credentials of the `digest` scheme."""

    hosts: str
    path: str
    user: str = ""
    password: str = ""

    @classmethod
    def parse(cls, uri: str) -> Ensemble:
        """Parses `zk://[user:password@]host:port[,host:port...]/path`.

        Raises:
            BadInputError: if it is malformed; the message does not quote it, as it may contain a password.
        """
        found = re.fullmatch(r"zk://(?:([^:@/]+):([^@/]+)@)?([\w.-]+:[0-9]+(?:,[\w.-]+:[0-9]+)*)(/[\w./-]*[\w-])", uri)
        if found is None or "//" in found[4] or {".", ".."} & set(found[4].split("/")):
            raise BadInputError(
                "--ha takes zk://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PATH, such as zk://zk1:2181/dike."
            )
        return cls(hosts=found[3], path=found[4], user=found[1] or "", password=found[2] or "")

    def client(self) -> KazooClient:
        if not self.user:
            return KazooClient(self.hosts, timeout=SESSION_TIMEOUT_S)
        return KazooClient(
            self.hosts,
            timeout=SESSION_TIMEOUT_S,
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
    """Waits until this process leads; it leads inside the context. Without `ha` it always leads.

    Args:
        ha: the ensemble, as in `Ensemble.parse`.
        note: called with messages about the leader.
        lost: called on another thread when the session expires, or ZooKeeper is unreachable for the session timeout.
        identity: shown to the other candidates; None for host and process.
    """
    if ha is None:
        yield
        return
    ensemble = Ensemble.parse(ha)
    # Its warnings about unreachable servers add nothing to the error below.
    for name in ("kazoo", "kazoo.client", "kazoo.protocol.connection"):
        # Each by name: pymesos sets their levels.
        logging.getLogger(name).setLevel(logging.ERROR)
    client = ensemble.client()
    with contextlib.ExitStack() as stack:
        # Ends the session, which removes this candidate.
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
            raise BadInputError(f"ZooKeeper at {ensemble.hosts} cannot elect a leader: {reason}.") from error
        watch = _SessionWatch(lost)
        stack.callback(watch.cancel_timer)
        client.add_listener(watch)
        stack.callback(client.remove_listener, watch)
        _check_candidate(client, lock, ensemble)
        note(f"leading, elected at {ensemble.hosts}")
        yield


def exit_immediately(reason: str) -> NoReturn:
    """Exits the process from any thread, without a call to Mesos or the database: another service leads now.

    Tasks keep running, and the new leader recovers them.
    """
    print(f"dike serve: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class _SessionWatch:
    """Watches the ZooKeeper session; called on a thread that must not block."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._timer: threading.Timer | None = None

    def __call__(self, state: KazooState) -> None:
        if state == KazooState.LOST:
            self._lost("ZooKeeper has ended this service's session; another service leads or will lead.")
        elif state == KazooState.SUSPENDED and self._timer is None:
            # Without a connection kazoo cannot see that its session has expired.
            self._timer = threading.Timer(
                SESSION_TIMEOUT_S, self._lost, [f"ZooKeeper has not answered for {SESSION_TIMEOUT_S:g} s."]
            )
            self._timer.daemon = True
            self._timer.start()
        elif state == KazooState.CONNECTED:
            self.cancel_timer()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _check_candidate(client: Any, lock: Lock, ensemble: Ensemble) -> None:
    """Checks our node: the session may have expired between the election and the start of the watch."""
    try:
        is_candidate = client.retry(client.exists, f"{ensemble.path}/{lock.node}")
    except KazooException as error:
        raise BadInputError(f"ZooKeeper at {ensemble.hosts} was lost during the election: {error}.") from error
    if not is_candidate:
        raise BadInputError(f"ZooKeeper at {ensemble.hosts} ended our session during the election; start again.")
