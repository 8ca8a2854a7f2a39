"""How many steps a job has left, from its losses so far (Optimus, EuroSys 2018, section 3.1).

Stochastic gradient descent converges as O(1/k), so the loss after k steps is taken to be `1 / (b0 k + b1) + b2` with
b0, b1, b2 >= 0. For a given b2 the form is linear in b0 and b1, which makes it non-negative least squares; b2 is found
by going through its range ever more finely. A job has converged once its loss has fallen by less than a share per epoch
for several epochs in a row.

Real losses need not be so: the learning rate changes, training diverges, adversaries learn in turn. So the form must
first predict the newest losses from the older ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats, nnls_of_two
from solver.online.loss_points import LossPoints

LEAST_POINTS = 10
"""Fewer points than that say nothing of a curve."""
OLDER = 2 / 3
"""Share of the points, the older ones, that must predict the others."""
BLOCKS = 5
"""Parts of the points that are left out in turn, to see how much the prediction depends on each."""
NOISES = 2.5
"""A curve may be off by so many times the losses' noise, and ..."""
OFF = 0.1
"""... by this share of the fall that it is to explain."""
DOUBT = 0.5
"""A prediction whose standard error is a larger share of all steps, done and left, is none."""
LEAST_INVERSE = 1e-6
"""Of 1 / loss, in units of the largest loss: a curve that goes higher is as wrong as one that goes to infinity."""
_GRID = 12
_ROUNDS = 4


@dataclass(frozen=True)
class LossCurve:
    """A loss of `1 / (b0 k + b1) + b2` after k steps."""

    b0: float
    b1: float
    b2: float

    @overload
    def loss(self, steps: float) -> float: ...
    @overload
    def loss(self, steps: Floats) -> Floats: ...
    def loss(self, steps: float | Floats) -> float | Floats:
        """The loss after so many steps."""
        return 1 / (self.b0 * steps + self.b1) + self.b2

    def flat_from(self, stretch: float, threshold: float) -> float:
        """The first step from which on the loss falls by less than a share of itself over a stretch of steps.

        With x = b0 k + b1 and e = b0 x stretch the share is e / ((x + e) (1 + b2 x)), which falls as x grows; set equal
        to the threshold that is a quadratic equation.
        """
        e = self.b0 * stretch
        if e == 0:
            return 0.0
        a, b, c = threshold * self.b2, threshold * (1 + self.b2 * e), (threshold - 1) * e
        x = 2 * -c / (b + math.sqrt(b * b - 4 * a * c))
        return max(0.0, (x - self.b1) / self.b0)


@dataclass(frozen=True)
class StepsLeft:
    """A prediction.

    Attributes:
        steps: steps until the job has converged; 0 if it has; infinite where nothing can be said.
        error: standard error of `steps`, in steps; infinite where nothing can be said.
        known: whether the losses behave as the form says; if not, `steps` must not be relied upon.
        reason: why it is not known, as a sentence; empty where it is.
    """

    steps: float
    error: float
    known: bool
    reason: str = ""


class ConvergenceModel:
    """Learns one job's loss curve.

    Args:
        epoch_steps: steps over which the fall is measured: an epoch, or any stretch that is as good.
        threshold: a fall of less than this share of the loss per epoch counts as none.
        patience: so many epochs in a row without a fall end the job.

    Raises:
        BadInputError: if an argument makes no sense.
    """

    def __init__(self, epoch_steps: int = 1000, threshold: float = 0.01, patience: int = 3) -> None:
        if epoch_steps < 1:
            raise BadInputError(f"An epoch of {epoch_steps} steps makes no sense; it must have at least 1.")
        if not 0 < threshold < 1:
            raise BadInputError(f"The threshold of convergence is {threshold:g}; it must be between 0 and 1.")
        if patience < 1:
            raise BadInputError(f"The patience is {patience} epochs; it must be at least 1.")
        self._epoch_steps = epoch_steps
        self._threshold = threshold
        self._patience = patience
        self._points = LossPoints()
        self._fitted: tuple[int, _Fit | None] = 0, None

    def add(self, step: int, loss: float) -> None:
        """Takes the loss after a step, in any density; a loss that is not finite is taken too."""
        self._points.add(step, loss)

    def curve(self) -> LossCurve | None:
        """The curve fitted to all losses; None if there are too few of them or they cannot follow one."""
        fit = self._fit()
        return None if fit is None else fit.curves[0]

    def steps_left(self) -> StepsLeft:
        """Steps from the newest one until the job has converged."""
        if self._points.not_finite >= self._patience:
            return _unknown("Its newest losses are not finite numbers.")
        fit = self._fit()
        if fit is None:
            return _unknown("It has too few losses yet, or some below 0.")
        reason = fit.misfit()
        if reason:
            return _unknown(reason)
        drift, drift_error = fit.drift()
        relevant = self._threshold / 2 * float(fit.losses[-1]) / self._epoch_steps
        if abs(drift) > max(NOISES * drift_error, relevant):
            return _unknown("Its newest losses fall faster or more slowly than those before promised.")
        flat = np.array([curve.flat_from(self._epoch_steps, self._threshold) for curve in fit.curves])
        whole, parts, older = flat[0], flat[1:-1], flat[-1]
        # The jackknife (Efron and Stein, 1981), over blocks: neighbouring losses are not independent. What the form
        # does not explain shows in the way the prediction has changed with the newest losses.
        scatter = math.sqrt((BLOCKS - 1) / BLOCKS * float(((parts - parts.mean()) ** 2).sum()))
        error = max(scatter, abs(float(whole - older)))
        end = float(whole) + self._patience * self._epoch_steps
        now = self._points.last_step or 0
        if error > DOUBT * max(end, now):
            return _unknown("Its losses allow very different ends.")
        return StepsLeft(max(0.0, end - now), error, known=True)

    def _fit(self) -> _Fit | None:
        """All fits to the losses so far; made anew only after new losses."""
        if self._fitted[0] != self._points.added:
            self._fitted = self._points.added, _Fit.to(self._points)
        return self._fitted[1]


@dataclass(frozen=True)
class _Fit:
    """Curves fitted to all points, to all but one block each, and to the older ones; and how far off they are.

    Attributes:
        curves: in this order.
        steps: the points.
        losses: likewise.
    """

    curves: tuple[LossCurve, ...]
    steps: Floats
    losses: Floats

    @classmethod
    def to(cls, points: LossPoints) -> _Fit | None:
        """Fits; None if there are too few points or losses below 0."""
        steps, losses = points.arrays()
        if len(steps) < LEAST_POINTS or losses.min() < 0 or losses.max() == 0:
            return None
        count = len(steps)
        part = np.arange(count) * BLOCKS // count
        older = np.arange(count) < round(OLDER * count)
        chosen = np.stack([np.ones(count, dtype=bool), *(part != left for left in range(BLOCKS)), older])
        return cls(_curves(steps, losses, chosen.astype(np.float64)), steps, losses)

    def misfit(self) -> str:
        """Why the losses do not follow the form; empty if they do."""
        whole, older = self.curves[0], self.curves[-1]
        noise = _noise(self.losses)
        fall = whole.loss(float(self.steps[0])) - whole.loss(float(self.steps[-1]))
        if fall <= NOISES * noise:
            return "Its loss does not fall yet."
        steps, losses = (values[round(OLDER * len(values)) :] for values in (self.steps, self.losses))
        # Of a high first loss alone the newest ones must not seem near.
        allowed = max(NOISES * noise, OFF * min(fall, float(losses.mean())))
        if _rms(whole.loss(self.steps) - self.losses) > max(NOISES * noise, OFF * fall):
            return "Its loss does not fall as 1 / steps."
        if max(_rms(curve.loss(steps) - losses) for curve in (whole, older)) > allowed:
            return "Its newest losses are not what the older ones promised."
        return ""

    def drift(self) -> tuple[float, float]:
        """By how much a step the newest losses rise above the curve, and the standard error of that."""
        steps, losses = (values[round(OLDER * len(values)) :] for values in (self.steps, self.losses))
        away = steps - steps.mean()
        spread = float(away @ away)
        return float(away @ (losses - self.curves[0].loss(steps))) / spread, _noise(self.losses) / math.sqrt(spread)


def _unknown(reason: str) -> StepsLeft:
    return StepsLeft(math.inf, math.inf, known=False, reason=reason)


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _noise(losses: Floats) -> float:
    """Standard deviation of the losses around a smooth curve, by their second differences; outliers do not count."""
    second = np.abs(np.diff(losses, 2))
    return float(np.median(second)) / (0.6745 * math.sqrt(6))


def _curves(steps: Floats, losses: Floats, weights: Floats) -> tuple[LossCurve, ...]:
    """The curves with the least sum of squared errors, one for each row of weights.

    Steps and losses are divided by the largest (section 3.1). The error of a loss l is that of 1 / (l - b2) times
    (l - b2)^2, to first order, so that is what the rows are multiplied by.
    """
    k, loss = steps / max(steps[-1], 1.0), losses / losses.max()
    rows = np.arange(len(weights))
    low, high = np.zeros(len(weights)), np.where(weights > 0, loss, np.inf).min(axis=1)
    for _ in range(_ROUNDS):
        floors = np.linspace(low, high, _GRID, axis=1)
        above = loss - floors[..., None]
        on = weights[:, None, :]
        b0, b1 = nnls_of_two(on * above**2 * k, on * above**2, on * above)
        curve = np.maximum(b0[..., None] * k + b1[..., None], LEAST_INVERSE)
        errors = (on * (1 / curve + floors[..., None] - loss) ** 2).sum(axis=-1)
        best = errors.argmin(axis=1)
        low, high = (floors[rows, np.clip(best + side, 0, _GRID - 1)] for side in (-1, 1))
    unit, top = max(steps[-1], 1.0), losses.max()
    return tuple(
        LossCurve(float(b0[row, at] / (unit * top)), float(b1[row, at] / top), float(floors[row, at] * top))
        for row, at in enumerate(best)
    )
