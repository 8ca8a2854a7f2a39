"""Resource assignment options (a worker's size, counts of workers and parameter servers) and how they are pruned.

The paper 'Dike' (section 3.2) cuts their number down by three rules. Here each is one function from a space of options
to a smaller one that says how many options it took away; sizes are counted without listing the options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dike.profile import ModelProfile
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.resources import CPU_STEP, TaskSizes, WorkerShape
from solver.shards import useful_ps_count

COUNT_LIMIT = 10**300
"""Counts stop here, so that every JSON reader can hold them."""
RATIO_STEP = 0.5
"""CPUs per GPU are tried at this distance."""
MAX_BRANCHES = 4.0
"""At most so many CPUs per GPU go to starting operations of parallel branches."""


@dataclass(frozen=True)
class OptionRange:
    """Options with one worker shape.

    Attributes:
        shape: what each worker gets.
        max_workers: 1 to this many workers, from `min_workers` on.
        max_ps: 1 to this many parameter servers.
        min_workers: fewest workers.
    """

    shape: WorkerShape
    max_workers: int
    max_ps: int
    min_workers: int = 1

    @property
    def count(self) -> int:
        return max(0, self.max_workers - self.min_workers + 1) * max(0, self.max_ps)


@dataclass(frozen=True)
class OptionSpace:
    """A set of options in which all workers are alike."""

    ranges: tuple[OptionRange, ...]

    @property
    def count(self) -> int:
        return sum(entry.count for entry in self.ranges)


@dataclass(frozen=True)
class RawSpace:
    """All options: each machine gives its workers a shape of its own, or has none.

    Attributes:
        shapes: for each kind of machine, how many there are and the shapes a worker on one can have.
        max_tasks: most workers, and most parameter servers, that the cluster's CPUs can hold.
    """

    shapes: tuple[tuple[int, tuple[WorkerShape, ...]], ...]
    max_tasks: int

    @property
    def count(self) -> int:
        """Machines that are alike are not told apart, so each kind contributes its multisets of shapes."""
        total = self.max_tasks**2
        for machines, shapes in self.shapes:
            total *= math.comb(len(shapes) + machines, machines)
            if total > COUNT_LIMIT:
                return COUNT_LIMIT
        return total


@dataclass(frozen=True)
class Pruning:
    """What one rule did.

    Attributes:
        rule: its name.
        removed: how many options it took away.
        space: what is left.
        why: one sentence for the user.
    """

    rule: str
    removed: int
    space: OptionSpace
    why: str


def raw_space(kinds: Sequence[NodeKind]) -> RawSpace:
    """Every option: workers of any number of quarter CPUs and GPUs that some machine has, any counts."""
    shapes = tuple(
        (
            kind.count,
            tuple(
                WorkerShape(gpus, quarters * CPU_STEP)
                for gpus in range(kind.gpus + 1)
                for quarters in range(1, math.floor(kind.cpus / CPU_STEP) + 1)
            ),
        )
        for kind in kinds
    )
    return RawSpace(shapes, sum(kind.count * math.floor(kind.cpus / CPU_STEP) for kind in kinds))


def identical_workers(raw: RawSpace) -> Pruning:
    """Rule 1: all workers are alike; unequal ones would wait for each other or train on unequal shares."""
    shapes = sorted({shape for _, shapes in raw.shapes for shape in shapes})
    space = OptionSpace(tuple(OptionRange(shape, raw.max_tasks, raw.max_tasks) for shape in shapes))
    return Pruning("identical_workers", max(0, raw.count - space.count), space, "All workers are alike.")


def cpu_gpu_ratio(
    space: OptionSpace,
    kinds: Sequence[NodeKind],
    profile: ModelProfile,
    hardware: Hardware,
    sizes: TaskSizes,
    max_gpus_per_worker: int | None = None,
) -> Pruning:
    """Rule 2: CPUs per GPU lie in a range given by the model's FLOPs and its longest path.

    Without GPUs a worker takes an even share of a machine's CPUs, beside a ps and the chief.

    Args:
        space: what rule 1 left.
        kinds: the machines.
        profile: the model.
        hardware: known speeds.
        sizes: resources of the roles.
        max_gpus_per_worker: most GPUs one worker can use.
    """
    if any(kind.gpus for kind in kinds):
        allowed, why = _gpu_shapes(kinds, profile, hardware, sizes, max_gpus_per_worker)
    else:
        allowed, why = _cpu_shapes(kinds, sizes), "Without GPUs a worker takes an even share of a machine's CPUs."
    left = OptionSpace(tuple(entry for entry in space.ranges if entry.shape in allowed))
    return Pruning("cpu_gpu_ratio", space.count - left.count, left, why)


def task_counts(
    space: OptionSpace,
    kinds: Sequence[NodeKind],
    profile: ModelProfile,
    sizes: TaskSizes,
    max_workers: int | None = None,
    *,
    every_machine_works: bool = False,
) -> Pruning:
    """Rule 3: no more workers than the machines and their GPUs hold, no more parameter servers than machines.

    Two parameter servers on one machine share its network card, so there is one at most on each; and none that would
    leave the largest shard as large as before. The paper also asks for at least one worker per GPU machine; on a slow
    network fewer are faster, so that bound is kept only where `every_machine_works` asks for it.

    Args:
        space: what rule 2 left.
        kinds: the machines.
        profile: the model.
        sizes: resources of the roles.
        max_workers: the user's limit.
        every_machine_works: keep the paper's lower bound.
    """
    max_ps = useful_ps_count(profile, sum(kind.count for kind in kinds))
    ranges = []
    for entry in space.ranges:
        worker = sizes.worker(entry.shape)
        rooms = [(kind.count, kind.room_for(worker)) for kind in kinds]
        most = sum(count * room for count, room in rooms)
        if max_workers is not None:
            most = min(most, max_workers)
        least = min(most, sum(count for count, room in rooms if room)) if every_machine_works else 1
        if most >= 1:
            ranges.append(OptionRange(entry.shape, min(entry.max_workers, most), min(entry.max_ps, max_ps), least))
    left = OptionSpace(tuple(ranges))
    why = f"At most {max_ps} parameter server{'s' if max_ps > 1 else ''}: one per machine, none without effect."
    return Pruning("task_counts", space.count - left.count, left, why)


def cpus_per_gpu(profile: ModelProfile, hardware: Hardware, kind: NodeKind) -> tuple[float, float]:
    """Range of CPUs one GPU can use.

    The lower end prepares samples as fast as the GPU trains on them (FLOPs). The upper end adds one CPU for each
    operation that can run at the same time, on average: all FLOPs over those of the longest path.
    """
    gpu = hardware.gpu(kind.gpu_model)
    samples_per_s = gpu.training_flops_per_s / max(profile.flops_step_per_sample, 1.0)
    feed = samples_per_s * profile.sample_bytes / hardware.core_input_bytes_per_s
    branches = min(MAX_BRANCHES, 1 / profile.longest_path_share) if profile.longest_path_share > 0 else MAX_BRANCHES
    low = max(CPU_STEP, _round_up(feed))
    return low, max(low, _round_up(feed + branches))


def _gpu_shapes(
    kinds: Sequence[NodeKind],
    profile: ModelProfile,
    hardware: Hardware,
    sizes: TaskSizes,
    max_gpus_per_worker: int | None,
) -> tuple[set[WorkerShape], str]:
    shapes: set[WorkerShape] = set()
    lows, highs = [], []
    for kind in kinds:
        if not kind.gpus:
            continue
        low, high = cpus_per_gpu(profile, hardware, kind)
        # Where CPUs are short, what is left beside a ps and the chief is shared out.
        share = max(CPU_STEP, _round_down((kind.cpus - _helper_cpus(sizes)) / kind.gpus))
        low = min(low, share)
        lows.append(low)
        highs.append(high)
        ratios = {low + step * RATIO_STEP for step in range(int((high - low) / RATIO_STEP) + 1)} | {min(share, high)}
        gpus = 1
        while gpus <= min(kind.gpus, max_gpus_per_worker or kind.gpus):
            shapes.update(WorkerShape(gpus, ratio * gpus) for ratio in ratios if ratio * gpus <= kind.cpus)
            gpus *= 2
    why = f"{min(lows):g} to {max(highs):g} CPUs per GPU: to feed it, and one for each parallel branch of the model."
    return shapes, why


def _cpu_shapes(kinds: Sequence[NodeKind], sizes: TaskSizes) -> set[WorkerShape]:
    shapes: set[WorkerShape] = set()
    for kind in kinds:
        parts = 1
        while parts <= max(1, int(kind.cpus)):
            for helpers in (_helper_cpus(sizes), sizes.helper_cpus, 0.0):
                share = _round_down((kind.cpus - helpers) / parts)
                if share >= CPU_STEP:
                    shapes.add(WorkerShape(0, share))
            parts *= 2
    return shapes


def _helper_cpus(sizes: TaskSizes) -> float:
    """CPUs of one ps and the separate chief, if there is one."""
    return sizes.helper_cpus * (2 if sizes.chief is not None else 1)


def _round_up(cpus: float) -> float:
    return math.ceil(cpus / CPU_STEP - 1e-9) * CPU_STEP


def _round_down(cpus: float) -> float:
    return math.floor(cpus / CPU_STEP + 1e-9) * CPU_STEP
