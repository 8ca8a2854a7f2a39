"""How many slots a search has use for, and which of them go where it has to make place for others."""

from __future__ import annotations

import math

from framework.search.endings import Endings
from framework.search.fleet import Fleet
from framework.search.objective import finite_or_none
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

    Attributes:
        limit: at most so many, because others wait; None for no such limit.
    """

    def __init__(self, spec: SearchSpec, roster: Roster, fleet: Fleet, endings: Endings) -> None:
        self._max_slots = spec.max_slots
        self._roster = roster
        self._fleet = fleet
        self._endings = endings
        self.limit: int | None = None

    def more(self) -> int:
        """How many more slots there is use for; below 0 if there are too many."""
        if self._fleet.is_leaving:
            return 0
        useful = len(self._roster.open) + self._roster.to_come
        bounds = [bound for bound in (self._max_slots, self.limit) if bound is not None]
        return min([useful, *bounds]) - len(self._fleet.staying)

    def is_preemptible(self, slot: Slot, run: ActiveRun) -> bool:
        """Whether a slot's run can be suspended, and would have something to go on from."""
        return slot.preemptible and not self._endings.is_too_slow(run.record.number)

    def shed(self) -> bool:
        """Ends slots beyond the limit: idle ones, then those whose trials the policy thinks the least of.

        A trial that cannot be suspended keeps its slot.

        Returns:
            Whether any was told to end.
        """
        staying = self._fleet.staying
        surplus = 0 if self.limit is None else len(staying) - self.limit
        if surplus <= 0:
            return False
        able = [slot for slot in staying if self._may_go(slot)]
        leaving = sorted(able, key=_promise)[:surplus]
        self._fleet.shed(leaving)
        return bool(leaving)

    def vacate(self, agent_ids: frozenset[str]) -> None:
        """Ends the slots on these agents, trials that cannot be suspended excepted."""
        self._fleet.shed([slot for slot in self._fleet.staying if slot.agent_id in agent_ids and self._may_go(slot)])

    def _may_go(self, slot: Slot) -> bool:
        run = slot.current
        return run is None or not run.training or self.is_preemptible(slot, run)


def _promise(slot: Slot) -> tuple[bool, float]:
    """What slots are compared by where some have to go; the least goes first."""
    if slot.current is None:
        return (False, 0.0)
    score = finite_or_none(slot.current.record.convergence)
    return (True, -math.inf if score is None else score)
