"""Initial placements for a search: results of the baselines that are fast enough."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import InfeasibleError
from solver.baselines.by_hand import first_fit, sar_basic
from solver.baselines.optimus import optimus
from solver.baselines.setting import BaselineChoice, Setting
from solver.request import PlanRequest
from solver.resources import CPU_STEP
from solver.scenario import Scenario

_MAX_MACHINES: dict[Callable[[Setting], BaselineChoice], int] = {sar_basic: 100_000, first_fit: 300, optimus: 40}
"""Baseline -> maximum number of machines on which it is quick."""


def incumbents(request: PlanRequest, scenario: Scenario) -> list[BaselineChoice]:
    """Placements of the quick baselines, except those with too few or too small workers."""
    machines = sum(kind.count for kind in scenario.kinds)
    try:
        setting = Setting.of(request, scenario)
    except InfeasibleError:
        return []
    found = []
    for method, most in _MAX_MACHINES.items():
        if machines > most:
            continue
        try:
            choice = method(setting)
        except InfeasibleError:
            continue
        # On very small machines their slices are below the planner's smallest worker.
        if len(choice.assignment.workers) >= request.min_workers and choice.shape.cpus >= CPU_STEP:
            found.append(choice)
    return found
