"""Asynchronous successive halving that suspends trials instead of ending them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from framework.policies.trials.interface import Choice, Decision, PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.new_readings import NewReadings

ETA = 4
"""The best 1 / ETA of a rung is promoted, and rungs are ETA times further apart (as in the paper's experiments)."""
REACHED_SHARE = 0.95
"""A rung, or an interval of `pbt`, is reached at this share of its time, as the last report of a slice comes shortly
before its end."""

_DIVERGED, _SUSPENDED, _NEW, _PROMOTABLE, _INTERRUPTED = range(5)
_REASONS = ("no other trial can run", "best of the suspended", "first slice", "promoted", "continues to its rung")


@dataclass
class _Progress:
    """Progress of a trial.

    Attributes:
        level: highest rung reached; -1 before the first.
        loss: its loss there; inf if it was not finite.
        target: rung it was last allowed to run to; None before.
        new: finds its new readings.
    """

    level: int = -1
    loss: float = math.inf
    target: int | None = None
    new: NewReadings = field(default_factory=NewReadings)


@dataclass
class _Rung:
    """Losses of all trials that reached a rung, ended ones included, ascending."""

    losses: list[tuple[float, int]] = field(default_factory=list)

    def promotes(self, loss: float, trial: int) -> bool:
        """Returns whether a trial is among the best 1 / `ETA` of the rung."""
        return math.isfinite(loss) and bisect_left(self.losses, (loss, trial)) < len(self.losses) // ETA


class AshaPolicy:
    """ASHA (Li et al., MLSys 2020, Algorithm 2) that suspends trials instead of ending them.

    Rung k is at `quantum_s` x 4^k seconds of training, where trials are compared by their loss. A slot goes, in this
    order, to: a trial preempted on the way to its rung; one among the best quarter of its rung, highest rung first; one
    that never ran; and, where ASHA would be done, the best suspended one: highest rung, then lowest loss. So all trials
    finish, the best first. Trials are not bound to slots.

    Diverged trials are compared immediately, never promoted, and rank last. A trial that reports nothing, or cannot be
    suspended, continues.
    """

    name = "asha"

    def __init__(self, settings: PolicySettings) -> None:
        self._quantum_s = settings.quantum_s
        self._rungs: list[_Rung] = []
        self._progress: dict[int, _Progress] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        self.follow(trials)
        by_id = {trial.id: trial for trial in trials}
        waiting = {trial.id: trial for trial in trials if trial.runnable}
        free = [slot for slot in slots if slot.trial is None and not slot.busy]
        running = [(slot, by_id[slot.trial]) for slot in slots if slot.trial in by_id and not slot.busy]
        runs: dict[int, Choice] = {}
        for slot in free:
            best = self._best(waiting.values(), slot)
            if best is not None:
                runs[slot.id] = self.start(waiting.pop(best.id))
        for slot, trial in running:
            if self._keep_running(trial):
                continue
            best = trial
            if trial.preemptible:
                best = self._best([trial, *waiting.values()], slot) or trial
            if best is not trial:
                del waiting[best.id]
            runs[slot.id] = self.start(best)
        waits_s = [
            self._wait_s(trial) for slot, trial in running if slot.id not in runs or runs[slot.id].trial == trial.id
        ]
        return Decision(runs, now_s + min(waits_s) if waits_s else None)

    def follow(self, trials: Sequence[TrialView]) -> None:
        """Records the rungs reached since the last call, and forgets ended trials."""
        known = self._progress
        self._progress = {trial.id: known.get(trial.id) or _Progress() for trial in trials}
        for trial in trials:
            progress = self._progress[trial.id]
            for place in progress.new.new_indices(trial.readings):
                reading = trial.readings[place]
                while reading.train_s >= REACHED_SHARE * self._time_s(progress.level + 1):
                    self._reached(trial.id, progress, reading)

    def _reached(self, trial_id: int, progress: _Progress, reading: Reading) -> None:
        progress.level += 1
        progress.loss = reading.loss if math.isfinite(reading.loss) else math.inf
        if progress.level == len(self._rungs):
            self._rungs.append(_Rung())
        insort(self._rungs[progress.level].losses, (progress.loss, trial_id))

    def _time_s(self, level: int) -> float:
        return self._quantum_s * float(ETA**level)

    def _keep_running(self, trial: TrialView) -> bool:
        """Sets a missing target, and returns whether a running trial has yet to reach its target rung."""
        progress = self._progress[trial.id]
        if progress.target is None:
            progress.target = progress.level + 1
        return progress.level < progress.target and not _is_diverged(trial)

    def _best(self, candidates: Iterable[TrialView], slot: SlotView) -> TrialView | None:
        allowed = (trial for trial in candidates if slot.id not in trial.refused)
        return max(allowed, key=self.rank, default=None)

    def rank(self, trial: TrialView) -> tuple[int, int, float, bool, int]:
        """Returns the sort key of a trial, greatest first; `follow` must have seen it."""
        progress = self._progress[trial.id]
        return self._priority(trial), progress.level, -progress.loss, not trial.runnable, -trial.id

    def _priority(self, trial: TrialView) -> int:
        progress = self._progress[trial.id]
        if _is_diverged(trial):
            return _DIVERGED
        if progress.target is not None and progress.level < progress.target:
            return _INTERRUPTED
        if progress.level < 0:
            return _NEW
        if self._rungs[progress.level].promotes(progress.loss, trial.id):
            return _PROMOTABLE
        return _SUSPENDED

    def start(self, trial: TrialView) -> Choice:
        """Sets a trial's target to its next rung, and returns why it runs."""
        progress = self._progress[trial.id]
        score = -progress.loss if math.isfinite(progress.loss) else None
        choice = Choice(trial.id, _REASONS[self._priority(trial)], score)
        if progress.target is None or progress.level >= progress.target:
            progress.target = progress.level + 1
        return choice

    def _wait_s(self, trial: TrialView) -> float:
        """Returns the seconds until a running trial may reach its rung, at most a quantum, as it may diverge before."""
        trained_s = trial.readings[-1].train_s if trial.readings else 0.0
        rest_s = self._time_s(self._progress[trial.id].level + 1) - trained_s
        return min(rest_s, self._quantum_s)


def _is_diverged(trial: TrialView) -> bool:
    return bool(trial.readings) and not math.isfinite(trial.readings[-1].loss)
