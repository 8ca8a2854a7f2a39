"""Every method of planning under its name, and the plans they make."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from dike.exceptions import BadInputError
from solver.baselines.by_hand import first_fit, sar_basic, sar_tuned
from solver.baselines.iterative import iterative
from solver.baselines.optimus import optimus
from solver.baselines.setting import Choice, Setting
from solver.choices import METHODS
from solver.evaluation import evaluate, planned_tasks
from solver.options import default_rules
from solver.plan import Option, OptionCounts, Plan
from solver.planner import PlanProgress, make_plan
from solver.request import PlanRequest

NOTHING_PROVEN = 1.0
PROOF_S = 20.0
"""The gap of a plan that nothing is known of."""
_ITERATIVE_SEES = frozenset({"identical_workers", "cpu_gpu_ratio", "task_counts"})
"""All plans inside these rules are among the placements that `iterative` tries."""


def _dike(request: PlanRequest) -> Plan:
    return make_plan(request)


def _dike_traffic(request: PlanRequest) -> Plan:
    if request.objective == "traffic":
        return make_plan(request)
    # Eq. 1 alone is least with one worker; rules meant for speed do not have the paper's lower bound.
    is_default = request.rules is None or request.rules == default_rules("throughput")
    rules = None if is_default else (request.rules or frozenset()) | {"all_gpus_used"}
    return make_plan(dataclasses.replace(request, objective="traffic", rules=rules))


def _plain(request: PlanRequest) -> Plan:
    if request.plain is False:
        raise BadInputError("Parameter servers are asked for, and one plain task has none.")
    plan = make_plan(dataclasses.replace(request, objective="throughput", plain=True))
    # It is the best of its kind; how far it is from others nobody has looked.
    return dataclasses.replace(plan, method="plain", optimal=False, gap=NOTHING_PROVEN)


def plan_with(method: str, request: PlanRequest, on_progress: Callable[[PlanProgress], None] | None = None) -> Plan:
    """Plans by the method of that name.

    All but `dike` and `dike_traffic` plan for speed, whatever the request's objective, keep its limits, and know the
    first two rules only: `Plan.gap` says how far their plans are from the best one inside the request's rules.

    Args:
        method: its name.
        request: what to plan.
        on_progress: told of the plan before its gap is looked for, which can take longer.

    Raises:
        BadInputError: if there is no such method, the request makes no sense, or the cluster is too large for it.
        InfeasibleError: if the method finds no placement.
    """
    check_methods([method])
    plan = PLANNERS[method](request)
    if on_progress is not None:
        on_progress(PlanProgress(plan, placed=0))
    if plan.gap < NOTHING_PROVEN:
        return plan
    limit_s = PROOF_S if request.time_limit_s is None else request.time_limit_s
    best = make_plan(dataclasses.replace(request, objective="throughput", time_limit_s=limit_s))
    # Of options within 1% the planner takes the calmest; another may be a little faster.
    fastest = max([best.samples_per_s, *(other.samples_per_s for other in best.alternatives)])
    why = plan.why
    ps_nodes = [task.node for task in plan.tasks if task.role == "ps"]
    if plan.samples_per_s > fastest and len(set(ps_nodes)) < len(ps_nodes):
        why = (*why, "It is faster than any plan inside the rules: parameter servers share machines here.")
    gap = max(0.0, 1 - plan.samples_per_s / fastest * (1 - best.gap))
    return dataclasses.replace(plan, optimal=gap == 0, gap=gap, why=why)


def check_methods(names: Sequence[str]) -> None:
    """Raises `BadInputError` if one of them is not a method."""
    for name in names:
        if name not in METHODS:
            raise BadInputError(f"There is no method '{name}'; there are {', '.join(METHODS)}.")


def _plan(method: str, choose: Callable[[Setting], Choice], request: PlanRequest) -> Plan:
    started = time.monotonic()
    setting = Setting.of(request)
    choice = choose(setting)
    scenario, shape, shards = setting.scenario, choice.shape, choice.shards
    worth = evaluate(scenario, shape, shards, choice.assignment)
    rules = default_rules("throughput") if request.rules is None else request.rules
    proven = method == "iterative" and rules >= _ITERATIVE_SEES
    sizes = scenario.sizes
    return Plan(
        profile=request.profile,
        option=Option(
            workers=len(choice.assignment.workers),
            ps=len(choice.assignment.ps),
            worker=sizes.worker(shape),
            ps_task=sizes.ps(shards.sizes[0]),
            chief=sizes.chief,
        ),
        tasks=planned_tasks(scenario, shape, shards, choice.assignment),
        variables=shards.variables,
        step_time_s=worth.step_time,
        samples_per_s=worth.samples_per_s,
        traffic_bytes=worth.traffic_bytes,
        objective="throughput",
        optimal=proven,
        gap=0.0 if proven else NOTHING_PROVEN,
        solve_time_s=time.monotonic() - started,
        options=OptionCounts(choice.compared, {}, choice.compared, choice.compared),
        why=tuple(sentence for sentence in (f"{method}: {METHODS[method]}.", choice.note) if sentence) + request.notes,
        formulation=f"method {method}",
        method=method,
        byte_imbalance=shards.byte_imbalance,
        request_imbalance=shards.request_imbalance,
    )


PLANNERS: dict[str, Callable[[PlanRequest], Plan]] = {
    "dike": _dike,
    "dike_traffic": _dike_traffic,
    "plain": _plain,
    "iterative": functools.partial(_plan, "iterative", iterative),
    "sar_tuned": functools.partial(_plan, "sar_tuned", sar_tuned),
    "sar_basic": functools.partial(_plan, "sar_basic", sar_basic),
    "first_fit": functools.partial(_plan, "first_fit", first_fit),
    "optimus": functools.partial(_plan, "optimus", optimus),
}
"""Method -> what makes its plan; a plan of another author than Dike does not know how good it is (`NOTHING_PROVEN`)."""
