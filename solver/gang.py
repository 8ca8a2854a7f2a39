"""The best gang of equal workers: exact search over worker shapes, machines and numbers of workers.

The slowest worker and the slowest link decide, so the machines of an optimal gang may be any that are at least as fast
as those. For each shape, each compute speed, each card speed and each rack, or all of them, the search takes as many of
these machines as a number of workers needs, the largest first (docs/planner.md, 'All-reduce').
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from solver.allreduce import Floats, GangModel, Ints, gang_step
from solver.nodes import NodeKind
from solver.plan import PlannedTask
from solver.resources import CPU_STEP, TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.step_time import StepModel, StepTime
from solver.units import SIMPLE_TIE_SHARE

ANY_SAMPLE_FLOPS = 1e9
"""Assumed FLOPs of a worker's step if unknown, to find the fastest machines."""
ROUNDING = 1e-12
CPU_TIE_SHARE = 0.01
"""Fewer CPUs are preferred if they cost at most this share of the speed."""


@dataclass(frozen=True)
class GangOption:
    """A gang.

    Attributes:
        workers_on: number of workers on each machine, machine by machine and rack by rack.
        step_time: seconds of a step, with the terms; all 0 if the step's FLOPs are unknown.
        samples_per_s: predicted speed; 0 likewise.
        bound: no gang within the request is faster, in samples/s.
    """

    shape: WorkerShape
    resources: TaskResources
    workers_on: dict[str, int]
    step_time: StepTime
    samples_per_s: float
    bound: float = 0.0

    @property
    def workers(self) -> int:
        return sum(self.workers_on.values())

    def tasks(self) -> tuple[PlannedTask, ...]:
        nodes = [name for name, count in self.workers_on.items() for _ in range(count)]
        task = self.resources
        return tuple(
            PlannedTask("worker", index, node, task.cpus, task.mem_mb, task.disk_mb, task.gpus, is_plain=True)
            for index, node in enumerate(nodes)
        )


@dataclass(frozen=True)
class _Pool:
    """Machines of which a gang may use any.

    Attributes:
        kinds: those machines, with a room above 0.
        rooms: maximum workers on a machine of each kind.
        one_rack: whether all are in one rack, or racks do not matter.
    """

    kinds: tuple[NodeKind, ...]
    rooms: tuple[int, ...]
    one_rack: bool

    def capacities(self) -> Ints:
        return np.array([kind.count * room for kind, room in zip(self.kinds, self.rooms, strict=True)])

    def where(self, keep: Sequence[bool]) -> _Pool:
        kept = [pair for pair, stays in zip(zip(self.kinds, self.rooms, strict=True), keep, strict=True) if stays]
        return _Pool(tuple(kind for kind, _ in kept), tuple(room for _, room in kept), self.one_rack)

    def at_most_one(self) -> _Pool:
        return dataclasses.replace(self, rooms=(1,) * len(self.rooms))

    def with_cards(self, least: float) -> _Pool:
        """The machines with network cards of at least that speed."""
        return self.where([kind.network_bytes_per_s >= least for kind in self.kinds])

    def machines_for(self, workers: int) -> float:
        """The fewest machines that hold these workers; infinite if there are too few."""
        left, machines = workers, 0
        for room, count in sorted(
            ((room, kind.count) for kind, room in zip(self.kinds, self.rooms, strict=True)), reverse=True
        ):
            used = min(count, -(-left // room))
            machines, left = machines + used, left - used * room
            if left <= 0:
                return machines
        return math.inf

    def take_if(self, workers: int) -> dict[str, int] | None:
        """As `take`; None if there is no room."""
        return self.take(workers) if self.capacities().sum() >= workers else None

    def take(self, workers: int) -> dict[str, int]:
        """Workers on the fewest machines, the largest first; sorted by rack, so that a ring crosses few links."""
        by_room = sorted(zip(self.rooms, self.kinds, strict=True), key=lambda pair: -pair[0])
        taken: list[tuple[NodeKind, str, int]] = []
        left = workers
        for room, kind in by_room:
            for name in kind.names[: -(-left // room)]:
                taken.append((kind, name, min(room, left)))
                left -= min(room, left)
            if left <= 0:
                break
        taken.sort(key=lambda entry: (entry[0].rack or "", -entry[2]))
        return {name: count for _, name, count in taken}


def best_gang(scenario: Scenario, min_workers: int, max_workers: int | None) -> GangOption | None:
    """Finds the fastest gang, or a simpler one that is nearly as fast; None if none fits.

    Args:
        scenario: the model on the cluster; its steps must be measurable.
        min_workers: minimum workers; a gang has at least two.
        max_workers: maximum workers; None for no limit. No worker's part of a batch is empty.
    """
    fewest = max(2, min_workers)
    most = min(scenario.profile.batch_size, math.inf if max_workers is None else max_workers)
    counts = _useful_counts(scenario.profile.batch_size, fewest, int(most))
    if not counts.size:
        return None
    searches: list[_ShapeSearch] = []
    speeds = np.zeros(counts.size)
    for shape in _shapes(scenario):
        floor = float(speeds.max()) * (1 - SIMPLE_TIE_SHARE)
        if _bound(scenario, shape, counts) >= floor:
            searches.append(_ShapeSearch.of(scenario, shape, fewest))
            speeds = np.maximum(speeds, searches[-1].best_speeds(counts, floor))
    best = float(speeds.max())
    if not best > 0:
        return None
    enough = best * (1 - SIMPLE_TIE_SHARE)
    workers = int(counts[int((speeds >= enough).argmax())])
    options = (option for search in searches for option in search.placements(workers, enough))
    chosen = min(options, key=lambda option: (len(option.workers_on), -option.samples_per_s, option.shape))
    least = max(enough, chosen.samples_per_s * (1 - CPU_TIE_SHARE))
    return dataclasses.replace(_with_fewest_cpus(scenario, chosen, least), bound=best)


def evaluated(scenario: Scenario, shape: WorkerShape, workers_on: dict[str, int]) -> GangOption:
    """The gang of workers of that shape on these machines."""
    step = gang_step(scenario, scenario.model(shape), workers_on)
    return GangOption(shape, scenario.sizes.plain(shape), workers_on, step, scenario.profile.batch_size / step.total)


def any_gang(scenario: Scenario, min_workers: int, max_workers: int | None) -> GangOption | None:
    """A gang of a script whose computation is unknown; None if there is no room for `min_workers`.

    As many workers as fit, up to `max_workers`; exactly `min_workers` without that. If there are GPUs, each worker has
    one, with its share of a machine's CPUs, and the gang is on the fewest machines with the fastest GPUs. Without GPUs
    the workers have as many CPUs as possible.
    """
    fewest = max(2, min_workers)
    most = fewest if max_workers is None else max_workers
    known = dataclasses.replace(
        scenario.profile, batch_size=max(most, fewest), flops_step_per_sample=ANY_SAMPLE_FLOPS, sample_bytes=0
    )
    scenario = dataclasses.replace(scenario, profile=known)
    gpus = int(any(kind.gpus for kind in scenario.kinds))
    share = max(kind.cpus / max(1, kind.gpus * gpus) for kind in scenario.kinds if kind.gpus >= gpus)
    searches = [
        _ShapeSearch.of(scenario, shape, fewest)
        for shape in _shapes(scenario)
        if shape.gpus == gpus and (not gpus or shape.cpus <= max(share, CPU_STEP))
    ]
    workers = min(most, max((search.most_workers for search in searches), default=0))
    options = [option for search in searches for option in search.placements(workers, 0.0)] if workers >= fewest else []
    if not options:
        return None
    found = min(options, key=lambda option: (-option.samples_per_s, len(option.workers_on), -option.shape.cpus))
    nothing = StepTime(compute=0, input=0, latency=0, transfer=0, network=0, update=0, dispatch=0, total=0)
    return dataclasses.replace(found, step_time=nothing, samples_per_s=0.0, bound=0.0)


def _bound(scenario: Scenario, shape: WorkerShape, counts: Ints) -> float:
    """Samples/s that no gang of workers of that shape exceeds."""
    model = scenario.model(shape)
    able = {kind.gpu_model: kind for kind in scenario.kinds if kind.gpus >= shape.gpus}
    if not able:
        return 0.0
    gang, fastest_s = GangModel(model), min(model.arithmetic_s(kind) for kind in able.values())
    total_s = gang.total_s(fastest_s / counts, gang.network_s(counts, math.inf))
    return scenario.profile.batch_size / float(total_s.min())


def _useful_counts(batch: int, fewest: int, most: int) -> Ints:
    """Ascending numbers of workers, without those whose parts of a batch fewer workers also have."""
    if most < fewest:
        return np.zeros(0, dtype=np.int64)
    root = math.isqrt(batch) + 1
    parts = np.array([*range(1, root + 1), *(-(-batch // count) for count in range(1, root + 1))])
    counts = np.unique(np.append(-(-batch // parts), fewest))
    return counts[(counts >= fewest) & (counts <= most)]


def _shapes(scenario: Scenario) -> list[WorkerShape]:
    """Shapes with as many CPUs as some number of workers leaves to each on some machine: more are never slower."""
    shapes = set()
    for kind in scenario.kinds:
        for gpus in (0, 1):
            most = kind.gpus if gpus else int(kind.cpus / CPU_STEP)
            for workers in range(1, most + 1):
                cpus = math.floor(kind.cpus / workers / CPU_STEP + 1e-9) * CPU_STEP
                if cpus > 0:
                    shapes.add(WorkerShape(gpus, cpus))
    return sorted(shapes, reverse=True)


@dataclass(frozen=True)
class _ShapeSearch:
    """All gangs of workers of one shape.

    Attributes:
        batch_s: seconds of one worker for a whole batch, by GPU model.
    """

    scenario: Scenario
    model: StepModel
    pools: tuple[_Pool, ...]
    batch_s: dict[str | None, float]

    @classmethod
    def of(cls, scenario: Scenario, shape: WorkerShape, fewest: int) -> _ShapeSearch:
        model, task = scenario.model(shape), scenario.sizes.plain(shape)
        fitting = [
            (kind, room)
            for kind in scenario.kinds
            if (room := kind.room_for(task)) > 0 and (not shape.gpus or model.fits_gpu(kind))
        ]
        kinds, rooms = tuple(kind for kind, _ in fitting), tuple(room for _, room in fitting)
        racks = sorted({kind.rack or "" for kind in kinds})
        everything = _Pool(kinds, rooms, one_rack=len(racks) < 2)
        pools = [everything]
        if len(racks) > 1:
            pools += [
                dataclasses.replace(everything.where([(kind.rack or "") == rack for kind in kinds]), one_rack=True)
                for rack in racks
            ]
        enough = tuple(pool for pool in pools if pool.capacities().sum() >= fewest)
        by_model = {kind.gpu_model: kind for kind in kinds}
        return cls(scenario, model, enough, {name: model.arithmetic_s(kind) for name, kind in by_model.items()})

    @property
    def most_workers(self) -> int:
        return max((int(pool.capacities().sum()) for pool in self.pools), default=0)

    def best_speeds(self, counts: Ints, floor: float) -> Floats:
        """Samples/s of the best gang of each number of workers; 0 for those that do not fit, or are below `floor`."""
        speeds: Floats = np.zeros(counts.size)
        within = self.model.within_node_bytes_per_s
        for pool in self._by_compute():
            compute_s = self._compute_s(pool, counts)
            # Without any bytes on the links, no gang of the pool is faster.
            bounds = np.where(counts <= pool.capacities().sum(), self._speeds(compute_s, counts, math.inf), 0.0)
            if bounds.max() < floor or (bounds <= speeds).all():
                continue
            links = np.where(counts <= max(pool.rooms), within, 0.0)
            for each in (pool, pool.at_most_one()):
                cards = _slowest_card(each, counts)
                if max(each.rooms) > 1:
                    cards = np.minimum(cards, within)
                if not each.one_rack:
                    cards = np.minimum(cards, self.scenario.uplink_bytes_per_s)
                links = np.maximum(links, cards)
            usable = np.where(links > 0, links, 1.0)
            speeds = np.maximum(speeds, np.where(links > 0, self._speeds(compute_s, counts, usable), 0.0))
        return speeds

    def placements(self, workers: int, least: float) -> Iterator[GangOption]:
        """For each choice of machines the gang on the fewest of them, if it reaches that speed in samples/s."""
        count, within = np.array([workers]), self.model.within_node_bytes_per_s
        least *= 1 - ROUNDING
        for pool in self._by_compute():
            compute_s = self._compute_s(pool, count)
            if max(pool.rooms) >= workers and self._speeds(compute_s, count, within)[0] >= least:
                yield evaluated(self.scenario, self.model.shape, pool.take(workers))
            for each in (pool, pool.at_most_one()):
                most = within if max(each.rooms) > 1 else math.inf
                most = most if each.one_rack else min(most, self.scenario.uplink_bytes_per_s)
                cards = sorted({kind.network_bytes_per_s for kind in each.kinds})
                links = np.minimum(cards, most)
                enough = [
                    card
                    for card, speed in zip(cards, self._speeds(compute_s, count, links), strict=True)
                    if speed >= least
                ]
                taken = [on for card in enough[:1] if (on := each.with_cards(card).take_if(workers)) is not None]
                if taken:
                    card = _fastest_card(each, enough, workers)
                    yield evaluated(self.scenario, self.model.shape, each.with_cards(card).take(workers))

    def _compute_s(self, pool: _Pool, counts: Ints) -> Floats:
        slowest = max({kind.gpu_model: kind for kind in pool.kinds}.values(), key=self._batch_s)
        return GangModel(self.model).compute_s(slowest, counts)

    def _speeds(self, compute_s: Floats, counts: Ints, link: Floats | float) -> Floats:
        """Samples/s over links of that speed."""
        gang = GangModel(self.model)
        speeds: Floats = self.scenario.profile.batch_size / gang.total_s(compute_s, gang.network_s(counts, link))
        return speeds

    def _by_compute(self) -> Iterator[_Pool]:
        """Each pool, limited to the machines that compute at least as fast as one of them."""
        for pool in self.pools:
            for slowest in sorted({self._batch_s(kind) for kind in pool.kinds}):
                yield pool.where([self._batch_s(kind) <= slowest for kind in pool.kinds])

    def _batch_s(self, kind: NodeKind) -> float:
        return self.batch_s[kind.gpu_model]


def _fastest_card(pool: _Pool, cards: Sequence[float], workers: int) -> float:
    """The fastest of these ascending card speeds with which the gang needs as few machines as with the slowest."""
    fewest = pool.with_cards(cards[0]).machines_for(workers)
    # Faster cards are on fewer machines, so a gang never needs fewer of them.
    number = bisect.bisect_right(cards, fewest, key=lambda card: pool.with_cards(card).machines_for(workers))
    return cards[number - 1]


def _slowest_card(pool: _Pool, counts: Ints) -> Floats:
    """For each number of workers the fastest card speed at which there is room for all; 0 if there is not."""
    order = sorted(range(len(pool.kinds)), key=lambda index: -pool.kinds[index].network_bytes_per_s)
    room = np.cumsum(pool.capacities()[order])
    cards = np.array([pool.kinds[index].network_bytes_per_s for index in order] + [0.0])
    found: Floats = cards[np.searchsorted(room, counts)]
    return found


def _with_fewest_cpus(scenario: Scenario, option: GangOption, least: float) -> GangOption:
    """The fewest CPUs with which these workers reach that speed in samples/s."""
    low, high = 0, round(option.shape.cpus / CPU_STEP)
    # More CPUs are never slower.
    while high - low > 1:
        middle = (low + high) // 2
        tried = evaluated(scenario, WorkerShape(option.shape.gpus, middle * CPU_STEP), option.workers_on)
        low, high = (low, middle) if tried.samples_per_s >= least else (middle, high)
    return evaluated(scenario, WorkerShape(option.shape.gpus, high * CPU_STEP), option.workers_on)
