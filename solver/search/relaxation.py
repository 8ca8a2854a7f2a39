"""Searches every placement that the step-time model can express, by Lagrangian relaxation, with a bound.

Machines may have several parameter servers (ps) or none, each machine its own size of workers, and machines without
GPUs may have workers too. Few constraints couple the machines: the ps of all add up to m and, if their number is
limited, the workers to at most a limit. So for a given m a machine's state is its number of ps and its workers' shape,
and the best states are found machine by machine: by dynamic programming over the ps if there are few machines, else
along the concave hulls of a machine's value with 0, 1, 2, ... ps (Lagrangian relaxation of 'm ps in all'). A second
multiplier replaces the limit on the workers.

*Asynchronous.* At X steps/s of all workers every machine's links allow its workers a range of rates
(solver.async_rates), and more workers never slow it down: its value is what its workers and its links allow. The speed
is the X that all machines together just reach. Over a range of X the links allow most at its lower end, and a price per
step, subtracted from its samples, keeps the steps below its upper end: that bounds the range. If cards differ, the time
of the slowest ps machine is divided into ranges, too.

*Synchronous.* With n workers, none slower than W, a round has T = samples / speed - W - n (update + dispatch) for the
network; that limits the workers on each machine, whose samples give a new T. From a known speed, T falls to the longest
that a faster plan can have, or below 0 if there is none.

The arrays are read in two ways. *Optimistic*: each machine has, of all shards, the best ones for it, the smallest ps'
memory, no chief, and racks do not matter. No placement is faster than that, so it gives the bound. *Real*: the shards
have the mean size except one that is far larger, and the chief has a machine. The machines found then get the real
shards, are rated by `solver.evaluation`, and if they are few improved by moving tasks.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE
from solver.capacity import Ints
from solver.evaluation import Evaluation, evaluate
from solver.nodes import NodeKind
from solver.options import OptionSpace
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers, slowest_times
from solver.rate_arrays import waits_s
from solver.resources import CPU_STEP, TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.search.balance import balanced
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import MIB

Floats = NDArray[np.float64]

MAX_DYNAMIC_PROGRAM_MACHINES = 40
"""Maximum number of machines placed one by one, by dynamic programming."""
MAX_HOST_KINDS = 6
"""Maximum number of kinds that are all tried for the chief and for a far larger shard."""
MAX_UNEQUAL_SHARDS = 6
"""Maximum number of unequal shards for which the optimistic reading is also placed."""
MAX_PS_WITH_ALL_SETS = 5
"""Maximum number of ps for which all sets of shards on a machine are examined for the time of the slowest ps machine;
for more, only some."""
MAX_SLOWEST_TIMES = 12
"""Maximum ranges of that time for one number of ps."""
CPU_WORKER_COUNTS = (1, 2, 3, 4, 6, 8)
"""Numbers of workers without GPUs on a machine that share its CPUs; alternatively each gets one of
`RelaxedSpace.cpu_shares`."""
MAX_SMALL_WORKER_CPUS = 2.0
"""CPUs above which the number of workers without GPUs is one of `CPU_WORKER_COUNTS`."""
LARGE_SHARD_RATIO = 1.5
"""Ratio to the mean of the others above which a shard's machine is chosen separately."""
MIN_LOAD_REDUCTION = 0.01
"""Minimum reduction of the busiest ps' load, as a share, by a further ps or a later one."""
MAX_ALL_PS = 6
"""Number of ps up to which all numbers are searched, also those that do not reduce that load."""
MORE_PS = 0
"""In the place of a number of ps: any number above those that are searched. Only bounded, not placed."""
MAX_SHARDINGS = 200
"""Numbers of ps for which the variables are distributed to find the largest shard."""
PIECES = 100
"""Parts of all bytes by which machines are told apart in the bound for `MORE_PS`."""
MAX_ROUNDS = 12
MAX_BISECTIONS = 20
ROUNDING = 1e-9
MIN_SPEED_GAIN = 0.005
"""Minimum gain of speed, as a share; cases that cannot gain more are not examined."""
MAX_NARROWINGS = 3
WORK_RANGES = 24
"""Initial number of ranges of workers' work."""
MAX_WORKERS_RATIO = 1.3
"""Ratio of maximum to minimum workers above which a case is divided without a bound."""
MAX_TARGET_RATIO = 1.5
"""Maximum ratio of a target speed to the speed reached."""
MIN_BOUND_SHARE = 1e-3
"""Minimum share of a bound that a speed must reach to be of interest."""
MIN_WORKER_SHARE = 0.002
"""Minimum share of the speed for a worker to be kept."""
MAX_WORK_RATIO = 5.0
"""Workers whose step takes this many times as long as the fastest one's are removed together, ..."""
MAX_SLOW_WORKERS_SHARE = 0.02
"""... if all of them bring less than this share: their gradients are of weights that are many steps old."""
MAX_UNTRIMMED_WORKERS = 1000
"""Number of workers above which superfluous machines are removed before rating."""
SPARE_STEPS_FACTOR = 3.0
"""Machines are examined for this many times the steps required."""
MAX_TRIES = 3
"""Maximum cases of a number of ps that are placed after the bound no longer depends on them."""
MIN_RATED_SHARE = 0.99
"""Minimum speed with shards of the mean size, as a share of the fastest, for machines to be rated."""
MIN_IMPROVED_SHARE = 0.7
"""Minimum speed, as a share of the fastest, for placements to be improved."""
MAX_PLACED_WIDTH = 1.03
"""Ratio of steps/s up to which a range is placed as one case ..."""
MIN_BOUNDED_WIDTH = 1.002
"""... and bounded as one."""
RANK_STEP = 0.001
"""Bounds closer than this share have the same rank."""
POINTS_PER_BATCH = 8
"""Relaxed problems of few machines that are solved together."""
MAX_EFFORT = 2500.0
"""Maximum effort, in relaxed problems of a few machines."""
WORKERS_PER_EFFORT = 200
"""Number of workers that are placed and rated in the time of one relaxed problem."""
MIN_SPEED = 1e-12
"""Minimum samples/s; lower bounds count as infeasible."""
NO_RESOURCES = TaskResources(1e-3, 0, 0)


@dataclass(frozen=True)
class RelaxedPlan:
    """A placement found, and its performance.

    Attributes:
        shape: most frequent shape of a worker.
        assignment: machine of every task, and each worker's shape.
    """

    shape: WorkerShape
    shards: Shards
    assignment: Assignment
    worth: Evaluation

    @property
    def samples_per_s(self) -> float:
        return self.worth.samples_per_s


class InitialPlacement(Protocol):
    """An initial placement: shape of each worker, bytes on each ps, and the machine of every task."""

    @property
    def shape(self) -> WorkerShape: ...

    @property
    def shards(self) -> Shards: ...

    @property
    def assignment(self) -> Assignment: ...


@dataclass(frozen=True)
class _Row:
    """Identical machines, with their special tasks.

    Attributes:
        kinds: all kinds of machines merged into this row.
    """

    kind: int
    count: int
    chief: bool = False
    largest: bool = False
    kinds: tuple[int, ...] = ()


ANY_TIME = (0.0, math.inf)
"""Range of the slowest ps machine's time if it does not matter."""


class _Arrays:
    """Possibilities of machines with 0, 1, 2, ... ps; arrays are rows x ps x choices of workers."""

    def __init__(
        self,
        space: RelaxedSpace,
        rows: Sequence[_Row],
        shards: Shards,
        *,
        optimistic: bool,
        pieces: int = 0,
        largest_ps: float = math.inf,
    ) -> None:
        """Fills the arrays; call `limited_to` before use.

        Args:
            space: the placements.
            rows: the machines.
            shards: on the ps; with `pieces`, the largest variable and the rest.
            optimistic: whether each machine has the best shards for it.
            pieces: instead of ps, machines have this many equal pieces of all bytes, give or take one: any number of
                ps can be rounded to that, so that the whole is right. 0 for ps.
            largest_ps: maximum bytes on a ps, with `pieces`.
        """
        sizes, kinds = space.scenario.sizes, space.scenario.kinds
        self.rows, self.total, self._within = rows, float(shards.total), space.within_bytes_per_s
        self.is_optimistic = optimistic
        has_largest = any(row.largest for row in rows)
        self.largest = float(shards.sizes[0]) if optimistic and not has_largest else 0.0
        self.counts = np.array([row.count for row in rows])
        rest = shards.sizes[1:] if has_largest else shards.sizes
        self.ps = len(rest)
        room_cpus = max(kind.cpus for kind in kinds) / sizes.helper_cpus
        most = min(self.ps, math.floor(room_cpus + ROUNDING))
        numbers = np.arange(most + 1)
        ordered = np.array(rest, dtype=np.float64)
        self._fewest = np.concatenate([[0.0], np.cumsum(ordered[::-1][:most])])
        if pieces:
            self.ps, numbers = pieces, np.arange(pieces + 1)
            parts = np.array([numbers - 1, numbers + 1], dtype=np.float64).clip(0, pieces) / pieces
            self.low, self.high = parts * self.total
            self._fewest = self.low
        elif optimistic:
            self.high, self.low = np.concatenate([[0.0], np.cumsum(ordered[:most])]), self._fewest
        else:
            self.high = self.low = numbers * (float(ordered.mean()) if len(ordered) else 0.0)
        held = rest[-1 if optimistic else 0] if len(rest) else 0
        if len(rest) and self.counts.sum() == 1:
            # A single machine holds all of them, so the mean suffices; each takes whole MiB.
            held = max(0, sum(rest) // len(rest) - (MIB if optimistic else 0))
        ps_task = sizes.ps(held)
        of_row = [kinds[row.kind] for row in rows]
        taken = [
            [
                *([sizes.ps(shards.sizes[0])] if row.largest else []),
                *([sizes.chief] if row.chief and sizes.chief is not None else []),
            ]
            for row in rows
        ]
        self.base = np.array([float(shards.sizes[0]) if row.largest else 0.0 for row in rows])
        have = np.array([(kind.cpu_millis, kind.mem_mb, kind.disk_mb, kind.gpus) for kind in of_row])
        have = have - np.array(
            [np.sum([_amounts(task) for task in tasks] or [(0, 0, 0, 0)], axis=0) for tasks in taken]
        )
        needs = numbers[:, None] * np.array(_amounts(ps_task))
        if pieces:
            # As few ps as can hold these bytes; fewer than two pieces may be none.
            counts = [math.ceil(size / largest_ps) for size in self.low.tolist()]
            each = [
                max(0, int(size / (count or 1)) - MIB) for size, count in zip(self.low.tolist(), counts, strict=True)
            ]
            needs = np.array(
                [np.multiply(count, _amounts(sizes.ps(size))) for count, size in zip(counts, each, strict=True)]
            )
        free = have[:, None, :] - needs[None, :, :]
        self.fits = (free >= 0).all(axis=2)
        self.cards = np.array([kind.network_bytes_per_s for kind in of_row])[:, None, None]
        self._waited_s = 0.0
        self._fill_choices(space, of_row, free)

    def limited_to(self, slowest: tuple[float, float]) -> _Arrays:
        """Returns a copy, ready for use, for a range of the slowest ps machine's time."""
        arrays = copy.copy(self)
        arrays._waited_s = slowest[0]
        in_time = (self.base[:, None] + self._fewest) / self.cards[:, :, 0] <= slowest[1] * (1 + ROUNDING)
        arrays.fits = self.fits & in_time
        arrays.room = np.where(arrays.fits[:, :, None], self.room, 0)
        if not arrays.uses_dynamic_program:
            arrays._merge_rows()
        return arrays

    def _fill_choices(self, space: RelaxedSpace, of_row: Sequence[NodeKind], free: Ints) -> None:
        """Fills room, work, samples and CPUs of each choice: the sizes with GPUs, then shares of the CPUs."""
        scenario, sizes = space.scenario, space.scenario.sizes
        rooms, works, samples, cpus = [], [], [], []
        for shape in space.gpu_shapes:
            model = scenario.model(shape)
            need = np.array(_amounts(sizes.worker(shape)))
            room = (free[:, :, need > 0] // need[need > 0]).min(axis=2)
            hosts = np.array([space.hosts(row.kind, shape) for row in self.rows])
            rooms.append(np.where(hosts[:, None], room, 0))
            work = np.array([space.work_s(row.kind, shape) for row in self.rows])
            works.append(np.broadcast_to(work[:, None], room.shape))
            samples.append(model.samples_per_step)
            cpus.append(np.full(room.shape, shape.cpus))
        if space.cpu_workers:
            need = np.array(_amounts(sizes.worker(WorkerShape(0, CPU_STEP))))[1:3]
            # A GPU or its machine may be too small for any worker.
            hosts_gpus = np.any([room[:, 0] > 0 for room in rooms], axis=0) if rooms else np.zeros(len(of_row), bool)
            allowed = np.array([not kind.gpus for kind in of_row]) | ~hosts_gpus
            beside = (free[:, :, 1:3] // need).min(axis=2)
            free_cpus = free[:, :, 0] / 1000
            choices = [
                (np.full(free_cpus.shape, parts), np.floor(free_cpus / parts / CPU_STEP + ROUNDING) * CPU_STEP)
                for parts in CPU_WORKER_COUNTS
            ]
            # Small workers hide each other's waits, and more of them may fit than those counts.
            choices += [
                (np.floor(free_cpus / share + ROUNDING), np.full(free_cpus.shape, share)) for share in space.cpu_shares
            ]
            for parts_of, share in choices:
                room = np.where((share > 0) & allowed[:, None], np.minimum(beside, parts_of), 0).astype(np.int64)
                rooms.append(room)
                works.append(space.cpu_work_s(share))
                samples.append(scenario.profile.batch_size)
                cpus.append(share)
        shape_of = (*free.shape[:2], 0)
        self.room = np.maximum(np.stack(rooms, axis=2), 0) if rooms else np.zeros(shape_of, dtype=np.int64)
        self.work = np.stack(works, axis=2) if works else np.zeros(shape_of)
        self.cpus = np.stack(cpus, axis=2) if cpus else np.zeros(shape_of)
        self.samples = np.array(samples, dtype=np.float64)

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

    @functools.cached_property
    def effort(self) -> float:
        """Effort of one relaxed problem, relative to one of a few machines."""
        if self.uses_dynamic_program:
            return 1.0 + self.room.size / 12_000 + len(self.each_row) / 20
        return 0.5 + min(60.0, self.room.size / 8_000)

    @functools.cached_property
    def uses_dynamic_program(self) -> bool:
        """Whether the machines are placed one by one."""
        return bool(self.counts.sum() <= MAX_DYNAMIC_PROGRAM_MACHINES)

    @functools.cached_property
    def each_row(self) -> list[int]:
        rows: list[int] = np.repeat(np.arange(len(self.rows)), self.counts).tolist()
        return rows

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


@dataclass(frozen=True)
class _State:
    """Machines of one row with as many ps and the same workers."""

    row: int
    machines: int
    ps: int
    choice: int
    workers: int


@dataclass(frozen=True)
class _RelaxedOptimum:
    """A relaxed optimum: an upper bound of the value, and machines with that value, or almost.

    Attributes:
        value: the bound.
        numbers: the machines by row and number of ps.
        worth: value of a machine, rows x ps x choices: each has the best choice.
        workers_of: workers on it.
        made: steps/s of its workers (asynchronous).
    """

    value: float
    numbers: Numbers
    worth: Floats
    workers_of: Floats
    made: Floats = field(default_factory=lambda: np.zeros((1, 1, 1)))

    @functools.cached_property
    def choices(self) -> Ints:
        rows, ps, _ = self.numbers
        return self.worth[rows, ps].argmax(axis=1)

    def each(self, values: Floats) -> Floats:
        """Entries of the machines in a rows x ps x choices array."""
        rows, ps, _ = self.numbers
        return values[rows, ps, self.choices % values.shape[2]]

    @property
    def workers(self) -> float:
        return float(self.numbers[2] @ self.each(self.workers_of))

    @property
    def steps(self) -> float:
        """Steps/s of all workers (asynchronous)."""
        return float(self.numbers[2] @ self.each(self.made))

    def kept(self, value: Floats, limit: float) -> float:
        """Approximate value without workers above the limit."""
        worth, count = float(self.numbers[2] @ self.each(value)), self.workers
        return worth * min(1.0, limit / count) if count else worth

    @functools.cached_property
    def states(self) -> tuple[_State, ...]:
        """The machines, one entry for identical ones."""
        columns = (*self.numbers, self.choices, self.each(self.workers_of).astype(np.int64))
        return tuple(
            _State(row, machines, ps, choice, workers)
            for row, ps, machines, choice, workers in zip(*(column.tolist() for column in columns), strict=True)
        )


Numbers = tuple[Ints, Ints, Ints]
"""Rows, ps on a machine, and number of machines with these."""


def _allocate(arrays: _Arrays, value: Floats, workers: Floats, limit: float) -> _RelaxedOptimum | None:
    """The best state for each machine with all ps placed and no more workers than the limit.

    `value`: value of a machine, rows x ps x choices; -inf if it is impossible. `limit`: maximum workers of all
    machines.

    Returns:
        None if the ps do not fit.
    """
    total, numbers = _best_ps_counts(arrays, value.max(axis=2))
    if numbers is None or not math.isfinite(total):
        return None
    found, bound = _RelaxedOptimum(total, numbers, value, workers), total
    if found.workers <= limit:
        return found
    with np.errstate(invalid="ignore", divide="ignore"):
        price = float(np.nanmax(np.where(workers > 0, value / workers, 0.0), initial=0.0))
    # As a function of the price the bound is convex and piecewise linear: the next price is where two pieces meet.
    within_limit, low, high = None, (total, found.workers), (0.0, 0.0)
    for _ in range(MAX_ROUNDS):
        worth = value - price * workers
        total, numbers = _best_ps_counts(arrays, worth.max(axis=2))
        assert numbers is not None
        bound = min(bound, total + price * limit)
        priced = _RelaxedOptimum(total, numbers, worth, workers)
        piece = total + price * priced.workers, priced.workers
        if priced.workers > limit:
            found, low = priced, piece
        else:
            within_limit, high = priced, piece
        before, price = price, (low[0] - high[0]) / (low[1] - high[1])
        if within_limit is None or price <= 0 or abs(price - before) <= ROUNDING * before:
            break
    best = found if within_limit is None else max((found, within_limit), key=lambda each: each.kept(value, limit))
    return replace(best, value=bound)


def _worth(arrays: _Arrays, made: Floats, possible: NDArray[np.bool_], price: float) -> Floats:
    """Samples of the steps made, less their price; -inf if they are impossible."""
    return np.where(possible, (np.append(arrays.samples, price) - price) * made, -np.inf)


def _best_ps_counts(arrays: _Arrays, worth: Floats) -> tuple[float, Numbers | None]:
    """Distributes the ps over the rows for the greatest total value.

    Args:
        arrays: the machines.
        worth: value of one machine, rows x ps.

    Returns:
        An upper bound of the value, and the machines; -inf and None if the ps do not fit.
    """
    worth = np.where(arrays.fits, worth, -np.inf)
    if arrays.uses_dynamic_program:
        return _by_dynamic_programming(arrays, worth)
    return _by_concave_hulls(arrays, worth)


def _by_dynamic_programming(arrays: _Arrays, worth: Floats) -> tuple[float, Numbers | None]:
    totals, taken = _solve_dynamic_programs(arrays, worth[None])
    total = float(totals[0])
    return total, _ps_counts_of(arrays, taken, 0) if math.isfinite(total) else None


def _solve_dynamic_programs(arrays: _Arrays, worth: Floats) -> tuple[Floats, list[Ints]]:
    """Dynamic programming over the machines, for several problems together, which takes little longer than for one.

    Args:
        arrays: the machines.
        worth: value of one machine, problems x rows x ps; -inf if the ps do not fit.

    Returns:
        Total values, -inf if the ps do not fit; and for each machine, problems x ps on it and those before it, the
        number of these on it.
    """
    problems, _, most = worth.shape
    # Padded, so that what is left of m ps beside 0, 1, 2, ... on the next machine can be looked up.
    best = np.full((problems, most - 1 + arrays.ps + 1), -np.inf)
    best[:, most - 1] = 0.0
    before = most - 1 + np.arange(arrays.ps + 1)[None, :] - np.arange(most)[:, None]
    taken: list[Ints] = []
    for row in arrays.each_row:
        options = best[:, before] + worth[:, row, :, None]
        taken.append(options.argmax(axis=1))
        best[:, most - 1 :] = options.max(axis=1)
    return best[:, -1], taken


def _ps_counts_of(arrays: _Arrays, taken: Sequence[Ints], problem: int) -> Numbers:
    """The machines of each row by number of ps, in one of the problems solved."""
    left, numbers = arrays.ps, Counter[tuple[int, int]]()
    for row, choice in zip(reversed(arrays.each_row), reversed(taken), strict=True):
        ps = int(choice[problem, left])
        numbers[row, ps] += 1
        left -= ps
    of_row, of_ps, count = np.array(sorted((*key, number) for key, number in numbers.items())).T
    return of_row, of_ps, count


def _by_concave_hulls(arrays: _Arrays, worth: Floats) -> tuple[float, Numbers | None]:
    """Follows the concave hulls; at most one machine ends between two corners of its own, and takes the lower."""
    count, most = worth.shape
    at, here = np.zeros(count, dtype=np.int64), worth[:, 0].copy()
    slopes, lengths, of_row, to = [], [], [], []
    numbers = np.arange(most)
    while True:
        ahead = numbers[None, :] > at[:, None]
        with np.errstate(invalid="ignore"):
            slope = np.where(ahead, (worth - here[:, None]) / np.maximum(1, numbers[None, :] - at[:, None]), -np.inf)
        # The farthest of equally steep corners.
        corner = most - 1 - slope[:, ::-1].argmax(axis=1)
        steepest = slope[np.arange(count), corner]
        on = np.flatnonzero(np.isfinite(steepest))
        if not len(on):
            break
        slopes.append(steepest[on])
        lengths.append((corner - at)[on])
        of_row.append(on)
        to.append(corner[on])
        at[on] = corner[on]
        here = np.full(count, np.nan)
        here[on] = worth[on, corner[on]]
    total = float((worth[:, 0] * arrays.counts).sum())
    placed = np.zeros((count, most), dtype=np.int64)
    placed[:, 0] = arrays.counts
    if slopes:
        slope, length, row, corner = (np.concatenate(parts) for parts in (slopes, lengths, of_row, to))
        order = np.argsort(-slope, kind="stable")
        slope, length, row, corner = slope[order], length[order], row[order], corner[order]
        each = length * arrays.counts[row]
        left = np.clip(arrays.ps - (np.cumsum(each) - each), 0, each)
        total += float(left @ slope)
        machines = left // length
        np.add.at(placed, (row, corner), machines)
        np.subtract.at(placed, (row, corner - length), machines)
        missing = int((left - machines * length).sum())
    if not slopes or left.sum() < arrays.ps:
        return (-math.inf, None) if arrays.ps else (total, (np.arange(count), np.zeros(count, int), arrays.counts))
    if missing:
        _place_remaining_ps(placed, worth, missing)
    rows, numbers_of = np.nonzero(placed)
    return total, (rows, numbers_of, placed[rows, numbers_of])


def _place_remaining_ps(placed: Ints, worth: Floats, missing: int) -> None:
    """Places the last few ps where they cost least."""
    most = worth.shape[1]
    with np.errstate(invalid="ignore"):
        cost = np.where(placed[:, : most - missing] > 0, worth[:, : most - missing] - worth[:, missing:], np.inf)
    if not cost.size or not np.isfinite(cost.min()):
        return
    row, ps = np.unravel_index(int(cost.argmin()), cost.shape)
    placed[row, ps] -= 1
    placed[row, ps + missing] += 1


class RelaxedSpace:
    """The placements of one job on one cluster."""

    def __init__(self, scenario: Scenario, space: OptionSpace) -> None:
        self.scenario = scenario
        self.max_workers = max((entry.max_workers for entry in space.ranges), default=0)
        self.min_workers = min((entry.min_workers for entry in space.ranges), default=1)
        shapes = sorted({shape for entry in space.ranges for shape in entry.shapes})
        self._hosts: dict[tuple[int, WorkerShape], bool] = {}
        self._works: dict[tuple[str | None, WorkerShape], float] = {}
        self.gpu_shapes = self._without_spare_cpus([shape for shape in shapes if shape.gpus])
        self.cpu_workers = any(not shape.gpus for shape in shapes)
        ps_cpus = math.floor(scenario.sizes.helper_cpus / CPU_STEP + ROUNDING) * CPU_STEP
        shares = {ps_cpus, *(shape.cpus for shape in shapes if not shape.gpus)}
        # In a synchronous step no wait is hidden; on many machines small workers would only slow down the bound.
        machines = sum(kind.count for kind in scenario.kinds)
        use_small_workers = not scenario.profile.synchronous or machines <= MAX_DYNAMIC_PROGRAM_MACHINES
        largest = MAX_SMALL_WORKER_CPUS if use_small_workers else 0.0
        self.cpu_shares = sorted(share for share in shares if 0 < share <= largest)

    def hosts(self, kind: int, shape: WorkerShape) -> bool:
        key = kind, shape
        if key not in self._hosts:
            self._hosts[key] = hosts_workers(self.scenario.kinds[kind], self.scenario.model(shape))
        return self._hosts[key]

    def work_s(self, kind: int, shape: WorkerShape) -> float:
        node = self.scenario.kinds[kind]
        key = node.gpu_model, shape
        if key not in self._works:
            self._works[key] = self.scenario.model(shape).work_s(node)
        return self._works[key]

    def cpu_work_s(self, cpus: Floats) -> Floats:
        """Work of workers without GPUs; infinite without CPUs."""
        values, back = np.unique(cpus, return_inverse=True)
        return np.array([self._work_with(each) for each in values.tolist()])[back].reshape(cpus.shape)

    @functools.cache  # noqa: B019
    def _work_with(self, cpus: float) -> float:
        if cpus <= 0:
            return math.inf
        return self.scenario.model(WorkerShape(0, cpus)).work_s(self.scenario.kinds[0])

    def _without_spare_cpus(self, shapes: Sequence[WorkerShape]) -> tuple[WorkerShape, ...]:
        """Keeps, of the sizes equally fast on every machine, the one with fewest CPUs: it fits most often."""
        models = {kind.gpu_model: index for index, kind in enumerate(self.scenario.kinds) if kind.gpus}
        chosen: dict[tuple[object, ...], WorkerShape] = {}
        for shape in sorted(shapes):
            works = tuple(round(self.work_s(index, shape), 12) for index in models.values())
            chosen.setdefault((shape.gpus, works), shape)
        return tuple(chosen.values())

    @functools.cached_property
    def model(self) -> StepModel:
        """Step times that do not depend on a worker's size."""
        return self.scenario.model(WorkerShape(0, 1.0))

    @property
    def within_bytes_per_s(self) -> float:
        return self.model.within_node_bytes_per_s

    # Numbers of ps.

    @functools.cached_property
    def most_ps(self) -> int:
        """Maximum number of ps: each has a variable and its CPUs."""
        scenario = self.scenario
        helper_cpus = scenario.sizes.helper_cpus
        room = sum(kind.count * math.floor(kind.cpus / helper_cpus + ROUNDING) for kind in scenario.kinds)
        return min(max(1, len(scenario.profile.variables)), room)

    @functools.cached_property
    def largest_of_more_ps(self) -> float:
        """Maximum bytes on a ps if there are more than are searched."""
        last = self.ps_counts()[-1]
        if self.most_ps - last <= MAX_SHARDINGS:
            return max(self.scenario.shards(count).sizes[0] for count in range(last + 1, self.most_ps + 1))
        # The minimum for more ps is no greater, and `greedy` is within 4/3 of it (Graham 1969).
        return 4 / 3 * self.scenario.shards(last).sizes[0] if self.scenario.sharding == "greedy" else math.inf

    def ps_counts(self) -> list[int]:
        """Numbers of ps that are searched: those that reduce the load of the busiest one, or all if they are few."""
        scenario, model, most = self.scenario, self.scenario.model(WorkerShape(0, 1.0)), self.most_ps
        if most <= MAX_ALL_PS:
            return list(range(1, most + 1))
        counts, least, since = [1], model.load(scenario.shards(1)), 0
        for count in range(2, most + 1):
            load = model.load(scenario.shards(count))
            since += 1
            counts.append(count)
            if load < least * (1 - MIN_LOAD_REDUCTION):
                least, since = load, 0
            if since >= 4:
                break
        return counts[: len(counts) - since] if since < len(counts) else counts

    # Relaxed optima.

    def machines_reaching(
        self,
        arrays: _Arrays,
        load: float,
        samples_per_s: float,
        least_work_s: float,
        most_work_s: float,
        workers: tuple[int, int],
    ) -> _RelaxedOptimum | None:
        """Synchronous: machines on which a plan of that speed is possible with that number of workers; None if none
        are.

        Args:
            arrays: the machines.
            load: of the busiest ps.
            samples_per_s: the speed.
            least_work_s: minimum of the slowest worker's work.
            most_work_s: its maximum.
            workers: minimum and maximum workers.
        """
        model, (fewest, most) = self.model, workers
        allowed = arrays.work <= most_work_s * (1 + ROUNDING) + ROUNDING
        room = np.where(allowed, arrays.room, 0)
        if not arrays.samples.size:
            return None
        samples = min(most * arrays.most_samples, float(arrays.counts @ (room * arrays.samples).max(axis=(1, 2))))
        rest_s = model.update_s(load, fewest) + model.dispatch_s(fewest)
        found = None
        for _ in range(MAX_ROUNDS):
            round_s = samples / samples_per_s
            left_s = round_s - rest_s - (0.0 if model.overlap else least_work_s)
            if left_s < 0 or (model.overlap and least_work_s > round_s * (1 + ROUNDING)):
                return None
            found = self._within(arrays, room, left_s, fewest, most)
            if found is None or found.value <= 0:
                return None
            if found.value >= samples * (1 - ROUNDING):
                return found
            samples = found.value
        return found

    def _within(self, arrays: _Arrays, room: Ints, network_s: float, fewest: int, most: int) -> _RelaxedOptimum | None:
        """The most samples of a step with no card busy for longer."""
        half, low, high = network_s * arrays.cards / 2, arrays.ends[0], arrays.ends[-1]
        if arrays.largest and not _can_send_shards(arrays, room, half[:, 0, 0], fewest):
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            receive = np.where(high < arrays.total, half / (arrays.total - high), np.inf)
            inside = np.where(low > 0, network_s * self.within_bytes_per_s / (2 * low), np.inf)
            send = np.where(low > 0, fewest - half / low, 0.0)
        upper = np.minimum(room, np.floor(np.minimum(np.minimum(receive, inside), 1e9) * (1 + ROUNDING)))
        lower = np.maximum(0, np.ceil(send - ROUNDING * fewest))
        fits = lower <= upper
        value = np.where(fits, upper * arrays.samples, -np.inf)
        lowest = np.broadcast_to(lower, upper.shape)
        value = np.concatenate([value, np.where(fits, lowest * arrays.samples, -np.inf)], axis=2)
        upper = np.concatenate([upper, lowest], axis=2)
        return _allocate(arrays, value, upper, most)

    def rate_optima(
        self, arrays: _Arrays, at: Sequence[float], prices: Sequence[float] = (0.0,)
    ) -> Iterator[_RelaxedOptimum | None]:
        """Asynchronous: optima with the links evaluated at X steps/s of all workers.

        Args:
            arrays: the machines.
            at: values of X.
            prices: prices of a step, subtracted from its samples.

        Yields:
            For each X, and each price in turn, samples less the price of the steps; None if the ps do not fit.
        """
        if not arrays.uses_dynamic_program or arrays.most_workers > self.max_workers:
            for steps_per_s in at:
                made, workers, possible = (each[0] for each in self._link_rates(arrays, np.array([steps_per_s])))
                for price in prices:
                    found = _allocate(arrays, _worth(arrays, made, possible, price), workers, self.max_workers)
                    yield None if found is None else replace(found, made=made)
            return
        made, workers, possible = self._link_rates(arrays, np.array(at))
        worth = np.stack([_worth(arrays, made, possible, price) for price in prices], axis=1)
        best = np.where(arrays.fits, worth.max(axis=-1), -np.inf)
        totals, taken = _solve_dynamic_programs(arrays, best.reshape(-1, *best.shape[2:]))
        for index, total in enumerate(totals.tolist()):
            x, price_index = divmod(index, len(prices))
            yield (
                _RelaxedOptimum(total, _ps_counts_of(arrays, taken, index), worth[x, price_index], workers[x], made[x])
                if math.isfinite(total)
                else None
            )

    def _link_rates(self, arrays: _Arrays, at: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Rates that the links allow at some X: steps/s, number of workers needed, and whether it is possible.

        All are X x rows x ps x choices; the last choice is no workers.
        """
        rates, at, cards = arrays.rates, at[:, None, None, None], arrays.cards * LINK_SHARE
        most = np.zeros((len(at), *rates.shape))
        least_stored, half = arrays.ends[0], np.clip(arrays.total / 2, arrays.ends[0], arrays.ends[-1])
        # Of shards between the ends, half of all are best for a link.
        for stored in arrays.ends if len(arrays.ends) == 1 else (*arrays.ends, half):
            left, each = cards - stored * at, arrays.total - 2 * stored
            with np.errstate(divide="ignore", invalid="ignore"):
                link = np.where(each > 0, left / each, np.where((each < 0) | (left >= 0), np.inf, -1.0))
                least = np.where(each < 0, left / each, 0.0)
                inside = np.where(least_stored > 0, self.within_bytes_per_s / (2 * least_stored), np.inf)
                link = np.minimum(link, inside)
            made = np.minimum(rates * arrays.room, link)
            most = np.maximum(most, np.where((made < 0) | (made < least * (1 - ROUNDING)), -1.0, made))
        possible, most = most >= 0, np.maximum(most, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            workers = np.where(rates > 0, np.ceil(most / rates * (1 - ROUNDING)), 0)
        workers = np.minimum(workers, arrays.room)
        idle = np.broadcast_to(arrays.ends[0] * at <= cards * (1 + ROUNDING), (*most.shape[:3], 1))
        none = np.zeros(idle.shape)
        return (
            np.concatenate([most, none], axis=-1),
            np.concatenate([workers, none], axis=-1),
            np.concatenate([possible, idle], axis=-1),
        )

    # The search.

    def best(
        self, known: float, deadline: float, starts: Sequence[InitialPlacement] = ()
    ) -> tuple[RelaxedPlan | None, float]:
        """Finds the fastest placement, if it is faster than the known one, and an upper bound of any speed."""
        search = _Search(self, known)
        for start in starts:
            shapes = start.assignment.shapes_of_workers(start.shape)
            search.rate(start.shape, start.shards, replace(start.assignment, shapes=tuple(shapes)))
        # Placements of the search need fewer tasks, so they are preferred if almost as fast.
        search.speed = max(known, search.speed * (1 - MIN_SPEED_GAIN))
        search.run(deadline)
        if search.found is not None and not self.scenario.profile.synchronous:
            search.found = self._without_slow(self._without_idle(search.found))
        return search.found, float(max(search.speed, search.bound))

    def _without_slow(self, found: RelaxedPlan) -> RelaxedPlan:
        """Removes the workers that are many times as slow as the fastest, if they bring little."""
        kind_of, assignment = self.scenario.kind_of, found.assignment
        works = [
            self.scenario.model(shape).work_s(kind_of[machine])
            for machine, shape in zip(assignment.workers, assignment.shapes, strict=True)
        ]
        kept = [index for index, work in enumerate(works) if work <= MAX_WORK_RATIO * min(works)]
        if len(kept) == len(works) or len(kept) < self.min_workers:
            return found
        assignment = replace(
            assignment,
            workers=tuple(assignment.workers[index] for index in kept),
            shapes=tuple(assignment.shapes[index] for index in kept),
        )
        shape = Counter(assignment.shapes).most_common(1)[0][0]
        worth = evaluate(self.scenario, shape, found.shards, assignment)
        is_as_fast = worth.samples_per_s >= found.samples_per_s * (1 - MAX_SLOW_WORKERS_SHARE)
        return RelaxedPlan(shape, found.shards, assignment, worth) if is_as_fast else found

    def _without_idle(self, found: RelaxedPlan) -> RelaxedPlan:
        """Removes the workers that make it faster by less than the minimum share."""
        kind_of = self.scenario.kind_of
        held, near = Counter(found.assignment.ps), Counter(found.assignment.workers)
        each = found.assignment.shapes

        def speed(index: int) -> float:
            model = self.scenario.model(each[index])
            return model.samples_per_step / model.work_s(kind_of[found.assignment.workers[index]])

        speeds = [speed(index) for index in range(len(each))]
        order = sorted(
            range(len(each)),
            key=lambda i: (
                not held[found.assignment.workers[i]],
                -speeds[i],
                -near[found.assignment.workers[i]],
                found.assignment.workers[i],
            ),
        )
        fewest, sufficient = 0, len(order)
        best = found
        while sufficient - fewest > 1:
            middle = max(self.min_workers, (fewest + sufficient) // 2)
            kept = sorted(order[:middle])
            assignment = replace(
                found.assignment,
                workers=tuple(found.assignment.workers[i] for i in kept),
                shapes=tuple(each[i] for i in kept),
            )
            shape = Counter(assignment.shapes).most_common(1)[0][0]
            worth = evaluate(self.scenario, shape, found.shards, assignment)
            if worth.samples_per_s >= found.samples_per_s * (1 - MIN_WORKER_SHARE):
                best, sufficient = RelaxedPlan(shape, found.shards, assignment, worth), middle
            else:
                fewest = middle
            if middle == self.min_workers and sufficient == middle:
                break
        return best


@dataclass(frozen=True)
class _AsyncCase:
    """Asynchronous placements bounded together: a number of ps, and a range of X, the steps/s of all workers.

    Attributes:
        slowest: minimum and maximum time of the slowest ps machine (`_Arrays`).
        best: X of its relaxed optimum; 0 before that is known.
        is_whole: whether it covers all X of that number of ps and that slowest machine.
        is_tried: whether it, or a case that contains it, has been placed.
    """

    ps: int
    low: float
    high: float
    slowest: tuple[float, float] = ANY_TIME
    best: float = 0.0
    is_whole: bool = False
    is_tried: bool = False

    @property
    def width(self) -> float:
        return self.high / self.low

    def parts(self, middle: float) -> Iterator[_AsyncCase]:
        """The ranges of X above and below."""
        for low, high in ((middle, self.high), (self.low, middle)):
            yield _AsyncCase(self.ps, low, high, self.slowest, is_tried=self.is_tried)


@dataclass(frozen=True)
class _SyncCase:
    """Synchronous placements bounded together: a number of ps, ranges of the slowest worker's work and of workers.

    Attributes:
        works: indices of the works.
        below: a speed that is within reach.
    """

    ps: int
    works: tuple[int, int]
    workers: tuple[int, int]
    below: float = 0.0

    def parts(self) -> Iterator[_SyncCase]:
        """Its two halves, if it is more than one number of workers and one work."""
        (first, last), (fewest, most) = self.works, self.workers
        if first < last:
            middle = (first + last) // 2
            yield replace(self, works=(first, middle))
            yield replace(self, works=(middle + 1, last))
        elif fewest < most:
            middle = math.isqrt(fewest * most)
            yield replace(self, workers=(fewest, middle))
            yield replace(self, workers=(middle + 1, most))

    @property
    def is_coarse(self) -> bool:
        """Whether it is too wide for a useful bound."""
        return self.workers[1] > MAX_WORKERS_RATIO * self.workers[0] + 1


class _Search:
    """Best-first search over cases.

    Attributes:
        speed: the fastest speed so far.
        found: its placement, if it was found here.
        bound: upper bound of the placements of all finished cases.
    """

    def __init__(self, space: RelaxedSpace, known: float) -> None:
        self._space, self.speed, self.bound = space, known, 0.0
        self.found: RelaxedPlan | None = None
        self._scenario = space.scenario
        self._optimistic: dict[tuple[int, tuple[float, float]], _Arrays] = {}
        self._real: dict[tuple[int, tuple[float, float]], list[_Arrays]] = {}
        self._base_arrays: dict[int, _Arrays] = {}
        self._base_real_arrays: dict[int, list[_Arrays]] = {}
        self._loads: dict[int, float] = {}
        self._works: Floats = np.zeros(0)
        self._cards = sum(kind.count * kind.network_bytes_per_s for kind in self._scenario.kinds)
        self._order = itertools.count()
        self._seen: set[object] = set()
        self._max_rates_tried: set[int] = set()
        self._tried: Counter[tuple[int, tuple[float, float]]] = Counter()
        self.effort = 0.0

    def run(self, deadline: float) -> None:
        """Runs until no case can be faster by the minimum gain, or the time or the effort is used up."""
        heap: list[tuple[float, float, int, float, _SyncCase | _AsyncCase]] = []

        def push(bound: float, case: _SyncCase | _AsyncCase) -> None:
            rank, width = bound, 0.0
            # Of almost equal bounds narrow cases first, or few workers: they give placements for comparison.
            if isinstance(case, _AsyncCase) or len(self._scenario.kind_of) > MAX_DYNAMIC_PROGRAM_MACHINES:
                rank = math.floor(math.log(max(bound, MIN_SPEED)) / RANK_STEP)
                width = case.width if isinstance(case, _AsyncCase) else float(case.workers[0])
            heapq.heappush(heap, (-rank, width, next(self._order), bound, case))

        for case in self._cases():
            push(self._first_bound(case), case)
        highest = 0.0
        while heap:
            _, _, _, above, case = heapq.heappop(heap)
            is_over = self.effort > MAX_EFFORT or time.monotonic() > deadline
            if is_over or above <= max(self.speed * (1 + MIN_SPEED_GAIN), MIN_SPEED):
                self.bound = max(self.bound, above, *(bound for _, _, _, bound, _ in heap))
                return
            if isinstance(case, _SyncCase) and case.is_coarse:
                for part in case.parts():
                    push(min(above, self._first_bound(part)), part)
                continue
            highest = highest or above
            if not self.speed and above < highest * MIN_BOUND_SHARE:
                # Bounds fell this far without any placement: the tasks fit nowhere.
                self.bound = max(self.bound, above)
                return
            if isinstance(case, _AsyncCase):
                for bound, left in self._split_or_place(case, above):
                    push(bound, left)
                continue
            goal = self._target_speed(above, case)
            found = self._optimistic_machines(case, goal)
            if found is None:
                push(goal, replace(case, below=0.0))
                continue
            parts = list(case.parts())
            if parts:
                found, goal, above = self._narrow_bounds(case, found, max(goal, self.speed), above)
            self._place_sync_case(case, found, goal, above)
            for part in parts:
                push(min(above, self._first_bound(part)), part)
            if not parts:
                if above <= max(goal, self.speed) * (1 + MIN_SPEED_GAIN):
                    self.bound = max(self.bound, above)
                else:
                    push(above, replace(case, below=goal))

    def _split_or_place(self, case: _AsyncCase, above: float) -> Iterator[tuple[float, _AsyncCase]]:
        """Bounds the case, places it or divides it; yields the remaining cases with their bounds."""
        samples, key = self._arrays(case.ps, case.slowest).most_samples, (case.ps, case.slowest)
        if case.is_whole and case.width > MAX_PLACED_WIDTH and case.high * samples <= above * (1 + ROUNDING):
            # If the ps are the only limit, their maximum steps are best.
            middle = case.high / MAX_PLACED_WIDTH
        elif not case.best:
            bound, best = self._relaxed_bound(case)
            yield min(above, bound), replace(case, best=best)
            return
        elif (
            case.ps != MORE_PS
            and not case.is_tried
            and (case.width <= MAX_PLACED_WIDTH or (above <= self.bound and self._tried[key] < MAX_TRIES))
        ):
            self._tried[key] += 1
            self._place_async_case(case, above)
            yield above, replace(case, is_tried=True)
            return
        elif above <= self.bound or case.width <= MIN_BOUNDED_WIDTH:
            self.bound = max(self.bound, above)
            return
        else:
            middle = math.sqrt(case.low * case.high)
        for part in case.parts(middle):
            yield min(above, part.high * samples), part

    def _prices(self, arrays: _Arrays) -> list[float]:
        """Prices of a step: for steps with more samples, fewer of them may be better."""
        samples = np.unique(arrays.samples)
        return (
            [0.0, *(samples[0] * np.array([0.5, 1.0])).tolist(), *samples[1:-1].tolist()] if len(samples) > 1 else [0.0]
        )

    def _relaxed_bound(self, case: _AsyncCase) -> tuple[float, float]:
        """Bounds a case: links allow most at the lower end of its steps, and the price limits the steps to the upper
        end.

        Returns:
            A bound, and the steps of the machines with that bound.
        """
        arrays, bound, best = self._arrays(case.ps, case.slowest), math.inf, case.low
        prices = self._prices(arrays)
        for price, found in zip(prices, self._space.rate_optima(arrays, [case.low], prices), strict=True):
            self.effort += arrays.effort
            if found is None:
                return 0.0, best
            if found.value + price * case.high < bound:
                bound, best = found.value + price * case.high, min(max(case.low, found.steps), case.high)
            if bound <= self.speed * (1 + MIN_SPEED_GAIN):
                break
        return bound, best

    def _narrow_bounds(
        self, case: _SyncCase, found: _RelaxedOptimum, goal: float, above: float
    ) -> tuple[_RelaxedOptimum, float, float]:
        """Raises the speed reached and lowers the bound; the parts of the case start with these."""
        for _ in range(MAX_NARROWINGS):
            if above <= goal * (1 + MIN_SPEED_GAIN):
                break
            middle = math.sqrt(goal * above)
            faster = self._optimistic_machines(case, middle)
            if faster is None:
                above = middle
            else:
                found, goal = faster, middle
        return found, goal, above

    def _target_speed(self, above: float, case: _SyncCase) -> float:
        """A target speed between the one reached and the bound."""
        least = max(self.speed * (1 + MIN_SPEED_GAIN / 2), above * MIN_BOUND_SHARE)
        if not case.below:
            # Most of the many cases do not even reach the minimum of interest.
            return least
        below = max(least, case.below)
        return max(least, min(math.sqrt(below * above), below * MAX_TARGET_RATIO))

    def _cases(self) -> Iterator[_SyncCase | _AsyncCase]:
        one = self._arrays(1)
        if not one.samples.size or not one.room.any():
            return
        most = int(min(self._space.max_workers, one.counts @ one.room.max(axis=(1, 2))))
        least = self._space.min_workers
        if most < least:
            return
        self._works = np.unique(np.round(one.work[(one.room > 0) & np.isfinite(one.work)], 9))
        if not len(self._works):
            return
        chunks = np.array_split(np.arange(len(self._works)), min(WORK_RANGES, len(self._works)))
        # Of equal bounds, more ps come first: their CPUs are the last to limit the speed.
        counts = self._space.ps_counts()
        more = [MORE_PS] if counts[-1:] != [self._space.most_ps] else []
        for ps in (*more, *reversed(counts)):
            self._loads[ps] = self._load(ps)
            if not self._scenario.profile.synchronous:
                max_steps_per_s = min(
                    self._space.model.shared(self._loads[ps]).max_steps_per_s, self._most_rate / one.samples.min()
                )
                min_steps_per_s = max(self.speed, max_steps_per_s * MIN_BOUND_SHARE) / one.most_samples
                for slowest in self._slowest(ps):
                    yield _AsyncCase(ps, min_steps_per_s, max_steps_per_s, slowest, is_whole=True)
                continue
            for chunk in chunks:
                yield _SyncCase(ps, (int(chunk[0]), int(chunk[-1])), (least, most))

    def _slowest(self, ps: int) -> list[tuple[float, float]]:
        """Ranges of the time that the slowest ps machine takes to send its shards; one if it does not matter."""
        kinds, shards = self._scenario.kinds, self._shards(ps)
        sizes = shards.sizes
        fewest = itertools.accumulate(reversed(sizes))
        stored = {*itertools.accumulate(sizes), *fewest}
        is_all = ps != MORE_PS and len(sizes) <= MAX_PS_WITH_ALL_SETS
        if is_all:
            stored = {sum(some) for count in range(1, ps + 1) for some in itertools.combinations(sizes, count)}
        elif ps == MORE_PS:
            stored = {math.ceil(shards.total * part / MAX_SLOWEST_TIMES) for part in range(1, MAX_SLOWEST_TIMES + 1)}
        times, are_all_kept = slowest_times(kinds, stored, shards, MAX_SLOWEST_TIMES)
        if not times:
            return [ANY_TIME]
        is_all = is_all and are_all_kept
        # If the times are complete, each range is a single time.
        return [(high if is_all else low, high) for low, high in itertools.pairwise([0.0, *times])]

    def _shards(self, ps: int) -> Shards:
        if ps != MORE_PS:
            return self._scenario.shards(ps)
        # However many ps there are, one has the largest variable.
        variables = [variable.size_bytes for variable in self._scenario.profile.variables]
        total = self._scenario.shards(1).total
        return Shards((max(variables), total - max(variables)), {})

    def _load(self, ps: int) -> float:
        """Load of the busiest ps; its minimum for `MORE_PS`."""
        shards, load = self._shards(ps), self._space.model.load
        if ps != MORE_PS:
            return load(shards)
        return max(load(Shards((size,), {})) for size in (shards.sizes[0], shards.total // self._space.most_ps))

    def _arrays(self, ps: int, slowest: tuple[float, float] = ANY_TIME) -> _Arrays:
        if (ps, slowest) not in self._optimistic:
            if ps not in self._base_arrays:
                kinds, shards = self._scenario.kinds, self._shards(ps)
                rows = [_Row(index, kind.count) for index, kind in enumerate(kinds)]
                if len(kinds) == 1 and self._scenario.sizes.chief is not None:
                    # One of the identical machines has the chief.
                    others = kinds[0].count - 1
                    rows = [_Row(0, 1, chief=True), *([_Row(0, others)] if others else [])]
                if ps == MORE_PS:
                    largest = self._space.largest_of_more_ps
                    arrays = _Arrays(self._space, rows, shards, optimistic=True, pieces=PIECES, largest_ps=largest)
                else:
                    arrays = _Arrays(self._space, rows, shards, optimistic=True)
                self._base_arrays[ps] = arrays
            self._optimistic[ps, slowest] = self._base_arrays[ps].limited_to(slowest)
        return self._optimistic[ps, slowest]

    def _first_bound(self, case: _SyncCase | _AsyncCase) -> float:
        """Bounds a case with the cards of all machines combined, and the largest shard on the fastest of them.

        Counts only the bytes of workers elsewhere.
        """
        arrays, model = self._arrays(1), self._space.model
        if isinstance(case, _AsyncCase):
            return min(case.high * arrays.most_samples, self._most_rate)
        first, last = case.workers
        elsewhere = max(0, first - arrays.most_beside)
        largest = self._shards(case.ps).sizes[0]
        network_s = 2 * elsewhere * max(arrays.total / self._cards, largest / arrays.fastest_card)
        rest_s = network_s + model.update_s(self._loads[case.ps], first) + model.dispatch_s(first)
        work_s = float(self._works[case.works[0]])
        round_s = max(work_s, rest_s) if model.overlap else work_s + rest_s
        return min(last * arrays.most_samples, self._most_samples(case.works[1])) / round_s

    @functools.cached_property
    def _most_rate(self) -> float:
        """Samples/s of all machines with workers that never wait (asynchronous)."""
        arrays = self._arrays(1)
        with np.errstate(divide="ignore"):
            rates = np.where(arrays.room > 0, arrays.room * arrays.samples / arrays.work, 0.0)
        return float(arrays.counts @ rates.max(axis=(1, 2)))

    @functools.cache  # noqa: B019
    def _most_samples(self, work: int) -> float:
        """Samples of one step of all workers that are no slower, with workers on all machines."""
        arrays = self._arrays(1)
        room = np.where(arrays.work <= self._works[work] * (1 + ROUNDING) + ROUNDING, arrays.room, 0)
        return float(arrays.counts @ (room * arrays.samples).max(axis=(1, 2)))

    def _optimistic_machines(self, case: _SyncCase, goal: float) -> _RelaxedOptimum | None:
        """Machines that are that fast in the optimistic reading; None if none are."""
        arrays = self._arrays(case.ps)
        self.effort += 2 * arrays.effort
        return self._space.machines_reaching(arrays, self._loads[case.ps], goal, *self._limits(case))

    def _limits(self, case: _SyncCase) -> tuple[float, float, tuple[int, int]]:
        return float(self._works[case.works[0]]), float(self._works[case.works[1]]), case.workers

    # Real placements.

    def _place_sync_case(self, case: _SyncCase, promise: _RelaxedOptimum, goal: float, above: float) -> None:
        if case.ps == MORE_PS:
            return
        arrays = self._arrays(case.ps)
        busy = [state for state in promise.states if state.workers]
        works = [arrays.work[state.row, state.ps, state.choice % len(arrays.samples)] for state in busy]
        key = case.ps, float(max(works)), min(case.workers[1], sum(s.machines * s.workers for s in busy))
        if key in self._seen:
            return
        self._seen.add(key)
        for real in self._real_arrays(case.ps):
            for found in self._real_sync_optima(key, real, goal, above):
                self._assign_and_rate(case.ps, real, found, key[2])
                if self.speed * (1 + MIN_SPEED_GAIN) >= above:
                    return

    def _real_sync_optima(
        self, key: tuple[int, float, int], arrays: _Arrays, goal: float, above: float
    ) -> Iterator[_RelaxedOptimum]:
        space = self._space
        ps, work_s, workers = key
        speeds = [goal, self.speed or goal * MIN_BOUND_SHARE]
        while speeds:
            speed = speeds.pop(0) * (1 + ROUNDING)
            self.effort += 2 * arrays.effort
            found = space.machines_reaching(arrays, self._loads[ps], speed, work_s, work_s, (workers, workers))
            if found is not None:
                yield found
                if self.speed > speed * (1 + MIN_SPEED_GAIN / 5):
                    speeds = [self.speed]
                elif speeds:
                    break
        if arrays.uses_dynamic_program:
            return
        # Shards differ from the mean size, and with many machines local search does not compensate: the optimum
        # by the mean size spreads them most evenly.
        best, low, high = None, max(goal, self.speed), above
        for _ in range(MAX_NARROWINGS):
            speed = math.sqrt(low * high)
            self.effort += 2 * arrays.effort
            found = space.machines_reaching(arrays, self._loads[ps], speed, work_s, work_s, (workers, workers))
            best, low, high = (best, low, speed) if found is None else (found, speed, high)
        if best is not None:
            yield best

    def _place_async_case(self, case: _AsyncCase, above: float) -> None:
        candidates: Iterator[tuple[float, _Arrays, _RelaxedOptimum]] = (
            (self._samples(real, found), real, found)
            for real in self._real_arrays(case.ps, case.slowest)
            for found in self._real_async_optima(case, real)
        )
        if self._arrays(case.ps, case.slowest).uses_dynamic_program:
            # Rating takes longer than finding, so the best come first.
            candidates = iter(sorted(candidates, key=lambda entry: -entry[0]))
        for samples_per_s, real, machines in candidates:
            if samples_per_s < self.speed * MIN_RATED_SHARE:
                continue
            self._assign_and_rate(case.ps, real, machines, self._space.max_workers)
            if self.speed * (1 + MIN_SPEED_GAIN) >= above:
                return

    def _samples(self, arrays: _Arrays, found: _RelaxedOptimum) -> float:
        """Samples/s of the optimum if the shards had the mean size."""
        samples = np.append(arrays.samples, 0.0)[found.choices]
        return float(found.numbers[2] @ (samples * found.each(found.made)))

    def _real_async_optima(self, case: _AsyncCase, arrays: _Arrays) -> Iterator[_RelaxedOptimum]:
        prices = self._prices(arrays)
        if len(prices) > 1:
            some = [case.low, math.sqrt(case.low * case.high) if case.width <= MAX_PLACED_WIDTH else case.best]
            for index, found in enumerate(self._space.rate_optima(arrays, some, prices)):
                self.effort += arrays.effort
                if found is not None:
                    yield _trim_machines(arrays, found, some[index // len(prices)])
        if id(arrays) in self._max_rates_tried:
            return
        self._max_rates_tried.add(id(arrays))
        # The maximum steps that the machines keep up with.
        max_steps_per_s = self._space.model.shared(self._loads[case.ps]).max_steps_per_s
        low, high, best = 0.0, min(max_steps_per_s, self._most_rate / float(arrays.samples.min())), None
        many = POINTS_PER_BATCH if arrays.uses_dynamic_program else 1
        points = high * np.arange(1, many + 1) / many
        for _ in range(MAX_BISECTIONS):
            reached = low
            for steps, found in zip(points.tolist(), self._space.rate_optima(arrays, points.tolist()), strict=True):
                self.effort += arrays.effort
                if found is not None and found.steps >= steps * (1 - ROUNDING):
                    best, reached = found, steps
            low, high = reached, min((steps for steps in points.tolist() if steps > reached), default=high)
            if high <= low * (1 + 1e-3):
                break
            points = low + (high - low) * np.arange(1, many + 1) / (many + 1)
        if best is not None:
            yield _trim_machines(arrays, best, low)

    def _real_arrays(self, ps: int, slowest: tuple[float, float] = ANY_TIME) -> list[_Arrays]:
        """Arrays for each choice of the chief's machine and the machine of a far larger shard."""
        if (ps, slowest) not in self._real:
            if ps not in self._base_real_arrays:
                self._base_real_arrays[ps] = list(self._make_real(ps))
            found = [arrays.limited_to(slowest) for arrays in self._base_real_arrays[ps]]
            self._real[ps, slowest] = [one for one in found if one.is_optimistic or one.fits[:, 0].all()]
        return self._real[ps, slowest]

    def _make_real(self, ps: int) -> Iterator[_Arrays]:
        scenario, shards = self._scenario, self._scenario.shards(ps)
        kinds = scenario.kinds
        by_room = sorted(range(len(kinds)), key=lambda i: (kinds[i].gpus, -kinds[i].cpu_millis))
        hosts = by_room if len(kinds) <= MAX_HOST_KINDS else [by_room[0]]
        rest = shards.sizes[1:]
        is_far_larger = bool(rest) and shards.sizes[0] > LARGE_SHARD_RATIO * sum(rest) / len(rest)
        # Of few different shards none may be near the mean; then the optimistic reading is tried, too.
        is_unlike = len(shards.sizes) <= MAX_UNEQUAL_SHARDS and shards.sizes[0] > LARGE_SHARD_RATIO * shards.sizes[-1]
        for chief in hosts if scenario.sizes.chief is not None else [None]:
            for largest in hosts if is_far_larger else [None]:
                rows: list[_Row] = []
                for index, kind in enumerate(kinds):
                    special = (
                        [_Row(index, 1, True, True)]
                        if chief == largest == index
                        else [
                            *([_Row(index, 1, chief=True)] if chief == index else []),
                            *([_Row(index, 1, largest=True)] if largest == index else []),
                        ]
                    )
                    if len(special) > kind.count:
                        rows = []
                        break
                    rows += special
                    if kind.count > len(special):
                        rows.append(_Row(index, kind.count - len(special)))
                if rows:
                    yield _Arrays(self._space, rows, shards, optimistic=False)
                    if is_unlike:
                        yield _Arrays(self._space, rows, shards, optimistic=True)

    def _assign_and_rate(self, ps: int, arrays: _Arrays, found: _RelaxedOptimum, most: int) -> None:
        if (id(arrays), found.states) in self._seen:
            return
        self._seen.add((id(arrays), found.states))
        machines = _assign_machines(self._space, arrays, found, min(most, self._space.max_workers))
        if machines is None or len(machines[1]) < self._space.min_workers:
            return
        shape, assignment = machines[0], machines[2]
        shards = self._scenario.shards(ps)
        self.effort += 4 * arrays.effort + len(machines[1]) / WORKERS_PER_EFFORT
        self.rate(shape, shards, assignment)

    def rate(self, shape: WorkerShape, shards: Shards, assignment: Assignment) -> None:
        """Improves and evaluates the placement, and keeps it if it is the fastest so far."""
        worth = evaluate(self._scenario, shape, shards, assignment)
        if worth.samples_per_s < self.speed * MIN_IMPROVED_SHARE:
            return
        better = balanced(self._scenario, shape, shards, assignment)
        if better is not assignment:
            assignment, worth = better, evaluate(self._scenario, shape, shards, better)
        if worth.samples_per_s > self.speed:
            self.speed, self.found = worth.samples_per_s, RelaxedPlan(shape, shards, assignment, worth)


def _can_send_shards(arrays: _Arrays, room: Ints, half: Floats, fewest: int) -> bool:
    """Whether machines can send all shards, the largest from one of them, to the workers elsewhere; synchronous.

    Args:
        arrays: the machines, in the optimistic reading.
        room: maximum workers, rows x ps x choices.
        half: maximum bytes that a machine of each row sends in a step.
        fewest: minimum workers of the job.
    """
    has_ps = arrays.fits[:, 1:].any(axis=1)
    near = np.where(arrays.fits[:, 1:, None], room[:, 1:], 0).max(axis=(1, 2), initial=0)
    far = np.maximum(0, fewest - near)
    with np.errstate(divide="ignore"):
        most = np.where(has_ps, np.where(far > 0, half / far, np.inf), 0.0) * (1 + ROUNDING)
    return bool((most >= arrays.largest).any() and arrays.counts @ np.minimum(most, arrays.total) >= arrays.total)


def _amounts(task: TaskResources) -> tuple[int, int, int, int]:
    return task.cpu_millis, task.mem_mb, task.disk_mb, task.gpus


def _assign_machines(
    space: RelaxedSpace, arrays: _Arrays, found: _RelaxedOptimum, most: int
) -> tuple[WorkerShape, tuple[str, ...], Assignment] | None:
    """Assigns names: the machine of each task, and each worker's shape."""
    scenario, sizes, kinds = space.scenario, space.scenario.sizes, space.scenario.kinds
    of_kind = [iter(kind.names) for kind in kinds]
    # The machines with the chief and the largest shard are named before the others of their kinds.
    special = {i: iter([next(of_kind[row.kind])]) for i, row in enumerate(arrays.rows) if row.chief or row.largest}
    names_of = [
        special.get(i) or itertools.chain.from_iterable(of_kind[kind] for kind in row.kinds or (row.kind,))
        for i, row in enumerate(arrays.rows)
    ]
    slots: list[tuple[str, int, int]] = []
    workers: list[tuple[bool, float, str, WorkerShape]] = []
    idle: list[tuple[str, _State]] = []
    chief = largest = None
    for state in found.states:
        row = arrays.rows[state.row]
        for _ in range(state.machines):
            name = next(names_of[state.row])
            if not state.workers:
                idle.append((name, state))
            if not (state.ps or state.workers or row.chief or row.largest):
                continue
            chief = name if row.chief else chief
            largest = name if row.largest else largest
            slots.append((name, state.ps, state.workers))
            if state.workers:
                choice = state.choice % len(arrays.samples)
                shape = _shape(space, arrays, state, choice)
                beside = state.ps > 0 or row.largest
                workers += [(beside, float(arrays.samples[choice]), name, shape)] * state.workers
    if not workers or sum(ps for _, ps, _ in slots) != arrays.ps:
        return None
    if len(workers) > most:
        workers = sorted(workers, key=lambda entry: (-entry[1], not entry[0]))[:most]
    elif arrays.uses_dynamic_program and not scenario.profile.synchronous:
        workers += _workers_on_idle_machines(space, arrays, idle, most - len(workers))
    # The larger shards go to machines with more workers.
    held: list[tuple[float, int, int, str, int]] = []
    mean = (arrays.total - float(arrays.base.sum())) / max(1, arrays.ps)
    for index, (name, ps, near) in enumerate(slots):
        if ps:
            heapq.heappush(held, (-mean * ps, -near, index, name, ps))
    of_ps: list[str] = [] if largest is None else [largest]
    shards = scenario.shards(arrays.ps + (largest is not None))
    for size in shards.sizes[len(of_ps) :]:
        left, near, index, name, ps = heapq.heappop(held)
        of_ps.append(name)
        if ps > 1:
            heapq.heappush(held, (left + size, near, index, name, ps - 1))
    kind_of = scenario.kind_of
    on = tuple(name for _, _, name, _ in workers)
    shapes = tuple(shape for _, _, _, shape in workers)
    tasks: dict[str, list[TaskResources]] = {}
    for name, size in zip(of_ps, shards.sizes, strict=True):
        tasks.setdefault(name, []).append(sizes.ps(size))
    if chief is not None and sizes.chief is not None:
        tasks.setdefault(chief, []).append(sizes.chief)
    # Machines with workers only are within their room by construction.
    for name, shape in zip(on, shapes, strict=True):
        if name in tasks:
            tasks[name].append(sizes.worker(shape))
    if any(kind_of[name].room_for(NO_RESOURCES, here) < 0 for name, here in tasks.items()):
        return None
    usual = Counter(shapes).most_common(1)[0][0]
    return usual, on, Assignment(tuple(of_ps), on, chief, shapes)


def _workers_on_idle_machines(
    space: RelaxedSpace, arrays: _Arrays, idle: Sequence[tuple[str, _State]], left: int
) -> Iterator[tuple[bool, float, str, WorkerShape]]:
    """Adds workers on machines without any: a price for each worker may leave fewer of them than allowed.

    `idle`: names of those without workers, and their states. `left`: maximum workers.
    """
    made = []
    for name, state in idle:
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.nan_to_num(arrays.samples / arrays.work[state.row, state.ps])
        room = arrays.room[state.row, state.ps]
        choice = int((np.minimum(room, left) * each).argmax()) if len(room) else 0
        if len(room) and room[choice]:
            made.append((float(each[choice]), name, state, choice, int(room[choice])))
    for _, name, state, choice, room in sorted(made, key=lambda entry: -entry[0]):
        here = min(room, left)
        left -= here
        beside = state.ps > 0 or arrays.rows[state.row].largest
        yield from [(beside, float(arrays.samples[choice]), name, _shape(space, arrays, state, choice))] * here


def _shape(space: RelaxedSpace, arrays: _Arrays, state: _State, choice: int) -> WorkerShape:
    if choice >= len(space.gpu_shapes):
        return WorkerShape(0, float(arrays.cpus[state.row, state.ps, choice]))
    return space.gpu_shapes[choice]


def _trim_machines(arrays: _Arrays, found: _RelaxedOptimum, steps_per_s: float) -> _RelaxedOptimum:
    """With many workers: keeps the machines with ps, and the fastest others for the steps required and some spare."""
    if found.workers <= MAX_UNTRIMMED_WORKERS:
        return found
    rows, ps, machines = found.numbers
    own = found.each(found.made)
    special = np.array([row.chief or row.largest for row in arrays.rows])
    needed = (ps > 0) | special[rows]
    worth = found.worth[rows, ps, found.choices]
    order = np.lexsort((-worth, ~needed))
    own, machines, needed = own[order], machines[order], needed[order]
    made = np.cumsum(own * machines) - own * machines
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.ceil(np.maximum(0.0, steps_per_s * SPARE_STEPS_FACTOR - made) / own)
    kept = np.where(needed, machines, np.minimum(machines, np.where(own > 0, wanted, 0))).astype(np.int64)
    kept_rows = kept > 0
    return replace(found, numbers=(rows[order][kept_rows], ps[order][kept_rows], kept[kept_rows]))
