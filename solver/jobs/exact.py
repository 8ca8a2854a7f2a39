"""Exact planning of one of a few jobs on the remaining resources, as for a job alone on a cluster."""

from __future__ import annotations

import dataclasses

from dike.exceptions import InfeasibleError
from solver.cluster import Cluster, NodeClass
from solver.jobs.free_capacity import FreeCapacity
from solver.jobs.job import PlanJob
from solver.plan import Plan
from solver.planner import make_plan
from solver.request import PlanRequest
from solver.strategies import ALLREDUCE, PS, WITHOUT_PS
from solver.units import BYTES_PER_S_PER_GBPS, MIB

MAX_EXACT_JOBS = 20
MAX_EXACT_MACHINES = 300
"""Above these numbers of jobs or machines, exact planning of one after the other takes too long."""

MAX_EXACT_TIME_S = 5.0
"""Time limit per job: partly used machines all differ, so proofs take long; then the best so far is taken."""


def plan_exactly(
    job: PlanJob, gpus_per_worker: int, cluster: Cluster, free: FreeCapacity, time_limit_s: float
) -> Plan | None:
    """Makes the best plan for the job on the free resources, with the least traffic of those as fast.

    Returns:
        None if nothing fits, or the best plan has fewer workers, or workers with fewer GPUs, than the job requires.
    """
    nodes = []
    for index, left, machines in free.classes():
        kind = free.kinds[index]
        cpu_millis, mem_mb, disk_mb, gpus = left
        gpus = gpus if gpus_per_worker else 0
        if cpu_millis and mem_mb and disk_mb:
            nodes += [
                NodeClass(
                    name=free.names[machine],
                    cpus=cpu_millis / 1000,
                    mem_bytes=mem_mb * MIB,
                    gpus=gpus,
                    gpu_model=kind.gpu_model if gpus else None,
                    disk_bytes=disk_mb * MIB,
                    network_gbps=kind.network_bytes_per_s / BYTES_PER_S_PER_GBPS,
                    rack=kind.rack,
                )
                for machine in machines
            ]
    if not any(node.gpus >= gpus_per_worker for node in nodes):
        return None
    # Classes of free resources are in the order of their history; machines are sorted as in the cluster.
    order = {name: number for number, name in enumerate(free.names)}
    nodes.sort(key=lambda node: order[node.name])
    request = PlanRequest(
        job.profile,
        dataclasses.replace(cluster, nodes=tuple(nodes), pairs=()),
        min_workers=job.min_workers if job.is_gang else 1,
        max_workers=job.max_workers,
        strategies=(WITHOUT_PS if job.min_workers == 1 else frozenset({ALLREDUCE})) if job.is_gang else frozenset({PS}),
        time_limit_s=min(time_limit_s, MAX_EXACT_TIME_S),
        max_gpus_per_worker=max(1, gpus_per_worker),
    )
    try:
        plan = make_plan(request)
    except InfeasibleError:
        return None
    if plan.option.workers < job.min_workers or plan.option.worker.gpus != gpus_per_worker:
        return None
    return plan
