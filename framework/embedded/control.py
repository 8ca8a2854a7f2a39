"""The owner's end of the pipes to a cluster's supervisor."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dike.exceptions import DikeError

STOP_TIMEOUT_S = 40.0
"""More than the supervisor itself allows for the agents' farewell and for killing what is left."""
GO_ON_S, GIVE_UP_S = 5.0, 30.0
"""How long an answer may take before the supervisor is told to go on, and then before it is ended."""


class SupervisorControl:
    """Starts a supervisor process and tells it what to do; see `framework.embedded.supervisor` for the messages.

    Methods may be called from any thread.
    """

    def __init__(self, command: Sequence[str], work_dir: Path, log: Path, held_files: Sequence[int]) -> None:
        """Starts the supervisor in `work_dir`; it keeps the descriptors `held_files` open while it lives."""
        self._lock = threading.Lock()
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=held_files,
                cwd=work_dir,
                start_new_session=True,  # Ctrl-C in the owner's terminal is the owner's to handle.
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, name: str, argv: Sequence[str], env: dict[str, str], log: Path) -> int:
        """Starts the daemon `name`; returns its process id."""
        return int(
            self._ask({"command": "start", "name": name, "argv": list(argv), "env": env, "log": str(log)})["pid"]
        )

    def keep(self, name: str) -> None:
        """Has the daemon `name` started again from now on when it ends or stands still."""
        self._ask({"command": "keep", "name": name})

    def losses(self) -> dict[str, int]:
        """The kept daemons that have ended too often: name -> how it ended last, as in `subprocess`."""
        return self._ask({"command": "losses"})

    def running_pid(self, name: str) -> int:
        """Process id of the daemon `name`, as last started."""
        return int(self._ask({"command": "look", "name": name})["pid"])

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the daemon `name`, if it still runs; one that ends by it is not kept any more."""
        self._ask({"command": "signal", "name": name, "signal": int(number)})

    def has_ended(self, name: str) -> bool:
        """Whether the daemon `name` no longer runs."""
        return self._ask({"command": "look", "name": name})["status"] is not None

    def detach(self) -> None:
        """Has the supervisor live on without its owner, until it gets SIGTERM."""
        self._ask({"command": "detach"})
        self._close_pipes()

    def stop(self) -> None:
        """Has the supervisor end everything, and returns when it has ended itself."""
        self._process.send_signal(signal.SIGCONT)  # It may have been made to stand still.
        with self._lock:
            self._close_pipes()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """How a supervisor has ended that answers no more, as in `subprocess`; ends it if need be."""
        try:
            return self._process.wait(GO_ON_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            try:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
                self._wait_for_answer(stdout.fileno())
                line = stdout.readline()
            except (OSError, ValueError):  # ValueError: the pipes have been closed.
                line = b""
        if not line:
            raise DikeError(f"The embedded Mesos is not running any more; its supervisor's log is {self._log}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DikeError(f"The embedded Mesos could not start {request['name']}: {answer['error']}.")
        return answer

    def _wait_for_answer(self, descriptor: int) -> None:
        """Returns when there is an answer, or when the supervisor has ended: if need be, because it gave none."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        for patience_s, remedy in ((GO_ON_S, signal.SIGCONT), (GIVE_UP_S, signal.SIGKILL)):
            if poll.poll(1000 * patience_s):
                return
            self._process.send_signal(remedy)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
