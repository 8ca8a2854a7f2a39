"""Integer programs: HiGHS in this process, or CBC through PuLP if HiGHS is missing."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dike.exceptions import DikeError

HIGHS_OPTIONS = {"presolve_rule_off": 1 << 12}
"""HiGHS' presolve without its aggregator, which from 1.12 to 1.15.1 makes it report some feasible programs as
infeasible and worse solutions as optimal: 9 of 2,680 random ones, and the two in tests/solver/test_milp.py. Without the
aggregator none of 20,000 is wrong, at 1.2 times the time; without presolve it takes twice the time."""
MAX_SMALL_PROGRAM_VARIABLES = 200
FEASIBILITY_JUMP = "mip_heuristic_run_feasibility_jump"
"""HiGHS' first heuristic, since 1.9: on small programs it takes longer than all the rest."""
THREADS = 1  # HiGHS returns nothing, without an error, when one process asks for different numbers of threads.
INTEGRALITY_TOLERANCE = 1e-5


class SolverError(DikeError):
    """The solver failed: a fault of the installation, not of the input."""


@dataclass(frozen=True)
class LinearRow:
    """One linear constraint: lower <= sum of coefficient * variable <= upper; None is no limit."""

    coefficients: Mapping[int, float]
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Milp:
    """Maximises a linear objective over integers and fractions from 0 to an upper limit each.

    Attributes:
        objective: coefficient of each variable, the integers first.
        upper: upper limit of each integer.
        rows: the constraints; they number the variables as `objective` does.
        fractions: upper limit of each continuous variable.
    """

    objective: Sequence[float]
    upper: Sequence[int]
    rows: Sequence[LinearRow] = field(default_factory=tuple)
    fractions: Sequence[float] = field(default_factory=tuple)


@dataclass(frozen=True)
class MilpResult:
    """A result.

    Attributes:
        values: value of each integer; None if there is no solution.
        proven: whether it is proven: the solution optimal, or the program infeasible.
        bound: upper bound of the objective; infinite if the solver has or reports none (CBC), and undefined if the
            program is proven infeasible.
    """

    values: tuple[int, ...] | None
    proven: bool
    bound: float = math.inf


class MilpBuilder:
    """Collects the variables and rows of a program; variables are identified by the number returned here."""

    def __init__(self) -> None:
        self._objective: list[float] = []
        self._upper: list[int] = []
        self._fractions: list[float] = []
        self._rows: list[LinearRow] = []

    def integer(self, upper: int, value: float = 0.0) -> int:
        """Adds an integer from 0 to `upper` with objective `value`; all integers come before the first fraction."""
        assert not self._fractions, "an integer after a fraction would get the fraction's number"
        self._upper.append(upper)
        self._objective.append(value)
        return len(self._objective) - 1

    def fraction(self, upper: float, value: float = 0.0) -> int:
        """Adds a continuous variable from 0 to `upper`."""
        self._fractions.append(upper)
        self._objective.append(value)
        return len(self._objective) - 1

    def row(self, coefficients: Mapping[int, float], lower: float | None = None, upper: float | None = None) -> None:
        self._rows.append(LinearRow(coefficients, lower, upper))

    def extend(self, rows: Iterable[LinearRow]) -> None:
        self._rows += rows

    def equation(self, variables: Sequence[int], total: float) -> None:
        """Adds the constraint that these variables add up to `total`."""
        self._rows.append(LinearRow(dict.fromkeys(variables, 1.0), total, total))

    def build(self) -> Milp:
        return Milp(self._objective, self._upper, self._rows, self._fractions)


def solve(program: Milp, time_limit_s: float | None = None) -> MilpResult:
    """Solves the program to proven optimality, or as far as the time allows.

    The limit includes building the model, but HiGHS keeps it only roughly: on programs of tens of thousands of rows it
    has taken two to four times as long. For a hard limit, run this in a child process (`solver.deadline`).

    Raises:
        SolverError: if no solver works.
    """
    return _solver()(program, time_limit_s)


@functools.cache
def _solver() -> Callable[[Milp, float | None], MilpResult]:
    # Checked late: small plans need no program.
    return solve_by_highs if importlib.util.find_spec("highspy") else solve_by_cbc


def solve_by_highs(program: Milp, time_limit_s: float | None) -> MilpResult:
    import highspy

    started = time.monotonic()
    model = highspy.HighsLp()
    integers, fractions = len(program.upper), len(program.fractions)
    model.num_col_, model.num_row_ = integers + fractions, len(program.rows)
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = np.array(program.objective, float)
    model.col_lower_ = np.zeros(integers + fractions)
    model.col_upper_ = np.array([*program.upper, *program.fractions], float)
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kInteger] * integers + [kinds.kContinuous] * fractions
    limits = [(row.lower, row.upper) for row in program.rows]
    model.row_lower_ = np.array([-math.inf if lower is None else lower for lower, _ in limits])
    model.row_upper_ = np.array([math.inf if upper is None else upper for _, upper in limits])
    terms = [[(index, value) for index, value in row.coefficients.items() if value] for row in program.rows]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.array(list(itertools.accumulate(map(len, terms), initial=0)), np.int32)
    matrix.index_ = np.array([index for row in terms for index, _ in row], np.int32)
    matrix.value_ = np.array([value for row in terms for _, value in row], float)

    solver = highspy.Highs()
    options = {"output_flag": False, "threads": THREADS, "mip_rel_gap": 0.0, **HIGHS_OPTIONS}
    if integers + fractions <= MAX_SMALL_PROGRAM_VARIABLES and _has_feasibility_jump():
        options[FEASIBILITY_JUMP] = False
    if time_limit_s is not None:
        left_s = time_limit_s - (time.monotonic() - started)
        if left_s <= 0:
            return MilpResult(None, proven=False)
        options["time_limit"] = left_s
    for name, value in options.items():
        solver.setOptionValue(name, value)
    if solver.passModel(model) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS rejects the program; report this as a bug.")
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = tuple(_whole(value) for value in solver.getSolution().col_value[:integers])
        return MilpResult(values, is_optimal, info.objective_function_value if is_optimal else info.mip_dual_bound)
    # Each variable has its limits, so no program is unbounded.
    nothing = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
    return MilpResult(None, proven=status in nothing)


def solve_by_cbc(program: Milp, time_limit_s: float | None) -> MilpResult:
    import pulp

    started = time.monotonic()
    problem = pulp.LpProblem("placement", pulp.LpMaximize)
    variables = [problem.add_variable(f"x{i}", 0, upper, pulp.LpInteger) for i, upper in enumerate(program.upper)]
    integers = len(variables)
    variables += [problem.add_variable(f"f{i}", 0, upper) for i, upper in enumerate(program.fractions)]
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
    left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - started)
    if left_s is not None and left_s <= 0:
        return MilpResult(None, proven=False)
    problem.solve(_cbc_class()(msg=False, threads=THREADS, gapRel=0, timeLimit=left_s))
    # The objective holds a number even when nothing was found, so the status is read first.
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        values = tuple(_whole(variable.value() or 0.0) for variable in variables[:integers])
        if problem.sol_status == pulp.LpSolutionOptimal:
            return MilpResult(values, proven=True, bound=pulp.value(problem.objective) or 0.0)
        # CBC writes its bound to its log only.
        return MilpResult(values, proven=False)
    return MilpResult(None, proven=problem.status == pulp.LpStatusInfeasible)


@functools.cache
def _cbc_class() -> type:
    import pulp

    for candidate in (pulp.PULP_CBC_CMD, pulp.COIN_CMD):
        if candidate(msg=False).available():
            return candidate
    raise SolverError("Neither HiGHS nor CBC works here; install one with 'pip install highspy'.")


def _whole(value: float) -> int:
    nearest = round(value)
    if abs(value - nearest) > INTEGRALITY_TOLERANCE:
        raise SolverError(f"The solver returned {value} for a whole number; report this as a bug.")
    return nearest


@functools.cache
def _has_feasibility_jump() -> bool:
    import highspy

    return hasattr(highspy.HighsOptions, FEASIBILITY_JUMP)
