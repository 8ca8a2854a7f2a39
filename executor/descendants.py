"""The processes of the run in a slot: all that descend from the executor, its zygote and its copier aside.

Whatever a trial leaves behind, in its process group or out of it, becomes a child of the executor, which has asked the
kernel for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import psutil

from executor.outputs import remote_copier
from executor.process import children

STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def processes(zygote: int | None, spared: Collection[int] = ()) -> list[psutil.Process]:
    """The processes of the run.

    Args:
        zygote: process id of the zygote, which is left out with all that it has not given away; None if there is none.
        spared: ids of processes of other runs.
    """
    return list(_walk(zygote, spared))


def stop(zygote: int | None, spared: Collection[int] = ()) -> list[psutil.Process] | None:
    """Stops the processes of the run (SIGSTOP); to be called until all stand still.

    Args:
        zygote: see `processes`.
        spared: see `processes`.

    Returns:
        The processes; None if there may be more that do not stand still yet.
    """
    found, is_still = [], True
    for process in _walk(zygote, spared):
        found.append(process)
        # Before its children are listed: one that stands still has no more of them.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in STILL:
                is_still = False
                process.suspend()
    return found if is_still else None


def _walk(zygote: int | None, spared: Collection[int]) -> Iterator[psutil.Process]:
    """Each process before its children are listed."""
    others = {zygote, remote_copier.pid, *spared}
    waiting = children(os.getpid())
    while waiting:
        pid = waiting.pop()
        if pid in others:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)
        waiting += children(pid)


def clear(zygote: int | None, spared: Collection[int] = ()) -> bool:
    """Kills and reaps the processes of the run; to be called until nothing is left.

    Args:
        zygote: see `processes`.
        spared: see `processes`.

    Returns:
        Whether none was found.
    """
    left = processes(zygote, spared)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        # A grandchild is its parent's to reap.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return not left
