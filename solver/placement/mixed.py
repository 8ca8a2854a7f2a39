"""The placement of workers that differ between machines: each machine gives its workers the shape that suits all.

With workers that are all alike the samples of a step are fixed, and only its length counts (solver.placement.fastest).
Here both depend on the placement. Synchronous training reaches

    sum_c samples_c w_c / round(W, N)        W: the slowest worker's work, N: the busiest network card's time

and the program of solver.placement.class_counts gives the most samples within limits on W and N. Asynchronous workers
reach the sum of their rates r_c, slowed down alike where `cap` steps per second are all that the network, the parameter
servers or the chief let through:

    min(sum_c samples_c r_c w_c, cap x sum_c samples_c r_c w_c / sum_c r_c w_c)

A value V is reached if sum samples r w >= V and sum (cap samples - V) r w >= 0, two linear rows; bisection finds the
largest. Around both goes best-first search over boxes of limits: what is reached within a box's upper limits, at the
round of its lower ones, is at least what anything in the box reaches.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from solver.placement.class_counts import Counts, Floor, Limits, solve_counts
from solver.placement.fastest import NO_LIMITS, SLACK, OutOfTimeError, Placement
from solver.placement.problem import PlacementProblem, State
from solver.traffic import weighted_traffic

CLOSE = 1e-6
"""Relative differences in speed below this are none."""


@dataclass(frozen=True)
class _Box:
    """Ranges of indices into the possible limits on work and network time, both ends included."""

    work: tuple[int, int]
    network: tuple[int, int]

    def halves(self) -> tuple[_Box, _Box] | None:
        """The box cut in two across its longer side; None if it is a single point."""
        low, high = self.network
        if high - low >= self.work[1] - self.work[0]:
            if low == high:
                return None
            middle = (low + high) // 2
            return _Box(self.work, (low, middle)), _Box(self.work, (middle + 1, high))
        low, high = self.work
        middle = (low + high) // 2
        return _Box((low, middle), self.network), _Box((middle + 1, high), self.network)


def fastest_mixed_placement(
    problem: PlacementProblem, deadline: float | None = None, at_least: float = 0.0
) -> Placement | None:
    """Places an option for the most samples per second, and within the same limits for the least traffic.

    Args:
        problem: the option.
        deadline: on `time.monotonic`'s clock; None for none.
        at_least: samples per second below which a placement is of no interest.

    Returns:
        The placement, or None if the option does not fit or is not that fast.

    Raises:
        OutOfTimeError: if the deadline passed before the best placement was found and proven.
    """
    works = sorted({state.work_s for state in problem.states if state.work_s})
    times = sorted({network_s for state in problem.states for network_s in state.network_s})
    if not works or not times:
        return None
    if not problem.model.profile.synchronous:
        works = [NO_LIMITS.work_s]
    best: Placement | None = None
    order = itertools.count()
    boxes = [(-float("inf"), next(order), _Box((0, len(works) - 1), (0, len(times) - 1)))]
    while boxes and -boxes[0][0] > max(at_least, 0.0 if best is None else best.samples_per_s * (1 + CLOSE)):
        _, _, box = heapq.heappop(boxes)
        for part in box.halves() or (box,):
            limits = Limits(works[part.work[1]], times[part.network[1]])
            least = Limits(works[part.work[0]], times[part.network[0]])
            goal = max(at_least, 0.0 if best is None else best.samples_per_s)
            bound, counts = _most(problem, limits, least, goal, deadline)
            if counts is None:
                continue
            found = _placement(problem, counts)
            if best is None or found.samples_per_s > best.samples_per_s:
                best = found
            if part.halves() is not None:
                heapq.heappush(boxes, (-bound, next(order), part))
    return None if best is None or best.samples_per_s < at_least else _calmer(problem, best, deadline)


def calmest_mixed_placement(problem: PlacementProblem, deadline: float | None = None) -> Placement | None:
    """Places an option for the least traffic alone.

    Raises:
        OutOfTimeError: if the deadline passed before the best placement was found and proven.
    """
    counts = _solve(problem, NO_LIMITS, deadline, _local_share(problem))
    return None if counts is None else _placement(problem, counts)


def _most(
    problem: PlacementProblem, limits: Limits, least: Limits, goal: float, deadline: float | None
) -> tuple[float, Counts | None]:
    """What is reached within the limits if the round were that of the least ones, and a placement to match.

    Below `goal` the figure is only known to be below it.
    """
    if problem.model.profile.synchronous:
        counts = _solve(problem, limits, deadline, lambda state: float(state.samples))
        return (0.0, None) if counts is None else (counts.samples / _round_s(problem, least), counts)
    cap = _cap(problem, least.network_s)
    counts = _solve(problem, limits, deadline, lambda state: state.samples * state.steps_per_s)
    if counts is None or counts.steps_per_s <= cap:
        return (0.0, None) if counts is None else (counts.samples_per_s, counts)
    low, high = max(goal, _capped(counts, cap)), counts.samples_per_s
    just_above = True
    while high > low * (1 + CLOSE):
        value = low * (1 + CLOSE) if just_above else (low + high) / 2
        just_above = not just_above
        more = _solve(problem, limits, deadline, _above(cap, value), [_alone(value)])
        if more is None or cap * more.samples_per_s < value * more.steps_per_s:
            high = value
        else:
            low, counts = max(value, _capped(more, cap)), more
    return high, counts


def _cap(problem: PlacementProblem, network_s: float) -> float:
    """Steps per second that the network, the busiest ps and the chief let through."""
    shared_s = _round_s(problem, Limits(0.0, network_s))
    return problem.workers / shared_s if shared_s > 0 else math.inf


def _above(cap: float, value: float) -> Callable[[State], float]:
    """Adds up to at least 0 where workers slowed down to `cap` steps per second reach the value."""
    return lambda state: (cap * state.samples - value) * state.steps_per_s


def _alone(value: float) -> Floor:
    """Workers that only limit themselves reach the value."""
    return Floor(lambda state: state.samples * state.steps_per_s / value, 1.0)


def _capped(counts: Counts, cap: float) -> float:
    return counts.samples_per_s * min(1.0, cap / counts.steps_per_s)


def _calmer(problem: PlacementProblem, best: Placement, deadline: float | None) -> Placement:
    """The placement with the least traffic among those as fast within the same limits."""
    limits = Limits(best.cycle_s * (1 + SLACK), best.network_s * (1 + SLACK))
    speed = best.samples_per_s * (1 - SLACK)
    if problem.model.profile.synchronous:
        floors = [Floor(lambda state: state.samples / (speed * best.round_s), 1.0)]
    else:
        limits = Limits(NO_LIMITS.work_s, limits.network_s)
        cap = _cap(problem, best.network_s)
        floors = [_alone(speed)] if math.isinf(cap) else [_alone(speed), Floor(_above(cap / speed, 1.0), 0.0)]
    counts = _solve(problem, limits, deadline, _local_share(problem), floors)
    if counts is None:
        return best
    calmer = _placement(problem, counts)
    # Rounding inside the solver must not cost speed.
    slower = calmer.samples_per_s < best.samples_per_s * (1 - 1e-5)
    return best if slower or calmer.traffic_bytes >= best.traffic_bytes else calmer


def _local_share(problem: PlacementProblem) -> Callable[[State], float]:
    # In units of one whole model, so that coefficients stay near 1.
    scale = max(1, problem.model.total_bytes)
    return lambda state: state.local_bytes / scale


def _solve(
    problem: PlacementProblem,
    limits: Limits,
    deadline: float | None,
    value: Callable[[State], float],
    floors: Sequence[Floor] = (),
) -> Counts | None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    scale = max((abs(value(state)) for state in problem.states), default=0.0) or 1.0
    counts = solve_counts(problem, limits, lambda state: value(state) / scale, floors, left)
    if not counts.proven:
        raise OutOfTimeError
    return counts if counts.groups is not None else None


def _round_s(problem: PlacementProblem, at: Limits) -> float:
    return problem.model.round_s(at.work_s, at.network_s, problem.largest_shard, problem.workers)


def _placement(problem: PlacementProblem, counts: Counts) -> Placement:
    synchronous = problem.model.profile.synchronous
    cycle = counts.work_s if synchronous else problem.workers / counts.steps_per_s
    round_s = _round_s(problem, Limits(cycle, counts.network_s))
    assert counts.groups is not None
    return Placement(
        groups=counts.groups,
        cycle_s=cycle,
        network_s=counts.network_s,
        round_s=round_s,
        samples_per_s=(counts.samples if synchronous else counts.samples_per_s * cycle) / round_s,
        traffic_bytes=weighted_traffic(problem.model.total_bytes, problem.workers, counts.local_bytes),
    )
