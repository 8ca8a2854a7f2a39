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
    found = []
    for child in psutil.Process().children():
        if child.pid not in (zygote, remote_copier.pid):
            found.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                found.extend(child.children(recursive=True))
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
