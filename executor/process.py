"""Helpers for processes: descriptions of their end, signals, waiting, the end of their output."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from executor.outputs import is_remote
from executor.streams import TAIL_BYTES

logger = logging.getLogger(__name__)

SAVED_TAIL_BYTES = 1 << 20
"""Bytes of a failed process' output that are saved."""


def describe_exit(exit_code: int | None) -> str:
    """Describes an exit code: `exited with status 3`, `ended by signal 9 (SIGKILL)`."""
    if exit_code is None:
        return "was never started"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"ended by signal {-exit_code} ({name})"


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that this machine's kernel has killed for lack of memory, in any container; 0 if unknown."""
    with contextlib.suppress(FileNotFoundError), vmstat.open() as file:
        for line in file:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def signal_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Waits until a file descriptor is readable or has no writer left; returns all such, none at the timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if timeout_s is None else max(0.0, timeout_s) * 1000
    return {descriptor for descriptor, _ in poll.poll(milliseconds)}


def children(pid: int) -> list[int]:
    """Ids of a process' children, from /proc/PID/task/*/children: a search through all processes takes milliseconds."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{thread}/children") as file,
            ):
                found += map(int, file.read().split())
    return found


def save_tails(folder: str, copies: Mapping[Path, Path]) -> bool:
    """Copies the end of a failed process' output to its run's folder: Mesos deletes sandboxes.

    `copies` maps files to their copies. Returns whether they were copied; not to a remote folder.
    """
    if not folder or is_remote(folder):
        return False
    try:
        for output, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(read_tail(output, SAVED_TAIL_BYTES), encoding="utf-8")
    except OSError as error:
        logger.warning("the output cannot be saved in %s: %s", folder, error)
        return False
    return True


def read_tail(path: Path, limit_bytes: int = TAIL_BYTES) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
