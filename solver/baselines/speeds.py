"""`solver.evaluation.evaluate` for many placements at once: the step time as arithmetic on arrays."""

from __future__ import annotations

import numpy as np

from solver.baselines.setting import Setting
from solver.bounds import Floats
from solver.nodes import NodeKind
from solver.resources import WorkerShape
from solver.rooms import Ints
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS


def card_s(model: StepModel, kind: NodeKind, local_bytes: Floats, workers: Ints, all_workers: Ints) -> Floats:
    """`StepModel.network_s`, elementwise."""
    sent, received = local_bytes * (all_workers - workers), workers * (model.total_bytes - local_bytes)
    inside = 2 * local_bytes * workers / model.within_node_bytes_per_s
    return np.maximum(2 * np.maximum(sent, received) / kind.network_bytes_per_s, inside)


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


def prefix_speeds(setting: Setting, shape: WorkerShape, shards: Shards, ps_on: Ints, workers_on: Ints) -> Floats:
    """Speeds with the first worker of a list, the first two, and so on.

    Args:
        setting: the job and the machines.
        shape: what each worker gets.
        shards: what each ps holds.
        ps_on: machine of each ps, an index of the setting's.
        workers_on: machine of each worker.
    """
    scenario, kind_of = setting.scenario, setting.kind_of
    model = scenario.model(shape)
    total, counts = model.total_bytes, np.arange(1, len(workers_on) + 1)
    local = np.bincount(ps_on, weights=shards.sizes, minlength=len(kind_of))
    card = np.array([kind.network_bytes_per_s for kind in scenario.kinds])[kind_of]
    here, beside = _occurrences(workers_on), local[workers_on]
    busy = 2 * np.maximum(here * (total - beside) / card[workers_on], here * beside / model.within_node_bytes_per_s)
    network = np.maximum.accumulate(busy)
    for machine in np.flatnonzero(local):
        away = counts - np.cumsum(workers_on == machine)
        network = np.maximum(network, 2 * local[machine] * away / card[machine])
    if scenario.cluster.across_racks_gbps is not None:
        uplink = scenario.cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS
        racks = np.array([kind.rack or "" for kind in scenario.kinds])[kind_of]
        for rack in np.unique(racks):
            stored, near = local[racks == rack].sum(), np.cumsum(racks[workers_on] == rack)
            network = np.maximum(network, 2 * np.maximum(stored * (counts - near), near * (total - stored)) / uplink)
    hosts = np.unique(workers_on)
    work = np.zeros(len(kind_of))
    for number in np.unique(kind_of[hosts]):
        work[kind_of == number] = model.work_s(scenario.kinds[number])
    if model.profile.synchronous:
        cycle = np.maximum.accumulate(work[workers_on])
    else:
        # As StepModel.transfer_s.
        transfer = 2 * (total - local) / card + 2 * local / model.within_node_bytes_per_s
        cycle = counts / np.cumsum(1 / (work + transfer)[workers_on])
    return samples_per_s(model, cycle, network, shards.sizes[0], counts)


def _occurrences(values: Ints) -> Ints:
    """For each element how often its value has been there up to and including it."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - first + 1
    return ranks
