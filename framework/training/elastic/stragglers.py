"""Workers that are much slower than the others (Optimus, EuroSys 2018, section 5.2)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from framework.training.observer import JobObserver
from framework.training.output import ReportListener
from framework.training.spec import JobTask
from framework.training.state import JobRun

SLOW = 0.5
"""A worker below this share of the median is slow."""
REPORTS = 5
"""So many reports in a row make a straggler of a slow worker."""


@dataclass(frozen=True)
class Straggler:
    """A worker that has been slow for long.

    Attributes:
        index: its number.
        steps_per_s: its speed.
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
    """Tells stragglers from workers that were slow for a moment."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._slow: dict[int, int] = {}

    def add(self, rates: Mapping[int, float]) -> Straggler | None:
        """Takes one report in.

        Args:
            rates: index of a worker -> steps a second, of those that it concerns.

        Returns:
            The slowest worker that has been slow in `REPORTS` reports of its own in a row; None if there is none.
        """
        self._rates.update(rates)
        median = statistics.median(self._rates.values())
        for index in rates:
            self._slow[index] = self._slow.get(index, 0) + 1 if self._rates[index] < SLOW * median else 0
        late = [index for index, times in self._slow.items() if times >= REPORTS]
        if not late:
            return None
        slowest = min(late, key=self._rates.__getitem__)
        return Straggler(slowest, self._rates[slowest], median)

    def reset(self) -> None:
        """The workers are others from now on."""
        self._rates.clear()
        self._slow.clear()


class StragglerFinder:
    """Finds the tasks that are stragglers, and notifies the user of each, once.

    Args:
        run: what runs of the job.
        observer: is notified.
        pause_s: how long a straggler that was not replaced is left alone; each further time twice as long.
    """

    def __init__(self, run: JobRun, observer: JobObserver, pause_s: float) -> None:
        self._run = run
        self._observer = observer
        self._pause_s = pause_s
        self._detector = StragglerDetector()
        self._reported: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._left_alone_until_s: dict[str, float] = {}

    def find(self, rates: Mapping[int, float], now_s: float) -> JobTask | None:
        """Takes one report in; returns a straggler that is not to be left alone."""
        straggler = self._detector.add(rates)
        if straggler is None:
            return None
        self._detector.reset()
        slow = next((one for one in self._run.members if one.name == f"worker:{straggler.index}"), None)
        if slow is None or now_s < self._left_alone_until_s.get(slow.task_id, now_s):
            return None
        if slow.task_id not in self._reported:
            self._reported.add(slow.task_id)
            self._observer.notify(str(straggler))
        return slow

    def attempted(self, slow: JobTask, now_s: float, *, has_room: bool) -> None:
        """A straggler is being replaced, which may come to nothing, or no other agent has room for it."""
        count = self._attempts.get(slow.task_id, 0)
        if count == 0 and not has_room:
            self._observer.notify(f"{slow.name} stays where it is until another agent has room for it")
        self._attempts[slow.task_id] = count + 1
        self._left_alone_until_s[slow.task_id] = now_s + self._pause_s * 2**count

    def reset(self) -> None:
        """The workers are others from now on."""
        self._detector.reset()


class StragglerReporter(ReportListener):
    """Notifies the user of stragglers, once of each.

    Args:
        observer: is notified.
    """

    def __init__(self, observer: JobObserver) -> None:
        self._observer = observer
        self._detector = StragglerDetector()
        self._reported: set[int] = set()

    def rates(self, task: JobTask, workers: Mapping[int, float]) -> None:
        straggler = self._detector.add(workers)
        if straggler is not None and straggler.index not in self._reported:
            self._reported.add(straggler.index)
            self._observer.notify(str(straggler))
