"""What is learned of a running job: its speed at each size, and how long it still has to train."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from framework.elastic.decision import Size, evenness
from framework.job import JobSpec
from framework.offers import cluster_of
from solver import NodeClass, Plan
from solver.hardware import known_hardware
from solver.jobs.speed import SpeedTable, TaskNeeds
from solver.online import ConvergenceModel, SpeedModel
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.shards import useful_ps_count

WINDOW_S = 60.0
"""Speed is measured over so long at most."""
LEAST_S = 2.0
"""And over so long at least, after `WARM_UP_S`."""
LEAST_POINTS = 3
"""Steps may take minutes."""
WARM_UP_S = 1.0
"""The first steps also pay for what is traced and cached."""
MOST_PS = 64


class SpeedMeter:
    """Steps a second of a job whose size does not change."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._points: deque[tuple[float, int]] = deque()

    def restart(self) -> None:
        """The job has another size, or was started again."""
        self._first_s = None
        self._points.clear()

    def add(self, now_s: float, step: int) -> None:
        """Takes the newest step in."""
        if self._first_s is None:
            self._first_s = now_s
        if now_s - self._first_s < WARM_UP_S:
            return
        self._points.append((now_s, step))
        while len(self._points) > LEAST_POINTS and now_s - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The mean; None as long as too little was seen."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= LEAST_S and last > first else None


class JobModels:
    """Speed and time left of one job, in samples.

    Args:
        spec: the job.
        plan: its first plan; its speed is believed until something is measured.
        nodes: machines it may run on.
    """

    def __init__(self, spec: JobSpec, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        assert spec.elastic is not None
        self._spec = spec
        self._meter = SpeedMeter()
        self._losses = ConvergenceModel()
        self._step = 0
        self.worker = plan.option.worker
        most = spec.elastic[1]
        self.max_ps = max(plan.option.ps, useful_ps_count(spec.profile, min(most, MOST_PS)))
        table = _predicted(plan, nodes, most, self.max_ps)
        self._speed = SpeedModel(
            lambda workers, ps: 1 / table.s_per_sample(workers, ps),
            # A step of a fixed number of gradients makes no worker's batch smaller, as Optimus' form would have.
            synchronous=False,
            max_workers=most,
            max_ps=self.max_ps,
        )

    def restarted(self) -> None:
        """The job was started again, at whatever size."""
        self._meter.restart()

    def progressed(self, now_s: float, step: int, loss: float | None) -> None:
        """The chief has reported a step."""
        self._step = step
        self._meter.add(now_s, step)
        if loss is not None:
            self._losses.add(step, loss)

    def measure(self, size: Size) -> bool:
        """Learns from the speed at the size the job has; whether anything was measured."""
        rate = self._meter.steps_per_s
        if rate is None:
            return False
        self._speed.observe(size.workers, size.ps, rate * self._samples_per_step / evenness(self._spec.replicas, size))
        return True

    def samples_per_s(self, size: Size) -> float:
        """Predicted speed."""
        return self._speed.samples_per_s(size.workers, size.ps) * evenness(self._spec.replicas, size)

    def samples_left(self, total_steps: int | None) -> float:
        """Samples still to train: what the script or its losses say, else as many as there were so far.

        Args:
            total_steps: how long the script trains, where it says so.
        """
        steps: float = self._step
        if total_steps is not None:
            steps = total_steps - self._step
        elif (left := self._losses.steps_left()).known and math.isfinite(left.steps):
            steps = left.steps
        return max(0.0, steps) * self._samples_per_step

    @property
    def _samples_per_step(self) -> int:
        return self._spec.profile.batch_size * (self._spec.replicas or 1)


def _predicted(plan: Plan, nodes: Sequence[NodeClass], max_workers: int, max_ps: int) -> SpeedTable:
    """The solver's speeds of all sizes, on machines like the largest one."""
    profile, worker = plan.profile, plan.option.worker
    scenario = Scenario.of(profile, cluster_of(nodes), known_hardware())
    kind = max(scenario.kinds, key=lambda kind: (kind.gpus, kind.cpu_millis))
    needs = TaskNeeds(
        worker=_amounts(worker),
        ps=(_amounts(plan.option.ps_task),) * max_ps,
        chief=(0, 0, 0, 0) if plan.option.chief is None else _amounts(plan.option.chief),
    )
    return SpeedTable(
        scenario.model(WorkerShape(worker.gpus, worker.cpus)),
        kind,
        needs,
        lambda ps: scenario.shards(ps).sizes[0],
        max_workers,
        _amounts(worker),
    )


def _amounts(task: TaskResources) -> tuple[int, int, int, int]:
    return task.cpu_millis, task.mem_mb, task.disk_mb, task.gpus
