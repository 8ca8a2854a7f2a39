"""Base of policies that rank trials by a score: ties, missing scores, and protection from starvation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from framework.policies.trials.binding import Binding
from framework.policies.trials.bound import BoundPolicy
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView

MAX_PASSED_OVER_FACTOR = 10
"""A trial that was passed over this many times `trials_per_slot` gets a quantum regardless of its score."""


class Scorer(Protocol):
    @property
    def score(self) -> float | None:
        """What trials are compared by, greater is better; None if unknown. Never NaN."""
        ...

    @property
    def quantum_s(self) -> float: ...

    def update(self, trial: TrialView) -> None: ...


class ScoredPolicy(BoundPolicy):
    """Runs the trial with the greatest score.

    * Trials without a report come first: those that never ran, and a running one until its first report.
    * Ties go to the running trial, then to one that never ran, then to the earliest arrival.
    * Diverged trials (score -inf) run only if no other can.
    * Any other trial that was passed over 10 x `trials_per_slot` times gets one quantum regardless of its score.

    Args:
        scorer: factory for a trial's scorer.
        best: reason given for the best score.
        binding: binds trials to slots; by default as in the paper 'Hermes'.
    """

    def __init__(
        self,
        settings: PolicySettings,
        scorer: Callable[[PolicySettings], Scorer],
        best: str,
        binding: Binding | None = None,
    ) -> None:
        super().__init__(settings, binding)
        self._new_scorer = scorer
        self._best = best
        self._scorers: dict[int, Scorer] = {}
        self._limit = MAX_PASSED_OVER_FACTOR * settings.trials_per_slot

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        known = self._scorers
        self._scorers = {trial.id: known.get(trial.id) or self._new_scorer(self.settings) for trial in trials}
        for trial in trials:
            self._scorers[trial.id].update(trial)
        return super().decide(now_s, trials, slots)

    def quantum_s(self, trial: TrialView) -> float:
        return self._scorers[trial.id].quantum_s

    def rank(self, trial: TrialView) -> tuple[int, float, bool, bool, int]:
        score = self._scorers[trial.id].score
        return (
            self._overdue(trial),
            math.inf if score is None else score,
            not trial.runnable,
            not trial.slices,
            -trial.id,
        )

    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice:
        score = self._scorers[trial.id].score
        if score is None:
            reason = "no report yet" if trial.slices else "first slice"
        elif self._overdue(trial):
            reason = "passed over too often"
        else:
            reason = self._best if len(candidates) > 1 else "no other trial waits"
        return Choice(trial.id, reason, score if score is not None and math.isfinite(score) else None)

    def _overdue(self, trial: TrialView) -> int:
        """Returns how often a trial was passed over if that exceeds the limit, else 0."""
        passed_over = self.passed_over.get(trial.id, 0)
        if passed_over < self._limit or (trial.readings and not math.isfinite(trial.readings[-1].loss)):
            return 0
        return passed_over
