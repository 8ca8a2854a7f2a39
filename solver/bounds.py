"""What an option can reach at best, before it is placed: decides which options need placing at all.

Every bound leaves constraints out, so no placement is faster, or has less traffic, than its bound says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.placement.problem import hosts_workers
from solver.resources import TaskSizes
from solver.shards import Shards
from solver.step_time import StepModel
from solver.traffic import weighted_traffic

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Bounds for each number of workers from 1 on, as arrays (index 0 is one worker).

    Attributes:
        samples_per_s: no placement reaches more; 0 where the workers do not fit.
        traffic_bytes: no placement has less of Eq. 1.
    """

    samples_per_s: Floats
    traffic_bytes: Floats


def option_bounds(
    kinds: Sequence[NodeKind],
    model: StepModel,
    sizes: TaskSizes,
    shards: Shards,
    max_workers: int,
    uplink_bytes_per_s: float | None = None,
) -> Bounds:
    """Bounds of all options with this worker shape and these shards.

    Args:
        kinds: the machines.
        model: step times for the worker shape.
        sizes: resources of the roles.
        shards: what each ps holds.
        max_workers: bounds are given for 1 to this many workers.
        uplink_bytes_per_s: speed of each rack's uplink, each way; None where racks do not matter.
    """
    worker = sizes.worker(model.shape)
    rooms = [(kind, min(kind.room_for(worker), max_workers)) for kind in kinds if hosts_workers(kind, model)]
    rooms = [(kind, room) for kind, room in rooms if room > 0]
    counts = np.arange(1, max_workers + 1)
    if not rooms:
        return Bounds(np.zeros(max_workers), np.full(max_workers, np.inf))
    slots = sum(kind.count * room for kind, room in rooms)
    beside_ps = _most_beside_ps(kinds, model, sizes, shards, max_workers)
    network = np.maximum(
        _busiest_ps(kinds, model, sizes, shards, counts), _busiest_workers(rooms, model, counts, beside_ps)
    )
    if uplink_bytes_per_s is not None:
        network = np.maximum(network, _busiest_uplink(kinds, rooms, shards, counts, uplink_bytes_per_s))
    cycle = _cycles(rooms, model, shards, counts, beside_ps)
    largest = shards.sizes[0]
    update = np.array(model.update_s(largest, 1)) * counts
    dispatch = np.array(model.dispatch_s(1)) * counts
    if model.profile.synchronous:
        round_s = cycle + network + update + dispatch
    else:
        round_s = np.maximum.reduce([cycle, network, update, dispatch])
    # Rounding must not turn a bound into something a placement can beat.
    samples = counts * model.samples_per_step / round_s * (1 + 1e-9)
    samples[counts > slots] = 0.0
    local = np.minimum(counts, beside_ps) * float(largest)
    # Each shard has at most the workers of one machine beside it, and together no more than all workers are.
    traffic = counts * weighted_traffic(shards.total, 1, 0.0) + local * weighted_traffic(0, 0, 1.0)
    traffic[samples == 0.0] = np.inf
    return Bounds(samples, traffic)


def _most_beside_ps(
    kinds: Sequence[NodeKind], model: StepModel, sizes: TaskSizes, shards: Shards, max_workers: int
) -> int:
    """Most workers that can share machines with parameter servers."""
    worker, ps = sizes.worker(model.shape), sizes.ps(shards.sizes[-1])
    rooms = sorted(
        ((min(kind.room_for(worker, [ps]), max_workers), kind.count) for kind in kinds if hosts_workers(kind, model)),
        reverse=True,
    )
    left, most = len(shards.sizes), 0
    for room, count in rooms:
        machines = min(left, count)
        most += machines * max(0, room)
        left -= machines
    return min(most, max_workers)


def _busiest_ps(
    kinds: Sequence[NodeKind], model: StepModel, sizes: TaskSizes, shards: Shards, counts: NDArray[np.int64]
) -> Floats:
    """Least network time of the machine that has the largest shard."""
    worker, largest = sizes.worker(model.shape), shards.sizes[0]
    ps = sizes.ps(largest)
    best = np.full(len(counts), np.inf)
    places = {(kind.room_for(worker, [ps]), hosts_workers(kind, model), kind.network_bytes_per_s) for kind in kinds}
    for room, can_work, network_bytes_per_s in sorted(places):
        if room < 0:
            continue
        # What it sends falls and what it receives grows with the workers beside it: the best number is where they
        # meet, or next to it.
        meet = counts * largest // max(1, shards.total)
        for near in (0, 1):
            beside = np.minimum(np.minimum(meet + near, room if can_work else 0), counts)
            sent = largest * (counts - beside)
            received = beside * (shards.total - largest)
            best = np.minimum(best, 2 * np.maximum(sent, received) / network_bytes_per_s)
    return best


def _busiest_workers(
    rooms: Sequence[tuple[NodeKind, int]], model: StepModel, counts: NDArray[np.int64], beside_ps: int
) -> Floats:
    """Least network time of the machines that have workers only, when `beside_ps` workers sit elsewhere."""
    times = np.concatenate(
        [
            np.repeat(2.0 * model.total_bytes * np.arange(1, room + 1) / kind.network_bytes_per_s, kind.count)
            for kind, room in rooms
        ]
    )
    times.sort()
    remote = counts - beside_ps
    index = np.clip(remote - 1, 0, len(times) - 1)
    return np.where(remote > 0, times[index], 0.0)


def _busiest_uplink(
    kinds: Sequence[NodeKind],
    rooms: Sequence[tuple[NodeKind, int]],
    shards: Shards,
    counts: NDArray[np.int64],
    uplink_bytes_per_s: float,
) -> Floats:
    """Least time of the busiest uplink.

    Each byte of each shard goes to every worker outside its rack. Summed over the racks that is at least the size of
    all shards times the workers that the roomiest rack cannot hold, and the busiest rack has at least the mean of it.
    """
    room_of_rack: dict[str | None, int] = {kind.rack: 0 for kind in kinds}
    for kind, room in rooms:
        room_of_rack[kind.rack] += kind.count * room
    outside = np.maximum(0, counts - max(room_of_rack.values()))
    busiest: Floats = 2.0 * shards.total * outside / len(room_of_rack) / uplink_bytes_per_s
    return busiest


def _cycles(
    rooms: Sequence[tuple[NodeKind, int]],
    model: StepModel,
    shards: Shards,
    counts: NDArray[np.int64],
    beside_ps: int,
) -> Floats:
    """Synchronous: least possible work of the slowest worker. Asynchronous: least possible mean round."""
    repeat = [kind.count * room for kind, room in rooms]
    work = np.repeat([model.work_s(kind) for kind, _ in rooms], repeat)
    last = np.clip(counts, 1, len(work)) - 1
    if model.profile.synchronous:
        slowest: Floats = np.sort(work)[last]
        return slowest
    # Whether a machine's own memory or its network card is faster decides where a worker sits best.
    alone = np.repeat([model.transfer_s(kind, 0) for kind, _ in rooms], repeat)
    beside = np.repeat(
        [min(model.transfer_s(kind, size) for size in (0, shards.sizes[0])) for kind, _ in rooms], repeat
    )
    near = np.sort(1 / (work + beside))[::-1]
    far = np.sort(1 / (work + alone))[::-1]
    near_sum, far_sum = np.concatenate([[0.0], np.cumsum(near)]), np.concatenate([[0.0], np.cumsum(far)])
    # The best `beside_ps` rates with a shard beside, the others' without; both lists are sorted, so this is a bound.
    close = np.minimum(last + 1, beside_ps)
    rate = near_sum[close] + far_sum[last + 1 - close]
    return counts / rate
