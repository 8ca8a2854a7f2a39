"""Sets of resource assignment options, counted without being listed.

An option is a worker's resources (its shape), a number of workers and a number of parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver.nodes import NodeKind
from solver.resources import CPU_STEP, WorkerShape

COUNT_LIMIT = 10**300
"""Cap of counts, so that every JSON reader can represent them."""


@dataclass(frozen=True)
class OptionRange:
    """Options that differ only in their numbers of tasks.

    Attributes:
        shapes: possible shapes of a worker. The placement chooses: one shape for all workers or, if `mixed`, one for
            each machine.
        max_ps: maximum parameter servers; the minimum is 1.
        mixed: whether machines may give their workers different shapes.
        ways: number of options for each pair of numbers of tasks.
    """

    shapes: tuple[WorkerShape, ...]
    max_workers: int
    max_ps: int
    min_workers: int = 1
    mixed: bool = False
    ways: int = 1

    @property
    def count(self) -> int:
        return min(COUNT_LIMIT, self.ways * max(0, self.max_workers - self.min_workers + 1) * max(0, self.max_ps))


@dataclass(frozen=True)
class OptionSpace:
    ranges: tuple[OptionRange, ...]

    @property
    def count(self) -> int:
        return min(COUNT_LIMIT, sum(entry.count for entry in self.ranges))


@dataclass(frozen=True)
class Pruning:
    rule: str
    removed: int
    space: OptionSpace
    why: str

    @classmethod
    def of(cls, rule: str, before: OptionSpace, ranges: Sequence[OptionRange], why: str) -> Pruning:
        space = OptionSpace(tuple(ranges))
        return cls(rule, before.count - space.count, space, why)


def raw_space(
    kinds: Sequence[NodeKind],
    max_workers: int | None = None,
    max_gpus_per_worker: int | None = None,
    min_workers: int = 1,
) -> OptionSpace:
    """Every option: each machine gives its workers any quarter CPUs and GPUs that it has, or hosts none; any counts."""
    most_gpus = max(kind.gpus for kind in kinds)
    if max_gpus_per_worker is not None:
        most_gpus = min(most_gpus, max_gpus_per_worker)
    shapes = tuple(
        WorkerShape(gpus, quarters * CPU_STEP)
        for gpus in range(most_gpus + 1)
        for quarters in range(1, max(_quarters(kind) for kind in kinds if kind.gpus >= gpus) + 1)
    )
    if not shapes:
        return OptionSpace(())
    tasks = sum(kind.count * _quarters(kind) for kind in kinds)
    workers = tasks if max_workers is None else min(tasks, max_workers)
    return OptionSpace((OptionRange(shapes, workers, tasks, min_workers, mixed=True, ways=ways_to_mix(kinds, shapes)),))


def ways_to_mix(kinds: Sequence[NodeKind], shapes: Sequence[WorkerShape]) -> int:
    """Number of ways in which each machine can take one of the shapes that it can hold, or none.

    Identical machines are not distinguished, so each kind contributes its multisets of shapes.
    """
    gpus = np.array([shape.gpus for shape in shapes])
    cpus = np.array([shape.cpus for shape in shapes])
    total = 1
    for kind in kinds:
        fitting = int(np.count_nonzero((gpus <= kind.gpus) & (cpus <= kind.cpus)))
        total = min(COUNT_LIMIT, total * math.comb(fitting + kind.count, kind.count))
    return total


def _quarters(kind: NodeKind) -> int:
    return math.floor(kind.cpus / CPU_STEP)
