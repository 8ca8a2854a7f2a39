"""Common parts of the integer programs: Eq. 2, interchangeable parameter servers, and solutions from values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from solver import milp
from solver.formulations.instance import (
    Instance,
    Objective,
    Solution,
    UniformCosts,
    network_s,
    traffic_bytes,
    violation,
)
from solver.nodes import NodeKind
from solver.placement.fastest import OutOfTimeError
from solver.placement.naming import Assignment
from solver.resources import TaskResources

MAX_ROWS = 300_000
"""Maximum rows of a program; with more, reading it takes the solver minutes and gigabytes."""


@dataclass(frozen=True)
class ShardGroup:
    """Interchangeable parameter servers."""

    size_bytes: int
    task: TaskResources
    members: tuple[int, ...]


def shard_types(instance: Instance) -> tuple[ShardGroup, ...]:
    """The parameter servers by shard and resources, in order of first occurrence."""
    types: dict[tuple[int, TaskResources], list[int]] = {}
    for index, alike in enumerate(zip(instance.shards, instance.ps, strict=True)):
        types.setdefault(alike, []).append(index)
    return tuple(ShardGroup(size, task, tuple(members)) for (size, task), members in types.items())


def nodes(instance: Instance) -> list[tuple[str, NodeKind]]:
    return [(name, kind) for kind in instance.kinds for name in kind.names]


def room(instance: Instance, kind: NodeKind, taken: Sequence[TaskResources] = ()) -> int:
    """Workers of the instance that fit on such a machine beside `taken`; -1 if `taken` does not fit."""
    return min(instance.workers, kind.room_for(instance.worker, taken))


def capacity(instance: Instance, taken: Sequence[TaskResources] = ()) -> dict[str, int]:
    """`room` of every machine."""
    fits: dict[str, int] = {}
    for kind in instance.kinds:
        fits |= dict.fromkeys(kind.names, room(instance, kind, taken))
    return fits


def resource_rows(kind: NodeKind, tasks: Sequence[tuple[Sequence[int], TaskResources]]) -> Iterator[milp.LinearRow]:
    """Eq. 2 for one machine: sum_j R_jr P_ij + sum_k W_r W_ik <= B_ir for each resource r in use.

    Args:
        kind: the machine.
        tasks: variables that count tasks on it, and the needs of each of these tasks.
    """
    for resource in ("cpu_millis", "mem_mb", "disk_mb", "gpus"):
        needs = {
            variable: getattr(task, resource)
            for variables, task in tasks
            if getattr(task, resource)
            for variable in variables
        }
        if needs:
            # Coefficients without a common factor are the least sensitive to the solver's tolerance.
            unit = math.gcd(*needs.values())
            yield milp.LinearRow(
                {variable: need / unit for variable, need in needs.items()}, upper=getattr(kind, resource) // unit
            )


def saving(instance: Instance) -> float:
    """Cost_out - Cost_in: savings of a byte that stays on its machine."""
    assert isinstance(instance.costs, UniformCosts)
    return instance.costs.between_nodes - instance.costs.within_node


def traffic_bound(instance: Instance, saved: float) -> float:
    """Lower bound of Eq. 1 if at most `saved` is saved, in units of the cost of one whole model."""
    assert isinstance(instance.costs, UniformCosts)
    return instance.total_bytes * (instance.costs.between_nodes * instance.workers - saved)


def cost_refusal(instance: Instance) -> str | None:
    """Why a formulation that rewards local bytes does not accept the costs; None if it does."""
    if not isinstance(instance.costs, UniformCosts):
        return "costs differ by pair of machines"
    if saving(instance) <= 0:
        return "a byte that leaves its machine must cost more than one that stays"
    return None


def size_refusal(rows: int) -> str | None:
    """Why a program with this number of rows is not built; None if it is."""
    return f"the program would have {rows:,} rows, more than {MAX_ROWS:,}" if rows > MAX_ROWS else None


def deadline_after(time_limit_s: float | None) -> float | None:
    """The end of a time limit on `time.monotonic`'s clock; None for none."""
    return None if time_limit_s is None else time.monotonic() + time_limit_s


def run(program: milp.Milp, deadline: float | None) -> milp.MilpResult:
    """Solves a program by the deadline.

    Returns:
        A result with values, or the proof that there is none.

    Raises:
        OutOfTimeError: if there was neither in time.
    """
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    result = milp.solve(program, left)
    if result.values is None and not result.proven:
        raise OutOfTimeError
    return result


def expanded(values: Sequence[int], variables: Mapping[str, int]) -> list[str]:
    """Machines, each repeated by the value of its variable."""
    return [node for node, variable in variables.items() for _ in range(values[variable])]


def checked_solution(
    instance: Instance, assignment: Assignment, objective: Objective, proven: bool, bound: float
) -> Solution:
    """Builds the solution of an assignment and validates it; `bound` may be too large by a rounding error.

    Raises:
        SolverError: if the assignment violates one of Eq. 2-6: a fault of the solver or of the program.
    """
    wrong = violation(instance, assignment)
    if wrong is not None:
        raise milp.SolverError(f"The solver's placement is wrong: {wrong}; report this as a bug.")
    traffic, network = traffic_bytes(instance, assignment), network_s(instance, assignment)
    value = traffic if objective == "traffic" else network
    return Solution(assignment, traffic, network, proven, bound=value if proven else max(0.0, min(bound, value)))
