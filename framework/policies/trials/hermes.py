"""The fastest converging first (paper 'Hermes', Algorithms 1 to 3)."""

from __future__ import annotations

from framework.policies.trials.interface import PolicySettings
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.scored import ScoredPolicy


class HermesPolicy(ScoredPolicy):
    """Trials are bound to slots (`Binding`); in each slot the one that converges fastest runs, quantum by quantum.

    A trial's score is the convergence of its last quantum (`LossHistory.score`); its quantum grows at the milestones of
    its loss and with each preemption (`LossHistory.quantum_s`; section 4.1.2). Decided here, as the paper leaves it
    open or its figures are not known here:
        * The quantum doubles when a trial has lost 50% of its first loss, and again at 75% (`MILESTONES`); a quarter
          is added with each preemption (`QUANTUM_GROWTH`).
        * The running trial is a candidate, and goes on at equal convergence. One that cannot be suspended goes on.
        * NaN and infinite losses, ties, trials without a report, starvation: see `ScoredPolicy`.
        * Negative convergence counts as it is: a trial whose loss rises comes after one whose loss stands still.
        * A slice without any reading leaves a trial's convergence as it was.
        * If a trial ends within its quantum, its slot is given on at once.
    """

    name = "hermes"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, LossHistory, "fastest convergence")
