"""Converts counts of machines to named tasks on named machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver.nodes import NodeKind
from solver.placement.class_counts import Group
from solver.placement.problem import ShardType
from solver.resources import WorkerShape


@dataclass(frozen=True)
class Assignment:
    """Machine of every task, by index of the task.

    Attributes:
        ps: machines of the parameter servers; ps 0 has the largest shard.
        workers: machines of the workers.
        chief: machine of the separate chief; None if there is none.
        shapes: shape of each worker; empty if all have the option's shape.
    """

    ps: tuple[str, ...]
    workers: tuple[str, ...]
    chief: str | None
    shapes: tuple[WorkerShape, ...] = ()

    def shapes_of_workers(self, shape: WorkerShape) -> tuple[WorkerShape, ...]:
        """Shape of each worker; `shape` if the assignment has none."""
        return self.shapes or (shape,) * len(self.workers)


def assign(groups: Sequence[Group], kinds: Sequence[NodeKind], shard_types: Sequence[ShardType]) -> Assignment:
    """Gives each group its machines, in the order of the cluster, parameter servers and the busiest machines first."""
    no_shard = (len(shard_types),)
    free = [iter(kind.names) for kind in kinds]
    ps: dict[int, list[str]] = {index: [] for index in range(len(shard_types))}
    workers: list[str] = []
    shapes: list[WorkerShape] = []
    chief: str | None = None

    def order(group: Group) -> tuple[int, tuple[int, ...], int, bool]:
        return group.state.kind, group.state.shards or no_shard, -group.workers, not group.state.chief

    for group in sorted(groups, key=order):
        for _ in range(group.machines):
            node = next(free[group.state.kind])
            for shard in group.state.shards:
                ps[shard].append(node)
            workers.extend([node] * group.workers)
            shapes.extend([group.state.shape] * group.workers)
            if group.state.chief:
                chief = node
    of_ps = tuple(node for index in sorted(ps) for node in ps[index])
    return Assignment(of_ps, tuple(workers), chief, tuple(shapes))
