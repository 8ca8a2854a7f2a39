"""The processes of the run in a slot: all that descend from the executor, its zygote and its copier aside.

Whatever a trial leaves behind, in its process group or out of it, becomes a child of the executor, which has asked the
kernel for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

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
    others = {zygote, remote_copier.pid, *spared}
    found, waiting = [], children(os.getpid())
    while waiting:
        pid = waiting.pop()
        if pid in others:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
        waiting += children(pid)
    return found


def stop(zygote: int | None, spared: Collection[int] = ()) -> list[psutil.Process] | None:
    """Stops the processes of the run (SIGSTOP); to be called until all stand still.

    Args:
        zygote: see `processes`.
        spared: see `processes`.

    Returns:
        The processes; None if there may be more that do not stand still yet.
    """
    others = {zygote, remote_copier.pid, *spared}
    found, waiting, is_still = [], children(os.getpid()), True
    while waiting:
        pid = waiting.pop()
        if pid in others:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append(process)
            # Before its children are listed: one that stands still has no more of them.
            if process.status() not in STILL:
                is_still = False
                process.suspend()
        waiting += children(pid)
    return found if is_still else None


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
