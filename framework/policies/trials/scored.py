"""What the policies that compare trials by a figure share: who comes first, ties, and that nobody starves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from framework.policies.trials.binding import Binding
from framework.policies.trials.bound import BoundPolicy
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView

PATIENCE = 10
"""A trial passed over this many times `trials_per_slot` times gets a quantum."""


class Scorer(Protocol):
    """Follows the readings of one trial."""

    @property
    def score(self) -> float | None:
        """What it is compared by, greater is better; None if nothing is known. Never NaN."""
        ...

    @property
    def quantum_s(self) -> float:
        """How long its next quantum is to last."""
        ...

    def update(self, trial: TrialView) -> None:
        """Takes in what is new."""
        ...


class ScoredPolicy(BoundPolicy):
    """Runs the trial with the greatest score.

    * A trial that has reported nothing yet has no score and comes before all that have one: trials that never ran, and
      a running one until its first report, which is not interrupted for another that is unknown.
    * Of equal trials the running one goes on; then one that never ran comes first, then the one that arrived first.
    * A score of -inf (NaN or infinite losses) comes last: such a trial runs if nothing else can.
    * Nobody starves: a trial that has been passed over 10 x `trials_per_slot` times gets one quantum, at any score.
      With G trials at a slot, at most G - 1 of 10 G quanta go this way: less than a tenth is what justice may cost
      here. A trial whose newest loss is NaN or infinite has no claim to it.

    Args:
        settings: what the search tells its policy.
        scorer: makes what follows a trial.
        best: what the best score is called.
        binding: which trial belongs to which slot; without it as in the paper 'Hermes'.
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
        self._limit = PATIENCE * settings.trials_per_slot

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
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
            reason = "waited long"
        else:
            reason = self._best if len(candidates) > 1 else "no other waits"
        return Choice(trial.id, reason, score if score is not None and math.isfinite(score) else None)

    def _overdue(self, trial: TrialView) -> int:
        """How often a trial has been passed over, once that is too often; 0 before."""
        passed_over = self.passed_over.get(trial.id, 0)
        if passed_over < self._limit or (trial.readings and not math.isfinite(trial.readings[-1].loss)):
            return 0
        return passed_over
