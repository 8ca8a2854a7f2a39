"""Rates any placement of an option, however it was found: predicted step time and Eq. 1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from solver.async_rates import Machine, best_rates, slowest_send_s
from solver.nodes import NodeKind
from solver.placement.naming import Assignment, uplink_s
from solver.plan import PlannedTask
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.step_time import StepModel, StepTime

BATCH_DECIMALS = 9
"""Decimals of a mean batch, so that rounding does not separate machines with identical workers."""


@dataclass(frozen=True)
class Evaluation:
    """Predicted performance of a placed option.

    Attributes:
        step_time: seconds in which every worker makes one step, with the terms; where machines differ, compute is that
            of the slowest and transfer the mean.
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round, alone.
        traffic_bytes: Eq. 1, by the costs of the cluster's links.
    """

    step_time: StepTime
    cycle_s: float
    samples_per_s: float
    traffic_bytes: float


@dataclass(frozen=True)
class _Rounds:
    """Time of all workers' steps, with the shares of the network and of the workers themselves."""

    cycle_s: float
    network_s: float
    transfer_s: float
    total_s: float
    samples_per_s: float


@dataclass(frozen=True)
class _Layout:
    """A placement by machine.

    Attributes:
        stored: machine -> bytes of the shards on it.
        workers_on: machine -> workers on it.
        workers_by_shape: machine and shape -> number of such workers.
    """

    stored: dict[str, int]
    workers_on: Counter[str]
    workers_by_shape: Counter[tuple[str, WorkerShape]]
    models: dict[WorkerShape, StepModel]
    kind_of: dict[str, NodeKind]

    def work_s(self, node: str, shape: WorkerShape) -> float:
        return self.models[shape].work_s(self.kind_of[node])

    @property
    def nodes(self) -> AbstractSet[str]:
        return self.stored.keys() | self.workers_on.keys()

    @cached_property
    def distinct(self) -> list[tuple[str, WorkerShape]]:
        """One machine for each GPU model and shape; the others are equally fast."""
        found = {(self.kind_of[node].gpu_model, each): node for node, each in self.workers_by_shape}
        return [(node, each) for (_, each), node in found.items()]


def evaluate(scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment) -> Evaluation:
    """Predicts the performance of a placement (docs/planner.md, 'Step time').

    `shape`: resources of each worker, unless the assignment has its own. `assignment`: machine of every task; several
    parameter servers may share one.
    """
    shapes = assignment.shapes_of_workers(shape)
    stored: dict[str, int] = {}
    for node, size in zip(assignment.ps, shards.sizes, strict=True):
        stored[node] = stored.get(node, 0) + size
    layout = _Layout(
        stored=stored,
        workers_on=Counter(assignment.workers),
        workers_by_shape=Counter(zip(assignment.workers, shapes, strict=True)),
        models={each: scenario.model(each) for each in {shape, *shapes}},
        kind_of=scenario.kind_of,
    )
    model, count = layout.models[shape], len(assignment.workers)
    if model.profile.synchronous:
        rounds = _synchronous(scenario, model, shards, assignment, layout)
    else:
        rounds = _asynchronous(scenario, model, shards, layout)
    step_time = StepTime(
        compute=max(layout.models[each].compute_s(layout.kind_of[node]) for node, each in layout.distinct),
        input=max(layout.models[each].input_s for each in set(shapes)),
        latency=model.latency_s,
        transfer=rounds.transfer_s,
        network=rounds.network_s,
        update=model.update_s(model.load(shards), count),
        dispatch=model.dispatch_s(count),
        total=rounds.total_s,
    )
    traffic = scenario.cluster.costs().total(stored, layout.workers_on)
    return Evaluation(step_time, rounds.cycle_s, rounds.samples_per_s, traffic)


@dataclass(frozen=True)
class RatedPlan:
    """A placement, and its performance.

    Attributes:
        scenario: the machines, and the CPUs of a ps.
        shape: most frequent shape of a worker.
        assignment: machine of every task, and each worker's shape.
    """

    scenario: Scenario
    shape: WorkerShape
    shards: Shards
    assignment: Assignment
    worth: Evaluation

    @classmethod
    def of(cls, scenario: Scenario, assignment: Assignment, shape: WorkerShape | None = None) -> RatedPlan:
        """Rates an assignment; `shape` is that of all workers if the assignment has none."""
        shards = scenario.shards(len(assignment.ps))
        usual = shape or Counter(assignment.shapes).most_common(1)[0][0]
        assignment = replace(assignment, shapes=assignment.shapes_of_workers(usual))
        return cls(scenario, usual, shards, assignment, evaluate(scenario, usual, shards, assignment))

    @property
    def samples_per_s(self) -> float:
        return self.worth.samples_per_s

    @property
    def steps_per_s(self) -> float:
        """Steps of all workers together."""
        return len(self.assignment.workers) / self.worth.step_time.total

    @property
    def tasks(self) -> int:
        """Number of workers and ps."""
        return len(self.assignment.workers) + len(self.assignment.ps)


def _synchronous(
    scenario: Scenario, model: StepModel, shards: Shards, assignment: Assignment, layout: _Layout
) -> _Rounds:
    """Sequential phases: the slowest worker, then the busiest link."""
    count = len(assignment.workers)
    network_s = max(
        model.network_s(layout.kind_of[node], layout.stored.get(node, 0), layout.workers_on[node], count)
        for node in layout.nodes
    )
    rack_of = {node: layout.kind_of[node].rack for node in layout.nodes}
    network_s = max(network_s, uplink_s(scenario.cluster, assignment, shards.sizes, rack_of))
    cycle_s = max(layout.work_s(node, each) for node, each in layout.distinct)
    total_s = model.round_s(cycle_s, network_s, model.load(shards), count)
    samples = sum(layout.models[each].samples_per_step * here for (_, each), here in layout.workers_by_shape.items())
    return _Rounds(cycle_s, network_s, 0.0, total_s, samples / total_s)


def _asynchronous(scenario: Scenario, model: StepModel, shards: Shards, layout: _Layout) -> _Rounds:
    """Every worker works at its own rate, as far as its links allow (solver.async_rates)."""
    count = sum(layout.workers_on.values())
    cards = {node: layout.kind_of[node].network_bytes_per_s for node in layout.nodes}
    slowest = slowest_send_s(layout.stored.values(), (cards[node] for node in layout.stored))
    moved = {
        node: model.transfer_s(layout.kind_of[node], layout.stored.get(node, 0), slowest) for node in layout.workers_on
    }
    own: dict[str, float] = dict.fromkeys(layout.stored, 0.0)
    samples: dict[str, float] = {}
    for (node, each), workers in layout.workers_by_shape.items():
        rate = workers / (layout.work_s(node, each) + moved[node])
        own[node] = own.get(node, 0.0) + rate
        samples[node] = samples.get(node, 0.0) + rate * layout.models[each].samples_per_step
    # Different workers on one machine are slowed down by the same factor.
    machines = Counter(
        Machine(
            own_rate=rate,
            stored=layout.stored.get(node, 0),
            card=cards[node],
            rack=layout.kind_of[node].rack,
            samples=round(samples.get(node, 0.0) / rate, BATCH_DECIMALS) if rate else 0.0,
        )
        for node, rate in own.items()
    )
    rates = best_rates(
        [replace(machine, count=number) for machine, number in machines.items()],
        model.shared(model.load(shards), scenario.uplink_bytes_per_s),
    )
    alone = sum(own.values())
    total_s = count / rates.steps_per_s if rates.steps_per_s else math.inf
    return _Rounds(
        cycle_s=count / alone if alone else math.inf,
        network_s=total_s * rates.utilisation,
        transfer_s=sum(workers * moved[node] for node, workers in layout.workers_on.items()) / count,
        total_s=total_s,
        samples_per_s=rates.samples_per_s,
    )


def planned_tasks(plan: RatedPlan) -> tuple[PlannedTask, ...]:
    """The tasks with their machines and resources, parameter servers first."""
    sizes, assignment = plan.scenario.sizes, plan.assignment
    tasks = _tasks("ps", assignment.ps, [sizes.ps(size) for size in plan.shards.sizes])
    workers = [sizes.worker(each) for each in assignment.shapes_of_workers(plan.shape)]
    tasks += _tasks("worker", assignment.workers, workers)
    if sizes.chief is not None and assignment.chief is not None:
        tasks += _tasks("chief", [assignment.chief], [sizes.chief])
    return tuple(tasks)


def _tasks(role: str, nodes: Sequence[str], resources: Sequence[TaskResources]) -> list[PlannedTask]:
    return [
        PlannedTask(role, index, node, task.cpus, task.mem_mb, task.disk_mb, task.gpus)
        for index, (node, task) in enumerate(zip(nodes, resources, strict=True))
    ]
