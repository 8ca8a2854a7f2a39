"""Base of policies that bind trials to slots: quanta, and the choice among a slot's trials."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.policies.trials.binding import Binding
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView


@dataclass(frozen=True)
class CurrentQuantum:
    """The quantum of a running trial.

    Attributes:
        ends_s: end of the quantum, which starts when the slot is filled, so that starting does not count.
    """

    trial: int
    since_s: float
    ends_s: float


class BoundPolicy(ABC):
    """Chooses, for each slot separately, among the trials bound to it (`Binding`).

    An empty slot gets the trial of greatest rank. At the end of its quantum a running trial that can be suspended is
    compared with the waiting ones and continues if its rank is the greatest, or if none waits, for a new quantum. A
    trial that the binding moves to another slot (`Binding.migrating`) yields to any that waits.

    Args:
        binding: binds trials to slots; by default as in the paper 'Hermes'.
    """

    name: str

    def __init__(self, settings: PolicySettings, binding: Binding | None = None) -> None:
        self.settings = settings
        self.passed_over: dict[int, int] = {}
        """Trial -> how often another was chosen in its slot since its last slice."""
        self._binding = binding or Binding(settings.trials_per_slot)
        self._current: dict[int, CurrentQuantum] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        by_id = {trial.id: trial for trial in trials}
        if len(self.passed_over) > len(trials):
            self.passed_over = {trial: times for trial, times in self.passed_over.items() if trial in by_id}
        self._binding.update(by_id, slots, self.rank)
        runs: dict[int, Choice] = {}
        current: dict[int, CurrentQuantum] = {}
        for slot in slots:
            if slot.busy:
                continue
            running = by_id.get(slot.trial) if slot.trial is not None else None
            if running is not None:
                quantum = self._current.get(slot.id)
                if quantum is None or (quantum.trial, quantum.since_s) != (running.id, slot.since_s):
                    quantum = CurrentQuantum(running.id, slot.since_s, now_s + self.quantum_s(running))
                if now_s >= quantum.ends_s:
                    quantum = CurrentQuantum(running.id, slot.since_s, now_s + self.quantum_s(running))
                    if running.preemptible:
                        waiting = self._waiting(slot, by_id)
                        migrates = waiting and running.id in self._binding.migrating
                        runs[slot.id] = self._choose(waiting if migrates else [*waiting, running])
                current[slot.id] = quantum
            elif slot.trial is None and (waiting := self._waiting(slot, by_id)):
                runs[slot.id] = self._choose(waiting)
        self._current = current
        ends_s = [quantum.ends_s for quantum in current.values() if math.isfinite(quantum.ends_s)]
        return Decision(runs, min(ends_s, default=None))

    def _waiting(self, slot: SlotView, trials: Mapping[int, TrialView]) -> list[TrialView]:
        bound = map(trials.__getitem__, self._binding.bound_to(slot.id))
        return [trial for trial in bound if trial.runnable]

    def _choose(self, candidates: Sequence[TrialView]) -> Choice:
        best = max(candidates, key=self.rank)
        choice = self.choice(best, candidates)
        for candidate in candidates:
            self.passed_over[candidate.id] = self.passed_over.get(candidate.id, 0) + 1
        self.passed_over[best.id] = 0
        return choice

    def quantum_s(self, trial: TrialView) -> float:
        return self.settings.quantum_s

    @abstractmethod
    def rank(self, trial: TrialView) -> Any:
        """Returns the sort key of a trial, unique among trials; the greatest runs."""

    @abstractmethod
    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice: ...
