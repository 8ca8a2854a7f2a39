"""Integer programs for the placement problem, each exact for the instances that it accepts, behind one interface.

`auto.choose` picks one for an instance.
"""

from __future__ import annotations

from solver.formulations.auto import PREFERRED
from solver.formulations.instance import Formulation, Instance, Objective, Solution, misfit, network_s, traffic_bytes

__all__ = [
    "FORMULATIONS",
    "Formulation",
    "Instance",
    "Objective",
    "Solution",
    "misfit",
    "network_s",
    "traffic_bytes",
]

FORMULATIONS: dict[str, Formulation] = {formulation.name: formulation for formulation in PREFERRED}
"""Formulations by name, the smallest program first."""
