"""Local search on a placement: moves and exchanges parameter servers between the machines in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver.capacity import Ints
from solver.placement.naming import Assignment
from solver.rate_arrays import PlacementArrays, total_rates, waits_s
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards

Floats = NDArray[np.float64]

MAX_CELLS = 20_000
"""Maximum changes x machines compared in one batch; larger placements stay unchanged."""
MAX_CHANGES = 40
MIN_IMPROVEMENT = 1e-6


def balanced(scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment) -> Assignment:
    """Improves the machines of the ps by single moves and exchanges; the workers stay.

    `shape`: shape of each worker, unless the assignment has its own. `assignment`: the start; its tasks fit their
    machines.
    """
    names = list(
        dict.fromkeys((*assignment.workers, *assignment.ps, *([assignment.chief] if assignment.chief else [])))
    )
    count = len(shards.sizes)
    changes = count * (count - 1) // 2 + count * len(names)
    if count * len(names) < 2 or len(names) < 2 or changes * len(names) > MAX_CELLS:
        return assignment
    place = _Place.of(scenario, shape, shards, assignment, names)
    on = np.array([names.index(name) for name in assignment.ps])
    for _ in range(MAX_CHANGES):
        change = place.best_change(on)
        if change is None:
            break
        for ps, machine in change:
            on[ps] = machine
    return replace(assignment, ps=tuple(names[index] for index in on))


@dataclass(frozen=True)
class _Place:
    """The machines in use as arrays, one entry for each.

    Attributes:
        needs: resources of each ps, ps x resources.
        have: free resources of each machine beside workers and chief.
        own: (seconds of a worker's work, number of such workers) of each machine.
        racks: for each rack the indices of its machines; empty if racks do not matter.
    """

    sizes: Floats
    needs: Ints
    have: Ints
    cards: Floats
    workers: Ints
    own: list[list[tuple[float, int]]]
    scenario: Scenario
    shape: WorkerShape
    load: float
    racks: tuple[Ints, ...]

    @classmethod
    def of(
        cls, scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment, names: Sequence[str]
    ) -> _Place:
        sizes = scenario.sizes
        kind_of = scenario.kind_of
        index = {name: number for number, name in enumerate(names)}
        kinds = [kind_of[name] for name in names]
        have = np.array([kind.amounts[:3] for kind in kinds])
        near = Counter(zip(assignment.workers, assignment.shapes_of_workers(shape), strict=True))
        own: list[list[tuple[float, int]]] = [[] for _ in names]
        for (name, each), number in near.items():
            have[index[name]] -= number * np.array(sizes.worker(each).amounts[:3])
            own[index[name]].append((scenario.model(each).work_s(kind_of[name]), number))
        if assignment.chief is not None and sizes.chief is not None:
            have[index[assignment.chief]] -= np.array(sizes.chief.amounts[:3])
        racks: dict[str | None, list[int]] = {}
        for number, kind in enumerate(kinds):
            racks.setdefault(kind.rack, []).append(number)
        across = scenario.cluster.across_racks_gbps is not None
        return cls(
            sizes=np.array(shards.sizes, dtype=np.float64),
            needs=np.array([sizes.ps(size).amounts[:3] for size in shards.sizes]),
            have=have,
            cards=np.array([kind.network_bytes_per_s for kind in kinds]),
            workers=np.array([sum(number for _, number in entries) for entries in own]),
            own=own,
            scenario=scenario,
            shape=shape,
            load=scenario.model(shape).load(shards),
            racks=tuple(np.array(members) for members in racks.values()) if across else (),
        )

    def best_change(self, on: Ints) -> list[tuple[int, int]] | None:
        """The best move or exchange: (ps, machine) for each that changes; None if none helps."""
        count, machines = len(on), len(self.cards)
        stored: Floats = np.bincount(on, weights=self.sizes, minlength=machines).astype(np.float64)
        free = self.have.copy()
        np.subtract.at(free, on, self.needs)
        # Moves of each ps to each machine without one, then exchanges of each two.
        ps, to = (axis.ravel() for axis in np.meshgrid(np.arange(count), np.arange(machines), indexing="ij"))
        fits = (np.bincount(on, minlength=machines)[to] == 0) & (free[to] >= self.needs[ps]).all(axis=1)
        ps, to = ps[fits], to[fits]
        first, second = np.triu_indices(count, 1)
        differ = (on[first] != on[second]) & (self.sizes[first] != self.sizes[second])
        more = self.needs[first] - self.needs[second]
        differ &= ((free[on[second]] >= more) & (free[on[first]] >= -more)).all(axis=1)
        first, second = first[differ], second[differ]
        source = np.concatenate([on[ps], on[first]])
        target = np.concatenate([to, on[second]])
        moved = np.concatenate([self.sizes[ps], self.sizes[first] - self.sizes[second]])
        if not len(moved):
            return None
        after = np.broadcast_to(stored, (len(moved), machines)).copy()
        rows = np.arange(len(moved))
        after[rows, source] -= moved
        after[rows, target] += moved
        now, then = self._cost(stored[None, :])[0], self._cost(after)
        best = int(then.argmin())
        if then[best] >= now * (1 - MIN_IMPROVEMENT):
            return None
        if best < len(ps):
            return [(int(ps[best]), int(to[best]))]
        one, other = int(first[best - len(ps)]), int(second[best - len(ps)])
        return [(one, int(on[other])), (other, int(on[one]))]

    def _cost(self, stored: Floats) -> Floats:
        """The cost to minimise: the busiest link's time (synchronous) or the time of a step of all workers.

        The mean of the links' times breaks ties, so that a machine can be relieved in several moves.
        """
        model, total = self.scenario.model(self.shape), float(self.sizes.sum())
        every, within = int(self.workers.sum()), model.within_node_bytes_per_s
        if model.profile.synchronous:
            sent, received = stored * (every - self.workers), self.workers * (total - stored)
            times = np.maximum(2 * np.maximum(sent, received) / self.cards, 2 * stored * self.workers / within)
            uplink = self.scenario.uplink_bytes_per_s
            for members in self.racks:
                held, near = stored[:, members].sum(axis=1), self.workers[members].sum()
                crossing = 2 * np.maximum(held * (every - near), near * (total - held)) / uplink
                times = np.concatenate([times, crossing[:, None]], axis=1)
            ordered: Floats = np.sort(times, axis=1)
            return ordered[:, -1] + 1e-4 * (times**2).mean(axis=1) / np.maximum(ordered[:, -1], 1e-12)
        own = np.zeros(stored.shape)
        slowest = (stored / self.cards).max(axis=1)
        for machine, entries in enumerate(self.own):
            held, card = stored[:, machine], self.cards[machine]
            remote = 2 * np.maximum((total - held) / card, waits_s(held, card, slowest)) + 2 * held / within
            for work_s, number in entries:
                own[:, machine] += number / (work_s + remote)
        shared = model.shared(self.load, self.scenario.uplink_bytes_per_s)
        return 1 / np.maximum(total_rates(PlacementArrays(own, stored, self.cards, shared, racks=self.racks)), 1e-12)
