"""Merges worker shapes that differ only in CPUs that no other task could use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from solver.capacity import Machines
from solver.nodes import NodeKind
from solver.resources import TaskResources, TaskSizes, WorkerShape


def without_spare_cpus(
    shapes: Iterable[WorkerShape], kinds: Sequence[NodeKind], sizes: TaskSizes
) -> tuple[WorkerShape, ...]:
    """Keeps, of the shapes of which equally many fit everywhere, beside any chief and ps, the one with most CPUs.

    More CPUs never make a worker slower, so the best placement is among the rest.

    `shapes`: possible shapes of a worker.
    """
    most = 1 + math.floor(max(kind.cpus for kind in kinds) / sizes.helper_cpus)
    helper = TaskResources(sizes.helper_cpus, mem_mb=0, disk_mb=0)
    ordered = sorted(set(shapes))
    alike = {kind.amounts: kind for kind in kinds}
    loads = [[helper] * number for number in range(most + 1)]
    room = Machines(list(alike.values())).capacity([sizes.worker(shape) for shape in ordered], loads)
    chosen: dict[tuple[int, bytes], WorkerShape] = {}
    for index, shape in enumerate(ordered):
        chosen[shape.gpus, np.maximum(room[:, index], 0).tobytes()] = shape
    return tuple(chosen.values())
