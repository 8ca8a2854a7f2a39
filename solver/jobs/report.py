"""Converts placements and plans to the entries of a `JobsPlan`."""

from __future__ import annotations

from solver.cluster import Cluster
from solver.jobs.allocation import Counts
from solver.jobs.free_capacity import FreeCapacity
from solver.jobs.job import PlanJob
from solver.jobs.packing import JobPlacement
from solver.jobs.result import MachineTasks, PlacedJob
from solver.plan import Option, Plan, PlannedTask
from solver.resources import TaskResources
from solver.settings import GPUS_PER_WORKER, what_if_note


def placed_job(job: PlanJob, placement: JobPlacement, wanted: Counts | None, free: FreeCapacity) -> PlacedJob:
    """Entry of a job whose counts came from a table of speeds.

    `wanted`: requested workers and ps; None for its minimum. `free`: names of the machines.
    """
    form, sizes = placement.form, placement.form.scenario.sizes
    alike: dict[tuple[int, int, int], list[int]] = {}
    for host in placement.hosts:
        alike.setdefault((host.workers, host.ps, host.chief), []).append(host.machine)
    parts = []
    example = {(host.workers, host.ps, host.chief): host for host in placement.hosts}
    for key, machines in alike.items():
        cpu_millis, mem_mb, disk_mb, gpus = placement.need(example[key])
        names = tuple(free.names[machine] for machine in sorted(machines))
        parts.append(MachineTasks(names, *key, cpu_millis / 1000, mem_mb, disk_mb, gpus))
    counts = placement.workers, placement.ps
    note = ""
    if wanted is not None and counts != wanted:
        more, these = (_tasks(workers, 0 if form.is_gang else ps) for workers, ps in (wanted, counts))
        note = f"It could use {more}; on the free resources, {these} are the fastest found."
    if form.is_gang:
        option = Option(placement.workers, 0, sizes.plain(form.shape), TaskResources(0.0, 0, 0))
    else:
        ps_task = sizes.ps(form.scenario.shards(placement.ps).sizes[0])
        option = Option(placement.workers, placement.ps, sizes.worker(form.shape), ps_task, sizes.chief)
    return PlacedJob(
        name=job.name,
        method="optimus",
        option=option,
        gpu_model=form.gpu_model,
        placement=tuple(parts),
        samples_per_s=placement.samples_per_s,
        step_time_s=placement.step_time_s,
        remaining_s=job.samples / placement.samples_per_s,
        note=_joined(job, note),
    )


def placed_by_plan(job: PlanJob, plan: Plan, cluster: Cluster) -> PlacedJob:
    by_node: dict[str, list[PlannedTask]] = {}
    for task in plan.tasks:
        by_node.setdefault(task.node, []).append(task)
    alike: dict[tuple[int | float, ...], list[str]] = {}
    for node, tasks in by_node.items():
        roles = [sum(task.role == role for task in tasks) for role in ("worker", "ps", "chief")]
        cpus = round(sum(task.cpus for task in tasks), 3)
        memory, disk, gpus = (sum(getattr(task, key) for task in tasks) for key in ("mem_mb", "disk_mb", "gpus"))
        alike.setdefault((*roles, cpus, memory, disk, gpus), []).append(node)
    parts = tuple(MachineTasks(tuple(nodes), *key) for key, nodes in alike.items())  # type: ignore[arg-type]
    model_of = {name: node.gpu_model for node in cluster.nodes for name in node.node_names}
    models = {model_of[task.node] for task in plan.tasks if task.gpus}
    return PlacedJob(
        name=job.name,
        method="exact",
        option=plan.option,
        gpu_model=models.pop() if len(models) == 1 else None,
        placement=parts,
        samples_per_s=plan.samples_per_s,
        step_time_s=plan.step_time_s.total,
        remaining_s=job.samples / plan.samples_per_s,
        note=_joined(job, "" if plan.optimal else f"Not proven: a better plan could be {plan.gap:.1%} better."),
    )


def _joined(job: PlanJob, note: str) -> str:
    gpus = job.gpus_per_worker or 0
    return " ".join(text for text in (note, what_if_note(gpus) if gpus > GPUS_PER_WORKER else "") if text)


def _tasks(workers: int, ps: int) -> str:
    text = f"{workers} worker{'s' * (workers > 1)}"
    return f"{text} and {ps} parameter server{'s' * (ps > 1)}" if ps else text
