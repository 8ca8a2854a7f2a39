"""Population based training (Jaderberg et al., 2017): poor trials continue as copies of good ones."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from framework.policies.trials.asha import REACHED_SHARE
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView

QUANTILE = 0.25
"""Share of the trials that are copied, and share of those that become copies; Ray Tune's default."""


@dataclass
class _Member:
    """A trial of the population.

    Attributes:
        intervals: number of intervals that it has trained for.
        judged: how many of them had passed when it was last compared with the others; None for a trial that continues
            elsewhere, as a copy or in a resumed search, until its readings say where.
        loss: its loss at the end of the last one; inf if not finite, None before.
    """

    intervals: int = 0
    judged: int | None = 0
    loss: float | None = None


class PbtPolicy:
    """Population based training, as `PopulationBasedTraining` of Ray Tune.

    All trials train equally long: a slot goes to the one that has trained for the fewest intervals of `quantum_s`. At
    the end of an interval a trial is suspended, which saves it, and compared with all others by their losses at the end
    of their last intervals. One of the worst quarter continues as a copy of one of the best quarter, chosen at random.
    The parameters of the copy are varied by the search. Trials are not bound to slots.

    A trial that reports nothing, or cannot be suspended, continues.
    """

    name = "pbt"

    def __init__(self, settings: PolicySettings) -> None:
        self._interval_s = settings.quantum_s
        self._seed = settings.seed
        self._members: dict[int, _Member] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        by_id = {trial.id: trial for trial in trials}
        known = self._members
        self._members = {trial.id: self._followed(trial, known.get(trial.id)) for trial in trials}
        waiting = sorted((trial for trial in trials if trial.runnable), key=self._order)
        runs: dict[int, Choice] = {}
        suspends: set[int] = set()
        waits_s: list[float] = []
        for slot in slots:
            running = by_id.get(slot.trial) if slot.trial is not None else None
            if slot.busy or (slot.trial is not None and running is None):
                continue
            if running is not None:
                # Without a successor yet: that one may become a copy of this trial, which must be saved before.
                if running.preemptible and self._is_due(running):
                    suspends.add(slot.id)
                else:
                    waits_s.append(self._wait_s(running))
                continue
            best = next((trial for trial in waiting if slot.id not in trial.refused), None)
            if best is not None:
                waiting.remove(best)
                runs[slot.id] = self._start(best, by_id)
        return Decision(runs, now_s + min(waits_s) if waits_s else None, frozenset(suspends))

    def _followed(self, trial: TrialView, known: _Member | None) -> _Member:
        """Applies a trial's newest reading. A copy keeps its rank until the end of its next interval."""
        member = known or _Member(judged=None if trial.readings else 0)
        if trial.readings:
            last = trial.readings[-1]
            intervals = int(last.train_s / self._interval_s + 1 - REACHED_SHARE)
            loss = last.loss if math.isfinite(last.loss) else math.inf
            if member.judged is None:
                member.intervals = member.judged = intervals
                member.loss = loss if member.loss is None and intervals else member.loss
            elif intervals > member.judged:
                member.intervals, member.loss = intervals, loss
        return member

    def _order(self, trial: TrialView) -> tuple[int, float, int]:
        return self._members[trial.id].intervals, _trained_s(trial), trial.id

    def _is_due(self, trial: TrialView) -> bool:
        member = self._members[trial.id]
        return member.judged is not None and member.intervals > member.judged

    def _wait_s(self, trial: TrialView) -> float:
        """Returns the seconds until a running trial may reach the end of its interval."""
        if self._is_due(trial):
            return self._interval_s  # it cannot be suspended
        rest_s = ((self._members[trial.id].judged or 0) + 1) * self._interval_s - _trained_s(trial)
        return min(max(rest_s, (1 - REACHED_SHARE) * self._interval_s), self._interval_s)

    def _start(self, trial: TrialView, trials: Mapping[int, TrialView]) -> Choice:
        """Compares a trial that has completed an interval; returns what it continues as."""
        member = self._members[trial.id]
        score = None if member.loss is None or member.loss == math.inf else -member.loss
        if not self._is_due(trial):
            return Choice(trial.id, "trained least" if trial.slices else "first slice", score)
        member.judged = member.intervals
        source = self._source(trial, trials)
        if source is None:
            return Choice(trial.id, "its interval begins", score)
        # It keeps its rank for now: otherwise more than a quarter would become copies.
        member.judged = None
        return Choice(trial.id, f"copies trial {source}", score, copies=source)

    def _source(self, trial: TrialView, trials: Mapping[int, TrialView]) -> int | None:
        """Returns the trial that this one is to copy; None to continue."""
        losses = {number: one.loss for number, one in self._members.items() if one.loss is not None}
        ranking = sorted(losses, key=lambda number: (losses[number], number))
        size = min(math.ceil(QUANTILE * len(ranking)), len(ranking) // 2)
        if trial.id not in ranking[len(ranking) - size :]:
            return None
        good = [number for number in ranking[:size] if losses[number] < math.inf and self._is_saved(trials[number])]
        draws = random.Random(f"{self._seed} {trial.id} {self._members[trial.id].judged}")  # noqa: S311
        return draws.choice(good) if good else None

    def _is_saved(self, trial: TrialView) -> bool:
        """Whether a trial's checkpoint is not older than the loss that it is compared by."""
        return trial.has_checkpoint and (trial.runnable or not self._is_due(trial))


def _trained_s(trial: TrialView) -> float:
    return trial.readings[-1].train_s if trial.readings else 0.0
