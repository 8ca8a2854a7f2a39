"""Places one option with the program for its kind of workers, its uplinks and its costs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from solver.costs import UniformCosts
from solver.evaluation import evaluate
from solver.formulations import auto
from solver.formulations.instance import Instance
from solver.placement.fastest import OutOfTimeError, Placement, fastest_placement, least_traffic_placement
from solver.placement.mixed import fastest_mixed_placement, least_traffic_mixed_placement
from solver.placement.naming import Assignment, assign
from solver.placement.problem import (
    PlacementProblem,
    TooManyStatesError,
    hosts_workers,
    mixed_problem,
    placement_problem,
)
from solver.racks import Region, uplink_s
from solver.racks.placement import can_reach_across_racks, fastest_across_racks
from solver.racks.problem import RackProblem, rack_problem
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.search.candidates import Candidate
from solver.shards import Shards

Method = Callable[[PlacementProblem, float | None], Placement | None]

ROUNDING = 1e-6
COUNTS = "class counts"
ACROSS_RACKS = "two-level racks"

_MIXED: dict[Method, Method] = {
    fastest_placement: fastest_mixed_placement,
    least_traffic_placement: least_traffic_mixed_placement,
}
"""Placement method for identical workers -> method for workers that may differ."""


@dataclass(frozen=True)
class Solved:
    """A placed candidate.

    Attributes:
        formulation: the program that placed it, with the reason.
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round, alone.
        network_s: busiest network card or rack uplink.
        samples_bound: upper bound of the option's speed.
    """

    candidate: Candidate
    assignment: Assignment
    formulation: str
    cycle_s: float
    network_s: float
    round_s: float
    samples_per_s: float
    traffic_bytes: float
    samples_bound: float

    @property
    def shape(self) -> WorkerShape:
        """Shape of a worker; if they differ, the most frequent one."""
        return Counter(self.assignment.shapes_of_workers(self.candidate.shapes[0])).most_common(1)[0][0]

    @property
    def samples_ceiling(self) -> float:
        """Upper bound of the speed, by the option's bound or by that of the program that placed it."""
        return max(self.samples_per_s, min(self.samples_bound, self.candidate.samples_bound))


class OptionPlacer:
    """Places options of one job in regions of one cluster."""

    def __init__(self, scenario: Scenario, regions: Sequence[Region], *, ps_may_share: bool) -> None:
        self._scenario = scenario
        self._regions = regions
        self._ps_may_share = ps_may_share
        self._rack_of = {name: kind.rack for kind in scenario.kinds for name in kind.names}
        self._costs = scenario.cluster.costs()

    def place(self, candidate: Candidate, method: Method, deadline: float | None) -> Solved | None:
        """Places an option.

        `method`: `fastest_placement` or `least_traffic_placement`.

        Raises:
            TooManyStatesError: if parameter servers can share machines in too many ways.
        """
        if method is least_traffic_placement and not candidate.mixed and not isinstance(self._costs, UniformCosts):
            return self._cheapest(candidate, deadline)
        problem = self._problem(candidate)
        placement = (_MIXED[method] if candidate.mixed else method)(problem, deadline)
        if placement is None:
            return None
        solved = self._solved(candidate, problem, placement)
        return self._within_uplinks(solved, deadline) if method is fastest_placement else solved

    def place_if_it_reaches(self, candidate: Candidate, samples_per_s: float, deadline: float | None) -> Solved | None:
        """Places an option if it can be that fast; None if it cannot, or does not fit.

        Raises:
            TooManyStatesError: if parameter servers can share machines in too many ways, or nothing was found and not
                all cases were examined.
        """
        problem = self._problem(candidate)
        method = fastest_mixed_placement if candidate.mixed else fastest_placement
        placement = method(problem, deadline, samples_per_s)
        if placement is None and not problem.are_all_cases:
            raise TooManyStatesError(
                f"Not all placements of {candidate.ps} parameter servers on machines with different network cards were "
                "examined; use fewer of them, or machines with equal cards."
            )
        if placement is None:
            return None
        solved = self._solved(candidate, problem, placement)
        if self._is_slowed_down(solved) and self._crosses_racks(candidate):
            if not can_reach_across_racks(self._rack_problem(candidate), samples_per_s, deadline):
                return None
            return self._within_uplinks(solved, deadline)
        return solved

    def _problem(self, candidate: Candidate) -> PlacementProblem:
        scenario, share, workers = self._scenario, self._ps_may_share, candidate.workers
        region, shards, sizes = self._regions[candidate.region], scenario.shards(candidate.ps), scenario.sizes
        models = [scenario.model(shape) for shape in candidate.shapes]
        if not candidate.mixed:
            return placement_problem(region, models[0], sizes, shards, workers, ps_may_share=share)
        gpus = candidate.least_gpus
        return mixed_problem(region, models, sizes, shards, workers, ps_may_share=share, least_gpus=gpus)

    def _solved(self, candidate: Candidate, problem: PlacementProblem, placement: Placement) -> Solved:
        shards = self._scenario.shards(candidate.ps)
        assignment = assign(placement.groups, problem.kinds, problem.shard_types)
        cycle_s, samples_per_s = placement.cycle_s, placement.samples_per_s
        network_s, round_s = placement.network_s, placement.round_s
        if problem.cases or uplink_s(self._scenario.cluster, assignment, shards.sizes, self._rack_of):
            worth = evaluate(self._scenario, candidate.shapes[0], shards, assignment)
            cycle_s, samples_per_s = worth.cycle_s, worth.samples_per_s
            network_s, round_s = worth.step_time.network, worth.step_time.total
        return Solved(
            candidate=candidate,
            assignment=assignment,
            formulation=f"{COUNTS}: {'equal' if shards.are_equal else 'unequal'} shards, uniform cost",
            cycle_s=cycle_s,
            network_s=network_s,
            round_s=round_s,
            samples_per_s=samples_per_s,
            traffic_bytes=self._traffic(assignment, shards),
            samples_bound=placement.samples_per_s if problem.are_all_cases else math.inf,
        )

    def _traffic(self, assignment: Assignment, shards: Shards) -> float:
        stored: Counter[str] = Counter()
        for node, size in zip(assignment.ps, shards.sizes, strict=True):
            stored[node] += size
        return self._costs.total(stored, Counter(assignment.workers))

    def _is_slowed_down(self, solved: Solved) -> bool:
        """Whether an uplink, which the program ignores, slows the placement down."""
        return solved.samples_per_s < solved.samples_bound * (1 - ROUNDING)

    def _crosses_racks(self, candidate: Candidate) -> bool:
        """Whether `solver.racks.placement` applies: several racks, identical workers, one ps per machine."""
        racks = {kind.rack for kind in self._regions[candidate.region]}
        return len(racks) > 1 and not candidate.mixed and not self._ps_may_share

    def _rack_problem(self, candidate: Candidate) -> RackProblem:
        scenario = self._scenario
        region, model = self._regions[candidate.region], scenario.model(candidate.shapes[0])
        uplink, shards = scenario.uplink_bytes_per_s, scenario.shards(candidate.ps)
        return rack_problem(region, model, scenario.sizes, shards, candidate.workers, uplink)

    def _within_uplinks(self, solved: Solved, deadline: float | None) -> Solved:
        """Places the option again with its uplinks, if they slow it down."""
        if not self._is_slowed_down(solved) or not self._crosses_racks(solved.candidate):
            return solved
        found = fastest_across_racks(self._rack_problem(solved.candidate), deadline)
        if found is None:
            return solved
        if found.samples_per_s < solved.samples_per_s:
            return replace(solved, samples_bound=min(solved.samples_bound, found.samples_bound))
        return replace(
            solved,
            assignment=found.assignment,
            formulation=f"{ACROSS_RACKS}: an uplink limits the speed",
            cycle_s=found.cycle_s,
            network_s=found.network_s,
            round_s=found.round_s,
            samples_per_s=found.samples_per_s,
            traffic_bytes=self._traffic(found.assignment, self._scenario.shards(solved.candidate.ps)),
            samples_bound=min(solved.samples_bound, found.samples_bound),
        )

    def _cheapest(self, candidate: Candidate, deadline: float | None) -> Solved | None:
        scenario, shape = self._scenario, candidate.shapes[0]
        shards, sizes, region = scenario.shards(candidate.ps), scenario.sizes, self._regions[candidate.region]
        model = scenario.model(shape)
        instance = Instance(
            # GPUs with too little memory for the model do not count.
            kinds=tuple(kind if hosts_workers(kind, model) else replace(kind, gpus=0) for kind in region),
            worker=sizes.worker(shape),
            workers=candidate.workers,
            shards=shards.sizes,
            ps=tuple(sizes.ps(size) for size in shards.sizes),
            chief=sizes.chief,
            ps_per_node=None if self._ps_may_share else 1,
            costs=self._costs,
        )
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        solution, choice = auto.solve(instance, left)
        if solution is None:
            return None
        if not solution.proven:
            raise OutOfTimeError
        worth = evaluate(scenario, shape, shards, solution.assignment)
        return Solved(
            candidate=candidate,
            assignment=solution.assignment,
            formulation=choice.why,
            cycle_s=worth.cycle_s,
            network_s=worth.step_time.network,
            round_s=worth.step_time.total,
            samples_per_s=worth.samples_per_s,
            traffic_bytes=solution.traffic_bytes,
            samples_bound=math.inf,
        )
