"""Optimus' placement: the fewest servers that hold the job in equal parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.baselines.filling import capacity_for
from solver.baselines.setting import SPEED_TOLERANCE, BaselineChoice, MachineIndices, Setting
from solver.baselines.speeds import Speeds
from solver.capacity import Ints
from solver.resources import TaskResources, WorkerShape
from solver.shards import useful_ps_count


def optimus(setting: Setting) -> BaselineChoice:
    """Places as Optimus does (Peng et al., EuroSys 2018, section 4.3), with the best counts under that placement.

    Optimus sorts the servers by free resources, most first, and takes the first k with the smallest k for which each of
    them can have the same number of workers and of parameter servers (theorem 1: on identical servers this moves the
    fewest bytes between them); a remainder gives the first ones one more. It sorts by CPUs; here GPUs come before CPUs
    if workers need them. The chief, which Optimus does not have, is on the first machine with room.

    Counts: Optimus adds workers and parameter servers by marginal gain while jobs compete (section 4.2), using a fitted
    speed function that is independent of placement. Here one job is alone, so it gets the fastest counts and worker
    size that the step-time model finds under this placement: the best that marginal gain could reach.

    Raises:
        InfeasibleError: if not even one worker fits.
    """
    free, chief = setting.free_beside_chief()
    most_ps = useful_ps_count(setting.scenario.profile, setting.max_ps, setting.scenario.sharding)
    best, compared = 0.0, 0
    found: tuple[WorkerShape, int, MachineIndices] | None = None
    for shape in setting.shapes:
        servers = _Servers.of(setting, shape, free)
        speeds_of = Speeds(setting, shape)
        for ps in range(1, most_ps + 1):
            shards = setting.scenario.shards(ps)
            tasks = np.array([task.amounts for task in setting.ps_tasks(shards)])
            reached = 0
            for used in range(1, len(servers.machines) + 1):
                # Fewer workers fit on fewer servers.
                counts = np.arange(reached + 1, setting.cap_workers(servers.most_workers(tasks, used)) + 1)
                if not len(counts):
                    continue
                reached = int(counts[-1])
                local = np.bincount(np.arange(ps) % used, shards.sizes, minlength=used).astype(np.float64)
                rows = counts[:, None] // used + (np.arange(used) < counts[:, None] % used)
                speeds = speeds_of.of_rows(shards, servers.machines[:used], local, rows, best)
                compared += len(speeds)
                fastest = int(speeds.argmax())
                if speeds[fastest] > best * (1 + SPEED_TOLERANCE):
                    best = float(speeds[fastest])
                    ps_on, workers_on = (servers.machines[np.arange(n) % used] for n in (ps, counts[fastest]))
                    found = shape, ps, MachineIndices(ps_on, workers_on, chief)
    if found is None:
        raise setting.no_room_error("optimus", setting.shapes[0])
    return setting.choice(*found, compared)


@dataclass(frozen=True)
class _Servers:
    """The machines that can hold workers, those with the most free resources first.

    Attributes:
        machines: indices of the setting's.
        rooms: number of workers that fit on each.
    """

    machines: Ints
    free: Ints
    rooms: Ints
    worker: TaskResources

    @classmethod
    def of(cls, setting: Setting, shape: WorkerShape, free: Ints) -> _Servers:
        rooms = setting.worker_capacity(shape, free)
        order = np.lexsort((-free[:, 0], -free[:, 3] if shape.gpus else np.zeros(len(free))))
        order = order[rooms[order] > 0]
        return cls(order, free[order], rooms[order], setting.scenario.sizes.worker(shape))

    def most_workers(self, ps: Ints, used: int) -> int:
        """Maximum workers that the first `used` machines hold in equal parts beside the ps; 0 if those do not fit."""
        with_ps = min(len(ps), used)
        left = self.free[:with_ps].copy()
        np.subtract.at(left, np.arange(len(ps)) % used, ps)
        if left.min() < 0:
            return 0
        rooms = np.r_[capacity_for(left, self.worker), self.rooms[with_ps:used]]
        # Machine i of k takes workers i, i + k, ...; the first that cannot ends the count.
        return int((rooms * used + np.arange(used)).min())
