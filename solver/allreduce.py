"""Time of a synchronous step of a gang: equal workers that share each batch and sum their gradients by a ring.

docs/planner.md, 'All-reduce'. A ring sends 2 (n - 1) / n of the bytes over each link, the least that is possible
(Patarasuk and Yuan, JPDC 2009); Horovod (Sergeev and Del Balso, 2018) trains so. Workers are numbered machine by
machine and rack by rack, so each network card and each uplink carries one stream in and one out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.scenario import Scenario
from solver.step_time import StepModel, StepTime
from solver.units import BYTES_PER_S_PER_GBPS

SMALL_EXCHANGES = 1
"""Small exchanges of every step: the sums of the metrics."""
EXCHANGES_PER_SYNCED_LAYER = 2
"""Small exchanges of a layer with statistics of the batch: one forward, one backward."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GangModel:
    """Step times of gangs of one model with workers of one shape.

    Numbers of workers may be arrays; then so are the results.
    """

    model: StepModel

    def compute_s(self, kind: NodeKind, workers: Ints) -> Floats:
        """Seconds in which a worker on that kind of machine computes the largest part of a batch."""
        batch = self.model.profile.batch_size
        seconds: Floats = self.model.arithmetic_s(kind) * np.ceil(batch / workers) / batch
        return seconds

    @property
    def latency_s(self) -> float:
        """Constant seconds of a step: Python's own share, and what a gang adds to it without any exchange."""
        plain_s = self.model.hardware.apis[self.model.profile.api].plain_s or 0.0
        return self.model.python_s(plain_s + self.model.hardware.ring_step_s)

    def network_s(self, workers: Ints, link_bytes_per_s: Floats | float) -> Floats:
        """Seconds of all exchanges of a step over links of which the slowest has that speed."""
        profile, hardware = self.model.profile, self.model.hardware
        if not self.model.shape.gpus:
            # GPUs exchange by NCCL, which takes no time of the CPUs.
            link_bytes_per_s = np.minimum(link_bytes_per_s, hardware.ring_bytes_per_core_s * self.model.shape.cpus)
        exchanges = 1 + SMALL_EXCHANGES + EXCHANGES_PER_SYNCED_LAYER * profile.synced_layers
        hop_s = hardware.nccl_hop_s if self.model.shape.gpus else self.model.python_s(hardware.ring_hop_s)
        hops_s = exchanges * 2 * (workers - 1) * hop_s
        seconds: Floats = 2 * (workers - 1) / workers * profile.parameter_bytes / link_bytes_per_s + hops_s
        return seconds

    def total_s(self, compute_s: Floats, network_s: Floats) -> Floats:
        """Seconds of a step. Each worker prepares whole batches; GPUs compute meanwhile."""
        input_s = self.model.input_s
        busy_s = np.maximum(compute_s, input_s) if self.model.shape.gpus else compute_s + input_s
        seconds: Floats = busy_s + self.latency_s + network_s
        return seconds


def steps_on(model: StepModel, kind: NodeKind, room: int, max_workers: int) -> Floats:
    """Seconds of a step with 1 to `max_workers` workers on the fewest machines of a kind; one worker is one task.

    `room`: maximum workers on a machine.
    """
    gang, workers = GangModel(model), np.arange(1, max_workers + 1)
    within, card = model.within_node_bytes_per_s, kind.network_bytes_per_s
    link = np.where(workers <= room, within, min(card, within) if room > 1 else card)
    seconds: Floats = gang.total_s(gang.compute_s(kind, workers), gang.network_s(workers, link))
    seconds[0] -= model.python_s(model.hardware.ring_step_s)
    return seconds


def slowest_link(scenario: Scenario, workers_on: Mapping[str, int]) -> float:
    """Bytes/s of the slowest link of a ring, with that number of workers on each machine; infinite for one worker."""
    links = [math.inf]
    if max(workers_on.values()) > 1:
        links.append(scenario.cluster.within_node_gbps * BYTES_PER_S_PER_GBPS)
    if len(workers_on) > 1:
        kinds = [scenario.kind_of[name] for name in workers_on]
        links += [kind.network_bytes_per_s for kind in kinds]
        if len({kind.rack for kind in kinds}) > 1:
            links.append(scenario.uplink_bytes_per_s)
    return min(links)


def gang_step(scenario: Scenario, model: StepModel, workers_on: Mapping[str, int]) -> StepTime:
    """Predicts the step of a gang.

    Args:
        scenario: the model on the cluster.
        model: its step times with the shape of the workers.
        workers_on: number of workers on each machine, above 0; two workers at least.
    """
    gang, count = GangModel(model), np.array(sum(workers_on.values()))
    compute_s = np.max([gang.compute_s(scenario.kind_of[name], count) for name in workers_on])
    network_s = gang.network_s(count, slowest_link(scenario, workers_on))
    return StepTime(
        compute=float(compute_s),
        input=model.input_s,
        latency=gang.latency_s,
        transfer=0.0,
        network=float(network_s),
        update=0.0,
        dispatch=0.0,
        total=float(gang.total_s(compute_s, network_s)),
    )
