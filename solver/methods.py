"""The methods of planning by name, and the plans they make."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping

from dike.exceptions import BadInputError
from solver.baselines.by_hand import first_fit, sar_basic
from solver.baselines.optimus import optimus
from solver.baselines.setting import BaselineChoice, Setting
from solver.choices import METHODS
from solver.evaluation import RatedPlan, planned_tasks
from solver.options import default_rules
from solver.plan import Option, OptionCounts, Plan
from solver.planner import PlanProgress, make_plan
from solver.request import PlanRequest
from solver.strategies import ALLREDUCE, ONE, PS, why_not

UNKNOWN_GAP = 1.0
"""The gap of a plan whose method gives no bound."""
GAP_TIME_LIMIT_S = 20.0

Planner = Callable[[PlanRequest], Plan]


def _dike_traffic(request: PlanRequest) -> Plan:
    request = dataclasses.replace(request, strategies=frozenset({PS}), shown=frozenset())
    if request.objective == "traffic":
        return make_plan(request)
    # Eq. 1 alone is least with one worker; rules meant for speed do not have the paper's lower bound.
    is_default = request.rules is None or request.rules == default_rules("throughput")
    rules = None if is_default else (request.rules or frozenset()) | {"all_gpus_used"}
    return make_plan(dataclasses.replace(request, objective="traffic", rules=rules))


def _without_ps(strategy: str, request: PlanRequest) -> Plan:
    if reason := why_not(request.profile, strategy):
        raise BadInputError(f"{request.profile.name} cannot train so: {reason}.")
    if strategy not in request.strategies | request.shown:
        raise BadInputError(f"The request asks for other tasks: {', '.join(sorted(request.strategies))}.")
    if strategy == ONE and request.min_workers > 1 and request.strategy != ALLREDUCE:
        raise BadInputError(f"The request asks for at least {request.min_workers} workers.")
    fewest = 1 if strategy == ONE else max(2, request.min_workers)
    only = dataclasses.replace(request, strategies=frozenset({strategy}), shown=frozenset(), min_workers=fewest)
    plan = make_plan(dataclasses.replace(only, objective="throughput"))
    # The best of its strategy; nothing is known about its distance from plans of other strategies.
    return dataclasses.replace(plan, method=strategy, optimal=False, gap=UNKNOWN_GAP)


def baseline_plan(
    method: str,
    description: str,
    choose: Callable[[Setting], BaselineChoice],
    request: PlanRequest,
    *,
    proven: bool = False,
) -> Plan:
    """Makes a plan of what a baseline chooses.

    Args:
        method: the baseline's name.
        description: what it does, as a clause for the plan's reasons.
        choose: the baseline.
        request: what to plan.
        proven: whether no plan inside the request's rules is faster.
    """
    started = time.monotonic()
    setting = Setting.of(request)
    choice = choose(setting)
    rated = RatedPlan.of(setting.scenario, choice.assignment, choice.shape)
    sizes, shards, worth = setting.scenario.sizes, rated.shards, rated.worth
    return Plan(
        profile=request.profile,
        option=Option(
            workers=len(choice.assignment.workers),
            ps=len(choice.assignment.ps),
            worker=sizes.worker(rated.shape),
            ps_task=sizes.ps(shards.sizes[0]),
            chief=sizes.chief,
        ),
        tasks=planned_tasks(rated),
        variables=shards.variables,
        step_time_s=worth.step_time,
        samples_per_s=worth.samples_per_s,
        traffic_bytes=worth.traffic_bytes,
        objective="throughput",
        optimal=proven,
        gap=0.0 if proven else UNKNOWN_GAP,
        solve_time_s=time.monotonic() - started,
        options=OptionCounts(choice.compared, {}, choice.compared, choice.compared),
        why=tuple(sentence for sentence in (f"{method}: {description}.", choice.note) if sentence) + request.notes,
        formulation=f"method {method}",
        method=method,
        byte_imbalance=shards.byte_imbalance,
        request_imbalance=shards.request_imbalance,
    )


def _baseline(method: str, choose: Callable[[Setting], BaselineChoice]) -> Planner:
    return functools.partial(baseline_plan, method, METHODS[method], choose)


PLANNERS: Mapping[str, Planner] = {
    "dike": make_plan,
    "dike_traffic": _dike_traffic,
    "one": functools.partial(_without_ps, ONE),
    "allreduce": functools.partial(_without_ps, ALLREDUCE),
    "sar_basic": _baseline("sar_basic", sar_basic),
    "first_fit": _baseline("first_fit", first_fit),
    "optimus": _baseline("optimus", optimus),
}
"""Method -> planner. Plans of baselines have `UNKNOWN_GAP`; benchmarks add further methods."""


def plan_with(
    method: str,
    request: PlanRequest,
    on_progress: Callable[[PlanProgress], None] | None = None,
    planners: Mapping[str, Planner] = PLANNERS,
) -> Plan:
    """Plans by one method.

    All but `dike` and `dike_traffic` plan for speed whatever the request's objective, keep its limits, and apply the
    first two rules only. `Plan.gap` is the distance from the best plan inside the request's rules.

    Args:
        method: its name.
        request: what to plan.
        on_progress: receives the plan before its gap is computed, which can take longer.
        planners: the known methods.

    Raises:
        BadInputError: if the method is unknown, the request invalid, or the cluster too large for the method.
        InfeasibleError: if the method finds no placement.
    """
    check_methods([method], planners)
    plan = planners[method](request)
    if on_progress is not None:
        on_progress(PlanProgress(plan, placed=0))
    if plan.gap < UNKNOWN_GAP:
        return plan
    limit_s = GAP_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    among = request.strategies | {plan.strategy}
    best = make_plan(
        dataclasses.replace(request, objective="throughput", time_limit_s=limit_s, strategies=among, shown=frozenset())
    )
    # The planner prefers a simple plan to one that is a little faster.
    fastest = max([best.samples_per_s, *(other.samples_per_s for other in best.alternatives)])
    why = plan.why
    ps_nodes = [task.node for task in plan.tasks if task.role == "ps"]
    if plan.samples_per_s > fastest and len(set(ps_nodes)) < len(ps_nodes):
        why = (*why, "It is faster than any plan inside the rules: parameter servers share machines here.")
    gap = max(0.0, 1 - plan.samples_per_s / fastest * (1 - best.gap))
    return dataclasses.replace(plan, optimal=gap == 0, gap=gap, why=why)


def check_methods(names: Iterable[str], planners: Mapping[str, Planner] = PLANNERS) -> None:
    """Raises `BadInputError` if one of them is not a method."""
    for name in names:
        if name not in planners:
            raise BadInputError(f"There is no method '{name}'; there are {', '.join(planners)}.")
