"""Decides how many tasks a training job gets, of what size, in which role and on which machine."""

from __future__ import annotations

from solver.cluster import Cluster, NodeClass
from solver.plan import Alternative, Option, OptionCounts, Plan, PlannedTask
from solver.planner import Objective, PlanRequest, make_plan, smallest_job
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
