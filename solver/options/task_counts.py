"""Rule 3: no more workers than the machines hold, one ps per machine, no useless ps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from solver.capacity import Machines
from solver.nodes import NodeKind
from solver.options.space import OptionRange, OptionSpace, Pruning
from solver.resources import TaskSizes


def task_counts(space: OptionSpace, kinds: Sequence[NodeKind], sizes: TaskSizes, useful_ps: int) -> Pruning:
    """Limits the numbers of tasks.

    Two parameter servers on one machine share its network card, so each machine has at most one; and none are added
    that would not shrink the largest shard.

    `useful_ps`: number of ps beyond which the largest shard does not shrink (`solver.shards.useful_ps_count`).
    """
    counts = np.array([kind.count for kind in kinds])
    max_ps = min(int(counts.sum()), useful_ps)
    ranges: list[OptionRange] = []
    for entry in space.ranges:
        room = Machines(kinds).capacity([sizes.worker(shape) for shape in entry.shapes])[:, :, 0]
        shapes = tuple(shape for shape, fits in zip(entry.shapes, room.max(axis=0), strict=True) if fits)
        if shapes:
            most = int(counts @ room.max(axis=1) if entry.mixed else (counts @ room).max())
            workers, ps = min(entry.max_workers, most), min(entry.max_ps, max_ps)
            ranges.append(dataclasses.replace(entry, shapes=shapes, max_workers=workers, max_ps=ps))
    why = f"At most {max_ps} parameter server{'s' if max_ps > 1 else ''}: one per machine, none without effect."
    return Pruning.of("task_counts", space, ranges, why)
