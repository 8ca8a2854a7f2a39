"""The plan request: the model, the machines and the constraints of the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.choices import MAX_TASK_MEM_MIB, Objective, Sharding, Strategy
from solver.cluster import Cluster
from solver.hardware import known_hardware
from solver.options import check_rules, default_rules
from solver.scenario import Scenario
from solver.shards import DEFAULT_SHARDING
from solver.strategies import ALLREDUCE, ONE, PS

if TYPE_CHECKING:
    from solver.calibration import Calibration


@dataclass(frozen=True)
class PlanRequest:
    """A plan request.

    Attributes:
        objective: `throughput` for the shortest step, `traffic` for the least of the paper's Eq. 1 alone.
        time_limit_s: time after which the planner stops improving; the first placement found is always finished.
        rules: names of the pruning rules that apply (`solver.choices.RULES`); None for the objective's default.
        calibration: corrections of the speeds by measurements; None for the table's speeds.
        strategies: the strategies to choose from (`solver.choices.STRATEGIES`): `one`, `allreduce`, `ps`; not empty.
        shown: strategies that are planned briefly, to be shown beside the chosen one.
        strategy: the user's choice, for messages.
        task_mem_mb: minimum memory of each task, in MiB; 0 for the needs of its role.
    """

    profile: ModelProfile
    cluster: Cluster
    objective: Objective = "throughput"
    max_workers: int | None = None
    time_limit_s: float | None = None
    max_gpus_per_worker: int | None = None
    rules: frozenset[str] | None = None
    sharding: Sharding = DEFAULT_SHARDING
    calibration: Calibration | None = None
    min_workers: int = 1
    strategies: frozenset[str] = frozenset({"ps"})
    shown: frozenset[str] = frozenset()
    strategy: Strategy = "auto"
    max_gpus_per_task: int = 1
    task_mem_mb: int = 0
    notes: tuple[str, ...] = ()


def check_request(request: PlanRequest) -> None:
    """Raises `BadInputError` if the request is invalid."""
    if request.objective not in ("throughput", "traffic"):
        raise BadInputError(f"'{request.objective}' is not an objective; use throughput or traffic.")
    for name in ("min_workers", "max_workers", "max_gpus_per_worker", "max_gpus_per_task"):
        limit = getattr(request, name)
        if limit is not None and limit < 1:
            raise BadInputError(f"'{name}' is {limit}; it must be at least 1.")
    if request.max_workers is not None and request.max_workers < request.min_workers:
        raise BadInputError(f"'min_workers' is {request.min_workers}; it must not be above 'max_workers'.")
    if not 0 <= request.task_mem_mb <= MAX_TASK_MEM_MIB:
        raise BadInputError(f"'task_mem_mb' is {request.task_mem_mb}; it must be from 0 to {MAX_TASK_MEM_MIB}.")
    limit_s = request.time_limit_s
    if limit_s is not None and not 0 <= limit_s < math.inf:
        raise BadInputError(f"'time_limit_s' is {limit_s:g}; it must be at least 0.")
    rules = default_rules(request.objective) if request.rules is None else request.rules
    check_rules(sorted(rules))
    if not request.strategies or not request.strategies <= {ONE, ALLREDUCE, PS}:
        raise BadInputError("'strategies' must be one or more of one, allreduce and ps.")
    if request.profile.why_alone and PS in request.strategies:
        raise BadInputError(f"The request is for a plan of several tasks. {request.profile.why_alone}")
    if "all_gpus_used" in rules and "identical_workers" not in rules:
        raise BadInputError("The rule 'all_gpus_used' needs the rule 'identical_workers'; add it, or leave both out.")


def scenario_of(request: PlanRequest) -> Scenario:
    """The request's model on its cluster, with calibrated speeds."""
    hardware, cluster = known_hardware(), request.cluster
    if request.calibration is not None:
        hardware, cluster = request.calibration.apply(hardware, cluster)
    return Scenario.of(request.profile, cluster, hardware, request.sharding, request.task_mem_mb)
