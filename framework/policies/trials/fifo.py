"""First come, first served."""

from __future__ import annotations

import math
from collections.abc import Sequence

from framework.policies.trials.bound import BoundPolicy
from framework.policies.trials.interface import Choice, TrialView


class FifoPolicy(BoundPolicy):
    """Runs the trials of each slot to their ends, in order of arrival; a preempted trial keeps its position."""

    name = "fifo"

    def rank(self, trial: TrialView) -> int:
        return -trial.id

    def quantum_s(self, trial: TrialView) -> float:
        return math.inf

    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice:
        return Choice(trial.id, "first come, first served")
