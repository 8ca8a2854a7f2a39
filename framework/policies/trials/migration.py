"""Moves running trials between slots of different kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence

from framework.policies.trials.exchange import Exchange, Mover, min_move_gain
from framework.policies.trials.interface import Choice, PolicySettings, SlotView, TrialView
from framework.policies.trials.speeds import SpeedEstimates


class Migration:
    """Moves running trials so that the sum of worth x relative speed over the slots grows (paper 'Hermes-v2', Eq. 2).

    Trials are suspended, and resume in their new slots once these are free; until then no other move is planned. An
    idle slot takes a trial from a slower one. A move must pay its cost (`min_move_gain`). With slots of one kind
    nothing moves.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._cost = min_move_gain(settings, runs=True)
        self._speeds = SpeedEstimates()
        self._kinds: dict[int, str] = {}
        self._names: list[str] = []
        self._moving: dict[int, int] = {}
        """Trials being suspended -> the slots in which they resume."""

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView]) -> None:
        self._kinds = {slot.id: slot.kind for slot in slots}
        self._names = list(dict.fromkeys(self._kinds.values()))
        if len(self._names) != 1:  # without slots: trials that ended before a restart
            self._speeds.update(trials.values())
        running = {slot.trial: slot.id for slot in slots if slot.trial is not None and not slot.busy}
        possible = self._kinds.keys() - running.values()
        self._moving = {
            trial: slot
            for trial, slot in self._moving.items()
            if trial in trials and trial not in running and slot in possible - trials[trial].refused
        }

    @property
    def is_due(self) -> bool:
        """Whether a plan can be made: there are slots of several kinds, and no trial is moving."""
        return len(self._names) > 1 and not self._moving

    def kind(self, slot: int) -> str:
        return self._kinds[slot]

    def relative_speed(self, trial: int, kind: str) -> float:
        """Returns a trial's speed on this kind as a multiple of its mean over the kinds, measured or estimated."""
        return self._speeds.relative(trial, self._names)[kind] if len(self._names) > 1 else 1.0

    def place_moving(
        self, slots: MutableMapping[int, TrialView | None], waiting: MutableMapping[int, TrialView]
    ) -> dict[int, Choice]:
        """Starts moving trials in their new slots; those that cannot resume yet keep them reserved.

        Args:
            slots: slot -> its trial, None if empty; reserved slots are removed.
            waiting: trials that can be given a slot, by number; those with a reserved slot are removed.
        """
        runs = {}
        for trial, slot in list(self._moving.items()):
            is_ready = waiting.pop(trial, None) is not None
            is_free = slot in slots
            slots.pop(slot, None)
            if is_ready and is_free:
                runs[slot] = Choice(trial, "faster slots for all")
                del self._moving[trial]
        return runs

    def plan(
        self, assignment: Mapping[int, int], movable: Sequence[TrialView], worths: Mapping[int, float]
    ) -> frozenset[int]:
        """Plans moves, and returns the slots whose trials must be suspended.

        `movable` are running trials that can be suspended, `worths` theirs on the mean kind, -inf for diverged ones.
        """
        greatest = max((worth for worth in worths.values() if math.isfinite(worth)), default=1.0)
        movers = {}
        for trial in movable:
            # Relative to the greatest, so that worths are dimensionless. Diverged trials yield to any other.
            worth = min(max(worths[trial.id] / greatest, 0.0), 1.0)
            speeds = {kind: worth * speed for kind, speed in self._speeds.relative(trial.id, self._names).items()}
            movers[trial.id] = Mover(trial.id, speeds, worth * self._cost, trial.refused, is_ready=False)
        exchange = Exchange(self._kinds, assignment, movers)
        exchange.exchange_rings()
        self._moving = {trial: slot for trial, slot in exchange.assignment.items() if slot != assignment[trial]}
        return frozenset(assignment[trial] for trial in self._moving)
