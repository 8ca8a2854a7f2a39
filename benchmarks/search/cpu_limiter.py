"""Limits trials on some agents to a share of a CPU, so that one machine has slots of different real speed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

PERIOD_S = 0.01
MAX_CREDIT_S = 0.05
"""CPU time that a process can save up while it waits."""


class CpuLimiter:
    """Stops and continues processes (SIGSTOP, SIGCONT) so that each uses at most its share of a CPU.

    Like the kernel's CPU quota, it does not delay processes that wait for something else. It limits the descendants of
    agents that have created a file `PID.pid` in the folder.

    Args:
        folder: of the `.pid` files.
        shares: process id of an agent -> maximum share of a CPU of each such process there, up to 1.
    """

    def __init__(self, folder: Path, shares: Mapping[int, float]) -> None:
        self._folder = folder
        self._shares = shares
        self._limited: dict[int, _LimitedProcess | None] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._limit_all, name="cpu-shares", daemon=True)

    def __enter__(self) -> CpuLimiter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for limited in self._limited.values():
            if limited is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    limited.process.resume()

    def _limit_all(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            for path in self._folder.glob("*.pid"):
                pid = int(path.stem)
                if pid not in self._limited:
                    self._limited[pid] = self._limited_process(pid)
            for pid, limited in self._limited.items():
                if limited is not None:
                    try:
                        limited.update(time.monotonic())
                    except psutil.NoSuchProcess:
                        self._limited[pid] = None

    def _limited_process(self, pid: int) -> _LimitedProcess | None:
        """None for a process that has ended, or that no limit applies to."""
        try:
            process = psutil.Process(pid)
            share = next((self._shares[parent.pid] for parent in process.parents() if parent.pid in self._shares), 1.0)
        except psutil.NoSuchProcess:
            return None
        return _LimitedProcess(process, share) if share < 1 else None


class _LimitedProcess:
    def __init__(self, process: psutil.Process, share: float) -> None:
        self.process = process
        self._share = share
        self._updated_s = time.monotonic()
        self._used_s = _cpu_s(process)
        self._credit_s = 0.0
        self._is_stopped = False

    def update(self, now_s: float) -> None:
        """Stops the process if it has used more than its share; continues it otherwise."""
        used_s = _cpu_s(self.process)
        earned_s = self._share * (now_s - self._updated_s)
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + earned_s - (used_s - self._used_s))
        self._updated_s, self._used_s = now_s, used_s
        if (self._credit_s < 0) is not self._is_stopped:
            self._is_stopped = not self._is_stopped
            if self._is_stopped:
                self.process.suspend()
            else:
                self.process.resume()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
