"""Asynchronous successive halving that pauses instead of killing."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from framework.policies.trials.interface import Choice, Decision, PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.new_readings import NewReadings

ETA = 4
"""Of so many trials in a rung the best is promoted; rungs are so many times further apart (the paper's experiments)."""
REACHED = 0.95
"""A rung is reached at this share of its time, as the last report comes a moment before a slice's end."""

_HOPELESS, _PAUSED, _NEW, _PROMOTABLE, _INTERRUPTED = range(5)
_REASONS = ("nothing else can run", "best of the paused", "first slice", "promoted", "goes on to its rung")


@dataclass
class _Progress:
    """How far a trial has come.

    Attributes:
        level: the highest rung it has reached; -1 before the first.
        loss: its loss there; inf if that was no finite number.
        aim: the rung to which it was last let run; None before.
        new: tells which of its readings have not been looked at.
    """

    level: int = -1
    loss: float = math.inf
    aim: int | None = None
    new: NewReadings = field(default_factory=NewReadings)


@dataclass
class _Rung:
    """The losses of all trials that have reached a rung, ended ones included, ascending."""

    losses: list[tuple[float, int]] = field(default_factory=list)

    def promotes(self, loss: float, trial: int) -> bool:
        """Whether a trial is among the best 1 / `ETA` of the rung."""
        return math.isfinite(loss) and bisect_left(self.losses, (loss, trial)) < len(self.losses) // ETA


class AshaPolicy:
    """ASHA (Li et al., 'A System for Massively Parallel Hyperparameter Tuning', MLSys 2020, Algorithm 2), with pauses.

    Rung k is at `quantum_s` x 4^k seconds of training. A trial that has reached its rung is compared there by the loss
    it then reported, and a slot is given to, in this order: a trial that lost its slot on the way to its rung; one that
    is among the best quarter of its rung, the highest rung first; a trial that never ran; and, where ASHA would be
    done, the best paused one: of the highest rung, of the least loss. So all trials finish, the best first. The running
    trial goes on if it is that one. Trials are not bound to slots.

    NaN and infinite losses are never promoted; a trial that reports one is compared at once and comes last. One that
    reports nothing reaches no rung and runs on. One that cannot be suspended goes on to its next rung.
    """

    name = "asha"

    def __init__(self, settings: PolicySettings) -> None:
        self._quantum_s = settings.quantum_s
        self._rungs: list[_Rung] = []
        self._progress: dict[int, _Progress] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
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
            if self._is_on_its_way(trial):
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
        """Notes which rungs the trials have reached since the last call; forgets those that are gone."""
        known = self._progress
        self._progress = {trial.id: known.get(trial.id) or _Progress() for trial in trials}
        for trial in trials:
            progress = self._progress[trial.id]
            for place in progress.new.places(trial.readings):
                reading = trial.readings[place]
                while reading.train_s >= REACHED * self._time_s(progress.level + 1):
                    self._reached(trial.id, progress, reading)

    def _reached(self, trial_id: int, progress: _Progress, reading: Reading) -> None:
        progress.level += 1
        progress.loss = reading.loss if math.isfinite(reading.loss) else math.inf
        if progress.level == len(self._rungs):
            self._rungs.append(_Rung())
        insort(self._rungs[progress.level].losses, (progress.loss, trial_id))

    def _time_s(self, level: int) -> float:
        """Seconds of training at which a rung is."""
        return self._quantum_s * float(ETA**level)

    def _is_on_its_way(self, trial: TrialView) -> bool:
        """Whether a running trial has yet to reach the rung it runs to."""
        progress = self._progress[trial.id]
        if progress.aim is None:
            progress.aim = progress.level + 1
        return progress.level < progress.aim and not _is_lost(trial)

    def _best(self, candidates: Iterable[TrialView], slot: SlotView) -> TrialView | None:
        allowed = (trial for trial in candidates if slot.id not in trial.refused)
        return max(allowed, key=self.rank, default=None)

    def rank(self, trial: TrialView) -> tuple[int, int, float, bool, int]:
        """What trials are compared by, the greatest first; all are to have been followed."""
        progress = self._progress[trial.id]
        return self._standing(trial), progress.level, -progress.loss, not trial.runnable, -trial.id

    def _standing(self, trial: TrialView) -> int:
        progress = self._progress[trial.id]
        if _is_lost(trial):
            return _HOPELESS
        if progress.aim is not None and progress.level < progress.aim:
            return _INTERRUPTED
        if progress.level < 0:
            return _NEW
        if self._rungs[progress.level].promotes(progress.loss, trial.id):
            return _PROMOTABLE
        return _PAUSED

    def start(self, trial: TrialView) -> Choice:
        """Lets a trial run to its next rung; why."""
        progress = self._progress[trial.id]
        score = -progress.loss if math.isfinite(progress.loss) else None
        choice = Choice(trial.id, _REASONS[self._standing(trial)], score)
        if progress.aim is None or progress.level >= progress.aim:
            progress.aim = progress.level + 1
        return choice

    def _wait_s(self, trial: TrialView) -> float:
        """Seconds until a running trial may have reached its rung, a quantum at most: its loss may become NaN."""
        trained_s = trial.readings[-1].train_s if trial.readings else 0.0
        rest_s = self._time_s(self._progress[trial.id].level + 1) - trained_s
        return min(rest_s, self._quantum_s)


def _is_lost(trial: TrialView) -> bool:
    """Whether a trial's newest loss is NaN or infinite."""
    return bool(trial.readings) and not math.isfinite(trial.readings[-1].loss)
