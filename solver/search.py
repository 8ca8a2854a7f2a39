"""Finds the best option: places those, and only those, whose bounds leave them a chance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dike.profile import ModelProfile
from solver.bounds import option_bounds
from solver.cluster import Cluster
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options import OptionSpace
from solver.placement.fastest import OutOfTimeError, Placement, calmest_placement, fastest_placement
from solver.placement.naming import Assignment, assign
from solver.placement.problem import placement_problem, shard_types
from solver.racks import Region, regions, uplink_s
from solver.resources import TaskSizes, WorkerShape
from solver.shards import Shards, shard
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS

TIE = 0.01
"""Predicted speeds closer than this share are equal: the model is not better than that."""
ALTERNATIVES = 5


@dataclass(frozen=True)
class Candidate:
    """An option and the part of the cluster to place it in, with what it can reach at best."""

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


@dataclass(frozen=True)
class Solved:
    """A candidate, placed.

    Attributes:
        candidate: the option.
        placement: counts of configurations.
        assignment: machine of every task.
        network_s: busiest network card or rack uplink.
        round_s: seconds in which every worker makes one step.
        samples_per_s: predicted speed.
        samples_ceiling: no placement of this candidate is faster; above `samples_per_s` only where an uplink, which
            the placement program does not know, limits the speed.
    """

    candidate: Candidate
    placement: Placement
    assignment: Assignment
    network_s: float
    round_s: float
    samples_per_s: float
    samples_ceiling: float


@dataclass(frozen=True)
class SearchResult:
    """What came of a search.

    Attributes:
        best: the option chosen; None where nothing fits.
        others: all other options that were placed, best first, one of each label.
        ceiling: no option is faster (throughput) or no option has less traffic (traffic).
        complete: whether every option was either placed or ruled out by its bound.
        placed: how many options were placed.
    """

    best: Solved | None
    others: tuple[Solved, ...]
    ceiling: float
    complete: bool
    placed: int


class OptionSearch:
    """Compares the options of one job on one cluster."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        kinds: Sequence[NodeKind],
        hardware: Hardware,
        sizes: TaskSizes,
        space: OptionSpace,
    ) -> None:
        self._profile = profile
        self._cluster = cluster
        self._hardware = hardware
        self._sizes = sizes
        self._space = space
        self._regions: tuple[Region, ...] = regions(kinds)
        self._rack_of = {name: kind.rack for kind in kinds for name in kind.names}
        self._shards: dict[int, Shards] = {}
        self._solved: dict[tuple[int, WorkerShape, int, int], Solved | None] = {}

    def shards(self, ps: int) -> Shards:
        """The variables on that many parameter servers."""
        if ps not in self._shards:
            self._shards[ps] = shard(self._profile, ps)
        return self._shards[ps]

    def model(self, shape: WorkerShape) -> StepModel:
        """Step times of workers of that shape."""
        within = self._cluster.within_node_gbps * BYTES_PER_S_PER_GBPS
        return StepModel(self._profile, shape, self._hardware, within, self.shards(1).total)

    def fastest(self, deadline: float) -> SearchResult:
        """The fastest option; among those within 1% of it the one with least traffic, then with fewest tasks."""
        candidates = sorted(self._candidates(), key=lambda c: (-c.samples_bound, *_traffic_key(self, c)))
        unsolved = self._place_all(candidates, deadline, self._samples_to_beat)
        solved = [entry for entry in self._solved.values() if entry is not None]
        if not solved:
            return SearchResult(None, (), 0.0, complete=not unsolved, placed=0)
        fastest = max(entry.samples_per_s for entry in solved)
        floor = fastest * (1 - TIE)
        tied = [c for c in candidates if c.samples_bound >= floor and self._key(c) not in self._solved]
        best = min((s for s in solved if s.samples_per_s >= floor), key=lambda s: _solved_key(self, s))
        complete = not unsolved
        for candidate in sorted(tied, key=lambda c: _traffic_key(self, c)):
            if _traffic_key(self, candidate) >= _solved_key(self, best):
                break
            try:
                found = self.place(candidate, deadline)
            except OutOfTimeError:
                complete = False
                break
            if found is not None and found.samples_per_s >= floor and _solved_key(self, found) < _solved_key(self, best):
                best = found
        ceiling = max(
            fastest,
            max((entry.samples_ceiling for entry in self._solved.values() if entry is not None), default=0.0),
            max((candidate.samples_bound for candidate in unsolved), default=0.0),
        )
        return self._result(best, ceiling, complete, key=lambda s: (-s.samples_per_s, *_solved_key(self, s)))

    def calmest(self, deadline: float) -> SearchResult:
        """The option with least traffic by Eq. 1, whatever its speed, then with fewest tasks."""
        candidates = sorted(self._candidates(), key=lambda c: _traffic_key(self, c))
        solved: list[Solved] = []
        ceiling, complete = 0.0, True
        for candidate in candidates:
            if len(solved) > ALTERNATIVES and _traffic_key(self, candidate) >= _solved_key(self, solved[ALTERNATIVES]):
                break
            try:
                found = self.place(candidate, deadline if solved else None, least_traffic=True)
            except OutOfTimeError:
                complete, ceiling = False, candidate.traffic_bound
                break
            if found is not None:
                solved = sorted([*solved, found], key=lambda s: _solved_key(self, s))
        if not solved:
            return SearchResult(None, (), 0.0, complete=True, placed=0)
        best = solved[0]
        ceiling = best.placement.traffic_bytes if complete else min(ceiling, best.placement.traffic_bytes)
        return self._result(best, ceiling, complete, key=lambda s: _solved_key(self, s))

    def neighbour(self, solved: Solved, workers: int, ps: int) -> Solved | None:
        """The same option with other counts; None if it is not in the space or does not fit."""
        allowed = any(
            entry.shape == solved.candidate.shape
            and entry.min_workers <= workers <= entry.max_workers
            and 1 <= ps <= entry.max_ps
            for entry in self._space.ranges
        )
        if not allowed:
            return None
        return self.place(Candidate(solved.candidate.region, solved.candidate.shape, workers, ps, 0.0, 0.0), None)

    def place(self, candidate: Candidate, deadline: float | None, *, least_traffic: bool = False) -> Solved | None:
        """Places one option, once.

        Raises:
            OutOfTimeError: if the deadline passed before the best placement was found and proven.
        """
        key = self._key(candidate)
        if key not in self._solved:
            self._solved[key] = self._place(candidate, deadline, least_traffic=least_traffic)
        return self._solved[key]

    @staticmethod
    def _key(candidate: Candidate) -> tuple[int, WorkerShape, int, int]:
        return candidate.region, candidate.shape, candidate.workers, candidate.ps

    def _place(self, candidate: Candidate, deadline: float | None, *, least_traffic: bool) -> Solved | None:
        region, shards, model = self._regions[candidate.region], self.shards(candidate.ps), self.model(candidate.shape)
        problem = placement_problem(region, model, self._sizes, shards, candidate.workers)
        placement = (calmest_placement if least_traffic else fastest_placement)(problem, deadline)
        if placement is None:
            return None
        assignment = assign(placement.used, region, shard_types(shards))
        uplink = uplink_s(self._cluster, assignment, shards.sizes, self._rack_of)
        network = max(placement.network_s, uplink)
        round_s = model.round_s(placement.cycle_s, network, shards.sizes[0], candidate.workers)
        samples = candidate.workers * model.samples_per_step / round_s
        return Solved(candidate, placement, assignment, network, round_s, samples, max(samples, placement.samples_per_s))

    def _candidates(self) -> list[Candidate]:
        """Every option with its bounds, those that do not fit left out."""
        found = []
        for region_index, region in enumerate(self._regions):
            machines = sum(kind.count for kind in region)
            for entry in self._space.ranges:
                for ps in range(1, min(entry.max_ps, machines) + 1):
                    bounds = option_bounds(
                        region, self.model(entry.shape), self._sizes, self.shards(ps), entry.max_workers
                    )
                    fits = np.flatnonzero(bounds.samples_per_s > 0)
                    for index in fits[fits >= entry.min_workers - 1].tolist():
                        found.append(
                            Candidate(
                                region_index,
                                entry.shape,
                                index + 1,
                                ps,
                                float(bounds.samples_per_s[index]),
                                float(bounds.traffic_bytes[index]),
                            )
                        )
        return found

    def _place_all(
        self, candidates: Sequence[Candidate], deadline: float, to_beat: object
    ) -> list[Candidate]:
        """Places candidates, best bound first, until no bound beats the best few; returns those time cut off."""
        speeds: dict[tuple[int, int, int, float], float] = {}
        for index, candidate in enumerate(candidates):
            best = sorted(speeds.values(), reverse=True)
            if len(best) > ALTERNATIVES and candidate.samples_bound <= best[ALTERNATIVES]:
                return []
            try:
                # The first answer is worth waiting for.
                found = self.place(candidate, deadline if best else None)
            except OutOfTimeError:
                return list(candidates[index:])
            if found is not None:
                speeds[candidate.label] = max(speeds.get(candidate.label, 0.0), found.samples_per_s)
        return []
