"""The integer program of the paper 'Dike' (section 3.3, Eq. 1-6) as printed, corrected.

For machines i, parameter servers j and workers k, with P_ij, W_ik and Conn_jk all 0 or 1:

    minimise    sum_j sum_k Mem_j (Conn_jk Cost_in + (1 - Conn_jk) Cost_out)                    Eq. 1
    subject to  sum_j R_jr P_ij + sum_k W_r W_ik <= B_ir          for every i and resource r    Eq. 2
                P_ij, W_ik, Conn_jk in {0, 1}                                                   Eq. 3, 4
                sum_i W_ik = 1                                    for every k                   Eq. 5
                sum_i P_ij = 1                                    for every j                   Eq. 6
                Conn_jk + P_ij - W_ik <= 1                        for every i, j, k             added

The added rows allow Conn_jk = 1 only if ps j and worker k share a machine; without them, as printed, Conn = 1 is
optimal everywhere. Rows for the other direction (Conn_jk >= P_ij + W_ik - 1) are unnecessary, as the objective raises
Conn while Cost_in < Cost_out; other costs are refused. Further rows enforce `ps_per_node` and place the separate chief.

Exact, but slow: N m n rows for N machines, and the linear relaxation is weak, as P = W = 1/N allows Conn = 1
everywhere. `strengthened` adds one row for each ps, which limits its connected workers to those that fit beside it:

    sum_k Conn_jk <= sum_i cap_ij P_ij.
"""

from __future__ import annotations

from dataclasses import dataclass

from solver.formulations import programs
from solver.formulations.instance import Instance, Objective, Solution

from solver import milp
from solver.placement.naming import Assignment


@dataclass(frozen=True)
class Literal:
    """The paper's program; any shards, one Cost_in and one larger Cost_out.

    `strengthened` adds a row for each ps.
    """

    strengthened: bool = False

    @property
    def name(self) -> str:
        return "literal, strengthened" if self.strengthened else "literal"

    @property
    def objective(self) -> Objective:
        return "traffic"

    def refusal(self, instance: Instance) -> str | None:
        """Why it cannot take the instance, as a clause; None if it can."""
        machines = sum(kind.count for kind in instance.kinds)
        workers, ps = instance.workers, len(instance.shards)
        rows = machines * (ps * workers + 5) + workers + ps * (1 + self.strengthened) + 1
        return programs.cost_refusal(instance) or programs.size_refusal(rows)

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Raises OutOfTimeError if the time limit passes without a solution."""
        deadline = programs.deadline_after(time_limit_s)
        builder = milp.MilpBuilder()
        nodes = programs.nodes(instance)
        ps_range, worker_range = range(len(instance.shards)), range(instance.workers)
        ps = [{name: builder.integer(1) for name, _ in nodes} for _ in ps_range]
        workers = [{name: builder.integer(1) for name, _ in nodes} for _ in worker_range]
        chief = {} if instance.chief is None else {name: builder.integer(1) for name, _ in nodes}
        model_saving = programs.saving(instance) / instance.total_bytes
        connected = [[builder.integer(1, model_saving * size) for _ in worker_range] for size in instance.shards]
        for task in (*ps, *workers, *([chief] if chief else [])):
            builder.equation(list(task.values()), 1)
        for name, kind in nodes:
            tasks = [([ps[j][name]], instance.ps[j]) for j in ps_range]
            tasks.append(([worker[name] for worker in workers], instance.worker))
            if instance.chief is not None:
                tasks.append(([chief[name]], instance.chief))
            builder.extend(programs.resource_rows(kind, tasks))
            if instance.ps_per_node is not None:
                builder.row({task[name]: 1.0 for task in ps}, upper=instance.ps_per_node)
            for j in ps_range:
                for k in worker_range:
                    builder.row({connected[j][k]: 1.0, ps[j][name]: 1.0, workers[k][name]: -1.0}, upper=1.0)
        if self.strengthened:
            for task, shared, needs in zip(ps, connected, instance.ps, strict=True):
                beside = programs.capacity(instance, [needs])
                fits = {task[name]: -float(max(0, count)) for name, count in beside.items()}
                builder.row({**dict.fromkeys(shared, 1.0), **fits}, upper=0.0)
        result = programs.run(builder.build(), deadline)
        if result.values is None:
            return None
        named = [programs.expanded(result.values, task)[0] for task in (*ps, *workers)]
        assignment = Assignment(
            ps=tuple(named[: len(ps)]),
            workers=tuple(named[len(ps) :]),
            chief=programs.expanded(result.values, chief)[0] if chief else None,
        )
        bound = programs.traffic_bound(instance, result.bound)
        return programs.checked_solution(instance, assignment, self.objective, result.proven, bound)
