"""How a trial's loss has fallen so far, for policies that compare all trials of a search."""

from __future__ import annotations

import math
from bisect import bisect_right

from framework.policies.trials.interface import TrialView
from framework.policies.trials.new_readings import NewReadings

LIMIT = 2000
"""So many lowest losses are kept at most; then every other one shows the fall well enough."""


class Progress:
    """Follows the lowest loss of one trial.

    Attributes:
        first_loss: its first finite loss; None before.
        loss: the lowest finite loss so far; infinite before the first.
        train_s: seconds it had trained at its newest reading.
        is_lost: whether its newest loss is NaN or infinite.
    """

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.loss = math.inf
        self.train_s = 0.0
        self.is_lost = False
        self._new = NewReadings()
        self._times_s: list[float] = []
        self._losses: list[float] = []

    def update(self, trial: TrialView) -> None:
        """Takes in what is new."""
        for place in self._new.places(trial.readings):
            reading = trial.readings[place]
            self.train_s = reading.train_s
            self.is_lost = not math.isfinite(reading.loss)
            if self.is_lost:
                continue
            if self.first_loss is None:
                self.first_loss = reading.loss
            if reading.loss < self.loss:
                self.loss = reading.loss
                self._times_s.append(reading.train_s)
                self._losses.append(reading.loss)
                if len(self._losses) > LIMIT:
                    del self._times_s[1:-1:2], self._losses[1:-1:2]

    def recent_fall(self) -> float:
        """How far the lowest loss has fallen in the second half of the time it has trained; 0 without any loss."""
        if not self._losses:
            return 0.0
        return self._losses[max(bisect_right(self._times_s, self.train_s / 2) - 1, 0)] - self.loss
