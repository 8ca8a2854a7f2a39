"""Why a job waits: the scarce resource, and the amount missing."""

from __future__ import annotations

from collections.abc import Sequence

from solver.jobs.forms import Form
from solver.jobs.free_capacity import NOTHING, FreeCapacity
from solver.jobs.job import PlanJob
from solver.resources import Amounts, TaskSizes, gpu_bytes
from solver.units import MIB, format_bytes


def no_form_reason(job: PlanJob, gpus_per_worker: int, free: FreeCapacity, sizes: TaskSizes) -> str:
    """Why not even the empty cluster holds one of the job's workers."""
    most = max(kind.gpus for kind in free.kinds)
    if gpus_per_worker and not most:
        return "Its workers need GPUs and the cluster has none."
    if gpus_per_worker > most:
        lack = gpus_per_worker - most
        return f"A worker needs {gpus_per_worker} GPUs and no machine has more than {most}: {lack} short."
    need = gpu_bytes(sizes.variable_bytes)
    if gpus_per_worker:
        return (
            f"A worker of '{job.profile.name}' with {gpus_per_worker} GPUs fits no machine: each of its GPUs needs "
            f"{format_bytes(need)} of GPU memory, and the worker CPUs, memory and disk beside them."
        )
    return f"A worker of '{job.profile.name}' needs more CPUs, memory or disk than any machine has."


def no_room_reason(job: PlanJob, forms: Sequence[Form], free: FreeCapacity) -> str:
    """Why the free resources do not hold the job's minimum, for the form that lacks least."""
    return min((_shortage(job, form, free) for form in forms), key=lambda item: item[0])[1]


def _shortage(job: PlanJob, form: Form, free: FreeCapacity) -> tuple[float, str]:
    parts = [_count_of(job.min_workers, "worker"), "1 parameter server"]
    if form.needs.chief != NOTHING:
        parts.append("1 chief")
    smallest = f"Its minimum ({', '.join(parts)})"
    machines = f"the {form.gpu_model} machines" if form.gpu_model else "the machines"
    need, left = form.needs.of(job.min_workers, 1), free.total(form.usable)
    # Parameter server and chief may be on any machine; what only the workers take must be on these.
    workers = tuple(job.min_workers * amount for amount in form.needs.worker)
    for needed, have, subject in ((workers, left, "workers need"), (need, free.total(free.anywhere), "tasks need")):
        short = _worst_shortage(needed, have)
        if short is not None:
            resource, missing = short
            where = machines if subject == "workers need" else "all machines"
            return missing / needed[resource], (
                f"{smallest} does not fit: its {subject} {_shown(resource, needed[resource])} and {where} have "
                f"{_shown(resource, have[resource])} left: {_shown(resource, missing)} short."
            )
    fits = int((free.counts * free.capacity(form.needs.worker, form.usable).clip(0)).sum())
    if fits < job.min_workers:
        return (job.min_workers - fits) / job.min_workers, (
            f"{smallest} does not fit: free resources of {machines} are in pieces for {_count_of(fits, 'worker')} of "
            f"{_worker(form.needs.worker)}: {_count_of(job.min_workers - fits, 'worker')} short."
        )
    return 0.0, (
        f"{smallest} does not fit: {machines} have room for the workers, but no machine has "
        f"{_worker(form.needs.ps[0])} left beside them for the parameter server{' or the chief' * (len(parts) > 2)}."
    )


def _worst_shortage(need: Sequence[int], have: Amounts) -> tuple[int, int] | None:
    """The resource with the largest missing share, and the missing amount; None if nothing is missing."""
    lacking = [r for r in range(4) if need[r] > have[r]]
    if not lacking:
        return None
    worst = max(lacking, key=lambda r: (need[r] - have[r]) / need[r])
    return worst, need[worst] - have[worst]


def _worker(need: Amounts) -> str:
    shown = [_shown(resource, amount) for resource, amount in enumerate(need) if amount]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _shown(resource: int, amount: int) -> str:
    match resource:
        case 0:
            return _count_of(amount / 1000, "CPU")
        case 1:
            return f"{format_bytes(amount * MIB)} of memory"
        case 2:
            return f"{format_bytes(amount * MIB)} of disk"
        case _:
            return _count_of(amount, "GPU")


def _count_of(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"
