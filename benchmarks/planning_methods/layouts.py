"""Enumerates placements of a job's tasks up to permutations of equal machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from solver.capacity import Ints
from solver.nodes import NodeKind
from solver.resources import TaskSizes

Shelf = tuple[int, ...]
"""Sizes of the shards on one machine, largest first."""
Layout = tuple[tuple[Shelf, ...], ...]
"""For each kind of machine the shards of its machines, in descending order."""
Runs = tuple[tuple[int, ...], ...]
"""For each kind the lengths of runs of machines with equal shards, which are interchangeable for workers too."""


def shard_layouts(
    kinds: Sequence[NodeKind], sizes: TaskSizes, shards: Sequence[int], *, ps_may_share: bool
) -> dict[Runs, list[Layout]]:
    """Returns every placement of the parameter servers that fits without other tasks.

    Args:
        kinds: the machines.
        sizes: resources of the roles.
        shards: bytes on each ps, largest first.
        ps_may_share: whether a machine may have several of them.
    """
    level: set[Layout] = {tuple(((),) * kind.count for kind in kinds)}
    for size in shards:
        level = {
            (*layout[:number], _with(layout[number], shelf, size), *layout[number + 1 :])
            for layout in level
            for number, kind in enumerate(kinds)
            for shelf in dict.fromkeys(layout[number])
            if (ps_may_share or not shelf) and fits(kind, sizes, (*shelf, size))
        }
    by_runs: dict[Runs, list[Layout]] = {}
    for layout in sorted(level):
        by_runs.setdefault(tuple(_runs(shelves) for shelves in layout), []).append(layout)
    return by_runs


def layout_count(machines: Sequence[int], ps: int) -> int:
    """Counts the layouts of `ps` distinct shards, ignoring capacity; `machines`: number of each kind."""
    # Stirling numbers: partitions of i shards into j nonempty machines.
    stirling = [[0] * (ps + 1) for _ in range(ps + 1)]
    stirling[0][0] = 1
    for i, j in itertools.product(range(1, ps + 1), repeat=2):
        stirling[i][j] = j * stirling[i - 1][j] + stirling[i - 1][j - 1]
    ways = [1] + [0] * ps
    for count in machines:
        of_kind = [sum(row[: count + 1]) for row in stirling]
        ways = [sum(math.comb(i, k) * ways[i - k] * of_kind[k] for k in range(i + 1)) for i in range(ps + 1)]
    return ways[ps]


def fits(kind: NodeKind, sizes: TaskSizes, shelf: Shelf) -> bool:
    """Whether a machine holds parameter servers with these shards."""
    return kind.room_for(sizes.ps(shelf[-1]), [sizes.ps(size) for size in shelf[:-1]]) > 0


def row_count(runs: Runs, rooms: Sequence[int]) -> int:
    return math.prod(
        math.comb(room + machines, machines) for of_kind, room in zip(runs, rooms, strict=True) for machines in of_kind
    )


def worker_rows(runs: Runs, rooms: Sequence[int]) -> Ints:
    """Returns every placement of workers: a row has the number on each machine, kind by kind.

    Args:
        runs: which machines are interchangeable.
        rooms: for each kind the maximum number of workers on a machine.
    """
    rows = np.zeros((1, 0), dtype=np.int64)
    for of_kind, room in zip(runs, rooms, strict=True):
        for machines in of_kind:
            here = np.array(list(itertools.combinations_with_replacement(range(room, -1, -1), machines)))
            rows = np.hstack([np.repeat(rows, len(here), axis=0), np.tile(here, (len(rows), 1))])
    return rows


def log10_placements(machines: Sequence[int], rooms: Sequence[Sequence[int]], most_ps: int) -> float:
    """Estimates log10 of the number of placements: all, divided by the permutations of equal machines.

    Args:
        machines: number of each kind.
        rooms: for each worker size and kind, the maximum number of workers on a machine.
        most_ps: maximum number of parameter servers.
    """
    per_shape = [
        sum(count * math.log10(room + 1) for count, room in zip(machines, of_shape, strict=True)) for of_shape in rooms
    ]
    largest = max(per_shape)
    shapes = largest + math.log10(sum(10 ** (value - largest) for value in per_shape))
    permutations = sum(math.lgamma(count + 1) for count in machines) / math.log(10)
    # The last term of the sum over numbers of ps dominates.
    return most_ps * math.log10(sum(machines)) + shapes - permutations


def _with(shelves: tuple[Shelf, ...], shelf: Shelf, size: int) -> tuple[Shelf, ...]:
    rest = list(shelves)
    rest.remove(shelf)
    return tuple(sorted([*rest, (*shelf, size)], reverse=True))


def _runs(shelves: tuple[Shelf, ...]) -> tuple[int, ...]:
    return tuple(len(list(group)) for _, group in itertools.groupby(shelves))
