"""The processes that descend from one: from a trial's supervisor, or from the process of a slot.

Both adopt what their descendants leave behind, in a process group or out of it: the kernel has been asked for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import psutil

from executor.process import children

STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def processes(root: int, others: Collection[int | None] = ()) -> list[psutil.Process]:
    """The descendants of a process.

    Args:
        root: its id.
        others: ids of those that are left out, with all that descends from them.
    """
    return list(_walk(root, others))


def stop(root: int) -> bool:
    """Stops the descendants of a process (SIGSTOP), not itself; to be called until it says that all stand still.

    Args:
        root: its id.
    """
    is_still = True
    for process in _walk(root, ()):
        # Before its children are listed: one that stands still has no more of them.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in STILL:
                is_still = False
                process.suspend()
    return is_still


def _walk(root: int, others: Collection[int | None]) -> Iterator[psutil.Process]:
    """Each process before its children are listed."""
    waiting = children(root)
    while waiting:
        pid = waiting.pop()
        if pid in others:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)
        waiting += children(pid)


def clear(others: Collection[int | None] = ()) -> bool:
    """Kills and reaps the descendants of this process; to be called until nothing is left.

    Args:
        others: as `processes`.

    Returns:
        Whether none was found.
    """
    left = processes(os.getpid(), others)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        # A grandchild is its parent's to reap.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return not left
