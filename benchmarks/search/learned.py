"""Policies for comparison: a Gaussian process as in the literature, and one that knows the family of the curves."""

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

from benchmarks.simulation.curves import Curve
from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.earlier_trials import EarlierTrial, EarlierTrials
from framework.policies.trials.interface import PolicySettings, TrialView

Array = NDArray[np.float64]
Worths = dict[int, tuple[float, str]]

MIN_PAIRS = 8
"""With fewer pairs the Gaussian process is not fitted, and the trial with the lowest loss runs."""
REFIT_PAIRS = 8
"""The kernel is refitted after this many new pairs."""

NEIGHBOURS = 20
_NORMAL = NormalDist()


class GaussianProcessPolicy(DikePolicy):
    """As DyHPO (Wistuba et al., NeurIPS 2022): expected improvement at the next budget, by a Gaussian process.

    It predicts a trial's lowest loss at twice its age from the age, the lowest loss, and its fall since half the age.
    DyHPO has a deep kernel over parameters and curve; recorded curves have no parameters here, so the kernel is a plain
    one over the curve. Slots are assigned as in `dike`.

    `settings`: the quantum is the unit of age.
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
        found: Worths = {}
        asked: list[tuple[int, list[float]]] = []
        for trial in trials:
            self._record_pairs(trial)
            if self.progress[trial.id].is_diverged:
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

    def _record_pairs(self, trial: TrialView) -> None:
        had_s = trial.readings[-1].train_s if trial.readings else 0.0
        while 2 * (age_s := self._next_s.setdefault(trial.id, self._unit_s)) <= had_s:
            before, now, later = (self._lowest_loss(trial, age_s * factor) for factor in (0.5, 1, 2))
            self._pairs.append(([self._log_age(age_s), now, before - now], later - now))
            self._next_s[trial.id] = 2 * age_s

    def _log_age(self, age_s: float) -> float:
        return math.log2(max(age_s / self._unit_s, 0.25))

    def _lowest_loss(self, trial: TrialView, age_s: float) -> float:
        losses = [reading.loss for reading in trial.readings if reading.train_s <= age_s * 1.001]
        sound = [loss for loss in losses or [trial.readings[0].loss] if math.isfinite(loss)]
        return min(sound, default=1e3)

    def _predict(self, features: Array) -> tuple[Array, Array]:
        """Predicts the falls of the lowest losses until twice the age: means and deviations."""
        pairs = self._pairs
        if len(pairs) < MIN_PAIRS:
            return np.zeros(len(features)), np.full(len(features), 1e-3)
        if len(pairs) != self._used_pairs:
            inputs, falls = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
            is_due = len(pairs) >= self._fitted_pairs + REFIT_PAIRS
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


def as_earlier_trials(curves: Sequence[Curve]) -> list[EarlierTrial]:
    return [EarlierTrial(*curve.points) for curve in curves]


class KnownFamilyPolicy(DikePolicy):
    """Runs the trial with the greatest chance per second to reach the target, by known curves of the family.

    Slots are assigned as in `dike`.

    Args:
        settings: the quantum is the unit of age.
        known: other curves of the family.
    """

    def __init__(self, settings: PolicySettings, known: Sequence[Curve], target: float) -> None:
        super().__init__(settings, rungs_share=0.0)
        self._unit_s = settings.quantum_s
        self._known = EarlierTrials(as_earlier_trials(known), target, NEIGHBOURS)

    def worths(self, trials: Sequence[TrialView]) -> Worths:
        found: Worths = {}
        for trial in trials:
            if self.progress[trial.id].is_diverged:
                found[trial.id] = (-math.inf, "lost")
            elif not trial.readings:
                found[trial.id] = (math.inf if not trial.slices else 0.0, "first slice")
            else:
                found[trial.id] = (self._known.chance(trial, self._unit_s), "most alike reached it")
        return found
