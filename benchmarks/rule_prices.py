"""Measures the speed that each pruning rule costs: plans with the rules, and with each rule toggled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dike.exceptions import BadInputError
from framework.project.profiling import load_profile
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.choices import RULES
from solver.options import PAPER, default_rules
from solver.planner import DEFAULT_TIME_LIMIT_S
from solver.request import check_request
from solver.units import GIB

TITLE = "What the rules cost"
MODELS = ("ResNet50", "VGG16")
SPEEDS_GBPS = (1.0, 10.0)
TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class RulePrice:
    """The cost of one rule.

    Attributes:
        applied: whether the request's plan keeps it.
        inside: speed (objective `traffic`: weighted bytes) of the best plan that keeps it; None if there is none.
        outside: the same without the rule.
        cost: relative loss of speed, or increase of traffic, by the rule; at least 0.
        proven: whether both plans are optimal.
        reason: why there is no cost; empty otherwise.
    """

    rule: str
    applied: bool
    inside: float | None
    outside: float | None
    cost: float | None
    proven: bool
    reason: str = ""


@dataclass(frozen=True)
class Exploration:
    """Plans inside and outside the rules.

    Attributes:
        best: the best plan found under any rules.
        best_rules: the rules of that plan.
        prices: the cost of each rule, in the order of `RULES`.
    """

    inside: Plan
    best: Plan
    best_rules: frozenset[str]
    prices: tuple[RulePrice, ...]
    time_s: float


def explore(request: PlanRequest) -> Exploration:
    """Plans with the request's rules, then with each rule toggled.

    The request's time limit covers all plans: each gets an equal share of the remaining time.

    Raises:
        InfeasibleError: if no option fits the cluster under any rules.
        BadInputError: if the request is invalid.
    """
    started = time.monotonic()
    check_request(request)
    # The rules apply to jobs with parameter servers only.
    request = dataclasses.replace(request, strategies=frozenset({"ps"}))
    rules = default_rules(request.objective) if request.rules is None else request.rules
    limit_s = DEFAULT_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    changes = list(RULES)
    deadline = started + limit_s

    def plan(chosen: frozenset[str], plans_left: int) -> Plan:
        share = max(0.0, deadline - time.monotonic()) / plans_left
        return make_plan(dataclasses.replace(request, rules=chosen, time_limit_s=share))

    inside = plan(rules, len(changes) + 1)
    found: list[tuple[frozenset[str], Plan]] = [(rules, inside)]
    prices = []
    for index, rule in enumerate(changes):
        changed = rules ^ {rule}
        try:
            other = plan(changed, len(changes) - index)
        except BadInputError as error:
            prices.append(RulePrice(rule, rule in rules, None, None, None, proven=False, reason=str(error)))
            continue
        found.append((changed, other))
        prices.append(_price(rule, inside, other) if rule in rules else _price(rule, other, inside, applied=False))
    best_rules, best = min(found, key=lambda item: _rank(item[1]))
    return Exploration(inside, best, best_rules, tuple(prices), time.monotonic() - started)


def _price(rule: str, inside: Plan, outside: Plan, *, applied: bool = True) -> RulePrice:
    """Compares the best plan that keeps the rule with the best plan without it."""
    if rule not in inside.options.pruned:
        reason = "No plan keeps it: the other tasks do not fit beside the workers."
        return RulePrice(rule, applied, None, _worth(outside), None, proven=False, reason=reason)
    kept, free = _worth(inside), _worth(outside)
    cost = kept / free - 1 if inside.objective == "traffic" else 1 - kept / free
    return RulePrice(rule, applied, kept, free, max(0.0, cost), proven=inside.gap == outside.gap == 0)


def _worth(plan: Plan) -> float:
    return plan.traffic_bytes if plan.objective == "traffic" else plan.samples_per_s


def _rank(plan: Plan) -> float:
    """Smaller is better."""
    return plan.traffic_bytes if plan.objective == "traffic" else -plan.samples_per_s


def measure() -> Iterator[str]:
    """Reports one row for each case, one column for each rule."""
    yield "Five machines of 8 CPUs, 4 K80 and 32 GiB, batch 32 a GPU. Each figure is the share of the speed that the"
    yield f"rule costs, beside the paper's other rules, found in {TIME_LIMIT_S:.0f} s; *so far*: not proven in that"
    yield "time. Plans are up to 5% slower than the fastest, so figures up to that may be the plans' own."
    yield ""
    yield f"| model | training | network | {' | '.join(RULES)} |"
    yield "|---|---|---|" + "---|" * len(RULES)
    for name in MODELS:
        profile = load_profile(f"keras:{name}", batch_size=32)
        for synchronous in (True, False):
            for gbps in SPEEDS_GBPS:
                node = NodeClass(
                    name="k80",
                    count=5,
                    cpus=8,
                    mem_bytes=32 * GIB,
                    gpus=4,
                    gpu_model="K80",
                    disk_bytes=100 * GIB,
                    network_gbps=gbps,
                )
                model = dataclasses.replace(profile, synchronous=synchronous)
                request = PlanRequest(model, Cluster((node,)), time_limit_s=TIME_LIMIT_S, rules=PAPER)
                found = explore(request)
                prices = {price.rule: _shown(price) for price in found.prices}
                how = "synchronous" if synchronous else "asynchronous"
                yield f"| {name} | {how} | {gbps:g} Gb/s | {' | '.join(prices[rule] for rule in RULES)} |"


def _shown(price: RulePrice) -> str:
    if price.cost is None:
        return "-"
    return f"{price.cost:.1%}{'' if price.proven else ' so far'}"
