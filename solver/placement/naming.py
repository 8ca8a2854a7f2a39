"""From counts of machines to named tasks on named machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver.nodes import NodeKind
from solver.placement.class_counts import Group
from solver.placement.problem import ShardType


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


def assign(groups: Sequence[Group], kinds: Sequence[NodeKind], shard_types: Sequence[ShardType]) -> Assignment:
    """Gives each group its machines, in the order of the cluster, parameter servers and the busiest machines first."""
    free = [list(kind.names) for kind in kinds]
    ps: dict[int, list[str]] = {index: [] for index in range(len(shard_types))}
    workers: list[str] = []
    chief: str | None = None

    def order(group: Group) -> tuple[int, int, int, bool]:
        shard = len(shard_types) if group.state.shard is None else group.state.shard
        return group.state.kind, shard, -group.workers, not group.state.chief

    for group in sorted(groups, key=order):
        for _ in range(group.machines):
            node = free[group.state.kind].pop(0)
            if group.state.shard is not None:
                ps[group.state.shard].append(node)
            workers.extend([node] * group.workers)
            if group.state.chief:
                chief = node
    return Assignment(tuple(node for index in sorted(ps) for node in ps[index]), tuple(workers), chief)
