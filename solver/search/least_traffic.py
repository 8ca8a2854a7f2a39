"""The placement with the least traffic (Eq. 1 of the paper 'Dike'), whatever its speed.

Where all links cost the same, Eq. 1 is least where most bytes stay on their machine: one program for each option
(solver.placement.class_counts). Where costs differ, a program over single machines decides; too large a cluster gets
the best of the placements within one rack, or on all machines as if links cost the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from solver import milp
from solver.costs import UniformCosts
from solver.evaluation import RatedPlan
from solver.options import OptionSpace
from solver.placement.class_counts import OutOfTimeError, proven_counts
from solver.placement.naming import Assignment, assign
from solver.placement.problem import State, hosts_workers, placement_problem
from solver.resources import WorkerShape
from solver.scenario import Scenario

MAX_MACHINE_SLOTS = 300
"""Maximum workers and machines of a program over single machines."""
EQUAL = 1e-9
"""Relative; traffic that differs by less is equal."""


@dataclass(frozen=True)
class LeastTraffic:
    """Result of a search.

    Attributes:
        best: the placement with the least traffic; None if nothing fits.
        others: the placements of other options.
        bound: lower bound of the traffic, in weighted bytes.
        solved: number of options that were placed.
    """

    best: RatedPlan | None
    others: tuple[RatedPlan, ...]
    bound: float
    solved: int


@dataclass(frozen=True)
class _Option:
    """Shapes of a worker, numbers of workers and ps, and a lower bound of the traffic."""

    bound: float
    workers: int
    ps: int
    shapes: tuple[WorkerShape, ...]


def least_traffic(scenario: Scenario, regions: Sequence[Scenario], space: OptionSpace, deadline: float) -> LeastTraffic:
    """Finds the placement with the least traffic.

    Args:
        scenario: the model and all machines.
        regions: the same with the machines of each rack, if there are several.
        space: the options; of each only the minimum of workers matters.
        deadline: on `time.monotonic`'s clock; one option is always placed.
    """
    found: list[RatedPlan] = []
    best, solved, open_bound = None, 0, float("inf")
    for option in sorted(_options(scenario, space), key=lambda each: (each.bound, each.workers + each.ps)):
        if best is not None and option.bound >= best.worth.traffic_bytes * (1 - EQUAL):
            break
        if best is not None and time.monotonic() > deadline:
            open_bound = min(open_bound, option.bound)
            break
        solved += 1
        plan, is_proven = _place(scenario, regions, option, None if best is None else deadline)
        if not is_proven:
            open_bound = min(open_bound, option.bound)
        if plan is None:
            continue
        found.append(plan)
        if best is None or plan.worth.traffic_bytes < best.worth.traffic_bytes * (1 - EQUAL):
            best = plan
    others = sorted((plan for plan in found if plan is not best), key=lambda plan: plan.worth.traffic_bytes)
    bound = 0.0 if best is None else min(best.worth.traffic_bytes, open_bound)
    return LeastTraffic(best, tuple(others), bound, solved)


def _options(scenario: Scenario, space: OptionSpace) -> Iterator[_Option]:
    within, between = scenario.cluster.costs().cheapest
    total = scenario.shards(1).total
    for entry in space.ranges:
        for shapes in [entry.shapes] if entry.mixed else [(shape,) for shape in entry.shapes]:
            for ps in range(1, entry.max_ps + 1):
                helper = scenario.sizes.ps(scenario.shards(ps).sizes[-1])
                near = max(
                    (
                        kind.room_for(scenario.sizes.worker(shape), [helper])
                        for kind in scenario.kinds
                        for shape in shapes
                        if hosts_workers(kind, scenario.model(shape))
                    ),
                    default=0,
                )
                near = max(0, min(near, entry.min_workers))
                bound = total * (between * (entry.min_workers - near) + within * near)
                yield _Option(bound, entry.min_workers, ps, shapes)


def _place(
    scenario: Scenario, regions: Sequence[Scenario], option: _Option, deadline: float | None
) -> tuple[RatedPlan | None, bool]:
    """Places an option; and whether no other placement of it has less traffic."""
    is_uniform = isinstance(scenario.cluster.costs(), UniformCosts)
    plans, is_proven = [], is_uniform
    try:
        if not is_uniform and len(option.shapes) == 1:
            caps = _room(scenario, option)
            if sum(caps.values()) + len(caps) <= MAX_MACHINE_SLOTS:
                assignment = _by_machine(scenario, option, caps, deadline)
                return (None if assignment is None else RatedPlan.of(scenario, assignment)), True
        for where in [scenario] if is_uniform else [*regions, scenario]:
            assignment = _by_class(where, option, deadline)
            if assignment is not None:
                plans.append(RatedPlan.of(scenario, assignment))
    except OutOfTimeError:
        is_proven = False
    return min(plans, key=lambda plan: plan.worth.traffic_bytes, default=None), is_proven


def _by_class(scenario: Scenario, option: _Option, deadline: float | None) -> Assignment | None:
    models = [scenario.model(shape) for shape in option.shapes]
    shards = scenario.shards(option.ps)
    problem = placement_problem(scenario.kinds, models, scenario.sizes, shards, option.workers)
    scale = max(1, shards.total)

    def local_share(state: State) -> float:
        return state.local_bytes / scale

    counts = proven_counts(problem, local_share, deadline=deadline)
    return None if counts is None else assign(counts.groups, problem.kinds, problem.shard_types)


def _room(scenario: Scenario, option: _Option) -> dict[str, int]:
    """Workers that fit on each machine."""
    shape = option.shapes[0]
    task, model = scenario.sizes.worker(shape), scenario.model(shape)
    return {
        name: max(0, min(option.workers, kind.room_for(task))) if hosts_workers(kind, model) else 0
        for kind in scenario.kinds
        for name in kind.names
    }


def _by_machine(scenario: Scenario, option: _Option, caps: dict[str, int], deadline: float | None) -> Assignment | None:
    """The program over single machines.

    A worker's traffic depends on the machines of all ps, so the traffic of the k-th worker of a machine is a variable
    that is at least that sum if there is a k-th worker, and at least 0.

    Raises:
        OutOfTimeError: if the deadline passed before the optimum was found and proven.
    """
    sizes, shards, costs = scenario.sizes, scenario.shards(option.ps), scenario.cluster.costs()
    kind_of, names = scenario.kind_of, list(caps)
    scale = max(1, shards.total) * max(1e-9, *costs_between(scenario))
    program = milp.MilpBuilder()
    holds = [[program.integer(1) for _ in shards.sizes] for _ in names]
    works = [[program.integer(1) for _ in range(caps[name])] for name in names]
    leads = [program.integer(1) for _ in names] if sizes.chief is not None else []
    moved = [[program.fraction(1.0, -1.0) for _ in range(caps[name])] for name in names]
    for index in range(len(shards.sizes)):
        program.equation([held[index] for held in holds], 1)
    program.equation([worker for workers in works for worker in workers], option.workers)
    if leads:
        program.equation(leads, 1)
    worker = sizes.worker(option.shapes[0])
    for at, name in enumerate(names):
        program.row(dict.fromkeys(holds[at], 1.0), upper=1.0)
        kind = kind_of[name]
        for attribute, have in (
            ("cpu_millis", kind.cpu_millis), ("mem_mb", kind.mem_mb), ("disk_mb", kind.disk_mb), ("gpus", kind.gpus)
        ):  # fmt: skip
            needs = {
                variable: float(getattr(sizes.ps(size), attribute))
                for variable, size in zip(holds[at], shards.sizes, strict=True)
            }
            needs |= dict.fromkeys(works[at], float(getattr(worker, attribute)))
            if leads and sizes.chief is not None:
                needs[leads[at]] = float(getattr(sizes.chief, attribute))
            program.row(needs, upper=float(have))
        traffic = {
            variable: size * costs.between(holder, name) / scale
            for holder, held in zip(names, holds, strict=True)
            for variable, size in zip(held, shards.sizes, strict=True)
        }
        for one, of_one in zip(works[at], moved[at], strict=True):
            # moved >= traffic - (1 - works): the traffic of a worker is at most 1.
            program.row({of_one: 1.0, one: -1.0, **{each: -value for each, value in traffic.items()}}, lower=-1.0)
        for one, following in zip(works[at], works[at][1:], strict=False):
            program.row({one: 1.0, following: -1.0}, lower=0.0)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    result = milp.solve(program.build(), left)
    if not result.proven:
        raise OutOfTimeError
    if result.values is None:
        return None
    values = result.values
    of_ps = {
        index: name for name, held in zip(names, holds, strict=True) for index, one in enumerate(held) if values[one]
    }
    workers = tuple(name for name, some in zip(names, works, strict=True) for each in some if values[each])
    chief = next((name for name, lead in zip(names, leads, strict=False) if values[lead]), None)
    ps = tuple(of_ps[index] for index in sorted(of_ps))
    return Assignment(ps, workers, chief, (option.shapes[0],) * len(workers))


def costs_between(scenario: Scenario) -> set[float]:
    """All costs of a byte between two machines, and on one."""
    costs, names = scenario.cluster.costs(), [name for kind in scenario.kinds for name in kind.names]
    return {costs.between(one, other) for one in names for other in names}
