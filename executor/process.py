"""One child process: its own process group, its output copied, its end seen to."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.output import TAIL_BYTES, OutputCopier
from executor.outputs import is_remote

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 20
"""How much of a failed process' output is kept."""


@dataclass(frozen=True)
class Command:
    """What to start.

    Attributes:
        arguments: program and arguments.
        folder: its working directory.
        environment: its whole environment.
        inherited: file descriptors it keeps.
    """

    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    inherited: Sequence[int] = ()


class ChildProcess:
    """Runs a command in a session of its own and copies what it writes (`executor.output`).

    `run` has to be called from a thread that lives until the child has ended: a child that asked the kernel for a
    signal at its parent's death gets it when the *thread* that started it dies.
    """

    def __init__(self, command: Command, on_output: Callable[[str, bytes], None]) -> None:
        self._command = command
        self._output = OutputCopier(on_output)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._kill_grace_s: float | None = None
        self._ended = threading.Event()

    @property
    def tail(self) -> str:
        """The end of the output, both streams in the order in which they were read."""
        return self._output.tail

    @property
    def log_bytes(self) -> dict[str, int]:
        """Stream -> bytes copied so far."""
        return self._output.log_bytes

    def run(self, on_start: Callable[[], None]) -> int | None:
        """Starts the child and waits for its end.

        Args:
            on_start: called once the child exists.

        Returns:
            The exit code, minus the signal's number if one ended it; None if it was killed before it was started.

        Raises:
            OSError: if it cannot be started.
        """
        with self._lock:
            if self._kill_grace_s is not None:
                return None
            self._process = subprocess.Popen(
                self._command.arguments,
                cwd=self._command.folder,
                env=dict(self._command.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=tuple(self._command.inherited),
                start_new_session=True,
            )
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        self._output.follow(process.stdout, process.stderr)
        on_start()
        exit_code = process.wait()
        self._ended.set()
        # What the script left behind goes with it; it may also hold the pipes open.
        self._signal_group(signal.SIGKILL)
        self._output.drain()
        return exit_code

    def kill(self, grace_s: float) -> None:
        """Ends the child and all its group: SIGTERM, then SIGKILL after `grace_s` seconds. Returns at once."""
        with self._lock:
            if self._kill_grace_s is not None:
                return
            self._kill_grace_s = grace_s
            if self._process is None:
                return
        self._signal_group(signal.SIGTERM)
        threading.Thread(target=self._kill_after, args=(grace_s,), daemon=True).start()

    @property
    def kill_requested(self) -> bool:
        return self._kill_grace_s is not None

    def _kill_after(self, grace_s: float) -> None:
        if not self._ended.wait(grace_s):
            logger.warning("the process did not end within %.1f s of SIGTERM: killing it", grace_s)
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            signal_group(self._process.pid, number)


def describe_exit(exit_code: int | None) -> str:
    """An exit code in words: `exited with status 3`, `ended by signal 9 (SIGKILL)`."""
    if exit_code is None:
        return "was never started"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"ended by signal {-exit_code} ({name})"


def signal_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to a process group; one that is gone already is what was wanted."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def wait_readable(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Waits until one of the file descriptors can be read or has no writer left; returns those, none at the timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1000)}


def keep_tails(folder: str, copies: Mapping[Path, Path]) -> bool:
    """Copies the end of a failed process' output to its run's folder: Mesos deletes sandboxes.

    Args:
        folder: the run's folder.
        copies: file of output -> its copy in that folder.

    Returns:
        Whether that could be done.
    """
    if not folder or is_remote(folder):
        return False
    try:
        for output, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(tail_of(output, KEPT_BYTES), encoding="utf-8")
    except OSError as error:
        logger.warning("the output is not kept in %s: %s", folder, error)
        return False
    return True


def tail_of(path: Path, limit_bytes: int = TAIL_BYTES) -> str:
    """The end of a file of output; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
