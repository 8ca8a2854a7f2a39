"""Speed of a job with p parameter servers and w workers, spread evenly over the fewest machines that hold them.

Optimus (EuroSys 2018, section 4.3, theorem 1) places a job on the fewest machines with equal counts on each. For equal
machines the step-time model (docs/planner.md, 'Step time') then has at most four groups of machines, and is computed
here for all (p, w) at once. With k machines, w = a k + r and p = b k + s: r machines have a worker more and s machines
a ps more, distinct ones while r + s <= k. The busiest network card is in one of the groups. Shards count as equal on a
card, but the largest decides how much a ps sends at most and how long it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.allreduce import steps_on
from solver.nodes import NodeKind
from solver.rate_arrays import PlacementArrays, link_ceilings, total_rates
from solver.resources import Amounts
from solver.shards import Shards
from solver.step_time import StepModel

MIN_TIME_SAVED_SHARE = 1e-4
"""Minimum share of a job's time that additional tasks must save to be worth their start."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class JobTaskAmounts:
    """Resources of a job's tasks.

    Attributes:
        ps: each ps, by their number less one; all are as large as the largest.
        chief: the separate chief; zeros if there is none.
    """

    worker: Amounts
    ps: tuple[Amounts, ...]
    chief: Amounts

    def of(self, workers: int, ps: int) -> Amounts:
        """Resources of a job with these workers and parameter servers."""
        one = self.ps[ps - 1]
        return tuple(  # type: ignore[return-value]
            workers * w + ps * p + c for w, p, c in zip(self.worker, one, self.chief, strict=True)
        )


def even_spread(workers: int, ps: int, machines: int) -> list[tuple[int, int, int]]:
    """(machines, workers on each, ps on each) of an even spread, most workers first."""
    each, more = divmod(workers, machines)
    ps_each, ps_more = divmod(ps, machines)
    both = max(0, more + ps_more - machines)
    groups = [
        (both, each + 1, ps_each + 1),
        (more - both, each + 1, ps_each),
        (ps_more - both, each, ps_each + 1),
        (machines - more - ps_more + both, each, ps_each),
    ]
    return [group for group in groups if group[0] and group[1] + group[2]]


class Addition(NamedTuple):
    """Tasks that a job may add.

    Attributes:
        counts: workers and parameter servers including them.
        saved_s: seconds saved for each sample.
        share: their share of the dominant resource.
    """

    counts: tuple[int, int]
    saved_s: float
    share: float
    needs: Amounts

    @property
    def gain(self) -> float:
        """Seconds saved for each sample, per share of the dominant resource."""
        return self.saved_s / self.share


class GainTable:
    """Time per sample for every number of tasks, and the best tasks to add next."""

    def __init__(self, s_per_sample: Floats, needs: JobTaskAmounts, total: Amounts) -> None:
        """Takes seconds for each sample, above 0, as [ps - 1, workers - 1], and the total usable resources."""
        ps, workers = s_per_sample.shape
        w, p = np.arange(1, workers + 1)[None, :, None], np.arange(1, ps + 1)[:, None, None]
        self._s_per_sample = s_per_sample
        self._needs: Ints = w * np.array(needs.worker) + p * np.array(needs.ps)[:, None, :] + np.array(needs.chief)
        self._total = np.maximum(np.array(total, dtype=np.float64), 1.0)
        self._next: dict[tuple[tuple[int, int], int, Amounts | None], Addition | None] = {}
        self._least: dict[tuple[int, int], float] = {}

    @property
    def max_workers(self) -> int:
        return self._s_per_sample.shape[1]

    @property
    def max_ps(self) -> int:
        return self._s_per_sample.shape[0]

    def s_per_sample(self, workers: int, ps: int) -> float:
        return float(self._s_per_sample[ps - 1, workers - 1])

    def needs(self, workers: int, ps: int) -> Ints:
        return self._needs[ps - 1, workers - 1]

    def share(self, need: Ints) -> float:
        """Share of the dominant resource, the one with the largest share of `need`."""
        return float((need / self._total).max())

    def next_tasks(self, counts: tuple[int, int], max_workers: int, left: Amounts | None = None) -> Addition | None:
        """The tasks with the best gain for their resources (Optimus, section 4.2).

        Optimus adds one task at a time and stops when one is useless. Here several are added at once if that gains more
        per unit: a second machine can pay off only when it is filled.

        Returns:
            None if nothing more fits and gains.
        """
        key = counts, max_workers, left
        if key not in self._next:
            self._next[key] = self._best(*key)
        return self._next[key]

    def fastest(self, min_workers: int, max_workers: int, left: Amounts, tie: float) -> tuple[int, int] | None:
        """Workers and ps of the fastest job that `left` holds in sum; within `tie` of it, the one of least share."""
        last = min(max_workers, self.max_workers)
        if last < min_workers:
            return None
        needs = self._needs[:, min_workers - 1 : last]
        times = np.where((needs <= np.array(left)).all(axis=-1), self._s_per_sample[:, min_workers - 1 : last], np.inf)
        best = times.min()
        if not np.isfinite(best):
            return None
        shares = np.where(times * (1 - tie) <= best, (needs / self._total).max(axis=-1), np.inf)
        row, column = np.unravel_index(int(shares.argmin()), shares.shape)
        return min_workers + int(column), 1 + int(row)

    def least_s_per_sample(self, min_workers: int, max_workers: int) -> float:
        """Seconds for each sample with the best counts."""
        key = min_workers, max_workers
        if key not in self._least:
            self._least[key] = float(self._s_per_sample[:, min_workers - 1 : max_workers].min(initial=np.inf))
        return self._least[key]

    def _best(self, counts: tuple[int, int], max_workers: int, left: Amounts | None) -> Addition | None:
        workers, ps = counts
        last = min(max_workers, self.max_workers)
        times = self._s_per_sample[ps - 1 :, workers - 1 : last]
        more = self._needs[ps - 1 :, workers - 1 : last] - self._needs[ps - 1, workers - 1]
        saved = times[0, 0] - times
        shares = np.maximum((more / self._total).max(axis=-1), 1e-12)
        rates = saved / shares
        rates[saved <= MIN_TIME_SAVED_SHARE * times[0, 0]] = -np.inf
        if left is not None:
            rates[(more > np.array(left)).any(axis=-1)] = -np.inf
        row, column = np.unravel_index(int(rates.argmax()), rates.shape)
        if not rates[row, column] > 0:
            return None
        cpus, memory, disk, gpus = more[row, column].tolist()
        counts = workers + int(column), ps + int(row)
        return Addition(counts, float(saved[row, column]), float(shares[row, column]), (cpus, memory, disk, gpus))


class SpeedTable(GainTable):
    def __init__(
        self,
        model: StepModel,
        kind: NodeKind,
        needs: JobTaskAmounts,
        shards: Callable[[int], Shards],
        max_workers: int,
        total: Amounts,
    ) -> None:
        """Computes the table as if all machines were of this kind."""
        ps = len(needs.ps)
        distributed = [shards(count) for count in range(1, ps + 1)]
        largest = np.array([each.sizes[0] for each in distributed], dtype=np.float64)[:, None]
        update_s = np.array([model.update_s(model.load(each), 1) for each in distributed])[:, None]
        w, p = np.arange(1, max_workers + 1)[None, :], np.arange(1, ps + 1)[:, None]
        machines = _fewest(w, p, np.array(needs.worker), np.array(needs.ps)[:, None, :], kind)
        super().__init__(_s_per_sample(model, kind, w, p, machines, largest, update_s), needs, total)


class GangTable(GainTable):
    def __init__(
        self, model: StepModel, kind: NodeKind, needs: JobTaskAmounts, room: int, max_workers: int, total: Amounts
    ) -> None:
        """Computes the table of gangs (`solver.allreduce`) as if all machines were of this kind.

        Its single row, which elsewhere stands for one ps, stands for none: `needs.ps` is one entry of zeros.
        """
        seconds = steps_on(model, kind, room, max_workers)
        super().__init__(seconds[None, :] / model.profile.batch_size, needs, total)


def _fewest(w: Ints, p: Ints, worker: Ints, each_ps: Ints, kind: NodeKind) -> Ints:
    """Fewest machines of the kind that hold the tasks evenly; one for each task if no even spread fits."""
    have = np.array(kind.amounts)
    need = w[..., None] * worker + p[..., None] * each_ps
    asked = (need > 0).any(axis=(0, 1))
    lowest = -(-need[..., asked] // np.maximum(have[asked], 1))
    most = w + p
    k: Ints = np.clip(lowest.max(axis=-1), 1, most)
    while True:
        groups = (
            (at_w[..., None] * worker + at_p[..., None] * each_ps, there) for there, at_w, at_p in _groups(w, p, k)
        )
        fits = np.logical_and.reduce([(there == 0) | (used <= have).all(axis=-1) for used, there in groups])
        if (fits | (k == most)).all():
            return k
        k = np.where(fits, k, np.minimum(k + 1, most))


def _groups(w: Ints, p: Ints, k: Ints) -> list[tuple[Ints, Ints, Ints]]:
    """`even_spread` for arrays: machines, workers on each, ps on each; groups may be empty."""
    a, r = w // k, w % k
    b, s = p // k, p % k
    both = np.maximum(0, r + s - k)
    return [(both, a + 1, b + 1), (r - both, a + 1, b), (s - both, a, b + 1), (k - r - s + both, a, b)]


def _s_per_sample(
    model: StepModel, kind: NodeKind, w: Ints, p: Ints, k: Ints, largest: Floats, update_s: Floats
) -> Floats:
    groups = _groups(w, p, k)
    if not model.profile.synchronous:
        rates = np.minimum(_asynchronous_rates(model, kind, groups, p, largest), 1 / np.maximum(update_s, 1e-300))
        return 1 / (rates * model.samples_per_step)
    total, card, within = model.total_bytes, kind.network_bytes_per_s, model.within_node_bytes_per_s
    network: Floats = np.zeros(k.shape)
    for machines, workers, ps in groups:
        held, most = total * ps / p, np.minimum(total, largest * ps)
        busy = np.maximum(most * (w - workers), workers * (total - held)) * 2 / card
        busy = np.maximum(busy, 2 * held * workers / within)
        network = np.where(machines > 0, np.maximum(network, busy), network)
    work = model.work_s(kind)
    rest = network + w * update_s + w * model.dispatch_s(1)
    round_s = np.maximum(work, rest) if model.overlap else work + rest
    return round_s / (w * model.samples_per_step)


def _asynchronous_rates(
    model: StepModel, kind: NodeKind, groups: Sequence[tuple[Ints, Ints, Ints]], p: Ints, largest: Floats
) -> Floats:
    """Steps/s of all workers (`solver.async_rates`), for each number of parameter servers and workers."""
    machines, workers, ps = (np.stack(values, axis=-1) for values in zip(*groups, strict=True))
    total, card, within = model.total_bytes, kind.network_bytes_per_s, model.within_node_bytes_per_s
    held, most = total * ps / p[..., None], np.minimum(total, largest[..., None] * ps)
    round_s = model.work_s(kind) + 2 * (total - held) / card + 2 * held / within
    own = workers / round_s
    rates = total_rates(PlacementArrays(own, held, np.full(1, card), model.shared(0), machines))
    # The machine with the largest shards may not keep up with that.
    ceilings = np.where(machines > 0, link_ceilings(own, most, card, total), np.inf)
    steps: Floats = np.minimum(rates, ceilings.min(axis=-1))
    return steps
