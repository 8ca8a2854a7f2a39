"""Exchange of trials between slots of different kinds (paper 'Hermes-v2', Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from framework.policies.trials.interface import PolicySettings

PAYBACK_QUANTA = 10
"""A move must save its cost within this many quanta."""
MIN_GAIN_SHARE = 0.02
"""Minimum gain for moving a trial that has started, as a share of its mean speed: measured speeds scatter."""

_LEAST_GAIN = 1e-9
_Step = tuple[str | None, str | None]


@dataclass(frozen=True)
class Mover:
    """A trial that may change its slot.

    Attributes:
        performance: kind of slot -> performance.
        cost: cost of a move, in units of performance.
        is_ready: whether it can move immediately; others run and must be suspended first.
    """

    id: int
    performance: Mapping[str, float]
    cost: float = 0.0
    refused: frozenset[int] = frozenset()
    is_ready: bool = True


def min_move_gain(settings: PolicySettings, *, runs: bool) -> float:
    """Returns the minimum gain for moving a started trial, as a share of its mean speed."""
    cost_s = settings.move_s + (settings.switch_s if runs else 0.0)
    return MIN_GAIN_SHARE + cost_s / (PAYBACK_QUANTA * settings.quantum_s)


class Exchange:
    """An assignment of trials to slots, and exchanges that increase the sum of their performances.

    Args:
        kinds: slot -> kind.
        assignment: trial -> slot, including trials that cannot move.
        movers: trial -> mover, for those that can.
    """

    def __init__(self, kinds: Mapping[int, str], assignment: Mapping[int, int], movers: Mapping[int, Mover]) -> None:
        self._kinds = kinds
        self._movers = movers
        self.assignment = dict(assignment)
        """Trial -> desired slot."""
        self._counts = dict.fromkeys(kinds, 0)
        for slot in self.assignment.values():
            self._counts[slot] += 1
        self._slots_of = {kind: frozenset(slot for slot in kinds if kinds[slot] == kind) for kind in kinds.values()}

    def balance(self) -> None:
        """Moves the ready trials that gain most from the fullest to the emptiest slots, until counts differ by at most
        one.
        """
        while True:
            fewest = self._emptiest(self._counts)
            crowded = {slot for slot in self._counts if self._counts[slot] > self._counts[fewest] + 1}
            if not self._move_best_to(crowded, fewest):
                return

    def exchange_pairs(self) -> None:
        """Exchanges trials of the slot with the fewest with their best partners, as in the paper.

        The gain is P_Gb(ja) + P_Ga(jb) - P_Ga(ja) - P_Gb(jb) minus the cost of both moves. Repeats until no pair gains.
        """
        slot_a = self._emptiest([slot for slot, count in self._counts.items() if count])
        while True:
            best = (_LEAST_GAIN, 0, 0)
            for a in [mover for mover in self._movers.values() if self.assignment[mover.id] == slot_a]:
                for b in self._movers.values():
                    slot_b = self.assignment[b.id]
                    if slot_b not in a.refused and slot_a not in b.refused:
                        gain = self._gain(a, self._kinds[slot_b]) + self._gain(b, self._kinds[slot_a])
                        best = max(best, (gain, -a.id, -b.id))
            gain, a_id, b_id = best[0], -best[1], -best[2]
            if gain <= _LEAST_GAIN:
                return
            slot_b = self.assignment[b_id]
            self._move(a_id, slot_b)
            self._move(b_id, slot_a)

    def exchange_rings(self) -> None:
        """Exchanges among any number of trials until none gains, which maximizes the sum.

        Trials move along a ring of kinds, or a path from a slot with one trial more to one with one fewer. Slots of one
        kind are interchangeable, so without a ring of positive gain the sum is maximal for equal counts (as for a
        minimum-cost flow without a negative cycle).
        """
        while True:
            gains, movers = self._best_steps()
            ring = _positive_ring(gains)
            if not ring:
                return
            self._rotate(ring, movers)

    def _gain(self, mover: Mover, kind: str) -> float:
        here = self._kinds[self.assignment[mover.id]]
        return 0.0 if kind == here else mover.performance[kind] - mover.performance[here] - mover.cost

    def _best_steps(self) -> tuple[dict[_Step, float], dict[_Step, int]]:
        """Returns for each two kinds the greatest gain of a move from one to the other, and its trial.

        None is the free place left by a slot with one trial more than others and taken by one with one fewer.
        """
        gains: dict[_Step, float] = {}
        movers: dict[_Step, int] = {}
        for mover in self._movers.values():
            here = self._kinds[self.assignment[mover.id]]
            for kind, slots in self._slots_of.items():
                if kind == here or mover.refused & slots:
                    continue
                gain = self._gain(mover, kind)
                if gain > gains.get((here, kind), -math.inf):
                    gains[here, kind], movers[here, kind] = gain, mover.id
        mean = len(self.assignment) / len(self._kinds)
        for kind, slots in self._slots_of.items():
            if any(self._counts[slot] > math.floor(mean) for slot in slots):
                gains[None, kind] = 0.0
            if any(self._counts[slot] < math.ceil(mean) for slot in slots):
                gains[kind, None] = 0.0
        return gains, movers

    def _rotate(self, ring: Sequence[str | None], movers: Mapping[_Step, int]) -> None:
        moves = {
            (start, end): movers[start, end]
            for start, end in zip(ring, [*ring[1:], ring[0]], strict=True)
            if start is not None and end is not None
        }
        left = {start: self.assignment[trial] for (start, _), trial in moves.items()}
        for (_, end), trial in moves.items():
            self._move(trial, left[end] if end in left else self._emptiest(self._slots_of[end]))
        for kind in left:
            self._even_out(self._slots_of[kind])

    def _even_out(self, slots: frozenset[int]) -> None:
        """Among slots of one kind, moves a trial from the fullest to the emptiest if they differ by two."""
        fewest = self._emptiest(slots)
        most = max(slots, key=lambda slot: (self._counts[slot], -slot))
        if self._counts[most] > self._counts[fewest] + 1:
            self._move_best_to({most}, fewest)

    def _move_best_to(self, givers: Set[int], slot: int) -> bool:
        """Moves the ready trial of these slots that gains most. Returns whether there is one."""
        kind = self._kinds[slot]
        choices = [
            (self._gain(mover, kind), -mover.id)
            for mover in self._movers.values()
            if mover.is_ready and self.assignment[mover.id] in givers and slot not in mover.refused
        ]
        if choices:
            self._move(-max(choices)[1], slot)
        return bool(choices)

    def _emptiest(self, slots: Iterable[int]) -> int:
        return min(slots, key=lambda slot: (self._counts[slot], slot))

    def _move(self, trial: int, slot: int) -> None:
        self._counts[self.assignment[trial]] -= 1
        self._counts[slot] += 1
        self.assignment[trial] = slot


def _positive_ring(gains: Mapping[_Step, float]) -> list[str | None]:
    """Returns the nodes of a ring with positive sum of gains; empty if there is none (Bellman and Ford)."""
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
