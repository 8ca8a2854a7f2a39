"""The fastest converging trial first (paper 'Hermes', Algorithms 1 to 3)."""

from __future__ import annotations

from framework.policies.trials.interface import PolicySettings
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.scored import ScoredPolicy


class HermesPolicy(ScoredPolicy):
    """Binds trials to slots (`Binding`); in each slot the fastest converging one runs, quantum by quantum.

    A trial's score is the convergence of its last quantum (`LossHistory.score`); its quantum grows at the milestones of
    its loss and with each preemption (`LossHistory.quantum_s`; section 4.1.2). Not specified by the paper, or its
    figures are not known here:
        * The quantum doubles when a trial has lost 50% of its first loss, and again at 75% (`MILESTONES`); each
          preemption adds a quarter (`QUANTUM_GROWTH`).
        * The running trial is a candidate, and continues at equal convergence. One that cannot be suspended continues.
        * NaN and infinite losses, ties, trials without a report, starvation: see `ScoredPolicy`.
        * Negative convergence is allowed: a trial whose loss rises ranks after one whose loss is constant.
        * A slice without any reading leaves a trial's convergence unchanged.
        * If a trial ends within its quantum, its slot is reassigned immediately.
    """

    name = "hermes"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, LossHistory, "fastest convergence")
