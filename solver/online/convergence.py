"""Predicts the remaining steps of a job from its losses so far (Optimus, EuroSys 2018, section 3.1).

Stochastic gradient descent converges as O(1/k), so the loss after k steps is modelled as `1 / (b0 k + b1) + b2` with
b0, b1, b2 >= 0. For a given b2 the model is linear in b0 and b1, which makes it non-negative least squares; b2 is found
by a successively refined grid search. A job has converged once its loss has fallen by less than a threshold per epoch
for several epochs in a row.

Real losses may differ: the learning rate changes, training diverges, adversaries learn in turn. So the model must first
predict the newest losses from the older ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats, nnls_of_two
from solver.online.loss_points import LossPoints

MIN_POINTS = 10
"""Minimum points for a curve."""
OLDER_SHARE = 2 / 3
"""Share of the points, the older ones, that must predict the others."""
JACKKNIFE_BLOCKS = 5
"""Blocks of points for the jackknife."""
MAX_NOISE_MULTIPLE = 2.5
"""Maximum error of a curve, in multiples of the losses' noise, or ..."""
MAX_FALL_ERROR = 0.1
"""... as a share of the fall that it explains."""
MAX_STANDARD_ERROR = 0.5
"""Maximum standard error of a prediction, as a share of all steps, past and remaining."""
MIN_INVERSE_LOSS = 1e-6
"""Minimum of 1 / loss, in units of the largest loss: higher curves are as wrong as infinite ones."""
_GRID = 12
_ROUNDS = 4


@dataclass(frozen=True)
class LossCurve:
    b0: float
    b1: float
    b2: float

    @overload
    def loss(self, steps: float) -> float: ...
    @overload
    def loss(self, steps: Floats) -> Floats: ...
    def loss(self, steps: float | Floats) -> float | Floats:
        return 1 / (self.b0 * steps + self.b1) + self.b2

    def flat_from(self, stretch: float, threshold: float) -> float:
        """The first step from which the loss falls by less than the threshold over `stretch` steps.

        With x = b0 k + b1 and e = b0 x stretch the relative fall is e / ((x + e) (1 + b2 x)), which falls as x grows;
        equating it with the threshold gives a quadratic equation.
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
        steps: steps until convergence; 0 if converged; infinite if unknown.
        error: standard error of `steps`, in steps; infinite if unknown.
        known: whether the losses follow the model; if not, `steps` must not be used.
        reason: why it is unknown, as a sentence; empty if known.
    """

    steps: float
    error: float
    known: bool
    reason: str = ""


class ConvergenceModel:
    """Learns one job's loss curve.

    Args:
        epoch_steps: steps over which the fall is measured: an epoch, or any comparable stretch.
        threshold: relative fall of the loss per epoch below which it counts as none.
        patience: epochs in a row without a fall until the job has converged.

    Raises:
        BadInputError: if an argument is invalid.
    """

    def __init__(self, epoch_steps: int = 1000, threshold: float = 0.01, patience: int = 3) -> None:
        if epoch_steps < 1:
            raise BadInputError(f"An epoch has {epoch_steps} steps; it must have at least 1.")
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
        """Adds the loss after a step, at any interval; non-finite losses are allowed."""
        self._points.add(step, loss)

    def curve(self) -> LossCurve | None:
        """The curve fitted to all losses; None if there are too few of them or they are negative."""
        fit = self._fit()
        return None if fit is None else fit.curves[0]

    def steps_left(self) -> StepsLeft:
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
        if abs(drift) > max(MAX_NOISE_MULTIPLE * drift_error, relevant):
            return _unknown("Its newest losses fall faster or more slowly than the older ones predict.")
        flat = np.array([curve.flat_from(self._epoch_steps, self._threshold) for curve in fit.curves])
        whole, parts, older = flat[0], flat[1:-1], flat[-1]
        # The jackknife (Efron and Stein, 1981), over blocks: neighbouring losses are not independent. Errors of the
        # model itself show in the change of the prediction with the newest losses.
        scatter = math.sqrt((JACKKNIFE_BLOCKS - 1) / JACKKNIFE_BLOCKS * float(((parts - parts.mean()) ** 2).sum()))
        error = max(scatter, abs(float(whole - older)))
        end = float(whole) + self._patience * self._epoch_steps
        now = self._points.last_step or 0
        if error > MAX_STANDARD_ERROR * max(end, now):
            return _unknown("Its losses do not determine the end.")
        return StepsLeft(max(0.0, end - now), error, known=True)

    def _fit(self) -> _Fit | None:
        """All fits to the losses so far; recomputed only after new losses."""
        if self._fitted[0] != self._points.added:
            self._fitted = self._points.added, _Fit.to(self._points)
        return self._fitted[1]


@dataclass(frozen=True)
class _Fit:
    """Curves fitted to all points, to all but one block each, and to the older ones.

    Attributes:
        curves: in this order.
    """

    curves: tuple[LossCurve, ...]
    steps: Floats
    losses: Floats

    @classmethod
    def to(cls, points: LossPoints) -> _Fit | None:
        """Fits the curves; None if there are too few points or negative losses."""
        steps, losses = points.arrays()
        if len(steps) < MIN_POINTS or losses.min() < 0 or losses.max() == 0:
            return None
        count = len(steps)
        part = np.arange(count) * JACKKNIFE_BLOCKS // count
        older = np.arange(count) < round(OLDER_SHARE * count)
        chosen = np.stack([np.ones(count, dtype=bool), *(part != left for left in range(JACKKNIFE_BLOCKS)), older])
        return cls(_curves(steps, losses, chosen.astype(np.float64)), steps, losses)

    def misfit(self) -> str:
        """Why the losses do not follow the model; empty if they do."""
        whole, older = self.curves[0], self.curves[-1]
        noise = _noise(self.losses)
        fall = whole.loss(float(self.steps[0])) - whole.loss(float(self.steps[-1]))
        if fall <= MAX_NOISE_MULTIPLE * noise:
            return "Its loss does not fall yet."
        steps, losses = (values[round(OLDER_SHARE * len(values)) :] for values in (self.steps, self.losses))
        # A high first loss alone must not make the newest ones seem close.
        allowed = max(MAX_NOISE_MULTIPLE * noise, MAX_FALL_ERROR * min(fall, float(losses.mean())))
        if _rms(whole.loss(self.steps) - self.losses) > max(MAX_NOISE_MULTIPLE * noise, MAX_FALL_ERROR * fall):
            return "Its loss does not fall as 1 / steps."
        if max(_rms(curve.loss(steps) - losses) for curve in (whole, older)) > allowed:
            return "Its newest losses differ from what the older ones predict."
        return ""

    def drift(self) -> tuple[float, float]:
        """Slope of the newest losses relative to the curve, and its standard error."""
        steps, losses = (values[round(OLDER_SHARE * len(values)) :] for values in (self.steps, self.losses))
        away = steps - steps.mean()
        spread = float(away @ away)
        return float(away @ (losses - self.curves[0].loss(steps))) / spread, _noise(self.losses) / math.sqrt(spread)


def _unknown(reason: str) -> StepsLeft:
    return StepsLeft(math.inf, math.inf, known=False, reason=reason)


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _noise(losses: Floats) -> float:
    """Standard deviation of the losses around a smooth curve, by their second differences; robust to outliers."""
    second = np.abs(np.diff(losses, 2))
    return float(np.median(second)) / (0.6745 * math.sqrt(6))


def _curves(steps: Floats, losses: Floats, weights: Floats) -> tuple[LossCurve, ...]:
    """The curves with the least sum of squared errors, one for each row of weights.

    Steps and losses are divided by the largest (section 3.1). To first order, the error of a loss l is that of 1 / (l -
    b2) times (l - b2)^2, so the rows are multiplied by that.
    """
    k, loss = steps / max(steps[-1], 1.0), losses / losses.max()
    rows = np.arange(len(weights))
    low, high = np.zeros(len(weights)), np.where(weights > 0, loss, np.inf).min(axis=1)
    for _ in range(_ROUNDS):
        floors = np.linspace(low, high, _GRID, axis=1)
        above = loss - floors[..., None]
        on = weights[:, None, :]
        b0, b1 = nnls_of_two(on * above**2 * k, on * above**2, on * above)
        curve = np.maximum(b0[..., None] * k + b1[..., None], MIN_INVERSE_LOSS)
        errors = (on * (1 / curve + floors[..., None] - loss) ** 2).sum(axis=-1)
        best = errors.argmin(axis=1)
        low, high = (floors[rows, np.clip(best + side, 0, _GRID - 1)] for side in (-1, 1))
    unit, top = max(steps[-1], 1.0), losses.max()
    return tuple(
        LossCurve(float(b0[row, at] / (unit * top)), float(b1[row, at] / top), float(floors[row, at] * top))
        for row, at in enumerate(best)
    )
