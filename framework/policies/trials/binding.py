"""Which slot a trial belongs to (paper 'Hermes', Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framework.policies.trials.interface import SlotView, TrialView

Rank = Callable[[TrialView], Any]
"""What trials are compared by; the greatest runs first."""


class Binding:
    """Binds trials to slots.

    As in the paper, a trial goes to the slot with the fewest bound trials, if fewer than `trials_per_slot` are bound to
    it; of equal ones to one where its process stands still, else to the one with the lowest number. If there is none it
    waits in the queue, which is in order of arrival. A trial that ends makes place for the first of the queue that may
    use the slot.

    What the paper leaves open:
        * The trials of a slot that is gone, or that they refuse, wait in the queue; having arrived before the others,
          they stand at its front.
        * No slot idles while another has a trial too many. A slot without a trial that can run takes trials that wait
          at the slot to which most are bound, one at least, and on until the other has at most one more; those first
          that the policy would run first. (Trials carry their checkpoints with them.)

    Args:
        trials_per_slot: how many trials are bound to a slot at most (the paper's G_thres).
    """

    def __init__(self, trials_per_slot: int) -> None:
        self._jobs_per_slot = trials_per_slot
        self._slot_of: dict[int, int] = {}
        self._bound: dict[int, list[int]] = {}

    @property
    def leaving(self) -> Mapping[int, int]:
        """Running trials that are to go on in another slot -> that slot; here there are none."""
        return {}

    def bound_to(self, slot: int) -> Sequence[int]:
        """The trials of a slot, in the order in which they came to it."""
        return self._bound[slot]

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        """Follows what has happened since the last call.

        Args:
            trials: the trials that have not ended, by number.
            slots: all slots there are, by number.
            rank: decides which trials an idle slot takes from another.
        """
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
        places = len(self._bound) * self._jobs_per_slot - len(self._slot_of)
        if places <= 0 or len(self._slot_of) == len(trials):
            return
        for trial in trials.values():
            if trial.id in self._slot_of or not trial.runnable:
                continue
            open_slots = [
                (len(bound), slot_id not in trial.homes, slot_id)
                for slot_id, bound in self._bound.items()
                if len(bound) < self._jobs_per_slot and slot_id not in trial.refused
            ]
            if open_slots:
                self._bind(trial.id, min(open_slots)[-1])

    def _fill_idle(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        """Lets slots without a trial that can run take one from others."""
        if not any(trial.runnable for trial in trials.values()):
            return
        for slot in slots:
            if self._is_idle(slot, trials):
                self._relieve_others(slot, trials, {slot.id: slot for slot in slots}, rank)

    def _relieve_others(
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
    """Whether a trial that was bound to a slot still is: both are there, and it waits or runs nowhere else."""
    if trial is None or slot is None:
        return False
    if slot.trial == trial.id or slot.busy:
        return True
    return trial.runnable and slot.id not in trial.refused
