"""The placements that are searched together, and what relaxed problems say about them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE
from solver.capacity import Ints
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.search.machines import ANY_CASE, ROUNDING, Case, Floats, MachineArrays
from solver.search.optimum import MAX_ROUNDS, RelaxedOptimum, allocate, worth_of
from solver.step_time import StepModel

MIN_LOAD_REDUCTION = 0.01
"""Minimum reduction of the busiest ps' load, as a share, by a further ps or a later one."""
MAX_ALL_PS = 6
"""Number of ps up to which all numbers are searched, also those that do not reduce that load."""
PS_COUNT_RATIO = 1.25
"""Ratio of larger numbers that are searched."""
MAX_SHARDINGS = 200
"""Numbers of ps for which the variables are distributed to find the largest shard."""
MAX_WINDOW_RATIO = 1.25
"""Ratio of the shortest steps of neighbouring cases, where workers without GPUs may have any number of CPUs."""
MAX_STEP_RATIO = 3.0
"""Asynchronous workers whose step takes more times the fastest one's are not used: their gradients are of weights that
are many steps old (paper 'Dike', section 3.2: unlike workers are stragglers)."""


class Space:
    """Placements of one job: machines, CPUs of a parameter server (ps), shapes and numbers of workers.

    Attributes:
        scenario: the machines, and the CPUs of a ps.
        cpu_shape: CPUs of all workers without GPUs, if they are identical; None if each machine divides its own.
    """

    def __init__(
        self,
        scenario: Scenario,
        shapes: Sequence[WorkerShape],
        workers: tuple[int, int],
        *,
        identical: bool = False,
    ) -> None:
        """Describes the placements.

        Args:
            scenario: the model, the machines, and the CPUs of a ps.
            shapes: shapes of a worker.
            workers: minimum and maximum number of workers.
            identical: whether all workers have the same shape, which is the only one given.
        """
        self.scenario = scenario
        self.min_workers, self.max_workers = workers
        self.identical = identical
        self.shapes = tuple(sorted(set(shapes)))
        self._hosts: dict[tuple[int, WorkerShape], bool] = {}
        self._works: dict[tuple[str | None, WorkerShape], float] = {}
        self.gpu_shapes = self._without_spare_cpus([shape for shape in self.shapes if shape.gpus])
        shares = [shape.cpus for shape in self.shapes if not shape.gpus]
        self.cpu_workers = bool(shares)
        self.cpu_shape = shares[0] if identical and shares else None
        helper_share = math.floor(scenario.sizes.helper_cpus / CPU_STEP + ROUNDING) * CPU_STEP
        self.smallest_cpu_share = max(CPU_STEP, min([1.0, helper_share, *shares]))

    def without_cpu_workers(self) -> Space:
        """The placements in which every worker has a GPU."""
        shapes = [shape for shape in self.shapes if shape.gpus]
        return Space(self.scenario, shapes, (self.min_workers, self.max_workers), identical=self.identical)

    def hosts(self, kind: int, shape: WorkerShape) -> bool:
        key = kind, shape
        if key not in self._hosts:
            self._hosts[key] = hosts_workers(self.scenario.kinds[kind], self.scenario.model(shape))
        return self._hosts[key]

    def work_s(self, kind: int, shape: WorkerShape) -> float:
        node = self.scenario.kinds[kind]
        key = node.gpu_model, shape
        if key not in self._works:
            self._works[key] = self.scenario.model(shape).work_s(node)
        return self._works[key]

    def cpu_work_s(self, cpus: Floats) -> Floats:
        """Work of workers without GPUs; infinite without CPUs."""
        values, back = np.unique(cpus, return_inverse=True)
        return np.array([self._work_with(each) for each in values.tolist()])[back].reshape(cpus.shape)

    @functools.cache  # noqa: B019
    def _work_with(self, cpus: float) -> float:
        if cpus <= 0:
            return math.inf
        return self.scenario.model(WorkerShape(0, cpus)).work_s(self.scenario.kinds[0])

    def _without_spare_cpus(self, shapes: Sequence[WorkerShape]) -> tuple[WorkerShape, ...]:
        """Keeps, of the shapes equally fast on every machine, the one with fewest CPUs: it fits most often."""
        models = {kind.gpu_model: index for index, kind in enumerate(self.scenario.kinds) if kind.gpus}
        chosen: dict[tuple[object, ...], WorkerShape] = {}
        for shape in shapes:
            works = tuple(round(self.work_s(index, shape), 12) for index in models.values())
            chosen.setdefault((shape.gpus, works), shape)
        return tuple(chosen.values())

    @functools.cached_property
    def model(self) -> StepModel:
        """Step times that do not depend on a worker's shape."""
        return self.scenario.model(WorkerShape(0, 1.0))

    @property
    def within_bytes_per_s(self) -> float:
        return self.model.within_node_bytes_per_s

    @functools.cached_property
    def transfer_s(self) -> float:
        """Transfers of a step over the cluster's fastest card, so that a slow card alone makes no worker too slow."""
        return self.model.transfer_by_card_s(self.scenario.fastest_card, 0, 0.0)

    def windows(self, arrays: MachineArrays) -> list[Case]:
        """Cases such that any workers whose steps differ by at most `MAX_STEP_RATIO` are within one of them."""
        if self.scenario.profile.synchronous:
            return [ANY_CASE]
        steps = np.unique(np.round(arrays.steps[(arrays.room > 0) & np.isfinite(arrays.steps)], 9))
        if not len(steps) or steps[-1] <= MAX_STEP_RATIO * steps[0]:
            return [ANY_CASE]
        lows = list(zip(steps.tolist(), steps.tolist(), strict=True))
        of_cpus = arrays.steps[(arrays.room > 0) & np.isfinite(arrays.steps) & arrays.is_cpu]
        if len(of_cpus):
            # With fewer CPUs a worker's step may have any length.
            shortest = round(float(of_cpus.min()), 9)
            count = math.ceil(math.log(max(1.0, steps[-1] / shortest), MAX_WINDOW_RATIO)) + 1
            points = shortest * MAX_WINDOW_RATIO ** np.arange(count + 1)
            lows = [low for low in lows if low[0] < shortest]
            lows += list(itertools.pairwise(points.tolist()))
        cases, covered = [], 0.0
        for low, next_low in lows:
            high = next_low * MAX_STEP_RATIO * (1 + ROUNDING)
            slowest = float(steps[np.searchsorted(steps, high, side="right") - 1])
            if slowest <= covered:
                continue
            covered = slowest
            fastest = float(steps[min(len(steps) - 1, np.searchsorted(steps, low * (1 - ROUNDING)))])
            cases.append(Case(steps=(low, high), real_steps=(fastest, fastest * MAX_STEP_RATIO)))
        return cases

    def has_similar_workers(self, assignment: Assignment) -> bool:
        """Whether no asynchronous worker is too slow beside the others (`MAX_STEP_RATIO`)."""
        if self.scenario.profile.synchronous:
            return True
        kind_of = self.scenario.kind_of
        on = {(name, shape) for name, shape in zip(assignment.workers, assignment.shapes, strict=True)}
        steps = [self.scenario.model(shape).work_s(kind_of[name]) + self.transfer_s for name, shape in on]
        return max(steps) <= MAX_STEP_RATIO * min(steps) * (1 + ROUNDING)

    # Numbers of ps.

    @functools.cached_property
    def most_ps(self) -> int:
        """Maximum number of ps: each has a variable and a machine."""
        scenario = self.scenario
        room = sum(kind.count for kind in scenario.kinds if kind.cpus >= scenario.sizes.ps_cpus - ROUNDING)
        return min(max(1, len(scenario.profile.variables)), room)

    @functools.cached_property
    def bytes_of_more_ps(self) -> tuple[float, float]:
        """Minimum and maximum bytes on a ps, for the numbers of ps that are not searched."""
        counts, scenario = self.ps_counts(), self.scenario
        smallest = float(min(variable.size_bytes for variable in scenario.profile.variables))
        fewest = next(number for number in itertools.count(1) if number not in counts)
        if self.most_ps - fewest <= MAX_SHARDINGS:
            return smallest, float(max(scenario.shards(count).sizes[0] for count in range(fewest, self.most_ps + 1)))
        # The minimum for more ps is no greater, and `greedy` is within 4/3 of it (Graham 1969).
        largest = 4 / 3 * scenario.shards(fewest - 1).sizes[0] if scenario.sharding == "greedy" else math.inf
        return smallest, largest

    def ps_counts(self) -> list[int]:
        """Numbers of ps that are searched: small ones, those that reduce the load of the busiest one, and some others,
        which spread the bytes over more network cards.
        """
        scenario, most = self.scenario, self.most_ps
        counts, count = set(range(1, min(most, MAX_ALL_PS) + 1)), float(max(1, MAX_ALL_PS))
        while (count := count * PS_COUNT_RATIO) < most:
            counts.add(math.ceil(count))
        counts |= {most} if most else set()
        least, since = math.inf, 0
        for number in range(1, most + 1):
            load = self.model.load(scenario.shards(number))
            since += 1
            if load < least * (1 - MIN_LOAD_REDUCTION):
                counts.add(number)
                least, since = load, 0
            if since >= 4:
                break
        return sorted(counts)

    # Relaxed optima.

    def machines_reaching(
        self,
        arrays: MachineArrays,
        load: float,
        samples_per_s: float,
        works: tuple[float, float],
        workers: tuple[int, int],
    ) -> RelaxedOptimum | None:
        """Synchronous: machines on which a plan of that speed is possible with that number of workers; None if none
        are.

        Args:
            arrays: the machines.
            load: of the busiest ps.
            samples_per_s: the speed.
            works: minimum and maximum of the slowest worker's work.
            workers: minimum and maximum workers.
        """
        model, (fewest, most), (least_work_s, most_work_s) = self.model, workers, works
        allowed = arrays.work <= most_work_s * (1 + ROUNDING) + ROUNDING
        room = np.where(allowed, arrays.room, 0)
        if not arrays.samples.size:
            return None
        samples = min(most * arrays.most_samples, float(arrays.counts @ (room * arrays.samples).max(axis=(1, 2))))
        rest_s = model.update_s(load, fewest) + model.dispatch_s(fewest)
        found = None
        for _ in range(MAX_ROUNDS):
            round_s = samples / samples_per_s
            left_s = round_s - rest_s - (0.0 if model.overlap else least_work_s)
            if left_s < 0 or (model.overlap and least_work_s > round_s * (1 + ROUNDING)):
                return None
            found = self._within(arrays, room, left_s, fewest, most)
            if found is None or found.value <= 0:
                return None
            if found.value >= samples * (1 - ROUNDING):
                return found
            samples = found.value
        return found

    def _within(
        self, arrays: MachineArrays, room: Ints, network_s: float, fewest: int, most: int
    ) -> RelaxedOptimum | None:
        """The most samples of a step with no card busy for longer."""
        half, low, high = network_s * arrays.cards / 2, arrays.ends[0], arrays.ends[-1]
        if arrays.largest and not _can_send_shards(arrays, room, half[:, 0, 0], fewest):
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            receive = np.where(high < arrays.total, half / (arrays.total - high), np.inf)
            inside = np.where(low > 0, network_s * self.within_bytes_per_s / (2 * low), np.inf)
            send = np.where(low > 0, fewest - half / low, 0.0)
        upper = np.minimum(room, np.floor(np.minimum(np.minimum(receive, inside), 1e9) * (1 + ROUNDING)))
        lower = np.maximum(0, np.ceil(send - ROUNDING * fewest))
        fits = lower <= upper
        value = np.where(fits, upper * arrays.samples, -np.inf)
        lowest = np.broadcast_to(lower, upper.shape)
        value = np.concatenate([value, np.where(fits, lowest * arrays.samples, -np.inf)], axis=2)
        upper = np.concatenate([upper, lowest], axis=2)
        return allocate(arrays, value, upper, most)

    def rate_optima(
        self, arrays: MachineArrays, at: Sequence[float], prices: Sequence[float] = (0.0,)
    ) -> Iterator[RelaxedOptimum | None]:
        """Asynchronous: optima with the links evaluated at X steps/s of all workers.

        Args:
            arrays: the machines.
            at: values of X.
            prices: prices of a step, subtracted from its samples; none above the samples of any step.

        Yields:
            For each X, and each price in turn, samples less the price of the steps; None if the ps do not fit.
        """
        batches = [np.array(at)] if arrays.are_few else [np.array([steps_per_s]) for steps_per_s in at]
        for batch in batches:
            for steps_per_s, made, workers, possible in zip(batch, *self._link_rates(arrays, batch), strict=True):
                if not _can_serve_largest(arrays, float(steps_per_s)):
                    yield from itertools.repeat(None, len(prices))
                    continue
                for price in prices:
                    found = allocate(arrays, worth_of(arrays, made, possible, price), workers, self.max_workers)
                    yield None if found is None else replace(found, made=made)

    def _link_rates(self, arrays: MachineArrays, at: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Rates that the links allow at some X: steps/s, number of workers needed, and whether it is possible.

        All are X x rows x ps x choices: the most steps; if the number of workers is limited, also the most of workers
        that the link does not slow down, and the fewest steps that it needs; the last choice is no workers.
        """
        rates, at, cards = arrays.rates, at[:, None, None, None], arrays.cards * LINK_SHARE
        most = np.full((len(at), *rates.shape), -1.0)
        fewest = np.full(most.shape, np.inf)
        least_stored, half = arrays.ends[0], np.clip(arrays.total / 2, arrays.ends[0], arrays.ends[-1])
        # Of shards between the ends, half of all are best for a link.
        for stored in arrays.ends if len(arrays.ends) == 1 else (*arrays.ends, half):
            left, each = cards - stored * at, arrays.total - 2 * stored
            left = np.where(np.abs(left) <= ROUNDING * cards, 0.0, left)
            with np.errstate(divide="ignore", invalid="ignore"):
                link = np.where(each > 0, left / each, np.where((each < 0) | (left >= 0), np.inf, -1.0))
                least = np.where(each < 0, np.maximum(0.0, left / each), 0.0)
                inside = np.where(least_stored > 0, self.within_bytes_per_s / (2 * least_stored), np.inf)
                link = np.minimum(link, inside)
            made = np.minimum(rates * arrays.room, link)
            keeps_up = (made >= 0) & (made >= least * (1 - ROUNDING))
            most = np.where(keeps_up, np.maximum(most, made), most)
            fewest = np.where(keeps_up, np.minimum(fewest, least), fewest)
        possible, most = most >= 0, np.maximum(most, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            workers = np.where(rates > 0, np.ceil(most / rates * (1 - ROUNDING)), 0)
        workers = np.minimum(workers, arrays.room)
        all_made, all_workers, all_possible = [most], [workers], [possible]
        if arrays.most_workers > self.max_workers:
            with np.errstate(divide="ignore", invalid="ignore"):
                needed = np.where(possible & (rates > 0), np.ceil(fewest / rates * (1 - ROUNDING)), 0)
                whole = np.where(rates > 0, np.floor(most / rates * (1 + ROUNDING)), 0)
            for some in (np.maximum(whole, needed), needed):
                some = np.minimum(np.nan_to_num(some), workers)
                all_made.append(np.minimum(most, some * rates))
                all_workers.append(some)
                all_possible.append(possible)
        idle = np.broadcast_to(arrays.ends[0] * at <= cards * (1 + ROUNDING), (*most.shape[:3], 1))
        none = np.zeros(idle.shape)
        return (
            np.concatenate([*all_made, none], axis=-1),
            np.concatenate([*all_workers, none], axis=-1),
            np.concatenate([*all_possible, idle], axis=-1),
        )


def _can_serve_largest(arrays: MachineArrays, steps_per_s: float) -> bool:
    """Whether some card can send the largest shard at that rate of all workers; asynchronous, optimistic reading.

    A machine with more than half of all bytes can, as its own workers need fewer of them.
    """
    if not arrays.largest or 2 * arrays.largest > arrays.total:
        return True
    has_ps = arrays.fits[:, 1:].any(axis=1)
    cards = np.where(has_ps, arrays.cards[:, 0, 0], 0.0).max() * LINK_SHARE
    return bool(arrays.largest * steps_per_s <= cards * (1 + ROUNDING))


def _can_send_shards(arrays: MachineArrays, room: Ints, half: Floats, fewest: int) -> bool:
    """Whether machines can send all shards, the largest from one of them, to the workers elsewhere; synchronous.

    Args:
        arrays: the machines, in the optimistic reading.
        room: maximum workers, rows x ps x choices.
        half: maximum bytes that a machine of each row sends in a step.
        fewest: minimum workers of the job.
    """
    has_ps = arrays.fits[:, 1:].any(axis=1)
    near = np.where(arrays.fits[:, 1:, None], room[:, 1:], 0).max(axis=(1, 2), initial=0)
    far = np.maximum(0, fewest - near)
    with np.errstate(divide="ignore"):
        most = np.where(has_ps, np.where(far > 0, half / far, np.inf), 0.0) * (1 + ROUNDING)
    return bool((most >= arrays.largest).any() and arrays.counts @ np.minimum(most, arrays.total) >= arrays.total)
