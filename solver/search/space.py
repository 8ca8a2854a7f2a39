"""The placements that are searched together: machines, worker shapes, numbers of tasks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.step_time import StepModel

Floats = NDArray[np.float64]

ROUNDING = 1e-9
MIN_LOAD_REDUCTION = 0.01
"""Minimum reduction of the busiest ps' load, as a share, by a further ps or a later one."""
MAX_ALL_PS = 6
"""Number of ps up to which all numbers are searched, also those that do not reduce that load."""
PS_COUNT_RATIO = 1.25
"""Ratio of larger numbers that are searched."""
MAX_SHARDINGS = 40
"""Numbers of ps for which the variables are distributed to find the largest shard."""
MAX_STEP_RATIO = 3.0
"""Asynchronous workers whose step takes more times the fastest one's are not used: their gradients are of weights that
are many steps old (paper 'Dike', section 3.2: unlike workers are stragglers)."""


def step_transfer_s(scenario: Scenario) -> float:
    """Transfers of a step over the cluster's fastest card, so that a slow card alone makes no worker too slow."""
    return scenario.model(WorkerShape(0, 1.0)).transfer_by_card_s(scenario.fastest_card, 0, 0.0)


def has_similar_workers(scenario: Scenario, assignment: Assignment) -> bool:
    """Whether no asynchronous worker is too slow beside the others (`MAX_STEP_RATIO`)."""
    if scenario.profile.synchronous:
        return True
    kind_of, transfer_s = scenario.kind_of, step_transfer_s(scenario)
    on = {(name, shape) for name, shape in zip(assignment.workers, assignment.shapes, strict=True)}
    steps = [scenario.model(shape).work_s(kind_of[name]) + transfer_s for name, shape in on]
    return max(steps) <= MAX_STEP_RATIO * min(steps) * (1 + ROUNDING)


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
        kinds = {(kind.gpu_model, kind.gpus): index for index, kind in enumerate(scenario.kinds)}
        places = {key: place for place, key in enumerate(kinds)}
        self._examples = [scenario.kinds[index] for index in kinds.values()]
        """One kind of machines of each GPU model and number of GPUs; workers' speeds do not depend on the rest."""
        self._example_of = np.array([places[kind.gpu_model, kind.gpus] for kind in scenario.kinds], dtype=np.int64)
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

    @functools.cache  # noqa: B019
    def hosts(self, shape: WorkerShape) -> NDArray[np.bool_]:
        """Whether workers of the shape can run on machines of each kind, if they have room."""
        model = self.scenario.model(shape)
        return np.array([hosts_workers(kind, model) for kind in self._examples])[self._example_of]

    @functools.cache  # noqa: B019
    def work_s(self, shape: WorkerShape) -> Floats:
        """Work of a worker of the shape on machines of each kind."""
        model = self.scenario.model(shape)
        return np.array([model.work_s(kind) for kind in self._examples])[self._example_of]

    @functools.cached_property
    def steps(self) -> list[tuple[float, int]]:
        """Distinct works of workers, of all shapes and on all machines that host them, with the samples of a step."""
        found = set()
        for shape in self.shapes:
            works = self.work_s(shape)[self.hosts(shape)]
            samples = self.scenario.model(shape).samples_per_step
            found |= {(work, samples) for work in np.unique(works).tolist()}
        return sorted(found)

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
        with_gpus = [place for place, kind in enumerate(self._examples) if kind.gpus]
        chosen: dict[tuple[object, ...], WorkerShape] = {}
        for shape in shapes:
            model = self.scenario.model(shape)
            works = tuple(round(model.work_s(self._examples[place]), 12) for place in with_gpus)
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
        return step_transfer_s(self.scenario)

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
