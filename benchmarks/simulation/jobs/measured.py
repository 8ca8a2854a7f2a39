"""Measured step times by placement and batch size, as recorded for Pollux (OSDI 2021).

A folder of tables has one folder for each model with `placements.csv` (placement: GPUs on each machine, one digit a
machine; local_bsz; step_time; sync_time) and, for more machines, `scalability.csv` (num_nodes; num_replicas: the total
number of GPUs; the rest as above).
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.simulation.jobs.machines import Layout, Machines, even_layout
from dike.exceptions import BadInputError
from framework.policies.jobs.interface import Counts, TaskNeeds
from solver.calibration.nnls import Floats
from solver.choices import Sharding
from solver.shards import DEFAULT_SHARDING
from solver.units import GIB, MIB

WORKER_CPUS = 2
WORKER_MEM_MB = 8 * GIB // MIB
BATCH_FACTORS = (2, 4, 8)
"""Global batches that users choose, as multiples of the largest that one GPU holds."""


Times = tuple[float, float, float]
"""Samples for each GPU in a step, its seconds, and those spent waiting for the network."""


class MeasuredModel:
    """A model that trains synchronously with all-reduce, at measured speeds.

    Times are interpolated linearly between measured batches and numbers of machines and GPUs. A global batch too large
    for the GPUs is computed in several parts, of which only the last waits for the network.

    Attributes:
        needs: resources of a worker: a GPU, and some CPU and memory.
        max_ps: 0, there are no parameter servers.
        batch_sizes: the global batches that users choose from.

    Raises:
        BadInputError: if the tables cannot be read or do not cover the machines.
    """

    synchronous = True
    max_ps = 0

    def __init__(self, folder: Path, machines: Machines) -> None:
        self.name = folder.name
        cpus = min(WORKER_CPUS * 1000, machines.capacity[0] // machines.gpus)
        self.needs = TaskNeeds((cpus, min(WORKER_MEM_MB, machines.capacity[1] // machines.gpus), 0, 1))
        self._by_placement: dict[tuple[int, ...], list[Times]] = defaultdict(list)
        self._by_counts: dict[Counts, list[Times]] = defaultdict(list)
        self._read(folder)
        self._machine = machines.capacity
        self._others: tuple[MeasuredModel, ...] = ()
        self._expected: dict[int, float] = {}
        self._speeds: dict[tuple[tuple[int, ...], int], float] = {}
        self._nodes = sorted({nodes for nodes, _ in self._by_counts})
        most = max(max(placement) for placement in self._by_placement)
        if machines.gpus > most:
            raise BadInputError(
                f"The table of '{self.name}' has at most {most} GPUs on a machine, not {machines.gpus}; use machines "
                "with fewer GPUs or another table."
            )
        batches = [batch for rows in self._by_placement.values() for batch, _, _ in rows]
        self._least_batch, self._largest_batch = min(batches), max(batches)
        self.batch_sizes = tuple(int(factor * self._largest_batch) for factor in BATCH_FACTORS)

    def _read(self, folder: Path) -> None:
        for row in _rows(folder / "placements.csv", "placement"):
            placement = tuple(sorted(map(int, row["placement"]), reverse=True))
            self._by_placement[placement].append(_times(row))
            self._by_counts[len(placement), sum(placement)].append(_times(row))
        if (folder / "scalability.csv").exists():
            for row in _rows(folder / "scalability.csv", "num_nodes", "num_replicas"):
                self._by_counts[int(row["num_nodes"]), int(row["num_replicas"])].append(_times(row))

    def max_workers(self, batch_size: int) -> int:
        """The maximum number of workers whose local batch is at least the smallest measured."""
        return max(1, int(batch_size / self._least_batch))

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding = DEFAULT_SHARDING) -> float:
        """The measured speed; `sharding` has no effect."""
        key = tuple(workers for workers, _ in layout), batch_size
        if key not in self._speeds:
            self._speeds[key] = self._measured(*key)
        return self._speeds[key]

    def expected_samples_per_s(self, workers: int, ps: int, batch_size: int) -> float:
        """Geometric mean of the other models' speedups, as from a cluster's history; linear without other models."""
        if workers not in self._expected:
            gains = [other.gain(workers) for other in self._others]
            self._expected[workers] = statistics.geometric_mean(gains) if gains else float(workers)
        return self._expected[workers]

    def gain(self, workers: int) -> float:
        """Speedup of `workers` over one worker, on the fewest machines, with the middle one of the batches."""
        batch_size = self.batch_sizes[len(self.batch_sizes) // 2]
        one, all_ = (
            self.samples_per_s(even_layout(self.needs, (count, 0), self._machine) or ((1, 0),) * count, batch_size)
            for count in (1, workers)
        )
        return all_ / one

    def warm_start_from(self, others: Sequence[MeasuredModel]) -> None:
        """Sets the models that have run on the machines before."""
        self._others = tuple(others)
        self._expected.clear()

    def _measured(self, placement: tuple[int, ...], batch_size: int) -> float:
        local = batch_size / sum(placement)
        parts = max(1, math.ceil(local / self._largest_batch - 1e-9))
        step_s, waiting_s = self._step(placement, local / parts)
        return float(batch_size / (step_s + (parts - 1) * (step_s - waiting_s)))

    def _step(self, placement: tuple[int, ...], batch: float) -> Floats:
        """Seconds of a step and of its wait for the network."""
        if placement in self._by_placement:
            return _at_batch(self._by_placement[placement], batch)
        nodes, gpus = min(len(placement), self._nodes[-1]), sum(placement)
        below = max(known for known in self._nodes if known <= nodes)
        above = min(known for known in self._nodes if known >= nodes)
        low, high = self._on_nodes(below, gpus, batch), self._on_nodes(above, gpus, batch)
        return low if below == above else low + (high - low) * (nodes - below) / (above - below)

    def _on_nodes(self, nodes: int, gpus: int, batch: float) -> Floats:
        known = sorted(count for machines, count in self._by_counts if machines == nodes)
        times = np.array([_at_batch(self._by_counts[nodes, count], batch) for count in known])
        return np.array([np.interp(gpus, known, column) for column in times.T])


def _at_batch(rows: Sequence[Times], batch: float) -> Floats:
    """Step and waiting time at a batch size; repeated measurements are averaged."""
    ordered = np.array(sorted(rows))
    batches = np.unique(ordered[:, 0])
    means = np.array([ordered[ordered[:, 0] == one, 1:].mean(axis=0) for one in batches])
    return np.array([np.interp(batch, batches, column) for column in means.T])


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    """Reads a table; checks that these columns and those of `_times` are numbers."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise BadInputError(f"The table {path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"The table {path} is not a CSV file in UTF-8; see benchmarks/simulate-jobs.md.") from error
    for line, row in enumerate(rows, 2):
        wrong = [name for name in columns if not _is_count(row.get(name))]
        wrong += [name for name in ("local_bsz", "step_time") if not _is_number(row.get(name), above_0=True)]
        wrong += [name for name in ("sync_time",) if not _is_number(row.get(name))]
        if wrong:
            raise BadInputError(
                f"Line {line} of {path} has no usable number in column '{wrong[0]}'; see benchmarks/simulate-jobs.md."
            )
    if not rows:
        raise BadInputError(f"The table {path} is empty; see benchmarks/simulate-jobs.md.")
    return rows


def _is_count(text: str | None) -> bool:
    return text is not None and text.isdecimal() and int(text) > 0


def _is_number(text: str | None, *, above_0: bool = False) -> bool:
    try:
        number = math.nan if text is None else float(text)
    except ValueError:
        return False
    return math.isfinite(number) and (number > 0 if above_0 else number >= 0)


def _times(row: dict[str, str]) -> Times:
    return float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
