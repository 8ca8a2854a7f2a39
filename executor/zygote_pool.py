"""Zygotes by kind, each asked for one process at a time, and those of a machine's zygote server."""

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
"""Process, account and group of who is at the other end of a socket."""
SLOT_PROCESS = "executor.slot_process"
"""What zygotes import beside the libraries, to turn forks into the processes of slots."""

START_TIMEOUT_S = 30.0
START_LOOK_S = 0.01
"""How long, and how often, it is looked whether a server has started."""

Answered = Callable[[int | str], None]
"""Called with the new process' id, or with why there is none."""


class Zygotes(Protocol):
    """Where processes are forked."""

    @property
    def watched(self) -> Sequence[int]:
        """File descriptors that can be read when there is something to `poll`."""

    def ask(self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], answered: Answered) -> None:
        """Asks for a process.

        Args:
            kind: of zygote.
            request: what to fork.
            descriptors: go with it; they have to stay open until there is an answer.
            answered: called from `poll`.
        """

    def poll(self) -> None:
        """Takes in what has come; to be called now and then for the sake of deadlines, too."""

    def close(self) -> None:
        """Ends the zygotes, not their forks."""


@dataclass
class _Order:
    request: ForkRequest
    descriptors: Sequence[int]
    answered: Answered


@dataclass
class _Pooled:
    zygote: Zygote
    orders: collections.deque[_Order] = field(default_factory=collections.deque)
    current: _Order | None = None
    used_s: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        return self.current is None and not self.orders and self.zygote.ready


class ZygotePool:
    """Keeps a zygote of each kind that is asked for.

    Args:
        folder: for their logs.
        idle_s: how long one is kept that is not asked for anything.
        most_idle: how many of those are kept.
    """

    def __init__(self, folder: Path, idle_s: float = math.inf, most_idle: float = math.inf) -> None:
        self._folder = folder
        self._idle_s = idle_s
        self._most_idle = most_idle
        self._numbers = itertools.count()
        self._pooled: dict[ZygoteKind, _Pooled] = {}

    @property
    def watched(self) -> list[int]:
        return [descriptor for one in self._pooled.values() for descriptor in one.zygote.watched]

    @property
    def pids(self) -> list[int]:
        """Ids of the zygotes."""
        return [pid for one in self._pooled.values() if (pid := one.zygote.pid) is not None]

    def warm(self, kind: ZygoteKind) -> None:
        """Has a zygote of this kind begin to import.

        Raises:
            OSError: if it cannot be started.
        """
        if kind not in self._pooled:
            log = self._folder / f"zygote-{next(self._numbers)}.out"
            # Not their values: whoever reads the log may not be meant to know them.
            logger.info("a zygote imports %s for %s", ", ".join(kind.preload) or "nothing", kind.launcher)
            for other in self._pooled:
                changed = dict(set(other.environment) ^ set(kind.environment))
                logger.info("one that imports %s differs in %s", ", ".join(other.preload), ", ".join(changed) or "that")
            command = (kind.python, *PROGRAM[1:], "--also", SLOT_PROCESS, kind.launcher)
            self._pooled[kind] = _Pooled(Zygote(kind.preload, zygote_environment(kind), log, command))

    def ask(self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], answered: Answered) -> None:
        try:
            self.warm(kind)
        except OSError as error:
            answered(f"the zygote could not be started: {error}")
            return
        self._pooled[kind].orders.append(_Order(request, descriptors, answered))
        self._go_on(self._pooled[kind])

    def poll(self) -> None:
        for kind, pooled in list(self._pooled.items()):
            pooled.zygote.poll()
            self._go_on(pooled)
            if pooled.zygote.failure:
                del self._pooled[kind]
        idle = sorted(((one.used_s, kind) for kind, one in self._pooled.items() if one.is_idle), key=lambda one: one[0])
        for place, (used_s, kind) in enumerate(idle):
            if len(idle) - place > self._most_idle or time.monotonic() - used_s > self._idle_s:
                logger.info("a zygote ends that nobody has asked for anything for %.0f s", time.monotonic() - used_s)
                self._pooled.pop(kind).zygote.close()

    def close(self) -> None:
        for pooled in self._pooled.values():
            pooled.zygote.close()
        self._pooled.clear()

    def _go_on(self, pooled: _Pooled) -> None:
        zygote = pooled.zygote
        if (order := pooled.current) is not None:
            answer = zygote.take_answer()
            if answer is None and not zygote.asked:
                # It died over the request, and may have forked all the same: that fork finds nobody at the other end.
                answer = zygote.failure or "the zygote died"
            if answer is None:
                return
            pooled.current = None
            order.answered(answer)
        if zygote.failure:
            while pooled.orders:
                pooled.orders.popleft().answered(zygote.failure)
        elif pooled.orders and zygote.ready:
            pooled.current = order = pooled.orders.popleft()
            pooled.used_s = time.monotonic()
            zygote.ask(order.request, order.descriptors)
            self._go_on(pooled)


class ServedZygotes:
    """Those of this machine's zygote server (`executor.zygote_server`).

    Args:
        path: the server's socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: dict[socket.socket, Answered] = {}

    @property
    def watched(self) -> list[int]:
        return [connection.fileno() for connection in self._waiting]

    def ask(self, kind: ZygoteKind, request: ForkRequest, descriptors: Sequence[int], answered: Answered) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        values = {"kind": kind.dumps(), "request": request.encode().decode()}
        try:
            _connect(connection, self._path)
            socket.send_fds(connection, [json.dumps(values).encode()], list(descriptors))
        except OSError as error:
            connection.close()
            answered(f"the zygote server cannot be reached: {error}")
            return
        connection.setblocking(False)
        self._waiting[connection] = answered

    def poll(self) -> None:
        for connection, answered in list(self._waiting.items()):
            with contextlib.suppress(BlockingIOError):
                try:
                    data = connection.recv(MESSAGE_BYTES)
                except ConnectionResetError:
                    data = b""
                del self._waiting[connection]
                connection.close()
                answered(json.loads(data) if data else "the zygote server has ended")

    def close(self) -> None:
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()


def warm_soon(path: str, kind: ZygoteKind) -> None:
    """As `warm`, without waiting for a server that is just starting."""

    def do() -> None:
        try:
            warm(path, kind)
        except OSError as error:
            logger.warning("the zygote server cannot be reached: %s", error)

    threading.Thread(target=do, name="warm", daemon=True).start()


def warm(path: str, kind: ZygoteKind) -> None:
    """Has the zygote of this kind begin to import, of a server that may just be starting.

    Raises:
        OSError: if the server is not there.
    """
    wait_for_server(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        _connect(connection, path)
        connection.send(json.dumps({"kind": kind.dumps()}).encode())


def wait_for_server(path: str) -> None:
    """Waits until a server that may just be starting can be connected to, `START_TIMEOUT_S` at most."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not os.path.exists(path) and time.monotonic() < give_up_s:
        time.sleep(START_LOOK_S)


def _connect(connection: socket.socket, path: str) -> None:
    """Connects to a server of this account, whose path may be longer than the system takes.

    Raises:
        OSError: if none is there: a server of another account would get variables and run its own code.
    """
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        raise PermissionError(errno.EPERM, f"the server belongs to account {uid}", path)
