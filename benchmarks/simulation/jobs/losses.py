"""The true loss of a simulated job, and its convergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PATIENCE = 3
"""Consecutive epochs with a fall below the threshold after which a job has converged."""


@dataclass(frozen=True)
class TrueCurve:
    """A loss of `(1 - floor) / (1 + rate x)^power + floor` after x epochs.

    The form that Optimus fits has the power 1.

    Attributes:
        epochs: epochs until convergence.
        floor: limit of the loss, which starts at 1.
        noise: standard deviation of measurements, relative to the loss.
    """

    epochs: int
    rate: float
    power: float
    floor: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator, noise: float) -> TrueCurve:
        epochs = int(rng.integers(15, 61))
        return cls(
            epochs=epochs,
            rate=float(rng.uniform(5, 30)) / epochs,
            power=float(rng.uniform(0.8, 1.25)),
            floor=float(rng.uniform(0.05, 0.3)),
            noise=noise,
        )

    @property
    def threshold(self) -> float:
        """Minimum relative fall of the loss per epoch that counts as progress.

        It lies between the last epoch with progress and the first without, so that the rule ends the job after
        `epochs`.
        """
        first = self.epochs - PATIENCE + 1
        return (self._fall(first - 1) + self._fall(first)) / 2

    def loss(self, done: float) -> float:
        """The loss without noise; `done`: progress of the job, 0 to 1."""
        return self._loss(done * self.epochs)

    def _loss(self, epochs: float) -> float:
        return float((1 - self.floor) * (1 + self.rate * epochs) ** -self.power + self.floor)

    def _fall(self, epoch: int) -> float:
        """Relative fall of the loss in an epoch, counted from 1."""
        before = self._loss(epoch - 1)
        return (before - self._loss(epoch)) / before
