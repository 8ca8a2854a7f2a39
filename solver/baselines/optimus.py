"""Optimus' placement: the fewest servers that hold the job in equal parts."""

from __future__ import annotations

import numpy as np

from solver.baselines.filling import amounts
from solver.baselines.setting import EQUAL, Choice, On, Setting
from solver.baselines.speeds import prefix_speeds
from solver.resources import WorkerShape
from solver.rooms import Ints
from solver.shards import Shards, useful_ps_count


def optimus(setting: Setting) -> Choice:
    """Places as Optimus does (Peng et al., EuroSys 2018, section 4.3), with the best counts under that placement.

    Optimus sorts the servers by what is free on them, most first, and takes the first k with the smallest k for which
    each of them can have the same number of workers and the same number of parameter servers (theorem 1: on servers
    that are alike this moves least bytes between them); what does not divide evenly gives the first ones one more. It
    sorts by CPUs; here GPUs come before CPUs where workers need them. The chief, which Optimus does not have, is on the
    first machine with room.

    Counts: Optimus adds workers and parameter servers by marginal gain while jobs compete (section 4.2), by a fitted
    speed function that does not know placements. Here one job is alone, so it gets the fastest counts and the fastest
    size of worker that the step-time model finds under this placement: the best that marginal gain could arrive at.

    Raises:
        InfeasibleError: if not even one worker fits.
    """
    free, chief = setting.free_beside_chief()
    most_ps = useful_ps_count(setting.scenario.profile, setting.most_ps, setting.scenario.sharding)
    best, compared = 0.0, 0
    found: tuple[WorkerShape, int, On] | None = None
    for shape in setting.shapes:
        servers = _servers(setting, shape, free)
        for ps in range(1, most_ps + 1):
            shards = setting.scenario.shards(ps)
            reached = 0
            for used in range(1, len(servers) + 1):
                placed = _equal_parts(setting, shape, shards, free, servers[:used])
                if placed is None:
                    continue
                ps_on, workers_on = placed
                workers_on = workers_on[: setting.at_most(len(workers_on))]
                if len(workers_on) <= reached:
                    continue
                # Fewer workers fit on fewer servers.
                speeds = prefix_speeds(setting, shape, shards, ps_on, workers_on)[reached:]
                compared += len(speeds)
                fastest = int(speeds.argmax())
                if speeds[fastest] > best * (1 + EQUAL):
                    on = On(ps_on, workers_on[: reached + fastest + 1], chief)
                    best, found = float(speeds[fastest]), (shape, ps, on)
                reached = len(workers_on)
    if found is None:
        raise setting.no_room("optimus", setting.shapes[0])
    return setting.choice(*found, compared)


def _servers(setting: Setting, shape: WorkerShape, free: Ints) -> Ints:
    """The machines that hold workers, most free first."""
    order = np.lexsort((-free[:, 0], -free[:, 3] if shape.gpus else np.zeros(len(free))))
    hosts: Ints = order[setting.worker_rooms(shape, free)[order] > 0]
    return hosts


def _equal_parts(
    setting: Setting, shape: WorkerShape, shards: Shards, free: Ints, servers: Ints
) -> tuple[Ints, Ints] | None:
    """Machine of each ps, and of each worker up to the most that fit in equal parts; None if the ps do not fit."""
    left = free.copy()
    turns = servers[np.arange(len(shards.sizes)) % len(servers)]
    np.subtract.at(left, turns, [amounts(task) for task in setting.ps_tasks(shards)])
    if left.min() < 0:
        return None
    rooms = setting.worker_rooms(shape, left)[servers]
    # The machine in place i of k takes worker i, i + k, ...; the first that cannot ends the list.
    most = int((rooms * len(servers) + np.arange(len(servers))).min())
    return turns, servers[np.arange(most) % len(servers)]
