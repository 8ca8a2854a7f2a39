"""Measures how fast trials train on each kind of slot, by their reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.search.records import SliceRecord, TrialRecord

MIN_TRAINING_S = 0.2
"""Minimum training time for a measurement."""


@dataclass
class _Training:
    """Observed steps or samples, and the seconds they took."""

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Steps or samples per second; None with too few data."""
        return self.amount / self.seconds if self.seconds >= MIN_TRAINING_S and self.amount > 0 else None

    def add(self, amount: float, seconds: float) -> None:
        self.amount += amount
        self.seconds += seconds


@dataclass
class _Run:
    """The newest run of a trial.

    Attributes:
        number: number of the run.
        kind: kind of its slot.
        seen: its training since its first report, in samples.
        last: step and training seconds of its last report; None before the first.
    """

    number: int
    kind: str
    seen: _Training = field(default_factory=_Training)
    last: tuple[int, float] | None = None


class SpeedTracker:
    """Measures samples/s of each trial on each kind of slot.

    A run is measured from its first to its last report, by the trial's training time, which excludes suspension, start
    and restore. The first report follows the first step, so one-time work of frameworks is excluded. All runs of a
    trial on one kind count together.

    Args:
        slices: time slices of a resumed search.
        trials: its trials by number.
    """

    def __init__(self, slices: Iterable[SliceRecord], trials: Mapping[int, TrialRecord]) -> None:
        self._of_trial: dict[int, dict[str, _Training]] = defaultdict(lambda: defaultdict(_Training))
        self._runs: dict[int, _Run] = {}
        for time_slice in slices:
            if time_slice.samples_per_s and time_slice.trial in trials:
                samples = (time_slice.to_step - time_slice.from_step) * trials[time_slice.trial].samples_per_step
                # It had a speed, so it was long enough.
                seconds = max(MIN_TRAINING_S, samples / time_slice.samples_per_s)
                self._of_trial[time_slice.trial][time_slice.kind].add(time_slice.samples_per_s * seconds, seconds)

    def begin_run(self, trial: int, run: int, kind: str) -> None:
        self._runs[trial] = _Run(run, kind)

    def add_report(self, trial: TrialRecord, run: int, step: int, train_s: float) -> None:
        """Applies a report of a run; `step` and `train_s` are totals of the trial."""
        current = self._runs.get(trial.number)
        if current is None or current.number != run:
            return
        if current.last is not None:
            steps, seconds = step - current.last[0], train_s - current.last[1]
            if steps >= 0 and seconds >= 0:
                samples = steps * trial.samples_per_step
                current.seen.add(samples, seconds)
                self._of_trial[trial.number][current.kind].add(samples, seconds)
        current.last = (step, train_s)

    def of(self, trial: TrialRecord) -> dict[str, float]:
        """Returns kind -> samples/s of a trial, for kinds on which it has trained."""
        kinds = self._of_trial.get(trial.number, {})
        return {kind: rate for kind, seen in kinds.items() if (rate := seen.rate) is not None}

    def of_run(self, trial: TrialRecord, run: int) -> float | None:
        """Returns samples/s of a trial's newest run; None with too few data, or if `run` is not the newest."""
        current = self._runs.get(trial.number)
        return current.seen.rate if current is not None and current.number == run else None


def rate_of(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns steps per second between the first and last `progress` report of a run; None with too few data."""
    if not reports:
        return None
    first, last = reports[0], reports[-1]
    return _Training(last["step"] - first["step"], last["train_s"] - first["train_s"]).rate
