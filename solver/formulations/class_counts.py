"""Counts of machines by class and configuration: the production form of Eq. 1-6 with one Cost_in and one Cost_out.

With Conn_jk = 1 exactly where ps j and worker k share a machine, Eq. 1 of the paper 'Dike' is

    cost = Cost_out n M - (Cost_out - Cost_in) sum_i S_i a_i

for n workers, M bytes in all, S_i shard bytes and a_i workers on machine i. The savings of machine i depend on its
shards and its number of workers alone, workers are identical, and so are machines of a class; so only the number of
machines in each configuration matters (`solver.formulations.configurations` has the program and its proof; here value_g
= (Cost_out - Cost_in) S_g and the limits are 0 and the workers that fit).

With equal shards a configuration is a number of parameter servers, and 16,000 machines take tens of columns. Unequal
shards are accepted too as long as machines can hold them in few ways: with one ps per machine that is one way for each
shard size.
"""

from __future__ import annotations

from dataclasses import dataclass

from solver.formulations import programs
from solver.formulations.configurations import TOO_MANY, Configurations
from solver.formulations.instance import Instance, Objective, Solution, UniformCosts


@dataclass(frozen=True)
class ClassCounts:
    """Integer count of machines per class and configuration."""

    name: str = "class counts"
    objective: Objective = "traffic"

    def refusal(self, instance: Instance) -> str | None:
        if not isinstance(instance.costs, UniformCosts):
            return "costs differ by pair of machines"
        return TOO_MANY if Configurations.of(instance) is None else None

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        deadline = programs.deadline_after(time_limit_s)
        configurations = Configurations.of(instance)
        assert configurations is not None, TOO_MANY
        model_saving = programs.saving(instance) / instance.total_bytes
        assignment, result = configurations.solve(
            lambda entry: model_saving * entry.stored_bytes,
            [(0, entry.most) for entry in configurations.entries],
            deadline,
        )
        if assignment is None:
            return None
        bound = programs.traffic_bound(instance, result.bound)
        return programs.checked_solution(instance, assignment, self.objective, result.proven, bound)
