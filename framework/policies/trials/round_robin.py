"""Round robin."""

from __future__ import annotations

from collections.abc import Sequence

from framework.policies.trials.bound import BoundPolicy
from framework.policies.trials.interface import Choice, TrialView


class RoundRobinPolicy(BoundPolicy):
    """Time slicing as in 'Gandiva' (OSDI 2018): the trials of a slot run in rotation, for one quantum each.

    Next is the trial that was passed over most often since its last slice; ties go to trials that never ran, then to
    the earliest arrival. A trial that is alone continues.
    """

    name = "rr"

    def rank(self, trial: TrialView) -> tuple[bool, int, bool, int]:
        return trial.runnable, self.passed_over.get(trial.id, 0), not trial.slices, -trial.id

    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice:
        return Choice(trial.id, "in rotation" if trial.slices else "first slice")
