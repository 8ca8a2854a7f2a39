"""Any cost for any pair of machines: Eq. 1 of the paper 'Dike' with its Costout_jk.

The cost of a byte depends on both machines, so the objective is a product of two decisions: with P_ij = 1 where machine
i holds ps j, n_l workers on machine l, and c_il the cost between the two (Cost_in where i = l),

    minimise    sum_ijl Mem_j c_il v_ijl              where v_ijl = P_ij n_l
    subject to  Eq. 2, 5, 6                           as in `solver.formulations.counted_workers`
                v_ijl <= cap_ijl P_ij                                                     (McCormick, 1976)
                sum_l v_ijl = n P_ij                  Eq. 5 times P_ij                    (RLT)
                sum_i v_ijl = n_l                     Eq. 6 times n_l                     (RLT)

cap_ijl workers fit on machine l, beside ps j where l = i. Exact for costs of any sign: where P_ij = 0 the first row
makes v_ijl 0, and then the last one leaves all n_l to the machine with ps j. The last two rows are the
reformulation-linearisation technique (Adams and Sherali, 1986); without them the relaxation proves next to nothing.
Where equal parameter servers share their variables, their number multiplies n_l in the last row, and v_ijl <= n_l
(McCormick's other row) divides n_l among them.

N^2 m fractions and about as many rows. This is the hard case: with all GPUs used 100 machines take under a second, but
with half of them idle 50 machines are not proven in a minute, as choosing the machines then resembles a densest
subgraph problem.
"""

from __future__ import annotations

from dataclasses import dataclass

from solver.formulations import programs
from solver.formulations.counted_workers import CountedWorkers, binary_types
from solver.formulations.instance import Instance, Objective, Solution

MAX_PRODUCTS = 200_000
"""Maximum number of products P_ij n_l in a program."""


@dataclass(frozen=True)
class AnyNodeCosts:
    """Costs by pair of machines; uniform costs and racks are special cases."""

    name: str = "node-to-node costs"
    objective: Objective = "traffic"

    def refusal(self, instance: Instance) -> str | None:
        products = sum(kind.count for kind in instance.kinds) ** 2 * len(binary_types(instance))
        if products > MAX_PRODUCTS:
            return f"the program would have {products:,} products, more than {MAX_PRODUCTS:,}"
        return None

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        deadline = programs.deadline_after(time_limit_s)
        program = CountedWorkers.of(instance)
        highest = max(abs(instance.costs.between(a, b)) for a in program.room for b in program.room) or 1.0
        unit = highest * instance.total_bytes
        _add_products(program, instance, unit)
        result = programs.run(program.builder.build(), deadline)
        if result.values is None:
            return None
        assignment = program.assignment(result.values)
        return programs.checked_solution(instance, assignment, self.objective, result.proven, -unit * result.bound)


def _add_products(program: CountedWorkers, instance: Instance, unit: float) -> None:
    """Adds v_ijl with its rows, its cost in units of `unit` weighted bytes."""
    builder, room = program.builder, program.room
    for shard, here, beside in zip(program.types, program.ps, program.beside, strict=True):
        by_worker_node: dict[str, list[int]] = {name: [] for name in room}
        for holder, holds in here.items():
            products = []
            for node, count in room.items():
                most = max(0, beside[holder] if node == holder else count)
                cost = shard.size_bytes * instance.costs.between(holder, node) / unit
                product = builder.fraction(most, -cost)
                builder.row({product: 1.0, holds: -float(most)}, upper=0.0)
                if len(shard.members) > 1:
                    builder.row({product: 1.0, program.workers[node]: -1.0}, upper=0.0)
                products.append(product)
                by_worker_node[node].append(product)
            builder.row({**dict.fromkeys(products, 1.0), holds: -float(instance.workers)}, 0.0, 0.0)
        for node, products in by_worker_node.items():
            total = {**dict.fromkeys(products, 1.0), program.workers[node]: -float(len(shard.members))}
            builder.row(total, 0.0, 0.0)
