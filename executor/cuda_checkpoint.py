"""Moves the GPU memory of processes to the host and back, by NVIDIA's driver, which frees the GPU for others.

It works for a process of any library (cuCheckpointProcess*, Linux, driver 570 or newer), whose CUDA calls block
meanwhile. The driver is called through `cuda.core` (extra `cuda`). A gigabyte takes about a second; either direction
may fail (docs/suspend-resume.md, "On a GPU").
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_MS = 10_000
"""Maximum time that the driver waits for pending CUDA calls of a process."""


class CudaCheckpointError(Exception): ...


def unavailable_reason() -> str:
    """Why GPU memory cannot be moved on this machine; empty if it can."""
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


def move_to_host(pids: Iterable[int]) -> None:
    """Moves the GPU memory of these processes to the host.

    Raises:
        CudaCheckpointError: if it fails for a process, which is unusable then.
    """
    _each(pids, lambda process: (process.lock(LOCK_TIMEOUT_MS), process.checkpoint()), "keeps its GPU memory")


def move_to_gpu(pids: Iterable[int]) -> None:
    """Moves the memory back to the same GPUs; the processes resume.

    Raises:
        CudaCheckpointError: if it fails for a process, which is unusable then.
    """
    _each(pids, lambda process: (process.restore(), process.unlock()), "does not get its GPU memory back")


def _each(pids: Iterable[int], move: Callable[[Any], object], failure: str) -> None:
    from cuda.core import checkpoint

    for pid in pids:
        try:
            move(checkpoint.Process(pid))
        except Exception as error:
            raise CudaCheckpointError(f"process {pid} {failure}: {error}") from error
