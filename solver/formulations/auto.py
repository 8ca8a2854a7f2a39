"""Chooses the smallest formulation that is exact for an instance."""

from __future__ import annotations

from dataclasses import dataclass

from dike.exceptions import BadInputError
from solver.formulations.class_counts import ClassCounts
from solver.formulations.instance import Formulation, Instance, RackCosts, Solution, UniformCosts
from solver.formulations.node_costs import AnyNodeCosts
from solver.formulations.racks import TwoLevelRacks
from solver.formulations.unequal import UnequalShards

PREFERRED: tuple[Formulation, ...] = (ClassCounts(), UnequalShards(), TwoLevelRacks(), AnyNodeCosts())
"""Formulations, the smallest program first."""


@dataclass(frozen=True)
class FormulationChoice:
    """A formulation with the reason for it.

    Attributes:
        why: its name and the shape of the instance, as a clause for the plan.
    """

    formulation: Formulation
    why: str


def choose(instance: Instance) -> FormulationChoice:
    """Picks a formulation.

    Raises:
        BadInputError: if the instance is too large for all that are exact for it; gives the reason of each.
    """
    refusals = []
    for formulation in PREFERRED:
        refusal = formulation.refusal(instance)
        if refusal is None:
            return FormulationChoice(formulation, f"{formulation.name}: {_shape(instance)}")
        refusals.append(f"{formulation.name}: {refusal}")
    raise BadInputError(
        f"No exact formulation takes {instance.workers} workers and {len(instance.shards)} ps on "
        f"{sum(kind.count for kind in instance.kinds)} machines ({'; '.join(refusals)}); plan for fewer of them."
    )


def solve(instance: Instance, time_limit_s: float | None = None) -> tuple[Solution | None, FormulationChoice]:
    """Solves an instance by the formulation chosen for it.

    Returns:
        The solution, None if it is proven that nothing fits, and the choice.

    Raises:
        BadInputError: if no formulation accepts it.
        OutOfTimeError: if the time ended before any solution was found.
    """
    choice = choose(instance)
    return choice.formulation.solve(instance, time_limit_s), choice


def _shape(instance: Instance) -> str:
    shards = "equal shards" if instance.equal_shards else "unequal shards"
    match instance.costs:
        case UniformCosts():
            costs = "uniform cost"
        case RackCosts():
            costs = "costs within and across racks"
        case _:
            costs = "costs by pair of machines"
    return f"{shards}, {costs}"
