"""The executor's side of a slot's zygote: keeps it alive and requests forks.

A zygote (`dike.zygote`) has imported what its forks need and run nothing. Over a pair of connected sockets it reports
that it is ready, then answers each request (a JSON object with file descriptors) with the id of the forked process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.process import describe_exit, read_tail

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", "dike.zygote")
"""Command of a zygote; the next argument is the launcher (`executor.environment.ZygoteKind`)."""
MAX_DEATHS = 3
"""Maximum number of zygotes in a row that end without a fork."""
READY_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 60.0
MESSAGE_BYTES = 1 << 17
"""Maximum size of a message. With a longer environment variable a process could not start programs."""


@dataclass(frozen=True)
class ForkRequest:
    """A process for a zygote to fork.

    Attributes:
        script: its path, relative to the working directory.
        arguments: the script's arguments.
        folder: working directory.
        environment: changes to the zygote's own; None unsets a variable.
        parent: the subreaper that becomes its parent; None for this process.
        module: module to run; empty for the zygote's launcher.
        is_supervised: whether the forked process becomes a supervisor, and the launcher runs in its child
            (`dike.process.supervise`).
        groups: folders of the control groups that it joins (`executor.limits`).
        processes: RLIMIT_NPROC of the process; None for no limit.
    """

    script: Path
    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str | None]
    parent: int | None = None
    module: str = ""
    is_supervised: bool = False
    groups: Sequence[str] = ()
    processes: int | None = None

    def encode(self) -> bytes:
        values = {
            "argv": [str(self.script), *self.arguments],
            "cwd": str(self.folder),
            "environment": dict(self.environment),
            "parent": self.parent or os.getpid(),
            **({"module": self.module} if self.module else {}),
            **({"supervised": True} if self.is_supervised else {}),
            **({"groups": list(self.groups)} if self.groups else {}),
            **({"processes": self.processes} if self.processes else {}),
        }
        return json.dumps(values).encode()

    @classmethod
    def decode(cls, text: str, parent: int) -> ForkRequest:
        """Reads what `encode` wrote, for forks to be adopted by `parent`.

        Raises:
            KeyError, TypeError, ValueError: if it is something else.
        """
        values = json.loads(text)
        script, *arguments = values["argv"]
        folder, environment = Path(values["cwd"]), dict(values["environment"])
        module, is_supervised = values.get("module", ""), bool(values.get("supervised"))
        return cls(Path(script), arguments, folder, environment, parent, module, is_supervised)


class Zygote:
    """Keeps a zygote alive, restarting it if necessary; one request at a time.

    The owner calls `poll` when one of `watched_fds` is readable, and periodically for timeouts.

    Args:
        preload: modules to import.
        environment: its whole environment, which its forks inherit.
        log: file for its output.
        command: the program with its first arguments; the socket's file descriptor and the preload follow.
        first: the socket and process id of an existing zygote, a child of this process; its successors are started by
            the command.

    Attributes:
        ready: whether it has imported its modules.
        is_forking: whether a request is unanswered.
        failure: why no more zygotes are started; empty while they are.
    """

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        command: Sequence[str],
        first: tuple[socket.socket, int] | None = None,
    ) -> None:
        self._preload = preload
        self._environment = environment
        self._log = log
        self._command = command
        self._deaths = 0
        self._is_unfit = False
        self._answer: int | str | None = None
        self.ready = False
        self.is_forking = False
        self.failure = ""
        if first is None:
            self._start()
        else:
            self._attach(*first)

    @property
    def pid(self) -> int | None:
        return None if self.failure else self._process.pid

    @property
    def watched_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when `poll` has something to do; they change on a restart."""
        return () if self.failure else (self._socket.fileno(), self._pidfd)

    def request_fork(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Sends a request. The descriptors are stdout, stderr, the report pipe, and the control pipe if any."""
        data = request.encode()
        if len(data) > MESSAGE_BYTES:
            self._answer = f"its parameters and arguments take {len(data)} bytes, more than {MESSAGE_BYTES}"
            return
        self.is_forking = True
        self._deadline_s = time.monotonic() + FORK_TIMEOUT_S
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError):
            return  # `poll` handles its end

    def take_answer(self) -> int | str | None:
        """The id of the new process, or why there is none. None while it is pending, and if the zygote died."""
        answer, self._answer = self._answer, None
        return answer

    def poll(self) -> None:
        """Reads its messages, and restarts it if it has ended."""
        if self.failure:
            return
        while (message := self._receive()) is not None:
            self._apply(message)
        if self._process.poll() is not None:
            self._handle_exit()
        elif (self.is_forking or not self.ready) and time.monotonic() > self._deadline_s:
            logger.error("the zygote did not answer in time")
            self.kill()

    def kill(self) -> None:
        """Kills the zygote, not its forks; `poll` handles its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        if not self.failure:
            self.failure = "closed"
            self.ready = False
            self.kill()
            self._process.wait()
            self._release()

    def _start(self) -> None:
        self._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._deadline_s = time.monotonic() + READY_TIMEOUT_S
        preload = ["--preload", ",".join(self._preload)] if self._preload else []
        try:
            with peer, self._log.open("ab") as output:
                self._process: subprocess.Popen[bytes] | ForkedZygote = subprocess.Popen(
                    [*self._command, str(peer.fileno()), *preload],
                    env=dict(self._environment),
                    cwd=self._log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(peer.fileno(),),
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise
        # The socket does not show its end: processes that inherited it keep it open.
        self._pidfd = os.pidfd_open(self._process.pid)

    def _attach(self, connection: socket.socket, pid: int) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._deadline_s = time.monotonic() + READY_TIMEOUT_S
        self._process = ForkedZygote(pid)
        self._pidfd = os.pidfd_open(pid)

    def _receive(self) -> Any:
        try:
            data = self._socket.recv(MESSAGE_BYTES)
            if not data:
                self.kill()  # unusable without its socket
                return None
            return json.loads(data)
        except (BlockingIOError, ConnectionResetError):
            return None
        except ValueError:
            logger.warning("not a message of a zygote: %r", data[:200])
            return {}

    def _apply(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": True}:
                self.ready = True
                logger.info("the zygote is ready: %s", message)
            case {"unfit": str(reason)}:
                logger.warning("%s, so every process imports them itself: %s", ", ".join(self._preload), reason)
                self._preload, self._is_unfit = (), bool(self._preload)
            case {"pid": int(pid)}:
                self.is_forking, self._answer, self._deaths = False, pid, 0
            case {"error": error}:
                self.is_forking, self._answer = False, str(error)
            case _:
                logger.warning("unknown message of a zygote: %r", message)

    def _handle_exit(self) -> None:
        code = self._process.returncode
        how = describe_exit(code)
        logger.error("the zygote %s", how)
        if self._is_unfit:
            self._is_unfit = False
        elif self.is_forking or not self.ready:
            self._deaths += 1
        self._release()
        self.ready = self.is_forking = False
        if self._deaths >= MAX_DEATHS:
            self.failure = f"the zygote {how}, {self._deaths} times in a row; {read_tail(self._log)}".rstrip("; ")
            return
        try:
            self._start()
        except OSError as error:
            self.failure = f"the zygote could not be started: {error}"

    def _release(self) -> None:
        self._socket.close()
        os.close(self._pidfd)


class ForkedZygote:
    """A zygote forked by this process, with the interface of `subprocess.Popen`.

    Attributes:
        pid: its process id.
        returncode: its exit code, or minus the signal that ended it; None before.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
