"""The processes of the run in a slot: all that descend from the executor, its zygote and its copier aside.

Whatever a trial leaves behind, in its process group or out of it, becomes a child of the executor, which has asked the
kernel for that.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from executor.outputs import remote_copier


def processes(zygote: int | None) -> list[psutil.Process]:
    """The processes of the run.

    Args:
        zygote: process id of the zygote, which is left out with all that it has not given away; None if there is none.
    """
    found, waiting = [], [pid for pid in _children(os.getpid()) if pid not in (zygote, remote_copier.pid)]
    while waiting:
        pid = waiting.pop()
        waiting += _children(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def clear(zygote: int | None) -> bool:
    """Kills and reaps the processes of the run; to be called until nothing is left.

    Returns:
        Whether none was found.
    """
    left = processes(zygote)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        # A grandchild is its parent's to reap.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return not left


def _children(pid: int) -> list[int]:
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
