"""Sets of resource assignment options, counted without being listed.

An option is what each worker gets (its shape), a number of workers and a number of parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver.nodes import NodeKind
from solver.resources import CPU_STEP, WorkerShape

COUNT_LIMIT = 10**300
"""Counts stop here, so that every JSON reader can hold them."""


@dataclass(frozen=True)
class OptionRange:
    """Options that differ in nothing but their numbers of tasks.

    Attributes:
        shapes: what a worker may get. The placement decides: one shape for all workers or, if `mixed`, one for each
            machine.
        max_workers: `min_workers` to this many workers.
        max_ps: 1 to this many parameter servers.
        min_workers: fewest workers.
        mixed: whether machines may give their workers different shapes.
        ways: how many options there are for each pair of numbers of tasks.
        least_gpus: all workers together have at least so many GPUs.
    """

    shapes: tuple[WorkerShape, ...]
    max_workers: int
    max_ps: int
    min_workers: int = 1
    mixed: bool = False
    ways: int = 1
    least_gpus: int = 0

    @property
    def count(self) -> int:
        return min(COUNT_LIMIT, self.ways * max(0, self.max_workers - self.min_workers + 1) * max(0, self.max_ps))


@dataclass(frozen=True)
class OptionSpace:
    """A set of options."""

    ranges: tuple[OptionRange, ...]

    @property
    def count(self) -> int:
        return min(COUNT_LIMIT, sum(entry.count for entry in self.ranges))


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

    @classmethod
    def of(cls, rule: str, before: OptionSpace, ranges: Sequence[OptionRange], why: str) -> Pruning:
        """What is left are these ranges."""
        space = OptionSpace(tuple(ranges))
        return cls(rule, before.count - space.count, space, why)


def raw_space(
    kinds: Sequence[NodeKind],
    max_workers: int | None = None,
    max_gpus_per_worker: int | None = None,
    min_workers: int = 1,
) -> OptionSpace:
    """Every option: each machine gives its workers any quarter CPUs and GPUs that it has, or hosts none; any counts.

    Args:
        kinds: the machines.
        max_workers: the user's limit.
        max_gpus_per_worker: most GPUs one worker can use.
        min_workers: fewest workers.
    """
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
    """In how many ways machines can each take one of the shapes that they can hold, or none.

    Machines that are alike are not told apart, so each kind contributes its multisets of shapes.
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
