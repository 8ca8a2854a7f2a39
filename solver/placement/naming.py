"""Tasks on named machines, and what crosses racks there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver.cluster import Cluster
from solver.nodes import NodeKind
from solver.placement.class_counts import Group
from solver.placement.problem import ShardType
from solver.resources import WorkerShape
from solver.units import BYTES_PER_S_PER_GBPS


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


def uplink_s(
    cluster: Cluster, assignment: Assignment, shard_bytes: Sequence[int], rack_of: dict[str, str | None]
) -> float:
    """Seconds of the busiest rack's uplink while every worker makes one step; 0 if racks do not matter."""
    if cluster.across_racks_gbps is None:
        return 0.0
    stored: dict[str | None, int] = {}
    workers: dict[str | None, int] = {}
    for node, size in zip(assignment.ps, shard_bytes, strict=True):
        stored[rack_of[node]] = stored.get(rack_of[node], 0) + size
    for node in assignment.workers:
        workers[rack_of[node]] = workers.get(rack_of[node], 0) + 1
    total, count = sum(shard_bytes), len(assignment.workers)
    busiest = 0
    for rack in stored.keys() | workers.keys():
        here, near = stored.get(rack, 0), workers.get(rack, 0)
        busiest = max(busiest, here * (count - near), near * (total - here))
    return 2 * busiest / (cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS)
