"""The fastest placement across racks whose uplinks limit the speed.

For each T the tables of `solver.rack_problem` say whether any placement is left in which no card and no uplink is busy
longer, or how fast the workers get round in the best one. Bisection over all distinct times of cards and uplinks does
the rest, as in `solver.placement.fastest` without racks. That is exact for equal shards and for few classes of equal
ones, with any kinds of machines, synchronous and asynchronous, and with a separate chief.

With many unequal shards the likely problem says which machines to use; the true shards are dealt out to those, and the
outcome is evaluated as it is. No step is shorter than the optimistic problem allows with shards that add up to all
bytes: what the machines and racks can hold at most within the limits must reach that, what they must hold at least
must not exceed it. Bisection closes in on that bound and tries the placements that it meets on the way.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver.rack_problem import RackProblem, View, best_within, likely, network_times, optimistic
from solver.rack_tree import Best, Load
from solver.rack_worth import RackPlacement, placed

SLACK = 1e-9
"""Relative room for rounding."""
PRECISION = 1e-4
"""Relative precision of the bound for unequal shards."""


@dataclass(frozen=True)
class Limits:
    """What no placement needs to exceed, and the step that this makes possible."""

    work_s: float
    network_s: float
    round_s: float


def fastest_across_racks(problem: RackProblem, deadline: float | None = None) -> RackPlacement | None:
    """Places an option for the shortest step, uplinks included; among equally fast placements, for least traffic.

    Where `samples_bound` proves the speed so is the traffic proven the least among equally fast placements, unless
    asynchronous workers' own rounds limit the speed and less traffic would cost some of it.

    Args:
        problem: the option.
        deadline: on `time.monotonic`'s clock; None for none.

    Returns:
        The placement. None if nothing fits; with many unequal shards also if the largest does not fit everywhere.

    Raises:
        OutOfTimeError: if the deadline passed before.
    """
    best_case = optimistic(problem)
    view = best_case if best_case.exact else likely(problem)
    limits = _fastest(problem, view, deadline)
    if limits is None:
        return None
    found = placed(problem, view, _calmest_within(problem, view, limits, deadline))
    assert found is not None
    return found if best_case.exact else _with_bound(problem, best_case, found, deadline)


def can_reach_across_racks(problem: RackProblem, samples_per_s: float, deadline: float | None = None) -> bool:
    """Whether some placement of the option may be that fast; for many unequal shards only False is proven.

    Raises:
        OutOfTimeError: if the deadline passed before.
    """
    round_s = problem.workers * problem.model.samples_per_step / samples_per_s
    return _may_take(problem, optimistic(problem), round_s, deadline) is not None


def _with_bound(problem: RackProblem, view: View, found: RackPlacement, deadline: float | None) -> RackPlacement:
    """The fastest placement come across while looking for the shortest step that the optimistic problem allows."""
    low, high, step = 0.0, found.round_s, PRECISION
    while high - low > PRECISION * high:
        # Most often what was found is all there is, or nearly.
        middle = max(high * (1 - step), (low + high) / 2)
        step *= 2
        best = _may_take(problem, view, middle, deadline)
        if best is None:
            low = middle
            continue
        high = middle
        other = placed(problem, view, problem.tree.loads(best))
        if other is not None and other.round_s < found.round_s:
            found, high = other, min(high, other.round_s)
    samples = problem.workers * problem.model.samples_per_step
    return dataclasses.replace(found, samples_bound=max(found.samples_per_s, samples / low))


def _may_take(problem: RackProblem, view: View, round_s: float, deadline: float | None) -> Best | None:
    """A placement of the optimistic problem with that step and shards that may add up to all bytes; None if none is."""
    round_s *= 1 + SLACK
    if problem.model.profile.synchronous:
        for work in problem.works:
            limit = problem.model.network_limit_s(round_s, work, problem.shards[0], problem.workers)
            best = None if limit < 0 else _holding_all(problem, view, work, limit, deadline)
            if best is not None:
                return best
        return None
    if problem.round_s(0.0, 0.0) > round_s:
        return None
    fastest = best_within(problem, view, math.inf, round_s, "speed", deadline)
    if fastest is None or fastest.value * round_s < problem.workers:
        return None
    return _holding_all(problem, view, math.inf, round_s, deadline)


def _holding_all(
    problem: RackProblem, view: View, work_s: float, network_s: float, deadline: float | None
) -> Best | None:
    """A placement within the limits that can hold all bytes; None if there is none, or all would have to hold more."""
    if view.exact:
        return best_within(problem, view, work_s, network_s, "possible", deadline)
    total = sum(problem.shards)
    most = best_within(problem, view, work_s, network_s, "most bytes", deadline)
    if most is None or most.value < total * (1 - SLACK):
        return None
    fewest = best_within(problem, view, work_s, network_s, "fewest bytes", deadline)
    return None if fewest is None or -fewest.value > total * (1 + SLACK) else most


def _longest(problem: RackProblem, times: Sequence[float], cycle_s: float, round_s: float) -> float | None:
    """The longest time of the network with which the step is that short; None if even the shortest is too long."""
    count = bisect.bisect_right(times, round_s, key=functools.partial(problem.round_s, cycle_s))
    return times[count - 1] if count else None


def _fastest(problem: RackProblem, view: View, deadline: float | None) -> Limits | None:
    if not problem.tree.rack_types:
        return None
    times = network_times(problem, view)
    if problem.model.profile.synchronous:
        return _fastest_synchronous(problem, view, times, deadline)
    return _fastest_asynchronous(problem, view, times, deadline)


def _fastest_synchronous(problem: RackProblem, view: View, times: list[float], deadline: float | None) -> Limits | None:
    """The shortest step from the slowest work and the busiest card or uplink."""
    best: Limits | None = None
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
            best = Limits(work, times[low], problem.round_s(work, times[low]))
    return best


def _fastest_asynchronous(
    problem: RackProblem, view: View, times: list[float], deadline: float | None
) -> Limits | None:
    """Most steps per second: the lesser of what the workers reach and what the network lets through."""
    shortest = math.inf
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        best = best_within(problem, view, math.inf, times[middle], "speed", deadline)
        if best is None:
            low = middle + 1
            continue
        cycle_s = problem.workers / best.value
        shortest = min(shortest, problem.round_s(cycle_s, times[middle]))
        # Where the network has time left more freedom can help, else only less time of the network can.
        if cycle_s > times[middle]:
            low = middle + 1
        else:
            high = middle
    if shortest == math.inf:
        return None
    limit_s = _longest(problem, times, 0.0, shortest)
    assert limit_s is not None
    return Limits(math.inf, limit_s, shortest)


def _calmest_within(problem: RackProblem, view: View, limits: Limits, deadline: float | None) -> tuple[Load, ...]:
    """The placement with the least traffic among the fastest; see `fastest_across_racks` for when it is that."""
    round_s = limits.round_s * (1 + SLACK)
    work_s = limits.work_s
    if problem.model.profile.synchronous:
        work_s = max(work for work in problem.works if problem.round_s(work, limits.network_s) <= round_s)
    network_s = _longest(problem, network_times(problem, view), min(work_s, limits.round_s), round_s)
    assert network_s is not None
    best = best_within(problem, view, work_s, network_s, "local", deadline)
    assert best is not None
    loads = problem.tree.loads(best)
    if not problem.model.profile.synchronous and problem.workers / _speed(view, loads) > round_s:
        best = best_within(problem, view, work_s, network_s, "speed, then local", deadline)
        assert best is not None
        loads = problem.tree.loads(best)
    return loads


def _speed(view: View, loads: Sequence[Load]) -> float:
    """Steps a second of all workers, each limited by itself only."""
    return sum(load.state[-1] * view.settings[load.machine_type][load.state[:-1]].steps_per_s for load in loads)
