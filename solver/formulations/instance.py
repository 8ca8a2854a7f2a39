"""The placement problem of one option as plain data, and what an answer to it is worth.

The paper 'Dike' (section 3.3, Eq. 1-6) places n workers and m parameter servers on N machines. The instance holds what
its equations name: B_ir are the machines' resources, W_r and R_jr those of a worker and of each ps, Mem_j the shard of
ps j, Cost_in and Cost_out the weights of a byte that stays on a machine and of one that leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.resources import TaskResources
from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE


class Costs(Protocol):
    """Weight of one byte between two tasks, by their machines."""

    def between(self, first: str, second: str) -> float:
        """The weight; the same in both directions."""
        ...


@dataclass(frozen=True)
class UniformCosts:
    """Eq. 1's Cost_in and Cost_out: a byte stays on its machine or leaves it."""

    within_node: float = COST_WITHIN_NODE
    between_nodes: float = COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        return self.within_node if first == second else self.between_nodes


@dataclass(frozen=True)
class RackCosts:
    """Two levels: bytes that stay on a machine, in its rack, or cross racks.

    Attributes:
        rack_of: machine -> rack.
        within_node: weight on one machine.
        within_rack: weight between machines of one rack.
        across_racks: weight between racks.
    """

    rack_of: Mapping[str, str | None]
    within_node: float = COST_WITHIN_NODE
    within_rack: float = COST_BETWEEN_NODES
    across_racks: float = 4 * COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        if first == second:
            return self.within_node
        return self.within_rack if self.rack_of[first] == self.rack_of[second] else self.across_racks


@dataclass(frozen=True)
class NodeCosts:
    """Any cost for any two machines: the paper's Costout_jk.

    Attributes:
        pairs: (machine, machine) -> weight; each pair once, in either order.
        within_node: weight on one machine.
        otherwise: weight of pairs that are not listed.
    """

    pairs: Mapping[tuple[str, str], float]
    within_node: float = COST_WITHIN_NODE
    otherwise: float = COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        if first == second:
            return self.within_node
        return self.pairs.get((first, second), self.pairs.get((second, first), self.otherwise))


@dataclass(frozen=True)
class Instance:
    """One option, to be placed.

    Attributes:
        kinds: the machines, those alike together.
        worker: resources of each worker.
        workers: how many.
        shards: bytes on each ps, largest first.
        ps: resources of each ps, in the order of `shards`.
        chief: resources of the separate chief, which moves no shards; None where there is none.
        ps_per_node: most parameter servers on one machine (the paper's third rule says 1); None for no limit, as in
            Eq. 1-6.
        costs: weights of the bytes.
    """

    kinds: tuple[NodeKind, ...]
    worker: TaskResources
    workers: int
    shards: tuple[int, ...]
    ps: tuple[TaskResources, ...]
    chief: TaskResources | None = None
    ps_per_node: int | None = 1
    costs: Costs = field(default_factory=UniformCosts)

    @property
    def total_bytes(self) -> int:
        return sum(self.shards)

    @property
    def equal_shards(self) -> bool:
        """Whether parameter servers can change places: equal sizes and equal resources."""
        return len(set(self.shards)) == 1 and len(set(self.ps)) == 1


@dataclass(frozen=True)
class Solution:
    """An answer.

    Attributes:
        assignment: machine of every task.
        traffic_bytes: Eq. 1, in weighted bytes per step of every worker (one direction).
        network_s: seconds in which the busiest network card moves its bytes, both ways, for one step of every worker.
        proven: whether no placement is better by the formulation's objective.
        bound: no placement has a smaller objective; equal to it where `proven`.
    """

    assignment: Assignment
    traffic_bytes: float
    network_s: float
    proven: bool
    bound: float


class Formulation(Protocol):
    """One way to write the problem down; each is exact for the instances it takes."""

    @property
    def name(self) -> str:
        """What the plan and the command line call it."""
        ...

    def refusal(self, instance: Instance) -> str | None:
        """Why it cannot take the instance, as a clause; None if it can."""
        ...

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Solves it.

        Returns:
            The answer, as good as the time allowed; None if it is proven that nothing fits.

        Raises:
            OutOfTimeError: if the time was over before there was any answer.
        """
        ...


def traffic_bytes(instance: Instance, assignment: Assignment) -> float:
    """Eq. 1 of an assignment, in weighted bytes: sum over ps j and workers k of Mem_j times the cost between them."""
    workers = counted(assignment.workers)
    return sum(
        size * count * instance.costs.between(ps_node, node)
        for ps_node, size in zip(assignment.ps, instance.shards, strict=True)
        for node, count in workers.items()
    )


def network_s(instance: Instance, assignment: Assignment) -> float:
    """Seconds the busiest network card takes: 2 max(S_i (n - a_i), a_i (M - S_i)) / speed (docs/solver.md)."""
    workers = counted(assignment.workers)
    stored: dict[str, int] = {}
    for node, size in zip(assignment.ps, instance.shards, strict=True):
        stored[node] = stored.get(node, 0) + size
    total, count = instance.total_bytes, instance.workers
    speed = {name: kind.network_bytes_per_s for kind in instance.kinds for name in kind.names}
    busiest = 0.0
    for node in stored.keys() | workers.keys():
        held, near = stored.get(node, 0), workers.get(node, 0)
        busiest = max(busiest, 2 * max(held * (count - near), near * (total - held)) / speed[node])
    return busiest


def counted(names: Sequence[str]) -> dict[str, int]:
    """How often each name occurs, in order of first occurrence."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def misfit(instance: Instance, assignment: Assignment) -> str | None:
    """What is wrong with an assignment - a task too many, a machine too full; None if it keeps Eq. 2-6."""
    if (len(assignment.ps), len(assignment.workers)) != (len(instance.shards), instance.workers):
        return f"{len(assignment.ps)} ps and {len(assignment.workers)} workers are placed"
    if (assignment.chief is None) != (instance.chief is None):
        return "the chief is missing" if assignment.chief is None else "there is a chief too many"
    tasks: dict[str, list[TaskResources]] = {}
    for node, task in zip(assignment.ps, instance.ps, strict=True):
        tasks.setdefault(node, []).append(task)
    for node in assignment.workers:
        tasks.setdefault(node, []).append(instance.worker)
    if assignment.chief is not None and instance.chief is not None:
        tasks.setdefault(assignment.chief, []).append(instance.chief)
    kind_of = {name: kind for kind in instance.kinds for name in kind.names}
    for node, here in tasks.items():
        if node not in kind_of:
            return f"'{node}' is no machine"
        if kind_of[node].room_for(instance.worker, here) < 0:
            return f"'{node}' is too small for its {len(here)} tasks"
    if instance.ps_per_node is not None:
        crowded = [node for node, count in counted(assignment.ps).items() if count > instance.ps_per_node]
        if crowded:
            return f"'{crowded[0]}' has more than {instance.ps_per_node} ps"
    return None
