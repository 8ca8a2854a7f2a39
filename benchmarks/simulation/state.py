"""The state of trials, slots and slot utilisation in `benchmarks.simulation.world`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.simulation.curves import Curve
from benchmarks.simulation.throughputs import Job
from framework.policies.trials.interface import Reading, SlotView, TrialView


@dataclass(slots=True)
class SimulatedTrial:
    """A trial.

    Attributes:
        target_s, ends_s: positions on its curve of the target and of its end, seconds.
        job: its speed by GPU type; None if slots are alike.
        trained_s, reported_s: positions on its curve of its training and of its last report.
        taken_s: seconds spent on what it has reported; equals `reported_s` if slots are alike.
        reached: whether it has reached the target.
        slot: the slot of its last slice; None before the first.
        readings, slices, speeds: as in `TrialView`.
    """

    id: int
    curve: Curve
    target_s: float
    ends_s: float
    job: Job | None = None
    trained_s: float = 0.0
    reported_s: float = 0.0
    taken_s: float = 0.0
    reached: bool = False
    slot: int | None = None
    readings: list[Reading] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)

    def report(self, until_s: float, kind: str) -> None:
        """Reports its training up to a position of its curve, on a GPU of this type."""
        train_s = until_s
        if self.job is not None:
            train_s = self.taken_s + (until_s - self.reported_s) / self.job.pace(kind)
            self.speeds[kind] = self.job.speeds[kind]
        self.readings.append(self.curve.reading(self.reported_s, until_s, train_s))
        self.taken_s = train_s
        self.reported_s = until_s

    def view(self, arrived_s: float, *, runnable: bool) -> TrialView:
        batch_size = 1.0 if self.job is None else self.job.batch_size
        return TrialView(
            self.id,
            arrived_s,
            self.readings,
            self.slices,
            runnable=runnable,
            batch_size=batch_size,
            speeds=self.speeds,
        )


@dataclass(slots=True)
class SimulatedSlot:
    """A slot.

    Attributes:
        kind: its GPU type; empty if slots are alike.
        leaving: the trial that is being suspended.
        pace: curve seconds per second.
        relative: the trial's speed relative to its mean over the GPU types.
        since_s: start of the trial's slice.
        trains_from_s, trained_before_s: start of its training, and its position on the curve then.
        busy: whether it is being filled or emptied.
        fills: generation; distinguishes events of the current trial from those of earlier ones.
    """

    id: int
    kind: str = ""
    trial: SimulatedTrial | None = None
    leaving: SimulatedTrial | None = None
    pace: float = 1.0
    relative: float = 1.0
    since_s: float = 0.0
    trains_from_s: float = 0.0
    trained_before_s: float = 0.0
    busy: bool = False
    fills: int = 0

    def view(self) -> SlotView:
        return SlotView(self.id, None if self.trial is None else self.trial.id, self.since_s, self.busy, self.kind)


class SlotUtilization:
    """Mean relative speed of the slots while there is a trial for each."""

    def __init__(self, slots: int, trials: int) -> None:
        self._needed = min(slots, trials)
        self._left = trials
        self._sum_s = 0.0
        self._ended_s: float | None = None

    @property
    def speed(self) -> float:
        """See `Outcome.speed`; NaN until the first trial leaves that no other replaces."""
        return self._sum_s / (self._needed * self._ended_s) if self._ended_s else math.nan

    def add(self, slot: SimulatedSlot, curve_s: float) -> None:
        """Adds progress of a slot's trial, in seconds of its curve."""
        if self._ended_s is None:
            self._sum_s += curve_s / slot.pace * slot.relative

    def trial_left(self) -> None:
        self._left -= 1

    def advance(self, now_s: float) -> None:
        """Ends the measurement at `now_s` if there are fewer trials than slots."""
        if self._ended_s is None and self._left < self._needed:
            self._ended_s = now_s
