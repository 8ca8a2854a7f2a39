"""Plans without parameter servers: one task, or a gang of equal workers; as fast as possible, then as simple."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dike.exceptions import InfeasibleError
from dike.profile import Api
from solver.allreduce import slowest_link
from solver.costs import Costs
from solver.gang import GangOption, any_gang, best_gang
from solver.plain import NO_RESOURCES, PlainOption, can_be_plain, fastest_plain
from solver.plan import SAME_RESULT, Alternative, Option, OptionCounts, Plan, StrategyResult
from solver.reasons import count_of, guesses
from solver.request import PlanRequest
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.shortage import shortage_of
from solver.strategies import ALLREDUCE, ONE
from solver.units import SIMPLE_TIE_SHARE, SPEED_TIE_SHARE

GAP_TOLERANCE = 1e-6
ALTERNATIVES = 5


@dataclass(frozen=True)
class WithoutPs:
    """The best task, and the best gang; at least one of them.

    Attributes:
        one: the fastest task; None if it was not requested, or fits nowhere.
        gang: the best gang; None likewise.
    """

    one: PlainOption | None
    gang: GangOption | None

    @property
    def chosen(self) -> PlainOption | GangOption:
        """The task, unless the gang is faster by more than `SIMPLE_TIE_SHARE`; of unknown speed: the gang."""
        if self.one is None or self.gang is None:
            found = self.one or self.gang
            assert found is not None
            return found
        best = max(self.one.samples_per_s, self.gang.bound)
        is_enough = best > 0 and self.one.samples_per_s >= best * (1 - SIMPLE_TIE_SHARE)
        return self.one if is_enough else self.gang

    @property
    def bound(self) -> float:
        """Samples/s that no requested plan without parameter servers exceeds."""
        return max(0.0 if self.one is None else self.one.samples_per_s, 0.0 if self.gang is None else self.gang.bound)

    def results(self) -> tuple[StrategyResult, ...]:
        """The best task and the best gang, for the comparison of strategies."""
        found = [(ONE, self.one), (ALLREDUCE, self.gang)]
        return tuple(
            StrategyResult(strategy, each.workers, 0, each.samples_per_s, SAME_RESULT)
            for strategy, each in found
            if each is not None
        )


def strategy_result(plan: Plan) -> StrategyResult:
    option = plan.option
    return StrategyResult(plan.strategy, option.workers, option.ps, plan.samples_per_s, plan.result)


def find_without_ps(request: PlanRequest, scenario: Scenario, strategies: frozenset[str]) -> WithoutPs | None:
    """Finds the best task and the best gang of these strategies; None if neither fits.

    Raises:
        InfeasibleError: if more workers are requested than a batch has samples.
    """
    one = gang = None
    if ONE in strategies and request.min_workers == 1:
        one = fastest_plain(scenario, request.max_gpus_per_task)
    if ALLREDUCE in strategies and request.max_workers != 1:
        gang = _gang(request, scenario)
    return None if one is None and gang is None else WithoutPs(one, gang)


def _gang(request: PlanRequest, scenario: Scenario) -> GangOption | None:
    fewest, most, profile = request.min_workers, request.max_workers, request.profile
    if profile.is_measurable:
        if fewest > max(1, profile.batch_size):
            raise InfeasibleError(
                f"{fewest} workers cannot share a batch of {count_of(profile.batch_size, 'sample')}; use fewer workers "
                "or a larger batch."
            )
        return best_gang(scenario, fewest, most)
    # Whether more workers help is not known.
    return any_gang(scenario, fewest, most) if (most or fewest) > 1 else None


def no_room_without_ps(request: PlanRequest, scenario: Scenario) -> InfeasibleError:
    """The error for a job that fits nowhere."""
    if ONE in request.strategies and not can_be_plain(request.profile, scenario.hardware):
        return InfeasibleError("This script trains on a cluster only: it cannot be one plain task.")
    name = "the job's only task" if ONE in request.strategies else "a worker"
    shapes = [scenario.sizes.plain(WorkerShape(gpus, CPU_STEP)) for gpus in (0, 1)]
    if ONE in request.strategies or not any(kind.room_for(task) > 0 for kind in scenario.kinds for task in shapes):
        return shortage_of(name, shapes[0], scenario.kinds)
    return InfeasibleError(
        f"The machines have no room for {max(2, request.min_workers)} workers, the minimum; add machines or request "
        "fewer."
    )


def plan_without_ps(
    request: PlanRequest, scenario: Scenario, found: WithoutPs, other: Plan | None, solve_time_s: float
) -> Plan:
    """Builds the plan.

    Args:
        request: the plan request.
        scenario: its model on its cluster.
        found: the best plans without parameter servers.
        other: the best plan found with parameter servers; None if there is none, or none was requested.
        solve_time_s: planning time.
    """
    chosen = found.chosen
    is_gang = isinstance(chosen, GangOption)
    if isinstance(chosen, GangOption):
        why = _why_gang(request, scenario, found, chosen)
    else:
        why = _why_one(request, found, chosen)
    gap = max(0.0, 1 - chosen.samples_per_s / found.bound) if found.bound else 0.0
    if other is not None:
        tasks = f"{count_of(other.option.workers, 'worker')} and {count_of(other.option.ps, 'parameter server')}"
        share = other.samples_per_s / chosen.samples_per_s
        why[0] += f" {tasks} would reach {share:.0%} of its speed (--strategy ps requests them anyway)."
        # A better plan with parameter servers may exist.
        gap = max(gap, 1 - chosen.samples_per_s * (1 - other.gap) / other.samples_per_s)
    gap = gap if gap > SIMPLE_TIE_SHARE + GAP_TOLERANCE else 0.0
    tasks_of_plan = chosen.tasks()
    unknown = {
        scenario.kind_of[task.node].gpu_model or "not given"
        for task in tasks_of_plan
        if task.gpus and not scenario.hardware.knows(scenario.kind_of[task.node].gpu_model)
    }
    traffic = _ring_traffic(scenario, chosen.workers_on) if isinstance(chosen, GangOption) else 0.0
    return Plan(
        profile=request.profile,
        option=Option(chosen.workers, 0, chosen.resources, NO_RESOURCES),
        tasks=tasks_of_plan,
        variables={},
        step_time_s=chosen.step_time,
        samples_per_s=chosen.samples_per_s,
        traffic_bytes=traffic,
        objective=request.objective,
        optimal=gap <= GAP_TOLERANCE,
        gap=gap if gap > GAP_TOLERANCE else 0.0,
        solve_time_s=solve_time_s,
        options=OptionCounts(1, {}, 1) if other is None else other.options,
        alternatives=() if other is None else _alternatives(other, chosen.samples_per_s),
        why=(
            *why,
            *guesses(sorted(unknown)),
            *(() if request.calibration is None else request.calibration.sentences()),
            *request.notes,
        ),
        formulation="all gangs of equal workers" if is_gang else "one task",
    )


def _why_one(request: PlanRequest, found: WithoutPs, chosen: PlainOption) -> list[str]:
    why = "One plain task: the script in one process, without parameter servers, as python runs it."
    if request.profile.why_alone:
        why += f" {request.profile.why_alone}"
    elif request.profile.counts_own_steps:
        why += " The script's loop counts its own steps, so each of several workers would run all of them."
    if chosen.resources.gpus > 1:
        why += f" It sees {chosen.resources.gpus} GPUs."
    if found.gang is not None and chosen.samples_per_s:
        share = found.gang.samples_per_s / chosen.samples_per_s
        workers = f"{found.gang.workers} workers that share each batch"
        why += f" {workers} would reach {share:.0%} of its speed (--strategy allreduce requests them anyway)."
    elif request.profile.api is Api.KERAS and ONE in request.strategies and not request.profile.can_split:
        why += f" Several workers cannot share its batches: {request.profile.why_not_split}."
    return [why]


def _why_gang(request: PlanRequest, scenario: Scenario, found: WithoutPs, chosen: GangOption) -> list[str]:
    count = f"{chosen.workers} equal workers without parameter servers"
    if not request.profile.is_measurable:
        return [
            f"{count}, as the options say: the model of {request.profile.name} is not known, so the speed of other "
            "numbers is not predicted."
        ]
    each = "one GPU" if chosen.shape.gpus else count_of_cpus(chosen.shape.cpus)
    sentences = [
        f"{count}, with {each} each: they share each batch and sum their gradients (all-reduce), which computes what "
        "python computes."
    ]
    if found.one is not None:
        share = found.one.samples_per_s / chosen.samples_per_s
        sentences.append(f"One plain task would reach {share:.0%} of the speed (--strategy one requests it).")
    if chosen.workers == request.max_workers:
        sentences.append(f"{chosen.workers} workers: the most that --max-workers allows.")
    elif chosen.workers == request.profile.batch_size:
        sentences.append(f"{chosen.workers} workers: each has one sample of the batch.")
    elif found.bound > chosen.samples_per_s * (1 + SPEED_TIE_SHARE):
        more = found.bound / chosen.samples_per_s - 1
        sentences.append(f"{chosen.workers} workers: other gangs would be at most {more:.0%} faster.")
    else:
        sentences.append(f"{chosen.workers} workers: no other gang would be faster, or no more fit.")
    return [*sentences, _limit(scenario, chosen)]


def count_of_cpus(cpus: float) -> str:
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'}"


def _limit(scenario: Scenario, chosen: GangOption) -> str:
    time = chosen.step_time
    parts = {
        "compute": time.compute,
        "preparing the batch, which every worker reads as a whole": time.input,
        "constant": time.latency,
        "the exchange of gradients": time.network,
    }
    name = max(parts, key=lambda part: parts[part])
    sentence = f"The largest part of a step is {name}: {parts[name] / time.total:.0%} of it."
    if parts[name] == time.network:
        link = slowest_link(scenario, chosen.workers_on)
        sentence += f" The slowest link of the ring has {link * 8 / 1e9:g} Gb/s."
    return sentence


def _ring_traffic(scenario: Scenario, workers_on: Mapping[str, int]) -> float:
    """Bytes of a step between neighbours of the ring, weighted as in Eq. 1, which also counts one direction of two."""
    costs: Costs = scenario.cluster.costs()
    nodes, count = list(workers_on), sum(workers_on.values())
    edges = sum((here - 1) * costs.between(node, node) for node, here in workers_on.items())
    edges += sum(costs.between(nodes[index - 1], node) for index, node in enumerate(nodes))
    return (count - 1) / count * scenario.profile.parameter_bytes * edges


def _alternatives(other: Plan, samples_per_s: float) -> tuple[Alternative, ...]:
    """The best plan with parameter servers and its alternatives, as alternatives to a speed."""
    option = other.option
    first = Alternative(option.workers, option.ps, option.worker, other.samples_per_s, other.traffic_bytes, 1.0)
    found = (first, *other.alternatives)[:ALTERNATIVES]
    return tuple(dataclasses.replace(one, relative=one.samples_per_s / samples_per_s) for one in found)
