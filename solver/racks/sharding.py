"""Distributes unequal shards over machines already chosen for parameter servers, in racks with limited uplinks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROUNDS = 8
"""Maximum rounds over all pairs of shards; few cases need more than three."""


@dataclass(frozen=True)
class Place:
    """A machine chosen for one ps.

    Attributes:
        card_s: by shard, seconds that its network card is busy while every worker makes one step.
    """

    rack: int
    workers: int
    card_s: tuple[float, ...]


@dataclass(frozen=True)
class Uplinks:
    """The racks' uplinks.

    Attributes:
        bytes_per_s: speed of each, each way.
        rack_workers: workers in each rack.
    """

    bytes_per_s: float
    rack_workers: tuple[int, ...]
    total_bytes: int

    def busy_s(self, rack: int, stored: int) -> float:
        """Seconds that a rack with these shard bytes keeps its uplink busy while every worker makes one step."""
        near, count = self.rack_workers[rack], sum(self.rack_workers)
        return 2 * max(stored * (count - near), near * (self.total_bytes - stored)) / self.bytes_per_s


def distribute_shards(places: Sequence[Place], sizes: Sequence[int], uplinks: Uplinks) -> tuple[int, ...]:
    """Distributes the shards: minimises the time of the busiest card or uplink, then the traffic.

    Shards are spread evenly over the racks and then exchanged pair by pair as long as that shortens the time of the
    busiest of the cards and uplinks involved; then as long as it saves traffic and lengthens no step. A local search:
    at the end no exchange of two helps.

    Returns:
        For each place the index of its shard.
    """
    held = _evenly(places, sizes)
    stored = [0] * len(uplinks.rack_workers)
    for place, shard in zip(places, held, strict=True):
        stored[place.rack] += sizes[shard]

    def busiest(first: int, second: int, shard: int, other: int) -> float:
        """Time of the busiest link of `first` and `second`, with these shards there."""
        one, two = places[first], places[second]
        cards = max(one.card_s[shard], two.card_s[other])
        if one.rack == two.rack:
            return cards
        moved = sizes[shard] - sizes[held[first]]
        return max(
            cards,
            uplinks.busy_s(one.rack, stored[one.rack] + moved),
            uplinks.busy_s(two.rack, stored[two.rack] - moved),
        )

    def exchange(limit_s: float | None) -> bool:
        """Runs one round over all pairs; with a limit for less traffic, without one for less time."""
        changed = False
        for first, second in itertools.combinations(range(len(places)), 2):
            shard, other = held[first], held[second]
            if sizes[shard] == sizes[other]:
                continue
            after = busiest(first, second, other, shard)
            if limit_s is None:
                better = after < busiest(first, second, shard, other)
            else:
                saved = (sizes[other] - sizes[shard]) * (places[first].workers - places[second].workers)
                better = saved > 0 and after <= limit_s
            if better:
                stored[places[first].rack] += sizes[other] - sizes[shard]
                stored[places[second].rack] += sizes[shard] - sizes[other]
                held[first], held[second] = other, shard
                changed = True
        return changed

    for _ in range(MAX_ROUNDS):
        if not exchange(None):
            break
    cards = (place.card_s[shard] for place, shard in zip(places, held, strict=True))
    limit_s = max(*cards, *(uplinks.busy_s(rack, here) for rack, here in enumerate(stored)))
    for _ in range(MAX_ROUNDS):
        if not exchange(limit_s):
            break
    return tuple(held)


def _evenly(places: Sequence[Place], sizes: Sequence[int]) -> list[int]:
    """Assigns the largest first, each to the rack whose free places lack most bytes of a mean shard each."""
    mean = sum(sizes) / len(sizes)
    free: dict[int, list[int]] = {}
    for index in sorted(range(len(places)), key=lambda index: places[index].workers):
        free.setdefault(places[index].rack, []).append(index)
    lacking = {rack: mean * len(indices) for rack, indices in free.items()}
    held = [0] * len(places)
    for shard, size in enumerate(sizes):
        rack = max((rack for rack, indices in free.items() if indices), key=lambda r: lacking[r] / len(free[r]))
        held[free[rack].pop()] = shard
        lacking[rack] -= size
    return held
