"""Planning methods that only evaluations need, in addition to those of `dike plan --method`."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planning_methods.exhaustive import iterative
from benchmarks.planning_methods.static_allocation import sar_tuned
from solver.methods import PLANNERS, Planner, baseline_plan
from solver.options import default_rules
from solver.plan import Plan
from solver.request import PlanRequest

_RULES_OF_ITERATIVE = frozenset({"identical_workers", "cpu_gpu_ratio", "task_counts"})
"""`iterative` tries every plan that keeps these rules."""


def _iterative(request: PlanRequest) -> Plan:
    rules = default_rules("throughput") if request.rules is None else request.rules
    description = "every placement of every option, for small clusters"
    return baseline_plan("iterative", description, iterative, request, proven=rules >= _RULES_OF_ITERATIVE)


def _sar_tuned(request: PlanRequest) -> Plan:
    return baseline_plan("sar_tuned", "the best option, with its tasks on the machines in turn", sar_tuned, request)


ALL_PLANNERS: Mapping[str, Planner] = {
    **{name: PLANNERS[name] for name in ("dike", "dike_traffic", "one", "allreduce")},
    "iterative": _iterative,
    "sar_tuned": _sar_tuned,
    **{name: PLANNERS[name] for name in ("sar_basic", "first_fit", "optimus")},
}
"""Method -> planner, in the order of the published tables."""
