"""Speed of a trial on each kind of slot: measured, or estimated (paper 'Hermes-v2', Eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from framework.policies.trials.interface import TrialView

SAME_SPEED_TOLERANCE = 0.1
"""Trials of one batch size whose speeds on a kind differ by at most this share count as equally fast."""
PRIOR_LOG_STD = 0.5
"""Prior standard deviation of the logarithm of an estimate."""


@dataclass(frozen=True)
class _Trial:
    """Batch size of a trial, its samples/s by kind of slot, and their logarithms."""

    batch_size: float
    speeds: Mapping[str, float]
    logs: Mapping[str, float]


class SpeedEstimates:
    """Tracks the measured speeds of all trials, ended ones included, and estimates missing ones.

    * Without any measurement of the trial: P_G(j) = T(j_t) B(j) / B(j_t), where j_t is the first trial measured on the
      kind G, T(j_t) its samples/s and B the batch size (Eq. 1).
    * Measured on other kinds: by the mean ratio of the two kinds over trials measured on both, preferably similar ones:
      of the same batch size and speed. (Eq. 1 would give the speed of another model.)
    * If no trial was measured on both, the ratio is that of Eq. 1. A kind without any measurement counts as the mean of
      the others.

    Args:
        explores: whether estimates are increased by their spread (optimism in the face of uncertainty), so that
            unmeasured kinds are tried.
        by_ratio: whether the second and third rule apply; otherwise Eq. 1 estimates everything unmeasured.
    """

    def __init__(self, *, explores: bool = True, by_ratio: bool = True) -> None:
        self._explores = explores
        self._ratios_count = by_ratio
        self._trials: dict[int, _Trial] = {}
        self._first: dict[str, tuple[float, float]] = {}
        self._estimates: dict[tuple[int, str], float] = {}
        """Estimates, valid until a new speed is measured."""
        self._relative: dict[tuple[int, tuple[str, ...]], dict[str, float]] = {}
        """Multiples of the mean over kinds, valid equally long."""
        self.measured = 0
        """Number of measured speeds."""

    def update(self, trials: Iterable[TrialView]) -> None:
        for trial in trials:
            known = self._trials.get(trial.id)
            if known is not None and (trial.speeds, trial.batch_size) == (known.speeds, known.batch_size):
                continue
            logs = {kind: math.log(speed) for kind, speed in trial.speeds.items() if 0 < speed < math.inf}
            self._estimates.clear()
            self._relative.clear()
            self.measured += len(logs) - (0 if known is None else len(known.logs))
            self._trials[trial.id] = _Trial(trial.batch_size, dict(trial.speeds), logs)
            for kind in logs:
                self._first.setdefault(kind, (trial.speeds[kind], trial.batch_size))

    def performance(self, trial: int, kinds: Sequence[str]) -> dict[str, float]:
        """Returns P_G of a trial for each kind G, in samples/s."""
        known = self._trials[trial]
        found: dict[str, float] = {}
        for kind in kinds:
            if kind in known.logs:
                found[kind] = math.exp(known.logs[kind])
            elif known.logs and self._ratios_count:
                if (trial, kind) not in self._estimates:
                    self._estimates[trial, kind] = self._by_ratio(known, kind)
                found[kind] = self._estimates[trial, kind]
            elif kind in self._first:
                speed, batch_size = self._first[kind]
                found[kind] = speed * known.batch_size / batch_size
        found = {kind: speed for kind, speed in found.items() if not math.isnan(speed)}
        average = fmean(found.values()) if found else 1.0
        return {kind: found.get(kind, average) for kind in kinds}

    def relative(self, trial: int, kinds: Sequence[str]) -> Mapping[str, float]:
        """Returns P_G of a trial for each kind G, as a multiple of its mean over the kinds."""
        key = trial, tuple(kinds)
        if key not in self._relative:
            performance = self.performance(trial, kinds)
            mean = fmean(performance.values())
            self._relative[key] = {kind: speed / mean for kind, speed in performance.items()}
        return self._relative[key]

    def _by_ratio(self, known: _Trial, kind: str) -> float:
        """Estimates a speed from those on other kinds; NaN if there are no data."""
        estimates = []
        for other, log in known.logs.items():
            ratio, spread = self._ratio(known, other, kind)
            if not math.isnan(ratio):
                estimates.append(log + ratio + (spread if self._explores else 0.0))
        return math.exp(fmean(estimates)) if estimates else math.nan

    def _ratio(self, known: _Trial, other: str, kind: str) -> tuple[float, float]:
        """Returns the logarithm of the speed on `kind` relative to `other`, and its standard deviation."""
        both = [trial for trial in self._trials.values() if other in trial.logs and kind in trial.logs]
        similar = [
            trial
            for trial in both
            if trial.batch_size == known.batch_size
            and abs(trial.logs[other] - known.logs[other]) <= SAME_SPEED_TOLERANCE
        ]
        if similar:
            return fmean(trial.logs[kind] - trial.logs[other] for trial in similar), 0.0
        ratios = [trial.logs[kind] - trial.logs[other] for trial in both]
        if ratios:
            mean = fmean(ratios)
            scatter = sum((ratio - mean) ** 2 for ratio in ratios)
            # The prior counts as one more observation, so that one or two trials do not determine the spread.
            return mean, math.sqrt((PRIOR_LOG_STD**2 + scatter) / (1 + len(ratios)))
        if kind not in self._first or other not in self._first:
            return math.nan, PRIOR_LOG_STD
        (fast, batch), (slow, other_batch) = self._first[kind], self._first[other]
        return math.log(fast / batch) - math.log(slow / other_batch), PRIOR_LOG_STD
