"""From counts of configurations to named tasks on named machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver.nodes import NodeKind
from solver.placement.problem import Column, ShardType


@dataclass(frozen=True)
class Assignment:
    """Machine of every task, by index of the task.

    Attributes:
        ps: machines of the parameter servers; ps 0 holds the largest shard.
        workers: machines of the workers.
        chief: machine of the separate chief; None where there is none.
    """

    ps: tuple[str, ...]
    workers: tuple[str, ...]
    chief: str | None


def assign(
    used: Sequence[tuple[Column, int]], kinds: Sequence[NodeKind], shard_types: Sequence[ShardType]
) -> Assignment:
    """Gives the configurations their machines, in the order of the cluster, the busiest configurations first."""
    free = [list(kind.names) for kind in kinds]
    ps: dict[int, list[str]] = {index: [] for index in range(len(shard_types))}
    workers: list[str] = []
    chief: str | None = None

    def order(item: tuple[Column, int]) -> tuple[int, bool, int, bool, int]:
        column = item[0]
        shard = len(shard_types) if column.shard is None else column.shard
        return (column.kind, column.shard is None, -column.workers, not column.chief, shard)

    for column, count in sorted(used, key=order):
        for _ in range(count):
            node = free[column.kind].pop(0)
            if column.shard is not None:
                ps[column.shard].append(node)
            workers.extend([node] * column.workers)
            if column.chief:
                chief = node
    return Assignment(tuple(node for index in sorted(ps) for node in ps[index]), tuple(workers), chief)
