"""Speed of each worker by itself, from which stragglers are found (as in Optimus, EuroSys 2018)."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dike.reporting import reporter

REPORT_INTERVAL_S = 2.0


@dataclass
class _Pace:
    """Progress of one worker.

    Attributes:
        steps: done since the last report.
        busy_s: seconds it worked on them.
        begun_s: start of the current call.
        traced: values of `steps_per_call` seen before. A first call includes tracing and is not counted.
    """

    steps: int = 0
    busy_s: float = 0.0
    begun_s: float | None = None
    steps_per_call: int = 1
    traced: set[int] = field(default_factory=set)

    def rate(self, now_s: float) -> float | None:
        """Steps per second; None if no step is done and the current one is not slow yet."""
        if self.steps:
            return self.steps / self.busy_s if self.busy_s > 0 else None
        if self.steps_per_call in self.traced and self.begun_s is not None and now_s - self.begun_s > REPORT_INTERVAL_S:
            return self.steps_per_call / (now_s - self.begun_s)
        return None


class WorkerRates:
    """Reports each worker's steps per second of working time, every `REPORT_INTERVAL_S`. Thread-safe."""

    def __init__(
        self,
        report: Callable[[Mapping[int, float]], None] = lambda rates: reporter().rates(rates),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._paces: dict[int, _Pace] = {}
        self._reported_s = clock()

    def begin(self, worker: int, steps: int = 1) -> None:
        """Starts a call of one or more steps on a worker; drops its unfinished call."""
        now_s = self._clock()
        with self._lock:
            pace = self._paces.setdefault(worker, _Pace())
            pace.begun_s, pace.steps_per_call = now_s, steps

    def done(self, worker: int, busy_s: float | None = None) -> None:
        """Ends the worker's call, which took `busy_s`, by default the time since `begin`."""
        now_s = self._clock()
        with self._lock:
            pace = self._paces.setdefault(worker, _Pace())
            if busy_s is None and pace.begun_s is not None:
                busy_s = now_s - pace.begun_s
            pace.begun_s = None
            if pace.steps_per_call in pace.traced and busy_s is not None:
                pace.steps += pace.steps_per_call
                pace.busy_s += busy_s
            pace.traced.add(pace.steps_per_call)
            if now_s - self._reported_s < REPORT_INTERVAL_S:
                return
            self._reported_s = now_s
            rates = {index: rate for index, each in self._paces.items() if (rate := each.rate(now_s)) is not None}
            for each in self._paces.values():
                each.steps, each.busy_s = 0, 0.0
        if rates:
            self._report(rates)


_steps_per_call: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def set_steps_per_call(function: Any, steps: int) -> None:
    _steps_per_call[function] = steps


@functools.cache
def watch_coordinators() -> None:
    """Reports the speeds of all workers of every `ClusterCoordinator` of this process from now on.

    TensorFlow's API for which worker computes a step is private; only this function uses it.
    """
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    rates = WorkerRates()
    execute_on = cluster_coordinator.Closure.execute_on

    def timed(self: Any, worker: Any) -> None:
        if isinstance(self, cluster_coordinator.ResourceClosure):  # creates a dataset or a variable: not a step
            execute_on(self, worker)
            return
        function = getattr(self, "_concrete_function", None)
        rates.begin(worker.worker_index, 1 if function is None else _steps_per_call.get(function, 1))
        execute_on(self, worker)
        rates.done(worker.worker_index)

    cluster_coordinator.Closure.execute_on = timed
