"""Bounds of an option before it is placed; they decide which options are placed at all.

Every bound leaves constraints out, so no placement is faster, or has less traffic, than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.capacity import Ints, Machines
from solver.placement.problem import by_gpu_model, hosting
from solver.resources import TaskSizes
from solver.search.async_bounds import StepBounds
from solver.search.scope import Scope
from solver.shards import Shards
from solver.step_time import StepModel
from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE, weighted_traffic

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Bounds for each number of workers from 1 on, as arrays (index 0 is one worker).

    Attributes:
        samples_per_s: upper bound of the speed; 0 if the workers do not fit.
        traffic_bytes: lower bound of Eq. 1.
    """

    samples_per_s: Floats
    traffic_bytes: Floats

    def weighed(self, total_bytes: int, within_node: float, between_nodes: float) -> Bounds:
        """The bounds with other weights in Eq. 1; none may exceed the real costs."""
        if (within_node, between_nodes) == (COST_WITHIN_NODE, COST_BETWEEN_NODES):
            return self
        every = float(total_bytes) * np.arange(1, len(self.traffic_bytes) + 1)
        fits = np.isfinite(self.traffic_bytes)
        local = (COST_BETWEEN_NODES * every - self.traffic_bytes) / (COST_BETWEEN_NODES - COST_WITHIN_NODE)
        saved = np.multiply(local, between_nodes - within_node, where=fits, out=np.zeros_like(every))
        return Bounds(self.samples_per_s, np.where(fits, between_nodes * every - saved, np.inf))


class ShapeBounds:
    """Bounds of the options with one worker shape; parts that do not depend on the shards are computed once."""

    def __init__(self, scope: Scope, model: StepModel, sizes: TaskSizes) -> None:
        """Prepares the bounds."""
        self._scope, self._model, self._sizes = scope, model, sizes
        machines = scope.machines
        self._limit = np.where(hosting(machines.kinds, model), scope.max_workers, 0)
        self._room = self._rooms_beside([])
        self._card_times = card_times(machines, self._room, model.total_bytes)
        slots = machines.counts * self._room
        self._slots = int(slots.sum())
        work = by_gpu_model(machines.kinds, model.work_s)
        self._sorted_work = np.sort(np.repeat(work, slots))
        room, within = np.maximum(self._room, 0), model.within_node_bytes_per_s
        self._steps = StepBounds(scope, work, room, model.total_bytes, within)

    def of(self, shards: Shards) -> Bounds:
        scope, model, counts = self._scope, self._model, self._scope.counts
        if not self._slots:
            return Bounds(np.zeros(len(counts)), np.full(len(counts), np.inf))
        largest, smallest = (self._rooms_beside([shards.sizes[i]]) for i in (0, -1))
        beside_ps = most_beside_ps(scope, smallest, shards)
        local = most_local_bytes(scope, smallest, shards, beside_ps)
        if model.profile.synchronous:
            network = least_network_s(scope, self._card_times, self._room, largest, shards, beside_ps, local)
            rest = network + counts * (model.update_s(model.load(shards), 1) + model.dispatch_s(1))
            slowest = self._sorted_work[np.minimum(counts, self._slots) - 1]
            steps = counts / (np.maximum(slowest, rest) if model.overlap else slowest + rest)
        else:
            steps = self._steps.of(shards, smallest, largest, beside_ps)
            steps = np.minimum(steps, model.shared(model.load(shards)).max_steps_per_s)
        # Rounding must not make a bound invalid.
        samples = steps * model.samples_per_step * (1 + 1e-9)
        samples[counts > self._slots] = 0.0
        return Bounds(samples, least_traffic(shards, counts, local, samples))

    def _rooms_beside(self, shard_bytes: Sequence[int]) -> Ints:
        """Number of workers that fit on a machine of each kind beside such shards; -1 if those do not fit."""
        load = [self._sizes.ps(size) for size in shard_bytes]
        room = self._scope.machines.capacity([self._sizes.worker(self._model.shape)], [load])[:, 0, 0]
        beside: Ints = np.minimum(room, self._limit)
        return beside


def most_beside_ps(scope: Scope, beside: Ints, shards: Shards) -> int:
    """Maximum workers that can share machines with parameter servers.

    `beside`: by kind, number of workers that fit beside the smallest shard.
    """
    order, counts = np.argsort(-beside), scope.machines.counts
    before = np.cumsum(counts[order]) - counts[order]
    used = np.clip(len(shards.sizes) - before, 0, counts[order])
    return min(int(used @ np.maximum(beside[order], 0)), scope.max_workers)


def most_local_bytes(scope: Scope, beside: Ints, shards: Shards, beside_ps: int) -> Floats:
    """Maximum bytes that workers can exchange with parameter servers on their own machine, each way.

    Each shard has at most the workers of one machine beside it, and all together at most all workers.

    `beside`: by kind, number of workers that fit beside the smallest shard. `beside_ps`: maximum workers that can share
    machines with parameter servers.
    """
    of_a_worker = float(shards.total if scope.ps_may_share else shards.sizes[0])
    by_worker = np.minimum(scope.counts, beside_ps) * of_a_worker
    by_shard = np.minimum(scope.counts, max(0, int(beside.max()))) * float(shards.total)
    return np.minimum(by_worker, by_shard)


def least_traffic(shards: Shards, counts: Ints, local: Floats, samples_per_s: Floats) -> Floats:
    """Minimum of Eq. 1 with at most those local bytes; infinite if the workers do not fit."""
    traffic = counts * weighted_traffic(shards.total, 1, 0.0) + local * weighted_traffic(0, 0, 1.0)
    traffic[samples_per_s == 0.0] = np.inf
    return traffic


def least_network_s(
    scope: Scope, times: Floats, room: Ints, beside_largest: Ints, shards: Shards, beside_ps: int, local: Floats
) -> Floats:
    """Minimum time of the busiest network card or uplink.

    Args:
        scope: the options.
        times: result of `card_times`.
        room: by kind, number of workers that fit.
        beside_largest: by kind, number that fits beside the largest shard; -1 where that does not fit.
        shards: bytes on each ps.
        beside_ps: maximum workers that can share machines with parameter servers.
        local: maximum bytes that need no network.
    """
    machines, counts = scope.machines, scope.counts
    holder = _busiest_ps(scope, beside_largest, shards)
    # Workers that do not sit beside a ps are on machines that have workers only.
    remote = counts - beside_ps
    others = np.where(remote > 0, times[np.clip(remote - 1, 0, len(times) - 1)], 0.0)
    busiest: Floats = np.maximum.reduce([holder, others, _mean_sent(machines, shards, counts, local)])
    if scope.uplink_bytes_per_s is None or math.isinf(scope.uplink_bytes_per_s):
        return busiest
    return np.maximum(busiest, _busiest_uplink(machines, room, shards, counts, scope.uplink_bytes_per_s))


def card_times(machines: Machines, room: Ints, total_bytes: int) -> Floats:
    """For each number of workers, from one on, the minimum time of the busiest card of machines without ps."""
    # The first worker of every machine takes one transfer of its card, the second two, and so on.
    of_each = np.repeat(room, machines.counts)
    nth = np.arange(1, of_each.sum() + 1) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    speeds = np.repeat(machines.network_bytes_per_s, machines.counts * room)
    return np.sort(2.0 * total_bytes * nth / speeds)


def _mean_sent(machines: Machines, shards: Shards, counts: Ints, local: Floats) -> Floats:
    """Mean time in which the machines with parameter servers send non-local bytes, a lower bound for the busiest."""
    order = np.argsort(-machines.network_bytes_per_s)
    before = np.cumsum(machines.counts[order]) - machines.counts[order]
    used = np.clip(len(shards.sizes) - before, 0, machines.counts[order])
    sent: Floats = 2 * (counts * float(shards.total) - local) / float(used @ machines.network_bytes_per_s[order])
    return sent


def _busiest_ps(scope: Scope, beside_largest: Ints, shards: Shards) -> Floats:
    largest, total, counts = shards.sizes[0], shards.total, scope.counts
    places = {*zip(beside_largest.tolist(), scope.machines.network_bytes_per_s.tolist(), strict=True)}
    best = np.full(len(counts), np.inf)
    for room, network_bytes_per_s in sorted(place for place in places if place[0] >= 0):
        # Its sent bytes fall and its received bytes grow with the workers beside it: the best number is where they
        # meet, or next to it.
        meet = counts * largest // max(1, total)
        for near in (meet, meet + 1):
            beside = np.minimum(np.minimum(near, room), counts)
            sent, received = largest * (counts - beside), beside * (total - largest)
            if scope.ps_may_share:
                # It sends further shards there instead of receiving them: best where both amounts are equal.
                received = np.minimum(received, beside * total * (1 - beside / counts))
            best = np.minimum(best, 2 * np.maximum(sent, received) / network_bytes_per_s)
        if scope.ps_may_share:
            # With more workers than where they meet that amount, concave in their number, is least at the ends.
            beside = np.minimum(room, counts)
            amount = np.where(beside > meet, beside * total * (1 - beside / counts), np.inf)
            best = np.minimum(best, 2 * amount / network_bytes_per_s)
    return best


def _busiest_uplink(machines: Machines, room: Ints, shards: Shards, counts: Ints, uplink_bytes_per_s: float) -> Floats:
    """Minimum time of the busiest uplink.

    Each byte of each shard goes to every worker outside its rack. Summed over the racks that is at least the size of
    all shards times the workers that the roomiest rack cannot hold, and the busiest rack has at least the mean of it.
    """
    room_of_rack: dict[str | None, int] = {}
    for kind, fits in zip(machines.kinds, room.tolist(), strict=True):
        room_of_rack[kind.rack] = room_of_rack.get(kind.rack, 0) + kind.count * fits
    outside = np.maximum(0, counts - max(room_of_rack.values()))
    busiest: Floats = 2.0 * shards.total * outside / len(room_of_rack) / uplink_bytes_per_s
    return busiest
