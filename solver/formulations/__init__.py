"""The ways to write the placement problem down, each exact for what it takes, behind one interface.

`FORMULATIONS` has them by name; `auto.choose` picks one by the shape of the instance.
"""

from __future__ import annotations

from solver.formulations.class_counts import ClassCounts
from solver.formulations.instance import Formulation, Instance, Objective, Solution, misfit, network_s, traffic_bytes
from solver.formulations.literal import Literal
from solver.formulations.min_max import MinMaxCounts, MinMaxShards
from solver.formulations.node_costs import AnyNodeCosts
from solver.formulations.racks import TwoLevelRacks
from solver.formulations.unequal import UnequalShards

__all__ = [
    "FORMULATIONS",
    "AnyNodeCosts",
    "ClassCounts",
    "Formulation",
    "Instance",
    "Literal",
    "MinMaxCounts",
    "MinMaxShards",
    "Objective",
    "Solution",
    "TwoLevelRacks",
    "UnequalShards",
    "misfit",
    "network_s",
    "traffic_bytes",
]

_ALL: tuple[Formulation, ...] = (
    Literal(),
    Literal(strengthened=True),
    ClassCounts(),
    UnequalShards(),
    TwoLevelRacks(),
    AnyNodeCosts(),
    MinMaxCounts(),
    MinMaxShards(),
)
FORMULATIONS: dict[str, Formulation] = {formulation.name: formulation for formulation in _ALL}
"""All of them, from the paper's own to those that minimise the busiest card."""
