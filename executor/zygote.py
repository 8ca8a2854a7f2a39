"""The executor's side of a slot's zygote: keeps one alive and asks it for processes.

A zygote (`dike.zygote`) has imported what its forks need and run nothing. Over a connected pair of sockets it says
that it is ready, then answers each request, a JSON object with file descriptors, with the id of the process that it
has forked.
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

from executor.process import describe_exit, tail_of

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", "dike.zygote")
"""Its first argument is the launcher (`executor.environment.ZygoteKind`)."""
MAX_DEATHS = 3
"""How many zygotes in a row may end before they have forked anything."""
READY_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 60.0
MESSAGE_BYTES = 1 << 17
"""The longest message. With a longer variable in its environment a process could start no program."""


@dataclass(frozen=True)
class ForkRequest:
    """A process that a zygote is to fork.

    Attributes:
        script: its path, seen from the working directory.
        arguments: the script's arguments.
        folder: working directory.
        environment: changes to the zygote's own; None unsets a variable.
        parent: the process that adopts orphans, and so becomes its parent; None for this one.
        module: what it runs; empty for the zygote's launcher.
        is_supervised: whether the process whose id is answered becomes a supervisor, and goes on in a child
            (`dike.process.supervise`).
        groups: folders of the control groups that it enters (`executor.limits`).
        processes: how many its account may have, as far as it asks; None for no limit.
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
        """The request as the zygote reads it."""
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
        """Reads what `encode` wrote, for forks that another process is to adopt.

        Raises:
            KeyError, TypeError, ValueError: if it is something else.
        """
        values = json.loads(text)
        script, *arguments = values["argv"]
        folder, environment = Path(values["cwd"]), dict(values["environment"])
        module, is_supervised = values.get("module", ""), bool(values.get("supervised"))
        return cls(Path(script), arguments, folder, environment, parent, module, is_supervised)


class Zygote:
    """Keeps a zygote alive; one request at a time.

    The owner calls `poll` whenever one of `watched` can be read, and now and then for the sake of the deadlines.

    Args:
        preload: modules to import.
        environment: its whole environment, which its forks inherit.
        log: file that gets its output.
        command: the program with its first arguments; the next are the socket's file descriptor and what it is to
            preload.
        first: the socket and the process id of a zygote that is there already, a child of this process; the ones after
            it are started by the command.

    Attributes:
        ready: whether it has imported what it should.
        asked: whether it owes an answer to a request.
        failure: why no more zygotes are started; empty as long as they are.
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
        self.asked = False
        self.failure = ""
        if first is None:
            self._start()
        else:
            self._take_up(*first)

    @property
    def pid(self) -> int | None:
        return None if self.failure else self._process.pid

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`; others after each restart."""
        return () if self.failure else (self._socket.fileno(), self._pidfd)

    def ask(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Asks for a process.

        Args:
            request: what to fork.
            descriptors: stdout, stderr, where it reports, and where it reads requests, if it does.
        """
        data = request.encode()
        if len(data) > MESSAGE_BYTES:
            self._answer = f"its parameters and arguments take {len(data)} bytes, more than {MESSAGE_BYTES}"
            return
        self.asked = True
        self._deadline_s = time.monotonic() + FORK_TIMEOUT_S
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError):
            return  # its end is seen in `poll`

    def take_answer(self) -> int | str | None:
        """The new process' id, or why there is none; None while the zygote owes the answer or has died over it."""
        answer, self._answer = self._answer, None
        return answer

    def poll(self) -> None:
        """Reads what has come, and starts a new zygote if this one has ended."""
        if self.failure:
            return
        while (message := self._receive()) is not None:
            self._take(message)
        if self._process.poll() is not None:
            self._ended()
        elif (self.asked or not self.ready) and time.monotonic() > self._deadline_s:
            logger.error("the zygote did not answer in time")
            self.kill()

    def kill(self) -> None:
        """Ends the zygote; `poll` sees it. What it has forked is not touched."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Ends the zygote for good."""
        if not self.failure:
            self.failure = "closed"
            self.ready = False
            self.kill()
            self._process.wait()
            self._release()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._deadline_s = time.monotonic() + READY_TIMEOUT_S
        preload = ["--preload", ",".join(self._preload)] if self._preload else []
        try:
            with theirs, self._log.open("ab") as output:
                self._process: subprocess.Popen[bytes] | SplitProcess = subprocess.Popen(
                    [*self._command, str(theirs.fileno()), *preload],
                    env=dict(self._environment),
                    cwd=self._log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise
        # The socket alone would not tell: whoever has inherited it holds it open.
        self._pidfd = os.pidfd_open(self._process.pid)

    def _take_up(self, connection: socket.socket, pid: int) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._deadline_s = time.monotonic() + READY_TIMEOUT_S
        self._process = SplitProcess(pid)
        self._pidfd = os.pidfd_open(pid)

    def _receive(self) -> Any:
        try:
            data = self._socket.recv(MESSAGE_BYTES)
            if not data:
                self.kill()  # nobody can talk to it any more
                return None
            return json.loads(data)
        except (BlockingIOError, ConnectionResetError):
            return None
        except ValueError:
            logger.warning("not a message of a zygote: %r", data[:200])
            return {}

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": True}:
                self.ready = True
                logger.info("the zygote is ready: %s", message)
            case {"unfit": str(reason)}:
                logger.warning("%s, so every process imports them itself: %s", ", ".join(self._preload), reason)
                self._preload, self._is_unfit = (), bool(self._preload)
            case {"pid": int(pid)}:
                self.asked, self._answer, self._deaths = False, pid, 0
            case {"error": error}:
                self.asked, self._answer = False, str(error)
            case _:
                logger.warning("unknown message of a zygote: %r", message)

    def _ended(self) -> None:
        code = self._process.returncode
        how = describe_exit(code)
        logger.error("the zygote %s", how)
        if self._is_unfit:
            self._is_unfit = False
        elif self.asked or not self.ready:
            self._deaths += 1
        self._release()
        self.ready = self.asked = False
        if self._deaths >= MAX_DEATHS:
            self.failure = f"the zygote {how}, {self._deaths} times in a row; {tail_of(self._log)}".rstrip("; ")
            return
        try:
            self._start()
        except OSError as error:
            self.failure = f"the zygote could not be started: {error}"

    def _release(self) -> None:
        self._socket.close()
        os.close(self._pidfd)


class SplitProcess:
    """A zygote that this process has forked, as `subprocess.Popen` shows one that it has started.

    Attributes:
        pid: its process id.
        returncode: its exit code, or minus the signal that ended it; None before.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Looks whether it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Waits for its end."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """Ends it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
