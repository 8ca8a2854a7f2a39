"""The limit on equal GPUs: a policy that knows the curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.simulation.bins import Bin
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView


class OraclePolicy:
    """Shortest time to the target first; trials that have reached it, or never will, last. Binds no trial to a slot.

    If all trials arrive together, this minimises the mean time to the target: on equal slots shortest job first is
        optimal,
    and no trial is preempted before it has reached the target. It serves as a bound only.
    """

    name = "oracle"

    def __init__(self, trials: Bin, settings: PolicySettings) -> None:
        self._target_s = trials.target_s
        self._switch_s = settings.switch_s
        self._reaches_s: dict[tuple[int, float], float] = {}
        """Trial and beginning of its slice -> when it reaches the target."""
        self._reached: set[int] = set()

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        by_id = {trial.id: trial for trial in trials}
        free = [slot for slot in slots if not slot.busy]
        reaches_s = {trial.id: now_s + self._switch_s + self._left_s(trial) for trial in trials if trial.runnable}
        running: set[int] = set()
        for slot in free:
            if slot.trial is not None:
                running.add(slot.trial)
                reaches_s[slot.trial] = self._running_reaches_s(now_s, slot, by_id[slot.trial])
        # Ties (trials that never reach the target) keep running trials: no preemption is worth it.
        chosen = sorted(reaches_s, key=lambda trial: (reaches_s[trial], trial not in running, trial))[: len(free)]
        coming = (trial for trial in chosen if trial not in running)
        runs = {
            slot.id: Choice(trial, "shortest time to the target", now_s - reaches_s[trial])
            for slot, trial in zip((slot for slot in free if slot.trial not in chosen), coming, strict=False)
        }
        wakes_s = [reaches_s[trial] for trial in chosen if trial in running and math.isfinite(reaches_s[trial])]
        return Decision(runs, min(wakes_s, default=None))

    def _left_s(self, trial: TrialView) -> float:
        """Remaining seconds of training until the target; infinity once it is reached."""
        if trial.id in self._reached:
            return math.inf
        return self._target_s[trial.id] - (trial.readings[-1].train_s if trial.readings else 0.0)

    def _running_reaches_s(self, now_s: float, slot: SlotView, trial: TrialView) -> float:
        """When a running trial reaches the target; computed at the start of its slice, with current readings."""
        key = (trial.id, slot.since_s)
        if key not in self._reaches_s:
            self._reaches_s[key] = now_s + self._left_s(trial)
        if now_s >= self._reaches_s[key]:
            self._reached.add(trial.id)
        return math.inf if trial.id in self._reached else self._reaches_s[key]
