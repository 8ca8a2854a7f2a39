"""The exact placement program: number of machines of each kind in each state.

    maximise    sum_c value_c w_c                    y_c: machines in state c, w_c: workers on all of them; integers
    subject to  sum_{c of kind k} y_c         <= machines of kind k
                sum_c (shards of type t in c) y_c = shards of type t
                sum_{c with the chief} y_c     = 1         if there is a separate chief
                sum_c w_c                      = workers
                fewest_c y_c <= w_c           <= most_c y_c
                sum_c (GPUs of a worker in c) w_c >= minimum GPUs   if some must be in use
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
from solver.async_rates import Machine
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
    """Solution of the program.

    Attributes:
        groups: the machines in use; None if nothing fits.
        proven: whether it is proven that no better solution exists.
        value: the objective, if there is a solution.
    """

    groups: tuple[Group, ...] | None
    proven: bool
    value: float = 0.0

    @property
    def network_s(self) -> float:
        return max(group.state.network_s[group.workers] for group in self.groups or ())

    @property
    def work_s(self) -> float:
        return max(group.state.work_s for group in self.groups or () if group.workers)

    @property
    def samples(self) -> int:
        return sum(group.state.samples * group.workers * group.machines for group in self.groups or ())

    @property
    def local_bytes(self) -> int:
        return sum(group.state.local_bytes * group.workers * group.machines for group in self.groups or ())

    def machines(self, problem: PlacementProblem) -> tuple[Machine, ...]:
        """The machines in use as input of solver.async_rates, without racks."""
        return tuple(
            Machine(
                own_rate=group.state.steps_per_s * group.workers,
                stored=group.state.local_bytes,
                card=problem.kinds[group.state.kind].network_bytes_per_s,
                samples=group.state.samples,
                count=group.machines,
            )
            for group in self.groups or ()
        )


@dataclass(frozen=True)
class CountLimits:
    """CountLimits for every machine: a worker's own work, and the time its network card is busy (synchronous)."""

    work_s: float = math.inf
    network_s: float = math.inf


@dataclass(frozen=True)
class Floor:
    """Minimum of a weighted sum over all workers: a coefficient for a worker in each state, and the minimum."""

    coefficient: Callable[[State], float]
    least: float


NO_LIMITS = CountLimits()


class OutOfTimeError(Exception):
    """The deadline passed before the best placement was found and proven."""


def proven_counts(
    problem: PlacementProblem,
    limits: CountLimits,
    value: Callable[[State], float],
    floors: Sequence[Floor] = (),
    deadline: float | None = None,
    steps: Steps | None = None,
) -> Counts | None:
    """Solves the program by a deadline (on `time.monotonic`'s clock); arguments as for `solve_counts`.

    Returns:
        None if nothing fits.

    Raises:
        OutOfTimeError: if the deadline passed before the optimum was found and proven.
    """
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise OutOfTimeError
    counts = solve_counts(problem, limits, value, floors, left, steps)
    if not counts.proven:
        raise OutOfTimeError
    return counts if counts.groups is not None else None


def solve_counts(
    problem: PlacementProblem,
    limits: CountLimits,
    value: Callable[[State], float],
    floors: Sequence[Floor] = (),
    time_limit_s: float | None = None,
    steps: Steps | None = None,
) -> Counts:
    """Solves the program.

    Args:
        problem: the option to place.
        limits: limits for every machine.
        value: objective per worker in a state.
        floors: minimums for the workers together.
        time_limit_s: time limit of the solver.
        steps: asynchronous workers' steps, which are then part of the program; None if they do not matter.
    """
    allowed: Allowed = []
    for state in problem.states:
        numbers = state.workers_within(limits.work_s, limits.network_s)
        if numbers is not None and steps is not None:
            numbers = workers_that_keep_up(problem, state, numbers, steps)
        if numbers is not None:
            allowed.append((state, *numbers))
    if not _may_fit(problem, allowed):
        return Counts(None, proven=True)
    states = [state for state, _, _ in allowed]
    if problem.least_gpus:
        floors = (*floors, Floor(lambda state: float(state.shape.gpus), problem.least_gpus))
    values = [value(state) for state in states]
    machines = [_most_machines(problem, state) for state in states]
    workers = [min(problem.workers, most * count) for (_, _, most), count in zip(allowed, machines, strict=True)]
    objective, rows = [0.0] * len(states) + values, _rows(problem, allowed, floors)
    if steps is not None:
        program = with_steps(problem, allowed, milp.Milp(objective, machines + workers, rows), steps)
    elif floors:
        program = milp.Milp(objective, machines + workers, rows)
    else:
        # For given machines an integral optimum exists, as only limits and one sum bind the workers.
        program = milp.Milp(objective, machines, rows, fractions=workers)
    result = milp.solve(program, time_limit_s)
    if result.values is None:
        return Counts(None, result.proven)
    placed = result.values[: len(states)]
    near = result.values[len(states) : 2 * len(states)] or _distribute_workers(problem, allowed, placed, values)
    groups: list[Group] = []
    for index, state in enumerate(states):
        groups += _spread(state, placed[index], near[index])
    return Counts(tuple(groups), result.proven, result.bound)


def _distribute_workers(
    problem: PlacementProblem, allowed: Allowed, machines: Sequence[int], values: Sequence[float]
) -> list[int]:
    """Distributes the workers over the machines: the minimum to each, the rest by value."""
    workers = [count * fewest for count, (_, fewest, _) in zip(machines, allowed, strict=True)]
    left = problem.workers - sum(workers)
    for index in sorted(range(len(allowed)), key=lambda i: -values[i]):
        more = min(left, machines[index] * allowed[index][2] - workers[index])
        workers[index] += more
        left -= more
    return workers


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


def _may_fit(problem: PlacementProblem, allowed: Allowed) -> bool:
    """Cheap necessary condition: room for the workers, and a place for each shard type and the chief."""
    most: dict[int, int] = {}
    shards: set[int] = set()
    chief = not problem.needs_chief
    for state, _, workers in allowed:
        most[state.kind] = max(most.get(state.kind, 0), workers)
        shards.update(state.shards)
        chief = chief or state.chief
    room = sum(problem.kinds[kind].count * workers for kind, workers in most.items())
    return chief and room >= problem.workers and shards.issuperset(range(len(problem.shard_types)))


def _rows(problem: PlacementProblem, allowed: Allowed, floors: Sequence[Floor]) -> list[milp.LinearRow]:
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
    rows.append(milp.LinearRow(every_worker, lower=problem.workers, upper=problem.workers))
    if problem.needs_chief:
        rows.append(milp.LinearRow(chief, lower=1, upper=1))
    for floor in floors:
        terms = {
            first_worker + index: floor.coefficient(state) for index, (state, _, most) in enumerate(allowed) if most
        }
        rows.append(milp.LinearRow(terms, lower=floor.least))
    return rows
