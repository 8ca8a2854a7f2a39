"""Input of the baselines: the job, its options, and the free resources of every machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dike.exceptions import InfeasibleError
from solver.baselines.filling import capacity_for, fill_first
from solver.capacity import Ints
from solver.options import cpu_gpu_ratio, identical_workers, raw_space, without_spare_cpus
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.request import PlanRequest, check_request, scenario_of
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.shortage import shortage
from solver.strategies import PS

SPEED_TOLERANCE = 1e-9
"""Speeds closer than this share differ by rounding only."""


@dataclass(frozen=True)
class BaselineChoice:
    """Decision of a baseline."""

    shape: WorkerShape
    shards: Shards
    assignment: Assignment
    compared: int
    note: str = ""


@dataclass(frozen=True)
class MachineIndices:
    """Machine of every task, as indices of `Setting.names`."""

    ps: Ints
    workers: Ints
    chief: int | None


@dataclass(frozen=True)
class Setting:
    """One job on one empty cluster.

    Attributes:
        names: the machines in the cluster's order, in which baselines visit them.
        kind_of: the kind of each of them, an index of `scenario.kinds`.
        slice: a worker's resources for baselines with equal slices: one GPU if there are any, and the CPUs of a ps,
            which are an eighth of the largest machine's and at most 1.
        shapes: worker shapes left by the first two rules; of those that differ in spare CPUs only, the largest. For
            equal GPUs, most CPUs first, so that they win ties, as with Dike.
    """

    request: PlanRequest
    scenario: Scenario
    names: tuple[str, ...]
    kind_of: Ints
    slice: WorkerShape
    shapes: tuple[WorkerShape, ...]

    @classmethod
    def of(cls, request: PlanRequest, scenario: Scenario | None = None) -> Setting:
        """Builds the setting.

        Raises:
            BadInputError: if the request is invalid.
            InfeasibleError: if no machine can hold a worker.
        """
        check_request(replace(request, strategies=frozenset({PS})))
        scenario = scenario or scenario_of(request)
        kinds, hardware, sizes = scenario.kinds, scenario.hardware, scenario.sizes
        space = identical_workers(raw_space(kinds, request.max_workers, request.max_gpus_per_worker)).space
        space = cpu_gpu_ratio(space, kinds, hardware, sizes).space
        shapes = [shape for entry in space.ranges for shape in entry.shapes]
        if not shapes:
            raise shortage(kinds, space, sizes, hardware)
        index = {name: number for number, kind in enumerate(kinds) for name in kind.names}
        names = tuple(scenario.cluster.node_names())
        same_for_all = WorkerShape(int(any(kind.gpus for kind in kinds)), sizes.helper_cpus)
        useful = without_spare_cpus(shapes, kinds, sizes)
        ordered = tuple(sorted(useful, key=lambda shape: (shape.gpus, -shape.cpus)))
        return cls(request, scenario, names, np.array([index[name] for name in names]), same_for_all, ordered)

    @property
    def max_ps(self) -> int:
        """Maximum parameter servers: one per machine, and at least one variable on each."""
        return min(len(self.names), max(1, len(self.scenario.profile.variables)))

    def cap_workers(self, workers: int) -> int:
        limit = self.request.max_workers
        return workers if limit is None else min(workers, limit)

    def ps_tasks(self, shards: Shards) -> list[TaskResources]:
        return [self.scenario.sizes.ps(size) for size in shards.sizes]

    def free_beside_chief(self) -> tuple[Ints, int | None]:
        """Free resources once the separate chief, if any, is on the first machine with room; and that machine.

        Raises:
            InfeasibleError: if no machine can hold the chief.
        """
        kinds = self.scenario.kinds
        free = np.array([kind.amounts for kind in kinds])[self.kind_of]
        chief = self.scenario.sizes.chief
        if chief is None:
            return free, None
        placed = fill_first(free, [chief])
        if placed is None:
            raise InfeasibleError(
                f"No machine has room for the chief of {chief.cpus:g} CPUs and {chief.mem_mb:,} MiB; "
                "add a larger machine."
            )
        return placed[1], int(placed[0][0])

    def worker_capacity(self, shape: WorkerShape, free: Ints) -> Ints:
        """Number of workers that fit into the free resources of each machine."""
        model = self.scenario.model(shape)
        hosts = np.array([hosts_workers(kind, model) for kind in self.scenario.kinds])
        return np.where(hosts[self.kind_of], capacity_for(free, self.scenario.sizes.worker(shape)), 0)

    def no_room_error(self, method: str, shape: WorkerShape) -> InfeasibleError:
        chief = ", the chief" if self.scenario.sizes.chief is not None else ""
        worker = self.scenario.sizes.worker(shape)
        return InfeasibleError(
            f"{method} finds no room for one worker of {worker.cpus:g} CPUs, {worker.gpus} GPUs and {worker.mem_mb:,} "
            f"MiB beside its parameter servers{chief}; add machines, or use the method dike."
        )

    def choice(self, shape: WorkerShape, ps: int, on: MachineIndices, compared: int) -> BaselineChoice:
        """Converts machine indices to names.

        `on`: machines of the tasks. `compared`: number of options examined.
        """
        assignment = Assignment(
            tuple(self.names[index] for index in on.ps),
            tuple(self.names[index] for index in on.workers),
            None if on.chief is None else self.names[on.chief],
        )
        return BaselineChoice(shape, self.scenario.shards(ps), assignment, compared)
