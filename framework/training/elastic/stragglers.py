"""Workers that are much slower than the others (Optimus, EuroSys 2018, section 5.2)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from framework.training.observer import JobObserver
from framework.training.output import ReportListener
from framework.training.spec import JobTask
from framework.training.state import JobRun

SLOW_FRACTION = 0.5
"""A worker slower than this fraction of the median is slow."""
MIN_SLOW_REPORTS = 5
"""Number of consecutive slow reports that make a worker a straggler."""


@dataclass(frozen=True)
class Straggler:
    """A worker that has been slow in several consecutive reports.

    Attributes:
        median_steps_per_s: the median of all workers.
    """

    index: int
    steps_per_s: float
    median_steps_per_s: float

    def __str__(self) -> str:
        return (
            f"worker:{self.index} makes {self.steps_per_s:.3g} steps/s, less than half of the median of "
            f"{self.median_steps_per_s:.3g}"
        )


class StragglerDetector:
    """Detects workers that are persistently slow, not momentarily."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._slow: dict[int, int] = {}

    def add(self, rates: Mapping[int, float]) -> Straggler | None:
        """Applies one report, worker index -> steps per second of the workers that it covers.

        Returns:
            The slowest worker that was slow in its last `MIN_SLOW_REPORTS` reports; None if there is none.
        """
        self._rates.update(rates)
        median = statistics.median(self._rates.values())
        for index in rates:
            self._slow[index] = self._slow.get(index, 0) + 1 if self._rates[index] < SLOW_FRACTION * median else 0
        late = [index for index, times in self._slow.items() if times >= MIN_SLOW_REPORTS]
        if not late:
            return None
        slowest = min(late, key=self._rates.__getitem__)
        return Straggler(slowest, self._rates[slowest], median)

    def reset(self) -> None:
        self._rates.clear()
        self._slow.clear()


class StragglerFinder:
    """Finds the tasks that are stragglers and notifies the user once for each.

    Args:
        backoff_s: backoff before a straggler that was not replaced is returned again; doubles each time.
    """

    def __init__(self, run: JobRun, observer: JobObserver, backoff_s: float) -> None:
        self._run = run
        self._observer = observer
        self._backoff_s = backoff_s
        self._detector = StragglerDetector()
        self._reported: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._backoff_until_s: dict[str, float] = {}

    def find(self, rates: Mapping[int, float], now_s: float) -> JobTask | None:
        """Applies one report; returns a straggler whose backoff is over."""
        straggler = self._detector.add(rates)
        if straggler is None:
            return None
        self._detector.reset()
        slow = next((one for one in self._run.members if one.name == f"worker:{straggler.index}"), None)
        if slow is None or now_s < self._backoff_until_s.get(slow.task_id, now_s):
            return None
        if slow.task_id not in self._reported:
            self._reported.add(slow.task_id)
            self._observer.notify(str(straggler))
        return slow

    def start_backoff(self, slow: JobTask, now_s: float, *, has_room: bool) -> None:
        """Starts the backoff of a straggler, whether its replacement succeeds or no other agent has room."""
        count = self._attempts.get(slow.task_id, 0)
        if count == 0 and not has_room:
            self._observer.notify(f"{slow.name} stays on its agent until another agent has room for it")
        self._attempts[slow.task_id] = count + 1
        self._backoff_until_s[slow.task_id] = now_s + self._backoff_s * 2**count

    def reset(self) -> None:
        self._detector.reset()


class StragglerReporter(ReportListener):
    """Notifies the user once for each straggler."""

    def __init__(self, observer: JobObserver) -> None:
        self._observer = observer
        self._detector = StragglerDetector()
        self._reported: set[int] = set()

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        straggler = self._detector.add(workers)
        if straggler is not None and straggler.index not in self._reported:
            self._reported.add(straggler.index)
            self._observer.notify(str(straggler))
