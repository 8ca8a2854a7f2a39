"""Serves zygotes to all executors of a machine: `python -P -m executor.zygote_server SOCKET FOLDER`.

A private Mesos has one, so that its executors, and commands that run jobs on it, import a library once. A connection
to SOCKET (AF_UNIX, SOCK_SEQPACKET) has one request: a JSON object with a `kind` (`ZygoteKind.dumps`), a `request`
(`ForkRequest.encode`) and its file descriptors. The answer is a process id or an error message. Without a `request` a
zygote of that kind begins to import, and there is no answer.

Forks become children of this process' parent, a subreaper. FOLDER gets the zygotes' output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path

from dike import process
from executor.environment import ZygoteKind
from executor.logs import log_to
from executor.process import wait_readable
from executor.zygote import MESSAGE_BYTES, ForkRequest
from executor.zygote_pool import ZygotePool

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 600.0
MAX_IDLE = 3
"""Maximum number of idle zygotes: each takes some hundred MiB."""
POLL_INTERVAL_S = 5.0
MAX_DESCRIPTORS = 4
"""Maximum number of file descriptors with a request."""


def main(path: str, folder: str) -> None:
    process.die_with_parent()
    log_to(Path(folder) / "zygotes.log")
    pool = ZygotePool(Path(folder), IDLE_TIMEOUT_S, MAX_IDLE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Private to this account before a client can connect.
        old_umask = os.umask(0o077)
        # Socket addresses have a short maximum length.
        os.chdir(os.path.dirname(path))
        draft = f".{os.path.basename(path)}"
        with contextlib.suppress(FileNotFoundError):  # left by an earlier server
            os.unlink(draft)
        listener.bind(draft)
        os.umask(old_umask)  # inherited by all tasks
        listener.listen()
        # Renamed last: clients connect as soon as it exists.
        os.rename(draft, path)
        listener.setblocking(False)
        arriving: list[socket.socket] = []
        while True:
            watched = [listener.fileno(), *pool.watched_fds, *(one.fileno() for one in arriving)]
            wait_readable(watched, POLL_INTERVAL_S)
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                connection.setblocking(False)
                arriving.append(connection)
            for connection in arriving[:]:
                with contextlib.suppress(BlockingIOError):
                    _receive(pool, connection)
                    arriving.remove(connection)
            pool.poll()


def _receive(pool: ZygotePool, connection: socket.socket) -> None:
    """Receives a request.

    Raises:
        BlockingIOError: if it has not arrived.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 2 * MESSAGE_BYTES, MAX_DESCRIPTORS)

    def on_answer(answer: int | str) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the client has disconnected
            connection.send(json.dumps(answer).encode())
        connection.close()

    try:
        values = json.loads(data)
        kind = ZygoteKind.loads(values["kind"])
        request = None
        if "request" in values:
            request = ForkRequest.decode(values["request"], parent=os.getppid())
    except (KeyError, TypeError, ValueError) as error:
        if data:
            logger.warning("not a request: %r", error)
        on_answer(f"not a request: {error!r}")
        return
    if request is not None:
        pool.request_fork(kind, request, descriptors, on_answer)
        return
    connection.close()
    try:
        pool.warm(kind)
    except OSError as error:
        logger.error("the zygote cannot be started: %s", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
