"""All options of a job with their bounds, as columns of one table: there can be hundreds of thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.bounds import Bounds
from solver.nodes import NodeKind
from solver.options import OptionRange
from solver.resources import WorkerShape

Key = tuple[float, int, float, int, int, int]
"""What ranks options that are equally fast: traffic, tasks, CPUs (more is better), GPUs, region, parameter servers."""


@dataclass(frozen=True)
class Candidate:
    """An option, and the part of the cluster to place it in, with what it can reach at best.

    Attributes:
        region: index of the part of the cluster.
        shape: a worker's CPUs and GPUs.
        workers: how many workers.
        ps: how many parameter servers.
        samples_bound: no placement is faster.
        traffic_bound: no placement has less traffic (Eq. 1).
    """

    region: int
    shape: WorkerShape
    workers: int
    ps: int
    samples_bound: float
    traffic_bound: float

    @property
    def label(self) -> tuple[int, int, int, float]:
        """What makes it another option to a reader: CPUs count only where they do the computing."""
        return self.workers, self.ps, self.shape.gpus, 0.0 if self.shape.gpus else self.shape.cpus

    @property
    def identity(self) -> tuple[int, WorkerShape, int, int]:
        return self.region, self.shape, self.workers, self.ps

    def key(self, traffic_bytes: float, total_bytes: int) -> Key:
        """Its rank among equally fast options, given its traffic; smaller is better."""
        traffic = rounded_traffic(traffic_bytes, total_bytes)
        return traffic, self.workers + self.ps, -self.shape.cpus, self.shape.gpus, self.region, self.ps


def rounded_traffic(traffic_bytes: float, total_bytes: int) -> float:
    """Traffic in whole models, to a millionth, so that rounding errors make no difference."""
    return round(traffic_bytes / max(1, total_bytes), 6)


class CandidateTable:
    """Every option that may fit, with its bounds.

    Args:
        regions: parts of the cluster.
        ranges: options by worker shape.
        total_bytes: size of all variables.
        bounds: bounds of all options with this region, range and number of parameter servers.
    """

    def __init__(
        self,
        regions: Sequence[Sequence[NodeKind]],
        ranges: Sequence[OptionRange],
        total_bytes: int,
        bounds: Callable[[Sequence[NodeKind], OptionRange, int], Bounds],
    ) -> None:
        self._ranges = ranges
        parts: list[NDArray[np.float64]] = []
        for region_index, region in enumerate(regions):
            machines = sum(kind.count for kind in region)
            for range_index, entry in enumerate(ranges):
                for ps in range(1, min(entry.max_ps, machines) + 1):
                    found = bounds(region, entry, ps)
                    workers = np.flatnonzero(found.samples_per_s > 0) + 1
                    workers = workers[workers >= entry.min_workers]
                    part = np.empty((7, len(workers)))
                    part[:4] = np.array([[region_index], [range_index], [ps], [-entry.shape.cpus]])
                    part[4] = workers
                    part[5] = found.samples_per_s[workers - 1]
                    part[6] = found.traffic_bytes[workers - 1]
                    parts.append(part)
        self._rows = np.concatenate(parts, axis=1) if parts else np.empty((7, 0))
        gpus = np.array([entry.shape.gpus for entry in ranges] or [0])
        region, shape, ps_count, cpus, workers_count, samples, traffic = self._rows
        # The same order as `Candidate.key`; lexsort takes the most important last.
        rank = (ps_count, region, gpus[shape.astype(int)], cpus, workers_count + ps_count)
        self._traffic = np.round(traffic / max(1, total_bytes), 6)
        self._by_traffic = np.lexsort((*rank, self._traffic))
        self._by_speed = np.lexsort((*rank, self._traffic, -samples))

    def __len__(self) -> int:
        return self._rows.shape[1]

    def by_speed(self) -> Iterator[Candidate]:
        """Highest bound on the speed first."""
        return map(self._candidate, self._by_speed.tolist())

    def by_traffic(self, least_samples_per_s: float = 0.0) -> Iterator[Candidate]:
        """Lowest bound on the traffic first, those left out whose bound on the speed is below the limit."""
        fast = self._rows[5][self._by_traffic] >= least_samples_per_s
        return map(self._candidate, self._by_traffic[fast].tolist())

    def _candidate(self, index: int) -> Candidate:
        region, shape, ps, _, workers, samples, traffic = self._rows[:, index].tolist()
        return Candidate(int(region), self._ranges[int(shape)].shape, int(workers), int(ps), samples, traffic)
