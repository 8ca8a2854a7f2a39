"""The descendants of a process: of a trial's supervisor, or of a slot's process.

Both are subreapers: they adopt orphans of their descendants, in their process group or out of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import psutil

from executor.process import children

FROZEN_STATUSES = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def processes(root: int, excluded: Collection[int | None] = ()) -> list[psutil.Process]:
    """Lists the descendants of a process, without those in `excluded` and their descendants."""
    return list(_walk(root, excluded))


def freeze(root: int) -> bool:
    """Sends SIGSTOP to the descendants of a process, not to itself.

    Returns:
        Whether all of them were stopped before this call; call it until they are.
    """
    all_frozen = True
    for process in _walk(root, ()):
        # Before its children are listed: a stopped process cannot fork any more.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in FROZEN_STATUSES:
                all_frozen = False
                process.suspend()
    return all_frozen


def _walk(root: int, excluded: Collection[int | None]) -> Iterator[psutil.Process]:
    waiting = children(root)
    while waiting:
        pid = waiting.pop()
        if pid in excluded:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)
        waiting += children(pid)


def kill_and_reap(excluded: Collection[int | None] = ()) -> bool:
    """Kills and reaps the descendants of this process (see `processes`).

    Returns:
        Whether none was left; call it until none is.
    """
    left = processes(os.getpid(), excluded)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        # Grandchildren are reaped by their parents.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return not left
