"""Allocation by rules of thumb: fixed sizes and counts, machines in rotation or in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from solver.baselines.filling import fill_first, fill_in_rotation, machines_in_rotation
from solver.baselines.setting import BaselineChoice, MachineIndices, Setting
from solver.capacity import Ints
from solver.resources import TaskResources

WORKERS_PER_PS = 4

_Fill = Callable[[Ints, Sequence[TaskResources]], tuple[Ints, Ints] | None]


def sar_basic(setting: Setting) -> BaselineChoice:
    """Static allocation with default values: every task gets the same slice of a machine, machines in rotation.

    The paper 'Dike' (section 4) compares with SAR_Basic and SAR_Tuned without their rules. Our reading of the basic
    one: worker and ps get the same CPUs, an eighth of the largest machine's and at most 1, and each worker one GPU if
    there are any; one ps for 4 workers (the last one for the remainder); as many workers as fit. The chief comes first,
    on the first machine with room, then the parameter servers and the workers in rotation.

    Raises:
        InfeasibleError: if not even one worker fits.
    """
    free, chief = setting.free_beside_chief()
    ps, ps_on, left, workers = _place_most_workers(setting, "sar_basic", free, fill_in_rotation)
    turns = machines_in_rotation(setting.worker_capacity(setting.slice, left), next_machine(ps_on, len(setting.names)))
    return setting.choice(setting.slice, ps, MachineIndices(ps_on, turns[:workers], chief), 1)


def first_fit(setting: Setting) -> BaselineChoice:
    """Places like tfmesos: each task takes the first offer with room, parameter servers first, then workers.

    tfmesos (github.com/douban/tfmesos, `scheduler.py`, `resourceOffers`) iterates over the offers and gives each every
    task that fits, in the order of the job's description. Its user sets counts and sizes; here they are those of
    `sar_basic`, as many as fit this way (`max_workers` for fewer). The chief, which tfmesos does not have, comes first.

    Raises:
        InfeasibleError: if not even one worker fits.
    """
    free, chief = setting.free_beside_chief()
    ps, ps_on, left, workers = _place_most_workers(setting, "first_fit", free, fill_first)
    rooms = setting.worker_capacity(setting.slice, left)
    in_order = np.repeat(np.arange(len(rooms)), rooms)[:workers]
    return setting.choice(setting.slice, ps, MachineIndices(ps_on, in_order, chief), 1)


def next_machine(ps_on: Ints, machines: int) -> int:
    return (int(ps_on[-1]) + 1) % machines


def _place_most_workers(setting: Setting, method: str, free: Ints, fill: _Fill) -> tuple[int, Ints, Ints, int]:
    """Finds the largest job that fits: parameter servers, their machines, remaining resources, and workers."""
    shape = setting.slice
    limit = setting.cap_workers(int(setting.worker_capacity(shape, free).sum()))
    most_ps = min(max(1, len(setting.scenario.profile.variables)), math.ceil(limit / WORKERS_PER_PS))
    for ps in range(most_ps, 0, -1):
        placed = fill(free, setting.ps_tasks(setting.scenario.shards(ps)))
        if placed is None:
            continue
        ps_on, left = placed
        # Where there are more workers than variables for a ps each, the last number of ps serves all.
        workers = min(limit, int(setting.worker_capacity(shape, left).sum()))
        workers = workers if ps == most_ps else min(workers, WORKERS_PER_PS * ps)
        if workers > WORKERS_PER_PS * (ps - 1):
            return ps, ps_on, left, workers
    raise setting.no_room_error(method, shape)
