"""Each in turn."""

from __future__ import annotations

from collections.abc import Sequence

from framework.policies.trials.bound import BoundPolicy
from framework.policies.trials.interface import Choice, TrialView


class RoundRobinPolicy(BoundPolicy):
    """Time slicing as in 'Gandiva' (OSDI 2018): each trial of a slot in turn, for a quantum.

    The turn is with the trial that has been passed over most often since its last one; of equal ones with one that
    never ran, then with the one that arrived first. The running one goes on if it is alone.
    """

    name = "rr"

    def rank(self, trial: TrialView) -> tuple[bool, int, bool, int]:
        return trial.runnable, self.passed_over.get(trial.id, 0), not trial.slices, -trial.id

    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice:
        return Choice(trial.id, "in turn" if trial.slices else "first slice")
