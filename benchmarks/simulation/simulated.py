"""What `benchmarks.simulation.world` keeps of each trial, of each slot, and of how well the slots are used."""

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
        id: its number.
        curve: what it goes along.
        target_s, ends_s: how far along its curve it reaches the target, and leaves; seconds.
        job: how fast it is on which GPU type; None where slots are alike.
        trained_s, reported_s: how far it has come, and has reported.
        taken_s: seconds that passed for what it has reported; the same as `reported_s` where slots are alike.
        reached: whether it has reached the target.
        slot: the slot that it ran in last; None before its first slice.
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
        """Tells what there was up to this point of its curve, on a GPU of this type."""
        train_s = until_s
        if self.job is not None:
            train_s = self.taken_s + (until_s - self.reported_s) / self.job.pace(kind)
            self.speeds[kind] = self.job.speeds[kind]
        self.readings.append(self.curve.reading(self.reported_s, until_s, train_s))
        self.taken_s = train_s
        self.reported_s = until_s

    def view(self, arrived_s: float, *, runnable: bool) -> TrialView:
        """What a policy sees of it."""
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
        id: its number.
        kind: its GPU type; empty where slots are alike.
        trial: the trial that has it.
        leaving: the one that makes place at the moment.
        pace: seconds of the trial's curve that pass in a second.
        relative: the trial's speed by its mean over the GPU types.
        since_s: when the trial's slice began.
        trains_from_s, trained_before_s: when it began to train, and how far along its curve it was then.
        busy: whether it is being filled or emptied.
        fills: tells an event of its current trial from one of an earlier trial.
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
        """What a policy sees of it."""
        return SlotView(self.id, None if self.trial is None else self.trial.id, self.since_s, self.busy, self.kind)


class UseOfSlots:
    """How fast the trials trained on average, as long as there was one for each slot.

    Args:
        slots: how many slots there are.
        trials: how many trials there will be.
    """

    def __init__(self, slots: int, trials: int) -> None:
        self._needed = min(slots, trials)
        self._left = trials
        self._sum_s = 0.0
        self._ended_s: float | None = None

    @property
    def speed(self) -> float:
        """See `Outcome.speed`; NaN before the first trial has left that no other follows."""
        return self._sum_s / (self._needed * self._ended_s) if self._ended_s else math.nan

    def add(self, slot: SimulatedSlot, curve_s: float) -> None:
        """So far along its curve the trial of a slot has come."""
        if self._ended_s is None:
            self._sum_s += curve_s / slot.pace * slot.relative

    def left(self) -> None:
        """A trial has left."""
        self._left -= 1

    def follow(self, now_s: float) -> None:
        """All that happened until now has been added."""
        if self._ended_s is None and self._left < self._needed:
            self._ended_s = now_s
