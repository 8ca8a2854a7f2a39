"""The limit: a policy that knows the curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.simulation.bins import Bin
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView


class OraclePolicy:
    """Shortest time to the target first; trials that are there, or never will be, last. No trial is bound to a slot.

    Where all trials arrive together, no order reaches the target sooner in the mean: on slots that are alike the
    shortest job first is optimal, and nothing is preempted before it has reached the target. It knows what no policy
    can know, and only tells the limit.

    Args:
        trials: the bin that it will be asked about.
        settings: what the search tells its policy.
    """

    name = "oracle"

    def __init__(self, trials: Bin, settings: PolicySettings) -> None:
        self._target_s = trials.target_s
        self._switch_s = settings.switch_s
        self._reaches_s: dict[tuple[int, float], float] = {}
        """Trial and beginning of its slice -> when it reaches the target."""
        self._there: set[int] = set()

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
        by_id = {trial.id: trial for trial in trials}
        free = [slot for slot in slots if not slot.busy]
        reaches_s = {trial.id: now_s + self._switch_s + self._left_s(trial) for trial in trials if trial.runnable}
        running: set[int] = set()
        for slot in free:
            if slot.trial is not None:
                running.add(slot.trial)
                reaches_s[slot.trial] = self._running_reaches_s(now_s, slot, by_id[slot.trial])
        # To the trials that will not reach the target, nothing is worth a preemption: those that run come first.
        chosen = sorted(reaches_s, key=lambda trial: (reaches_s[trial], trial not in running, trial))[: len(free)]
        coming = (trial for trial in chosen if trial not in running)
        runs = {
            slot.id: Choice(trial, "shortest time to the target", now_s - reaches_s[trial])
            for slot, trial in zip((slot for slot in free if slot.trial not in chosen), coming, strict=False)
        }
        wakes_s = [reaches_s[trial] for trial in chosen if trial in running and math.isfinite(reaches_s[trial])]
        return Decision(runs, min(wakes_s, default=None))

    def _left_s(self, trial: TrialView) -> float:
        """Seconds of training that a trial is away from the target; infinite if it is there."""
        if trial.id in self._there:
            return math.inf
        return self._target_s[trial.id] - (trial.readings[-1].train_s if trial.readings else 0.0)

    def _running_reaches_s(self, now_s: float, slot: SlotView, trial: TrialView) -> float:
        """When a running trial reaches the target; reckoned when its slice begins to train, when its readings tell."""
        key = (trial.id, slot.since_s)
        if key not in self._reaches_s:
            self._reaches_s[key] = now_s + self._left_s(trial)
        if now_s >= self._reaches_s[key]:
            self._there.add(trial.id)
        return math.inf if trial.id in self._there else self._reaches_s[key]
