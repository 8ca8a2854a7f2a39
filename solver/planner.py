"""From a model and a cluster to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.cluster import Cluster
from solver.evaluation import evaluate, planned_tasks
from solver.hardware import Hardware, known_hardware
from solver.nodes import NodeKind
from solver.options import Pruning, cpu_gpu_ratio, identical_workers, raw_space, task_counts
from solver.plan import Alternative, Option, OptionCounts, Plan
from solver.reasons import reasons
from solver.resources import TaskSizes
from solver.scenario import Scenario
from solver.search import ALTERNATIVES, OptionSearch, Solved
from solver.shards import Shards
from solver.shortage import shortage

DEFAULT_TIME_LIMIT_S = 60.0
GAP_TOLERANCE = 1e-6


Objective = Literal["throughput", "traffic"]
"""What the planner optimises: predicted speed, or Eq. 1 alone as the paper has it."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        profile: the model.
        cluster: the machines.
        objective: `throughput` for the shortest step, `traffic` for the least of the paper's Eq. 1 alone.
        max_workers: at most so many workers.
        time_limit_s: stop improving after so long; the first placement found is always finished.
        max_gpus_per_worker: most GPUs one worker can use; a script without its own `MirroredStrategy` uses one.
    """

    profile: ModelProfile
    cluster: Cluster
    objective: Objective = "throughput"
    max_workers: int | None = None
    time_limit_s: float | None = None
    max_gpus_per_worker: int | None = None


def make_plan(request: PlanRequest) -> Plan:
    """Chooses the option, places it and says why.

    Raises:
        InfeasibleError: if no option fits the cluster; names the resource that is short and by how much.
        BadInputError: if the request makes no sense.
    """
    started = time.monotonic()
    check_request(request)
    deadline = started + (DEFAULT_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s)
    scenario = scenario_of(request)
    kinds, hardware, sizes = scenario.kinds, scenario.hardware, scenario.sizes
    generated = raw_space(kinds).count
    prunings = _prune(request, scenario, every_machine_works=request.objective == "traffic")
    search = OptionSearch(request.profile, request.cluster, kinds, hardware, sizes, prunings[-1].space)
    if request.objective == "throughput":
        found = search.fastest(deadline)
    else:
        found = search.calmest(deadline)
        if found is None:
            # The paper's lower bound on the workers left nothing that fits.
            prunings = _prune(request, scenario, every_machine_works=False)
            search = OptionSearch(request.profile, request.cluster, kinds, hardware, sizes, prunings[-1].space)
            found = search.calmest(deadline)
    if found is None:
        raise shortage(kinds, prunings[-2].space, sizes, hardware)
    unknown = _unknown_gpus(kinds, hardware)
    why = reasons(search, found, prunings, request.max_workers, unknown, request.objective)
    counts = OptionCounts(
        generated=generated,
        pruned={pruning.rule: pruning.removed for pruning in prunings},
        considered=prunings[-1].space.count,
        solved=found.placed,
    )
    best = found.best
    shape, shards = best.candidate.shape, scenario.shards(best.candidate.ps)
    return Plan(
        profile=request.profile,
        option=Option(
            best.candidate.workers, best.candidate.ps, sizes.worker(shape), sizes.ps(shards.sizes[0]), sizes.chief
        ),
        tasks=planned_tasks(scenario, shape, shards, best.assignment),
        variables=shards.variables,
        step_time_s=evaluate(scenario, shape, shards, best.assignment).step_time,
        samples_per_s=best.samples_per_s,
        traffic_bytes=best.placement.traffic_bytes,
        objective=request.objective,
        optimal=found.gap <= GAP_TOLERANCE and found.complete,
        gap=found.gap if found.gap > GAP_TOLERANCE else 0.0,
        solve_time_s=time.monotonic() - started,
        options=counts,
        alternatives=tuple(_alternative(other, best, sizes) for other in found.others[:ALTERNATIVES]),
        why=why,
        formulation=_formulation(shards),
    )


def check_request(request: PlanRequest) -> None:
    """Raises `BadInputError` if the request makes no sense."""
    if request.objective not in ("throughput", "traffic"):
        raise BadInputError(f"'{request.objective}' is not an objective; say throughput or traffic.")
    for name in ("max_workers", "max_gpus_per_worker"):
        limit = getattr(request, name)
        if limit is not None and limit < 1:
            raise BadInputError(f"'{name}' is {limit}; it must be at least 1.")


def scenario_of(request: PlanRequest) -> Scenario:
    """The request's model on its cluster."""
    return Scenario.of(request.profile, request.cluster, known_hardware())


def _prune(request: PlanRequest, scenario: Scenario, *, every_machine_works: bool) -> tuple[Pruning, ...]:
    kinds, profile, sizes = scenario.kinds, request.profile, scenario.sizes
    first = identical_workers(raw_space(kinds))
    second = cpu_gpu_ratio(first.space, kinds, profile, scenario.hardware, sizes, request.max_gpus_per_worker)
    third = task_counts(
        second.space, kinds, profile, sizes, request.max_workers, every_machine_works=every_machine_works
    )
    return first, second, third


def _alternative(other: Solved, best: Solved, sizes: TaskSizes) -> Alternative:
    return Alternative(
        workers=other.candidate.workers,
        ps=other.candidate.ps,
        worker=sizes.worker(other.candidate.shape),
        samples_per_s=other.samples_per_s,
        traffic_bytes=other.placement.traffic_bytes,
        relative=other.samples_per_s / best.samples_per_s,
    )


def _formulation(shards: Shards) -> str:
    kind = "equal shards" if shards.are_equal else "unequal shards"
    return f"counts of machines per kind and configuration, {kind}"


def _unknown_gpus(kinds: Sequence[NodeKind], hardware: Hardware) -> tuple[str, ...]:
    models = {kind.gpu_model or "not given" for kind in kinds if kind.gpus and not hardware.knows(kind.gpu_model)}
    return tuple(sorted(models))
