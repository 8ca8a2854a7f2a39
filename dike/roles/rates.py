"""How fast each worker is by itself: the reports from which a straggler is known (as in Optimus, EuroSys 2018)."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dike.reporting import reporter

INTERVAL_S = 2.0
"""Seconds between two reports."""


@dataclass
class _Pace:
    """What is known of one worker.

    Attributes:
        steps: steps done since the last report.
        busy_s: seconds it worked on them.
        begun_s: when it began the step that it has not yet done; None if there is none.
        at_once: how many steps that are.
        known: numbers of steps that it has done at once. The first time TensorFlow prepares the function: that does
            not count.
    """

    steps: int = 0
    busy_s: float = 0.0
    begun_s: float | None = None
    at_once: int = 1
    known: set[int] = field(default_factory=set)

    def rate(self, now_s: float) -> float | None:
        """Steps a second; None if it has done none, and has not been at one for long enough to say that it is slow."""
        if self.steps:
            return self.steps / self.busy_s if self.busy_s > 0 else None
        if self.at_once in self.known and self.begun_s is not None and now_s - self.begun_s > INTERVAL_S:
            return self.at_once / (now_s - self.begun_s)
        return None


class WorkerRates:
    """Adds up workers' steps and reports their speed every `INTERVAL_S`. Any thread may call it.

    Args:
        report: gets index of a worker -> steps a second of the time it worked.
        clock: seconds, monotonic.
    """

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
        """The worker begins a step, or several; what it had begun before has come to nothing."""
        now_s = self._clock()
        with self._lock:
            pace = self._paces.setdefault(worker, _Pace())
            pace.begun_s, pace.at_once = now_s, steps

    def done(self, worker: int, busy_s: float | None = None) -> None:
        """The worker has done what it began.

        Args:
            worker: its index.
            busy_s: seconds that it took; None: since `begin`.
        """
        now_s = self._clock()
        with self._lock:
            pace = self._paces.setdefault(worker, _Pace())
            if busy_s is None and pace.begun_s is not None:
                busy_s = now_s - pace.begun_s
            pace.begun_s = None
            if pace.at_once in pace.known and busy_s is not None:
                pace.steps += pace.at_once
                pace.busy_s += busy_s
            pace.known.add(pace.at_once)
            if now_s - self._reported_s < INTERVAL_S:
                return
            self._reported_s = now_s
            rates = {index: rate for index, each in self._paces.items() if (rate := each.rate(now_s)) is not None}
            for each in self._paces.values():
                each.steps, each.busy_s = 0, 0.0
        if rates:
            self._report(rates)


_steps_at_once: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def computes_several(function: Any, steps: int) -> None:
    """Says that a call of the concrete function is so many steps."""
    _steps_at_once[function] = steps


@functools.cache
def watch_coordinators() -> None:
    """Reports the workers of every `ClusterCoordinator` of this process from now on.

    TensorFlow does not say in public which worker computes a step: this is the one place that looks.
    """
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    rates = WorkerRates()
    execute_on = cluster_coordinator.Closure.execute_on

    def timed(self: Any, worker: Any) -> None:
        if isinstance(self, cluster_coordinator.ResourceClosure):  # makes a dataset or a variable, and is no step
            execute_on(self, worker)
            return
        function = getattr(self, "_concrete_function", None)
        rates.begin(worker.worker_index, 1 if function is None else _steps_at_once.get(function, 1))
        execute_on(self, worker)
        rates.done(worker.worker_index)

    cluster_coordinator.Closure.execute_on = timed
