"""Finds the best option: places those, and only those, whose bounds leave them a chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dike.profile import ModelProfile
from solver.bounds import Bounds, option_bounds
from solver.candidates import Candidate, CandidateTable, Key
from solver.cluster import Cluster
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options import OptionRange, OptionSpace
from solver.placement.fastest import OutOfTimeError, Placement, calmest_placement, can_reach, fastest_placement
from solver.placement.naming import Assignment, assign
from solver.placement.problem import PlacementProblem, placement_problem
from solver.racks import Region, regions, uplink_s
from solver.resources import TaskSizes, WorkerShape
from solver.shards import Shards, shard
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS

TIE = 0.01
"""Predicted speeds closer than this share are equal: the model is not better than that."""
ALTERNATIVES = 5
ROUNDING = 1e-6


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
    """

    candidate: Candidate
    placement: Placement
    assignment: Assignment
    network_s: float
    round_s: float
    samples_per_s: float

    @property
    def samples_ceiling(self) -> float:
        """No placement is faster; above the speed where an uplink, which the program ignores, limits it."""
        return max(self.samples_per_s, min(self.placement.samples_per_s, self.candidate.samples_bound))


@dataclass(frozen=True)
class SearchResult:
    """What came of a search.

    Attributes:
        best: the option chosen.
        others: other options that were placed, best first, one of each label.
        gap: share by which a better option or placement could be better; 0 where there is none.
        complete: whether every option was placed or ruled out by its bound.
        placed: how many options had to be placed, or shown to be too slow, by the placement program.
    """

    best: Solved
    others: tuple[Solved, ...]
    gap: float
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
        self._beaten = 0

    def shards(self, ps: int) -> Shards:
        """The variables on that many parameter servers."""
        if ps not in self._shards:
            self._shards[ps] = shard(self._profile, ps)
        return self._shards[ps]

    def model(self, shape: WorkerShape) -> StepModel:
        """Step times of workers of that shape."""
        within = self._cluster.within_node_gbps * BYTES_PER_S_PER_GBPS
        return StepModel(self._profile, shape, self._hardware, within, self.shards(1).total)

    def fastest(self, deadline: float) -> SearchResult | None:
        """The fastest option; of those within 1% of it the one with least traffic, then with fewest tasks.

        Returns:
            None if no option fits.
        """
        table = self._table()
        cut_off = self._place_fastest(table, deadline)
        solved = [entry for entry in self._solved.values() if entry is not None]
        if not solved:
            return None
        fastest = max(entry.samples_per_s for entry in solved)
        floor = fastest * (1 - TIE)
        best = min((entry for entry in solved if entry.samples_per_s >= floor), key=self._key)
        complete = cut_off is None
        for candidate in table.by_traffic(floor):
            if not complete or candidate.key(candidate.traffic_bound, self._total) >= self._key(best):
                break
            try:
                found = self._place_if_it_reaches(candidate, floor, deadline)
            except OutOfTimeError:
                complete = False
                break
            if found is not None and found.samples_per_s >= floor and self._key(found) < self._key(best):
                best = found
        ceiling = max(entry.samples_ceiling for entry in solved)
        if cut_off is not None:
            ceiling = max(ceiling, cut_off.samples_bound)
        gap = max(0.0, 1 - fastest / ceiling)
        return self._result(best, gap, complete, lambda entry: (-entry.samples_per_s, *self._key(entry)))

    def calmest(self, deadline: float) -> SearchResult | None:
        """The option with least traffic by Eq. 1, whatever its speed, then with fewest tasks.

        Returns:
            None if no option fits.
        """
        solved: list[Solved] = []
        least_possible: float | None = None
        for candidate in self._table().by_traffic():
            bound = candidate.key(candidate.traffic_bound, self._total)
            if len(solved) > ALTERNATIVES and bound >= self._key(solved[ALTERNATIVES]):
                break
            try:
                found = self.place(candidate, calmest_placement, deadline if solved else None)
            except OutOfTimeError:
                least_possible = candidate.traffic_bound
                break
            if found is not None:
                solved = sorted([*solved, found], key=self._key)
        if not solved:
            return None
        traffic = solved[0].placement.traffic_bytes
        gap = 0.0 if least_possible is None or traffic <= 0 else max(0.0, 1 - least_possible / traffic)
        return self._result(solved[0], gap, least_possible is None, self._key)

    def place(
        self,
        candidate: Candidate,
        method: Callable[..., Placement | None] = fastest_placement,
        deadline: float | None = None,
    ) -> Solved | None:
        """Places one option, once.

        Args:
            candidate: the option.
            method: `fastest_placement` or `calmest_placement`, the same in every call.
            deadline: on `time.monotonic`'s clock; None for none.

        Raises:
            OutOfTimeError: if the deadline passed before the best placement was found and proven.
        """
        if candidate.identity not in self._solved:
            self._solved[candidate.identity] = self._place(candidate, method, deadline)
        return self._solved[candidate.identity]

    def neighbour(self, solved: Solved, workers: int, ps: int) -> Solved | None:
        """The option with other counts, placed; None if it is not in the space or does not fit."""
        shape = solved.candidate.shape
        for entry in self._space.ranges:
            if entry.shape == shape and entry.min_workers <= workers <= entry.max_workers and 1 <= ps <= entry.max_ps:
                return self.place(Candidate(solved.candidate.region, shape, workers, ps, math.inf, 0.0))
        return None

    def _place_if_it_reaches(self, candidate: Candidate, samples_per_s: float, deadline: float) -> Solved | None:
        """Places the option if it can be that fast; None if it cannot, or does not fit."""
        if candidate.identity not in self._solved and not can_reach(self._problem(candidate), samples_per_s, deadline):
            self._beaten += 1
            return None
        return self.place(candidate, fastest_placement, deadline)

    def _problem(self, candidate: Candidate) -> PlacementProblem:
        region, shards = self._regions[candidate.region], self.shards(candidate.ps)
        return placement_problem(region, self.model(candidate.shape), self._sizes, shards, candidate.workers)

    def _place(
        self, candidate: Candidate, method: Callable[..., Placement | None], deadline: float | None
    ) -> Solved | None:
        problem, shards, model = self._problem(candidate), self.shards(candidate.ps), self.model(candidate.shape)
        placement = method(problem, deadline)
        if placement is None:
            return None
        assignment = assign(placement.groups, problem.kinds, problem.shard_types)
        network = max(placement.network_s, uplink_s(self._cluster, assignment, shards.sizes, self._rack_of))
        round_s = model.round_s(placement.cycle_s, network, shards.sizes[0], candidate.workers)
        samples = candidate.workers * model.samples_per_step / round_s
        return Solved(candidate, placement, assignment, network, round_s, samples)

    def _place_fastest(self, table: CandidateTable, deadline: float) -> Candidate | None:
        """Places options, best bound first, until no bound beats the best few; returns where time cut it off."""
        speeds: dict[tuple[int, int, int, float], float] = {}
        for candidate in table.by_speed():
            best = sorted(speeds.values(), reverse=True)
            if len(best) > ALTERNATIVES and candidate.samples_bound <= best[ALTERNATIVES] * (1 + ROUNDING):
                return None
            try:
                if len(best) > ALTERNATIVES:
                    # Slower ones matter only while they may tie with the fastest.
                    worth = min(best[ALTERNATIVES], best[0] * (1 - TIE))
                    found = self._place_if_it_reaches(candidate, worth, deadline)
                else:
                    # The first answer is worth waiting for.
                    found = self.place(candidate, fastest_placement, deadline if best else None)
            except OutOfTimeError:
                return candidate
            if found is not None:
                speeds[candidate.label] = max(speeds.get(candidate.label, 0.0), found.samples_per_s)
        return None

    def _table(self) -> CandidateTable:
        across = self._cluster.across_racks_gbps
        uplink = None if across is None else across * BYTES_PER_S_PER_GBPS

        def bounds(region: Sequence[NodeKind], entry: OptionRange, ps: int) -> Bounds:
            model, shards = self.model(entry.shape), self.shards(ps)
            return option_bounds(region, model, self._sizes, shards, entry.max_workers, uplink)

        return CandidateTable(self._regions, self._space.ranges, self._total, bounds)

    @property
    def _total(self) -> int:
        return self.shards(1).total

    def _key(self, solved: Solved) -> Key:
        return solved.candidate.key(solved.placement.traffic_bytes, self._total)

    def _result(
        self, best: Solved, gap: float, complete: bool, key: Callable[[Solved], tuple[float, ...]]
    ) -> SearchResult:
        others: dict[tuple[int, int, int, float], Solved] = {}
        for entry in sorted((entry for entry in self._solved.values() if entry is not None), key=key):
            if entry.candidate.label != best.candidate.label:
                others.setdefault(entry.candidate.label, entry)
        return SearchResult(best, tuple(others.values()), gap, complete, len(self._solved) + self._beaten)
