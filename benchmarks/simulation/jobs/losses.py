"""How the loss of a simulated job really falls, and when the job has converged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PATIENCE = 3
"""A job has converged once its loss has fallen by less than its threshold for so many epochs in a row."""


@dataclass(frozen=True)
class TrueCurve:
    """A loss of `(1 - floor) / (1 + rate x)^power + floor` after x epochs.

    The form that Optimus fits has the power 1.

    Attributes:
        epochs: when the job has converged.
        rate: how fast the loss falls.
        power: how the fall slows down.
        floor: where it ends; the loss begins at 1.
        noise: standard deviation of what is measured, as a share of the loss.
    """

    epochs: int
    rate: float
    power: float
    floor: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator, noise: float) -> TrueCurve:
        """A curve of any of the usual shapes.

        Args:
            rng: draws it.
            noise: as the attribute.
        """
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
        """The share of the loss per epoch by which the user wants it to fall at least.

        Between the last epoch that does and the first one that does not, so that the rule ends the job where it ends.
        """
        first = self.epochs - PATIENCE + 1
        return (self._fall(first - 1) + self._fall(first)) / 2

    def loss(self, done: float) -> float:
        """The loss without noise.

        Args:
            done: share of the job that is done, 0 to 1.
        """
        return self._loss(done * self.epochs)

    def _loss(self, epochs: float) -> float:
        return float((1 - self.floor) * (1 + self.rate * epochs) ** -self.power + self.floor)

    def _fall(self, epoch: int) -> float:
        """Share of the loss by which it falls in that epoch, counted from 1."""
        before = self._loss(epoch - 1)
        return (before - self._loss(epoch)) / before
