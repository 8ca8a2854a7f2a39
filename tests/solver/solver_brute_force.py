"""Tries every placement of an option, with the formulas of docs/solver.md written down a second time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dike.profile import ModelProfile
from solver.cluster import NodeClass
from solver.hardware import known_hardware
from solver.resources import TaskResources, TaskSizes, WorkerShape
from solver.units import MIB

EQUAL = 1e-6


@dataclass(frozen=True)
class Result:
    samples_per_s: float
    traffic: float


@dataclass(frozen=True)
class Job:
    """One option to place."""

    profile: ModelProfile
    sizes: TaskSizes
    shape: WorkerShape
    workers: int
    shards: tuple[int, ...]
    within_gbps: float
    uplink_gbps: float | None = None


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
    worker, chief = job.sizes.worker(job.shape), job.sizes.chief
    seen = set()
    for ps_nodes in itertools.permutations(range(len(nodes)), len(job.shards)):
        for chief_node in range(len(nodes)) if chief is not None else (None,):
            for split in _splits(job.workers, len(nodes)):
                state = (tuple(job.shards[ps_nodes.index(i)] if i in ps_nodes else 0 for i in range(len(nodes))), split)
                if (state, chief_node) in seen:
                    continue
                seen.add((state, chief_node))
                if all(
                    _fits(node, job, state[0][i], worker, split[i], chief if chief_node == i else None)
                    for i, node in enumerate(nodes)
                ):
                    yield _evaluate(job, nodes, state[0], split)


def _splits(workers: int, nodes: int) -> Iterator[tuple[int, ...]]:
    if nodes == 1:
        yield (workers,)
        return
    for here in range(workers + 1):
        for rest in _splits(workers - here, nodes - 1):
            yield (here, *rest)


def _fits(
    node: NodeClass, job: Job, shard: int, worker: TaskResources, workers: int, chief: TaskResources | None
) -> bool:
    tasks = [worker] * workers + ([job.sizes.ps(shard)] if shard else []) + ([chief] if chief is not None else [])
    if workers and job.shape.gpus:
        memory = known_hardware().gpu(node.gpu_model).memory_bytes
        if 2 * sum(job.shards) + 2**28 > memory:
            return False
    return (
        sum(task.cpus for task in tasks) <= node.cpus + 1e-6
        and sum(task.mem_mb for task in tasks) <= node.mem_bytes // MIB
        and sum(task.disk_mb for task in tasks) <= node.disk_bytes // MIB
        and sum(task.gpus for task in tasks) <= node.gpus
    )


def _evaluate(job: Job, nodes: Sequence[NodeClass], shards: Sequence[int], split: Sequence[int]) -> Result:
    hardware, profile = known_hardware(), job.profile
    n, total = job.workers, sum(job.shards)
    within = job.within_gbps * 1e9 / 8
    batch = profile.batch_size * max(1, job.shape.gpus)
    prepare = batch * profile.sample_bytes / (job.shape.cpus * hardware.core_input_bytes_per_s)
    flops = profile.batch_size * profile.flops_step_per_sample
    network, works, rounds = 0.0, [], 0.0
    for node, shard, workers in zip(nodes, shards, split, strict=True):
        card = node.network_gbps * 1e9 / 8
        busiest = 2 * max(shard * (n - workers), workers * (total - shard)) / card
        network = max(network, busiest, 2 * shard * workers / within)
        if not workers:
            continue
        if job.shape.gpus:
            g = job.shape.gpus
            compute = flops / hardware.gpu(node.gpu_model).training_flops_per_s + 2 * (g - 1) / g * total / within
            work = max(compute, prepare)
        else:
            c = job.shape.cpus
            speed = min(c, 1 / (1 - hardware.parallel_share + hardware.parallel_share / c))
            work = flops / (speed * hardware.core_training_flops_per_s) + prepare
        work += hardware.step_latency_s
        works.append(work)
        rounds += workers / (work + 2 * (total - shard) / card + 2 * shard / within)
    if job.uplink_gbps is not None:
        for rack in {node.rack for node in nodes}:
            here = [i for i, node in enumerate(nodes) if node.rack == rack]
            stored, near = sum(shards[i] for i in here), sum(split[i] for i in here)
            crossing = max(stored * (n - near), near * (total - stored))
            network = max(network, 2 * crossing / (job.uplink_gbps * 1e9 / 8))
    update = n * max(job.shards) / hardware.ps_update_bytes_per_s
    dispatch = n * hardware.dispatch_s if profile.api.has_separate_chief else 0.0
    if profile.synchronous:
        step = max(works) + network + update + dispatch
    else:
        step = max(n / rounds, network, update, dispatch)
    local = sum(shard * workers for shard, workers in zip(shards, split, strict=True))
    return Result(n * batch / step, n * total - 0.9 * local)
