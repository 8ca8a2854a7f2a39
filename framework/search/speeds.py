"""How fast trials train on each kind of slot, from what they report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.search.records import SliceRecord, TrialRecord

LEAST_S = 0.2
"""Training that is shorter than this says nothing of a trial's speed."""


@dataclass
class _Training:
    """A stretch of training.

    Attributes:
        amount: how many steps or samples of it were seen.
        seconds: how long they took.
    """

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Steps or samples a second; None if too little was seen."""
        return self.amount / self.seconds if self.seconds >= LEAST_S and self.amount > 0 else None

    def add(self, amount: float, seconds: float) -> None:
        """More of it was seen."""
        self.amount += amount
        self.seconds += seconds


@dataclass
class _Run:
    """The newest run of a trial.

    Attributes:
        number: of the run.
        kind: of its slot.
        seen: its training since its first report, in samples.
        last: step and training seconds of its last report; None before the first.
    """

    number: int
    kind: str
    seen: _Training = field(default_factory=_Training)
    last: tuple[int, float] | None = None


class Speeds:
    """Samples a second of each trial on each kind of slot.

    A run is measured from its first report to its last one, by the trial's own clock, which stands still while the
    trial is suspended, started or restored. The first report comes after the first step, so what frameworks do once in
    a process is not in it. All runs of a trial on one kind count together.

    Args:
        slices: time slices of an interrupted search that goes on.
        trials: its trials by number.
    """

    def __init__(self, slices: Iterable[SliceRecord], trials: Mapping[int, TrialRecord]) -> None:
        self._of_trial: dict[int, dict[str, _Training]] = defaultdict(lambda: defaultdict(_Training))
        self._runs: dict[int, _Run] = {}
        for piece in slices:
            if piece.samples_per_s and piece.trial in trials:
                samples = (piece.to_step - piece.from_step) * trials[piece.trial].samples_per_step
                # Whatever had a speed was long enough.
                seconds = max(LEAST_S, samples / piece.samples_per_s)
                self._of_trial[piece.trial][piece.kind].add(piece.samples_per_s * seconds, seconds)

    def begin_run(self, trial: int, run: int, kind: str) -> None:
        """A run is about to begin on a kind of slot."""
        self._runs[trial] = _Run(run, kind)

    def add_report(self, trial: TrialRecord, run: int, step: int, train_s: float) -> None:
        """A run has done so many steps, those before it included, when the trial had trained for so long."""
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
        """Kind -> samples a second of a trial there; kinds on which it has not trained are missing."""
        kinds = self._of_trial.get(trial.number, {})
        return {kind: rate for kind, seen in kinds.items() if (rate := seen.rate) is not None}

    def of_run(self, trial: TrialRecord, run: int) -> float | None:
        """Samples a second of a trial's newest run, if that is its number; None if too little was seen of it."""
        current = self._runs.get(trial.number)
        return current.seen.rate if current is not None and current.number == run else None


def rate_of(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Steps a second between the first and the last `progress` report of a run; None if they say nothing of it."""
    if not reports:
        return None
    first, last = reports[0], reports[-1]
    return _Training(last["step"] - first["step"], last["train_s"] - first["train_s"]).rate
