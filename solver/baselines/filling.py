"""Places tasks one by one, as schedulers without lookahead do.

Free resources are an array of machines x (CPU thousandths, MiB of memory, MiB of disk, GPUs).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver.capacity import Ints
from solver.resources import TaskResources


def capacity_for(free: Ints, task: TaskResources) -> Ints:
    need = np.array(task.amounts)
    rooms: Ints = (free[:, need > 0] // need[need > 0]).min(axis=1)
    return rooms


def fill_first(free: Ints, tasks: Sequence[TaskResources]) -> tuple[Ints, Ints] | None:
    """Places each task on the first machine with room.

    Returns:
        Machine of each task and the remaining resources; None if a task does not fit.
    """
    return _fill(free, tasks, in_rotation=False)


def fill_in_rotation(free: Ints, tasks: Sequence[TaskResources]) -> tuple[Ints, Ints] | None:
    """Places the tasks on the machines in rotation, skipping those without room. Returns as `fill_first`."""
    return _fill(free, tasks, in_rotation=True)


def machines_in_rotation(rooms: Ints, start: int = 0) -> Ints:
    """Machines of workers placed in rotation until all machines are full; full ones are skipped.

    Args:
        rooms: number of workers that fit on each machine.
        start: the first machine.
    """
    order = np.roll(np.arange(len(rooms)), -start)
    rounds = [order[rooms[order] > turn] for turn in range(int(rooms.max()))]
    return np.concatenate(rounds) if rounds else np.empty(0, dtype=np.int64)


def _fill(free: Ints, tasks: Sequence[TaskResources], *, in_rotation: bool) -> tuple[Ints, Ints] | None:
    free = free.copy()
    machines = np.empty(len(tasks), dtype=np.int64)
    turn = 0
    for index, task in enumerate(tasks):
        need = np.array(task.amounts)
        fits = np.roll((free >= need).all(axis=1), -turn)
        if not fits.any():
            return None
        machine = (turn + int(fits.argmax())) % len(free)
        machines[index] = machine
        free[machine] -= need
        if in_rotation:
            turn = machine + 1
    return machines, free
