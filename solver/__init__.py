"""Decides how many tasks a training job gets, their sizes, their roles and their machines.

Names are imported on first access, so reading a plan does not import the planner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solver.choices import Objective
    from solver.cluster import Cluster, NodeClass
    from solver.plan import Alternative, Option, OptionCounts, Plan, PlannedTask
    from solver.planner import make_plan, smallest_job
    from solver.request import PlanRequest
    from solver.resources import TaskResources
    from solver.step_time import StepTime

__all__ = [
    "Alternative",
    "Cluster",
    "NodeClass",
    "Objective",
    "Option",
    "OptionCounts",
    "Plan",
    "PlanRequest",
    "PlannedTask",
    "StepTime",
    "TaskResources",
    "make_plan",
    "smallest_job",
]

_MODULES = {
    "solver.choices": ("Objective",),
    "solver.cluster": ("Cluster", "NodeClass"),
    "solver.plan": ("Alternative", "Option", "OptionCounts", "Plan", "PlannedTask"),
    "solver.planner": ("make_plan", "smallest_job"),
    "solver.request": ("PlanRequest",),
    "solver.resources": ("TaskResources",),
    "solver.step_time": ("StepTime",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
