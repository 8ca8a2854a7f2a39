"""The greatest predicted progress first, as in 'SLAQ' (SoCC 2017)."""

from __future__ import annotations

import math
from collections import deque

from framework.policies.trials.interface import PolicySettings, TrialView
from framework.policies.trials.new_readings import NewReadings
from framework.policies.trials.scored import ScoredPolicy

WINDOW = 20
"""Number of newest readings to fit."""
MIN_READINGS = 3
"""Minimum number of readings for a fit."""


class LossPrediction:
    """Predicts the decrease of one trial's loss in its next quantum.

    As in the paper, two families of curves are fitted to the newest losses, weighted by recency: a / (t + b) + c
    (sublinear convergence; without the paper's quadratic term) and a * exp(-t / b) + c (linear); a and c by least
    squares for each b of a small grid. The curve of least error predicts. t is training time, not iterations, so that
    trials with different steps are comparable. Normalized by the trial's greatest change between two readings.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self.quantum_s = settings.quantum_s
        self._new = NewReadings()
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._greatest_change = 0.0
        self._score: float | None = None

    @property
    def score(self) -> float | None:
        """The normalized decrease predicted for the next quantum; negative where the loss will rise.

        None with fewer than three readings, -inf if the newest loss is NaN or infinite, 0 if no curve can be fitted.
        """
        return self._score

    def update(self, trial: TrialView) -> None:
        new = self._new.new_indices(trial.readings)
        if not new:
            return
        for reading in trial.readings[new.start :]:
            if self._recent and math.isfinite(change := abs(reading.loss - self._recent[-1][1])):
                self._greatest_change = max(self._greatest_change, change)
            self._recent.append((reading.train_s, reading.loss))
        self._score = self._predict()

    def _predict(self) -> float | None:
        if not math.isfinite(self._recent[-1][1]):
            return -math.inf
        points = [point for point in self._recent if math.isfinite(point[1])]
        if len(self._recent) < MIN_READINGS:
            return None if len(points) == len(self._recent) else 0.0
        if len(points) < MIN_READINGS or not self._greatest_change:
            return 0.0
        span_s = points[-1][0] - points[0][0]
        lowest = min(loss for _, loss in points)
        heights = [(loss - lowest) / self._greatest_change for _, loss in points]
        if span_s <= 0 or not all(map(math.isfinite, heights)):
            return 0.0
        times = [(time_s - points[0][0]) / span_s for time_s, _ in points]
        # Imported here, as listing the policies needs no numpy.
        from framework.policies.trials.slaq_curves import predicted_fall

        return predicted_fall(times, heights, self.quantum_s / span_s)


class SlaqPolicy(ScoredPolicy):
    """Binds trials to slots (`Binding`); in each slot the one with the greatest predicted decrease of loss runs.

    SLAQ allocates cores, at least one to each job; here one trial at a time has the slot, and `ScoredPolicy` prevents
    starvation.
    """

    name = "slaq"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, LossPrediction, "greatest predicted fall")
