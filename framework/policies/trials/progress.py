"""Progress of a trial's loss, for policies that compare all trials of a search."""

from __future__ import annotations

import math
from bisect import bisect_right

from framework.policies.trials.interface import TrialView
from framework.policies.trials.new_readings import NewReadings

MAX_KEPT_LOSSES = 2000
"""Maximum number of lowest losses kept per trial; beyond it every other one is dropped."""


class Progress:
    """Tracks the lowest loss of one trial.

    Attributes:
        first_loss: its first finite loss; None before.
        loss: lowest finite loss so far; infinite before the first.
        train_s: training time at its newest reading.
        is_diverged: whether its newest loss is NaN or infinite.
    """

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.loss = math.inf
        self.train_s = 0.0
        self.is_diverged = False
        self._new = NewReadings()
        self._times_s: list[float] = []
        self._losses: list[float] = []

    def update(self, trial: TrialView) -> None:
        for place in self._new.new_indices(trial.readings):
            reading = trial.readings[place]
            self.train_s = reading.train_s
            self.is_diverged = not math.isfinite(reading.loss)
            if self.is_diverged:
                continue
            if self.first_loss is None:
                self.first_loss = reading.loss
            if reading.loss < self.loss:
                self.loss = reading.loss
                self._times_s.append(reading.train_s)
                self._losses.append(reading.loss)
                if len(self._losses) > MAX_KEPT_LOSSES:
                    del self._times_s[1:-1:2], self._losses[1:-1:2]

    def recent_fall(self) -> float:
        """Returns the decrease of the lowest loss in the second half of its training time; 0 without any loss."""
        if not self._losses:
            return 0.0
        return self._losses[max(bisect_right(self._times_s, self.train_s / 2) - 1, 0)] - self.loss
