"""Ended trials of other searches: what became of those that were most like a trial so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from framework.policies.trials.interface import TrialView

Floats = NDArray[np.float64]

GOOD = 0.25
"""The goal is the loss that this share of the earlier trials came to."""
ALIKE = 0.25
"""The weights are such that about this share of them counts for a trial, those with the most similar losses."""
FEWEST = 8
"""Fewer say nothing."""
LOOKED_AT = {1.0: 4.0, 0.9: 1.0, 0.75: 1.0, 0.5: 1.0, 0.25: 0.5, 0.1: 0.25}
"""Share of what a trial has trained -> weight of the difference there."""
SHARPNESS = 2.0
"""One as far away as the farthest that counts has the weight exp(-2)."""
RETRIED = 1e-3
"""Chance of a trial whose like never came to the goal, in its first quantum."""
START = 0.1
"""Quanta that it costs to put a trial into a slot."""
AGES = 120
YOUNGEST = 1e-4
"""Losses are kept at so many ages, from this share of the longest trial on."""
FARTHEST = 10.0
"""Losses are cut off so many times as far above the usual first one, and below the lowest, as these are apart."""


@dataclass(frozen=True)
class EarlierTrial:
    """A trial that has been trained to its end.

    Attributes:
        steps: that it had made when it reported a loss, ascending, the last above 0.
        losses: what it reported, the less the better.
        batch_size: samples of a step; 1 where that is not known.
    """

    steps: Sequence[float]
    losses: Sequence[float]
    batch_size: float = 1.0


class _Curves:
    """Losses of trials by age, all at the same ages.

    Attributes:
        reached: the age at which each came to the goal; infinite if it never did.
    """

    def __init__(self, ages: Sequence[Sequence[float] | Floats], losses: Sequence[Floats], goal: float) -> None:
        longest = max(float(each[-1]) for each in ages)
        self._ages = np.concatenate([[0.0], longest * np.geomspace(YOUNGEST, 1.0, AGES)])
        self._losses = np.array([np.interp(self._ages, *each) for each in zip(ages, losses, strict=True)])
        there = [np.flatnonzero(each <= goal) for each in losses]
        self.reached = np.array([of[at[0]] if len(at) else math.inf for of, at in zip(ages, there, strict=True)])

    def losses_at(self, age: float) -> Floats:
        """Of all trials; the last one beyond the end."""
        place = min(max(int(np.searchsorted(self._ages, age)), 1), AGES)
        before, after = self._ages[place - 1 : place + 1]
        share = min((age - before) / (after - before), 1.0)
        return (1 - share) * self._losses[:, place - 1] + share * self._losses[:, place]


class EarlierTrials:
    """What the trials of another search say of those of this one.

    What may become of a trial is what became of those whose losses were most like its own, about a quarter of them. Of
    all stretches of time the one with the greatest ratio of chance and time counts, as in an index of Gittins ('Bandit
    Processes and Dynamic Allocation Indices', J. R. Stat. Soc. B 41, 1979). They are compared by the samples they have
    trained on, as the one search may have run on other machines than the other; by steps where batch sizes are unknown.

    Args:
        trials: at least two.
        goal: the loss to come to; None for the one that a quarter of them came to.
        alike: how many of them count for a trial; None for a quarter.
    """

    def __init__(self, trials: Sequence[EarlierTrial], goal: float | None = None, alike: int | None = None) -> None:
        firsts = [next(filter(math.isfinite, trial.losses), math.nan) for trial in trials]
        sound = [loss for trial in trials for loss in trial.losses if math.isfinite(loss)]
        first, lowest = float(np.nanmedian(firsts)) if sound else 0.0, min(sound, default=0.0)
        self._lowest, self._way = lowest, min(max(first - lowest, 1e-9), 1e300)
        losses = [self._scaled(trial.losses) for trial in trials]
        lows = np.sort([each.min() for each in losses])
        aim = float(lows[math.ceil(GOOD * len(trials)) - 1] if goal is None else self._scaled([goal])[0])
        self._alike = min(len(trials) - 1, alike or max(3, round(ALIKE * len(trials))))
        self._by_steps = _Curves([trial.steps for trial in trials], losses, aim)
        self._by_samples: _Curves | None = None
        if all(trial.batch_size != 1 for trial in trials):
            samples = [np.array(trial.steps) * trial.batch_size for trial in trials]
            self._by_samples = _Curves(samples, losses, aim)
        self._known: dict[int, tuple[float, float]] = {}
        """Trial -> the step at which it was looked at, and what was found."""

    def chance(self, trial: TrialView, quantum_s: float, had_s: float = 0.0) -> float:
        """The chance to come to the goal, by the quantum; above 0.

        Args:
            trial: which.
            quantum_s: seconds of a quantum.
            had_s: for how long it has run, for one that has reported nothing.
        """
        if not trial.readings:
            # It may be any of them.
            return GOOD * quantum_s / (had_s + quantum_s)
        step = trial.readings[-1].step
        if self._known.get(trial.id, (-1.0, 0.0))[0] != step:
            self._known[trial.id] = step, self._index(trial, quantum_s)
        return self._known[trial.id][1]

    def _scaled(self, losses: Sequence[float]) -> Floats:
        """0 at the lowest loss of all and 1 at the usual first one, so that none overflows."""
        scaled = np.array([(loss - self._lowest) / self._way if math.isfinite(loss) else math.inf for loss in losses])
        return np.clip(scaled, -FARTHEST, 1 + FARTHEST)

    def _index(self, trial: TrialView, quantum_s: float) -> float:
        trained_s = max(trial.readings[-1].train_s, 1e-9)
        curves, batch_size = self._by_steps, 1.0
        if self._by_samples is not None and trial.batch_size != 1:
            curves, batch_size = self._by_samples, trial.batch_size
        ages = [reading.step * batch_size for reading in trial.readings]
        age, own = float(ages[-1]), self._scaled([reading.loss for reading in trial.readings])
        quantum = max(age, 1e-9) * quantum_s / trained_s
        difference = np.zeros(len(curves.reached))
        for share, weight in LOOKED_AT.items():
            difference += weight * (curves.losses_at(share * age) - np.interp(share * age, ages, own)) ** 2
        farthest = np.partition(difference, self._alike)[self._alike]
        weights = np.exp(-SHARPNESS * difference / max(farthest, 1e-300))
        # Who is there already goes on for a quantum at least.
        left = np.where(curves.reached > age, curves.reached - age, quantum) / quantum
        order = np.argsort(left)
        left, weights = left[order], (weights / weights.sum())[order]
        left, weights = left[np.isfinite(left)], weights[np.isfinite(left)]
        retried = RETRIED * quantum_s / (trained_s + quantum_s)
        if not len(left):
            return retried
        chances = np.cumsum(weights)
        costs = np.cumsum(weights * left) + (1 - chances) * left + START
        return float(np.max(chances / costs)) + retried
