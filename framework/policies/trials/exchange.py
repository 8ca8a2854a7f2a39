"""Which trials change places between slots of different kinds (paper 'Hermes-v2', Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from framework.policies.trials.interface import PolicySettings

PAYS_OFF = 10
"""A move has to save within so many quanta what it costs."""
MARGIN = 0.02
"""A trial that has started is moved for no less of its mean speed: measured speeds scatter."""

_LEAST_GAIN = 1e-9
_Step = tuple[str | None, str | None]


@dataclass(frozen=True)
class Mover:
    """A trial that may change its slot.

    Attributes:
        id: its number.
        performance: by kind of slot.
        cost: what a move costs, as a performance.
        refused: slots it must not be given.
        is_ready: whether it can move at once; others run and move when they are suspended.
    """

    id: int
    performance: Mapping[str, float]
    cost: float = 0.0
    refused: frozenset[int] = frozenset()
    is_ready: bool = True


def share_of_move(settings: PolicySettings, *, runs: bool) -> float:
    """What a move of a trial that has started must gain, as a share of the trial's mean speed.

    Args:
        settings: quantum, and what moves cost.
        runs: whether the trial has to be suspended for it.
    """
    cost_s = settings.move_s + (settings.switch_s if runs else 0.0)
    return MARGIN + cost_s / (PAYS_OFF * settings.quantum_s)


class Exchange:
    """Trials in slots, and how they change places so that the sum of their performances grows.

    Args:
        kinds: the kind of each slot, by number.
        homes: the slot of every trial, of those that cannot move too.
        movers: the trials that can, by number.
    """

    def __init__(self, kinds: Mapping[int, str], homes: Mapping[int, int], movers: Mapping[int, Mover]) -> None:
        self._kinds = kinds
        self._movers = movers
        self.homes = dict(homes)
        """Trial -> slot, as it is to be."""
        self._counts = dict.fromkeys(kinds, 0)
        for slot in self.homes.values():
            self._counts[slot] += 1
        self._slots_of = {kind: frozenset(slot for slot in kinds if kinds[slot] == kind) for kind in kinds.values()}

    def balance(self) -> None:
        """Moves trials from slots with the most to that with the fewest while they are more than one apart.

        Of those that can move at once the one that gains most, or loses least.
        """
        while True:
            fewest = self._emptiest(self._counts)
            crowded = {slot for slot in self._counts if self._counts[slot] > self._counts[fewest] + 1}
            if not self._give(crowded, fewest):
                return

    def exchange_pairs(self) -> None:
        """As in the paper: the trials of the slot with the fewest look for the partner with the largest positive gain.

        P_Gb(ja) + P_Ga(jb) - P_Ga(ja) - P_Gb(jb), less what it costs to move the two; again until there is none.
        """
        slot_a = self._emptiest([slot for slot, count in self._counts.items() if count])
        while True:
            best = (_LEAST_GAIN, 0, 0)
            for a in [mover for mover in self._movers.values() if self.homes[mover.id] == slot_a]:
                for b in self._movers.values():
                    slot_b = self.homes[b.id]
                    if slot_b not in a.refused and slot_a not in b.refused:
                        gain = self._gain(a, self._kinds[slot_b]) + self._gain(b, self._kinds[slot_a])
                        best = max(best, (gain, -a.id, -b.id))
            gain, a_id, b_id = best[0], -best[1], -best[2]
            if gain <= _LEAST_GAIN:
                return
            slot_b = self.homes[b_id]
            self._move(a_id, slot_b)
            self._move(b_id, slot_a)

    def exchange_rings(self) -> None:
        """Exchanges among any number of trials until no further one gains: then the sum is the greatest there is.

        Trials move along a ring of kinds, each to the next one's slot; or along a path that begins at a slot with one
        trial more than others and ends at one with one fewer. As nothing but its kind matters of a slot, no other
        assignment with equal counts has a greater sum once there is no ring of positive gain (as in a minimum-cost
        flow without a negative cycle).
        """
        while True:
            gains, movers = self._best_steps()
            ring = _positive_ring(gains)
            if not ring:
                return
            self._turn(ring, movers)

    def _gain(self, mover: Mover, kind: str) -> float:
        here = self._kinds[self.homes[mover.id]]
        return 0.0 if kind == here else mover.performance[kind] - mover.performance[here] - mover.cost

    def _best_steps(self) -> tuple[dict[_Step, float], dict[_Step, int]]:
        """For each two kinds the greatest gain of a move from one to the other, and who makes it.

        None stands for the free place that is left by a slot with one trial more than others and taken by one with
        one fewer.
        """
        gains: dict[_Step, float] = {}
        movers: dict[_Step, int] = {}
        for mover in self._movers.values():
            here = self._kinds[self.homes[mover.id]]
            for kind, slots in self._slots_of.items():
                if kind == here or mover.refused & slots:
                    continue
                gain = self._gain(mover, kind)
                if gain > gains.get((here, kind), -math.inf):
                    gains[here, kind], movers[here, kind] = gain, mover.id
        mean = len(self.homes) / len(self._kinds)
        for kind, slots in self._slots_of.items():
            if any(self._counts[slot] > math.floor(mean) for slot in slots):
                gains[None, kind] = 0.0
            if any(self._counts[slot] < math.ceil(mean) for slot in slots):
                gains[kind, None] = 0.0
        return gains, movers

    def _turn(self, ring: Sequence[str | None], movers: Mapping[_Step, int]) -> None:
        """Everyone on the ring goes on by one."""
        who = {
            (start, end): movers[start, end]
            for start, end in zip(ring, [*ring[1:], ring[0]], strict=True)
            if start is not None and end is not None
        }
        left = {start: self.homes[trial] for (start, _), trial in who.items()}
        for (_, end), trial in who.items():
            self._move(trial, left[end] if end in left else self._emptiest(self._slots_of[end]))
        for kind in left:
            self._level(self._slots_of[kind])

    def _level(self, slots: frozenset[int]) -> None:
        """Among slots of one kind, lets the one with the most give a trial to that with the fewest if two apart."""
        fewest = self._emptiest(slots)
        most = max(slots, key=lambda slot: (self._counts[slot], -slot))
        if self._counts[most] > self._counts[fewest] + 1:
            self._give({most}, fewest)

    def _give(self, givers: Set[int], slot: int) -> bool:
        """Moves the trial of those slots to which it does most good; whether there is one that can move at once."""
        kind = self._kinds[slot]
        choices = [
            (self._gain(mover, kind), -mover.id)
            for mover in self._movers.values()
            if mover.is_ready and self.homes[mover.id] in givers and slot not in mover.refused
        ]
        if choices:
            self._move(-max(choices)[1], slot)
        return bool(choices)

    def _emptiest(self, slots: Iterable[int]) -> int:
        return min(slots, key=lambda slot: (self._counts[slot], slot))

    def _move(self, trial: int, slot: int) -> None:
        self._counts[self.homes[trial]] -= 1
        self._counts[slot] += 1
        self.homes[trial] = slot


def _positive_ring(gains: Mapping[_Step, float]) -> list[str | None]:
    """Nodes of a ring whose gains sum to more than nothing; empty if there is none (Bellman and Ford)."""
    nodes = sorted({node for step in gains for node in step}, key=str)
    best = dict.fromkeys(nodes, 0.0)
    before: dict[str | None, str | None] = {}
    last: str | None = None
    changed = False
    for _ in nodes:
        changed = False
        for (start, end), gain in gains.items():
            if best[start] + gain > best[end] + _LEAST_GAIN:
                best[end] = best[start] + gain
                before[end] = start
                last, changed = end, True
        if not changed:
            break
    if not changed:
        return []
    for _ in nodes:
        last = before[last]
    ring = [last]
    while (node := before[ring[-1]]) != ring[0]:
        ring.append(node)
    return ring[::-1]
