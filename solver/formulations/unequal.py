"""Unequal shards, machine by machine: Eq. 1 of the paper 'Dike' with workers counted instead of named.

With n_i workers on machine i and y_ij = P_ij n_i of them beside ps j,

    minimise    Cost_out n M - (Cost_out - Cost_in) sum_ij Mem_j y_ij                  Eq. 1
    subject to  Eq. 2, 5, 6 as in `solver.formulations.counted_workers`
                y_ij <= cap_ij P_ij,  y_ij <= n_i

where cap_ij workers fit on machine i beside ps j. Exact: the objective drives y_ij up to the smaller of its two limits,
which is P_ij n_i. Compared with the paper's literal program the m n binaries Conn and the N m n rows are gone: N (m +
1) integers, N m fractions, N (2 m + 5) rows. Machines are not merged: identical ones make the solver search their
permutations, which class counts avoid.
"""

from __future__ import annotations

from dataclasses import dataclass

from solver.formulations import programs
from solver.formulations.counted_workers import CountedWorkers, binary_types
from solver.formulations.instance import Instance, Objective, Solution


def add_local_workers(program: CountedWorkers, instance: Instance, value: float) -> list[dict[str, int]]:
    """Adds y_ij.

    Returns:
        For each type of ps, machine -> y_ij.
    """
    builder = program.builder
    local = [
        {
            name: builder.fraction(max(0, count), value * shard.size_bytes / instance.total_bytes)
            for name, count in fits.items()
        }
        for shard, fits in zip(program.types, program.beside, strict=True)
    ]
    for here, shared, fits in zip(program.ps, local, program.beside, strict=True):
        for name, count in fits.items():
            builder.row({shared[name]: 1.0, here[name]: -float(max(0, count))}, upper=0.0)
            builder.row({shared[name]: 1.0, program.workers[name]: -1.0}, upper=0.0)
    return local


def size_refusal(instance: Instance) -> str | None:
    """Why the program is not built, as a clause; None if it is."""
    machines = sum(kind.count for kind in instance.kinds)
    return programs.size_refusal(machines * (2 * len(binary_types(instance)) + 5))


@dataclass(frozen=True)
class UnequalShards:
    """Workers counted on every machine, parameter servers named; any shards, one Cost_in and one larger Cost_out."""

    name: str = "unequal shards"
    objective: Objective = "traffic"

    def refusal(self, instance: Instance) -> str | None:
        return programs.cost_refusal(instance) or size_refusal(instance)

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        deadline = programs.deadline_after(time_limit_s)
        program = CountedWorkers.of(instance)
        add_local_workers(program, instance, programs.saving(instance))
        result = programs.run(program.builder.build(), deadline)
        if result.values is None:
            return None
        bound = programs.traffic_bound(instance, result.bound)
        return programs.checked_solution(
            instance, program.assignment(result.values), self.objective, result.proven, bound
        )
