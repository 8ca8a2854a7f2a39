"""The paper's lower bound on the number of workers, in the strict form of its example: no GPU idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from solver.capacity import Ints, Machines
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options.space import OptionRange, OptionSpace, Pruning
from solver.resources import TaskSizes, gpu_bytes


def all_gpus_used(space: OptionSpace, kinds: Sequence[NodeKind], hardware: Hardware, sizes: TaskSizes) -> Pruning:
    """Keeps, for each size of worker, only the largest number of workers that the machines hold.

    So no GPU is idle that such a worker could use (without GPUs: no machine), which implies the paper's 'at least as
    many workers as machines with GPUs' (section 3.2). On slow networks fewer workers are faster.

    `space`: options with identical workers. `hardware`: the GPUs' memory.
    """
    counts = np.array([kind.count for kind in kinds])
    ranges: list[OptionRange] = []
    for entry in space.ranges:
        held = counts @ _rooms(kinds, entry, hardware, sizes)
        most = min(entry.max_workers, int(held.max()))
        shapes = tuple(shape for shape, workers in zip(entry.shapes, held, strict=True) if workers >= most)
        if most >= entry.min_workers:
            ranges.append(dataclasses.replace(entry, shapes=shapes, min_workers=most, max_workers=most))
    return Pruning.of("all_gpus_used", space, ranges, "No GPU is idle that a worker of its size could use.")


def _rooms(kinds: Sequence[NodeKind], entry: OptionRange, hardware: Hardware, sizes: TaskSizes) -> Ints:
    """Workers of each shape that a machine of each kind holds; none if the GPUs' memory is too small for the model."""
    room = Machines(kinds).capacity([sizes.worker(shape) for shape in entry.shapes])[:, :, 0]
    fits = np.array([gpu_bytes(sizes.variable_bytes) <= hardware.gpu(kind.gpu_model).memory_bytes for kind in kinds])
    needs_gpu = np.array([shape.gpus > 0 for shape in entry.shapes])
    return np.where(needs_gpu & ~fits[:, None], 0, room)
