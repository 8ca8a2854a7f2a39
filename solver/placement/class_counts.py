"""The exact placement program: number of machines of each kind in each state.

    maximise    sum_c value_c w_c - price_c y_c      y_c: machines in state c, w_c: workers on all of them; integers
    subject to  sum_{c of kind k} y_c         <= machines of kind k
                sum_c (shards of type t in c) y_c = shards of type t
                sum_{c with the chief} y_c     = 1         if there is a separate chief
                fewest workers <= sum_c w_c   <= most workers
                fewest_c y_c <= w_c           <= most_c y_c
                sum_c coefficient_c w_c       >= minimum     for each floor

Asynchronous workers add their steps/s (solver.placement.class_steps).

Its size depends on the number of kinds, not of machines. A state's workers can be spread evenly over its machines, so
one pair of variables replaces a column for each number of workers; both have the same linear relaxation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from solver import milp
from solver.placement.class_steps import Allowed, Steps, with_steps, workers_that_keep_up
from solver.placement.problem import PlacementProblem, State


@dataclass(frozen=True)
class Group:
    """Machines of one kind in the same state with the same number of workers each."""

    state: State
    workers: int
    machines: int


@dataclass(frozen=True)
class Counts:
    """Solution of the program: the machines in use."""

    groups: tuple[Group, ...]

    @property
    def workers(self) -> int:
        return sum(group.workers * group.machines for group in self.groups)


@dataclass(frozen=True)
class CountLimits:
    """Limits for every machine: a worker's own work, and the time its network card is busy (synchronous)."""

    work_s: float = math.inf
    network_s: float = math.inf


@dataclass(frozen=True)
class Floor:
    """Minimum of a weighted sum over all workers: a coefficient for a worker in each state, and the minimum."""

    coefficient: Callable[[State], float]
    least: float


NO_LIMITS = CountLimits()


class OutOfTimeError(Exception):
    """The deadline passed before the optimum was found and proven."""


def proven_counts(
    problem: PlacementProblem,
    value: Callable[[State], float],
    limits: CountLimits = NO_LIMITS,
    *,
    deadline: float | None = None,
    floors: Sequence[Floor] = (),
    steps: Steps | None = None,
    fewest_workers: int | None = None,
    machine_price: float = 0.0,
) -> Counts | None:
    """Solves the program by a deadline.

    Args:
        problem: the option to place.
        value: objective per worker in a state.
        limits: limits for every machine.
        deadline: on `time.monotonic`'s clock.
        floors: minimums for the workers together.
        steps: asynchronous workers' steps, which are then part of the program; None if they do not matter.
        fewest_workers: minimum workers, if not all of `problem.workers` have to be placed.
        machine_price: price of each machine with a task.

    Returns:
        None if nothing fits.

    Raises:
        OutOfTimeError: if the deadline passed before the optimum was found and proven.
    """
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    fewest = problem.workers if fewest_workers is None else fewest_workers
    allowed: Allowed = []
    for state in problem.states:
        numbers = state.workers_within(limits.work_s, limits.network_s)
        if numbers is not None and steps is not None:
            numbers = workers_that_keep_up(problem, state, numbers, steps)
        if numbers is not None:
            allowed.append((state, *numbers))
    if not _may_fit(problem, allowed, fewest):
        return None
    states = [state for state, _, _ in allowed]
    values = [value(state) for state in states]
    machines = [_most_machines(problem, state) for state in states]
    workers = [min(problem.workers, most * count) for (_, _, most), count in zip(allowed, machines, strict=True)]
    objective, rows = [-machine_price] * len(states) + values, _rows(problem, allowed, floors, fewest)
    program = milp.Milp(objective, machines + workers, rows)
    if steps is not None:
        program = with_steps(problem, allowed, program, steps)
    result = milp.solve(program, left)
    if not result.proven:
        raise OutOfTimeError
    if result.values is None:
        return None
    placed, near = result.values[: len(states)], result.values[len(states) : 2 * len(states)]
    return Counts(
        tuple(group for index, state in enumerate(states) for group in _spread(state, placed[index], near[index]))
    )


def _spread(state: State, machines: int, workers: int) -> list[Group]:
    """Spreads the workers evenly; machines without tasks are left out."""
    if not machines:
        return []
    each, more = divmod(workers, machines)
    idle = each == 0 and not state.shards and not state.chief
    parts = [] if idle else [Group(state, each, machines - more)]
    return [Group(state, each + 1, more), *parts] if more else parts


def _most_machines(problem: PlacementProblem, state: State) -> int:
    limit = problem.kinds[state.kind].count
    for shard in set(state.shards):
        limit = min(limit, problem.shard_types[shard].count // state.shards.count(shard))
    return min(limit, 1) if state.chief else limit


def _may_fit(problem: PlacementProblem, allowed: Allowed, workers: int) -> bool:
    """Cheap necessary condition: room for the workers, and a place for each shard type and the chief."""
    most: dict[int, int] = {}
    shards: set[int] = set()
    chief = not problem.needs_chief
    for state, _, beside in allowed:
        most[state.kind] = max(most.get(state.kind, 0), beside)
        shards.update(state.shards)
        chief = chief or state.chief
    room = sum(problem.kinds[kind].count * beside for kind, beside in most.items())
    return chief and room >= workers and shards.issuperset(range(len(problem.shard_types)))


def _rows(
    problem: PlacementProblem, allowed: Allowed, floors: Sequence[Floor], fewest_workers: int
) -> list[milp.LinearRow]:
    by_kind: dict[int, dict[int, float]] = {}
    by_shard: dict[int, dict[int, float]] = {}
    chief: dict[int, float] = {}
    rows = []
    first_worker = len(allowed)
    for index, (state, fewest, most) in enumerate(allowed):
        by_kind.setdefault(state.kind, {})[index] = 1.0
        for shard in set(state.shards):
            by_shard.setdefault(shard, {})[index] = float(state.shards.count(shard))
        if state.chief:
            chief[index] = 1.0
        if most:
            rows.append(milp.LinearRow({first_worker + index: 1.0, index: -float(most)}, upper=0.0))
        if fewest:
            rows.append(milp.LinearRow({first_worker + index: 1.0, index: -float(fewest)}, lower=0.0))
    rows += [milp.LinearRow(terms, upper=problem.kinds[kind].count) for kind, terms in by_kind.items()]
    for shard, terms in by_shard.items():
        count = problem.shard_types[shard].count
        rows.append(milp.LinearRow(terms, lower=count, upper=count))
    every_worker = {first_worker + index: 1.0 for index in range(len(allowed))}
    rows.append(milp.LinearRow(every_worker, lower=fewest_workers, upper=problem.workers))
    if problem.needs_chief:
        rows.append(milp.LinearRow(chief, lower=1, upper=1))
    for floor in floors:
        terms = {
            first_worker + index: floor.coefficient(state) for index, (state, _, most) in enumerate(allowed) if most
        }
        rows.append(milp.LinearRow(terms, lower=floor.least))
    return rows
