"""The losses of a job as a few points: outliers smoothed, neighbours averaged."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from solver.calibration.nnls import Floats

NEIGHBOURS = 3
"""Number of losses before and after one that it is compared with."""
MAX_POINTS = 128
"""Maximum points; beyond it neighbours are merged, so a fit costs the same after 10^6 steps as after 1000."""


class LossPoints:
    """Mean losses over intervals of equal length, which double in length as the job runs.

    A loss above all of the few before it, or below all of the few after it, is an outlier: falling losses lie between
    those. It is replaced by the mean of its neighbours (Optimus, EuroSys 2018, section 3.1).

    Attributes:
        last_step: the newest step, None before the first.
        not_finite: number of newest losses in a row that were not finite.
    """

    def __init__(self) -> None:
        self.added = 0
        self.last_step: int | None = None
        self.not_finite = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=2 * NEIGHBOURS + 1)
        self._origin = 0
        self._width = 1
        self._stretches: dict[int, tuple[int, float, float]] = {}

    def add(self, step: int, loss: float) -> None:
        """Adds one loss; losses after a restart may repeat steps, non-finite ones are only counted."""
        if self.last_step is None:
            self._origin = step
        self.added += 1
        self.last_step = step
        if not math.isfinite(loss):
            self.not_finite += 1
            return
        self.not_finite = 0
        self._recent.append((step, loss))
        # A loss is checked once it has later neighbours; the first ones have no earlier ones.
        if len(self._recent) == 2 * NEIGHBOURS + 1:
            self._keep(self._recent[NEIGHBOURS][0], self._smoothed(NEIGHBOURS))
        elif len(self._recent) > NEIGHBOURS:
            position = len(self._recent) - NEIGHBOURS - 1
            self._keep(self._recent[position][0], self._smoothed(position))

    def arrays(self) -> tuple[Floats, Floats]:
        """Mean step and mean loss of each interval, in the order of steps.

        Excludes the newest losses, which have no later neighbours yet.
        """
        counts, steps, losses = np.array([self._stretches[key] for key in sorted(self._stretches)]).reshape(-1, 3).T
        return steps / counts, losses / counts

    def _smoothed(self, position: int) -> float:
        """The loss at `position`, or its neighbours' mean if it is an outlier."""
        losses = [loss for _, loss in self._recent]
        before = losses[max(0, position - NEIGHBOURS) : position]
        after = losses[position + 1 : position + 1 + NEIGHBOURS]
        loss = losses[position]
        if (before and loss > max(before)) or loss < min(after):
            return sum(before + after) / len(before + after)
        return loss

    def _keep(self, step: int, loss: float) -> None:
        key = max(0, step - self._origin) // self._width
        while key >= MAX_POINTS:
            merged: dict[int, tuple[int, float, float]] = {}
            for old, (count, steps, losses) in self._stretches.items():
                other = merged.get(old // 2, (0, 0.0, 0.0))
                merged[old // 2] = other[0] + count, other[1] + steps, other[2] + losses
            self._stretches = merged
            self._width *= 2
            key //= 2
        count, steps, losses = self._stretches.get(key, (0, 0.0, 0.0))
        self._stretches[key] = count + 1, steps + step, losses + loss
