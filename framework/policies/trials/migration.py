"""Running trials that change places between slots of different kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence

from framework.policies.trials.exchange import Exchange, Mover, share_of_move
from framework.policies.trials.interface import Choice, PolicySettings, SlotView, TrialView
from framework.policies.trials.speeds import SpeedEstimates


class Migration:
    """Lets running trials change places, so that the sum of worth x relative speed over the slots grows.

    As in the paper 'Hermes-v2' (Eq. 2), but what trials are worth counts, and only those that run move (`Exchange`).
    They are suspended and go on in their new slots as soon as these are free. Until then nothing else is planned. A
    slot that would stand idle takes a trial from a slower one. A move must pay what it costs (`share_of_move`).

    Where all slots are of one kind every relative speed is 1, and nothing moves.

    Args:
        settings: quantum, and what moves cost.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._cost = share_of_move(settings, runs=True)
        self._speeds = SpeedEstimates()
        self._kinds: dict[int, str] = {}
        self._names: list[str] = []
        self._moving: dict[int, int] = {}
        """Trials that are being suspended -> the slots they go on in."""

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView]) -> None:
        """Takes in what has happened since the last call."""
        self._kinds = {slot.id: slot.kind for slot in slots}
        self._names = list(dict.fromkeys(self._kinds.values()))
        if len(self._names) != 1:  # without slots it hears of trials that have ended before
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
        """Whether it is time for a plan: there are slots of several kinds, and no trial is on its way."""
        return len(self._names) > 1 and not self._moving

    def kind(self, slot: int) -> str:
        """The kind of a slot."""
        return self._kinds[slot]

    def relative_speed(self, trial: int, kind: str) -> float:
        """How many times as fast as on the mean kind a trial is on this one, measured or estimated."""
        return self._speeds.relative(trial, self._names)[kind] if len(self._names) > 1 else 1.0

    def arrive(
        self, slots: MutableMapping[int, TrialView | None], waiting: MutableMapping[int, TrialView]
    ) -> dict[int, Choice]:
        """Gives the trials that change places their new slots; those that cannot go on yet keep them reserved.

        Args:
            slots: slot -> its trial, None if it is empty; loses the slots that are spoken for.
            waiting: the trials that can be given a slot, by number; loses those that have one reserved.
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
        self, homes: Mapping[int, int], movable: Sequence[TrialView], worths: Mapping[int, float]
    ) -> frozenset[int]:
        """The slots whose trials are to be suspended, as they change places.

        Args:
            homes: the slot of every trial that has one.
            movable: the trials that run and can be suspended.
            worths: what a second of each of these is worth on the mean kind; -inf for those that are lost.
        """
        greatest = max((worth for worth in worths.values() if math.isfinite(worth)), default=1.0)
        movers = {}
        for trial in movable:
            # By the greatest, so that worths have no unit. Who is lost makes place for anyone.
            worth = min(max(worths[trial.id] / greatest, 0.0), 1.0)
            speeds = {kind: worth * speed for kind, speed in self._speeds.relative(trial.id, self._names).items()}
            movers[trial.id] = Mover(trial.id, speeds, worth * self._cost, trial.refused, is_ready=False)
        exchange = Exchange(self._kinds, homes, movers)
        exchange.exchange_rings()
        self._moving = {trial: slot for trial, slot in exchange.homes.items() if slot != homes[trial]}
        return frozenset(homes[trial] for trial in self._moving)
