"""The placement with the shortest step, and among those the one with the least traffic (Eq. 1).

It is exact because a synchronous step's length depends on the placement only through the busiest network card and the
slowest worker's work. A limit T on the network cards' time limits the workers on a machine in each state, and one
program (`class_counts`) decides whether all fit; bisection finds the least T. Asynchronous workers are in
solver.placement.asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from solver.async_rates import best_rates
from solver.placement.asynchronous import SLACK, can_make_steps, fastest_counts, required_steps
from solver.placement.class_counts import NO_LIMITS, CountLimits, Counts, Group, OutOfTimeError, proven_counts
from solver.placement.problem import PlacementProblem, State
from solver.traffic import weighted_traffic

__all__ = [
    "NO_LIMITS",
    "SLACK",
    "OutOfTimeError",
    "Placement",
    "best_of",
    "can_reach",
    "fastest_placement",
    "least_traffic_placement",
    "placement_of",
]


SPEED_TOLERANCE = 1e-6
"""Speeds that differ by at most this share are equal."""


@dataclass(frozen=True)
class Placement:
    """One option, placed.

    Attributes:
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round, alone.
        network_s: time of the busiest network card for one step of every worker; asynchronous: for the steps that all
            workers make in `round_s`.
    """

    groups: tuple[Group, ...]
    cycle_s: float
    network_s: float
    round_s: float
    samples_per_s: float
    traffic_bytes: float


def fastest_placement(
    problem: PlacementProblem, deadline: float | None = None, at_least: float = 0.0
) -> Placement | None:
    """Places an option for the shortest step.

    `at_least`: minimum samples/s of interest.

    Returns:
        The placement, or None if the option does not fit or is slower.

    Raises:
        OutOfTimeError: if the deadline passed before the best placement was found and proven.
    """
    if problem.cases:
        return best_of(fastest_placement, problem.cases, deadline, at_least)
    if problem.model.profile.synchronous:
        if at_least and not can_reach(problem, at_least, deadline):
            return None
        found, limits = _fastest_synchronous(problem, deadline)
        relaxed, steps = CountLimits(limits.work_s * (1 + SLACK), limits.network_s * (1 + SLACK)), None
    else:
        min_steps_per_s = at_least / problem.model.samples_per_step * (1 - SLACK)
        found, steps_per_s = fastest_counts(problem, deadline, min_steps_per_s)
        relaxed, steps = NO_LIMITS, required_steps(steps_per_s * (1 - SLACK))
    if found is None:
        return None
    quickest = placement_of(problem, found)
    second = proven_counts(problem, relaxed, local_share(problem), deadline=deadline, steps=steps)
    if second is None:
        return quickest
    least_traffic = placement_of(problem, second)
    # Rounding inside the solver must not cost speed.
    slower = least_traffic.samples_per_s < quickest.samples_per_s * (1 - 1e-5)
    return quickest if slower or least_traffic.traffic_bytes >= quickest.traffic_bytes else least_traffic


def best_of(
    method: Callable[[PlacementProblem, float | None, float], Placement | None],
    cases: Iterable[PlacementProblem],
    deadline: float | None,
    at_least: float,
) -> Placement | None:
    """The fastest placement of several problems; of those equally fast, one with the least traffic."""
    best: Placement | None = None
    for case in cases:
        found = method(case, deadline, at_least)
        if found is None:
            continue
        is_equal = best is not None and found.samples_per_s <= best.samples_per_s * (1 + SPEED_TOLERANCE)
        if best is None or not is_equal or found.traffic_bytes < best.traffic_bytes:
            best = found
        at_least = max(at_least, best.samples_per_s * (1 - SPEED_TOLERANCE))
    return best


def least_traffic_placement(problem: PlacementProblem, deadline: float | None = None) -> Placement | None:
    """Places an option for the least traffic alone: Eq. 1 as in the paper."""
    counts = proven_counts(problem, NO_LIMITS, local_share(problem), deadline=deadline)
    return None if counts is None else placement_of(problem, counts)


def can_reach(problem: PlacementProblem, samples_per_s: float, deadline: float | None = None) -> bool:
    """Whether some placement of the option is that fast; a fraction of the work of finding the fastest."""
    if problem.cases:
        return any(can_reach(case, samples_per_s, deadline) for case in problem.cases)
    model = problem.model
    steps_per_s = samples_per_s / model.samples_per_step * (1 - SLACK)
    if not model.profile.synchronous:
        return can_make_steps(problem, steps_per_s, deadline)
    round_s = problem.workers / steps_per_s
    works = [work for work in _works(problem) if work <= round_s]
    if model.overlap:
        # With overlap, shorter work is not better, so only the longest is tried.
        works = works[-1:]
    limits = [CountLimits(work, _network_limit_s(problem, round_s, work)) for work in works]
    return any(limit.network_s >= 0 and _fits(problem, limit, deadline) is not None for limit in limits)


def _fastest_synchronous(problem: PlacementProblem, deadline: float | None) -> tuple[Counts | None, CountLimits]:
    """Minimises the sum of slowest work and busiest network card, or the longer if they overlap."""
    best: Counts | None = None
    best_s = float("inf")
    times = _network_times(problem)
    for work in _works(problem):
        times = [time_s for time_s in times if _step_s(problem, work, time_s) < best_s]
        low, high, found = 0, len(times) - 1, None
        while low <= high:
            middle = (low + high) // 2
            counts = _fits(problem, CountLimits(work, times[middle]), deadline)
            if counts is None:
                low = middle + 1
            else:
                found, high = counts, middle - 1
        if found is not None:
            best, best_s = found, _step_s(problem, found.work_s, found.network_s)
    if best is None:
        return None, NO_LIMITS
    if problem.model.overlap:
        return best, CountLimits(best_s, _network_limit_s(problem, best_s, best.work_s))
    return best, CountLimits(best.work_s, best.network_s)


def _works(problem: PlacementProblem) -> list[float]:
    """Distinct times of a worker's own work on the machines, ascending."""
    return sorted({state.work_s for state in problem.states if state.work_s})


def _step_s(problem: PlacementProblem, cycle_s: float, network_s: float) -> float:
    return problem.model.round_s(cycle_s, network_s, problem.load, problem.workers)


def _network_limit_s(problem: PlacementProblem, round_s: float, work_s: float) -> float:
    return problem.model.network_limit_s(round_s, work_s, problem.load, problem.workers)


def _network_times(problem: PlacementProblem) -> list[float]:
    return sorted({network_s for state in problem.states for network_s in state.network_s})


def _fits(problem: PlacementProblem, limits: CountLimits, deadline: float | None) -> Counts | None:
    return proven_counts(problem, limits, lambda state: 0.0, deadline=deadline)


def local_share(problem: PlacementProblem) -> Callable[[State], float]:
    """Bytes that a worker exchanges on its own machine, in units of the whole model: near 1 for the solver."""
    scale = max(1, problem.model.total_bytes)
    return lambda state: state.local_bytes / scale


def placement_of(problem: PlacementProblem, counts: Counts) -> Placement:
    assert counts.groups is not None
    model, workers = problem.model, problem.workers
    if model.profile.synchronous:
        cycle_s, network_s = counts.work_s, counts.network_s
        round_s = model.round_s(cycle_s, network_s, problem.load, workers)
        samples_per_s = counts.samples / round_s
    else:
        machines = counts.machines(problem)
        rates = best_rates(machines, problem.shared)
        cycle_s = workers / sum(machine.own_rate * machine.count for machine in machines)
        round_s, samples_per_s = workers / rates.steps_per_s, rates.samples_per_s
        network_s = round_s * rates.utilisation
    return Placement(
        groups=counts.groups,
        cycle_s=cycle_s,
        network_s=network_s,
        round_s=round_s,
        samples_per_s=samples_per_s,
        traffic_bytes=weighted_traffic(model.total_bytes, workers, counts.local_bytes),
    )
