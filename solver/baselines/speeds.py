"""`solver.evaluation.evaluate` for many placements at once: the step time as array arithmetic."""

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


def card_s(
    model: StepModel, bytes_per_s: Floats | float, local_bytes: Floats, workers: Ints, all_workers: Ints
) -> Floats:
    """`StepModel.network_s`, elementwise, for a network card's speed instead of a machine's kind."""
    sent, received = local_bytes * (all_workers - workers), workers * (model.total_bytes - local_bytes)
    inside = 2 * local_bytes * workers / model.within_node_bytes_per_s
    return np.maximum(2 * np.maximum(sent, received) / bytes_per_s, inside)


def samples_per_s(model: StepModel, work_s: Floats, network_s: Floats, load: float, workers: Ints) -> Floats:
    """Synchronous speed from a round's parts, elementwise; as `StepModel.round_s`."""
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
        setting: the job and the machines; machine numbers are indices of its `names`.
    """

    def __init__(self, setting: Setting, shape: WorkerShape) -> None:
        kinds, kind_of = setting.scenario.kinds, setting.kind_of
        self._model = setting.scenario.model(shape)
        self._card = np.array([kind.network_bytes_per_s for kind in kinds])[kind_of]
        self._work = np.array([self._model.work_s(kind) for kind in kinds])[kind_of]
        across = setting.scenario.cluster.across_racks_gbps
        self._uplink = None if across is None else across * BYTES_PER_S_PER_GBPS
        self._racks = np.array([kind.rack or "" for kind in kinds])[kind_of]

    def of_rows(self, shards: Shards, machines: Ints, local: Floats, rows: Ints, least: float = 0.0) -> Floats:
        """Speeds of placements.

        Args:
            shards: bytes on each ps.
            machines: those in use.
            local: shard bytes on each of them.
            rows: workers on each of them; each row is a placement.
            least: slower placements may get any speed between their own and this.
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

    def _shared(self, shards: Shards) -> Shared:
        return self._model.shared(self._model.load(shards), np.inf if self._uplink is None else self._uplink)

    def _racks_of(self, machines: Ints) -> list[Ints]:
        """For each rack, positions of its machines in this list; empty if racks do not matter."""
        if self._uplink is None:
            return []
        racks = self._racks[machines]
        return [np.flatnonzero(racks == rack) for rack in np.unique(racks)]

    def _rounds_s(self, machines: Ints, local: Floats) -> Floats:
        """A worker's own round on these machines, which hold all ps. Transfer as in `StepModel.transfer_s`."""
        cards = self._card[machines]
        waited = waits_s(local, cards, float((local / cards).max()))
        remote = 2 * np.maximum((self._model.total_bytes - local) / cards, waited)
        return self._work[machines] + remote + 2 * local / self._model.within_node_bytes_per_s
