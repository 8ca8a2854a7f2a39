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
"""More than the supervisor's own timeouts for shutting agents down and killing processes."""
RESUME_TIMEOUT_S, KILL_TIMEOUT_S = 5.0, 30.0
"""Timeouts of an answer before the supervisor is sent SIGCONT, and then SIGKILL."""


class SupervisorControl:
    """Starts and controls a supervisor process; see `framework.embedded.supervisor` for the messages.

    Thread-safe.
    """

    def __init__(self, command: Sequence[str], work_dir: Path, log: Path, inherited_files: Sequence[int]) -> None:
        """Starts the supervisor in `work_dir`; it keeps the descriptors `inherited_files` open while it lives."""
        self._lock = threading.Lock()
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=inherited_files,
                cwd=work_dir,
                start_new_session=True,  # Ctrl-C in the owner's terminal is the owner's to handle.
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, name: str, argv: Sequence[str], env: dict[str, str], log: Path) -> int:
        return int(
            self._ask({"command": "start", "name": name, "argv": list(argv), "env": env, "log": str(log)})["pid"]
        )

    def keep(self, name: str) -> None:
        """Has the daemon `name` restarted whenever it ends or stalls."""
        self._ask({"command": "keep", "name": name})

    def given_up(self) -> dict[str, int]:
        """Daemons no longer restarted after too many failures: name -> last exit status as in `subprocess`."""
        return self._ask({"command": "given_up"})

    def running_pid(self, name: str) -> int:
        return int(self._ask({"command": "look", "name": name})["pid"])

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the daemon `name` if it runs; a daemon ended by it is not restarted."""
        self._ask({"command": "signal", "name": name, "signal": int(number)})

    def has_ended(self, name: str) -> bool:
        return self._ask({"command": "look", "name": name})["status"] is not None

    def detach(self) -> None:
        """Detaches the supervisor from its owner, until it receives SIGTERM."""
        self._ask({"command": "detach"})
        self._close_pipes()

    def stop(self) -> None:
        """Has the supervisor end the cluster, and waits for its own end."""
        self._process.send_signal(signal.SIGCONT)  # It may be stopped.
        with self._lock:
            self._close_pipes()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """Exit status of a supervisor that no longer answers, as in `subprocess`; kills it if necessary."""
        try:
            return self._process.wait(RESUME_TIMEOUT_S)
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
            raise DikeError(f"The private Mesos is not running any more; its supervisor's log is {self._log}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DikeError(f"The private Mesos could not start {request['name']}: {answer['error']}.")
        return answer

    def _wait_for_answer(self, descriptor: int) -> None:
        """Waits for an answer or the supervisor's end, which it forces on timeout."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        for timeout_s, next_signal in ((RESUME_TIMEOUT_S, signal.SIGCONT), (KILL_TIMEOUT_S, signal.SIGKILL)):
            if poll.poll(1000 * timeout_s):
                return
            self._process.send_signal(next_signal)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
