"""Tries every placement of an option, with the formulas of docs/planner.md written down a second time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dike.profile import ModelProfile
from solver.cluster import NodeClass
from solver.hardware import Hardware, known_hardware
from solver.resources import TaskResources, TaskSizes, WorkerShape
from solver.units import MIB

EQUAL = 1e-6


@dataclass(frozen=True)
class Result:
    samples_per_s: float
    traffic: float


@dataclass(frozen=True)
class Job:
    """One option to place; with `shapes` each machine gives its workers one of those instead of `shape`.

    Attributes:
        similar: whether no asynchronous worker's step may take more than three times the fastest one's.
    """

    profile: ModelProfile
    sizes: TaskSizes
    shape: WorkerShape
    workers: int
    shards: tuple[int, ...]
    within_gbps: float
    uplink_gbps: float | None = None
    hardware: Hardware = field(default_factory=known_hardware)
    shapes: tuple[WorkerShape, ...] = ()
    similar: bool = False
    requests: tuple[int, ...] = ()


def best(job: Job, nodes: Sequence[NodeClass]) -> Result | None:
    """The fastest placement; among those equally fast, the one with least traffic."""
    results = list(_results(job, nodes))
    if not results:
        return None
    speed = max(result.samples_per_s for result in results)
    return min(
        (result for result in results if result.samples_per_s >= speed * (1 - EQUAL)), key=lambda result: result.traffic
    )


def least_traffic(job: Job, nodes: Sequence[NodeClass]) -> float | None:
    return min((result.traffic for result in _results(job, nodes)), default=None)


def _results(job: Job, nodes: Sequence[NodeClass]) -> Iterator[Result]:
    chief = job.sizes.chief
    seen = set()
    indices = range(len(nodes))
    for ps_nodes in itertools.permutations(indices, len(job.shards)):
        held = tuple(tuple(s for s, at in zip(job.shards, ps_nodes, strict=True) if at == i) for i in indices)
        for chief_node in indices if chief is not None else (None,):
            for split in _splits(job.workers, len(nodes)):
                for shapes in itertools.product(
                    *(job.shapes if here and job.shapes else (job.shape,) for here in split)
                ):
                    state = (held, chief_node, split, shapes)
                    if state in seen:
                        continue
                    seen.add(state)
                    if all(
                        _fits(node, job, held[i], shapes[i], split[i], chief if chief_node == i else None)
                        for i, node in enumerate(nodes)
                    ) and _are_similar(job, nodes, split, shapes):
                        yield _evaluate(job, nodes, [sum(shards) for shards in held], split, shapes)


def _splits(workers: int, nodes: int) -> Iterator[tuple[int, ...]]:
    if nodes == 1:
        yield (workers,)
        return
    for here in range(workers + 1):
        for rest in _splits(workers - here, nodes - 1):
            yield (here, *rest)


def _are_similar(job: Job, nodes: Sequence[NodeClass], split: Sequence[int], shapes: Sequence[WorkerShape]) -> bool:
    if not job.similar or job.profile.synchronous:
        return True
    alone = 2 * sum(job.shards) / (max(node.network_gbps for node in nodes) * 1e9 / 8)
    steps = [_work(job, node, shape) + alone for node, here, shape in zip(nodes, split, shapes, strict=True) if here]
    return max(steps) <= 3 * min(steps) * (1 + 1e-9)


def _fits(
    node: NodeClass, job: Job, shards: Sequence[int], shape: WorkerShape, workers: int, chief: TaskResources | None
) -> bool:
    tasks = [job.sizes.worker(shape)] * workers + [job.sizes.ps(size) for size in shards]
    tasks += [chief] if chief is not None else []
    if workers and shape.gpus:
        memory = job.hardware.gpu(node.gpu_model).memory_bytes
        if 2 * sum(job.shards) + 2**28 > memory:
            return False
    return (
        sum(task.cpus for task in tasks) <= node.cpus + 1e-6
        and sum(task.mem_mb for task in tasks) <= node.mem_bytes // MIB
        and sum(task.disk_mb for task in tasks) <= node.disk_bytes // MIB
        and sum(task.gpus for task in tasks) <= node.gpus
    )


def _work(job: Job, node: NodeClass, shape: WorkerShape) -> float:
    hardware, profile = job.hardware, job.profile
    total, within = sum(job.shards), job.within_gbps * 1e9 / 8
    flops = profile.batch_size * profile.flops_step_per_sample
    batch = profile.batch_size * max(1, shape.gpus)
    prepare = batch * profile.sample_bytes / (shape.cpus * hardware.core_input_bytes_per_s)
    if shape.gpus:
        g = shape.gpus
        compute = flops / hardware.gpu(node.gpu_model).training_flops_per_s + 2 * (g - 1) / g * total / within
        work = max(compute, prepare)
    else:
        c = shape.cpus
        longest = profile.longest_path_flops / profile.flops_forward_per_sample
        share = 1 - longest + longest * hardware.parallel_share
        speed = min(c, 1 / (1 - share + share / c))
        work = flops / (speed * hardware.core_training_flops_per_s) + prepare
    own_s = hardware.step_latency_s + hardware.apis[profile.api].latency_s
    work += own_s if shape.gpus else own_s / min(1.0, shape.cpus)
    return work


def _evaluate(
    job: Job, nodes: Sequence[NodeClass], shards: Sequence[int], split: Sequence[int], shapes: Sequence[WorkerShape]
) -> Result:
    hardware, profile = job.hardware, job.profile
    n, total = job.workers, sum(job.shards)
    within = job.within_gbps * 1e9 / 8
    network, works, samples = 0.0, [], 0
    own_rates, batches = [0.0] * len(nodes), [0] * len(nodes)
    slowest = max(shard / (node.network_gbps * 1e9 / 8) for node, shard in zip(nodes, shards, strict=True))
    for i, (node, shard, workers, shape) in enumerate(zip(nodes, shards, split, shapes, strict=True)):
        card = node.network_gbps * 1e9 / 8
        busiest = 2 * max(shard * (n - workers), workers * (total - shard)) / card
        network = max(network, busiest, 2 * shard * workers / within)
        if not workers:
            continue
        batch = profile.batch_size * max(1, shape.gpus)
        work = _work(job, node, shape)
        works.append(work)
        alone = max((total - shard) / card, slowest if shard / card < slowest * (1 - 1e-9) else 0.0)
        own_rates[i] = workers / (work + 2 * alone + 2 * shard / within)
        batches[i] = batch
        samples += workers * batch
    if job.uplink_gbps is not None:
        for rack in {node.rack for node in nodes}:
            here = [i for i, node in enumerate(nodes) if node.rack == rack]
            stored, near = sum(shards[i] for i in here), sum(split[i] for i in here)
            crossing = max(stored * (n - near), near * (total - stored))
            network = max(network, 2 * crossing / (job.uplink_gbps * 1e9 / 8))
    loads = [
        size + count * hardware.ps_request_bytes
        for size, count in zip(job.shards, job.requests or [1] * len(job.shards), strict=True)
    ]
    update = n * max(loads) / (hardware.ps_bytes_per_s * job.sizes.ps_cpus) if sum(job.shards) else 0.0
    dispatch = n * hardware.apis[profile.api].dispatch_s
    if profile.synchronous and hardware.overlap:
        step = max(*works, network + update + dispatch)
    elif profile.synchronous:
        step = max(works) + network + update + dispatch
    local = sum(shard * workers for shard, workers in zip(shards, split, strict=True))
    if not profile.synchronous:
        most = n / max(update, dispatch) if max(update, dispatch) > 0 else float("inf")
        speed = most_samples(job, nodes, shards, own_rates, batches, most)
        return Result(speed, n * total - 0.9 * local)
    return Result(samples / step, n * total - 0.9 * local)


def most_samples(
    job: Job,
    nodes: Sequence[NodeClass],
    shards: Sequence[int],
    own_rates: Sequence[float],
    batches: Sequence[int],
    most_steps: float,
) -> float:
    """The linear program of asynchronous rates, with X written out as the sum of every machine's own rate."""
    total, within = sum(job.shards), job.within_gbps * 1e9 / 8
    links = [({i}, node.network_gbps * 1e9 / 8) for i, node in enumerate(nodes)]
    if job.uplink_gbps is not None:
        for rack in {node.rack for node in nodes}:
            links.append(({i for i, node in enumerate(nodes) if node.rack == rack}, job.uplink_gbps * 1e9 / 8))
    busy = [i for i, rate in enumerate(own_rates) if rate]
    # Shares of the most that a machine's workers and its inside allow.
    highest = [min(own_rates[i], within / (2 * shards[i])) if shards[i] else own_rates[i] for i in busy]
    rows = [[float(i == other) for other in busy] for i in busy]
    rows.append([high / most_steps for high in highest])
    for members, speed in links:
        stored = sum(shards[i] for i in members)
        costs = [total - stored if i in members else stored for i in busy]
        rows.append([cost * high / (0.8 * speed) for cost, high in zip(costs, highest, strict=True)])
    return _simplex([batches[i] * high for i, high in zip(busy, highest, strict=True)], rows)


def _simplex(values: Sequence[float], rows: Sequence[Sequence[float]]) -> float:
    """Maximises values z with rows z <= 1 and z >= 0, from z = 0 on; nothing is negative."""
    if all(sum(row) <= 1 for row in rows):
        return sum(values)
    size = len(rows)
    table = [[*row, *(float(i == j) for j in range(size)), 1.0] for i, row in enumerate(rows)]
    costs = [*values, *([0.0] * (size + 1))]
    while True:
        entering = next((j for j, cost in enumerate(costs[:-1]) if cost > 1e-12 * max(values)), None)
        if entering is None:
            return -costs[-1]
        # Bland's rule, so that it cannot go in circles: the first column, and the first of the tightest rows.
        _, leaving = min((row[-1] / row[entering], i) for i, row in enumerate(table) if row[entering] > 1e-12)
        pivot = table[leaving][entering]
        table[leaving] = [entry / pivot for entry in table[leaving]]
        for other in [*(row for i, row in enumerate(table) if i != leaving), costs]:
            factor = other[entering]
            if factor:
                other[:] = [a - factor * b for a, b in zip(other, table[leaving], strict=True)]
