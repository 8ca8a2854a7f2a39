"""Names for the machines of a relaxed optimum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from solver.placement.naming import Assignment
from solver.resources import TaskResources, WorkerShape
from solver.search.machines import NO_RESOURCES, MachineArrays
from solver.search.optimum import RelaxedOptimum, State
from solver.search.space import Space

MAX_UNTRIMMED_WORKERS = 1000
"""Number of workers above which superfluous machines are removed before rating."""
SPARE_STEPS_FACTOR = 3.0
"""Machines are examined for this many times the steps required."""


def assign_machines(space: Space, arrays: MachineArrays, found: RelaxedOptimum, most: int) -> Assignment | None:
    """Assigns names.

    Returns:
        The machine of each task, with each worker's shape; None if the tasks do not fit with their real sizes.
    """
    scenario, sizes, kinds = space.scenario, space.scenario.sizes, space.scenario.kinds
    of_kind = [iter(kind.names) for kind in kinds]
    # The machines with the chief and the largest shard are named before the others of their kinds.
    special = {i: iter([next(of_kind[row.kind])]) for i, row in enumerate(arrays.rows) if row.chief or row.largest}
    names_of = [
        special.get(i) or itertools.chain.from_iterable(of_kind[kind] for kind in row.kinds or (row.kind,))
        for i, row in enumerate(arrays.rows)
    ]
    slots: list[tuple[str, int, int]] = []
    workers: list[tuple[bool, float, str, WorkerShape]] = []
    idle: list[tuple[str, State]] = []
    chief = largest = None
    for state in found.states:
        row = arrays.rows[state.row]
        for _ in range(state.machines):
            name = next(names_of[state.row])
            if not state.workers:
                idle.append((name, state))
            if not (state.ps or state.workers or row.chief or row.largest):
                continue
            chief = name if row.chief else chief
            largest = name if row.largest else largest
            slots.append((name, state.ps, state.workers))
            if state.workers:
                choice = state.choice % len(arrays.samples)
                shape = _shape(space, arrays, state, choice)
                beside = state.ps > 0 or row.largest
                workers += [(beside, float(arrays.samples[choice]), name, shape)] * state.workers
    if not workers or sum(ps for _, ps, _ in slots) != arrays.ps:
        return None
    if len(workers) > most:
        workers = sorted(workers, key=lambda entry: (-entry[1], not entry[0]))[:most]
    elif arrays.are_few and not scenario.profile.synchronous:
        workers += _workers_on_idle_machines(space, arrays, idle, most - len(workers))
    # The larger shards go to machines with more workers.
    by_workers = sorted((slot for slot in slots if slot[1]), key=lambda slot: -slot[2])
    of_ps = (*([] if largest is None else [largest]), *(name for name, _, _ in by_workers))
    shards = scenario.shards(len(of_ps))
    on = tuple(name for _, _, name, _ in workers)
    shapes = tuple(shape for _, _, _, shape in workers)
    tasks: dict[str, list[TaskResources]] = {}
    for name, size in zip(of_ps, shards.sizes, strict=True):
        tasks.setdefault(name, []).append(sizes.ps(size))
    if chief is not None and sizes.chief is not None:
        tasks.setdefault(chief, []).append(sizes.chief)
    for name, shape in zip(on, shapes, strict=True):
        tasks.setdefault(name, []).append(sizes.worker(shape))
    kind_of = scenario.kind_of
    if any(kind_of[name].room_for(NO_RESOURCES, here) < 0 for name, here in tasks.items()):
        return None
    return Assignment(of_ps, on, chief, shapes)


def _workers_on_idle_machines(
    space: Space, arrays: MachineArrays, idle: Sequence[tuple[str, State]], left: int
) -> Iterator[tuple[bool, float, str, WorkerShape]]:
    """Adds workers on machines without any: a price for each worker may leave fewer of them than allowed.

    `idle`: names of those without workers, and their states. `left`: maximum workers.
    """
    made = []
    for name, state in idle:
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.nan_to_num(arrays.samples / arrays.work[state.row, state.ps])
        room = arrays.room[state.row, state.ps]
        choice = int((np.minimum(room, left) * each).argmax()) if len(room) else 0
        if len(room) and room[choice]:
            made.append((float(each[choice]), name, state, choice, int(room[choice])))
    for _, name, state, choice, room in sorted(made, key=lambda entry: -entry[0]):
        here = min(room, left)
        left -= here
        beside = state.ps > 0 or arrays.rows[state.row].largest
        yield from [(beside, float(arrays.samples[choice]), name, _shape(space, arrays, state, choice))] * here


def _shape(space: Space, arrays: MachineArrays, state: State, choice: int) -> WorkerShape:
    if choice >= len(space.gpu_shapes):
        return WorkerShape(0, float(arrays.cpus[state.row, state.ps, choice]))
    return space.gpu_shapes[choice]


def trim_machines(arrays: MachineArrays, found: RelaxedOptimum, steps_per_s: float) -> RelaxedOptimum:
    """With many workers: keeps the machines with ps, and the fastest others for the steps required and some spare."""
    if found.workers <= MAX_UNTRIMMED_WORKERS:
        return found
    rows, ps, machines = found.numbers
    own = found.each(found.made)
    special = np.array([row.chief or row.largest for row in arrays.rows])
    needed = (ps > 0) | special[rows]
    worth = found.worth[rows, ps, found.choices]
    order = np.lexsort((-worth, ~needed))
    own, machines, needed = own[order], machines[order], needed[order]
    made = np.cumsum(own * machines) - own * machines
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.ceil(np.maximum(0.0, steps_per_s * SPARE_STEPS_FACTOR - made) / own)
    kept = np.where(needed, machines, np.minimum(machines, np.where(own > 0, wanted, 0))).astype(np.int64)
    kept_rows = kept > 0
    return replace(found, numbers=(rows[order][kept_rows], ps[order][kept_rows], kept[kept_rows]))
