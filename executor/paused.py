"""Paused processes of suspended trials: frozen in memory, ready to resume.

Most have a checkpoint too. A trial that cannot be checkpointed has none, and starts over if its process is evicted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import psutil

from executor import cuda_checkpoint
from executor.cuda_checkpoint import CudaCheckpointError
from executor.monitor import RunMonitor, private_bytes
from executor.trial_messages import FULL_SHARE, RunKey, TrialRun
from executor.trial_run import SlotRun

logger = logging.getLogger(__name__)

MAX_PAUSED_PER_SLOT = 8
MIN_FREE_MEMORY_SHARE = 0.05
"""Below this share of available memory the machine is short: other processes may exceed their Mesos resources."""


@dataclass(frozen=True)
class _Paused:
    """A paused run: its supervisor and all its processes, none of which can fork, and their private memory."""

    run: SlotRun
    processes: Sequence[psutil.Process]
    bytes: int


class PausedRuns:
    """The paused runs of all slots of a process, least recently suspended first. Belongs to one thread.

    Attributes:
        max_count: maximum number, however much memory is available.
        resume_order: runs that may be resumed, most likely first, as sent by the framework.
        offload_failed: whether the GPU driver has ever failed to move the memory of a run.
    """

    def __init__(self) -> None:
        self.max_count = MAX_PAUSED_PER_SLOT
        self.resume_order: Sequence[RunKey] = ()
        self.offload_failed = False
        self._paused: dict[RunKey, _Paused] = {}
        self._evicted: list[_Paused] = []
        """Evicted runs whose processes have not all ended, in order of eviction."""
        self._evicted_at_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._paused)

    @property
    def keys(self) -> tuple[RunKey, ...]:
        return tuple(self._paused)

    @property
    def unsaved(self) -> tuple[RunKey, ...]:
        """Runs without a checkpoint of their last steps."""
        return tuple(key for key, each in self._paused.items() if each.run.reports.is_unsaved)

    @property
    def unsaved_bytes(self) -> int:
        return _bytes(each for each in self._paused.values() if each.run.reports.is_unsaved)

    @property
    def pids(self) -> frozenset[int]:
        """Ids of all processes of paused runs, and of evicted ones that have not ended."""
        return frozenset(process.pid for each in (*self._paused.values(), *self._evicted) for process in each.processes)

    def is_evicting(self, within_s: float = math.inf) -> bool:
        """Whether processes that were evicted within this time have not ended."""
        return bool(self._evicted) and time.monotonic() - self._evicted_at_s < within_s

    @property
    def watched_fds(self) -> tuple[int, ...]:
        return tuple(descriptor for each in self._paused.values() for descriptor in each.run.watched_fds)

    @property
    def bytes(self) -> int:
        return _bytes(self._paused.values())

    def add(self, run: SlotRun, processes: Sequence[psutil.Process]) -> int:
        """Adds a run that has ended and whose processes are frozen; returns their private memory in bytes."""
        self._paused[run.key] = paused = _Paused(run, processes, sum(map(private_bytes, processes)))
        return paused.bytes

    def resume(self, order: TrialRun, monitor: RunMonitor) -> SlotRun | None:
        """Resumes the paused process of the trial's last run as the new run, if its state is the one to resume from.

        Evicts processes of the trial with any other state. Returns None if there is none to resume.
        """
        trial = order.trial
        for key in [key for key in self._paused if key[0] == trial.number]:
            paused = self._paused[key]
            if key[1] != trial.run - 1 or paused.run.checkpoint[0] != trial.resume_from:
                self._evict(key, "its trial was resumed elsewhere")
            elif self._try_unfreeze(key):
                del self._paused[key]
                run = SlotRun(order, paused.run.channel, monitor, paused.run)
                monitor.set_baseline(paused.processes)
                run.resume()
                return run
        return None

    def _try_unfreeze(self, key: RunKey) -> bool:
        """Continues the processes of a run (SIGCONT) and restores their GPU memory. On failure it evicts them.

        The processes then wait for `SlotRun.resume`. A hanging GPU driver blocks here, and costs the slot.
        """
        paused = self._paused[key]
        for process in paused.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        try:
            if paused.run.offloaded_pids:
                cuda_checkpoint.move_to_gpu(paused.run.offloaded_pids)
        except CudaCheckpointError as error:
            self.offload_failed = True
            self._evict(key, str(error))
            return False
        return True

    def evict(self, keys: Iterable[RunKey]) -> None:
        """Evicts those of these runs that are paused here."""
        for key in keys:
            if key in self._paused:
                self._evict(key, "it will not be resumed")

    def evict_all(self) -> None:
        self.evict(self.keys)

    def make_room(
        self, limit_bytes: int, used_bytes: int, needed_bytes: int = 0, exempt: Collection[RunKey] = ()
    ) -> None:
        """Evicts runs, least likely to be resumed first, while memory is short or they are too many.

        Runs without a checkpoint are evicted last, and never for their number.

        Args:
            limit_bytes: memory of the slots.
            used_bytes: memory used by all but paused runs.
            needed_bytes: memory that will be used in addition.
            exempt: runs that are about to be resumed, which are not evicted.
        """
        saved = sum(not each.run.reports.is_unsaved and key not in exempt for key, each in self._paused.items())
        for _ in range(min(saved, len(self._paused) - self.max_count)):
            self._evict_one("too many runs are paused", exempt)
        while used_bytes + needed_bytes + self.bytes > FULL_SHARE * limit_bytes:
            if not self._evict_one("the memory of the slots is short", exempt):
                break
        memory = psutil.virtual_memory()
        while memory.available + _bytes(self._evicted) - needed_bytes < MIN_FREE_MEMORY_SHARE * memory.total:
            if not self._evict_one("the machine's memory is short", exempt):
                break

    def poll(self) -> None:
        """Evicts runs whose processes were killed, and reaps evicted processes."""
        for key, paused in list(self._paused.items()):
            paused.run.poll()
            if paused.run.has_died:
                self._evict(key, "its process was killed")
        for process in [process for each in self._evicted for process in each.processes if process.is_running()]:
            with contextlib.suppress(ChildProcessError):  # not a child of this process yet, or reaped
                os.waitpid(process.pid, os.WNOHANG)
        self._evicted = [each for each in self._evicted if any(process.is_running() for process in each.processes)]

    def has_room(self, limit_bytes: int, used_bytes: int, needed_bytes: int, exempt: Collection[RunKey] = ()) -> bool:
        """Whether a run may be paused: beside runs that must not be evicted for it, memory suffices for what follows.

        Args:
            limit_bytes: memory of the slots.
            used_bytes: memory used by all but paused runs, this run included.
            needed_bytes: memory of the next run, and of what this run offloads from its GPUs.
            exempt: runs that are about to be resumed.
        """
        remaining = [each for key, each in self._paused.items() if key in exempt or each.run.reports.is_unsaved]
        remaining_bytes = _bytes(remaining)
        memory = psutil.virtual_memory()
        available = memory.available + _bytes(self._evicted) + self.bytes - remaining_bytes
        return (
            used_bytes + remaining_bytes + needed_bytes <= FULL_SHARE * limit_bytes
            and len(self.unsaved) < self.max_count
            and available - needed_bytes > MIN_FREE_MEMORY_SHARE * memory.total
        )

    def _evict_one(self, reason: str, exempt: Collection[RunKey]) -> bool:
        """Evicts the run least likely to be resumed; returns whether there was one."""
        # Unranked runs were preempted last.
        unranked = [key for key in self._paused if key not in self.resume_order]
        by_use = [*reversed(unranked), *(key for key in reversed(self.resume_order) if key in self._paused)]
        order = sorted(by_use, key=lambda key: self._paused[key].run.reports.is_unsaved)
        key = next((key for key in order if key not in exempt), None)
        if key is not None:
            self._evict(key, reason)
        return key is not None

    def _evict(self, key: RunKey, reason: str) -> None:
        paused = self._paused.pop(key)
        rest = "it has no checkpoint" if paused.run.reports.is_unsaved else "its checkpoint stays"
        logger.info("%s is evicted, %s: %s", paused.run, rest, reason)
        self._evicted_at_s = time.monotonic()
        self._evicted.append(paused)
        for process in paused.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        paused.run.close()


def _bytes(runs: Iterable[_Paused]) -> int:
    return sum(each.bytes for each in runs)
