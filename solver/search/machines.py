"""What each machine may have: no parameter server (ps) or one, and workers of one of some shapes, as arrays.

The arrays are read in two ways. *Optimistic*: each machine has, of all shards, the best one for it, the smallest ps'
memory, no chief, and racks do not matter. No placement is faster than that, so it gives the bound. *Real*: the shards
have the mean size except one that is far larger, and the chief has a machine.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solver.capacity import Ints
from solver.nodes import NodeKind
from solver.rate_arrays import waits_s
from solver.resources import CPU_STEP, TaskResources, WorkerShape
from solver.search.space import ROUNDING, Floats, Space
from solver.shards import Shards
from solver.units import MIB

MAX_FEW_MACHINES = 40
"""Number of machines up to which many cases are examined together, and small workers without GPUs in detail."""
MAX_CPU_WORKER_COUNT = 16
"""Number of workers without GPUs on a machine up to which all numbers are examined; of the others only some."""
MORE_CPU_WORKERS = 1.5
"""Ratio of these numbers."""
PIECES_PER_PS = 20
"""Pieces of all bytes for each ps, ..."""
MAX_CELLS = 20_000
"""... up to this number for all kinds of machines together, ..."""
MIN_PIECES = 100
"""... but at least this number."""
NO_RESOURCES = TaskResources(1e-3, 0, 0)
"""Smallest task, to examine whether others fit."""


@dataclass(frozen=True)
class Row:
    """Identical machines, with their special tasks.

    Attributes:
        kind: index of their kind.
        kinds: all kinds of machines merged into this row.
        chief: whether it has the chief.
        largest: whether it has the largest shard; then it gets no other ps.
    """

    kind: int
    count: int
    chief: bool = False
    largest: bool = False
    kinds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """What all placements of a case have in common.

    Attributes:
        slowest: minimum and maximum seconds that the slowest ps machine takes to send its shard (asynchronous).
        steps: minimum and maximum seconds of a worker's step (asynchronous), transfers counted over the fastest card.
        real_steps: the same for the real reading, which are not too far apart.
    """

    slowest: tuple[float, float] = (0.0, math.inf)
    steps: tuple[float, float] = (0.0, math.inf)
    real_steps: tuple[float, float] = (0.0, math.inf)


ANY_CASE = Case()


class MachineArrays:
    """Possibilities of machines with no ps or one; arrays are rows x ps x choices of workers.

    Attributes:
        key: identifies the arrays within a search; set by the search.
    """

    def __init__(
        self,
        space: Space,
        rows: Sequence[Row],
        shards: Shards,
        *,
        optimistic: bool,
        ps_bytes: tuple[float, float] | None = None,
        most_ps: int = 0,
    ) -> None:
        """Fills the arrays; call `limited_to` before use.

        Args:
            space: the placements.
            rows: the machines.
            shards: on the ps; with `ps_bytes`, the largest variable and the rest.
            optimistic: whether each machine has the best shard for it.
            ps_bytes: minimum and maximum bytes on a ps, if shards differ or any number of ps is possible. Then machines
                have pieces of all bytes, give or take one: any shards can be rounded to that, so that the whole is
                right.
            most_ps: maximum number of ps, with `ps_bytes`.
        """
        sizes, kinds = space.scenario.sizes, space.scenario.kinds
        self.rows, self.total, self._within = rows, float(shards.total), space.within_bytes_per_s
        self.is_optimistic = optimistic
        has_largest = any(row.largest for row in rows)
        self.largest = float(shards.sizes[0]) if optimistic and not has_largest else 0.0
        self.counts = np.array([row.count for row in rows])
        rest = shards.sizes[1:] if has_largest else shards.sizes
        self.ps, self.has_pieces = len(rest), ps_bytes is not None
        if ps_bytes is None:
            self.low = np.arange(2) * float((rest[-1] if optimistic else sum(rest) / len(rest)) if rest else 0.0)
            self.high = np.arange(2) * float((rest[0] if optimistic else sum(rest) / len(rest)) if rest else 0.0)
            is_possible = np.ones(2, dtype=bool)
        else:
            most_ps = min(most_ps, int(self.counts.sum()))
            self.ps = min(PIECES_PER_PS * most_ps, max(MIN_PIECES, MAX_CELLS // len(rows)))
            piece = max(1.0, self.total) / max(1, self.ps)
            numbers = np.arange(math.floor(min(ps_bytes[1], self.total) / piece) + 2)
            self.low = np.where(numbers > 0, np.maximum((numbers - 1) * piece, ps_bytes[0]), 0.0)
            self.high = np.minimum((numbers + 1) * piece, ps_bytes[1])
            if ps_bytes[0] >= piece:
                self.high[0] = 0.0
            is_possible = (self.low <= self.high * (1 + ROUNDING)) | (numbers == 0)
        of_row = [kinds[row.kind] for row in rows]
        taken = [
            [
                *([sizes.ps(shards.sizes[0])] if row.largest else []),
                *([sizes.chief] if row.chief and sizes.chief is not None else []),
            ]
            for row in rows
        ]
        self.base = np.array([float(shards.sizes[0]) if row.largest else 0.0 for row in rows])
        have = np.array([kind.amounts for kind in of_row])
        have = have - np.array([np.sum([task.amounts for task in tasks] or [(0, 0, 0, 0)], axis=0) for tasks in taken])
        if self.has_pieces:
            # A ps takes whole MiB.
            needs = np.array(
                [(0, 0, 0, 0), *(sizes.ps(max(0, int(size) - MIB)).amounts for size in self.low[1:].tolist())]
            )
        else:
            held = (rest[-1] if optimistic else rest[0]) if rest else 0
            needs = np.array([(0, 0, 0, 0), sizes.ps(held).amounts])
        free = have[:, None, :] - needs[None, :, :]
        self.fits = (free >= 0).all(axis=2) & is_possible
        self.fits[[row.largest for row in rows], 1:] = False
        self.cards = np.array([kind.network_bytes_per_s for kind in of_row])[:, None, None]
        self._waited_s = 0.0
        self.key: object = None
        self._fill_choices(space, of_row, free)
        self.steps = self.work + space.transfer_s

    def limited_to(self, case: Case) -> MachineArrays:
        """Returns a copy, ready for use, for one case."""
        arrays = copy.copy(self)
        arrays._waited_s = case.slowest[0]
        in_time = (self.base[:, None] + self.low) / self.cards[:, :, 0] <= case.slowest[1] * (1 + ROUNDING)
        arrays.fits = self.fits & in_time
        shortest, longest = case.steps if self.is_optimistic else case.real_steps
        allowed = self.steps <= longest * (1 + ROUNDING)
        is_short = self.steps < shortest * (1 - ROUNDING)
        if self.is_optimistic:
            # A worker without GPUs may have fewer CPUs, until its step is long enough.
            missing = np.where(is_short & self.is_cpu, shortest - self.steps, 0.0)
            arrays.work = self.work + missing
            is_short &= ~self.is_cpu
        arrays.room = np.where(arrays.fits[:, :, None] & allowed & ~is_short, self.room, 0)
        if not arrays.are_few:
            arrays._merge_rows()
        return arrays

    def _fill_choices(self, space: Space, of_row: Sequence[NodeKind], free: Ints) -> None:
        """Fills room, work, samples and CPUs of each choice: the shapes with GPUs, then shares of the CPUs."""
        scenario, sizes = space.scenario, space.scenario.sizes
        rooms, works, samples, cpus = [], [], [], []
        kinds = np.array([row.kind for row in self.rows], dtype=np.int64)
        for shape in space.gpu_shapes:
            model = scenario.model(shape)
            need = np.array(sizes.worker(shape).amounts)
            room = (free[:, :, need > 0] // need[need > 0]).min(axis=2)
            hosts = space.hosts(shape)[kinds]
            rooms.append(np.where(hosts[:, None], room, 0))
            work = space.work_s(shape)[kinds]
            works.append(np.broadcast_to(work[:, None], room.shape))
            samples.append(model.samples_per_step)
            cpus.append(np.full(room.shape, shape.cpus))
        if space.cpu_workers:
            need = np.array(sizes.worker(WorkerShape(0, CPU_STEP)).amounts)[1:3]
            # A GPU or its machine may be too small for any worker.
            hosts_gpus = np.any([room[:, 0] > 0 for room in rooms], axis=0) if rooms else np.zeros(len(of_row), bool)
            allowed = np.array([not kind.gpus for kind in of_row]) | ~hosts_gpus
            beside = (free[:, :, 1:3] // need).min(axis=2)
            for most, share in self._cpu_choices(space, free[:, :, 0] / 1000):
                room = np.where((share > 0) & allowed[:, None], np.minimum(beside, most), 0).astype(np.int64)
                rooms.append(room)
                works.append(space.cpu_work_s(share))
                samples.append(scenario.profile.batch_size)
                cpus.append(share)
        shape_of = (*free.shape[:2], 0)
        self.room = np.maximum(np.stack(rooms, axis=2), 0) if rooms else np.zeros(shape_of, dtype=np.int64)
        self.work = np.stack(works, axis=2) if works else np.zeros(shape_of)
        self.cpus = np.stack(cpus, axis=2) if cpus else np.zeros(shape_of)
        self.samples = np.array(samples, dtype=np.float64)
        self.is_cpu = np.arange(len(samples)) >= len(space.gpu_shapes)

    def _cpu_choices(self, space: Space, free_cpus: Floats) -> Sequence[tuple[Ints | Floats, Floats]]:
        """Numbers of workers without GPUs on each machine, and CPUs of each.

        For a given number none are faster than those with an even share. Of large numbers, the optimistic reading
        combines the largest of a range with the CPUs of the smallest.
        """
        if space.cpu_shape is not None:
            share = np.full(free_cpus.shape, space.cpu_shape)
            return [(np.floor(free_cpus / share + ROUNDING), share)]
        most = int(max(1.0, free_cpus.max(initial=0.0)) / space.smallest_cpu_share + ROUNDING)
        choices, count = [], 1
        while count <= most:
            last = count if count < MAX_CPU_WORKER_COUNT else math.ceil(count * MORE_CPU_WORKERS) - 1
            last = max(count, last)
            share = np.floor(free_cpus / count / CPU_STEP + ROUNDING) * CPU_STEP
            if self.is_optimistic and last > count:
                fitting = np.minimum(last, np.floor(free_cpus / space.smallest_cpu_share + ROUNDING))
            else:
                fitting = np.full(free_cpus.shape, count)
            choices.append((fitting, np.where(share >= space.smallest_cpu_share - ROUNDING, share, 0.0)))
            count = last + 1
        return choices

    def _merge_rows(self) -> None:
        """Merges rows that differ only in unused resources."""
        alike: dict[object, list[int]] = {}
        for index, row in enumerate(self.rows):
            arrays: tuple[NDArray[Any], ...] = self.fits, self.cards, self.base, self.room, self.work, self.cpus
            # The machines with the chief and the largest shard stay separate.
            special = index if row.chief or row.largest else -1
            alike.setdefault((special, *(array[index].tobytes() for array in arrays)), []).append(index)
        self.rows = [
            replace(
                self.rows[same[0]],
                count=sum(self.rows[index].count for index in same),
                kinds=tuple(self.rows[index].kind for index in same),
            )
            for same in alike.values()
        ]
        first = [same[0] for same in alike.values()]
        self.counts = np.array([row.count for row in self.rows])
        self.fits, self.cards, self.base = self.fits[first], self.cards[first], self.base[first]
        self.room, self.work, self.cpus = self.room[first], self.work[first], self.cpus[first]
        self.steps = self.steps[first]

    @functools.cached_property
    def effort(self) -> float:
        """Effort of one relaxed problem, relative to one of a few machines."""
        return 1.0 + min(200.0, self.room.size / 6_000)

    @functools.cached_property
    def are_few(self) -> bool:
        return bool(self.counts.sum() <= MAX_FEW_MACHINES)

    @functools.cached_property
    def most_workers(self) -> int:
        return int(self.counts @ self.room.max(axis=(1, 2), initial=0))

    @functools.cached_property
    def most_beside(self) -> int:
        return int(self.room.max(initial=0))

    @functools.cached_property
    def most_samples(self) -> float:
        """Maximum samples of one worker's step."""
        return float(self.samples.max())

    @functools.cached_property
    def most_rate(self) -> float:
        """Samples/s of all machines with workers that never wait (asynchronous)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = np.where(self.room > 0, self.room * self.samples / self.work, 0.0)
        return float(self.counts @ rates.max(axis=(1, 2), initial=0.0))

    @functools.cached_property
    def fastest_card(self) -> float:
        return float(self.cards.max())

    @functools.cached_property
    def ends(self) -> tuple[Floats, ...]:
        """Minimum and maximum bytes of shards on a machine, rows x ps x 1; one entry if they are equal."""
        low, high = (self.base[:, None, None] + ends[None, :, None] for ends in (self.low, self.high))
        return (low,) if np.array_equal(low, high) else (low, high)

    @functools.cached_property
    def rates(self) -> Floats:
        """Steps/s of a worker alone, with the best shard bytes beside it."""
        waited = waits_s(self.ends[-1], self.cards, self._waited_s)
        # Where the card takes as long as the wait, more bytes here only add traffic inside the machine.
        between = np.clip(self.total - waited * self.cards, self.ends[0], self.ends[-1])
        transfer = [
            2 * np.maximum((self.total - stored) / self.cards, waited) + 2 * stored / self._within
            for stored in (*self.ends, between)
        ]
        with np.errstate(divide="ignore"):
            return np.where(self.room > 0, 1 / (self.work + np.minimum.reduce(transfer)), 0.0)
