"""The fastest converging trial first (paper 'Hermes', Algorithms 1 to 3)."""

from __future__ import annotations

from framework.policies.trials.interface import PolicySettings
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.scored import ScoredPolicy


class HermesPolicy(ScoredPolicy):
    """Binds trials to slots (`Binding`); in each slot the fastest converging one runs, quantum by quantum.

    The score is the convergence of the last quantum; quanta grow at milestones of the loss and with each preemption
    (`LossHistory`; section 4.1.2). Not specified by the paper, or its figures are not known here:
        * The quantum doubles when a trial has lost 50% of its first loss, and again at 75% (`MILESTONES`); each
          preemption adds a quarter (`QUANTUM_GROWTH`).
        * The running trial is a candidate, and continues at equal convergence, or if it cannot be suspended.
        * Negative convergence ranks below zero. A slice without any reading leaves convergence unchanged.
        * If a trial ends within its quantum, its slot is reassigned immediately.
        * Diverged trials, ties, trials without a report, starvation: see `ScoredPolicy`.
    """

    name = "hermes"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings, LossHistory, "fastest convergence")
