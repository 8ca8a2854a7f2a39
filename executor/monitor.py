"""What a run uses of its machine, and whether it has given its GPUs back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence

import psutil
import pynvml

from executor.trial_messages import Usage

logger = logging.getLogger(__name__)

RELEASED_BYTES = 32 << 20
"""GPU memory above what was used before a run that still counts as none; a CUDA context alone takes ten times that."""


class Gpus:
    """The GPUs of a slot, seen through NVIDIA's management library.

    Args:
        devices: their indices; None for all that this process may see. None are looked at where there is no driver.
    """

    def __init__(self, devices: Sequence[int] | None) -> None:
        self._handles: list[pynvml.c_nvmlDevice_t] = []
        if devices == ():
            return
        try:
            pynvml.nvmlInit()
            indices = range(pynvml.nvmlDeviceGetCount()) if devices is None else devices
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        except pynvml.NVMLError as error:
            if devices:
                logger.warning("the slot's GPUs %s cannot be watched: %s", devices, error)

    def __bool__(self) -> bool:
        return bool(self._handles)

    def used_bytes(self) -> int | None:
        """Memory in use on all of them, by whomever; None if the library does not say."""
        try:
            return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except pynvml.NVMLError:
            return None

    def bytes_by_process(self) -> dict[int, int]:
        """Process id -> memory, as far as the library can tell; its ids are the host's where a container has others."""
        found: dict[int, int] = {}
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory or 0)
        return found

    def utilisation(self) -> float | None:
        """Busy share, 0 to 1, the mean over the GPUs; None if the library does not say."""
        if not self._handles:
            return None
        try:
            shares = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except pynvml.NVMLError:
            return None
        return float(sum(shares)) / len(shares) / 100


def own_bytes(process: psutil.Process) -> int:
    """Memory that no other process shares with this one; 0 if it is gone."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


class RunMonitor:
    """Watches one run, from before its process exists.

    GPU memory is that of the run's processes where NVML knows them by the ids that we know, else what the devices use
    more than before the run.

    Args:
        gpus: the slot's.

    Attributes:
        now: figures at the last look.
        peak: the greatest of each figure so far.
    """

    def __init__(self, gpus: Gpus) -> None:
        self.now = Usage()
        self.peak = Usage()
        self._gpus = gpus
        self._used_before = gpus.used_bytes() if gpus else None
        self._pids: set[int] = set()
        self._listed = False
        self._cpu_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def begin_with(self, processes: Iterable[psutil.Process]) -> None:
        """The run's processes are there already: the time they have been busy before does not count."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Takes the figures of the run's processes; those that have just ended count for nothing."""
        rss_bytes, busy_s = 0, 0.0
        cpu_s: dict[int, float] = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                busy_s += cpu_s[process.pid] - self._cpu_s.get(process.pid, 0.0)
        now_s = time.monotonic()
        cpu = max(0.0, busy_s) / max(now_s - self._looked_s, 1e-3)
        self._cpu_s, self._looked_s = cpu_s, now_s
        self._pids |= cpu_s.keys()
        self._take(Usage(rss_bytes, cpu, self._gpu_bytes(), self._gpus.utilisation()))

    def ended(self, max_rss_bytes: int, cpu: float) -> None:
        """The run's first process has ended; the kernel says what a run too short to be looked at has used.

        Args:
            max_rss_bytes: the most memory it ever held.
            cpu: CPUs it kept busy, the mean over its life.
        """
        self.now = Usage()
        self.peak = _greatest(self.peak, Usage(max_rss_bytes, cpu))

    def gpus_free(self) -> bool:
        """Whether the run, whose processes are gone or have their memory on the host, is seen to hold no GPU memory."""
        if not self._gpus:
            return True
        if self._listed:
            return not self._pids & self._gpus.bytes_by_process().keys()
        return (self._more_than_before() or 0) <= RELEASED_BYTES

    def gpu_bytes(self, processes: Iterable[psutil.Process]) -> int:
        """What the run's processes hold on the GPUs now; 0 if nobody can tell."""
        self._pids |= {process.pid for process in processes}
        self._take(dataclasses.replace(self.now, gpu_mem_bytes=self._gpu_bytes()))
        return self.now.gpu_mem_bytes or 0

    def _gpu_bytes(self) -> int | None:
        if not self._gpus:
            return None
        by_process = self._gpus.bytes_by_process()
        ours = self._pids & by_process.keys()
        self._listed = self._listed or bool(ours)
        # Some drivers list processes without their figures.
        return sum(by_process[pid] for pid in ours) or self._more_than_before()

    def _more_than_before(self) -> int | None:
        used = self._gpus.used_bytes()
        return None if used is None or self._used_before is None else max(0, used - self._used_before)

    def _take(self, usage: Usage) -> None:
        self.now = usage
        self.peak = _greatest(self.peak, usage)


def _greatest(left: Usage, right: Usage) -> Usage:
    figures = {}
    for name in (field.name for field in dataclasses.fields(Usage)):
        known = [figure for usage in (left, right) if (figure := getattr(usage, name)) is not None]
        figures[name] = max(known, default=None)
    return Usage(**figures)
