"""The placement problem of one option as plain data, and the value of a solution.

The paper 'Dike' (section 3.3, Eq. 1-6) places n workers and m parameter servers on N machines. The instance has the
terms of its equations: B_ir are the machines' resources, W_r and R_jr those of a worker and of each ps, Mem_j the shard
of ps j, Cost_in and Cost_out the weights of a byte that stays on a machine and of one that leaves it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dike.exceptions import BadInputError
from solver.costs import Costs, NodeCosts, RackCosts, UniformCosts
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.resources import TaskResources

__all__ = [
    "Costs",
    "Formulation",
    "Instance",
    "NodeCosts",
    "Objective",
    "RackCosts",
    "Solution",
    "UniformCosts",
    "card_s",
    "counted",
    "network_s",
    "traffic_bytes",
    "violation",
]

Objective = Literal["traffic", "network"]
"""Objective of a formulation, minimised: Eq. 1, or the time of the busiest network card and then Eq. 1."""


@dataclass(frozen=True)
class Instance:
    """One option to place.

    Attributes:
        kinds: the machines, identical ones together.
        shards: bytes on each ps, largest first.
        ps: resources of each ps, in the order of `shards`.
        chief: resources of the separate chief, which moves no shards; None if there is none.
        ps_per_node: maximum parameter servers on one machine (1 by the paper's third rule); None for no limit, as in
            Eq. 1-6.
    """

    kinds: tuple[NodeKind, ...]
    worker: TaskResources
    workers: int
    shards: tuple[int, ...]
    ps: tuple[TaskResources, ...]
    chief: TaskResources | None = None
    ps_per_node: int | None = 1
    costs: Costs = field(default_factory=UniformCosts)

    def __post_init__(self) -> None:
        if not self.shards or self.workers < 1:
            raise BadInputError(
                f"{len(self.shards)} ps and {self.workers} workers are not a job; give at least 1 of each."
            )
        if len(self.ps) != len(self.shards):
            raise BadInputError(f"There are {len(self.shards)} shards but {len(self.ps)} ps; give each shard its ps.")

    @functools.cached_property
    def total_bytes(self) -> int:
        """Size of all shards; cached, as it is used very often."""
        return sum(self.shards)

    @property
    def equal_shards(self) -> bool:
        """Whether all parameter servers are interchangeable: equal sizes and equal resources."""
        return len(set(self.shards)) == 1 and len(set(self.ps)) == 1


@dataclass(frozen=True)
class Solution:
    """A solution.

    `proven` and `bound` refer to the formulation's objective: the traffic, or the busiest network card.

    Attributes:
        traffic_bytes: Eq. 1, in weighted bytes per step of every worker (one direction).
        network_s: seconds in which the busiest network card moves its bytes, both ways, for one step of every worker.
        proven: whether it is proven optimal.
        bound: lower bound of the objective; equal to it if `proven`.
    """

    assignment: Assignment
    traffic_bytes: float
    network_s: float
    proven: bool
    bound: float


class Formulation(Protocol):
    """A formulation of the problem, exact for the instances that it accepts."""

    @property
    def name(self) -> str:
        """Name in plans and on the command line."""
        ...

    @property
    def objective(self) -> Objective: ...

    def refusal(self, instance: Instance) -> str | None:
        """Why it does not accept the instance, as a clause; None if it does."""
        ...

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Solves the instance.

        Returns:
            The best solution within the time; None if it is proven that nothing fits.

        Raises:
            OutOfTimeError: if the time ended before any solution was found.
        """
        ...


def traffic_bytes(instance: Instance, assignment: Assignment) -> float:
    """Eq. 1 of an assignment, in weighted bytes: sum over ps j and workers k of Mem_j times the cost between them."""
    return instance.costs.total(_stored(instance, assignment), counted(assignment.workers))


def network_s(instance: Instance, assignment: Assignment) -> float:
    """Seconds of the busiest network card: 2 max(S_i (n - a_i), a_i (M - S_i)) / speed (docs/planner.md)."""
    stored, workers = _stored(instance, assignment), counted(assignment.workers)
    speed = {name: kind.network_bytes_per_s for kind in instance.kinds for name in kind.names}
    return max(
        card_s(instance, stored.get(node, 0), workers.get(node, 0), speed[node])
        for node in stored.keys() | workers.keys()
    )


def _stored(instance: Instance, assignment: Assignment) -> dict[str, int]:
    stored: dict[str, int] = {}
    for node, size in zip(assignment.ps, instance.shards, strict=True):
        stored[node] = stored.get(node, 0) + size
    return stored


def card_s(instance: Instance, stored: int, workers: int, bytes_per_s: float) -> float:
    """Seconds of the network card of a machine with these shard bytes and workers."""
    leaving = stored * (instance.workers - workers)
    arriving = workers * (instance.total_bytes - stored)
    return 2 * max(leaving, arriving) / bytes_per_s


def counted(names: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def violation(instance: Instance, assignment: Assignment) -> str | None:
    """The violation of Eq. 2-6 by an assignment, such as an overfull machine; None if it is valid."""
    if (len(assignment.ps), len(assignment.workers)) != (len(instance.shards), instance.workers):
        return f"{len(assignment.ps)} ps and {len(assignment.workers)} workers are placed"
    if (assignment.chief is None) != (instance.chief is None):
        return "the chief is missing" if assignment.chief is None else "there is an extra chief"
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
            return f"'{node}' is not a machine"
        if kind_of[node].room_for(instance.worker, here) < 0:
            return f"'{node}' is too small for its {len(here)} tasks"
    if instance.ps_per_node is not None:
        crowded = [node for node, count in counted(assignment.ps).items() if count > instance.ps_per_node]
        if crowded:
            return f"'{crowded[0]}' has more than {instance.ps_per_node} ps"
    return None
