"""Placement of workers that differ between machines: each machine gives its workers one shape.

With identical workers the samples of a step are fixed, and only its length counts (solver.placement.fastest). Here both
depend on the placement. Synchronous training reaches

    sum_c samples_c w_c / round(W, N)        W: the slowest worker's work, N: the busiest network card's time

and the program of solver.placement.class_counts gives the most samples within limits on W and N. Around it runs a
best-first search over boxes of limits: the samples within a box's upper limits, at the round of its lower ones, bound
everything in the box.

Asynchronous workers reach sum_c samples_c f_c at rates f_c that add up to X (solver.async_rates). The boxes are ranges
of X: with the links evaluated at the lower end, where they allow most, any sum of the f_c in the range is allowed.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from solver.placement.asynchronous import SLACK
from solver.placement.class_counts import NO_LIMITS, CountLimits, Counts, Floor, proven_counts
from solver.placement.class_steps import Reach, Steps
from solver.placement.fastest import Placement, best_of, local_share, placement_of
from solver.placement.problem import PlacementProblem

SPEED_TOLERANCE = 1e-6
"""Relative differences in speed below this are ignored."""
MIN_RANGE_WIDTH = 1e-10
"""Ranges of X whose ends differ by at most this share are not divided further."""


@dataclass(frozen=True)
class _Box:
    """Synchronous: ranges of possible limits on work and network time, both ends included, ascending."""

    works: tuple[float, ...]
    times: tuple[float, ...]

    def parts(self) -> tuple[_Box, ...]:
        """Halves of the box across its longer side; none if it is a single point."""
        if len(self.times) >= len(self.works):
            middle = len(self.times) // 2
            return (_Box(self.works, self.times[:middle]), _Box(self.works, self.times[middle:])) if middle else ()
        middle = len(self.works) // 2
        return _Box(self.works[:middle], self.times), _Box(self.works[middle:], self.times)

    def bound(self, problem: PlacementProblem, deadline: float | None) -> tuple[float, Counts | None]:
        """Upper bound of samples/s in the box, and a placement within the box's limits."""
        limits = CountLimits(self.works[-1], self.times[-1])
        largest = max(state.samples for state in problem.states)
        counts = proven_counts(problem, limits, lambda state: state.samples / largest, deadline=deadline)
        if counts is None:
            return 0.0, None
        round_s = problem.model.round_s(self.works[0], self.times[0], problem.load, problem.workers)
        return counts.samples / round_s, counts


@dataclass(frozen=True)
class _Range:
    """Asynchronous: a range of the rate of all workers."""

    low: float
    high: float

    def parts(self) -> tuple[_Range, ...]:
        """Halves of the range; none if it is narrow."""
        middle = (self.low + self.high) / 2
        if self.high - self.low <= MIN_RANGE_WIDTH * self.high:
            return ()
        return _Range(self.low, middle), _Range(middle, self.high)

    def bound(self, problem: PlacementProblem, deadline: float | None) -> tuple[float, Counts | None]:
        """Upper bound of samples/s in the range, and a placement that may be in it."""
        scale = self.high * max(state.samples for state in problem.states)
        within = Reach(lambda state: 1 / self.high, self.low / self.high, 1.0)
        steps = Steps(self.low, lambda state: state.samples / scale, (within,))
        counts = proven_counts(problem, NO_LIMITS, lambda state: 0.0, deadline=deadline, steps=steps)
        return (0.0, None) if counts is None else (counts.value * scale, counts)


def fastest_mixed_placement(
    problem: PlacementProblem, deadline: float | None = None, at_least: float = 0.0
) -> Placement | None:
    """Places an option for the most samples per second, and within the same limits for the least traffic.

    Arguments, result and errors as with `fastest_placement`.
    """
    if problem.cases:
        return best_of(fastest_mixed_placement, problem.cases, deadline, at_least)
    whole = _root_box(problem)
    if whole is None:
        return None
    best: Placement | None = None
    order = itertools.count()
    boxes: list[tuple[float, int, _Box | _Range]] = [(-float("inf"), next(order), whole)]
    while boxes and -boxes[0][0] > max(at_least, 0.0 if best is None else best.samples_per_s * (1 + SPEED_TOLERANCE)):
        _, _, box = heapq.heappop(boxes)
        for part in box.parts() or (box,):
            bound, counts = part.bound(problem, deadline)
            if counts is None:
                continue
            found = placement_of(problem, counts)
            if best is None or found.samples_per_s > best.samples_per_s:
                best = found
            if part.parts():
                heapq.heappush(boxes, (-bound, next(order), part))
    return None if best is None or best.samples_per_s < at_least else _with_less_traffic(problem, best, deadline)


def least_traffic_mixed_placement(problem: PlacementProblem, deadline: float | None = None) -> Placement | None:
    counts = proven_counts(problem, NO_LIMITS, local_share(problem), deadline=deadline)
    return None if counts is None else placement_of(problem, counts)


def _root_box(problem: PlacementProblem) -> _Box | _Range | None:
    """The box with every placement; None if no worker fits anywhere."""
    works = tuple(sorted({state.work_s for state in problem.states if state.work_s}))
    if not works:
        return None
    if problem.model.profile.synchronous:
        return _Box(works, tuple(sorted({time for state in problem.states for time in state.network_s})))
    fastest = max(state.steps_per_s for state in problem.states)
    return _Range(0.0, min(problem.shared.max_steps_per_s, problem.workers * fastest))


def _with_less_traffic(problem: PlacementProblem, best: Placement, deadline: float | None) -> Placement:
    """The placement with the least traffic among those as fast within the same limits."""
    limits, floors, steps = NO_LIMITS, [], None
    speed = best.samples_per_s * (1 - SLACK)
    if problem.model.profile.synchronous:
        limits = CountLimits(best.cycle_s * (1 + SLACK), best.network_s * (1 + SLACK))
        floors = [Floor(lambda state: state.samples / (speed * best.round_s), 1.0)]
    else:
        rate = problem.workers / best.round_s
        reaches = (
            Reach(lambda state: 1 / rate, 1 - SLACK, 1 + SLACK),
            Reach(lambda state: state.samples / speed, 1.0),
        )
        steps = Steps(rate * (1 - SLACK), reaches=reaches)
    counts = proven_counts(problem, limits, local_share(problem), floors, deadline, steps)
    if counts is None:
        return best
    less_traffic = placement_of(problem, counts)
    # Rounding inside the solver must not cost speed.
    slower = less_traffic.samples_per_s < best.samples_per_s * (1 - 1e-5)
    return best if slower or less_traffic.traffic_bytes >= best.traffic_bytes else less_traffic
