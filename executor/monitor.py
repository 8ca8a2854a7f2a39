"""Measures a run's use of its machine, and whether it has released its GPUs."""

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

GPU_RELEASE_THRESHOLD_BYTES = 32 << 20
"""Growth of GPU memory over a run that still counts as released; a CUDA context alone takes ten times as much."""


class Gpus:
    """The GPUs of a slot, by NVIDIA's management library (NVML). Empty if there is no driver.

    `devices` are their indices; None for all that this process can see.
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
                logger.warning("the slot's GPUs %s cannot be monitored: %s", devices, error)

    def __bool__(self) -> bool:
        return bool(self._handles)

    def used_bytes(self) -> int | None:
        """Memory in use on all of them, by any process; None if unknown."""
        try:
            return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except pynvml.NVMLError:
            return None

    def memory_bytes(self) -> int | None:
        """Memory of the smallest of them, used or not; None if unknown."""
        with contextlib.suppress(pynvml.NVMLError):
            return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles), default=None)
        return None

    def bytes_by_process(self) -> dict[int, int]:
        """Process id -> memory, as far as known. In a container NVML may report the host's ids."""
        found: dict[int, int] = {}
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory or 0)
        return found

    def utilisation(self) -> float | None:
        """Busy share, 0 to 1, averaged over the GPUs; None if unknown."""
        if not self._handles:
            return None
        try:
            shares = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except pynvml.NVMLError:
            return None
        return float(sum(shares)) / len(shares) / 100


def private_bytes(process: psutil.Process) -> int:
    """Memory that the process shares with no other (USS); 0 if it has ended."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


class RunMonitor:
    """Monitors one run. Created before its process, to measure the GPU memory in use before.

    A run's GPU memory is that of its processes if NVML lists them by the ids of this container; else the growth since
    before the run, unless other slots share the GPU.

    Attributes:
        shares_gpu: whether they do.
        latest: the latest figures.
        peak: the maximum of each figure.
    """

    def __init__(self, gpus: Gpus, *, shares_gpu: bool = False) -> None:
        self.shares_gpu = shares_gpu
        self.latest = Usage()
        self.peak = Usage()
        self._gpus = gpus
        self._used_before = gpus.used_bytes() if gpus else None
        self._pids: set[int] = set()
        self._is_listed = False
        self._cpu_s: dict[int, float] = {}
        self._sampled_at_s = time.monotonic()

    def set_baseline(self, processes: Iterable[psutil.Process]) -> None:
        """Excludes the CPU time that already running processes of the run have used."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Measures the run's processes; ignores those that have just ended."""
        rss_bytes, busy_s = 0, 0.0
        cpu_s: dict[int, float] = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                busy_s += cpu_s[process.pid] - self._cpu_s.get(process.pid, 0.0)
        now_s = time.monotonic()
        cpu = max(0.0, busy_s) / max(now_s - self._sampled_at_s, 1e-3)
        self._cpu_s, self._sampled_at_s = cpu_s, now_s
        self._pids |= cpu_s.keys()
        self._record(Usage(rss_bytes, cpu, self._gpu_bytes(), self._gpus.utilisation()))

    def record_exit(self, max_rss_bytes: int, cpu: float) -> None:
        """Records the kernel's figures of the run's first process, which may have ended before any sample.

        `cpu` is the number of CPUs it kept busy, averaged over its life.
        """
        self.latest = Usage()
        self.peak = _maximum(self.peak, Usage(max_rss_bytes, cpu))

    @property
    def knows_gpu_bytes(self) -> bool:
        """Whether the latest measurement of the run's GPU memory counts, 0 included."""
        return not self.shares_gpu or self.latest.gpu_mem_bytes is not None

    @property
    def is_gpu_busy(self) -> bool:
        """Whether the run used a GPU at the latest sample, as far as can be known of a shared one."""
        return not self.shares_gpu and (self.latest.gpu_utilisation or 0.0) > 0

    def gpus_free(self) -> bool:
        """Whether the run, whose processes have ended or were offloaded, holds no GPU memory."""
        if not self._gpus:
            return True
        if self._is_listed:
            return not self._pids & self._gpus.bytes_by_process().keys()
        return (self._gpu_bytes_since_start() or 0) <= GPU_RELEASE_THRESHOLD_BYTES

    def measure_gpu_bytes(self, processes: Iterable[psutil.Process]) -> int:
        """Measures the GPU memory of the run's processes; 0 if unknown."""
        self._pids |= {process.pid for process in processes}
        self._record(dataclasses.replace(self.latest, gpu_mem_bytes=self._gpu_bytes()))
        return self.latest.gpu_mem_bytes or 0

    def _gpu_bytes(self) -> int | None:
        if not self._gpus:
            return None
        by_process = self._gpus.bytes_by_process()
        ours = self._pids & by_process.keys()
        self._is_listed = self._is_listed or bool(ours)
        # Some drivers list processes without their memory.
        return sum(by_process[pid] for pid in ours) or self._gpu_bytes_since_start()

    def _gpu_bytes_since_start(self) -> int | None:
        used = None if self.shares_gpu else self._gpus.used_bytes()
        return None if used is None or self._used_before is None else max(0, used - self._used_before)

    def _record(self, usage: Usage) -> None:
        self.latest = usage
        self.peak = _maximum(self.peak, usage)


def _maximum(left: Usage, right: Usage) -> Usage:
    figures = {}
    for name in (field.name for field in dataclasses.fields(Usage)):
        known = [figure for usage in (left, right) if (figure := getattr(usage, name)) is not None]
        figures[name] = max(known, default=None)
    return Usage(**figures)
