"""The placement with the most steps per second of identical asynchronous workers.

The feasible rates X of all workers are an interval from 0 (solver.async_rates), for one placement and so for all of
them. At a given X one program (solver.placement.class_steps) finds the placement with the most steps F(X), and X is
feasible if F(X) >= X. F falls with X, so no X beyond any F is feasible; and the placement found has a maximum rate of
its own, from which the search resumes. It ends when a rate just above the best is infeasible.
"""

from __future__ import annotations

import math

from solver.async_rates import total_rate
from solver.placement.class_counts import NO_LIMITS, Counts, proven_counts
from solver.placement.class_steps import Reach, Steps
from solver.placement.problem import PlacementProblem, State

SLACK = 1e-7
"""Relative; a rate is the best if one higher by this is infeasible, and is kept to within this afterwards."""


def fastest_counts(
    problem: PlacementProblem, deadline: float | None = None, at_least: float = 0.0
) -> tuple[Counts | None, float]:
    """Finds the placement with the most steps/s.

    `at_least`: minimum steps/s of interest.

    Returns:
        The placement and its steps/s; None and 0 if the option does not fit or makes fewer steps.
    """
    best: Counts | None = None
    low, high = 0.0, problem.shared.max_steps_per_s
    if at_least > high:
        return None, 0.0
    at, halve = at_least, False
    unit = problem.workers * max((state.steps_per_s for state in problem.states), default=0.0) or 1.0
    while best is None or low * (1 + SLACK) < high:
        scale = at or unit
        steps = Steps(at, value=lambda state, scale=scale: 1 / scale)  # type: ignore[misc]
        counts = proven_counts(problem, NO_LIMITS, _nothing, deadline=deadline, steps=steps)
        most = -math.inf if counts is None else _reached(problem, counts, steps)
        if most < at:
            high = at
        elif counts is not None:
            high = min(high, most)
            rate = total_rate(counts.machines(problem), problem.shared)
            if best is None or rate > low:
                best, low = counts, rate
        if best is None:
            return None, 0.0
        # A rate just above the best usually proves it; every other step bisects, to limit the number of programs.
        at = (low + high) / 2 if halve and math.isfinite(high) else low * (1 + SLACK)
        halve = not halve
    return best, low


def can_make_steps(problem: PlacementProblem, steps_per_s: float, deadline: float | None = None) -> bool:
    """Whether some placement reaches that many steps/s."""
    if steps_per_s > problem.shared.max_steps_per_s:
        return False
    return proven_counts(problem, NO_LIMITS, _nothing, deadline=deadline, steps=required_steps(steps_per_s)) is not None


def required_steps(steps_per_s: float) -> Steps:
    """Requires that the steps of all workers add up to that rate."""
    return Steps(steps_per_s, reaches=(Reach(lambda state: 1 / steps_per_s, 1.0),))


def _nothing(state: State) -> float:
    return 0.0


def _reached(problem: PlacementProblem, counts: Counts, steps: Steps) -> float:
    """Steps/s that the workers reach with the links evaluated at `steps.at`; -inf if infeasible."""
    reached = 0.0
    for group in counts.groups or ():
        ends = steps.range_of(problem, group.state)
        own = group.state.steps_per_s * group.workers
        if ends is None or ends[0] > own:
            return -math.inf
        reached += min(own, ends[1]) * group.machines
    return reached
