"""Binding of trials to slots (paper 'Hermes', Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framework.policies.trials.interface import SlotView, TrialView

Rank = Callable[[TrialView], Any]
"""Sort key of trials; the greatest runs first."""


class Binding:
    """Binds trials to slots.

    As in the paper, a trial goes to the slot with the fewest bound trials, if fewer than `trials_per_slot`; ties go to
    a slot in which it is paused, then to the lowest number. Other trials wait in a queue in order of arrival.

    Not specified by the paper:
        * Trials of a removed or refused slot wait at the queue's front, as they arrived first.
        * An idle slot takes waiting trials from the slot with the most bound ones: at least one, and more until the
          other has at most one more. The policy's rank decides which.

    Args:
        trials_per_slot: maximum number of trials bound to a slot (the paper's G_thres).
    """

    def __init__(self, trials_per_slot: int) -> None:
        self._trials_per_slot = trials_per_slot
        self._slot_of: dict[int, int] = {}
        self._bound: dict[int, list[int]] = {}

    @property
    def migrating(self) -> Mapping[int, int]:
        """Running trials that are to move -> their new slot; always empty here."""
        return {}

    def bound_to(self, slot: int) -> Sequence[int]:
        return self._bound[slot]

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        by_id = {slot.id: slot for slot in slots}
        for trial_id, slot_id in list(self._slot_of.items()):
            if not _belongs(trials.get(trial_id), by_id.get(slot_id)):
                del self._slot_of[trial_id]
                self._bound[slot_id].remove(trial_id)
        self._bound = {slot.id: self._bound.get(slot.id, []) for slot in slots}
        for slot in slots:
            if slot.trial is not None and slot.trial in trials and self._slot_of.get(slot.trial) != slot.id:
                self._bind(slot.trial, slot.id)
        self._place_queue(trials)
        self._fill_idle(trials, slots, rank)

    def _place_queue(self, trials: Mapping[int, TrialView]) -> None:
        """Algorithms 1 and 2."""
        places = len(self._bound) * self._trials_per_slot - len(self._slot_of)
        if places <= 0 or len(self._slot_of) == len(trials):
            return
        for trial in trials.values():
            if trial.id in self._slot_of or not trial.runnable:
                continue
            open_slots = [
                (len(bound), slot_id not in trial.paused_in, slot_id)
                for slot_id, bound in self._bound.items()
                if len(bound) < self._trials_per_slot and slot_id not in trial.refused
            ]
            if open_slots:
                self._bind(trial.id, min(open_slots)[-1])

    def _fill_idle(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        """Moves waiting trials to slots that have no runnable one."""
        if not any(trial.runnable for trial in trials.values()):
            return
        for slot in slots:
            if self._is_idle(slot, trials):
                self._take_over(slot, trials, {slot.id: slot for slot in slots}, rank)

    def _take_over(
        self, idle: SlotView, trials: Mapping[int, TrialView], slots: Mapping[int, SlotView], rank: Rank
    ) -> None:
        taken = self._bound[idle.id]
        while True:
            choices = []
            for slot_id, bound in self._bound.items():
                waiting = [trials[trial_id] for trial_id in bound if trials[trial_id].runnable]
                needs_one = slots[slot_id].trial is None and not slots[slot_id].busy
                movable = [trial for trial in waiting if idle.id not in trial.refused]
                if slot_id != idle.id and len(waiting) > needs_one and movable:
                    choices.append((len(bound), -slot_id, movable))
            if not choices:
                return
            count, _, movable = max(choices, key=lambda choice: choice[:2])
            if taken and count - len(taken) < 2:
                return
            self._bind(max(movable, key=rank).id, idle.id)

    def _is_idle(self, slot: SlotView, trials: Mapping[int, TrialView]) -> bool:
        if slot.trial is not None or slot.busy:
            return False
        return not any(trials[trial_id].runnable for trial_id in self._bound[slot.id])

    def _bind(self, trial_id: int, slot_id: int) -> None:
        before = self._slot_of.get(trial_id)
        if before is not None:
            self._bound[before].remove(trial_id)
        self._slot_of[trial_id] = slot_id
        self._bound[slot_id].append(trial_id)


def _belongs(trial: TrialView | None, slot: SlotView | None) -> bool:
    """Returns whether a bound trial still belongs to its slot: both exist, and it does not wait or run elsewhere."""
    if trial is None or slot is None:
        return False
    if slot.trial == trial.id or slot.busy:
        return True
    return trial.runnable and slot.id not in trial.refused
