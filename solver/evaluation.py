"""What any placement of an option is worth, however it was found: predicted step time and Eq. 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from solver.async_rates import Machine, best_rates
from solver.placement.naming import Assignment
from solver.plan import PlannedTask
from solver.racks import uplink_s
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.step_time import StepTime
from solver.traffic import local_bytes, weighted_traffic

DIGITS = 9
"""Of a mean batch; so that rounding makes no difference between machines with like workers."""


@dataclass(frozen=True)
class Evaluation:
    """A placed option's worth.

    Attributes:
        step_time: seconds in which every worker makes one step, with the terms; where machines differ, compute is that
            of the slowest and transfer the mean.
        samples_per_s: predicted speed.
        traffic_bytes: Eq. 1.
    """

    step_time: StepTime
    samples_per_s: float
    traffic_bytes: float


def evaluate(scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment) -> Evaluation:
    """Predicts what a placement reaches (docs/solver.md, 'Step time').

    Args:
        scenario: the model on the cluster.
        shape: what each worker gets, unless the assignment says otherwise.
        shards: what each ps holds.
        assignment: machine of every task; several parameter servers may share one.
    """
    shapes = assignment.shapes_of_workers(shape)
    models = {each: scenario.model(each) for each in {shape, *shapes}}
    model = models[shape]
    kind_of = {name: kind for kind in scenario.kinds for name in kind.names}
    held: dict[str, int] = {}
    for node, size in zip(assignment.ps, shards.sizes, strict=True):
        held[node] = held.get(node, 0) + size
    near = Counter(assignment.workers)
    alike = Counter(zip(assignment.workers, shapes, strict=True))
    count = len(assignment.workers)
    work = {(node, each): models[each].work_s(kind_of[node]) for node, each in alike}
    if model.profile.synchronous:
        transfer = 0.0
        network = max(
            model.network_s(kind_of[node], held.get(node, 0), near.get(node, 0), count)
            for node in held.keys() | near.keys()
        )
        rack_of = {name: kind.rack for kind in scenario.kinds for name in kind.names}
        network = max(network, uplink_s(scenario.cluster, assignment, shards.sizes, rack_of))
        total = model.round_s(max(work.values()), network, shards.sizes[0], count)
        samples_per_s = sum(models[each].samples_per_step * here for (_, each), here in alike.items()) / total
    else:
        moved = {node: model.transfer_s(kind_of[node], held.get(node, 0)) for node in near}
        transfer = sum(workers * moved[node] for node, workers in near.items()) / count
        own: dict[str, float] = dict.fromkeys(held, 0.0)
        samples: dict[str, float] = {}
        for (node, each), workers in alike.items():
            rate = workers / (work[node, each] + moved[node])
            own[node] = own.get(node, 0.0) + rate
            samples[node] = samples.get(node, 0.0) + rate * models[each].samples_per_step
        # Different workers on one machine are slowed down alike.
        machines = Counter(
            Machine(
                own_rate=rate,
                stored=held.get(node, 0),
                card=kind_of[node].network_bytes_per_s,
                rack=kind_of[node].rack,
                samples=round(samples.get(node, 0.0) / rate, DIGITS) if rate else 0.0,
            )
            for node, rate in own.items()
        )
        rates = best_rates(
            [replace(machine, count=machines_alike) for machine, machines_alike in machines.items()],
            model.shared(shards.sizes[0], scenario.uplink_bytes_per_s),
        )
        total, samples_per_s = count / rates.steps_per_s, rates.samples_per_s
        network = total * rates.utilisation
    step_time = StepTime(
        compute=max(models[each].compute_s(kind_of[node]) for node, each in alike),
        input=max(models[each].input_s for each in set(shapes)),
        latency=model.latency_s,
        transfer=transfer,
        network=network,
        update=model.update_s(shards.sizes[0], count),
        dispatch=model.dispatch_s(count),
        total=total,
    )
    local = local_bytes(assignment.ps, shards.sizes, assignment.workers)
    return Evaluation(step_time, samples_per_s, weighted_traffic(shards.total, count, local))


def planned_tasks(
    scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment
) -> tuple[PlannedTask, ...]:
    """The tasks with their machines and resources, parameter servers first."""
    sizes = scenario.sizes
    tasks = _tasks("ps", assignment.ps, [sizes.ps(size) for size in shards.sizes])
    workers = [sizes.worker(each) for each in assignment.shapes_of_workers(shape)]
    tasks += _tasks("worker", assignment.workers, workers)
    if sizes.chief is not None and assignment.chief is not None:
        tasks += _tasks("chief", [assignment.chief], [sizes.chief])
    return tuple(tasks)


def _tasks(role: str, nodes: Sequence[str], resources: Sequence[TaskResources]) -> list[PlannedTask]:
    return [
        PlannedTask(role, index, node, task.cpus, task.mem_mb, task.disk_mb, task.gpus)
        for index, (node, task) in enumerate(zip(nodes, resources, strict=True))
    ]
