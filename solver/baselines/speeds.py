"""`solver.evaluation.evaluate` for many placements at once: the step time as arithmetic on arrays."""

from __future__ import annotations

import numpy as np

from solver.async_rates import Shared
from solver.baselines.setting import Setting
from solver.capacity import Ints
from solver.rate_arrays import Floats, PlacementArrays, total_rates, waits_s
from solver.resources import WorkerShape
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS

CELLS = 1 << 19
"""Placements x groups of machines looked at in one go."""


def card_s(
    model: StepModel, bytes_per_s: Floats | float, local_bytes: Floats, workers: Ints, all_workers: Ints
) -> Floats:
    """`StepModel.network_s`, elementwise, with the network card's speed in place of the kind of machine."""
    sent, received = local_bytes * (all_workers - workers), workers * (model.total_bytes - local_bytes)
    inside = 2 * local_bytes * workers / model.within_node_bytes_per_s
    return np.maximum(2 * np.maximum(sent, received) / bytes_per_s, inside)


def samples_per_s(model: StepModel, work_s: Floats, network_s: Floats, load: float, workers: Ints) -> Floats:
    """Synchronous speed from a round's parts, elementwise; as `StepModel.round_s`.

    Args:
        model: step times.
        work_s: the slowest worker's work.
        network_s: busiest network card or uplink.
        load: of the busiest ps (`StepModel.load`).
        workers: workers of the job.
    """
    update, dispatch = workers * model.update_s(load, 1), workers * model.dispatch_s(1)
    if model.overlap:
        round_s = np.maximum(work_s, network_s + update + dispatch)
    else:
        round_s = work_s + network_s + update + dispatch
    speed: Floats = workers * model.samples_per_step / round_s
    return speed


class Speeds:
    """Speeds of placements with workers of one shape.

    Args:
        setting: the job and the machines; all numbers of machines are indices of its `names`.
        shape: what each worker gets.
    """

    def __init__(self, setting: Setting, shape: WorkerShape) -> None:
        kinds, kind_of = setting.scenario.kinds, setting.kind_of
        self._model = setting.scenario.model(shape)
        self._card = np.array([kind.network_bytes_per_s for kind in kinds])[kind_of]
        self._work = np.array([self._model.work_s(kind) for kind in kinds])[kind_of]
        across = setting.scenario.cluster.across_racks_gbps
        self._uplink = None if across is None else across * BYTES_PER_S_PER_GBPS
        self._racks = np.array([kind.rack or "" for kind in kinds])[kind_of]

    def of_prefixes(self, shards: Shards, ps_on: Ints, workers_on: Ints, least: float = 0.0) -> Floats:
        """Speeds with the first of these workers, the first two, and so on.

        Args:
            shards: what each ps holds.
            ps_on: machine of each ps.
            workers_on: machine of each worker.
            least: slower ones are of no interest: some speed between their own and this will do.
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

    def of_rows(self, shards: Shards, machines: Ints, local: Floats, rows: Ints, least: float = 0.0) -> Floats:
        """Speeds with these numbers of workers.

        Args:
            shards: what each ps holds.
            machines: those in use.
            local: shard bytes on each of them.
            rows: workers on each of them; each row is a placement.
            least: as of `of_prefixes`.
        """
        if not self._model.profile.synchronous:
            own = rows / self._rounds_s(machines, local)
            racks = self._racks_of(machines)
            placements = PlacementArrays(own, local, self._card[machines], self._shared(shards), racks=racks)
            return total_rates(placements, least / self._model.samples_per_step) * self._model.samples_per_step
        model, counts = self._model, rows.sum(axis=1)
        network = card_s(model, self._card[machines], local, rows, counts[:, None]).max(axis=1)
        if self._uplink is not None:
            for rack in np.unique(self._racks[machines]):
                inside = self._racks[machines] == rack
                stored, near = local[inside].sum(), rows[:, inside].sum(axis=1)
                crossing = np.maximum(stored * (counts - near), near * (model.total_bytes - stored))
                network = np.maximum(network, 2 * crossing / self._uplink)
        work = np.where(rows > 0, self._work[machines], 0.0).max(axis=1)
        return samples_per_s(model, work, network, model.load(shards), counts)

    def _of_asynchronous_prefixes(self, shards: Shards, ps_on: Ints, workers_on: Ints, least: float) -> Floats:
        """As `of_prefixes`, by numbers of like machines with equally many workers."""
        local: Floats = np.bincount(ps_on, weights=shards.sizes, minlength=len(self._card)).astype(np.float64)
        here = _occurrences(workers_on)
        racks = np.unique(self._racks, return_inverse=True)[1] * (self._uplink is not None)
        _, example, alike = np.unique(
            np.stack([self._card, self._work, local, racks]), axis=1, return_index=True, return_inverse=True
        )
        most: Ints = np.zeros(int(alike.max()) + 1, dtype=np.int64)
        np.maximum.at(most, alike[workers_on], here)
        # A column for each number of workers that machines of a class have at some time.
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

    def _shared(self, shards: Shards) -> Shared:
        return self._model.shared(self._model.load(shards), np.inf if self._uplink is None else self._uplink)

    def _racks_of(self, machines: Ints) -> list[Ints]:
        """The places of each rack's machines in this list; none where racks do not matter."""
        if self._uplink is None:
            return []
        racks = self._racks[machines]
        return [np.flatnonzero(racks == rack) for rack in np.unique(racks)]

    def _rounds_s(self, machines: Ints, local: Floats) -> Floats:
        """A worker's own round on these machines; all ps are among them. Its transfer as `StepModel.transfer_s`."""
        cards = self._card[machines]
        waited = waits_s(local, cards, float((local / cards).max()))
        remote = 2 * np.maximum((self._model.total_bytes - local) / cards, waited)
        return self._work[machines] + remote + 2 * local / self._model.within_node_bytes_per_s


def _occurrences(values: Ints) -> Ints:
    """For each element how often its value has been there up to and including it."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - first + 1
    return ranks
