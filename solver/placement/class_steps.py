"""Asynchronous workers' steps/s in the placement program (solver.placement.class_counts).

The links are evaluated at a rate X of all workers (solver.async_rates): the workers of a machine in state c may then
make low_c to high_c steps/s, and a worker alone makes r_c. The steps/s f_c of all workers in a state are fractions:

    f_c <= r_c w_c,   low_c y_c <= f_c <= high_c y_c
    f_c <= r_c q y_c + (high_c - r_c q)(w_c - q y_c)       with q = floor(high_c / r_c)
    minimum <= sum_c coefficient_c f_c <= maximum          for each reach
    fewest_c >= low_c / r_c

The second line is the chord of min(r_c w, high_c), concave in the workers w of a machine, between q and q + 1: with it
f_c is exactly the rate of whole workers spread evenly. low_c > 0 needs more than half of all bytes, so it concerns at
most one machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from solver import milp
from solver.async_rates import Range, link_range
from solver.placement.problem import PlacementProblem, State

ROUNDING = 1e-9
"""Relative tolerance, so that a number of workers that just keeps up is not lost."""

Allowed = list[tuple[State, int, int]]
"""Allowed states of a machine, each with the minimum and maximum workers."""


@dataclass(frozen=True)
class Reach:
    """A limit on all workers' steps/s: a coefficient for a step in each state, and the minimum and maximum sum."""

    coefficient: Callable[[State], float]
    least: float
    most: float = math.inf


@dataclass(frozen=True)
class Steps:
    """Asynchronous workers' steps/s.

    Attributes:
        at: the rate of all workers at which the links are evaluated.
        reaches: limits on the steps.
    """

    at: float
    reaches: Sequence[Reach] = ()

    def range_of(self, problem: PlacementProblem, state: State) -> Range | None:
        """Minimum and maximum steps/s that the links of a machine in that state allow; None if infeasible."""
        card = problem.kinds[state.kind].network_bytes_per_s
        total, within = problem.model.total_bytes, problem.model.within_node_bytes_per_s
        ends = link_range(state.local_bytes, total, self.at, card, within)
        return None if ends is None or ends[0] > self.at * (1 + ROUNDING) else ends


def workers_that_keep_up(
    problem: PlacementProblem, state: State, numbers: tuple[int, int], steps: Steps
) -> tuple[int, int] | None:
    """Of these numbers of workers the minimum and maximum that the links allow; None if none."""
    ends = steps.range_of(problem, state)
    if ends is None:
        return None
    fewest, most = numbers
    if ends[0] > 0:
        fewest = max(fewest, math.ceil(ends[0] / state.steps_per_s * (1 - ROUNDING)) if most else 1)
    return (fewest, most) if fewest <= most else None


def with_steps(problem: PlacementProblem, allowed: Allowed, program: milp.Milp, steps: Steps) -> milp.Milp:
    """Adds the workers' steps to the program.

    `program`: one variable for the machines in each state, then one for the workers in each.
    """
    count, objective, rows = len(allowed), list(program.objective), list(program.rows)
    fastest = max((state.steps_per_s for state, _, most in allowed if most), default=0.0)
    # In units of the whole rate, so that coefficients stay near 1.
    unit = steps.at or problem.workers * fastest or 1.0
    must_be_free = any(math.isfinite(reach.most) for reach in steps.reaches)
    fractions: list[float] = []
    made: list[tuple[State, int, float]] = []  # State, variable, and steps/s per unit of it.
    for index, (state, _, most) in enumerate(allowed):
        ends = steps.range_of(problem, state)
        if not most or ends is None:
            continue
        rate = state.steps_per_s
        lines = list(_lines(rate, ends[1], most))
        if lines == [(0.0, rate)] and not must_be_free:
            made.append((state, count + index, rate))
            continue
        flow = 2 * count + len(fractions)
        fractions.append(program.upper[count + index] * rate / unit)
        made.append((state, flow, unit))
        objective.append(0.0)
        rows += [
            milp.LinearRow({flow: 1.0, index: -machine / unit, count + index: -worker / unit}, upper=0.0)
            for machine, worker in lines
        ]
        if ends[0] > 0:
            rows.append(milp.LinearRow({flow: 1.0, index: -ends[0] / unit}, lower=0.0))
    for reach in steps.reaches:
        terms = {variable: reach.coefficient(state) * each for state, variable, each in made}
        rows.append(milp.LinearRow(terms, lower=reach.least, upper=None if math.isinf(reach.most) else reach.most))
    return milp.Milp(objective, program.upper, rows, fractions)


def _lines(rate: float, high: float, most: int) -> Iterator[tuple[float, float]]:
    """The lines that bound f_c from above, as coefficients of y_c and w_c, for up to `most` workers a machine."""
    if high >= rate * most:
        yield 0.0, rate
        return
    whole = math.floor(high / rate * (1 + ROUNDING))
    if whole:
        yield 0.0, rate
    if whole < most:
        slope = max(0.0, high - rate * whole)
        yield whole * (rate - slope), slope
        if slope > 0 and whole + 1 < most:
            yield high, 0.0
