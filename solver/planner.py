"""Makes a plan for a model on a cluster.

A plan with parameter servers (ps) is the simplest that is at most 5% slower than the fastest found: fewest tasks, then
fewest machines. `solver.search.relaxation` finds the fastest and a bound of any speed, `solver.search.simplest` the
simplest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dike.exceptions import InfeasibleError
from solver.evaluation import RatedPlan, planned_tasks
from solver.hardware import Hardware
from solver.milp import SolverError
from solver.nodes import NodeKind
from solver.options import OptionSpace, default_rules, prune, raw_space, without_spare_cpus
from solver.plan import Alternative, Option, OptionCounts, Plan
from solver.reasons import reasons
from solver.request import PlanRequest, check_request, scenario_of
from solver.resources import CPU_STEP, TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.search.least_traffic import least_traffic
from solver.search.relaxation import fastest
from solver.search.simplest import Simplest
from solver.search.space import Space, has_similar_workers
from solver.shards import useful_ps_count
from solver.shortage import shortage, smallest_tasks
from solver.strategies import ALLREDUCE, ONE, PS
from solver.units import SIMPLE_TIE_SHARE, SPEED_TIE_SHARE
from solver.without_ps import (
    ALTERNATIVES,
    GAP_TOLERANCE,
    find_without_ps,
    no_room_without_ps,
    plan_without_ps,
    strategy_result,
)

DEFAULT_TIME_LIMIT_S = 60.0
SHOWN_TIME_LIMIT_S = 3.0
"""Maximum time for a plan that is only shown beside the chosen one."""
SIMPLEST_TIME_LIMIT_S = 5.0
"""Maximum time for the search for the simplest plan, once the fastest is known."""
PS_CPU_FACTORS = (1, 2, 4, 8)
"""CPUs of a ps that are tried, in multiples of the fewest: two ps on a machine are no faster than one with their CPUs
(`benchmarks/ps_update.py`)."""


@dataclass(frozen=True)
class PlanProgress:
    """Progress of the planner.

    Attributes:
        plan: the best so far, with its gap and without reasons.
        placed: number of placements that were faster than all before.
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
    without_ps = find_without_ps(request, scenario, request.strategies)
    if PS not in request.strategies:
        if without_ps is None:
            raise no_room_without_ps(request, scenario)
        plan = plan_without_ps(request, scenario, without_ps, None, time.monotonic() - started)
        return dataclasses.replace(plan, strategies=without_ps.results())
    rules = default_rules(request.objective) if request.rules is None else request.rules
    search = _Search(request, scenario, rules, started, on_progress)
    found = search.run(deadline)
    notes: tuple[str, ...] = ()
    if found is None and "all_gpus_used" in rules:
        search = _Search(request, scenario, rules - {"all_gpus_used"}, started, on_progress)
        found = search.run(deadline)
        notes = ("With all GPUs in use the other tasks fit nowhere, so the rule all_gpus_used is not applied.",)
    simple_speed = 0.0 if without_ps is None else without_ps.chosen.samples_per_s
    if without_ps is not None and (found is None or simple_speed >= found.best.samples_per_s * (1 - SPEED_TIE_SHARE)):
        other = None if found is None else search.plan(found)
        plan = plan_without_ps(request, scenario, without_ps, other, time.monotonic() - started)
        results = without_ps.results() if other is None else (*without_ps.results(), strategy_result(other))
        return dataclasses.replace(plan, strategies=results)
    if found is None and request.min_workers > 1:
        raise InfeasibleError(
            f"The machines have no room for {request.min_workers} workers, the minimum; add machines or request fewer."
        )
    if found is None:
        raise shortage(scenario.kinds, search.space_of_shapes, scenario.sizes, scenario.hardware)
    unknown = _unknown_gpus(scenario.kinds, scenario.hardware)
    why = reasons(found.best, found.fastest, search.prunings, request.max_workers, unknown, request.objective)
    calibrated = () if request.calibration is None else request.calibration.sentences()
    plan = search.plan(found)
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
    search = _Search(request, scenario, rules | {"identical_workers"}, 0.0, None)
    return smallest_tasks(scenario.kinds, search.space_of_shapes, scenario.sizes)


@dataclass(frozen=True)
class _Found:
    """Result of a search.

    Attributes:
        fastest: the fastest placement that was found; with the objective `traffic` the same as `best`.
        others: other placements, best first.
        gap: maximum improvement by another placement, as a share of the best possible.
        placed: number of placements examined.
    """

    best: RatedPlan
    fastest: RatedPlan
    others: tuple[RatedPlan, ...]
    gap: float
    placed: int


class _Search:
    """Searches the plans with parameter servers that some rules allow."""

    def __init__(
        self,
        request: PlanRequest,
        scenario: Scenario,
        rules: frozenset[str],
        started: float,
        on_progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self._request, self._scenario = request, scenario
        self._started, self._on_progress = started, on_progress
        kinds = scenario.kinds
        self._raw = raw_space(kinds, request.max_workers, request.max_gpus_per_worker, request.min_workers)
        useful_ps = useful_ps_count(request.profile, sum(kind.count for kind in kinds), request.sharding)
        self.prunings = prune(self._raw, rules, kinds, scenario.hardware, scenario.sizes, useful_ps)
        self._space = self.prunings[-1].space

    @property
    def space_of_shapes(self) -> OptionSpace:
        """The options with the remaining worker shapes, before they are limited to those that fit."""
        tried = [pruning.space for pruning in self.prunings if pruning.rule in ("identical_workers", "cpu_gpu_ratio")]
        return tried[-1] if tried else self._raw

    def run(self, deadline: float) -> _Found | None:
        """Finds the best plan; None if nothing fits. The first placement is always finished."""
        return self._least_traffic(deadline) if self._request.objective == "traffic" else self._simplest(deadline)

    def _least_traffic(self, deadline: float) -> _Found | None:
        regions = list(_regions(self._scenario))[:-1]
        found = least_traffic(self._scenario, regions, self._space, deadline)
        if found.best is None:
            return None
        gap = 1 - found.bound / found.best.worth.traffic_bytes if found.best.worth.traffic_bytes else 0.0
        result = _Found(found.best, found.best, found.others, gap, found.solved)
        self._report(result)
        return result

    def _simplest(self, deadline: float) -> _Found | None:
        spaces = list(self._spaces())
        placed = 0

        def report(plan: RatedPlan, bound: float) -> None:
            nonlocal placed
            placed += 1
            self._report(_Found(plan, plan, (), _gap(plan, bound), placed))

        # Bounds are closest where all workers have GPUs, so good placements are found there first.
        with_gpus = [space for space in spaces if space.gpu_shapes and space.cpu_workers]
        first = fastest([space.without_cpu_workers() for space in with_gpus], 0.0, deadline, report)
        result = fastest(spaces, 0.0 if first.best is None else first.best.samples_per_s, deadline, report).after(first)
        best = result.best
        if best is None:
            return None
        # If possible the plan is proven to be within 5% of any other.
        floor = result.bound * (1 - SIMPLE_TIE_SHARE)
        if floor > best.samples_per_s:
            floor = best.samples_per_s * (1 - SIMPLE_TIE_SHARE)
        enough = [plan for plan in (*result.of_counts.values(), best) if plan.samples_per_s >= floor]
        until = min(deadline, time.monotonic() + SIMPLEST_TIME_LIMIT_S)
        simplest = self._with_spare_cpus(Simplest(spaces, enough, floor, until).find())
        others = _diverse([best, *result.of_counts.values()], simplest)
        return _Found(simplest, best, others, _gap(simplest, result.bound), result.rated)

    def _with_spare_cpus(self, plan: RatedPlan) -> RatedPlan:
        """Gives the workers with GPUs the CPUs that no other task uses, as far as the rules allow: the prediction of
        what they need is not exact.
        """
        assignment, sizes, kind_of = plan.assignment, plan.scenario.sizes, plan.scenario.kind_of
        shapes = {shape for entry in self._space.ranges for shape in entry.shapes}
        taken = Counter[str]()
        for task in planned_tasks(plan):
            taken[task.node] += round(task.cpus * 1000)
        workers_on = Counter(zip(assignment.workers, assignment.shapes, strict=True))

        def fits(name: str, shape: WorkerShape, larger: WorkerShape) -> bool:
            more = workers_on[name, shape] * (sizes.worker(larger).cpu_millis - sizes.worker(shape).cpu_millis)
            return larger.gpus == shape.gpus and taken[name] + more <= kind_of[name].cpu_millis

        largest = {}
        for name, shape in workers_on:
            fitting = [larger for larger in shapes if larger.cpus >= shape.cpus and fits(name, shape, larger)]
            largest[name, shape] = max(fitting, default=shape, key=lambda each: each.cpus) if shape.gpus else shape
        if len(set(assignment.shapes)) == 1:
            least = min(largest.values(), key=lambda each: each.cpus)
            largest = dict.fromkeys(largest, least)
        each = tuple(largest[entry] for entry in zip(assignment.workers, assignment.shapes, strict=True))
        larger = RatedPlan.of(plan.scenario, dataclasses.replace(assignment, shapes=each))
        is_allowed = has_similar_workers(plan.scenario, larger.assignment)
        return larger if is_allowed and larger.samples_per_s >= plan.samples_per_s else plan

    def _spaces(self) -> Iterator[Space]:
        """What is searched: for each rack and the whole cluster, each number of CPUs of a ps, and the worker shapes."""
        scenario = self._scenario
        for entry in self._space.ranges:
            workers = entry.min_workers, entry.max_workers
            if entry.mixed:
                # Machines without GPUs divide their CPUs among any number of workers, not only by the shapes.
                workers = entry.min_workers, max(each.max_workers for each in self._raw.ranges)
                choices = [entry.shapes]
            elif scenario.profile.synchronous:
                kept = without_spare_cpus(entry.shapes, scenario.kinds, scenario.sizes)
                choices = [(shape,) for shape in kept]
            else:
                # With fewer CPUs a fast GPU may be slow enough to train beside slow ones.
                choices = [(shape,) for shape in entry.shapes]
            for shapes in choices:
                for region in _regions(scenario):
                    most_cpus = max(kind.cpus for kind in region.kinds)
                    for factor in PS_CPU_FACTORS:
                        ps_cpus = factor * scenario.sizes.helper_cpus
                        if factor == 1 or ps_cpus <= most_cpus:
                            yield Space(region.with_ps_cpus(ps_cpus), shapes, workers, identical=not entry.mixed)

    def _report(self, found: _Found) -> None:
        if self._on_progress is not None:
            self._on_progress(PlanProgress(self.plan(found), found.placed))

    def plan(self, found: _Found) -> Plan:
        """The plan of a result, without reasons."""
        best, request = found.best, self._request
        sizes, shards, assignment = best.scenario.sizes, best.shards, best.assignment
        gap = found.gap if found.gap > GAP_TOLERANCE else 0.0
        return Plan(
            profile=request.profile,
            option=Option(
                workers=len(assignment.workers),
                ps=len(assignment.ps),
                worker=sizes.worker(best.shape),
                ps_task=sizes.ps(shards.sizes[0]),
                chief=sizes.chief,
            ),
            tasks=planned_tasks(best),
            variables=shards.variables,
            step_time_s=best.worth.step_time,
            samples_per_s=best.samples_per_s,
            traffic_bytes=best.worth.traffic_bytes,
            objective=request.objective,
            optimal=gap == 0,
            gap=gap,
            solve_time_s=time.monotonic() - self._started,
            options=OptionCounts(
                generated=self._raw.count,
                pruned={pruning.rule: pruning.removed for pruning in self.prunings},
                considered=self._space.count,
                solved=found.placed,
            ),
            alternatives=tuple(_alternative(other, best) for other in found.others[:ALTERNATIVES]),
            formulation=(
                "least traffic (Eq. 1)"
                if request.objective == "traffic"
                else "the simplest placement within 5% of the fastest found by Lagrangian relaxation"
            ),
            byte_imbalance=shards.byte_imbalance,
            request_imbalance=shards.request_imbalance,
        )


def _gap(plan: RatedPlan, bound: float) -> float:
    """Share by which a plan could be faster; 0 if that is at most `SIMPLE_TIE_SHARE`."""
    gap = 1 - plan.samples_per_s / bound if bound > 0 else 0.0
    return gap if gap > SIMPLE_TIE_SHARE + GAP_TOLERANCE else 0.0


def _regions(scenario: Scenario) -> Iterator[Scenario]:
    """Each rack by itself (machines without one as one more), then all machines."""
    racks = list(dict.fromkeys(kind.rack for kind in scenario.kinds))
    if len(racks) > 1:
        for rack in racks:
            yield scenario.within([kind for kind in scenario.kinds if kind.rack == rack])
    yield scenario


def _diverse(plans: Sequence[RatedPlan], chosen: RatedPlan) -> tuple[RatedPlan, ...]:
    """The fastest plan, and of each other number of parameter servers the fastest."""
    of_ps: dict[int, RatedPlan] = {}
    counts = len(chosen.assignment.workers), len(chosen.assignment.ps)
    for plan in sorted(plans, key=lambda plan: -plan.samples_per_s):
        if (len(plan.assignment.workers), len(plan.assignment.ps)) != counts:
            of_ps.setdefault(len(plan.assignment.ps), plan)
    return tuple(of_ps.values())


def _alternative(other: RatedPlan, best: RatedPlan) -> Alternative:
    return Alternative(
        workers=len(other.assignment.workers),
        ps=len(other.assignment.ps),
        worker=other.scenario.sizes.worker(other.shape),
        samples_per_s=other.samples_per_s,
        traffic_bytes=other.worth.traffic_bytes,
        relative=other.samples_per_s / best.samples_per_s,
    )


def _unknown_gpus(kinds: Sequence[NodeKind], hardware: Hardware) -> tuple[str, ...]:
    models = {kind.gpu_model or "not given" for kind in kinds if kind.gpus and not hardware.knows(kind.gpu_model)}
    return tuple(sorted(models))
