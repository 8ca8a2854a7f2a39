"""Asynchronous workers across racks: tables for one rate of all workers, and the placement with the most steps.

At a given rate X of all workers together (`solver.async_rates`) every machine's workers reach up to a rate of their
own, if its card can serve the shards on it; those of a rack up to the sum, or the limit of its uplink. X is feasible if
the racks' rates add up to X. So the tables of `max_plus.py` give the placement with most steps F(X) with the links
evaluated at X. F falls with X, and the placement found has a maximum rate of its own, from which the search resumes; it
ends when a rate just above the best is infeasible.

If shards of one class differ, the optimistic view gives each machine the shard, and each rack the bytes, with the
highest rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE
from solver.racks.max_plus import State as Tasks
from solver.racks.max_plus import Table
from solver.racks.problem import Floats, MachineSetting, RackProblem, View
from solver.racks.tree import Best, Load
from solver.rate_arrays import PlacementArrays, high_ends, total_rates

SLACK = 1e-7
"""Relative; a rate is the best if one higher by this is infeasible, and is kept to within this afterwards."""
TIE_BREAKS = (1e-3, 1e-7)
"""Values of local shards relative to steps."""


@dataclass(frozen=True)
class Worth:
    """Weights of a placement's value: one step/s each, more if shards are local; or local shards alone.

    Attributes:
        steps: of a step/s.
        local: of a worker beside the largest shard; with steps, as a share of its steps.
    """

    steps: float
    local: float


STEPS = Worth(1.0, 0.0)
LOCAL = Worth(0.0, 1.0)


def best_at(problem: RackProblem, view: View, steps_per_s: float, worth: Worth, deadline: float | None) -> Best | None:
    """The most valuable placement in which every link keeps up with that rate of all workers; None if none can."""

    def of_machine(setting: MachineSetting, highs: Floats) -> Floats:
        local = setting.local_bytes / problem.shards[0]
        if worth.steps:
            return highs.max(axis=0) * (1 + worth.local * local)
        value = worth.local * local * np.arange(highs.shape[1])
        return np.where(np.isfinite(highs).any(axis=0), value, -np.inf)

    def of_rack(machines: Table, stored: Floats) -> Table:
        reached = machines if worth.steps else np.inf
        high = high_ends(reached, stored, problem.uplink_bytes_per_s, sum(problem.shards), steps_per_s)
        return high if worth.steps else np.where(high > -np.inf, machines, -np.inf)

    def in_rack(machines: Table, counts: Sequence[NDArray[np.int64]]) -> Table:
        least, most = view.stored(counts[1:-1])
        # The workers' share of an uplink is greatest at either end, or with half of the bytes in the rack.
        half = np.clip(sum(problem.shards) / 2, least, most)
        best = of_rack(machines, least)
        return best if view.exact else np.maximum.reduce([best, of_rack(machines, half), of_rack(machines, most)])

    return problem.tree.best(_tables(problem, view, steps_per_s, of_machine), in_rack, _goal(problem, view), deadline)


def holds_all(problem: RackProblem, view: View, steps_per_s: float, deadline: float | None) -> bool:
    """Whether some machines and racks that keep up with that rate can hold all bytes (a necessary condition)."""
    total, crossing = sum(problem.shards), problem.uplink_bytes_per_s * LINK_SHARE / steps_per_s

    def in_rack(machines: Table, counts: Sequence[NDArray[np.int64]]) -> Table:
        # A rack serves the others, or has so many bytes that it needs little from them.
        served = np.where(machines >= total - crossing, machines, np.minimum(machines, crossing))
        return np.minimum(served, view.stored(counts[1:-1])[1])

    def of_machine(setting: MachineSetting, highs: Floats) -> Floats:
        return np.where(np.isfinite(highs), setting.sizes, -np.inf).max(axis=0)

    most = problem.tree.best(_tables(problem, view, steps_per_s, of_machine), in_rack, _goal(problem, view), deadline)
    return most is not None and most.value >= total * (1 - SLACK)


def fastest_loads(problem: RackProblem, view: View, deadline: float | None) -> tuple[Load, ...] | None:
    """The placement with the most steps/s for the view's shards; None if none fits.

    Among equally fast ones one with little traffic: the least if the speed allows it, else with local shards as a
    tie-break.
    """
    fastest: tuple[Load, ...] | None = None
    rate, ceiling = 0.0, problem.shared.max_steps_per_s
    at, halve = 0.0, False
    while fastest is None or rate * (1 + SLACK) < ceiling:
        found = best_at(problem, view, at, STEPS, deadline)
        loads = () if found is None or found.value < at else problem.tree.loads(found)
        reached = rate_of(problem, view, loads) if loads else 0.0
        if found is not None and reached > rate:
            fastest, rate, ceiling = loads, reached, min(ceiling, found.value)
        else:
            ceiling = at
        if fastest is None:
            return None
        # A rate just above the best usually proves it; every other step bisects, to limit the number of tables.
        at = (rate + ceiling) / 2 if halve and math.isfinite(ceiling) else rate * (1 + SLACK)
        halve = not halve
    kept = rate * (1 - SLACK)
    for worth in (LOCAL, *(Worth(1.0, share) for share in TIE_BREAKS)):
        found = best_at(problem, view, kept, worth, deadline)
        loads = fastest if found is None else problem.tree.loads(found)
        if rate_of(problem, view, loads) >= kept:
            return loads
    return fastest


def rate_of(problem: RackProblem, view: View, loads: Sequence[Load]) -> float:
    """Steps/s of all workers in a placement, with the view's first shards."""
    held = [view.settings[load.machine_type][load.state[:-1]].shards[0] for load in loads]
    racks = np.array([load.rack for load in loads])
    arrays = PlacementArrays(
        np.array([each.steps_per_s * load.state[-1] for each, load in zip(held, loads, strict=True)]),
        np.array([each.bytes for each in held], dtype=np.float64),
        np.array([problem.tree.machine_types[load.machine_type].card for load in loads]),
        problem.shared,
        racks=[np.flatnonzero(racks == rack) for rack in np.unique(racks)],
    )
    return float(total_rates(arrays))


def _goal(problem: RackProblem, view: View) -> Tasks:
    return (int(problem.needs_chief), *map(len, view.classes), problem.workers)


def _tables(
    problem: RackProblem, view: View, steps_per_s: float, value: Callable[[MachineSetting, Floats], Floats]
) -> list[Table]:
    """Values of the states, by machine type; -inf if the card cannot keep up with that rate of all workers.

    `steps_per_s`: steps of all workers together. `value`: converts a setting and its maximum steps/s by shard and
    number of workers (-inf if impossible) to values by number of workers.
    """
    tables = []
    for machine_type, settings in zip(problem.tree.machine_types, view.settings, strict=True):
        most = max(len(setting.network_s) for setting in settings.values())
        shape = [max(counts) + 1 for counts in zip(*settings, strict=True)]
        table: Table = np.full((*shape, most), -np.inf)
        for state, setting in settings.items():
            with np.errstate(divide="ignore"):
                own = np.minimum(setting.own_rates, problem.shared.within / (2 * setting.sizes))
            highs = high_ends(own, setting.sizes, machine_type.card, problem.shared.total_bytes, steps_per_s)
            table[state][: highs.shape[1]] = value(setting, highs)
        tables.append(table)
    return tables
