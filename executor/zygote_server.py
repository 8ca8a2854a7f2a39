"""Keeps zygotes for all executors of a machine: `python -P -m executor.zygote_server SOCKET FOLDER`.

An embedded Mesos has one, so that its executors, and the commands that run jobs on it, import a library once. It is
asked by SOCKET (AF_UNIX, SOCK_SEQPACKET), a connection a request: a JSON object with a `kind` (`ZygoteKind.dumps`) and
a `request` (`ForkRequest.encode`), with the file descriptors that go with it; the answer is a process id or a sentence.
Without a `request` a zygote of that kind begins to import, and nothing is answered.

The forks become children of this process' parent, which adopts orphans. FOLDER gets the zygotes' output.
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

IDLE_S = 600.0
MOST_IDLE = 3
"""So many zygotes are kept that nobody asks for anything: each takes some hundred MiB."""
LOOK_S = 5.0
DESCRIPTORS = 4
"""So many go with a request at most."""


def main(path: str, folder: str) -> None:
    """Serves until the parent ends."""
    process.die_with_parent()
    log_to(Path(folder) / "zygotes.log")
    pool = ZygotePool(Path(folder), IDLE_S, MOST_IDLE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Made readable for nobody else before anybody can connect.
        others = os.umask(0o077)
        # The system takes short paths only.
        os.chdir(os.path.dirname(path))
        draft = f".{os.path.basename(path)}"
        with contextlib.suppress(FileNotFoundError):  # of a server before
            os.unlink(draft)
        listener.bind(draft)
        os.umask(others)  # of every task to come
        listener.listen()
        # Whoever sees it can connect.
        os.rename(draft, path)
        listener.setblocking(False)
        arriving: list[socket.socket] = []
        while True:
            watched = [listener.fileno(), *pool.watched, *(one.fileno() for one in arriving)]
            wait_readable(watched, LOOK_S)
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                connection.setblocking(False)
                arriving.append(connection)
            for connection in arriving[:]:
                with contextlib.suppress(BlockingIOError):
                    _take(pool, connection)
                    arriving.remove(connection)
            pool.poll()


def _take(pool: ZygotePool, connection: socket.socket) -> None:
    """Takes a request.

    Raises:
        BlockingIOError: if none has come yet.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 2 * MESSAGE_BYTES, DESCRIPTORS)

    def answered(answer: int | str) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # nobody waits for it any more
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
        answered(f"not a request: {error!r}")
        return
    if request is not None:
        pool.ask(kind, request, descriptors, answered)
        return
    connection.close()
    try:
        pool.warm(kind)
    except OSError as error:
        logger.error("no zygote could be started: %s", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
