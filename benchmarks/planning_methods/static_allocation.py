"""Static allocation with the best sizes and counts: the tuned one of the paper 'Dike' (section 4)."""

from __future__ import annotations

import numpy as np

from solver.baselines.by_hand import next_machine
from solver.baselines.filling import fill_in_rotation, machines_in_rotation
from solver.baselines.setting import SPEED_TOLERANCE, BaselineChoice, MachineIndices, Setting
from solver.baselines.speeds import Speeds, samples_per_s
from solver.capacity import Ints
from solver.rate_arrays import Floats, PlacementArrays, total_rates
from solver.resources import WorkerShape
from solver.shards import Shards, useful_ps_count

CELLS = 1 << 19
"""Placements x groups of machines per batch."""


def sar_tuned(setting: Setting) -> BaselineChoice:
    """Chooses the fastest option with its tasks placed round-robin.

    Our reading of the paper 'Dike' (section 4): worker size and numbers of workers and ps are the best by the step-time
    model; the placement is not tuned. Numbers of ps that do not shrink the largest shard are skipped.

    Raises:
        InfeasibleError: if not even one worker fits.
    """
    free, chief = setting.free_beside_chief()
    most_ps = useful_ps_count(setting.scenario.profile, setting.max_ps, setting.scenario.sharding)
    speeds_of = {shape: PrefixSpeeds(setting, shape) for shape in setting.shapes}
    best, compared = 0.0, 0
    found: tuple[WorkerShape, int, MachineIndices] | None = None
    for ps in range(1, most_ps + 1):
        shards = setting.scenario.shards(ps)
        placed = fill_in_rotation(free, setting.ps_tasks(shards))
        if placed is None:
            continue
        ps_on, left = placed
        for shape in setting.shapes:
            turns = machines_in_rotation(setting.worker_capacity(shape, left), next_machine(ps_on, len(setting.names)))
            turns = turns[: setting.cap_workers(len(turns))]
            if not len(turns):
                continue
            compared += len(turns)
            speeds = speeds_of[shape].of_prefixes(shards, ps_on, turns, best)
            fastest = int(speeds.argmax())
            if speeds[fastest] > best * (1 + SPEED_TOLERANCE):
                best, found = float(speeds[fastest]), (shape, ps, MachineIndices(ps_on, turns[: fastest + 1], chief))
    if found is None:
        raise setting.no_room_error("sar_tuned", setting.shapes[0])
    return setting.choice(*found, compared)


class PrefixSpeeds(Speeds):
    def of_prefixes(self, shards: Shards, ps_on: Ints, workers_on: Ints, least: float = 0.0) -> Floats:
        """Returns the speeds with the first worker, the first two, and so on.

        Args:
            shards: what each ps stores.
            ps_on: machine of each ps.
            workers_on: machine of each worker.
            least: slower ones get any speed between their own and this.
        """
        if not self._model.profile.synchronous:
            return self._of_asynchronous_prefixes(shards, ps_on, workers_on, least)
        model, card = self._model, self._card
        total, counts = model.total_bytes, np.arange(1, len(workers_on) + 1)
        local = np.bincount(ps_on, weights=shards.sizes, minlength=len(card)).astype(np.float64)
        here, beside = _occurrences(workers_on), local[workers_on]
        busy = 2 * np.maximum(here * (total - beside) / card[workers_on], here * beside / model.within_node_bytes_per_s)
        network = np.maximum.accumulate(busy)
        for machine in np.flatnonzero(local):
            away = counts - np.cumsum(workers_on == machine)
            network = np.maximum(network, 2 * local[machine] * away / card[machine])
        if self._uplink is not None:
            for rack in np.unique(self._racks):
                stored, near = local[self._racks == rack].sum(), np.cumsum(self._racks[workers_on] == rack)
                crossing = np.maximum(stored * (counts - near), near * (total - stored))
                network = np.maximum(network, 2 * crossing / self._uplink)
        work = np.maximum.accumulate(self._work[workers_on])
        return samples_per_s(model, work, network, model.load(shards), counts)

    def _of_asynchronous_prefixes(self, shards: Shards, ps_on: Ints, workers_on: Ints, least: float) -> Floats:
        """As `of_prefixes`; groups equal machines with equally many workers."""
        local: Floats = np.bincount(ps_on, weights=shards.sizes, minlength=len(self._card)).astype(np.float64)
        here = _occurrences(workers_on)
        racks = np.unique(self._racks, return_inverse=True)[1] * (self._uplink is not None)
        _, example, alike = np.unique(
            np.stack([self._card, self._work, local, racks]), axis=1, return_index=True, return_inverse=True
        )
        most: Ints = np.zeros(int(alike.max()) + 1, dtype=np.int64)
        np.maximum.at(most, alike[workers_on], here)
        # A column for each class of machines and number of workers on them.
        first = np.cumsum(most + 1) - most - 1
        columns = first[alike]
        held: Ints = np.bincount(columns, minlength=int(first[-1] + most[-1]) + 1)
        machines = np.repeat(example, most + 1)
        workers = np.arange(len(held)) - np.repeat(first, most + 1)
        own = workers / self._rounds_s(machines, local[machines])
        stored, cards, shared = local[machines], self._card[machines], self._shared(shards)
        members = self._racks_of(machines)
        speeds = []
        step = max(1, CELLS // len(held))
        for start in range(0, len(workers_on), step):
            end = min(start + step, len(workers_on))
            now = columns[workers_on[start:end]] + here[start:end]
            changes: Ints = np.zeros((end - start, len(held)), dtype=np.int64)
            rows = np.arange(end - start)
            changes[rows, now] = 1
            changes[rows, now - 1] = -1
            counts = held + np.cumsum(changes, axis=0)
            held = counts[-1]
            placements = PlacementArrays(own, stored, cards, shared, counts, members)
            speeds.append(total_rates(placements, least / self._model.samples_per_step))
        return np.concatenate(speeds) * self._model.samples_per_step


def _occurrences(values: Ints) -> Ints:
    """For each element, how often its value has occurred so far, itself included."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - first + 1
    return ranks
