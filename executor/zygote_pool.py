"""Zygotes by kind: a pool of local ones, and the client of a machine's zygote server."""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from executor.environment import ZygoteKind, zygote_environment
from executor.zygote import MESSAGE_BYTES, PROGRAM, ForkRequest, Zygote

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("iII")
"""Process, account and group of a socket's peer (`struct ucred`)."""
SLOT_PROCESS = "executor.slot_process"
"""Module that zygotes import in addition, which runs slots in forks."""

START_TIMEOUT_S = 30.0
"""Maximum wait for a server that is starting."""
START_POLL_INTERVAL_S = 0.01

AnswerCallback = Callable[[int | str], None]
"""Called with the id of the new process, or with why there is none."""


class Zygotes(Protocol):
    """Forks processes from zygotes of any kind."""

    @property
    def watched_fds(self) -> Sequence[int]:
        """File descriptors that become readable when `poll` has something to do."""

    def request_fork(
        self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], on_answer: AnswerCallback
    ) -> None:
        """Requests a process. The descriptors must stay open until the answer.

        `on_answer` is called from `poll`, or immediately on failure.
        """

    def poll(self) -> None:
        """Handles answers; to be called periodically for timeouts, too."""

    def close(self) -> None:
        """Ends the zygotes, not their forks."""


@dataclass
class _PendingFork:
    request: ForkRequest
    descriptors: Sequence[int]
    on_answer: AnswerCallback


@dataclass
class _Pooled:
    zygote: Zygote
    pending: collections.deque[_PendingFork] = field(default_factory=collections.deque)
    current: _PendingFork | None = None
    used_s: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        return self.current is None and not self.pending and self.zygote.ready


class ZygotePool:
    """Keeps a zygote of each requested kind.

    Args:
        folder: for their logs.
        idle_s: time after which an idle zygote is ended.
        max_idle: maximum number of idle zygotes.
    """

    def __init__(self, folder: Path, idle_s: float = math.inf, max_idle: float = math.inf) -> None:
        self._folder = folder
        self._idle_s = idle_s
        self._max_idle = max_idle
        self._numbers = itertools.count()
        self._pooled: dict[ZygoteKind, _Pooled] = {}

    @property
    def watched_fds(self) -> list[int]:
        return [descriptor for one in self._pooled.values() for descriptor in one.zygote.watched_fds]

    @property
    def pids(self) -> list[int]:
        return [pid for one in self._pooled.values() if (pid := one.zygote.pid) is not None]

    def warm(self, kind: ZygoteKind) -> None:
        """Starts a zygote of this kind, which begins to import.

        Raises:
            OSError: if it cannot be started.
        """
        if kind not in self._pooled:
            log = self._folder / f"zygote-{next(self._numbers)}.out"
            # Names only: values may be secret.
            logger.info("a zygote imports %s for %s", ", ".join(kind.preload) or "nothing", kind.launcher)
            for other in self._pooled:
                changed = dict(set(other.environment) ^ set(kind.environment))
                logger.info("another imports %s; different variables: %s", ", ".join(other.preload), ", ".join(changed))
            command = (kind.python, *PROGRAM[1:], "--also", SLOT_PROCESS, kind.launcher)
            self._pooled[kind] = _Pooled(Zygote(kind.preload, zygote_environment(kind), log, command))

    def request_fork(
        self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], on_answer: AnswerCallback
    ) -> None:
        try:
            self.warm(kind)
        except OSError as error:
            on_answer(f"the zygote cannot be started: {error}")
            return
        self._pooled[kind].pending.append(_PendingFork(request, descriptors, on_answer))
        self._advance(self._pooled[kind])

    def poll(self) -> None:
        for kind, pooled in list(self._pooled.items()):
            pooled.zygote.poll()
            self._advance(pooled)
            if pooled.zygote.failure:
                del self._pooled[kind]
        idle = sorted(((one.used_s, kind) for kind, one in self._pooled.items() if one.is_idle), key=lambda one: one[0])
        for place, (used_s, kind) in enumerate(idle):
            if len(idle) - place > self._max_idle or time.monotonic() - used_s > self._idle_s:
                logger.info("a zygote has been idle for %.0f s and is ended", time.monotonic() - used_s)
                self._pooled.pop(kind).zygote.close()

    def close(self) -> None:
        for pooled in self._pooled.values():
            pooled.zygote.close()
        self._pooled.clear()

    def _advance(self, pooled: _Pooled) -> None:
        zygote = pooled.zygote
        if (fork := pooled.current) is not None:
            answer = zygote.take_answer()
            if answer is None and not zygote.is_forking:
                # It died during the request and may have forked: that fork finds its connection closed, and exits.
                answer = zygote.failure or "the zygote died"
            if answer is None:
                return
            pooled.current = None
            fork.on_answer(answer)
        if zygote.failure:
            while pooled.pending:
                pooled.pending.popleft().on_answer(zygote.failure)
        elif pooled.pending and zygote.ready:
            pooled.current = fork = pooled.pending.popleft()
            pooled.used_s = time.monotonic()
            zygote.request_fork(fork.request, fork.descriptors)
            self._advance(pooled)


class ZygoteServerClient:
    """Client of this machine's zygote server (`executor.zygote_server`)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: dict[socket.socket, AnswerCallback] = {}

    @property
    def watched_fds(self) -> list[int]:
        return [connection.fileno() for connection in self._waiting]

    def request_fork(
        self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], on_answer: AnswerCallback
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        values = {"kind": kind.dumps(), "request": request.encode().decode()}
        try:
            _connect(connection, self._path)
            socket.send_fds(connection, [json.dumps(values).encode()], list(descriptors))
        except OSError as error:
            connection.close()
            on_answer(f"the zygote server is unreachable: {error}")
            return
        connection.setblocking(False)
        self._waiting[connection] = on_answer

    def poll(self) -> None:
        for connection, on_answer in list(self._waiting.items()):
            with contextlib.suppress(BlockingIOError):
                try:
                    data = connection.recv(MESSAGE_BYTES)
                except ConnectionResetError:
                    data = b""
                del self._waiting[connection]
                connection.close()
                on_answer(json.loads(data) if data else "the zygote server has ended")

    def close(self) -> None:
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()


def warm_soon(path: str, kind: ZygoteKind) -> None:
    """Calls `warm` in a thread, which waits for the server."""

    def do() -> None:
        try:
            warm(path, kind)
        except OSError as error:
            logger.warning("the zygote server is unreachable: %s", error)

    threading.Thread(target=do, name="warm", daemon=True).start()


def warm(path: str, kind: ZygoteKind) -> None:
    """Has a server, which may be starting, begin the imports of a zygote of this kind.

    Raises:
        OSError: if there is no server.
    """
    wait_for_server(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        _connect(connection, path)
        connection.send(json.dumps({"kind": kind.dumps()}).encode())


def wait_for_server(path: str) -> None:
    """Waits for a server that may be starting, for at most `START_TIMEOUT_S`."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not os.path.exists(path) and time.monotonic() < give_up_s:
        time.sleep(START_POLL_INTERVAL_S)


def _connect(connection: socket.socket, path: str) -> None:
    """Connects to a server of the same account, whose path may exceed the maximum length of socket addresses.

    Raises:
        OSError: if there is none. A server of another account would receive variables and run its own code.
    """
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        raise PermissionError(errno.EPERM, f"the server belongs to account {uid}", path)
