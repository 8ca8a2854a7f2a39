"""What the policies that bind trials to slots share: when a slot's quantum is over, and between whom it chooses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.policies.trials.binding import Binding
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView


@dataclass(frozen=True)
class Turn:
    """The quantum that a trial is in.

    Attributes:
        trial: its number.
        since_s: when its slice began.
        ends_s: when the quantum is over; it begins when the slot has been filled, so that starting does not count.
    """

    trial: int
    since_s: float
    ends_s: float


class BoundPolicy(ABC):
    """Chooses, slot by slot, among the trials bound to the slot (`Binding`).

    A slot that is empty gets the trial of the greatest rank. When the quantum of a running trial is over it is compared
    with those that wait, if it can be suspended: it goes on if its rank is the greatest. The same if nobody waits: then
    a new quantum begins. One that the binding wants in another slot (`Binding.leaving`) makes place for who waits.

    Args:
        settings: what the search tells its policy.
        binding: which trial belongs to which slot; without it as in the paper 'Hermes'.
    """

    name: str

    def __init__(self, settings: PolicySettings, binding: Binding | None = None) -> None:
        self.settings = settings
        self.passed_over: dict[int, int] = {}
        """Trial -> how often another was chosen in its slot since it last was."""
        self._binding = binding or Binding(settings.trials_per_slot)
        self._turns: dict[int, Turn] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
        by_id = {trial.id: trial for trial in trials}
        if len(self.passed_over) > len(trials):
            self.passed_over = {trial: times for trial, times in self.passed_over.items() if trial in by_id}
        self._binding.update(by_id, slots, self.rank)
        runs: dict[int, Choice] = {}
        turns: dict[int, Turn] = {}
        for slot in slots:
            if slot.busy:
                continue
            running = by_id.get(slot.trial) if slot.trial is not None else None
            if running is not None:
                turn = self._turns.get(slot.id)
                if turn is None or (turn.trial, turn.since_s) != (running.id, slot.since_s):
                    turn = Turn(running.id, slot.since_s, now_s + self.quantum_s(running))
                if now_s >= turn.ends_s:
                    turn = Turn(running.id, slot.since_s, now_s + self.quantum_s(running))
                    if running.preemptible:
                        waiting = self._waiting(slot, by_id)
                        leaves = waiting and running.id in self._binding.leaving
                        runs[slot.id] = self._choose(waiting if leaves else [*waiting, running])
                turns[slot.id] = turn
            elif slot.trial is None and (waiting := self._waiting(slot, by_id)):
                runs[slot.id] = self._choose(waiting)
        self._turns = turns
        ends_s = [turn.ends_s for turn in turns.values() if math.isfinite(turn.ends_s)]
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
        """How long a trial runs before it is compared with others."""
        return self.settings.quantum_s

    @abstractmethod
    def rank(self, trial: TrialView) -> Any:
        """What trials are compared by; no two have the same."""

    @abstractmethod
    def choice(self, trial: TrialView, candidates: Sequence[TrialView]) -> Choice:
        """Says why a trial is the best of the candidates."""
