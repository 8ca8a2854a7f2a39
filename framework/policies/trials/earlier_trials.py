"""Predictions from the ended trials of other searches that were most similar to a trial so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from framework.policies.trials.interface import TrialView

Floats = NDArray[np.float64]

GOAL_QUANTILE = 0.25
"""The goal is the loss that this share of the earlier trials reached."""
NEIGHBOUR_SHARE = 0.25
"""Share of the earlier trials, those with the most similar losses, that count for a trial."""
MIN_EARLIER_TRIALS = 8
"""Minimum number of earlier trials for a prediction."""
AGE_WEIGHTS = {1.0: 4.0, 0.9: 1.0, 0.75: 1.0, 0.5: 1.0, 0.25: 0.5, 0.1: 0.25}
"""Share of a trial's training so far -> weight of the difference there."""
KERNEL_SHARPNESS = 2.0
"""The farthest neighbour has weight exp(-2)."""
MIN_CHANCE = 1e-3
"""Chance in its first quantum of a trial whose neighbours never reached the goal."""
START_COST_QUANTA = 0.1
"""Cost of starting a trial in a slot, in quanta."""
AGE_COUNT = 120
"""Number of ages at which losses are stored."""
MIN_AGE_SHARE = 1e-4
"""First of these ages, as a share of the longest trial."""
LOSS_CLIP = 10.0
"""Scaled losses are clipped at this distance from the range between the lowest and the usual first loss."""


@dataclass(frozen=True)
class EarlierTrial:
    """A trial that was trained to its end.

    Attributes:
        steps: steps at its reports, ascending, the last above 0.
        losses: reported losses, lower is better.
        batch_size: samples per step; 1 if unknown.
    """

    steps: Sequence[float]
    losses: Sequence[float]
    batch_size: float = 1.0


class _Curves:
    """Losses of trials, interpolated at common ages.

    Attributes:
        reached: age at which each trial reached the goal; infinite if it never did.
    """

    def __init__(self, ages: Sequence[Sequence[float] | Floats], losses: Sequence[Floats], goal: float) -> None:
        longest = max(float(each[-1]) for each in ages)
        self._ages = np.concatenate([[0.0], longest * np.geomspace(MIN_AGE_SHARE, 1.0, AGE_COUNT)])
        self._losses = np.array([np.interp(self._ages, *each) for each in zip(ages, losses, strict=True)])
        there = [np.flatnonzero(each <= goal) for each in losses]
        self.reached = np.array([of[at[0]] if len(at) else math.inf for of, at in zip(ages, there, strict=True)])

    def losses_at(self, age: float) -> Floats:
        """Returns the losses of all trials at an age; the last one beyond the end."""
        place = min(max(int(np.searchsorted(self._ages, age)), 1), AGE_COUNT)
        before, after = self._ages[place - 1 : place + 1]
        share = min((age - before) / (after - before), 1.0)
        return (1 - share) * self._losses[:, place - 1] + share * self._losses[:, place]


class EarlierTrials:
    """Predicts trials of this search from those of another.

    The future of a trial is distributed as that of the quarter of earlier trials with the most similar losses; the
    greatest ratio of chance to time counts, as in a Gittins index (J. R. Stat. Soc. B 41, 1979). Ages are samples, as
    the searches may have run on different machines; steps if batch sizes are unknown.

    Args:
        trials: at least two.
        goal: the loss to reach; None for the one that a quarter of them reached.
        neighbours: number of them that count for a trial; None for a quarter.
    """

    def __init__(
        self, trials: Sequence[EarlierTrial], goal: float | None = None, neighbours: int | None = None
    ) -> None:
        firsts = [next(filter(math.isfinite, trial.losses), math.nan) for trial in trials]
        sound = [loss for trial in trials for loss in trial.losses if math.isfinite(loss)]
        first, lowest = float(np.nanmedian(firsts)) if sound else 0.0, min(sound, default=0.0)
        self._lowest, self._range = lowest, min(max(first - lowest, 1e-9), 1e300)
        losses = [self._scaled(trial.losses) for trial in trials]
        lows = np.sort([each.min() for each in losses])
        goal_loss = float(lows[math.ceil(GOAL_QUANTILE * len(trials)) - 1] if goal is None else self._scaled([goal])[0])
        self._neighbours = min(len(trials) - 1, neighbours or max(3, round(NEIGHBOUR_SHARE * len(trials))))
        self._by_steps = _Curves([trial.steps for trial in trials], losses, goal_loss)
        self._by_samples: _Curves | None = None
        if all(trial.batch_size != 1 for trial in trials):
            samples = [np.array(trial.steps) * trial.batch_size for trial in trials]
            self._by_samples = _Curves(samples, losses, goal_loss)
        self._known: dict[int, tuple[float, float]] = {}
        """Trial -> step of the last prediction, and its result."""

    def chance(self, trial: TrialView, quantum_s: float, given_s: float = 0.0) -> float:
        """Returns the chance per quantum of reaching the goal, above 0; without reports `given_s` is the run time."""
        if not trial.readings:
            # All earlier trials are equally likely.
            return GOAL_QUANTILE * quantum_s / (given_s + quantum_s)
        step = trial.readings[-1].step
        if self._known.get(trial.id, (-1.0, 0.0))[0] != step:
            self._known[trial.id] = step, self._index(trial, quantum_s)
        return self._known[trial.id][1]

    def _scaled(self, losses: Sequence[float]) -> Floats:
        """Maps the lowest loss of all to 0 and the usual first one to 1, so that none overflows."""
        scaled = np.array([(loss - self._lowest) / self._range if math.isfinite(loss) else math.inf for loss in losses])
        return np.clip(scaled, -LOSS_CLIP, 1 + LOSS_CLIP)

    def _index(self, trial: TrialView, quantum_s: float) -> float:
        trained_s = max(trial.readings[-1].train_s, 1e-9)
        curves, batch_size = self._by_steps, 1.0
        if self._by_samples is not None and trial.batch_size != 1:
            curves, batch_size = self._by_samples, trial.batch_size
        ages = [reading.step * batch_size for reading in trial.readings]
        age, own = float(ages[-1]), self._scaled([reading.loss for reading in trial.readings])
        quantum = max(age, 1e-9) * quantum_s / trained_s
        difference = np.zeros(len(curves.reached))
        for share, weight in AGE_WEIGHTS.items():
            difference += weight * (curves.losses_at(share * age) - np.interp(share * age, ages, own)) ** 2
        farthest = np.partition(difference, self._neighbours)[self._neighbours]
        weights = np.exp(-KERNEL_SHARPNESS * difference / max(farthest, 1e-300))
        # A trial at the goal already continues for at least a quantum.
        left = np.where(curves.reached > age, curves.reached - age, quantum) / quantum
        order = np.argsort(left)
        left, weights = left[order], (weights / weights.sum())[order]
        left, weights = left[np.isfinite(left)], weights[np.isfinite(left)]
        retried = MIN_CHANCE * quantum_s / (trained_s + quantum_s)
        if not len(left):
            return retried
        chances = np.cumsum(weights)
        costs = np.cumsum(weights * left) + (1 - chances) * left + START_COST_QUANTA
        return float(np.max(chances / costs)) + retried
