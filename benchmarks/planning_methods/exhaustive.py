"""The optimum by brute force: every placement of every option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planning_methods.layouts import (
    Layout,
    Shelf,
    layout_count,
    log10_placements,
    row_count,
    shard_layouts,
    worker_rows,
)
from dike.exceptions import BadInputError
from solver.baselines.setting import SPEED_TOLERANCE, BaselineChoice, Setting
from solver.baselines.speeds import card_s, samples_per_s
from solver.capacity import Ints
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.rate_arrays import Floats, PlacementArrays, total_rates, waits_s
from solver.resources import WorkerShape
from solver.shards import Shards
from solver.traffic import weighted_traffic
from solver.units import BYTES_PER_S_PER_GBPS

MAX_PLACEMENTS = 200_000_000
"""More take minutes."""
MAX_LAYOUTS = 200_000
"""Maximum number of ps placements, which are listed one by one."""
ROWS_PER_CHUNK = 4096
CELLS_PER_CHUNK = 1 << 19
"""Rows, and cells of rows x layouts, evaluated at a time: their arrays fit a processor's cache."""
PLACEMENTS_PER_CHUNK = 1 << 15
"""Asynchronous placements evaluated at a time."""


def iterative(setting: Setting) -> BaselineChoice:
    """Evaluates every placement of every option (paper 'Dike', section 4).

    Options: every worker size that the first two rules leave or static methods use, any number of workers, up to one ps
        for
    each machine.
    Placements: all, including several ps on one machine (the third rule is not kept), except permutations of equal
    machines. Ties are broken by least traffic (Eq. 1), then fewest tasks. 'Best' is by the step-time model.

    Raises:
        BadInputError: if there are more than `MAX_PLACEMENTS`, or more than `MAX_LAYOUTS` placements of the ps.
        InfeasibleError: if not even one worker fits.
    """
    return exhaust(setting)


def exhaust(setting: Setting, *, inside_rules: bool = False) -> BaselineChoice:
    """As `iterative`; `inside_rules` restricts it to the rules' worker sizes and one ps a machine."""
    kinds, sizes = setting.scenario.kinds, setting.scenario.sizes
    shapes = setting.shapes if inside_rules else tuple(dict.fromkeys((*setting.shapes, setting.slice)))
    rooms = [[_room(setting, kind, shape, ()) for kind in kinds] for shape in shapes]
    machines = [kind.count for kind in kinds]
    magnitude = log10_placements(machines, rooms, setting.max_ps)
    if magnitude > math.log10(MAX_PLACEMENTS):
        raise _too_many(f"about 10^{magnitude:.0f} placements", MAX_PLACEMENTS)
    of_ps = layout_count(machines, setting.max_ps)
    if of_ps > MAX_LAYOUTS:
        raise _too_many(f"about 10^{math.log10(of_ps):.0f} placements of the parameter servers alone", MAX_LAYOUTS)
    layouts = [
        shard_layouts(kinds, sizes, setting.scenario.shards(ps).sizes, ps_may_share=not inside_rules)
        for ps in range(1, setting.max_ps + 1)
    ]
    placements = sum(
        len(alike) * row_count(runs, of_shape)
        for by_runs in layouts
        for runs, alike in by_runs.items()
        for of_shape in rooms
    )
    if placements > MAX_PLACEMENTS:
        raise _too_many(f"{placements:,} placements", MAX_PLACEMENTS)
    best: _Found | None = None
    for ps, by_runs in enumerate(layouts, 1):
        for shape, of_shape in zip(shapes, rooms, strict=True):
            for runs, alike in by_runs.items():
                block = _Block(setting, shape, setting.scenario.shards(ps), alike)
                best = block.best(worker_rows(runs, of_shape), best)
    if best is None:
        raise setting.no_room_error("iterative", shapes[0])
    options = setting.max_ps * sum(
        setting.cap_workers(sum(kind.count * room for kind, room in zip(kinds, of_shape, strict=True)))
        for of_shape in rooms
    )
    return BaselineChoice(
        best.shape, best.shards, best.assignment(setting), options, f"{placements:,} placements tried."
    )


def _too_many(count: str, most: int) -> BadInputError:
    return BadInputError(f"iterative would have to try {count}, more than its limit of {most:,}; use dike.")


def _room(setting: Setting, kind: NodeKind, shape: WorkerShape, shelf: Shelf, *, with_chief: bool = False) -> int:
    """How many workers a machine holds beside these shards; -1 if it does not hold the shards."""
    sizes = setting.scenario.sizes
    taken = [sizes.ps(size) for size in shelf]
    if with_chief and sizes.chief is not None:
        taken.append(sizes.chief)
    room = kind.room_for(sizes.worker(shape), taken)
    return room if hosts_workers(kind, setting.scenario.model(shape)) else min(room, 0)


@dataclass(frozen=True)
class _Found:
    """The best placement so far: shards and number of workers of each machine, kind by kind."""

    rank: tuple[float, int]
    samples_per_s: float
    shape: WorkerShape
    shards: Shards
    shelves: tuple[Shelf, ...]
    workers: tuple[int, ...]

    def beats(self, other: _Found) -> bool:
        """Whether it is faster or, at equal speed, has less traffic or as much traffic and fewer tasks."""
        if abs(self.samples_per_s - other.samples_per_s) > SPEED_TOLERANCE * other.samples_per_s:
            return self.samples_per_s > other.samples_per_s
        return self.rank < other.rank

    def assignment(self, setting: Setting) -> Assignment:
        kinds = [kind for kind in setting.scenario.kinds for _ in kind.names]
        names = [name for kind in setting.scenario.kinds for name in kind.names]
        left = {size: [ps for ps, of_ps in enumerate(self.shards.sizes) if of_ps == size] for size in self.shards.sizes}
        ps = {left[size].pop(0): name for name, shelf in zip(names, self.shelves, strict=True) for size in shelf}
        chief = None
        if setting.scenario.sizes.chief is not None:
            held = zip(names, kinds, self.shelves, self.workers, strict=True)
            chief = next(
                name
                for name, kind, shelf, count in held
                if _room(setting, kind, self.shape, shelf, with_chief=True) >= count
            )
        workers = tuple(name for name, count in zip(names, self.workers, strict=True) for _ in range(count))
        return Assignment(tuple(ps[index] for index in sorted(ps)), workers, chief)


class _Block:
    """Placements of one option's parameter servers, to combine with placements of workers."""

    def __init__(self, setting: Setting, shape: WorkerShape, shards: Shards, layouts: Sequence[Layout]) -> None:
        self._setting, self._shape, self._shards = setting, shape, shards
        self._model = setting.scenario.model(shape)
        self._load = self._model.load(shards)
        kinds = setting.scenario.kinds
        self._kind_of = [number for number, kind in enumerate(kinds) for _ in kind.names]
        self._layouts = [tuple(shelf for of_kind in layout for shelf in of_kind) for layout in layouts]
        seen: list[dict[Shelf, int]] = [{} for _ in kinds]
        # [layout, machine] -> index of its shelf among those of its kind.
        self._shelf_of = np.array(
            [
                [seen[kind].setdefault(shelf, len(seen[kind])) for kind, shelf in zip(self._kind_of, row, strict=True)]
                for row in self._layouts
            ]
        )
        self._local = [np.array([float(sum(shelf)) for shelf in shelves]) for shelves in seen]
        self._cards = np.array([kinds[number].network_bytes_per_s for number in self._kind_of])
        # For each layout, the longest time of a machine to send its shards (solver.async_rates).
        self._slowest_s = np.max(
            [
                self._local[number][self._shelf_of[:, machine]] / self._cards[machine]
                for machine, number in enumerate(self._kind_of)
            ],
            axis=0,
        )
        self._rooms = [self._rooms_of(kind, shelves, False) for kind, shelves in zip(kinds, seen, strict=True)]
        self._beside_chief = [self._rooms_of(kind, shelves, True) for kind, shelves in zip(kinds, seen, strict=True)]

    def best(self, rows: Ints, best: _Found | None) -> _Found | None:
        """Returns the best of these placements, or `best` if that is better.

        `rows`: numbers of workers on every machine.
        """
        counts = rows.sum(axis=1)
        rows = rows[(counts > 0) & (counts <= self._setting.cap_workers(int(counts.max(initial=0))))]
        for start in range(0, len(rows), ROWS_PER_CHUNK):
            part = rows[start : start + ROWS_PER_CHUNK]
            step = max(1, CELLS_PER_CHUNK // len(part))
            for first in range(0, len(self._layouts), step):
                layouts = np.arange(first, min(first + step, len(self._layouts)))
                speeds = self._speeds(layouts, part, 0.0 if best is None else best.samples_per_s)
                found = self._top(speeds, first, part)
                if found is not None and (best is None or found.beats(best)):
                    best = found
        return best

    def _rooms_of(self, kind: NodeKind, shelves: dict[Shelf, int], with_chief: bool) -> Ints:
        return np.array([_room(self._setting, kind, self._shape, shelf, with_chief=with_chief) for shelf in shelves])

    def _speeds(self, layouts: Ints, rows: Ints, least: float) -> Floats:
        """Returns speeds of layouts x rows; 0 where the tasks do not fit.

        Args:
            layouts: indices of the block's layouts.
            rows: numbers of workers on every machine.
            least: slower asynchronous placements get any speed between their own and this.
        """
        model, scenario = self._model, self._setting.scenario
        counts = rows.sum(axis=1)
        network = np.zeros((len(layouts), len(rows)))
        has_chief_room = np.zeros(network.shape, dtype=bool)
        rates = np.zeros(network.shape)
        slowest = np.zeros(len(rows))
        for machine, number in enumerate(self._kind_of):
            kind, here, shelf_of = scenario.kinds[number], rows[:, machine], self._shelf_of[layouts, machine]
            local = self._local[number]
            busy = card_s(model, kind.network_bytes_per_s, local[:, None], here, counts)
            busy[here > self._rooms[number][:, None]] = np.inf
            np.maximum(network, busy[shelf_of], out=network)
            if scenario.sizes.chief is not None:
                has_chief_room |= (here <= self._beside_chief[number][:, None])[shelf_of]
            if not here.any():
                continue
            work = model.work_s(kind)
            slowest = np.where(here > 0, np.maximum(slowest, work), slowest)
            rates += self._own_rates(layouts, machine)[:, None] * here
        if scenario.sizes.chief is not None:
            network[~has_chief_room] = np.inf
        if scenario.cluster.across_racks_gbps is not None:
            np.maximum(network, self._uplinks_s(layouts, rows, counts), out=network)
        if not model.profile.synchronous:
            return self._asynchronous_speeds(layouts, rows, np.where(np.isfinite(network), rates, 0.0), least)
        return samples_per_s(model, np.broadcast_to(slowest, network.shape), network, self._load, counts)

    def _asynchronous_speeds(self, layouts: Ints, rows: Ints, rates: Floats, least: float) -> Floats:
        """Speeds of layouts x rows; `rates`: steps per second limited by the workers alone."""
        model, scenario = self._model, self._setting.scenario
        kinds = [scenario.kinds[number] for number in self._kind_of]
        uplink, racks = np.inf, []
        if scenario.cluster.across_racks_gbps is not None:
            uplink = scenario.cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS
            racks = [
                np.array([i for i, kind in enumerate(kinds) if kind.rack == rack]) for rack in {k.rack for k in kinds}
            ]
        shared = model.shared(self._load, uplink)
        steps = np.minimum(rates, shared.max_steps_per_s)
        wanted = least / model.samples_per_step * (1 - 2 * SPEED_TOLERANCE)
        at, row = np.nonzero((steps > 0) & (steps >= wanted))
        # By descending bound; the loop stops where no bound beats the best rate.
        order = np.argsort(-steps[at, row])
        for start in range(0, len(order), PLACEMENTS_PER_CHUNK):
            some = order[start : start + PLACEMENTS_PER_CHUNK]
            here, beside = layouts[at[some]], rows[row[some]]
            if steps[at[some[0]], row[some[0]]] < wanted:
                break
            stored, own = np.empty(beside.shape), np.empty(beside.shape)
            for machine, number in enumerate(self._kind_of):
                shelf = self._shelf_of[here, machine]
                stored[:, machine] = self._local[number][shelf]
                own[:, machine] = beside[:, machine] * self._own_rates(here, machine)
            found = total_rates(PlacementArrays(own, stored, self._cards, shared, racks=racks), wanted)
            steps[at[some], row[some]] = found
            wanted = max(wanted, float(found.max()) * (1 - 2 * SPEED_TOLERANCE))
        return steps * model.samples_per_step

    def _own_rates(self, layouts: Ints, machine: int) -> Floats:
        """Steps per second of a worker on the machine, alone on the network, in each layout."""
        model, number = self._model, self._kind_of[machine]
        stored, card = self._local[number][self._shelf_of[layouts, machine]], self._cards[machine]
        waited = waits_s(stored, card, self._slowest_s[layouts])
        remote = 2 * np.maximum((self._shards.total - stored) / card, waited)
        work = model.work_s(self._setting.scenario.kinds[number])
        rates: Floats = 1 / (work + remote + 2 * stored / model.within_node_bytes_per_s)
        return rates

    def _uplinks_s(self, layouts: Ints, rows: Ints, counts: Ints) -> Floats:
        """Time of the busiest uplink of layouts x rows, as `solver.placement.naming.uplink_s`."""
        scenario = self._setting.scenario
        assert scenario.cluster.across_racks_gbps is not None
        racks = [scenario.kinds[number].rack for number in self._kind_of]
        busiest = np.zeros((len(layouts), len(rows)))
        for rack in set(racks):
            members = [machine for machine, of_machine in enumerate(racks) if of_machine == rack]
            stored = sum(self._local[self._kind_of[each]][self._shelf_of[layouts, each]] for each in members)[:, None]
            near = rows[:, members].sum(axis=1)
            crossing = np.maximum(stored * (counts - near), near * (self._shards.total - stored))
            np.maximum(busiest, crossing, out=busiest)
        return 2 * busiest / (scenario.cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS)

    def _top(self, speeds: Floats, first: int, rows: Ints) -> _Found | None:
        """The fastest placement, ties broken by traffic and number of tasks."""
        fastest = float(speeds.max())
        if fastest == 0:
            return None
        at, row = np.nonzero(speeds >= fastest * (1 - SPEED_TOLERANCE))
        total = self._shards.total
        local = np.zeros(len(at))
        for machine, number in enumerate(self._kind_of):
            local += self._local[number][self._shelf_of[first + at, machine]] * rows[row, machine]
        workers = rows[row].sum(axis=1)
        # Eq. 1 is linear in workers and local bytes; in units of the model, so that rounding does not matter.
        traffic = workers * weighted_traffic(1, 1, 0.0) + local / total * weighted_traffic(0, 0, 1.0)
        ranks = np.round(traffic, 6)
        index = int(np.lexsort((workers, ranks))[0])
        rank = float(ranks[index]), len(self._shards.sizes) + int(workers[index])
        shelves, beside = self._layouts[first + at[index]], tuple(rows[row[index]].tolist())
        return _Found(rank, float(speeds[at[index], row[index]]), self._shape, self._shards, shelves, beside)
