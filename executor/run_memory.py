"""Memory of the run in a slot: how much is its own, and whether it has room to be paused."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from executor import cuda_checkpoint
from executor.cuda_checkpoint import CudaCheckpointError
from executor.monitor import Gpus, private_bytes
from executor.paused import PausedRuns
from executor.slot_order import SlotOrder
from executor.trial_messages import RunKey
from executor.trial_run import SlotRun
from executor.zygote_slot import GPU_RELEASE_TIMEOUT_S

logger = logging.getLogger(__name__)

PRIVATE_BYTES_INTERVAL_S = 5.0
"""Interval between reads of a run's private memory, which take milliseconds."""
PRIVATE_BYTES_GROWTH = 1.02
"""Growth factor of a run's resident memory that triggers a read before that."""
OFFLOAD_S_PER_BYTE = 1.0 / (1 << 30)
"""Time to move GPU memory to the host and back, measured on an H100 (benchmarks/results/suspend_gpu.md)."""
OFFLOAD_TIMEOUT_S = 120.0
"""Maximum wait for the GPU driver to move GPU memory to the host."""


class HostMemory(Protocol):
    """Memory of all slots of one process (`executor.trial_slot.TrialSlots`)."""

    order: SlotOrder
    gpus: Gpus
    paused: PausedRuns
    largest_bytes: int

    @property
    def resuming(self) -> list[RunKey]: ...

    def has_room(self, needed_bytes: int) -> bool: ...

    def make_room(self, needed_bytes: int = 0) -> None: ...


class RunMemory:
    """Memory of the runs in one slot, one after the other.

    Attributes:
        has_gpus: whether runs may use GPUs.
        is_pausable: whether the run, which cannot be checkpointed, has room to be paused.
    """

    def __init__(self, shared: HostMemory) -> None:
        self._shared, self._gpus, self._paused = shared, shared.gpus, shared.paused
        self._always_pause = shared.order.always_pause
        self.has_gpus = shared.order.gpu_devices is None or bool(shared.order.gpu_devices)
        self.is_pausable = False
        self._private_bytes: int | None = None
        """Private memory of the run when last read; None before."""
        self._valid = (0.0, 0.0)
        """Limits of its validity: monotonic time, and resident memory in bytes."""
        self._can_offload: bool | None = None
        """Whether the driver can move GPU memory to the host; None before that is checked."""
        self._startup_s = 0.0
        """Startup time of the last new process."""

    @property
    def can_release_gpus(self) -> bool:
        """Whether a paused run holds no GPU memory: there are no GPUs, or the driver can move it to the host."""
        if not self.has_gpus:
            return True
        if self._can_offload is None:
            reason = (
                cuda_checkpoint.unavailable_reason() if self._gpus else "NVIDIA's library does not show the slot's GPUs"
            )
            if reason:
                logger.warning("trials are suspended by checkpoints only, not paused: %s", reason)
            self._can_offload = not reason
        return self._can_offload

    def of(self, run: SlotRun) -> int:
        """Private memory of the run when last read."""
        return self.read(run) if self._private_bytes is None else self._private_bytes

    def read(self, run: SlotRun) -> int:
        self._private_bytes = own = sum(map(private_bytes, run.processes))
        rss_bytes = run.monitor.latest.rss_bytes or 0
        self._valid = time.monotonic() + PRIVATE_BYTES_INTERVAL_S, PRIVATE_BYTES_GROWTH * rss_bytes
        return own

    def refresh(self, run: SlotRun) -> None:
        """Reads it again if it may have changed."""
        until_s, up_to_bytes = self._valid
        rss_bytes = run.monitor.latest.rss_bytes or 0
        if self._private_bytes is None or time.monotonic() >= until_s or rss_bytes > up_to_bytes:
            self.read(run)

    def forget(self, run: SlotRun) -> None:
        """Forgets a run that has left the slot."""
        self._startup_s = run.startup_s or self._startup_s
        self._private_bytes, self._valid, self.is_pausable = None, (0.0, 0.0), False

    def reserve(self, run: SlotRun) -> bool:
        """Frees host memory to pause a run; returns whether it is to be paused.

        Memory must suffice for the run with its GPU memory, for which others are evicted. Unless `always_pause` is set,
        moving that back must also be faster than a new process, and must not have failed before.
        """
        if not self.has_gpus:
            return True
        shared, processes = self._shared, run.processes
        gpu_bytes = run.monitor.measure_gpu_bytes(processes)
        shared.largest_bytes = max(shared.largest_bytes, self.read(run))
        needed_bytes = gpu_bytes + (0 if shared.resuming else shared.largest_bytes)
        startup_s = run.startup_s or max(self._startup_s, 0.0 if run.is_resumed else run.age_s)
        reason = "" if run.monitor.knows_gpu_bytes else "its part of the memory in use on its shared GPU is unknown"
        if gpu_bytes and not self._always_pause:
            if self._paused.offload_failed:
                reason = "the GPU's driver has failed before"
            elif gpu_bytes * OFFLOAD_S_PER_BYTE > startup_s:
                reason = (
                    f"moving its {gpu_bytes / (1 << 30):.1f} GiB of GPU memory takes longer than a new process, "
                    f"which starts in {startup_s:.1f} s"
                )
        if not reason and not shared.has_room(needed_bytes):
            reason = "there is not enough memory"
        if reason:
            logger.info("%s is not paused: %s", run, reason)
            return False
        shared.make_room(needed_bytes)
        return True

    def release_gpus(self, run: SlotRun, *, is_allowed: bool) -> bool:
        """Offloads the GPU memory of a paused run. Evicts the run if that fails, or if it may not be paused any more.

        Args:
            run: the run.
            is_allowed: whether runs may be paused now.

        Returns:
            Whether it holds no GPU memory; call it until it does not, or the run is no longer paused.
        """
        if not is_allowed:
            run.evict()
            return False
        if run.offload is None:
            if self._are_gpus_seen_free(run):
                return True
            # It may have more GPU memory than when the pause was requested.
            if not self.reserve(run):
                run.evict()
                return False
            run.offload_gpus(self._gpus.bytes_by_process())
        assert run.offload is not None
        try:
            if not run.offload.is_done():
                if time.monotonic() - run.offload.started_at_s >= OFFLOAD_TIMEOUT_S:
                    self._can_offload = False
                    self._paused.evict_all()
                    raise CudaCheckpointError("the driver does not answer; GPU memory is not offloaded any more")
                return False
            assert run.offload.ended_at_s is not None
            if self._are_gpus_seen_free(run):
                return True
            if time.monotonic() - run.offload.ended_at_s >= GPU_RELEASE_TIMEOUT_S:
                raise CudaCheckpointError("its GPU memory was offloaded, but is still in use")
        except CudaCheckpointError as error:
            logger.warning("%s is evicted, its checkpoint stays: %s", run, error)
            self._paused.offload_failed = True
            run.evict()
        return False

    def _are_gpus_seen_free(self, run: SlotRun) -> bool:
        return self._gpus.used_bytes() is not None and run.monitor.gpus_free()
