"""How many slots a search has use for, and which of them it can leave to others."""

from __future__ import annotations

from framework.search.endings import Endings
from framework.search.fleet import Fleet
from framework.search.records import SearchSpec
from framework.search.roster import Roster
from framework.search.slots import ActiveRun, Slot


class SlotDemand:
    """The slots that a search wants.

    Args:
        spec: the search.
        roster: its trials.
        fleet: its slots.
        endings: knows which trials would lose what they have done.
    """

    def __init__(self, spec: SearchSpec, roster: Roster, fleet: Fleet, endings: Endings) -> None:
        self._max_slots = spec.max_slots
        self._roster = roster
        self._fleet = fleet
        self._endings = endings

    def more(self) -> int:
        """How many more slots there is use for; below 0 if there are too many."""
        if self._fleet.is_leaving:
            return 0
        useful = len(self._roster.open) + self._roster.to_come
        if self._max_slots is not None:
            useful = min(useful, self._max_slots)
        return useful - len(self._fleet.staying)

    def is_preemptible(self, slot: Slot, run: ActiveRun) -> bool:
        """Whether a slot's run can be suspended, and would have something to go on from."""
        return slot.preemptible and not self._endings.is_too_slow(run.record.number)

    def vacate(self, agent_ids: frozenset[str]) -> None:
        """Ends the slots on these agents, trials that cannot be suspended excepted."""
        self._fleet.shed([slot for slot in self._fleet.staying if slot.agent_id in agent_ids and self._may_go(slot)])

    def vacatable(self) -> frozenset[str]:
        """Ids of the tasks of slots that `vacate` would end, and of those that are ending."""
        return frozenset(slot.task_id for slot in self._fleet.slots if slot.leaving or self._may_go(slot))

    def _may_go(self, slot: Slot) -> bool:
        run = slot.current
        return run is None or not run.training or self.is_preemptible(slot, run)
