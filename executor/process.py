"""What is asked of processes: their end in words, their group, what they have written."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from executor.output import TAIL_BYTES
from executor.outputs import is_remote

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 20
"""How much of a failed process' output is kept."""


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


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """How many processes the machine's kernel has ended for want of memory, in any container; 0 if it does not say."""
    with contextlib.suppress(FileNotFoundError), vmstat.open() as file:
        for line in file:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def signal_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to a process group; one that is gone already is what was wanted."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Waits until one of the file descriptors can be read or has no writer left; returns those, none at the timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if timeout_s is None else max(0.0, timeout_s) * 1000
    return {descriptor for descriptor, _ in poll.poll(milliseconds)}


def children(pid: int) -> list[int]:
    """Ids of a process' children; the kernel's own list, for to look through all processes takes milliseconds."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{thread}/children") as file,
            ):
                found += map(int, file.read().split())
    return found


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
