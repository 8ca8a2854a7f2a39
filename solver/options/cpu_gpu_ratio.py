"""Rule 2: CPUs per GPU lie in a range given by the model's FLOPs and its longest path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dike.profile import ModelProfile
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options.space import OptionRange, OptionSpace, Pruning, ways_to_mix
from solver.resources import CPU_STEP, TaskSizes, WorkerShape

CPUS_PER_GPU_STEP = 0.5
"""Step between CPUs per GPU that are tried."""
MAX_HELPERS = 9
"""Maximum ps and chiefs that share a machine's scarce CPUs with its workers."""
MAX_BRANCHES = 4.0
"""Maximum CPUs per GPU for starting operations of parallel branches."""


def cpu_gpu_ratio(space: OptionSpace, kinds: Sequence[NodeKind], hardware: Hardware, sizes: TaskSizes) -> Pruning:
    """Keeps workers of 1, 2, 4, ... GPUs with the CPUs that those can use.

    More CPUs beside the same GPUs never make a worker slower, so its CPUs within the range depend only on the room: the
    options are numbers of GPUs, and the placement decides on the CPUs. Workers without GPUs take an even share of a
    machine's CPUs, beside a ps and the chief. They are kept if there are no GPUs, and on machines without GPUs if
    workers may differ.
    """
    with_gpus = [kind for kind in kinds if kind.gpus]
    without = [kind for kind in kinds if not kind.gpus]
    gpu_shapes, why = _gpu_shapes(with_gpus, sizes.profile, hardware, sizes)
    cpu_shapes = _cpu_shapes(without, sizes)
    ranges: list[OptionRange] = []
    by_gpus: dict[int, list[OptionRange]] = {}
    for entry in space.ranges:
        if entry.mixed:
            shapes = tuple(shape for shape in entry.shapes if shape in gpu_shapes or shape in cpu_shapes)
            if shapes:
                ranges.append(dataclasses.replace(entry, shapes=shapes, ways=ways_to_mix(kinds, shapes)))
        elif set(entry.shapes) <= gpu_shapes:
            by_gpus.setdefault(entry.shapes[0].gpus, []).append(entry)
        elif not with_gpus and set(entry.shapes) <= cpu_shapes:
            ranges.append(entry)
    for entries in by_gpus.values():
        shapes = tuple(sorted(shape for entry in entries for shape in entry.shapes))
        ranges.append(dataclasses.replace(entries[0], shapes=shapes))
    return Pruning.of("cpu_gpu_ratio", space, ranges, why)


def cpus_per_gpu(profile: ModelProfile, hardware: Hardware, kind: NodeKind) -> tuple[float, float]:
    """Range of CPUs that one GPU can use.

    The lower end prepares samples as fast as the GPU trains on them (FLOPs). The upper end adds one CPU for each
    operation that can run in parallel, on average: all FLOPs over those of the longest path.
    """
    gpu = hardware.gpu(kind.gpu_model)
    samples_per_s = gpu.training_flops_per_s / max(profile.flops_step_per_sample, 1.0)
    feed = samples_per_s * profile.sample_bytes / hardware.core_input_bytes_per_s
    branches = min(MAX_BRANCHES, 1 / profile.longest_path_share) if profile.longest_path_share > 0 else MAX_BRANCHES
    low = max(CPU_STEP, _round_up(feed))
    return low, max(low, _round_up(feed + branches))


def _gpu_shapes(
    kinds: Sequence[NodeKind], profile: ModelProfile, hardware: Hardware, sizes: TaskSizes
) -> tuple[set[WorkerShape], str]:
    if not kinds:
        return set(), "Without GPUs a worker takes an even share of a machine's CPUs."
    shapes: set[WorkerShape] = set()
    lows, highs = [], []
    for kind in {(kind.gpu_model, kind.gpus, kind.cpu_millis): kind for kind in kinds}.values():
        low, high = cpus_per_gpu(profile, hardware, kind)
        # Where CPUs are scarce, the rest beside some ps and the chief is divided evenly.
        share = max(CPU_STEP, _round_down((kind.cpus - _helper_cpus(sizes)) / kind.gpus))
        short = {share for share in _shares(kind, sizes) if share < low}
        low = min(low, share)
        lows.append(min(low, *short, low))
        highs.append(high)
        ratios = {low + step * CPUS_PER_GPU_STEP for step in range(int((high - low) / CPUS_PER_GPU_STEP) + 1)} | {
            min(share, high)
        }
        ratios |= short
        gpus = 1
        while gpus <= kind.gpus:
            shapes.update(WorkerShape(gpus, ratio * gpus) for ratio in ratios if ratio * gpus <= kind.cpus)
            gpus *= 2
    why = f"{min(lows):g} to {max(highs):g} CPUs per GPU: to feed it, and one for each parallel branch of the model."
    return shapes, why


def _shares(kind: NodeKind, sizes: TaskSizes) -> set[float]:
    """CPUs for each GPU in use, beside up to `MAX_HELPERS` helpers."""
    free = [kind.cpus - count * sizes.helper_cpus for count in range(MAX_HELPERS + 1)]
    shares = {_round_down(cpus / gpus) for cpus in free for gpus in range(1, kind.gpus + 1)}
    return {share for share in shares if share >= CPU_STEP}


def _cpu_shapes(kinds: Sequence[NodeKind], sizes: TaskSizes) -> set[WorkerShape]:
    shapes: set[WorkerShape] = set()
    for kind in {kind.cpu_millis: kind for kind in kinds}.values():
        parts = 1
        while parts <= max(1, int(kind.cpus)):
            for helpers in (_helper_cpus(sizes), sizes.helper_cpus, 0.0):
                share = _round_down((kind.cpus - helpers) / parts)
                if share >= CPU_STEP:
                    shapes.add(WorkerShape(0, share))
            parts *= 2
    return shapes


def _helper_cpus(sizes: TaskSizes) -> float:
    """CPUs of one ps and the separate chief, if any."""
    return sizes.helper_cpus * (2 if sizes.chief is not None else 1)


def _round_up(cpus: float) -> float:
    return math.ceil(cpus / CPU_STEP - 1e-9) * CPU_STEP


def _round_down(cpus: float) -> float:
    return math.floor(cpus / CPU_STEP + 1e-9) * CPU_STEP
