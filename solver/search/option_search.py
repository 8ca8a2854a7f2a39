"""Finds the best option; places only options whose bounds allow them to be best."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.capacity import Machines
from solver.nodes import NodeKind
from solver.options import OptionRange, OptionSpace, without_spare_cpus
from solver.placement.fastest import OutOfTimeError, fastest_placement, least_traffic_placement
from solver.placement.problem import TooManyStatesError
from solver.racks import Region, regions
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.search.bounds import Bounds, ShapeBounds
from solver.search.candidates import Candidate, CandidateTable, Key, Label
from solver.search.mixed_bounds import mixed_bounds
from solver.search.placer import Method, OptionPlacer, Solved
from solver.search.scope import Scope
from solver.shards import Shards
from solver.step_time import StepModel

SPEED_TIE_SHARE = 0.01
"""Predicted speeds closer than this share are equal: the model is not more precise."""
ALTERNATIVES = 5
ROUNDING = 1e-6
NEIGHBOUR_TIME_LIMIT_S = 1.0


@dataclass(frozen=True)
class OptionResults:
    """Result of a search.

    Attributes:
        others: other options that were placed, best first, one of each label.
        gap: maximum improvement by a better option or placement, as a share; 0 if there is none.
        placed: number of options placed, or shown to be too slow, by the placement program.
    """

    best: Solved
    others: tuple[Solved, ...]
    gap: float
    placed: int


class OptionSearch:
    """Compares the options of one job on one cluster.

    Attributes:
        throughput_floor: samples/s that the job reaches without these options; of options that are no faster, only the
            most promising few and the fastest are of interest.
    """

    def __init__(
        self,
        scenario: Scenario,
        space: OptionSpace,
        *,
        ps_may_share: bool = False,
        known: Sequence[Solved] = (),
        throughput_floor: float = 0.0,
        on_better: Callable[[OptionResults], None] | None = None,
    ) -> None:
        """Prepares the comparison.

        Args:
            scenario: the model and the machines.
            space: the options.
            ps_may_share: whether a machine may have several parameter servers.
            known: options already placed, in a part of the space, for comparison.
            throughput_floor: see the attribute.
            on_better: called with every option that is better than all before.
        """
        self._scenario = scenario
        self._ps_may_share = ps_may_share
        self._ranges = tuple(_separate(scenario, space, ps_may_share=ps_may_share))
        self._regions: tuple[Region, ...] = regions(scenario.kinds)
        self._placer = OptionPlacer(scenario, self._regions, ps_may_share=ps_may_share)
        self._solved: dict[tuple[int, tuple[WorkerShape, ...], int, int], Solved | None] = {}
        self._known = tuple(known)
        self.throughput_floor = throughput_floor
        self._on_better = on_better
        self._too_large: dict[Candidate, TooManyStatesError] = {}
        self._beaten = 0
        self._deadline = 0.0

    @property
    def placements_are_simple(self) -> bool:
        """Whether any option is placed quickly: workers are identical and each ps has its own machine."""
        return not self._ps_may_share and not any(entry.mixed for entry in self._ranges)

    @property
    def placed(self) -> tuple[Solved, ...]:
        return (*self._known, *(entry for entry in self._solved.values() if entry is not None))

    @property
    def speed(self) -> float:
        """Samples/s of the fastest option that has been placed; 0 before."""
        return max((solved.samples_per_s for solved in self.placed), default=0.0)

    def shards(self, ps: int) -> Shards:
        return self._scenario.shards(ps)

    def model(self, shape: WorkerShape) -> StepModel:
        return self._scenario.model(shape)

    def fastest(self, deadline: float, *, only_promising: bool = False) -> OptionResults | None:
        """Finds the fastest option; of those within 1% of it the one with least traffic, then with fewest tasks.

        Args:
            deadline: on `time.monotonic`'s clock.
            only_promising: whether to place only the few most promising options; another call resumes from there.

        Returns:
            None if no option fits.
        """
        self._deadline = deadline
        cut_off = self._place_fastest(deadline, only_promising=only_promising)
        solved = self.placed
        if not solved:
            self._raise_if_too_large()
            return None
        fastest = self.speed
        floor = fastest * (1 - SPEED_TIE_SHARE)
        best = min((entry for entry in solved if entry.samples_per_s >= floor), key=self._key)
        # Ties are broken only if the result can become the plan.
        for candidate in self._table.by_traffic(floor) if cut_off is None and fastest > self.throughput_floor else ():
            if candidate.key(candidate.traffic_bound, self._total) >= self._key(best):
                break
            try:
                found = self._place_if_it_reaches(candidate, floor, deadline)
            except OutOfTimeError:
                break
            if found is not None and found.samples_per_s >= floor and self._key(found) < self._key(best):
                best = found
        unplaced = [*self._too_large, *([] if cut_off is None else [cut_off])]
        ceiling = max([entry.samples_ceiling for entry in solved] + [candidate.samples_bound for candidate in unplaced])
        gap = max(0.0, 1 - fastest / ceiling)
        return self._result(best, gap, lambda entry: (-entry.samples_per_s, *self._key(entry)))

    def least_traffic(self, deadline: float) -> OptionResults | None:
        """Finds the option with least traffic by Eq. 1, regardless of speed, then with fewest tasks.

        Returns:
            None if no option fits.
        """
        solved = sorted(self._known, key=self._key)
        least_possible = math.inf
        for candidate in self._table.by_traffic():
            bound = candidate.key(candidate.traffic_bound, self._total)
            if len(solved) > ALTERNATIVES and bound >= self._key(solved[ALTERNATIVES]):
                break
            try:
                found = self.place(candidate, least_traffic_placement, deadline if solved else None)
            except OutOfTimeError:
                least_possible = candidate.traffic_bound
                break
            if found is not None:
                solved = sorted([*solved, found], key=self._key)
                if solved[0] is found:
                    self._report_better(found, 1 - candidate.traffic_bound / max(found.traffic_bytes, 1e-9))
        if not solved:
            self._raise_if_too_large()
            return None
        least_possible = min([least_possible, *(candidate.traffic_bound for candidate in self._too_large)])
        traffic = solved[0].traffic_bytes
        gap = 0.0 if traffic <= 0 else max(0.0, 1 - least_possible / traffic)
        return self._result(solved[0], gap, self._key)

    def place(
        self,
        candidate: Candidate,
        method: Method = fastest_placement,
        deadline: float | None = None,
    ) -> Solved | None:
        """Places one option, once.

        `method`: `fastest_placement` or `least_traffic_placement`, the same in every call.

        Raises:
            OutOfTimeError: if the deadline passed before the best placement was found and proven.
        """
        if candidate.identity not in self._solved:
            try:
                self._solved[candidate.identity] = self._placer.place(candidate, method, deadline)
            except TooManyStatesError as error:
                self._too_large[candidate] = error
                return None
        return self._solved[candidate.identity]

    def neighbour(self, solved: Solved, workers: int, ps: int) -> Solved | None:
        """Places the option with other counts; None if it is not in the space or does not fit.

        Raises:
            OutOfTimeError: if that takes longer than both the search's deadline and a second.
        """
        deadline = max(self._deadline, time.monotonic() + NEIGHBOUR_TIME_LIMIT_S)
        region = solved.candidate.region
        for entry in self._ranges:
            if (
                entry.shapes == solved.candidate.shapes
                and entry.min_workers <= workers <= entry.max_workers
                and 1 <= ps <= min(entry.max_ps, self._max_ps(self._regions[region]))
            ):
                other = replace(solved.candidate, workers=workers, ps=ps, samples_bound=math.inf, traffic_bound=0.0)
                return self.place(other, deadline=deadline)
        return None

    def _raise_if_too_large(self) -> None:
        """Raises the first `TooManyStatesError`, if options could not be examined."""
        for error in self._too_large.values():
            raise error

    def _place_if_it_reaches(self, candidate: Candidate, samples_per_s: float, deadline: float) -> Solved | None:
        """Places the option if it can be that fast; None if it cannot, or does not fit."""
        if candidate.identity in self._solved:
            return self._solved[candidate.identity]
        try:
            found = self._placer.place_if_it_reaches(candidate, samples_per_s, deadline)
        except TooManyStatesError as error:
            self._too_large[candidate] = error
            return None
        if found is None:
            self._beaten += 1
            return None
        self._solved[candidate.identity] = found
        return found

    def _place_fastest(self, deadline: float, *, only_promising: bool) -> Candidate | None:
        """Places options, best bound first, until no bound exceeds the best few; returns the candidate where time ran
        out.

        Of the few, those within 1% of the fastest are equally good: then only a faster option is of interest.
        """
        speeds: dict[Label, float] = {}
        for entry in self._known:
            speeds[entry.candidate.label] = max(speeds.get(entry.candidate.label, 0.0), entry.samples_per_s)
        for candidate in self._table.by_speed():
            best = sorted(speeds.values(), reverse=True)
            goal = 0.0
            if len(best) > ALTERNATIVES:
                last = best[ALTERNATIVES]
                goal = (best[0] if last >= best[0] * (1 - SPEED_TIE_SHARE) else last) * (1 + ROUNDING)
                if only_promising:
                    return candidate
                if max(best[0], candidate.samples_bound) <= self.throughput_floor:
                    goal = best[0] * (1 + ROUNDING)
            if candidate.samples_bound <= goal:
                return None
            try:
                if goal:
                    found = self._place_if_it_reaches(candidate, goal, deadline)
                else:
                    # The first placement has no deadline.
                    found = self.place(candidate, fastest_placement, deadline if best else None)
            except OutOfTimeError:
                return candidate
            if found is not None:
                if found.samples_per_s > max(best, default=0.0):
                    # Options are sorted by bound, so none is faster than this one's bound.
                    self._report_better(found, 1 - found.samples_per_s / candidate.samples_bound)
                speeds[candidate.label] = max(speeds.get(candidate.label, 0.0), found.samples_per_s)
        return None

    def _report_better(self, found: Solved, gap: float) -> None:
        if self._on_better is not None:
            self._on_better(self._result(found, max(0.0, gap), self._key))

    @functools.cached_property
    def _table(self) -> CandidateTable:
        scenario, cheapest = self._scenario, self._scenario.cluster.costs().cheapest

        def bounds(region: Sequence[NodeKind], entry: OptionRange) -> Callable[[int], Bounds]:
            models, sizes = [self.model(shape) for shape in entry.shapes], scenario.sizes
            scope = Scope(Machines(region), entry.max_workers, scenario.uplink_bytes_per_s, self._ps_may_share)
            if entry.mixed:
                return lambda ps: mixed_bounds(scope, models, sizes, self.shards(ps)).weighed(self._total, *cheapest)
            alike = ShapeBounds(scope, models[0], sizes)
            return lambda ps: alike.of(self.shards(ps)).weighed(self._total, *cheapest)

        return CandidateTable(self._regions, self._ranges, self._total, bounds, self._max_ps)

    def _max_ps(self, region: Sequence[NodeKind]) -> int:
        """Maximum ps: one variable each, and one machine each if they must not share."""
        variables = max(1, len(self._scenario.profile.variables))
        return variables if self._ps_may_share else min(variables, sum(kind.count for kind in region))

    @property
    def _total(self) -> int:
        return self.shards(1).total

    def _key(self, solved: Solved) -> Key:
        return solved.candidate.key(solved.traffic_bytes, self._total)

    def _result(self, best: Solved, gap: float, key: Callable[[Solved], tuple[float, ...]]) -> OptionResults:
        others: dict[Label, Solved] = {}
        for entry in sorted(self.placed, key=key):
            if entry.candidate.label != best.candidate.label:
                others.setdefault(entry.candidate.label, entry)
        return OptionResults(best, tuple(others.values()), gap, len(self._solved) + self._beaten)


def _separate(scenario: Scenario, space: OptionSpace, *, ps_may_share: bool) -> Iterator[OptionRange]:
    """The ranges with one shape each, or all shapes of mixed ones; without options that another makes superfluous."""
    kinds, sizes = scenario.kinds, scenario.sizes
    counts = np.array([kind.count for kind in kinds])
    for entry in space.ranges:
        shapes = without_spare_cpus(entry.shapes, kinds, sizes, ps_may_share=ps_may_share)
        room = Machines(kinds).capacity([sizes.worker(shape) for shape in shapes])[:, :, 0]
        parts = [(shapes, room.max(axis=1))] if entry.mixed else [((s,), room[:, i]) for i, s in enumerate(shapes)]
        for each, fits in parts:
            most = min(entry.max_workers, int(counts @ fits))
            if most >= entry.min_workers:
                yield replace(entry, shapes=each, max_workers=most)
