"""Machines grouped by their resources: identical ones are one kind, whatever their names or classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver.cluster import Cluster
from solver.resources import Amounts, TaskResources
from solver.units import BYTES_PER_S_PER_GBPS, MIB


@dataclass(frozen=True)
class NodeKind:
    """Identical machines.

    Attributes:
        gpu_model: their model; None if there are none or it is unknown.
        rack: their rack, if racks matter.
    """

    cpu_millis: int
    mem_mb: int
    disk_mb: int
    gpus: int
    gpu_model: str | None
    network_bytes_per_s: float
    rack: str | None
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def cpus(self) -> float:
        return self.cpu_millis / 1000

    @property
    def amounts(self) -> Amounts:
        """All four resources of one empty machine."""
        return self.cpu_millis, self.mem_mb, self.disk_mb, self.gpus

    def room_for(self, task: TaskResources, taken: Sequence[TaskResources] = ()) -> int:
        """Number of such tasks that fit on one machine beside `taken`; -1 if `taken` itself does not fit."""
        free = (
            (self.cpu_millis - sum(other.cpu_millis for other in taken), task.cpu_millis),
            (self.mem_mb - sum(other.mem_mb for other in taken), task.mem_mb),
            (self.disk_mb - sum(other.disk_mb for other in taken), task.disk_mb),
            (self.gpus - sum(other.gpus for other in taken), task.gpus),
        )
        if any(left < 0 for left, _ in free):
            return -1
        return min(left // need for left, need in free if need > 0)


def node_kinds(cluster: Cluster) -> tuple[NodeKind, ...]:
    """The cluster's machines by kind, in order of first occurrence; without classes of no machine."""
    groups: dict[tuple[int, int, int, int, str | None, float, str | None], list[str]] = {}
    for node in cluster.nodes:
        key = (
            math.floor(node.cpus * 1000 + 1e-6),
            node.mem_bytes // MIB,
            node.disk_bytes // MIB,
            node.gpus,
            node.gpu_model if node.gpus else None,
            node.network_gbps * BYTES_PER_S_PER_GBPS,
            node.rack if cluster.across_racks_gbps is not None else None,
        )
        groups.setdefault(key, []).extend(node.node_names)
    return tuple(NodeKind(*key, names=tuple(names)) for key, names in groups.items() if names)
