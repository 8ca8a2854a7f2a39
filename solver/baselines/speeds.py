"""`solver.evaluation.evaluate` for many placements at once: the step time as arithmetic on arrays."""

from __future__ import annotations

import numpy as np

from solver.baselines.setting import Setting
from solver.bounds import Floats
from solver.resources import WorkerShape
from solver.rooms import Ints
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS


def card_s(
    model: StepModel, bytes_per_s: Floats | float, local_bytes: Floats, workers: Ints, all_workers: Ints
) -> Floats:
    """`StepModel.network_s`, elementwise, with the network card's speed in place of the kind of machine."""
    sent, received = local_bytes * (all_workers - workers), workers * (model.total_bytes - local_bytes)
    inside = 2 * local_bytes * workers / model.within_node_bytes_per_s
    return np.maximum(2 * np.maximum(sent, received) / bytes_per_s, inside)


def samples_per_s(model: StepModel, cycle_s: Floats, network_s: Floats, largest_shard: int, workers: Ints) -> Floats:
    """Speed from a round's parts, elementwise; as `StepModel.round_s`.

    Args:
        model: step times.
        cycle_s: synchronous: the slowest worker's work; asynchronous: mean time of a worker's own round.
        network_s: busiest network card or uplink.
        largest_shard: bytes of the largest shard.
        workers: workers of the job.
    """
    update, dispatch = workers * model.update_s(largest_shard, 1), workers * model.dispatch_s(1)
    if not model.profile.synchronous:
        round_s = np.maximum(np.maximum(cycle_s, network_s), np.maximum(update, dispatch))
    elif model.overlap:
        round_s = np.maximum(cycle_s, network_s + update + dispatch)
    else:
        round_s = cycle_s + network_s + update + dispatch
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

    def of_prefixes(self, shards: Shards, ps_on: Ints, workers_on: Ints) -> Floats:
        """Speeds with the first of these workers, the first two, and so on.

        Args:
            shards: what each ps holds.
            ps_on: machine of each ps.
            workers_on: machine of each worker.
        """
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
        if model.profile.synchronous:
            cycle = np.maximum.accumulate(self._work[workers_on])
        else:
            cycle = counts / np.cumsum(1 / self._rounds_s(workers_on, beside))
        return samples_per_s(model, cycle, network, shards.sizes[0], counts)

    def of_rows(self, shards: Shards, machines: Ints, local: Floats, rows: Ints) -> Floats:
        """Speeds with these numbers of workers.

        Args:
            shards: what each ps holds.
            machines: those in use.
            local: shard bytes on each of them.
            rows: workers on each of them; each row is a placement.
        """
        model, counts = self._model, rows.sum(axis=1)
        network = card_s(model, self._card[machines], local, rows, counts[:, None]).max(axis=1)
        if self._uplink is not None:
            for rack in np.unique(self._racks[machines]):
                inside = self._racks[machines] == rack
                stored, near = local[inside].sum(), rows[:, inside].sum(axis=1)
                crossing = np.maximum(stored * (counts - near), near * (model.total_bytes - stored))
                network = np.maximum(network, 2 * crossing / self._uplink)
        if model.profile.synchronous:
            cycle = np.where(rows > 0, self._work[machines], 0.0).max(axis=1)
        else:
            cycle = counts / (rows / self._rounds_s(machines, local)).sum(axis=1)
        return samples_per_s(model, cycle, network, shards.sizes[0], counts)

    def _rounds_s(self, machines: Ints, local: Floats) -> Floats:
        """A worker's own round on these machines; its transfer as `StepModel.transfer_s`."""
        remote = 2 * (self._model.total_bytes - local) / self._card[machines]
        return self._work[machines] + remote + 2 * local / self._model.within_node_bytes_per_s


def _occurrences(values: Ints) -> Ints:
    """For each element how often its value has been there up to and including it."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - first + 1
    return ranks
