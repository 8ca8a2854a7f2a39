"""Measures how long many jobs take to plan together, and how close the plans are to the joint optimum."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np

from dike.profile import Api, ModelProfile, VariableSpec
from solver import Cluster, NodeClass
from solver.choices import Order
from solver.hardware import known_hardware
from solver.jobs import JobsPlan, PlanJob, plan_jobs
from solver.jobs.forms import Form, FormCatalogue
from solver.jobs.free_capacity import NOTHING, plus
from solver.nodes import node_kinds
from solver.resources import Amounts
from solver.units import GIB

TITLE = "Many jobs at once"
RUNS = 3
MACHINES_PER_JOB = 4
WORKERS_PER_JOB = 20
MODELS = 40
ROUND_JOBS = 6_200
INSTANCES = 60
MEGABYTE = 10**6

Usage = tuple[Amounts, ...]
"""Resources that a job uses on each machine."""


def measure() -> Iterator[str]:
    """Reports planning times, and ratios to the optimum of small cases."""
    yield (
        "Models are synthetic (10 to 60 variables of 0.2 to 8 MB, 0.3 to 10 GFLOPs forward, batches of 16 to 64, half "
        f"of them synchronous); a job has up to {WORKERS_PER_JOB} workers of one GPU. 'alike': machines of 16 CPUs and "
        f"4 V100, one model. 'varied': the same with {MODELS} models. 'mixed': {MODELS} models on V100, K80, P100, "
        f"A100 and CPU-only machines, a fifth each. Seconds are the median of {RUNS} runs."
    )
    yield ""
    yield "| order | mix | machines | jobs | waiting | tasks placed | GPUs used | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for order, (mix, make_cluster, models), machines in itertools.product(get_args(Order), MIXES, (1_000, 16_000)):
        cluster = make_cluster(machines)
        jobs = random_jobs(machines // MACHINES_PER_JOB, models, WORKERS_PER_JOB, np.random.default_rng(1))
        plan, seconds = _timed(jobs, cluster, order)
        yield (
            f"| {order} | {mix} | {machines:,} | {len(jobs):,} | {len(plan.unplaced):,} | {plan.tasks:,} "
            f"| {plan.gpus_used / plan.gpus:.0%} | {seconds:.2f} |"
        )
    yield ""
    yield from _round()
    yield ""
    yield from _quality()


def _round() -> Iterator[str]:
    """One scheduling round of jobs with 100,000 tasks in all."""
    machines = 16_000
    yield f"One round of scheduling (order 'gain') for {ROUND_JOBS:,} jobs on {machines:,} machines:"
    yield ""
    yield "| mix | waiting | tasks placed | GPUs used | seconds |"
    yield "|---|---|---|---|---|"
    for mix, make_cluster, models in MIXES:
        jobs = random_jobs(ROUND_JOBS, models, WORKERS_PER_JOB, np.random.default_rng(1))
        plan, seconds = _timed(jobs, make_cluster(machines), "gain")
        yield (
            f"| {mix} | {len(plan.unplaced):,} | {plan.tasks:,} | {plan.gpus_used / plan.gpus:.0%} | {seconds:.2f} |"
        )


def _timed(jobs: Sequence[PlanJob], cluster: Cluster, order: Order) -> tuple[JobsPlan, float]:
    times_s = []
    for _ in range(RUNS):
        start = time.perf_counter()
        plan = plan_jobs(jobs, cluster, order)
        times_s.append(time.perf_counter() - start)
    return plan, statistics.median(times_s)


def _quality() -> Iterator[str]:
    ratios: dict[str, list[float]] = {"gain": [], "given": []}
    for seed in range(INSTANCES):
        jobs, cluster = small_case(np.random.default_rng(seed))
        by_gain = plan_jobs(jobs, cluster, "gain")
        if by_gain.unplaced:
            continue
        total_s = sum(job.remaining_s for job in by_gain.placed)
        least_s = least_total_s(jobs, cluster, total_s)
        ratios["gain"].append(total_s / least_s)
        in_order = plan_jobs(jobs, cluster, "given")
        if not in_order.unplaced:
            ratios["given"].append(sum(job.remaining_s for job in in_order.placed) / least_s)
    yield (
        "Sum of the remaining times over the least possible one (all counts and all placements tried), on "
        f"{len(ratios['gain'])} random cases of 2 or 3 jobs on 2 or 3 machines that hold the minimum of all. 'given' "
        "counts only where it leaves no job waiting; it plans each job exactly, as there are few."
    )
    yield ""
    yield "| order | cases | mean | median | worst | within 5% |"
    yield "|---|---|---|---|---|---|"
    for order, found in ratios.items():
        near = sum(ratio <= 1.05 for ratio in found) / len(found)
        yield (
            f"| {order} | {len(found)} | {statistics.mean(found):.3f} | {statistics.median(found):.3f} "
            f"| {max(found):.3f} | {near:.0%} |"
        )


def random_model(rng: np.random.Generator, *, synchronous: bool) -> ModelProfile:
    sizes = [int(rng.uniform(0.2, 8) * MEGABYTE) for _ in range(int(rng.integers(10, 61)))]
    flops = 10 ** rng.uniform(8.5, 10)
    return ModelProfile(
        name="made up",
        api=Api.KERAS,
        parameters=sum(sizes) // 4,
        parameter_bytes=sum(sizes),
        variables=tuple(VariableSpec(f"v{i}", (size // 4,), "float32", size) for i, size in enumerate(sizes)),
        flops_forward_per_sample=flops,
        flops_step_per_sample=3 * flops,
        longest_path_flops=0.9 * flops,
        batch_size=int(rng.choice([16, 32, 64])),
        sample_bytes=602_112,
        optimizer="SGD",
        optimizer_slots=1,
        synchronous=synchronous,
    )


def random_jobs(count: int, models: int, max_workers: int, rng: np.random.Generator) -> list[PlanJob]:
    """Draws jobs that use the models in rotation and have 1,000 to 100,000 steps left."""
    profiles = [random_model(rng, synchronous=bool(index % 2)) for index in range(models)]
    return [
        PlanJob(f"job-{i}", profiles[i % models], max_workers=max_workers, steps=int(rng.integers(1_000, 100_001)))
        for i in range(count)
    ]


def uniform_cluster(machines: int) -> Cluster:
    return Cluster((_machines("v100", machines, 16, 64, 4, "V100", 25),))


def mixed_cluster(machines: int) -> Cluster:
    each = machines // 5
    return Cluster(
        (
            _machines("v100", each, 16, 64, 4, "V100", 25),
            _machines("k80", each, 8, 32, 4, "K80", 10),
            _machines("p100", each, 32, 128, 8, "P100", 10),
            _machines("a100", each, 16, 64, 2, "A100", 25),
            _machines("cpu", each, 32, 64, 0, None, 10),
        )
    )


def _machines(name: str, count: int, cpus: float, mem_gib: int, gpus: int, model: str | None, gbps: float) -> NodeClass:
    return NodeClass(
        name=name,
        count=count,
        cpus=cpus,
        mem_bytes=mem_gib * GIB,
        gpus=gpus,
        gpu_model=model,
        disk_bytes=500 * GIB,
        network_gbps=gbps,
    )


MIXES = (("alike", uniform_cluster, 1), ("varied", uniform_cluster, MODELS), ("mixed", mixed_cluster, MODELS))
"""Name, cluster and number of models."""


def small_case(rng: np.random.Generator) -> tuple[list[PlanJob], Cluster]:
    machines = int(rng.integers(2, 4))
    kinds = [("V100", 25.0), ("K80", 10.0), ("V100", 10.0)]
    nodes = tuple(
        _machines(f"m{index}", 1, int(rng.choice([8, 16])), 32, int(rng.choice([1, 2, 4])), *kinds[rng.integers(3)])
        for index in range(machines)
    )
    jobs = random_jobs(int(rng.integers(2, 4)), 2, 4, rng)
    return jobs, Cluster(nodes)


def least_total_s(jobs: Sequence[PlanJob], cluster: Cluster, bound_s: float) -> float:
    """Returns the minimum sum of remaining times by branch and bound over all placements of all jobs.

    `bound_s`: a feasible sum, the initial bound.
    """
    kinds = node_kinds(cluster)
    catalogue = FormCatalogue(jobs, cluster, kinds, known_hardware())
    machines = [index for index, kind in enumerate(kinds) for _ in range(kind.count)]
    placements = [_placements(job, catalogue.forms(job), machines) for job in jobs]
    # Lower bounds: sums of the fastest placements of the remaining jobs, each alone.
    rest = [sum(way[0][0] for way in placements[index:]) for index in range(len(placements) + 1)]
    least = bound_s

    def try_from(index: int, spent_s: float, free: Usage) -> None:
        nonlocal least
        if index == len(placements):
            least = min(least, spent_s)
            return
        for time_s, usage in placements[index]:
            if spent_s + time_s + rest[index + 1] >= least:
                return
            left = tuple(plus(have, need, -1) for have, need in zip(free, usage, strict=True))
            if min(map(min, left)) >= 0:
                try_from(index + 1, spent_s + time_s, left)

    try_from(0, 0.0, tuple(kinds[machine].amounts for machine in machines))
    return least


def _placements(job: PlanJob, forms: Sequence[Form], machines: Sequence[int]) -> list[tuple[float, Usage]]:
    """Returns (remaining time, usage) of every placement of a job, fastest first, one for each usage."""
    best: dict[Usage, float] = {}
    kinds = node_kinds(forms[0].scenario.cluster)
    for form in forms:
        counts = itertools.product(range(job.min_workers, form.most_workers(job) + 1), range(1, form.table.max_ps + 1))
        for workers, ps in counts:
            for at_workers, at_ps in itertools.product(_splits(workers, len(machines)), _splits(ps, len(machines))):
                if any(count and not form.usable[kind] for count, kind in zip(at_workers, machines, strict=True)):
                    continue
                held = [form.needs_on(ps, w, p) for w, p in zip(at_workers, at_ps, strict=True)]
                if any(min(plus(kinds[k].amounts, need, -1)) < 0 for k, need in zip(machines, held, strict=True)):
                    continue
                hosts = [host for host in zip(machines, at_workers, at_ps, strict=True) if host[1] + host[2]]
                time_s = job.samples / form.evaluate(hosts).samples_per_s
                for usage in _with_chief(held, form.needs.chief):
                    best[usage] = min(time_s, best.get(usage, time_s))
    return sorted((time_s, usage) for usage, time_s in best.items())


def _splits(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (count,)
        return
    for here in range(count + 1):
        for others in _splits(count - here, parts - 1):
            yield (here, *others)


def _with_chief(held: Sequence[Amounts], chief: Amounts) -> Iterator[Usage]:
    if chief == NOTHING:
        yield tuple(held)
        return
    for machine in range(len(held)):
        yield tuple(plus(need, chief) if index == machine else need for index, need in enumerate(held))
