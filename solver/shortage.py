"""Why a job fits nowhere: the scarce resource, the machine, and the amount missing."""

from __future__ import annotations

from collections.abc import Sequence

from dike.exceptions import InfeasibleError
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options import OptionSpace
from solver.resources import CPU_STEP, TaskResources, TaskSizes, WorkerShape, gpu_bytes
from solver.shards import shard
from solver.units import MIB, format_bytes

_RESOURCES = ("CPUs", "memory", "disk", "GPUs")


def shortage(kinds: Sequence[NodeKind], space: OptionSpace, sizes: TaskSizes, hardware: Hardware) -> InfeasibleError:
    """The error for a job whose smallest option does not fit.

    `space`: the options that were tried. `hardware`: the GPUs' memory.
    """
    profile = sizes.profile
    gpus = any(kind.gpus for kind in kinds)
    tasks = smallest_tasks(kinds, space, sizes)
    memory = max((hardware.gpu(kind.gpu_model).memory_bytes for kind in kinds if kind.gpus), default=0)
    if gpus and gpu_bytes(sizes.variable_bytes) > memory:
        return InfeasibleError(
            f"Training '{profile.name}' takes at least {format_bytes(gpu_bytes(sizes.variable_bytes))} of a GPU's "
            "memory, more than any GPU of the cluster has; use a smaller model or larger GPUs."
        )
    for name, task in tasks:
        message = _no_machine_holds(f"a {name}", task, kinds)
        if message:
            return InfeasibleError(message)
    return InfeasibleError(_together(tasks, kinds))


def shortage_of(name: str, task: TaskResources, kinds: Sequence[NodeKind]) -> InfeasibleError:
    """The error for a task that no machine can hold; `name` is the display name of its role."""
    return InfeasibleError(_no_machine_holds(name, task, kinds))


def smallest_tasks(kinds: Sequence[NodeKind], space: OptionSpace, sizes: TaskSizes) -> list[tuple[str, TaskResources]]:
    """One task of each role, each as small as the options allow: (display name of the role, resources)."""
    gpus = any(kind.gpus for kind in kinds)
    shapes = [shape for entry in space.ranges for shape in entry.shapes] or [WorkerShape(1 if gpus else 0, CPU_STEP)]
    worker = sizes.worker(min(shapes, key=lambda shape: (sizes.worker(shape).mem_mb, shape.cpus)))
    tasks = [("worker", worker), ("parameter server", sizes.ps(shard(sizes.profile, 1).total))]
    if sizes.chief is not None:
        tasks.append(("chief", sizes.chief))
    return tasks


def _shown(resource: int, amount: float) -> str:
    if resource == 0:
        return f"{amount / 1000:g} CPUs"
    if resource == 3:
        return f"{amount:g} GPUs"
    return f"{format_bytes(amount * MIB)} of {_RESOURCES[resource]}"


def _no_machine_holds(name: str, task: TaskResources, kinds: Sequence[NodeKind]) -> str:
    need = task.amounts
    if any(kind.room_for(task) > 0 for kind in kinds):
        return ""

    # The machine with the smallest shortage, by its worst resource.
    def lack(kind: NodeKind) -> float:
        return max((n - c) / n for n, c in zip(need, kind.amounts, strict=True) if n)

    best = min(kinds, key=lack)
    have = best.amounts
    worst = max((r for r in range(4) if need[r]), key=lambda r: (need[r] - have[r]) / need[r])
    return (
        f"{name[0].upper()}{name[1:]} needs {_shown(worst, need[worst])} and the best machine ('{best.names[0]}') has "
        f"{_shown(worst, have[worst])}: {_shown(worst, need[worst] - have[worst])} short."
    )


def _together(tasks: Sequence[tuple[str, TaskResources]], kinds: Sequence[NodeKind]) -> str:
    names = ", ".join(f"one {name}" for name, _ in tasks)
    need = [sum(task.amounts[r] for _, task in tasks) for r in range(4)]
    have = [sum(kind.amounts[r] * kind.count for kind in kinds) for r in range(4)]
    worst = max((r for r in range(4) if need[r]), key=lambda r: (need[r] - have[r]) / need[r])
    if need[worst] > have[worst]:
        return (
            f"The smallest job ({names}) needs {_shown(worst, need[worst])} and all machines together have "
            f"{_shown(worst, have[worst])}: {_shown(worst, need[worst] - have[worst])} short."
        )
    # Each task fits some machine and all fit the sum, but not side by side.
    largest = max(tasks, key=lambda item: item[1].mem_mb)
    room = max(kinds, key=lambda kind: kind.room_for(largest[1]))
    others = [task for _, task in tasks if task is not largest[1]]
    short = [sum(task.amounts[r] for task in [largest[1], *others]) - room.amounts[r] for r in range(4)]
    tight = max((r for r in range(4) if need[r]), key=lambda r: short[r] / need[r])
    if short[tight] <= 0:
        return f"The smallest job ({names}) fits, but its steps would take longer than a number can express."
    return (
        f"The smallest job ({names}) fits the machines' sum but not the machines: beside each other on "
        f"'{room.names[0]}' the tasks are {_shown(tight, short[tight])} short."
    )
