"""A trial's losses per quantum, and their convergence (paper 'Hermes', Algorithm 3)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from framework.policies.trials.interface import PolicySettings, Reading, TrialView
from framework.policies.trials.new_readings import NewReadings


@dataclass(slots=True)
class Quantum:
    """Losses of one quantum of a trial's training.

    Attributes:
        begin_s: training time at its start.
        length_s: planned seconds of training.
        end_s: training time at its last reading.
        low, high: minimum and maximum loss; undefined unless `is_finite`.
    """

    begin_s: float
    length_s: float
    opens_slice: bool
    end_s: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    is_finite: bool = True

    @property
    def loss(self) -> float:
        """The representative loss, (max + min) / 2."""
        return self.low / 2 + self.high / 2

    @property
    def is_short(self) -> bool:
        return self.end_s - self.begin_s < self.length_s / 2

    def add(self, reading: Reading) -> None:
        self.end_s = reading.train_s
        self.low = min(self.low, reading.low)
        self.high = max(self.high, reading.high)
        self.count += reading.count
        self.is_finite = self.is_finite and math.isfinite(reading.low) and math.isfinite(reading.high)

    def absorb(self, other: Quantum) -> None:
        self.end_s = other.end_s
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.count += other.count
        self.is_finite = self.is_finite and other.is_finite


class LossHistory:
    """Cuts one trial's readings into quanta; each reading is processed once.

    Slices are cut by training time, so that equal readings always give equal quanta (also after `dike tune --resume`).
    A reading belongs to the quantum that contains the middle of its stretch. A rest of less than half a quantum at the
    end of a slice belongs to the quantum before it, as suspension takes a moment. Quanta without a reading do not
    count.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._new = NewReadings()
        self._slices_seen = 0
        self._trained_s = 0.0
        self._quanta: deque[Quantum] = deque(maxlen=3)
        self._first_loss: float | None = None
        self._lowest_loss = math.inf
        self._score: float | None = None

    @property
    def score(self) -> float | None:
        """Convergence: how fast the losses of the last quantum fell; None before the first reading.

        C(i) = (loss(i-1) - loss(i)) / number of losses of quantum i, with representative losses, and C(0) = (max - min)
        / number of losses. C(i) is -inf if a loss of quantum i was NaN or infinite; the quantum after it is treated
        like the first. Negative where losses rise.
        """
        return self._score

    @property
    def quantum_s(self) -> float:
        """Length of its next quantum.

        It is given by the highest milestone reached, and grows by `quantum_growth` with each preemption. The decrease
        is that from the first quantum's loss to the lowest of any quantum, as a share of the first.
        """
        length_s = self._settings.quantum_s
        if self._first_loss:
            last = self._quanta[-1]
            lowest = min(self._lowest_loss, last.loss) if last.is_finite else self._lowest_loss
            decrease = (self._first_loss - lowest) / abs(self._first_loss)
            for milestone in self._settings.milestones:
                if decrease >= milestone.decrease:
                    length_s = milestone.length_s(self._settings.quantum_s)
        preemptions = max(0, self._slices_seen - 1)
        return length_s * (1 + self._settings.quantum_growth * preemptions)

    def update(self, trial: TrialView) -> None:
        new = self._new.new_indices(trial.readings)
        if not new:
            return
        for index in new:
            opens_slice = False
            while self._slices_seen < len(trial.slices) and trial.slices[self._slices_seen] <= index:
                self._slices_seen += 1
                opens_slice = True
            self._add(trial.readings[index], opens_slice)
        self._score = self._convergence()

    def _add(self, reading: Reading, opens_slice: bool) -> None:
        middle_s = (self._trained_s + reading.train_s) / 2
        if opens_slice or not self._quanta:
            self._close(ends_slice=True)
            self._quanta.append(Quantum(self._trained_s, self.quantum_s, opens_slice=True))
        elif middle_s > (end_s := self._quanta[-1].begin_s + self._quanta[-1].length_s):
            self._close(ends_slice=False)
            length_s = self.quantum_s
            begin_s = end_s + (middle_s - end_s) // length_s * length_s
            self._quanta.append(Quantum(begin_s, length_s, opens_slice=False))
        self._quanta[-1].add(reading)
        self._trained_s = reading.train_s

    def _close(self, *, ends_slice: bool) -> None:
        if not self._quanta:
            return
        last = self._quanta[-1]
        if ends_slice and len(self._quanta) > 1 and last.is_short and not last.opens_slice:
            self._quanta.pop()
            self._quanta[-1].absorb(last)
            last = self._quanta[-1]
        if last.is_finite:
            self._first_loss = last.loss if self._first_loss is None else self._first_loss
            self._lowest_loss = min(self._lowest_loss, last.loss)

    def _convergence(self) -> float:
        *before, last = self._quanta
        if before and last.is_short and not last.opens_slice:
            open_quantum, last = last, replace(before.pop())
            last.absorb(open_quantum)
        if not last.is_finite:
            return -math.inf
        fall = before[-1].loss - last.loss if before and before[-1].is_finite else last.high - last.low
        return fall / last.count if math.isfinite(fall) else -math.inf
