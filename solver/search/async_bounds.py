"""Upper bounds of asynchronous workers' rates before placement (solver.async_rates without some constraints).

X is the rate of all n workers, Z that of workers beside one of m parameter servers; M all bytes, s the largest shard.
c, C and u are the `LINK_SHARE` of cards and uplinks.

* Workers: X is at most the sum of the best n rates, on at most m machines beside a ps, where a machine's workers do not
  exceed its card: c / M without a ps, c / (M - s) beside one, because X >= z in S (X - z) + (M - S) z <= c.
* The ps machines' cards together: M X - 2 sum S_i z_i + M Z <= C, the m fastest cards. With S_i <= s that is X <= C/M -
  (1 - 2 s/M) Z, and X - Z is at most the rate of the other machines.
* The card of the largest shard: X <= (c + max(0, 2 s - M) z) / s.
* Uplinks: summed over R racks 2 (M X - sum S_r z_r) <= R u, with S_r z_r at most M max z_r and max S_r X.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE
from solver.capacity import Ints
from solver.search.scope import Scope
from solver.shards import Shards

Floats = NDArray[np.float64]


class StepBounds:
    """Upper bounds of the steps/s of all workers, by number of workers (index 0 is one worker)."""

    def __init__(self, scope: Scope, work_s: Floats, room: Ints, total_bytes: int, within_bytes_per_s: float) -> None:
        """Prepares the parts that do not depend on the shards."""
        self._scope, self._work, self._room = scope, work_s, room
        self._total, self._within = total_bytes, within_bytes_per_s
        cards = scope.machines.network_bytes_per_s
        self._rate = 1 / (work_s + 2.0 * total_bytes / cards)
        self._cap = cards * LINK_SHARE / max(1, total_bytes)
        self._far = _added(scope.machines.counts, room, self._rate, self._cap)
        self._far_sum = _best_sums([self._far], scope.max_workers)
        self._far_most = np.minimum(self._rate * room, self._cap)

    def of(self, shards: Shards, smallest: Ints, largest: Ints, beside_ps: int) -> Floats:
        """The bounds with these shards, without the parameter servers' and the chief's own limits.

        Args:
            shards: bytes on each ps.
            smallest: by kind, number of workers that fit beside the smallest shard; -1 where that does not fit.
            largest: the same for the largest shard.
            beside_ps: maximum workers that can share machines with parameter servers.
        """
        scope, machines, total, workers = self._scope, self._scope.machines, self._total, self._scope.max_workers
        cards, count = machines.network_bytes_per_s, len(shards.sizes)
        used = cards * LINK_SHARE
        local = total if scope.ps_may_share else shards.sizes[0]
        if not total:
            return self._far_sum
        remote = np.minimum(2.0 * total / cards, 2.0 * (total - local) / cards + 2.0 * local / self._within)
        rate = 1 / (self._work + remote)
        cap = np.minimum(used / max(1e-9, total - local), self._within / max(1e-9, 2 * shards.sizes[-1]))
        room = np.maximum(smallest, 0)
        near_added = _added(machines.counts, room, rate, cap).best(beside_ps)
        near_most = np.where(smallest >= 0, np.minimum(rate * room, cap), 0.0)
        near = np.minimum(_best_sums([near_added], workers), _best_sum(near_most, machines.counts, count))
        without_ps = int(machines.counts.sum()) - (1 if scope.ps_may_share else count)
        far = np.minimum(self._far_sum, _best_sum(self._far_most, machines.counts, without_ps))
        # A machine either has a ps or not; assume the better of both for each.
        best_rate, best_cap = np.maximum(rate, self._rate), np.maximum(cap, self._cap)
        either = _added(machines.counts, self._room, best_rate, best_cap)
        steps = np.minimum(_best_sums([either], workers), near + far)
        steps = np.minimum(steps, _best_sums([near_added, self._far], workers))
        mean = _best_sum(np.where(smallest >= 0, used, 0.0), machines.counts, count) / total
        lost = -1.0 if scope.ps_may_share else 1 - 2 * shards.sizes[0] / total
        steps = np.minimum(
            steps, np.minimum(mean, (mean + lost * far) / (1 + lost)) if lost >= 0 else mean - lost * near
        )
        steps = np.minimum(steps, self._busiest_ps(shards, largest, rate, cap))
        uplink = scope.uplink_bytes_per_s
        return (
            steps if uplink is None else np.minimum(steps, self._across(shards, near_most, steps, uplink * LINK_SHARE))
        )

    def _busiest_ps(self, shards: Shards, largest: Ints, rate: Floats, cap: Floats) -> Floats:
        size, counts = shards.sizes[0], self._scope.counts
        cards = self._scope.machines.network_bytes_per_s * LINK_SHARE
        best = np.zeros(len(counts))
        places = {*zip(largest.tolist(), cards.tolist(), rate.tolist(), cap.tolist(), strict=True)}
        for room, card, own, most in places:
            if room < 0:
                continue
            beside = np.minimum(np.minimum(room, counts) * own, most)
            reached = (card + max(0, 2 * size - self._total) * beside) / max(1, size)
            if self._scope.ps_may_share:
                reached = np.maximum(reached, card / self._total + beside)
            best = np.maximum(best, reached)
        return best

    def _across(self, shards: Shards, near_most: Floats, steps: Floats, uplink_bytes_per_s: float) -> Floats:
        rate_of: dict[str | None, float] = {}
        room_of: dict[str | None, int] = {}
        machines_of: dict[str | None, int] = {}
        most = np.maximum(near_most, self._far_most).tolist()
        for kind, room, rate in zip(self._scope.machines.kinds, self._room.tolist(), most, strict=True):
            rate_of[kind.rack] = rate_of.get(kind.rack, 0.0) + kind.count * rate
            room_of[kind.rack] = room_of.get(kind.rack, 0) + kind.count * room
            machines_of[kind.rack] = machines_of.get(kind.rack, 0) + kind.count
        links = len(rate_of) * uplink_bytes_per_s / 2
        in_one = np.clip(self._scope.counts - 1, 0, max(1, *room_of.values()) - 1)
        inside = np.minimum(steps[in_one], max(rate_of.values()))
        reached: Floats = links / self._total + inside
        stored = (
            shards.total
            if self._scope.ps_may_share
            else shards.sizes[0] * min(len(shards.sizes), max(machines_of.values()))
        )
        if stored < shards.total:
            reached = np.minimum(reached, links / (shards.total - stored))
        return reached


@dataclass(frozen=True)
class _Added:
    """Steps/s that further workers add, and the number of workers that add this."""

    steps_per_s: Floats
    workers: Ints

    def best(self, workers: int) -> _Added:
        """The `workers` entries that add most."""
        order = np.argsort(-self.steps_per_s)
        added, repeats = self.steps_per_s[order], self.workers[order]
        return _Added(added, np.clip(workers - (np.cumsum(repeats) - repeats), 0, repeats))


def _added(counts: Ints, room: Ints, rate: Floats, cap: Floats) -> _Added:
    """Steps/s that the first, second, ... worker on each machine adds."""
    kind = np.repeat(np.arange(len(room)), room)
    before = np.arange(len(kind)) - np.repeat(np.cumsum(room) - room, room)
    each, limit = rate[kind], cap[kind]
    more = np.minimum(each * (before + 1), limit) - np.minimum(each * before, limit)
    return _Added(more, counts[kind])


def _best_sums(lists: Sequence[_Added], workers: int) -> Floats:
    """Maximum that 1, 2, ... `workers` workers add together."""
    values = np.concatenate([entry.steps_per_s for entry in lists])
    repeats = np.concatenate([entry.workers for entry in lists])
    order = np.argsort(-values)
    best = np.zeros(workers)
    chosen = np.repeat(values[order], repeats[order])[:workers]
    best[: len(chosen)] = chosen
    return np.cumsum(best)


def _best_sum(value: Floats, counts: Ints, machines: int) -> float:
    """Sum of the greatest values of that many machines."""
    order = np.argsort(-value)
    before = np.cumsum(counts[order]) - counts[order]
    return float(np.clip(machines - before, 0, counts[order]) @ value[order])
