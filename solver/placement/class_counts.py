"""The exact placement program: how many machines of each kind are in each configuration (solver FACTS 3, form D).

    maximise    sum_c value_c x_c                                 x_c integer: machines in configuration c
    subject to  sum_{c of kind k} x_c        <= machines of kind k
                sum_{c with shard type t} x_c = shards of type t
                sum_c workers_c x_c           = workers
                sum_{c with the chief} x_c    = 1                 if there is a separate chief
                sum_c floor_c x_c            >= 1                 optional

Its size depends on the number of kinds, not of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from solver import milp
from solver.placement.problem import Column, PlacementProblem


@dataclass(frozen=True)
class Counts:
    """How often each configuration is used.

    Attributes:
        used: configurations in use with the number of machines in each; None where nothing fits.
        proven: whether no better answer exists.
    """

    used: tuple[tuple[Column, int], ...] | None
    proven: bool

    @property
    def network_s(self) -> float:
        return max(column.network_s for column, _ in self.used or ())

    @property
    def work_s(self) -> float:
        return max(column.work_s for column, _ in self.used or ())

    @property
    def steps_per_s(self) -> float:
        return sum(column.steps_per_s * count for column, count in self.used or ())

    @property
    def local_bytes(self) -> int:
        return sum(column.local_bytes * count for column, count in self.used or ())


def solve_counts(
    problem: PlacementProblem,
    columns: Sequence[Column],
    value: Callable[[Column], float],
    floor: Callable[[Column], float] | None = None,
    time_limit_s: float | None = None,
) -> Counts:
    """Solves the program over some of the problem's columns.

    Args:
        problem: what has to be placed.
        columns: configurations that may be used.
        value: objective per machine in a configuration.
        floor: coefficients of the optional last row.
        time_limit_s: how long the solver may take.
    """
    if not _may_fit(problem, columns):
        return Counts(None, proven=True)
    limits = [_limit(problem, column) for column in columns]
    program = milp.Milp([value(column) for column in columns], limits, _rows(problem, columns, floor))
    result = milp.solve(program, time_limit_s)
    if result.values is None:
        return Counts(None, result.proven)
    used = tuple((column, count) for column, count in zip(columns, result.values, strict=True) if count)
    return Counts(used, result.proven)


def _limit(problem: PlacementProblem, column: Column) -> int:
    limit = problem.kinds[column.kind].count
    if column.workers:
        limit = min(limit, problem.workers // column.workers)
    if column.shard is not None:
        limit = min(limit, problem.shard_types[column.shard].count)
    return min(limit, 1) if column.chief else limit


def _may_fit(problem: PlacementProblem, columns: Sequence[Column]) -> bool:
    """Cheap necessary condition: room for the workers and a place for each shard type and the chief."""
    most: dict[int, int] = {}
    shards = set()
    chief = not problem.needs_chief
    for column in columns:
        most[column.kind] = max(most.get(column.kind, 0), column.workers)
        shards.add(column.shard)
        chief = chief or column.chief
    room = sum(problem.kinds[kind].count * workers for kind, workers in most.items())
    return chief and room >= problem.workers and shards.issuperset(range(len(problem.shard_types)))


def _rows(
    problem: PlacementProblem, columns: Sequence[Column], floor: Callable[[Column], float] | None
) -> list[milp.Row]:
    by_kind: dict[int, dict[int, float]] = {}
    by_shard: dict[int, dict[int, float]] = {}
    workers: dict[int, float] = {}
    chief: dict[int, float] = {}
    for i, column in enumerate(columns):
        by_kind.setdefault(column.kind, {})[i] = 1.0
        if column.shard is not None:
            by_shard.setdefault(column.shard, {})[i] = 1.0
        if column.workers:
            workers[i] = float(column.workers)
        if column.chief:
            chief[i] = 1.0
    rows = [milp.Row(terms, upper=problem.kinds[kind].count) for kind, terms in by_kind.items()]
    for shard, terms in by_shard.items():
        count = problem.shard_types[shard].count
        rows.append(milp.Row(terms, lower=count, upper=count))
    rows.append(milp.Row(workers, lower=problem.workers, upper=problem.workers))
    if problem.needs_chief:
        rows.append(milp.Row(chief, lower=1, upper=1))
    if floor is not None:
        rows.append(milp.Row({i: floor(column) for i, column in enumerate(columns) if floor(column)}, lower=1.0))
    return rows
