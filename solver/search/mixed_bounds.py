"""Bounds of an option whose workers may differ between machines (compare solver.search.bounds)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver.capacity import Ints, Machines
from solver.placement.problem import by_gpu_model, hosting
from solver.resources import TaskSizes
from solver.search.async_bounds import StepBounds
from solver.search.bounds import (
    Bounds,
    Floats,
    card_times,
    least_network_s,
    least_traffic,
    most_beside_ps,
    most_local_bytes,
)
from solver.search.scope import Scope
from solver.shards import Shards
from solver.step_time import StepModel


def mixed_bounds(scope: Scope, models: Sequence[StepModel], sizes: TaskSizes, shards: Shards) -> Bounds:
    """Bounds of all options with these shards; network bounds assume the shape of which most fit.

    `models`: step times for each possible shape of a worker.
    """
    counts, machines = scope.counts, scope.machines
    loads = [[], [sizes.ps(shards.sizes[-1])], [sizes.ps(shards.sizes[0])]]
    room = machines.capacity([sizes.worker(model.shape) for model in models], loads)
    hosts = np.array([hosting(machines.kinds, model) for model in models]).T
    room = np.minimum(room, np.where(hosts, scope.max_workers, 0)[:, :, None])
    alone, smallest, largest = room.max(axis=1).T
    slots = int(machines.counts @ alone)
    if not slots:
        return Bounds(np.zeros(len(counts)), np.full(len(counts), np.inf))
    beside_ps = most_beside_ps(scope, smallest, shards)
    local = most_local_bytes(scope, smallest, shards, beside_ps)
    if models[0].profile.synchronous:
        times = card_times(machines, alone, shards.total)
        network = least_network_s(scope, times, alone, largest, shards, beside_ps, local)
        samples = _synchronous(machines, models, room[:, :, 0], shards, counts, network)
    else:
        works = _works(machines, models, room[:, :, 0]).min(axis=1)
        bounds = StepBounds(scope, works, alone, shards.total, models[0].within_node_bytes_per_s)
        steps = bounds.of(shards, smallest, largest, beside_ps)
        steps = np.minimum(steps, models[0].shared(models[0].load(shards)).max_steps_per_s)
        samples = _asynchronous(machines, models, room[:, :, 0], shards, counts, steps)
    samples *= 1 + 1e-9
    samples[counts > slots] = 0.0
    return Bounds(samples, least_traffic(shards, counts, local, samples))


def _works(machines: Machines, models: Sequence[StepModel], room: Ints) -> Floats:
    """Seconds of a step without transfers, by kind and shape; infinite if the shape does not fit."""
    works = np.array([by_gpu_model(machines.kinds, model.work_s) for model in models]).T
    return np.where(room > 0, works, np.inf)


def _synchronous(
    machines: Machines, models: Sequence[StepModel], room: Ints, shards: Shards, counts: Ints, network: Floats
) -> Floats:
    """Maximum samples/s with at least that much time on the network.

    No machine has more samples in a step than workers of its best shape have there, and no worker more than its shape.
    """
    first, works = models[0], _works(machines, models, room)
    samples = np.array([model.samples_per_step for model in models])
    rest = network + counts * (first.update_s(first.load(shards), 1) + first.dispatch_s(1))
    best = np.zeros(len(counts))
    for work in np.unique(works[np.isfinite(works)]):
        within = np.where(works <= work, samples, 0)
        round_s = np.maximum(work, rest) if first.overlap else work + rest
        most = np.minimum(counts * within.max(), machines.counts @ (room * within).max(axis=1))
        best = np.maximum(best, most / round_s)
    return best


def _asynchronous(
    machines: Machines, models: Sequence[StepModel], room: Ints, shards: Shards, counts: Ints, steps: Floats
) -> Floats:
    """Maximum samples/s with at most these steps/s: of the best shape, or each worker's own best."""
    works = _works(machines, models, room)
    samples = np.array([model.samples_per_step for model in models])
    transfer = np.array(
        [[min(m.transfer_s(kind, size) for size in (0, shards.total)) for m in models] for kind in machines.kinds]
    )
    rates = samples / (works + transfer)
    alone = np.minimum(counts * rates.max(), machines.counts @ (room * rates).max(axis=1))
    together: Floats = np.minimum(alone, steps * float(samples[(room > 0).any(axis=0)].max()))
    return together
