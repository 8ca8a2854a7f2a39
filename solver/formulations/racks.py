"""Racks, exactly: a (max,+) dynamic program over machines and racks.

Eq. 1 of the paper 'Dike' (section 3.3) has two distances, on a machine and off it. Here there are three: on machine i,
in rack r, across racks, with the costs c_node, c_rack, c_across. For m equal shards of s bytes, n workers, q_i
parameter servers and a_i workers on machine i, q_r and a_r in rack r, and M = m s:

    cost = c_across n M  -  (c_across - c_rack) s sum_r q_r a_r  -  (c_rack - c_node) s sum_i q_i a_i

since every pair in one rack saves c_across - c_rack, and c_rack - c_node more if it shares a machine. The savings are a
sum over the nodes of a tree - machines, racks - so the tables of `solver.racks.max_plus` are exact:

    machine  best[c, q, a] = (c_rack - c_node) q a    if c chiefs, q ps and a workers fit (Eq. 2), else -inf
    rack     best[c, q, a] = (c_across - c_rack) q a + max over all ways to split c, q, a among its machines
    all      best[c, m, n] = max over all ways to split c, m, n among the racks

Eq. 1's own two costs are the case of one rack. Size: sets of machines have at most (m + 1) (n + 1) states, twice that
with a separate chief; identical machines and identical racks share their tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.formulations.instance import (
    Instance,
    Objective,
    RackCosts,
    Solution,
    UniformCosts,
    network_s,
    traffic_bytes,
)
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.racks.max_plus import Table
from solver.racks.tree import Load, RackTree

MAX_STATES = 1_500_000
"""Maximum size of a table; that takes some 15 seconds."""


@dataclass(frozen=True)
class TwoLevelRacks:
    """Least Eq. 1 traffic with costs by machine and rack; equal shards."""

    name: str = "two-level racks"
    objective: Objective = "traffic"

    def refusal(self, instance: Instance) -> str | None:
        if not isinstance(instance.costs, RackCosts | UniformCosts):
            return "costs differ from pair to pair of machines"
        if not instance.equal_shards:
            return "shards differ in size or in what their ps need"
        if isinstance(instance.costs, RackCosts):
            unknown = [name for kind in instance.kinds for name in kind.names if name not in instance.costs.rack_of]
            if unknown:
                return f"the rack of '{unknown[0]}' is not given"
        states = _largest_table(instance)
        if states > MAX_STATES:
            return f"a table would have {states} states, more than {MAX_STATES}"
        return None

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Solves the instance; there is no intermediate solution."""
        deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        costs = instance.costs
        assert isinstance(costs, RackCosts | UniformCosts)
        rack_of = costs.rack_of if isinstance(costs, RackCosts) else {}
        tree = RackTree(
            (rack_of.get(name), rooms, [name])
            for kind in instance.kinds
            for rooms in [_rooms(instance, kind)]
            for name in kind.names
        )
        if isinstance(costs, RackCosts):
            node_saving, rack_saving = costs.within_rack - costs.within_node, costs.across_racks - costs.within_rack
        else:
            node_saving, rack_saving = costs.between_nodes - costs.within_node, 0.0
        tables = [_machine_table(rooms, node_saving) for rooms in tree.machine_types]
        goal = (0 if instance.chief is None else 1, len(instance.shards), instance.workers)

        def in_rack(machines: Table, counts: Sequence[NDArray[np.int64]]) -> Table:
            _, ps, workers = counts
            return machines + rack_saving * (ps * workers)

        best = tree.best(tables, in_rack, goal, deadline)
        if best is None:
            return None
        assignment = _assignment(tree.loads(best))
        traffic = traffic_bytes(instance, assignment)
        return Solution(assignment, traffic, network_s(instance, assignment), proven=True, bound=traffic)


Rooms = tuple[tuple[int, ...], ...]
"""Maximum workers on a machine by number of chiefs and of ps beside them; -1 where those do not fit."""


def _rooms(instance: Instance, kind: NodeKind) -> Rooms:
    most_ps = len(instance.shards) if instance.ps_per_node is None else min(instance.ps_per_node, len(instance.shards))
    chiefs = [[]] if instance.chief is None else [[], [instance.chief]]
    return tuple(
        tuple(
            min(instance.workers, kind.room_for(instance.worker, [*chief, *instance.ps[:count]]))
            for count in range(most_ps + 1)
        )
        for chief in chiefs
    )


def _machine_table(rooms: Rooms, saving: float) -> Table:
    """Eq. 2 and the savings on one machine, in shards."""
    most = max(max(row) for row in rooms)
    workers = np.arange(most + 1)
    room = np.array(rooms)[:, :, None]
    held = np.arange(len(rooms[0]))[None, :, None]
    return np.where(workers <= room, saving * held * workers, -np.inf)


def _largest_table(instance: Instance) -> int:
    """States of half the machines for the goal: no union on the way has many more."""
    free = [(kind.count, _rooms(instance, kind)) for kind in instance.kinds]
    states = 1 if instance.chief is None else 2
    most_ps = [(count, max(q for q, room in enumerate(rooms[0]) if room >= 0)) for count, rooms in free]
    most_workers = [(count, rooms[0][0]) for count, rooms in free]
    for goal, most in ((len(instance.shards), most_ps), (instance.workers, most_workers)):
        half = sum(count * each for count, each in most) / 2
        states *= max(1, math.ceil(min(goal, half) - max(0.0, goal - half)) + 1)
    return states


def _assignment(loads: Sequence[Load]) -> Assignment:
    chief, ps, workers = ([load.node for load in loads for _ in range(load.state[kind])] for kind in range(3))
    return Assignment(tuple(ps), tuple(workers), chief[0] if chief else None)
