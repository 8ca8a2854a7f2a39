"""The placement with the shortest step, and among those the one with the least traffic (Eq. 1).

What makes this exact: a step's length depends on the placement through the busiest network card and the workers' own
rounds only. So a limit T on the network cards' time is a choice of columns, and for each T one program of form D says
what the workers reach. Raising T frees the workers and slows the network; bisection finds where the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from solver.placement.class_counts import Counts, solve_counts
from solver.placement.problem import Column, PlacementProblem
from solver.traffic import weighted_traffic

SLACK = 1e-7
"""Relative room left for rounding when an optimum becomes a constraint."""


@dataclass(frozen=True)
class Placement:
    """One option, placed.

    Attributes:
        used: configurations in use with the number of machines in each.
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round.
        network_s: time the busiest network card takes for one step of every worker.
        round_s: seconds in which every worker makes one step.
        samples_per_s: samples all workers train on in a second.
        traffic_bytes: Eq. 1.
    """

    used: tuple[tuple[Column, int], ...]
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
    counts = _solve(problem, problem.columns, deadline, traffic_first=True)
    return None if counts is None else _placement(problem, counts)


def _fastest_synchronous(
    problem: PlacementProblem, deadline: float | None
) -> tuple[Counts | None, tuple[float, float]]:
    """Smallest sum of slowest work and busiest network card."""
    best: Counts | None = None
    limits = (0.0, 0.0)
    for work in sorted({column.work_s for column in problem.columns if column.workers}):
        allowed = [column for column in problem.columns if column.work_s <= work]
        times = sorted({column.network_s for column in allowed})
        if best is not None:
            times = [t for t in times if work + t < sum(limits)]
        low, high, found = 0, len(times) - 1, None
        while low <= high:
            middle = (low + high) // 2
            counts = _solve(problem, [c for c in allowed if c.network_s <= times[middle]], deadline)
            if counts is None:
                low = middle + 1
            else:
                found, high = counts, middle - 1
        if found is not None:
            best, limits = found, (found.work_s, found.network_s)
    return best, limits


def _fastest_asynchronous(
    problem: PlacementProblem, deadline: float | None
) -> tuple[Counts | None, tuple[float, float]]:
    """Most steps per second: the lesser of what the workers reach and what the network lets through."""
    times = sorted({column.network_s for column in problem.columns})
    best: Counts | None = None
    best_value = -1.0
    low, high = 0, len(times) - 1
    while low <= high:
        middle = (low + high) // 2
        allowed = [column for column in problem.columns if column.network_s <= times[middle]]
        counts = _solve(problem, allowed, deadline)
        if counts is None:
            low = middle + 1
            continue
        value = _steps_per_s(problem, counts)
        if value > best_value:
            best, best_value = counts, value
        # Below the network's limit more freedom can help; at it, only less network time can.
        if counts.steps_per_s < _network_rate(problem, times[middle]):
            low = middle + 1
        else:
            high = middle - 1
    return best, (float("inf"), problem.workers / best_value if best is not None else 0.0)


def _network_rate(problem: PlacementProblem, network_s: float) -> float:
    return problem.workers / network_s if network_s > 0 else float("inf")


def _steps_per_s(problem: PlacementProblem, counts: Counts) -> float:
    return problem.workers / _round_s(problem, counts)


def _cycle_s(problem: PlacementProblem, counts: Counts) -> float:
    return counts.work_s if problem.model.profile.synchronous else problem.workers / counts.steps_per_s


def _round_s(problem: PlacementProblem, counts: Counts) -> float:
    cycle = _cycle_s(problem, counts)
    return problem.model.round_s(cycle, counts.network_s, problem.largest_shard, problem.workers)


def _least_traffic_within(
    problem: PlacementProblem, quickest: Placement, limits: tuple[float, float], deadline: float | None
) -> Counts | None:
    """The placement with the least traffic among those as fast as `quickest`."""
    work_limit, network_limit = limits
    allowed = [
        column
        for column in problem.columns
        if column.work_s <= work_limit * (1 + SLACK) and column.network_s <= network_limit * (1 + SLACK)
    ]
    steps_per_s = None if problem.model.profile.synchronous else problem.workers / quickest.round_s * (1 - SLACK)
    return _solve(problem, allowed, deadline, traffic_first=True, steps_per_s=steps_per_s)


def _solve(
    problem: PlacementProblem,
    columns: Sequence[Column],
    deadline: float | None,
    *,
    traffic_first: bool = False,
    steps_per_s: float | None = None,
) -> Counts | None:
    """Solves over these columns; None if nothing fits."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    if traffic_first:
        # In units of one whole model, so that coefficients stay near 1.
        scale = max(1, problem.model.total_bytes)
        counts = solve_counts(
            problem,
            columns,
            value=lambda column: column.local_bytes / scale,
            floor=None if steps_per_s is None else lambda column: column.steps_per_s / steps_per_s,
            time_limit_s=left,
        )
    elif problem.model.profile.synchronous:
        counts = solve_counts(problem, columns, value=lambda column: 0.0, time_limit_s=left)
    else:
        fastest = max((column.steps_per_s / column.workers for column in columns if column.workers), default=1.0)
        counts = solve_counts(problem, columns, value=lambda c: c.steps_per_s / fastest, time_limit_s=left)
    if not counts.proven:
        raise OutOfTimeError
    return counts if counts.used is not None else None


def _placement(problem: PlacementProblem, counts: Counts) -> Placement:
    round_s = _round_s(problem, counts)
    assert counts.used is not None
    return Placement(
        used=counts.used,
        cycle_s=_cycle_s(problem, counts),
        network_s=counts.network_s,
        round_s=round_s,
        samples_per_s=problem.workers * problem.model.samples_per_step / round_s,
        traffic_bytes=weighted_traffic(problem.model.total_bytes, problem.workers, counts.local_bytes),
    )
