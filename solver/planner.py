"""From a model and a cluster to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.cluster import Cluster
from solver.hardware import Hardware, known_hardware
from solver.nodes import NodeKind, node_kinds
from solver.options import Pruning, cpu_gpu_ratio, identical_workers, raw_space, task_counts
from solver.plan import Alternative, Option, OptionCounts, Plan, PlannedTask
from solver.reasons import reasons
from solver.resources import TaskResources, TaskSizes
from solver.search import ALTERNATIVES, OptionSearch, Solved
from solver.shards import Shards
from solver.shortage import shortage
from solver.step_time import StepTime

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
    if request.objective not in ("throughput", "traffic"):
        raise BadInputError(f"'{request.objective}' is not an objective; say throughput or traffic.")
    for name in ("max_workers", "max_gpus_per_worker"):
        limit = getattr(request, name)
        if limit is not None and limit < 1:
            raise BadInputError(f"'{name}' is {limit}; it must be at least 1.")
    deadline = started + (DEFAULT_TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s)
    kinds = node_kinds(request.cluster)
    hardware = known_hardware()
    sizes = TaskSizes.of(request.profile, max(kind.cpus for kind in kinds))
    generated = raw_space(kinds).count
    prunings = _prune(request, kinds, hardware, sizes, every_machine_works=request.objective == "traffic")
    search = OptionSearch(request.profile, request.cluster, kinds, hardware, sizes, prunings[-1].space)
    if request.objective == "throughput":
        found = search.fastest(deadline)
    else:
        found = search.calmest(deadline)
        if found is None:
            # The paper's lower bound on the workers left nothing that fits.
            prunings = _prune(request, kinds, hardware, sizes, every_machine_works=False)
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
    shards = search.shards(best.candidate.ps)
    worker = sizes.worker(best.candidate.shape)
    return Plan(
        profile=request.profile,
        option=Option(best.candidate.workers, best.candidate.ps, worker, sizes.ps(shards.sizes[0]), sizes.chief),
        tasks=_tasks(best, shards, sizes),
        variables=shards.variables,
        step_time_s=_step_time(search, best, kinds),
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


def _prune(
    request: PlanRequest,
    kinds: Sequence[NodeKind],
    hardware: Hardware,
    sizes: TaskSizes,
    *,
    every_machine_works: bool,
) -> tuple[Pruning, ...]:
    first = identical_workers(raw_space(kinds))
    second = cpu_gpu_ratio(first.space, kinds, request.profile, hardware, sizes, request.max_gpus_per_worker)
    third = task_counts(
        second.space, kinds, request.profile, sizes, request.max_workers, every_machine_works=every_machine_works
    )
    return first, second, third


def _tasks(best: Solved, shards: Shards, sizes: TaskSizes) -> tuple[PlannedTask, ...]:
    def task(role: str, index: int, node: str, resources: TaskResources) -> PlannedTask:
        return PlannedTask(role, index, node, resources.cpus, resources.mem_mb, resources.disk_mb, resources.gpus)

    where = best.assignment
    tasks = [
        task("ps", index, node, sizes.ps(size))
        for index, (node, size) in enumerate(zip(where.ps, shards.sizes, strict=True))
    ]
    worker = sizes.worker(best.candidate.shape)
    tasks += [task("worker", index, node, worker) for index, node in enumerate(where.workers)]
    if sizes.chief is not None and where.chief is not None:
        tasks.append(task("chief", 0, where.chief, sizes.chief))
    return tuple(tasks)


def _step_time(search: OptionSearch, best: Solved, kinds: Sequence[NodeKind]) -> StepTime:
    """The terms; where machines differ, compute is that of the slowest and transfer the mean."""
    model = search.model(best.candidate.shape)
    kind_of = {name: kind for kind in kinds for name in kind.names}
    compute = max(model.compute_s(kind_of[node]) for node in best.assignment.workers)
    largest = search.shards(best.candidate.ps).sizes[0]
    transfer = 0.0
    if not model.profile.synchronous:
        held = dict(zip(best.assignment.ps, search.shards(best.candidate.ps).sizes, strict=True))
        each = [model.transfer_s(kind_of[node], held.get(node, 0)) for node in best.assignment.workers]
        transfer = sum(each) / len(each)
    return StepTime(
        compute=compute,
        input=model.input_s,
        latency=model.hardware.step_latency_s,
        transfer=transfer,
        network=best.network_s,
        update=model.update_s(largest, best.candidate.workers),
        dispatch=model.dispatch_s(best.candidate.workers),
        total=best.round_s,
    )


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
