"""Integer programs through PuLP: HiGHS inside this process, CBC where HiGHS is missing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulp

from dike.exceptions import DikeError

THREADS = 1  # HiGHS returns nothing, without an error, when one process asks for different numbers of threads.
INTEGRAL = 1e-5


class SolverError(DikeError):
    """The solver gave no answer; a fault of the installation, not of the input."""


@dataclass(frozen=True)
class Row:
    """One linear constraint: lower <= sum of coefficient * variable <= upper; None stands for no limit."""

    coefficients: Mapping[int, float]
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Milp:
    """Maximise a linear objective over integers from 0 to an upper limit each."""

    objective: Sequence[float]
    upper: Sequence[int]
    rows: Sequence[Row] = field(default_factory=tuple)


@dataclass(frozen=True)
class MilpResult:
    """An answer.

    Attributes:
        values: value of each variable; None where there is no solution.
        proven: whether that is proven: the solution optimal, or the program without any.
    """

    values: tuple[int, ...] | None
    proven: bool


def solve(program: Milp, time_limit_s: float | None = None) -> MilpResult:
    """Solves the program to proven optimality, or as far as the time allows.

    Raises:
        SolverError: if no solver works here.
    """
    problem = pulp.LpProblem("placement", pulp.LpMaximize)
    variables = [problem.add_variable(f"x{i}", 0, upper, pulp.LpInteger) for i, upper in enumerate(program.upper)]
    problem += pulp.LpAffineExpression(
        {variable: value for variable, value in zip(variables, program.objective, strict=True) if value}
    )
    for row in program.rows:
        terms = pulp.LpAffineExpression({variables[i]: value for i, value in row.coefficients.items()})
        if row.lower is not None and row.lower == row.upper:
            problem += terms == row.lower
            continue
        if row.lower is not None:
            problem += terms >= row.lower
        if row.upper is not None:
            problem += terms <= row.upper
    solver = _solver_class()(msg=False, threads=THREADS, gapRel=0, timeLimit=time_limit_s)
    problem.solve(solver)
    # The objective holds a number even when nothing was found, so the status is read first.
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        values = tuple(_whole(variable.value() or 0.0) for variable in variables)
        return MilpResult(values, proven=problem.sol_status == pulp.LpSolutionOptimal)
    return MilpResult(None, proven=problem.status == pulp.LpStatusInfeasible)


def _whole(value: float) -> int:
    nearest = round(value)
    if abs(value - nearest) > INTEGRAL:
        raise SolverError(f"The solver returned {value} for a whole number; report this as a bug.")
    return nearest


@functools.cache
def _solver_class() -> type:
    for candidate in (pulp.HiGHS, pulp.PULP_CBC_CMD, pulp.COIN_CMD):
        if candidate(msg=False).available():
            return candidate
    raise SolverError("Neither HiGHS nor CBC works here; install one with 'pip install highspy'.")
