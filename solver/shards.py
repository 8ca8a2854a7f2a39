"""Which ps holds which variable, balanced by size."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from dike.profile import ModelProfile

BALANCED = 0.01
"""A further ps counts as useful only if it makes the largest shard smaller by this share."""


@dataclass(frozen=True)
class Shards:
    """The variables dealt out to parameter servers.

    Attributes:
        sizes: bytes on each ps, largest first.
        variables: variable -> ps index.
    """

    sizes: tuple[int, ...]
    variables: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def are_equal(self) -> bool:
        return len(set(self.sizes)) == 1


def shard(profile: ModelProfile, ps_count: int) -> Shards:
    """Deals the variables out, each whole: the largest that is left goes to the ps that has least.

    A variable is never split: Keras 3 cannot train split ones.

    Args:
        profile: the model.
        ps_count: number of parameter servers, at most the number of variables.
    """
    if not profile.variables:
        return Shards((profile.parameter_bytes,), {})
    loads = [(0, index) for index in range(ps_count)]
    owner: dict[str, int] = {}
    for variable in sorted(profile.variables, key=lambda v: (-v.size_bytes, v.name)):
        load, index = heapq.heappop(loads)
        owner[variable.name] = index
        heapq.heappush(loads, (load + variable.size_bytes, index))
    by_size = sorted(loads, key=lambda item: (-item[0], item[1]))
    rank = {index: position for position, (_, index) in enumerate(by_size)}
    return Shards(tuple(load for load, _ in by_size), {name: rank[index] for name, index in owner.items()})


def useful_ps_count(profile: ModelProfile, limit: int) -> int:
    """Largest number of parameter servers, up to `limit`, that still makes the largest shard smaller.

    Beyond it the largest variable alone decides how long the busiest ps takes.
    """
    limit = min(limit, max(1, len(profile.variables)))
    sizes = [variable.size_bytes for variable in profile.variables] or [profile.parameter_bytes]
    best = 1
    smallest = sum(sizes)
    for count in range(2, limit + 1):
        largest = shard(profile, count).sizes[0]
        if largest <= smallest * (1 - BALANCED):
            best, smallest = count, largest
        if smallest <= max(sizes) * (1 + BALANCED):
            break
    return best
