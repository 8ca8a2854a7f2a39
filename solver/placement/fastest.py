"""The placement with the shortest step, and among those the one with the least traffic (Eq. 1).

What makes this exact: a step's length depends on the placement through the busiest network card and the workers' own
rounds only. A limit T on the network cards' time limits how many workers a machine in each state may have, and for each
T one program of form D says what the workers reach. Raising T frees the workers and slows the network; bisection finds
where the two meet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from solver.placement.class_counts import Counts, Floor, Group, Limits, solve_counts
from solver.placement.problem import PlacementProblem
from solver.traffic import weighted_traffic

SLACK = 1e-7
"""Relative room left for rounding when an optimum becomes a constraint."""
NO_LIMITS = Limits(float("inf"), float("inf"))


@dataclass(frozen=True)
class Placement:
    """One option, placed.

    Attributes:
        groups: the machines in use.
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round.
        network_s: time the busiest network card takes for one step of every worker.
        round_s: seconds in which every worker makes one step.
        samples_per_s: samples all workers train on in a second.
        traffic_bytes: Eq. 1.
    """

    groups: tuple[Group, ...]
    cycle_s: float
    network_s: float
    round_s: float
    samples_per_s: float
    traffic_bytes: float


class OutOfTimeError(Exception):
    """The deadline passed before the best placement was found and proven."""


def fastest_placement(problem: PlacementProblem, deadline: float | None = None) -> Placement | None:
    """Places an option for the shortest step.

    Args:
        problem: the option.
        deadline: on `time.monotonic`'s clock; None for none.

    Returns:
        The placement, or None if the option does not fit.

    Raises:
        OutOfTimeError: if the deadline passed before the best placement was found and proven.
    """
    if problem.model.profile.synchronous:
        found, limits = _fastest_synchronous(problem, deadline)
    else:
        found, limits = _fastest_asynchronous(problem, deadline)
    if found is None:
        return None
    quickest = _placement(problem, found)
    second = _least_traffic_within(problem, quickest, limits, deadline)
    if second is None:
        return quickest
    calmest = _placement(problem, second)
    # Rounding inside the solver must not cost speed.
    slower = calmest.samples_per_s < quickest.samples_per_s * (1 - 1e-5)
    return quickest if slower or calmest.traffic_bytes >= quickest.traffic_bytes else calmest


def calmest_placement(problem: PlacementProblem, deadline: float | None = None) -> Placement | None:
    """Places an option for the least traffic alone: Eq. 1 as the paper means it.

    Raises:
        OutOfTimeError: if the deadline passed before the best placement was found and proven.
    """
    counts = _solve(problem, NO_LIMITS, deadline, traffic_first=True)
    return None if counts is None else _placement(problem, counts)


def can_reach(problem: PlacementProblem, samples_per_s: float, deadline: float | None = None) -> bool:
    """Whether some placement of the option is that fast; a fraction of the work of finding the fastest.

    Raises:
        OutOfTimeError: if the deadline passed before the answer was proven.
    """
    model = problem.model
    round_s = problem.workers * model.samples_per_step / samples_per_s * (1 + SLACK)
    if not model.profile.synchronous:
        counts = _solve(problem, Limits(NO_LIMITS.work_s, round_s), deadline)
        return counts is not None and counts.steps_per_s * round_s >= problem.workers
    works = [work for work in _works(problem) if work <= round_s]
    if model.overlap:
        # Work that hides nothing else may as well be the longest.
        works = works[-1:]
    limits = [Limits(work, _network_limit_s(problem, round_s, work)) for work in works]
    return any(limit.network_s >= 0 and _solve(problem, limit, deadline) is not None for limit in limits)


def _fastest_synchronous(problem: PlacementProblem, deadline: float | None) -> tuple[Counts | None, Limits]:
    """Shortest step from slowest work and busiest network card: their sum, or the longer where they overlap."""
    best: Counts | None = None
    best_s = float("inf")
    times = _network_times(problem)
    for work in _works(problem):
        times = [time_s for time_s in times if _step_s(problem, work, time_s) < best_s]
        low, high, found = 0, len(times) - 1, None
        while low <= high:
            middle = (low + high) // 2
            counts = _solve(problem, Limits(work, times[middle]), deadline)
            if counts is None:
                low = middle + 1
            else:
                found, high = counts, middle - 1
        if found is not None:
            best, best_s = found, _step_s(problem, found.work_s, found.network_s)
    if best is None:
        return None, NO_LIMITS
    if problem.model.overlap:
        return best, Limits(best_s, _network_limit_s(problem, best_s, best.work_s))
    return best, Limits(best.work_s, best.network_s)


def _works(problem: PlacementProblem) -> list[float]:
    """Times a worker's own work takes on the machines, shortest first."""
    return sorted({state.work_s for state in problem.states if state.work_s})


def _step_s(problem: PlacementProblem, cycle_s: float, network_s: float) -> float:
    return problem.model.round_s(cycle_s, network_s, problem.largest_shard, problem.workers)


def _network_limit_s(problem: PlacementProblem, round_s: float, work_s: float) -> float:
    return problem.model.network_limit_s(round_s, work_s, problem.largest_shard, problem.workers)


def _fastest_asynchronous(problem: PlacementProblem, deadline: float | None) -> tuple[Counts | None, Limits]:
    """Most steps per second: the lesser of what the workers reach and what the network lets through."""
    times = _network_times(problem)
    best: Counts | None = None
    best_value = 0.0
    low, high = 0, len(times) - 1
    while low <= high:
        middle = (low + high) // 2
        counts = _solve(problem, Limits(NO_LIMITS.work_s, times[middle]), deadline)
        if counts is None:
            low = middle + 1
            continue
        value = problem.workers / _round_s(problem, counts)
        if value > best_value:
            best, best_value = counts, value
        # Below the network's limit more freedom can help; at it, only less network time can.
        if counts.steps_per_s < _network_rate(problem, times[middle]):
            low = middle + 1
        else:
            high = middle - 1
    return best, Limits(NO_LIMITS.work_s, problem.workers / best_value if best_value else 0.0)


def _network_times(problem: PlacementProblem) -> list[float]:
    return sorted({network_s for state in problem.states for network_s in state.network_s})


def _network_rate(problem: PlacementProblem, network_s: float) -> float:
    return problem.workers / network_s if network_s > 0 else float("inf")


def _cycle_s(problem: PlacementProblem, counts: Counts) -> float:
    return counts.work_s if problem.model.profile.synchronous else problem.workers / counts.steps_per_s


def _round_s(problem: PlacementProblem, counts: Counts) -> float:
    return _step_s(problem, _cycle_s(problem, counts), counts.network_s)


def _least_traffic_within(
    problem: PlacementProblem, quickest: Placement, limits: Limits, deadline: float | None
) -> Counts | None:
    """The placement with the least traffic among those as fast as `quickest`."""
    relaxed = Limits(limits.work_s * (1 + SLACK), limits.network_s * (1 + SLACK))
    steps_per_s = None if problem.model.profile.synchronous else problem.workers / quickest.round_s * (1 - SLACK)
    return _solve(problem, relaxed, deadline, traffic_first=True, steps_per_s=steps_per_s)


def _solve(
    problem: PlacementProblem,
    limits: Limits,
    deadline: float | None,
    *,
    traffic_first: bool = False,
    steps_per_s: float | None = None,
) -> Counts | None:
    """Solves within these limits; None if nothing fits."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    if traffic_first:
        # In units of one whole model, so that coefficients stay near 1.
        scale = max(1, problem.model.total_bytes)
        counts = solve_counts(
            problem,
            limits,
            value=lambda state: state.local_bytes / scale,
            floors=() if steps_per_s is None else [Floor(lambda state: state.steps_per_s / steps_per_s, 1.0)],
            time_limit_s=left,
        )
    elif problem.model.profile.synchronous:
        counts = solve_counts(problem, limits, value=lambda state: 0.0, time_limit_s=left)
    else:
        fastest = max((state.steps_per_s for state in problem.states), default=0.0) or 1.0
        counts = solve_counts(problem, limits, value=lambda state: state.steps_per_s / fastest, time_limit_s=left)
    if not counts.proven:
        raise OutOfTimeError
    return counts if counts.groups is not None else None


def _placement(problem: PlacementProblem, counts: Counts) -> Placement:
    round_s = _round_s(problem, counts)
    assert counts.groups is not None
    return Placement(
        groups=counts.groups,
        cycle_s=_cycle_s(problem, counts),
        network_s=counts.network_s,
        round_s=round_s,
        samples_per_s=problem.workers * problem.model.samples_per_step / round_s,
        traffic_bytes=weighted_traffic(problem.model.total_bytes, problem.workers, counts.local_bytes),
    )
