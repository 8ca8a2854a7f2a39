"""Racks: the regions of a cluster to which a job may be confined, and the cost of crossing racks."""

from __future__ import annotations

from collections.abc import Sequence

from solver.cluster import Cluster
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.units import BYTES_PER_S_PER_GBPS

Region = tuple[NodeKind, ...]


def regions(kinds: Sequence[NodeKind]) -> tuple[Region, ...]:
    """Each rack by itself (machines without one as one more), then the whole cluster; the first of equal plans wins."""
    racks = list(dict.fromkeys(kind.rack for kind in kinds))
    whole = tuple(kinds)
    if len(racks) == 1:
        return (whole,)
    return (*(tuple(kind for kind in kinds if kind.rack == rack) for rack in racks), whole)


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
