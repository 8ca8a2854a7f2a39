"""Finds the best option: places those, and only those, whose bounds leave them a chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.bounds import Bounds, ShapeBounds
from solver.candidates import Candidate, CandidateTable, Key, Label
from solver.evaluation import evaluate
from solver.mixed_bounds import mixed_bounds
from solver.nodes import NodeKind
from solver.options import OptionRange, OptionSpace, without_spare_cpus
from solver.placement.fastest import OutOfTimeError, Placement, calmest_placement, fastest_placement
from solver.placement.mixed import calmest_mixed_placement, fastest_mixed_placement
from solver.placement.naming import Assignment, assign
from solver.placement.problem import PlacementProblem, TooManyStatesError, mixed_problem, placement_problem
from solver.racks import Region, regions, uplink_s
from solver.resources import WorkerShape
from solver.rooms import Machines
from solver.scenario import Scenario
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS

Method = Callable[[PlacementProblem, float | None], Placement | None]

TIE = 0.01
"""Predicted speeds closer than this share are equal: the model is not better than that."""
ALTERNATIVES = 5
ROUNDING = 1e-6

_MIXED: dict[Method, Method] = {
    fastest_placement: fastest_mixed_placement,
    calmest_placement: calmest_mixed_placement,
}
"""For each way to place workers that are all alike, the one where they may differ."""


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
    def shape(self) -> WorkerShape:
        """What a worker gets; where they differ, what most get."""
        shapes = self.assignment.shapes_of_workers(self.placement.any_shape)
        return Counter(shapes).most_common(1)[0][0]

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
        scenario: Scenario,
        space: OptionSpace,
        *,
        ps_may_share: bool = False,
        known: Sequence[Solved] = (),
    ) -> None:
        """Prepares the comparison.

        Args:
            scenario: the model and the machines.
            space: the options.
            ps_may_share: whether a machine may have several parameter servers.
            known: options already placed, in a part of the space; others are compared with them.
        """
        self._scenario = scenario
        self._ps_may_share = ps_may_share
        self._ranges = tuple(_separate(scenario, space, ps_may_share=ps_may_share))
        self._regions: tuple[Region, ...] = regions(scenario.kinds)
        self._rack_of = {name: kind.rack for kind in scenario.kinds for name in kind.names}
        self._solved: dict[tuple[int, tuple[WorkerShape, ...], int, int], Solved | None] = {}
        self._known = tuple(known)
        self._too_large: dict[Candidate, TooManyStatesError] = {}
        self._beaten = 0

    @property
    def placements_are_simple(self) -> bool:
        """Whether any one option is placed at once: workers are alike and each ps has its machine."""
        return not self._ps_may_share and not any(entry.mixed for entry in self._ranges)

    @property
    def placed(self) -> tuple[Solved, ...]:
        """Every option that has been placed."""
        return (*self._known, *(entry for entry in self._solved.values() if entry is not None))

    def shards(self, ps: int) -> Shards:
        """The variables on that many parameter servers."""
        return self._scenario.shards(ps)

    def model(self, shape: WorkerShape) -> StepModel:
        """Step times of workers of that shape."""
        return self._scenario.model(shape)

    def fastest(self, deadline: float) -> SearchResult | None:
        """The fastest option; of those within 1% of it the one with least traffic, then with fewest tasks.

        Returns:
            None if no option fits.
        """
        table = self._table()
        cut_off = self._place_fastest(table, deadline)
        solved = self.placed
        if not solved:
            self._raise_if_too_large()
            return None
        fastest = max(entry.samples_per_s for entry in solved)
        floor = fastest * (1 - TIE)
        best = min((entry for entry in solved if entry.samples_per_s >= floor), key=self._key)
        complete = cut_off is None and not self._too_large
        for candidate in table.by_traffic(floor):
            if cut_off is not None or candidate.key(candidate.traffic_bound, self._total) >= self._key(best):
                break
            try:
                found = self._place_if_it_reaches(candidate, floor, deadline)
            except OutOfTimeError:
                complete = False
                break
            if found is not None and found.samples_per_s >= floor and self._key(found) < self._key(best):
                best = found
        unplaced = [*self._too_large, *([] if cut_off is None else [cut_off])]
        ceiling = max([entry.samples_ceiling for entry in solved] + [candidate.samples_bound for candidate in unplaced])
        gap = max(0.0, 1 - fastest / ceiling)
        return self._result(best, gap, complete, lambda entry: (-entry.samples_per_s, *self._key(entry)))

    def calmest(self, deadline: float) -> SearchResult | None:
        """The option with least traffic by Eq. 1, whatever its speed, then with fewest tasks.

        Returns:
            None if no option fits.
        """
        solved = sorted(self._known, key=self._key)
        least_possible = math.inf
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
            self._raise_if_too_large()
            return None
        least_possible = min([least_possible, *(candidate.traffic_bound for candidate in self._too_large)])
        traffic = solved[0].placement.traffic_bytes
        gap = 0.0 if traffic <= 0 else max(0.0, 1 - least_possible / traffic)
        return self._result(solved[0], gap, least_possible >= traffic, self._key)

    def place(
        self,
        candidate: Candidate,
        method: Method = fastest_placement,
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
            try:
                self._solved[candidate.identity] = self._place(candidate, method, deadline)
            except TooManyStatesError as error:
                self._too_large[candidate] = error
                return None
        return self._solved[candidate.identity]

    def neighbour(self, solved: Solved, workers: int, ps: int) -> Solved | None:
        """The option with other counts, placed; None if it is not in the space or does not fit."""
        region = solved.candidate.region
        for entry in self._ranges:
            if (
                entry.shapes == solved.candidate.shapes
                and entry.min_workers <= workers <= entry.max_workers
                and 1 <= ps <= min(entry.max_ps, self._max_ps(self._regions[region]))
            ):
                other = replace(solved.candidate, workers=workers, ps=ps, samples_bound=math.inf, traffic_bound=0.0)
                return self.place(other)
        return None

    def _raise_if_too_large(self) -> None:
        """Raises the first `TooManyStatesError`, if options could not be looked at."""
        for error in self._too_large.values():
            raise error

    def _place_if_it_reaches(self, candidate: Candidate, samples_per_s: float, deadline: float) -> Solved | None:
        """Places the option if it can be that fast; None if it cannot, or does not fit."""
        if candidate.identity in self._solved:
            return self._solved[candidate.identity]
        try:
            problem = self._problem(candidate)
        except TooManyStatesError as error:
            self._too_large[candidate] = error
            return None
        method = fastest_mixed_placement if candidate.mixed else fastest_placement
        placement = method(problem, deadline, samples_per_s)
        if placement is None:
            self._beaten += 1
            return None
        self._solved[candidate.identity] = self._as_solved(candidate, problem, placement)
        return self._solved[candidate.identity]

    def _problem(self, candidate: Candidate) -> PlacementProblem:
        region, shards, sizes = self._regions[candidate.region], self.shards(candidate.ps), self._scenario.sizes
        models = [self.model(shape) for shape in candidate.shapes]
        share, workers = self._ps_may_share, candidate.workers
        if not candidate.mixed:
            return placement_problem(region, models[0], sizes, shards, workers, ps_may_share=share)
        gpus = candidate.least_gpus
        return mixed_problem(region, models, sizes, shards, workers, ps_may_share=share, least_gpus=gpus)

    def _place(self, candidate: Candidate, method: Method, deadline: float | None) -> Solved | None:
        problem = self._problem(candidate)
        placement = (_MIXED[method] if candidate.mixed else method)(problem, deadline)
        return None if placement is None else self._as_solved(candidate, problem, placement)

    def _as_solved(self, candidate: Candidate, problem: PlacementProblem, placement: Placement) -> Solved:
        shards = self.shards(candidate.ps)
        assignment = assign(placement.groups, problem.kinds, problem.shard_types)
        across = uplink_s(self._scenario.cluster, assignment, shards.sizes, self._rack_of)
        network, round_s, samples = placement.network_s, placement.round_s, placement.samples_per_s
        if across and problem.model.profile.synchronous:
            network = max(network, across)
            round_s = problem.model.round_s(placement.cycle_s, network, shards.sizes[0], candidate.workers)
            samples *= placement.round_s / round_s
        elif across:
            worth = evaluate(self._scenario, placement.any_shape, shards, assignment)
            network, round_s, samples = worth.step_time.network, worth.step_time.total, worth.samples_per_s
        return Solved(candidate, placement, assignment, network, round_s, samples)

    def _place_fastest(self, table: CandidateTable, deadline: float) -> Candidate | None:
        """Places options, best bound first, until no bound beats the best few; returns where time cut it off.

        Of the few, those within 1% of the fastest are as good: then only a faster option is of interest.
        """
        speeds: dict[Label, float] = {}
        for entry in self._known:
            speeds[entry.candidate.label] = max(speeds.get(entry.candidate.label, 0.0), entry.samples_per_s)
        for candidate in table.by_speed():
            best = sorted(speeds.values(), reverse=True)
            goal = 0.0
            if len(best) > ALTERNATIVES:
                last = best[ALTERNATIVES]
                goal = (best[0] if last >= best[0] * (1 - TIE) else last) * (1 + ROUNDING)
            if candidate.samples_bound <= goal:
                return None
            try:
                if goal:
                    found = self._place_if_it_reaches(candidate, goal, deadline)
                else:
                    # The first answer is worth waiting for.
                    found = self.place(candidate, fastest_placement, deadline if best else None)
            except OutOfTimeError:
                return candidate
            if found is not None:
                speeds[candidate.label] = max(speeds.get(candidate.label, 0.0), found.samples_per_s)
        return None

    def _table(self) -> CandidateTable:
        scenario, share = self._scenario, self._ps_may_share
        across = scenario.cluster.across_racks_gbps
        uplink = None if across is None else across * BYTES_PER_S_PER_GBPS

        def bounds(region: Sequence[NodeKind], entry: OptionRange) -> Callable[[int], Bounds]:
            models, sizes, workers = [self.model(shape) for shape in entry.shapes], scenario.sizes, entry.max_workers
            if entry.mixed:
                return lambda ps: mixed_bounds(
                    region, models, sizes, self.shards(ps), workers, uplink, ps_may_share=share
                )
            alike = ShapeBounds(Machines(region), models[0], sizes, workers, uplink, ps_may_share=share)
            return lambda ps: alike.of(self.shards(ps))

        return CandidateTable(self._regions, self._ranges, self._total, bounds, self._max_ps)

    def _max_ps(self, region: Sequence[NodeKind]) -> int:
        """Parameter servers beyond that have no machine of their own, where they need one, or no variable."""
        variables = max(1, len(self._scenario.profile.variables))
        return variables if self._ps_may_share else min(variables, sum(kind.count for kind in region))

    @property
    def _total(self) -> int:
        return self.shards(1).total

    def _key(self, solved: Solved) -> Key:
        return solved.candidate.key(solved.placement.traffic_bytes, self._total)

    def _result(
        self, best: Solved, gap: float, complete: bool, key: Callable[[Solved], tuple[float, ...]]
    ) -> SearchResult:
        others: dict[Label, Solved] = {}
        for entry in sorted(self.placed, key=key):
            if entry.candidate.label != best.candidate.label:
                others.setdefault(entry.candidate.label, entry)
        return SearchResult(best, tuple(others.values()), gap, complete, len(self._solved) + self._beaten)


def _separate(scenario: Scenario, space: OptionSpace, *, ps_may_share: bool) -> Iterator[OptionRange]:
    """The ranges with one shape each, or all that are mixed; without options that another makes superfluous."""
    kinds, sizes = scenario.kinds, scenario.sizes
    counts = np.array([kind.count for kind in kinds])
    for entry in space.ranges:
        shapes = without_spare_cpus(entry.shapes, kinds, sizes, ps_may_share=ps_may_share)
        room = Machines(kinds).rooms([sizes.worker(shape) for shape in shapes])[:, :, 0]
        parts = [(shapes, room.max(axis=1))] if entry.mixed else [((s,), room[:, i]) for i, s in enumerate(shapes)]
        for each, fits in parts:
            most = min(entry.max_workers, int(counts @ fits))
            if most >= entry.min_workers:
                yield replace(entry, shapes=each, max_workers=most)
