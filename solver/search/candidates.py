"""All options of a job with their bounds, as columns of one table: there can be millions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.options import OptionRange
from solver.resources import WorkerShape
from solver.search.bounds import Bounds

Key = tuple[float, int, float, int, int, int]
"""Sort key of equally fast options: traffic, tasks, CPUs (more is better), GPUs, region, parameter servers."""
Label = tuple[int, int, int, float]
"""Workers, parameter servers, GPUs of a worker (-1 if they differ), CPUs of a worker without GPUs."""

FIRST_CHUNK_ROWS = 1024
"""Number of best candidates sorted first; few searches need more."""


@dataclass(frozen=True)
class Candidate:
    """An option in a region of the cluster, with its bounds.

    Attributes:
        shapes: a worker's CPUs and GPUs; several if machines may give their workers different ones.
        samples_bound: upper bound of the speed.
        traffic_bound: lower bound of the traffic (Eq. 1).
    """

    region: int
    shapes: tuple[WorkerShape, ...]
    workers: int
    ps: int
    samples_bound: float
    traffic_bound: float
    mixed: bool = False
    least_gpus: int = 0

    @property
    def label(self) -> Label:
        """Identity of the option for a reader: CPUs count only if they do the computing."""
        if self.mixed:
            return self.workers, self.ps, -1, 0.0
        shape = self.shapes[0]
        return self.workers, self.ps, shape.gpus, 0.0 if shape.gpus else shape.cpus

    @property
    def identity(self) -> tuple[int, tuple[WorkerShape, ...], int, int]:
        return self.region, self.shapes, self.workers, self.ps

    def key(self, traffic_bytes: float, total_bytes: int) -> Key:
        """Its sort key among equally fast options, given its traffic; smaller is better."""
        gpus, cpus = _rank_of(self.shapes, mixed=self.mixed)
        traffic = rounded_traffic(traffic_bytes, total_bytes)
        return traffic, self.workers + self.ps, -cpus, gpus, self.region, self.ps


def rounded_traffic(traffic_bytes: float, total_bytes: int) -> float:
    """Traffic in whole models, to a millionth, so that rounding errors do not matter."""
    return round(traffic_bytes / max(1, total_bytes), 6)


class CandidateTable:
    """Every option that may fit, with its bounds, which `bounds` computes for a region, a range and a number of ps."""

    def __init__(
        self,
        regions: Sequence[Sequence[NodeKind]],
        ranges: Sequence[OptionRange],
        total_bytes: int,
        bounds: Callable[[Sequence[NodeKind], OptionRange], Callable[[int], Bounds]],
        max_ps: Callable[[Sequence[NodeKind]], int],
    ) -> None:
        self._ranges = ranges
        blocks: list[tuple[int, int, int, int]] = []
        samples: list[NDArray[np.float64]] = []
        traffic: list[NDArray[np.float64]] = []
        for region_index, region in enumerate(regions):
            for range_index, entry in enumerate(ranges):
                bounds_of = bounds(region, entry)
                for ps in range(1, min(entry.max_ps, max_ps(region)) + 1):
                    found = bounds_of(ps)
                    blocks.append((region_index, range_index, ps, entry.min_workers))
                    samples.append(found.samples_per_s[entry.min_workers - 1 :])
                    traffic.append(found.traffic_bytes[entry.min_workers - 1 :])
        # Each block has one row for each number of workers, from its least on.
        self._blocks = np.array(blocks or [(0, 0, 0, 0)])
        self._starts = np.cumsum([0, *(len(part) for part in samples[:-1])])
        self._samples = np.concatenate(samples) if samples else np.empty(0)
        self._traffic = np.concatenate(traffic) if traffic else np.empty(0)
        self._rounded_traffic = np.round(self._traffic / max(1, total_bytes), 6)
        self._shape_rank = np.array([_rank_of(entry.shapes, mixed=entry.mixed) for entry in ranges] or [(0, 0.0)])

    def __len__(self) -> int:
        return int(np.count_nonzero(self._samples > 0))

    def by_speed(self) -> Iterator[Candidate]:
        """Candidates by upper bound of the speed, highest first."""
        return self._in_order(-self._samples, np.flatnonzero(self._samples > 0))

    def by_traffic(self, least_samples_per_s: float = 0.0) -> Iterator[Candidate]:
        """Candidates by lower bound of the traffic, lowest first, without those below the minimum speed."""
        fast = (self._samples >= least_samples_per_s) & (self._samples > 0)
        return self._in_order(self._rounded_traffic, np.flatnonzero(fast))

    def _in_order(self, first: NDArray[np.float64], rows: NDArray[np.int64]) -> Iterator[Candidate]:
        """The rows by that column, then by `Candidate.key`; in chunks, since rarely all are needed."""
        size = FIRST_CHUNK_ROWS
        while len(rows):
            column = first[rows]
            last = float(np.partition(column, size)[size]) if len(rows) > size else np.inf
            chunk, rows = rows[column <= last], rows[column > last]
            region, shape, ps, workers = self._columns(chunk)
            gpus, cpus = self._shape_rank[shape].T
            # lexsort takes the most important last.
            order = np.lexsort((ps, region, gpus, -cpus, workers + ps, self._rounded_traffic[chunk], first[chunk]))
            columns = (column[order].tolist() for column in (chunk, region, shape, ps, workers))
            yield from map(self._candidate, *columns)
            size *= 8

    def _columns(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Region, range, parameter servers and workers of these rows."""
        block = np.searchsorted(self._starts, rows, side="right") - 1
        region, shape, ps, fewest = self._blocks[block].T
        return region, shape, ps, fewest + rows - self._starts[block]

    def _candidate(self, row: int, region: int, shape: int, ps: int, workers: int) -> Candidate:
        entry = self._ranges[shape]
        samples, traffic = float(self._samples[row]), float(self._traffic[row])
        return Candidate(region, entry.shapes, workers, ps, samples, traffic, entry.mixed, entry.least_gpus)


def _rank_of(shapes: Sequence[WorkerShape], *, mixed: bool) -> tuple[int, float]:
    """GPUs and CPUs by which options are ranked; zeros if workers may differ."""
    return (0, 0.0) if mixed else (shapes[0].gpus, shapes[0].cpus)
