"""The fastest placement across racks whose uplinks limit the speed.

For each T the tables of `solver.racks.problem` decide whether synchronous training has a placement in which no card and
no uplink is busy longer. Bisection runs over all distinct times of cards and uplinks, as in `solver.placement.fastest`
without racks. For asynchronous training `solver.racks.rates` decides the same for a rate of all workers. Both are exact
for equal shards and for few classes of equal ones, with any kinds of machines and with a separate chief.

With many unequal shards the likely problem chooses the machines; the true shards are distributed over those and
evaluated. No step is shorter than the optimistic problem allows with shards that add up to all bytes: the maximum bytes
on the machines and racks within the limits must reach that, the minimum (synchronous) must not exceed it. Asynchronous,
speed and bytes are tested separately, for placements that may differ: a weaker bound, but a bound. Bisection narrows
the bound and tries the placements found on the way.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver.racks.problem import RackProblem, View, best_within, likely_view, network_times, optimistic_view
from solver.racks.rates import STEPS, best_at, fastest_loads, holds_all
from solver.racks.scoring import RackPlacement, score_placement
from solver.racks.tree import Best, Load

SLACK = 1e-9
"""Relative tolerance for rounding."""
PRECISION = 1e-4
"""Relative precision of the bound for unequal shards."""


@dataclass(frozen=True)
class RackLimits:
    """RackLimits that the fastest placement keeps, and its step."""

    work_s: float
    network_s: float
    round_s: float


def fastest_across_racks(problem: RackProblem, deadline: float | None = None) -> RackPlacement | None:
    """Places an option for the shortest step, uplinks included; among equally fast placements, for least traffic.

    If `samples_bound` proves the speed of synchronous training, the traffic is proven the least among equally fast
    placements. Asynchronous, it is the least if the speed allows that of all placements, else merely small.

    Returns:
        The placement. None if nothing fits; with many unequal shards also if the largest does not fit everywhere.

    Raises:
        OutOfTimeError: if the deadline passed before.
    """
    if problem.cases:
        each = [fastest_across_racks(case, deadline) for case in problem.cases]
        placements = [placement for placement in each if placement is not None]
        if not placements:
            return None
        fastest = max(placements, key=lambda placement: (placement.samples_per_s, -placement.traffic_bytes))
        if problem.are_all_cases and optimistic_view(problem).exact:
            return fastest
        # A case may have a placement that was not found; none is faster than without waits.
        whole = fastest_across_racks(dataclasses.replace(problem, cases=()), deadline)
        bound = math.inf if whole is None else max(whole.samples_bound, fastest.samples_per_s)
        return dataclasses.replace(fastest, samples_bound=bound)
    best_case = optimistic_view(problem)
    view = best_case if best_case.exact else likely_view(problem)
    loads = _fastest(problem, view, deadline)
    if loads is None:
        return None
    found = score_placement(problem, view, loads)
    assert found is not None
    return found if best_case.exact else _with_bound(problem, best_case, found, deadline)


def can_reach_across_racks(problem: RackProblem, samples_per_s: float, deadline: float | None = None) -> bool:
    """Whether some placement of the option may be that fast; for many unequal shards only False is proven."""
    if problem.cases and problem.are_all_cases:
        return any(can_reach_across_racks(case, samples_per_s, deadline) for case in problem.cases)
    round_s = problem.workers * problem.model.samples_per_step / samples_per_s
    return _placement_within(problem, optimistic_view(problem), round_s, deadline) is not None


def _with_bound(problem: RackProblem, view: View, found: RackPlacement, deadline: float | None) -> RackPlacement:
    """The fastest placement found while bisecting for the shortest step that the optimistic problem allows."""
    low, high, step = 0.0, found.round_s, PRECISION
    while high - low > PRECISION * high:
        # Usually the placement found is almost optimal.
        middle = max(high * (1 - step), (low + high) / 2)
        step *= 2
        best = _placement_within(problem, view, middle, deadline)
        if best is None:
            low = middle
            continue
        high = middle
        other = score_placement(problem, view, problem.tree.loads(best))
        if other is not None and other.round_s < found.round_s:
            found, high = other, min(high, other.round_s)
    samples = problem.workers * problem.model.samples_per_step
    return dataclasses.replace(found, samples_bound=max(found.samples_per_s, samples / low))


def _placement_within(problem: RackProblem, view: View, round_s: float, deadline: float | None) -> Best | None:
    """A placement of the optimistic problem with that step and shards that may add up to all bytes; None if none is."""
    round_s *= 1 + SLACK
    if problem.model.profile.synchronous:
        for work in problem.works:
            limit = problem.model.network_limit_s(round_s, work, problem.load, problem.workers)
            best = None if limit < 0 else _holding_all(problem, view, work, limit, deadline)
            if best is not None:
                return best
        return None
    steps_per_s = problem.workers / round_s
    if steps_per_s > problem.shared.max_steps_per_s:
        return None
    best = best_at(problem, view, steps_per_s, STEPS, deadline)
    if best is None or best.value < steps_per_s:
        return None
    return best if view.exact or holds_all(problem, view, steps_per_s, deadline) else None


def _holding_all(
    problem: RackProblem, view: View, work_s: float, network_s: float, deadline: float | None
) -> Best | None:
    """A placement within the limits that can hold all bytes; None if there is none, or all would exceed them."""
    if view.exact:
        return best_within(problem, view, work_s, network_s, "possible", deadline)
    total = sum(problem.shards)
    most = best_within(problem, view, work_s, network_s, "most bytes", deadline)
    if most is None or most.value < total * (1 - SLACK):
        return None
    fewest = best_within(problem, view, work_s, network_s, "fewest bytes", deadline)
    return None if fewest is None or -fewest.value > total * (1 + SLACK) else most


def _longest(problem: RackProblem, times: Sequence[float], work_s: float, round_s: float) -> float:
    """The longest network time with which a synchronous step takes at most `round_s`."""
    return times[bisect.bisect_right(times, round_s, key=functools.partial(problem.round_s, work_s)) - 1]


def _fastest(problem: RackProblem, view: View, deadline: float | None) -> tuple[Load, ...] | None:
    if not problem.tree.rack_types:
        return None
    if not problem.model.profile.synchronous:
        return fastest_loads(problem, view, deadline)
    limits = _fastest_synchronous(problem, view, network_times(problem, view), deadline)
    return None if limits is None else _least_traffic_within(problem, view, limits, deadline)


def _fastest_synchronous(
    problem: RackProblem, view: View, times: list[float], deadline: float | None
) -> RackLimits | None:
    best: RackLimits | None = None
    for work in problem.works:
        if best is not None:
            times = times[: bisect.bisect_left(times, best.round_s, key=functools.partial(problem.round_s, work))]
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            if best_within(problem, view, work, times[middle], "possible", deadline) is None:
                low = middle + 1
            else:
                high = middle
        if low < len(times):
            best = RackLimits(work, times[low], problem.round_s(work, times[low]))
    return best


def _least_traffic_within(
    problem: RackProblem, view: View, limits: RackLimits, deadline: float | None
) -> tuple[Load, ...]:
    round_s = limits.round_s * (1 + SLACK)
    work_s = max(work for work in problem.works if problem.round_s(work, limits.network_s) <= round_s)
    network_s = _longest(problem, network_times(problem, view), work_s, round_s)
    best = best_within(problem, view, work_s, network_s, "local", deadline)
    assert best is not None
    return problem.tree.loads(best)
