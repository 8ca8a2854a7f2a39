"""Makes a plan for a model on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dike.exceptions import InfeasibleError
from solver.baselines.incumbents import incumbents
from solver.evaluation import evaluate, planned_tasks
from solver.gang import SIMPLE_TIE_SHARE
from solver.hardware import Hardware
from solver.milp import SolverError
from solver.nodes import NodeKind
from solver.options import OptionSpace, Pruning, default_rules, prune, raw_space
from solver.plan import Alternative, Option, OptionCounts, Plan
from solver.reasons import reasons
from solver.request import PlanRequest, check_request, scenario_of
from solver.resources import CPU_STEP, TaskResources, TaskSizes, WorkerShape
from solver.scenario import Scenario
from solver.search.candidates import Candidate
from solver.search.option_search import ALTERNATIVES, SPEED_TIE_SHARE, OptionResults, OptionSearch
from solver.search.placer import Solved
from solver.search.relaxation import RelaxedPlan, RelaxedSpace
from solver.shards import useful_ps_count
from solver.shortage import shortage, smallest_tasks
from solver.strategies import ALLREDUCE, ONE, PS
from solver.without_ps import GAP_TOLERANCE, find_without_ps, no_room_without_ps, plan_without_ps, strategy_result

DEFAULT_TIME_LIMIT_S = 60.0
UNRESTRICTED_FIRST_KINDS = 500
"""Number of kinds above which the unrestricted search comes first: if that is much faster than the rules allow, the
search inside the rules is skipped."""
_SIMPLE_RULES = frozenset({"identical_workers", "task_counts"})
"""Rules under which placements are simple."""
SHOWN_TIME_LIMIT_S = 3.0
"""Maximum time for a plan that is only shown beside the chosen one."""
_RELAXATION_RULES = frozenset({"cpu_gpu_ratio"})
"""The only rule under which all placements are searched by relaxation."""


@dataclass(frozen=True)
class PlanProgress:
    """Progress of the planner.

    Attributes:
        plan: the best so far, with its gap and without reasons.
        placed: number of options placed or shown to be too slow.
    """

    plan: Plan
    placed: int


def make_plan(request: PlanRequest, on_progress: Callable[[PlanProgress], None] | None = None) -> Plan:
    """Chooses the option, places it and gives the reasons.

    Args:
        request: the plan request.
        on_progress: called with every plan that is better than the last one.

    Raises:
        InfeasibleError: if no option fits the cluster; names the scarce resource and the amount missing.
        BadInputError: if the request is invalid.
    """
    check_request(request)
    try:
        return _compared(request, _planned(request, on_progress))
    except InfeasibleError as error:
        if not request.task_mem_mb:
            raise
        asked = f"each task requests at least {request.task_mem_mb:,} MiB of memory (--task-mem)"
        raise InfeasibleError(f"{str(error).removesuffix('.')}; {asked}.") from error


def _planned(request: PlanRequest, on_progress: Callable[[PlanProgress], None] | None) -> Plan:
    started = time.monotonic()
    deadline = started + (DEFAULT_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s)
    scenario = scenario_of(request)

    reported_speed = 0.0

    def report(attempt: _Attempt, found: OptionResults) -> None:
        nonlocal reported_speed
        # A part of a search may find a plan that another part has reported already.
        is_better = request.objective != "throughput" or found.best.samples_per_s > reported_speed
        if on_progress is not None and is_better:
            reported_speed = found.best.samples_per_s
            plan = _plan(request, scenario, attempt, found, time.monotonic() - started)
            on_progress(PlanProgress(plan, found.placed))

    without_ps = find_without_ps(request, scenario, request.strategies)
    if PS not in request.strategies:
        if without_ps is None:
            raise no_room_without_ps(request, scenario)
        plan = plan_without_ps(request, scenario, without_ps, None, time.monotonic() - started)
        return dataclasses.replace(plan, strategies=without_ps.results())
    rules = default_rules(request.objective) if request.rules is None else request.rules
    simple_speed = 0.0 if without_ps is None else without_ps.chosen.samples_per_s
    attempt, found = _search(request, scenario, rules, simple_speed, deadline, report)
    notes: tuple[str, ...] = ()
    if found is None and "all_gpus_used" in rules:
        rules -= {"all_gpus_used"}
        attempt, found = _search(request, scenario, rules, simple_speed, deadline, report)
        notes = ("With all GPUs in use the other tasks fit nowhere, so the rule all_gpus_used is not applied.",)
    kinds, hardware, prunings = scenario.kinds, scenario.hardware, attempt.prunings
    if without_ps is not None and (found is None or simple_speed >= found.best.samples_per_s * (1 - SPEED_TIE_SHARE)):
        other = None if found is None else _plan(request, scenario, attempt, found, 0.0)
        plan = plan_without_ps(request, scenario, without_ps, other, time.monotonic() - started)
        results = without_ps.results() if other is None else (*without_ps.results(), strategy_result(other))
        return dataclasses.replace(plan, strategies=results)
    if found is None and request.min_workers > 1:
        raise InfeasibleError(
            f"The machines have no room for {request.min_workers} workers, the minimum; add machines or request fewer."
        )
    if found is None:
        raise shortage(kinds, _space_of_shapes(attempt.raw, prunings), scenario.sizes, hardware)
    unknown = _unknown_gpus(kinds, hardware)
    why = reasons(attempt.search, scenario, found, prunings, request.max_workers, unknown, request.objective)
    calibrated = () if request.calibration is None else request.calibration.sentences()
    plan = _plan(request, scenario, attempt, found, time.monotonic() - started)
    if without_ps is not None:
        simple = "One plain task" if without_ps.chosen.workers == 1 else f"{without_ps.chosen.workers} workers"
        strategy = ONE if without_ps.chosen.workers == 1 else ALLREDUCE
        share = simple_speed / plan.samples_per_s
        alone = f"{simple} without parameter servers would reach {share:.0%} (--strategy {strategy} requests it)."
        why = (*why, alone)
        plan = dataclasses.replace(plan, strategies=(strategy_result(plan), *without_ps.results()))
    return dataclasses.replace(plan, why=(*notes, *why, *calibrated, *request.notes))


def _compared(request: PlanRequest, plan: Plan) -> Plan:
    """Adds the best plan of each strategy that is only shown, and says if parameter servers would be faster."""
    if not request.shown or not request.profile.is_measurable:
        return plan
    results = {one.strategy: one for one in (strategy_result(plan), *plan.strategies)}
    simple = find_without_ps(dataclasses.replace(request, min_workers=1), scenario_of(request), request.shown)
    results |= {} if simple is None else {one.strategy: one for one in simple.results()}
    why = plan.why
    if PS in request.shown:
        limit_s = min(
            SHOWN_TIME_LIMIT_S, DEFAULT_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
        )
        several = dataclasses.replace(
            request, strategies=frozenset({PS}), shown=frozenset(), time_limit_s=limit_s, notes=()
        )
        with contextlib.suppress(InfeasibleError, SolverError):  # it is only shown
            results[PS] = strategy_result(_planned(several, None))
    if PS in results and request.strategy == "auto" and PS not in request.strategies:
        gain = results[PS].samples_per_s / plan.samples_per_s
        if gain > 1 / (1 - SIMPLE_TIE_SHARE):
            how = "Workers" if request.profile.synchronous else "Asynchronous workers"
            why = (
                *why,
                f"{how} with parameter servers (--strategy ps) would train {gain:.1f} times as many samples/s, with "
                "another result.",
            )
    others = sorted(
        (one for one in results.values() if one.strategy != plan.strategy), key=lambda one: -one.samples_per_s
    )
    return dataclasses.replace(plan, why=why, strategies=(results[plan.strategy], *others))


def smallest_job(request: PlanRequest) -> list[tuple[str, TaskResources]]:
    """The minimum resources of a job on these machines: one task of each role, as (display name of the role,
    resources).

    Raises:
        BadInputError: if the request is invalid.
    """
    check_request(request)
    scenario = scenario_of(request)
    # One task also runs without additional GPUs.
    simple = find_without_ps(dataclasses.replace(request, max_gpus_per_task=1), scenario, request.strategies)
    if simple is not None or PS not in request.strategies:
        gpus = 0 if simple is None else (simple.one or simple.chosen).resources.gpus
        name = "task" if ONE in request.strategies and request.min_workers == 1 else "worker"
        return [(name, scenario.sizes.plain(WorkerShape(gpus, CPU_STEP)))]
    rules = default_rules(request.objective) if request.rules is None else request.rules
    raw, prunings = _pruned(request, scenario, rules | _SIMPLE_RULES)
    return smallest_tasks(scenario.kinds, _space_of_shapes(raw, prunings), scenario.sizes)


def _space_of_shapes(raw: OptionSpace, prunings: Sequence[Pruning]) -> OptionSpace:
    """The space with the remaining worker shapes, before it is limited to those that fit."""
    tried = [pruning.space for pruning in prunings if pruning.rule in ("identical_workers", "cpu_gpu_ratio")]
    return tried[-1] if tried else raw


@dataclass(frozen=True)
class _Attempt:
    """One search: all options, those that the rules leave, and the search that compares them."""

    raw: OptionSpace
    space: OptionSpace
    prunings: tuple[Pruning, ...]
    search: OptionSearch | None = None


_Report = Callable[["_Attempt", OptionResults], None]


def _pruned(request: PlanRequest, scenario: Scenario, rules: frozenset[str]) -> tuple[OptionSpace, tuple[Pruning, ...]]:
    raw = raw_space(scenario.kinds, request.max_workers, request.max_gpus_per_worker, request.min_workers)
    machines = sum(kind.count for kind in scenario.kinds)
    useful_ps = useful_ps_count(request.profile, machines, request.sharding)
    return raw, prune(raw, rules, scenario.kinds, scenario.hardware, scenario.sizes, useful_ps)


def _search(
    request: PlanRequest,
    scenario: Scenario,
    rules: frozenset[str],
    throughput_floor: float,
    deadline: float,
    report: _Report,
    *,
    only_promising: bool = False,
) -> tuple[_Attempt, OptionResults | None]:
    raw, prunings = _pruned(request, scenario, rules)
    space = prunings[-1].space if prunings else raw
    known: tuple[Solved, ...] = ()
    if rules <= _RELAXATION_RULES and request.objective == "throughput":
        return _search_unrestricted(
            request, scenario, rules, _Attempt(raw, space, prunings), throughput_floor, deadline, report
        )
    if not rules >= _SIMPLE_RULES:
        # Options that these two rules forbid take longer to place; first search inside them, for comparison.
        inside = _search(request, scenario, rules | _SIMPLE_RULES, throughput_floor, deadline, _unproven(report))[
            0
        ].search
        known = () if inside is None else inside.placed

    def on_better(found: OptionResults) -> None:
        report(attempt, found)

    search = OptionSearch(
        scenario,
        space,
        ps_may_share="task_counts" not in rules,
        known=known,
        throughput_floor=throughput_floor,
        on_better=on_better,
    )
    attempt = _Attempt(raw, space, prunings, search)
    if request.objective == "throughput":
        return attempt, search.fastest(deadline, only_promising=only_promising)
    return attempt, search.least_traffic(deadline)


def _unproven(report: _Report) -> _Report:
    """Sets the gap to 1, as a proof about a part is none about the whole."""
    return lambda attempt, found: report(attempt, dataclasses.replace(found, gap=1.0))


def _search_unrestricted(
    request: PlanRequest,
    scenario: Scenario,
    rules: frozenset[str],
    whole: _Attempt,
    throughput_floor: float,
    deadline: float,
    report: _Report,
) -> tuple[_Attempt, OptionResults | None]:
    """Finds the best of all placements: one inside the paper's rules, unless another is faster by over 1%."""
    space = RelaxedSpace(scenario, whole.space)
    starts = incumbents(request, scenario)
    relaxed, bound = None, math.inf
    if len(scenario.kinds) > UNRESTRICTED_FIRST_KINDS:
        relaxed, bound = space.best(0.0, deadline, starts)
    inside, found, known = None, None, 0.0
    if relaxed is None or _ps_speed_bound(request, scenario) >= relaxed.samples_per_s * (1 - SPEED_TIE_SHARE):
        # First only the few most promising options, as a start for the relaxation.
        inside, found = _search(
            request, scenario, rules | _SIMPLE_RULES, throughput_floor, deadline, _unproven(report), only_promising=True
        )
        search = inside.search
        assert search is not None
        if relaxed is None:
            relaxed, bound = space.best(search.speed, deadline, starts)
        if relaxed is not None:
            report(
                whole,
                OptionResults(_solved(relaxed, bound), (), 1 - relaxed.samples_per_s / max(bound, search.speed), 1),
            )
            search.throughput_floor = max(throughput_floor, relaxed.samples_per_s * (1 - SPEED_TIE_SHARE))
        found = search.fastest(deadline)
        known = search.speed
    if relaxed is not None and (
        found is None or relaxed.samples_per_s * (1 - SPEED_TIE_SHARE) > found.best.samples_per_s
    ):
        others = () if found is None else (found.best, *found.others)
        found = OptionResults(_solved(relaxed, bound), others, 1.0, 1 if found is None else found.placed + 1)
    if found is None:
        assert inside is not None
        return inside, None
    gap = 1 - max(known, 0.0 if relaxed is None else relaxed.samples_per_s) / max(known, bound)
    whole = dataclasses.replace(whole, search=None if inside is None else inside.search)
    return whole, dataclasses.replace(found, gap=gap if gap > SPEED_TIE_SHARE else 0.0)


def _ps_speed_bound(request: PlanRequest, scenario: Scenario) -> float:
    """Upper bound of samples/s for plans inside the paper's rules: the capacity of their parameter servers."""
    profile = scenario.profile
    if profile.synchronous:
        return math.inf
    machines = sum(kind.count for kind in scenario.kinds)
    ps = useful_ps_count(profile, machines, request.sharding)
    model = scenario.model(WorkerShape(0, 1.0))
    steps = max(model.shared(model.load(scenario.shards(count))).max_steps_per_s for count in range(1, ps + 1))
    return steps * profile.batch_size * max(1, max(kind.gpus for kind in scenario.kinds))


def _solved(relaxed: RelaxedPlan, bound: float) -> Solved:
    worth, shapes = relaxed.worth, tuple(dict.fromkeys(relaxed.assignment.shapes))
    workers, ps = len(relaxed.assignment.workers), len(relaxed.shards.sizes)
    return Solved(
        candidate=Candidate(0, shapes, workers, ps, bound, 0.0, mixed=True),
        assignment=relaxed.assignment,
        formulation="Lagrangian relaxation: machines may have several ps, workers may differ",
        cycle_s=worth.cycle_s,
        network_s=worth.step_time.network,
        round_s=worth.step_time.total,
        samples_per_s=worth.samples_per_s,
        traffic_bytes=worth.traffic_bytes,
        samples_bound=bound,
    )


def _plan(
    request: PlanRequest, scenario: Scenario, attempt: _Attempt, found: OptionResults, solve_time_s: float
) -> Plan:
    """Builds the plan of a search result, without reasons."""
    best, sizes = found.best, scenario.sizes
    shape, shards = best.shape, scenario.shards(best.candidate.ps)
    worth = evaluate(scenario, shape, shards, best.assignment)
    return Plan(
        profile=request.profile,
        option=Option(
            best.candidate.workers, best.candidate.ps, sizes.worker(shape), sizes.ps(shards.sizes[0]), sizes.chief
        ),
        tasks=planned_tasks(scenario, shape, shards, best.assignment),
        variables=shards.variables,
        step_time_s=worth.step_time,
        samples_per_s=best.samples_per_s,
        traffic_bytes=worth.traffic_bytes,
        objective=request.objective,
        optimal=found.gap <= GAP_TOLERANCE,
        gap=found.gap if found.gap > GAP_TOLERANCE else 0.0,
        solve_time_s=solve_time_s,
        options=OptionCounts(
            generated=attempt.raw.count,
            pruned={pruning.rule: pruning.removed for pruning in attempt.prunings},
            considered=attempt.space.count,
            solved=found.placed,
        ),
        alternatives=tuple(_alternative(other, best, sizes) for other in found.others[:ALTERNATIVES]),
        formulation=best.formulation,
        byte_imbalance=shards.byte_imbalance,
        request_imbalance=shards.request_imbalance,
    )


def _alternative(other: Solved, best: Solved, sizes: TaskSizes) -> Alternative:
    return Alternative(
        workers=other.candidate.workers,
        ps=other.candidate.ps,
        worker=sizes.worker(other.shape),
        samples_per_s=other.samples_per_s,
        traffic_bytes=other.traffic_bytes,
        relative=other.samples_per_s / best.samples_per_s,
    )


def _unknown_gpus(kinds: Sequence[NodeKind], hardware: Hardware) -> tuple[str, ...]:
    models = {kind.gpu_model or "not given" for kind in kinds if kind.gpus and not hardware.knows(kind.gpu_model)}
    return tuple(sorted(models))
