"""Policies to compare with: what the field does, and one that is told the family of the curves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.interface import PolicySettings, TrialView
from framework.simulation.curves import Curve

Array = NDArray[np.float64]
Worths = dict[int, tuple[float, str]]

FEWEST_PAIRS = 8
"""Before that a Gaussian process is not fitted, and the lowest loss runs."""
NEW_PAIRS = 8
"""Its kernel is fitted anew when there are so many more."""

NEIGHBOURS = 20
LOOKED_AT = {1.0: 4.0, 0.9: 1.0, 0.75: 1.0, 0.5: 1.0, 0.25: 0.5, 0.1: 0.25}
"""Share of a trial's time -> weight of the difference there."""
RETRIED = 1e-3
"""What a trial of which all is known to be lost is worth, by the time it has had."""
START = 0.1
"""Quanta that it costs to put a trial into a slot."""
AGES = 200
_NORMAL = NormalDist()
LOST = 1e6
"""Stands for a loss that is NaN, infinite, or larger."""


class GaussianProcessPolicy(DikePolicy):
    """As DyHPO (Wistuba et al., NeurIPS 2022): the expected improvement at the next budget, by a Gaussian process.

    What there is of a trial at an age (the age, its lowest loss, and how far that fell since half the age) tells its
    lowest loss at twice the age. DyHPO has a deep kernel over parameters and curve; recorded curves have no parameters
    here, so the kernel is a plain one over the curve. Slots are given out as in `dike`.

    Args:
        settings: the length of a quantum.
    """

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, rungs_share=0.0)
        self._unit_s = settings.quantum_s
        self._pairs: list[tuple[list[float], float]] = []
        """What there was of a trial at an age, and how far its lowest loss fell until twice the age."""
        self._next_s: dict[int, float] = {}
        """Trial -> the next age of which there will be a pair."""
        self._fitted: Any = None
        self._kernel: Any = ConstantKernel(1.0) * RBF([2.0, 1.0, 1.0]) + WhiteKernel(1e-2)
        self._used_pairs = 0
        self._fitted_pairs = 0

    def worths(self, trials: Sequence[TrialView]) -> Worths:
        """See `DikePolicy`."""
        found: Worths = {}
        asked: list[tuple[int, list[float]]] = []
        for trial in trials:
            self._follow(trial)
            if self.progress[trial.id].is_lost:
                found[trial.id] = (-math.inf, "lost")
            elif not trial.readings:
                found[trial.id] = (math.inf if not trial.slices else 0.0, "first slice")
            else:
                progress = self.progress[trial.id]
                asked.append((trial.id, [self._log_age(progress.train_s), progress.loss, progress.recent_fall()]))
        if not asked:
            return found
        best = min(features[1] for _, features in asked)
        mean, deviation = self._predict(np.array([features for _, features in asked]))
        for place, (trial_id, features) in enumerate(asked):
            gap = best - (features[1] + mean[place])
            score = gap / deviation[place]
            worth = gap * _NORMAL.cdf(score) + deviation[place] * _NORMAL.pdf(score)
            found[trial_id] = (max(float(worth), 1e-12) / 2 ** max(features[0], 0.0), "expected improvement")
        return found

    def _follow(self, trial: TrialView) -> None:
        """Notes the pairs that are new."""
        had_s = trial.readings[-1].train_s if trial.readings else 0.0
        while 2 * (age_s := self._next_s.setdefault(trial.id, self._unit_s)) <= had_s:
            before, now, later = (self._low(trial, age_s * factor) for factor in (0.5, 1, 2))
            self._pairs.append(([self._log_age(age_s), now, before - now], later - now))
            self._next_s[trial.id] = 2 * age_s

    def _log_age(self, age_s: float) -> float:
        return math.log2(max(age_s / self._unit_s, 0.25))

    def _low(self, trial: TrialView, age_s: float) -> float:
        losses = [reading.loss for reading in trial.readings if reading.train_s <= age_s * 1.001]
        sound = [loss for loss in losses or [trial.readings[0].loss] if math.isfinite(loss)]
        return min(sound, default=1e3)

    def _predict(self, features: Array) -> tuple[Array, Array]:
        """How far the lowest losses fall until twice the age: means and deviations."""
        pairs = self._pairs
        if len(pairs) < FEWEST_PAIRS:
            return np.zeros(len(features)), np.full(len(features), 1e-3)
        if len(pairs) != self._used_pairs:
            inputs, falls = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
            is_due = len(pairs) >= self._fitted_pairs + NEW_PAIRS
            self._scale = (inputs.mean(axis=0), inputs.std(axis=0) + 1e-9)
            process = GaussianProcessRegressor(
                self._kernel, optimizer="fmin_l_bfgs_b" if is_due else None, normalize_y=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                self._fitted = process.fit((inputs - self._scale[0]) / self._scale[1], falls)
            self._used_pairs = len(pairs)
            if is_due:
                self._kernel, self._fitted_pairs = process.kernel_, len(pairs)
        mean, deviation = self._fitted.predict((features - self._scale[0]) / self._scale[1], return_std=True)
        return np.minimum(mean, 0.0), np.maximum(deviation, 1e-9)


class Library:
    """Curves of one family, ready to be compared with.

    Args:
        curves: all that are known.
        target: the loss to reach.
    """

    def __init__(self, curves: Sequence[Curve], target: float) -> None:
        self.curves = curves
        self.reach_s = np.array([curve.time_to(target) for curve in curves])
        self.length_s = np.array([curve.length_s for curve in curves])
        self._ages_s = np.concatenate([[0.0], self.length_s.max() * np.geomspace(1e-4, 1.0, AGES)])
        losses = np.array([[curve.loss_at(age_s) for age_s in self._ages_s] for curve in curves])
        self._losses = np.minimum(np.where(np.isfinite(losses), losses, LOST), LOST)

    def losses_at(self, age_s: float) -> Array:
        """Of all curves."""
        place = min(max(int(np.searchsorted(self._ages_s, age_s)), 1), AGES)
        before_s, after_s = self._ages_s[place - 1 : place + 1]
        share = min((age_s - before_s) / (after_s - before_s), 1.0)
        return (1 - share) * self._losses[:, place - 1] + share * self._losses[:, place]


class ToldPolicy(DikePolicy):
    """Knows other curves of the same family and the target: the greatest chance per second to reach it.

    What may become of a trial is what became of those curves that were most alike so far. Of all stretches of time the
    one with the greatest ratio of chance and time counts (the index of Gittins). Slots are given out as in `dike`.

    Args:
        settings: the length of a quantum.
        library: the curves it knows.
        own: the trials' curves, which it does not look at if they are among those.
    """

    def __init__(self, settings: PolicySettings, library: Library, own: Sequence[Curve]) -> None:
        super().__init__(settings, rungs_share=0.0)
        self._unit_s = settings.quantum_s
        self._library = library
        hidden = {id(curve) for curve in own}
        self._is_hidden = np.array([id(curve) in hidden for curve in library.curves])
        self._known: dict[int, tuple[float, float]] = {}
        """Trial -> how old it was when it was looked at, and its worth."""

    def worths(self, trials: Sequence[TrialView]) -> Worths:
        """See `DikePolicy`."""
        found: Worths = {}
        for trial in trials:
            if self.progress[trial.id].is_lost:
                found[trial.id] = (-math.inf, "lost")
            elif not trial.readings:
                found[trial.id] = (math.inf if not trial.slices else 0.0, "first slice")
            else:
                age_s = trial.readings[-1].train_s
                if self._known.get(trial.id, (-1.0, 0.0))[0] != age_s:
                    self._known[trial.id] = (age_s, self._index(trial, age_s))
                found[trial.id] = (self._known[trial.id][1], "most alike reached it")
        return found

    def _index(self, trial: TrialView, age_s: float) -> float:
        library = self._library
        times_s = [reading.train_s for reading in trial.readings]
        losses = [min(reading.loss, LOST) if math.isfinite(reading.loss) else LOST for reading in trial.readings]
        difference = np.zeros(len(library.curves))
        for share, weight in LOOKED_AT.items():
            own = float(np.interp(share * age_s, times_s, losses))
            difference += weight * (library.losses_at(share * age_s) - own) ** 2
        difference[self._is_hidden | (library.length_s <= age_s)] = math.inf
        retried = RETRIED / (age_s + self._unit_s)
        farthest = np.partition(difference, NEIGHBOURS)[NEIGHBOURS]
        if not math.isfinite(farthest):
            return retried
        weights = np.exp(-2 * difference / max(farthest, 1e-300))
        left_s = np.where(library.reach_s > age_s, library.reach_s - age_s, math.inf)
        order = np.argsort(left_s)
        left_s, weights = left_s[order], (weights / weights.sum())[order]
        left_s, weights = left_s[np.isfinite(left_s)], weights[np.isfinite(left_s)]
        if not len(left_s):
            return retried
        chances = np.cumsum(weights)
        costs_s = np.cumsum(weights * left_s) + (1 - chances) * left_s + START * self._unit_s
        return float(np.max(chances / costs_s)) + retried
