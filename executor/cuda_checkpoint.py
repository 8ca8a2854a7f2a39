"""What processes hold on GPUs: brought to the host's memory and back by NVIDIA's driver, so that others get the GPU.

The driver does that for a process of any library (cuCheckpointProcess*, Linux, drivers from 570 on); its CUDA calls
wait meanwhile. It is reached through `cuda.core`, which the extra `cuda` installs. It takes seconds for gigabytes, and
may fail either way (docs/suspend-resume.md, "On a GPU").
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_MS = 10_000
"""How long the driver may wait for what a process has under way."""


class CudaCheckpointError(Exception):
    """The driver could not do it; the message says why."""


def why_not() -> str:
    """Why it cannot be done on this machine; empty if it can."""
    try:
        from cuda.core import checkpoint
    except ImportError:
        return "the extra 'cuda' is not installed"
    try:
        state = checkpoint.Process(os.getpid()).state
        logger.info("the driver can move GPU memory; this process is %s", state)
    except RuntimeError as error:  # of the library: it, or the driver, is too old
        return str(error)
    except Exception as error:
        logger.info("the driver can move GPU memory; of this process it says: %s", error)
    return ""


def to_host(pids: Iterable[int]) -> None:
    """Brings what these processes hold on GPUs to the host's memory.

    Raises:
        CudaCheckpointError: if that fails for one of them, which is of no more use then.
    """
    _each(pids, lambda process: (process.lock(LOCK_TIMEOUT_MS), process.checkpoint()), "keeps its GPU memory")


def to_gpu(pids: Iterable[int]) -> None:
    """Brings it back to the GPUs that it was on; the processes go on.

    Raises:
        CudaCheckpointError: if that fails for one of them, which is of no more use then.
    """
    _each(pids, lambda process: (process.restore(), process.unlock()), "does not get its GPU memory back")


def _each(pids: Iterable[int], move: Callable[[Any], object], failure: str) -> None:
    from cuda.core import checkpoint

    for pid in pids:
        try:
            move(checkpoint.Process(pid))
        except Exception as error:
            raise CudaCheckpointError(f"process {pid} {failure}: {error}") from error
