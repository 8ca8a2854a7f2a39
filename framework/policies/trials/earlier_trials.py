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
"""This share of them counts for a trial, those with the most similar losses."""
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
HIGHEST = 10.0
"""Losses are cut off so many times as far above the usual first one as the lowest is below it."""


@dataclass(frozen=True)
class EarlierTrial:
    """A trial that has been trained to its end.

    Attributes:
        samples: that it had trained on when it reported a loss, ascending; its steps where nothing is known of batches.
        losses: what it reported, the less the better.
    """

    samples: Sequence[float]
    losses: Sequence[float]


class EarlierTrials:
    """What the trials of another search say of those of this one.

    What may become of a trial is what became of the quarter of them whose losses were most like its own. Of all
    stretches of time the one with the greatest ratio of chance and time counts, as in an index of Gittins ('Bandit
    Processes and Dynamic Allocation Indices', J. R. Stat. Soc. B 41, 1979). They are compared by the samples they have
    trained on, as the one search may have run on other machines than the other.

    Args:
        trials: at least two.
        goal: the loss to come to; None for the one that a quarter of them came to.
        alike: how many of them count for a trial; None for a quarter.
    """

    def __init__(self, trials: Sequence[EarlierTrial], goal: float | None = None, alike: int | None = None) -> None:
        longest = max(trial.samples[-1] for trial in trials)
        self._ages = np.concatenate([[0.0], longest * np.geomspace(YOUNGEST, 1.0, AGES)])
        firsts = [trial.losses[0] for trial in trials if math.isfinite(trial.losses[0])]
        sound = [loss for trial in trials for loss in trial.losses if math.isfinite(loss)]
        first, lowest = float(np.median(firsts or [0.0])), min(sound, default=0.0)
        self._highest = first + HIGHEST * max(first - lowest, 1e-9)
        self._losses = np.array([np.interp(self._ages, trial.samples, self._cut(trial.losses)) for trial in trials])
        lows = np.minimum.accumulate(self._losses, axis=1)
        self.goal = float(np.sort(lows[:, -1])[math.ceil(GOOD * len(trials)) - 1]) if goal is None else goal
        is_there = lows <= self.goal
        self._reached = np.where(is_there.any(axis=1), self._ages[is_there.argmax(axis=1)], math.inf)
        self._alike = min(len(trials) - 1, alike or max(3, round(ALIKE * len(trials))))
        self._known: dict[int, tuple[float, float]] = {}
        """Trial -> samples it had trained on when it was looked at, and what was found."""

    def chance(self, trial: TrialView, quantum_s: float) -> float:
        """The chance to come to the goal, by the quantum; above 0.

        Args:
            trial: with at least one reading.
            quantum_s: seconds of a quantum.
        """
        samples = trial.readings[-1].step * trial.batch_size
        if self._known.get(trial.id, (-1.0, 0.0))[0] != samples:
            self._known[trial.id] = samples, self._index(trial, quantum_s)
        return self._known[trial.id][1]

    def _cut(self, losses: Sequence[float]) -> Floats:
        cut = np.array(losses, dtype=np.float64)
        return np.where(np.isfinite(cut), np.minimum(cut, self._highest), self._highest)

    def _losses_at(self, age: float) -> Floats:
        """Of all trials; the last one beyond the end."""
        place = min(max(int(np.searchsorted(self._ages, age)), 1), AGES)
        before, after = self._ages[place - 1 : place + 1]
        share = min((age - before) / (after - before), 1.0)
        return (1 - share) * self._losses[:, place - 1] + share * self._losses[:, place]

    def _index(self, trial: TrialView, quantum_s: float) -> float:
        trained_s = max(trial.readings[-1].train_s, 1e-9)
        ages = [reading.step * trial.batch_size for reading in trial.readings]
        age, own = float(ages[-1]), self._cut([reading.loss for reading in trial.readings])
        quantum = max(age, 1e-9) * quantum_s / trained_s
        difference = np.zeros(len(self._losses))
        for share, weight in LOOKED_AT.items():
            difference += weight * (self._losses_at(share * age) - np.interp(share * age, ages, own)) ** 2
        farthest = np.partition(difference, self._alike)[self._alike]
        weights = np.exp(-SHARPNESS * difference / max(farthest, 1e-300))
        # Who is there already goes on for a quantum at least.
        left = np.where(self._reached > age, self._reached - age, quantum) / quantum
        order = np.argsort(left)
        left, weights = left[order], (weights / weights.sum())[order]
        left, weights = left[np.isfinite(left)], weights[np.isfinite(left)]
        retried = RETRIED * quantum_s / (trained_s + quantum_s)
        if not len(left):
            return retried
        chances = np.cumsum(weights)
        costs = np.cumsum(weights * left) + (1 - chances) * left + START
        return float(np.max(chances / costs)) + retried
