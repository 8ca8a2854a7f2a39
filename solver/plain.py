"""One plain task: the script in one process without a parameter server, as `python` runs it.

It is what a user compares every other option with. No network and no server take part in its step: what it computes,
what prepares its samples, and Python's own share of a step (docs/solver.md, 'One plain task').
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

from dike.profile import ModelProfile
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.plan import PlannedTask
from solver.resources import CPU_STEP, TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.search.option_search import TIE
from solver.step_time import StepTime

NONE = TaskResources(0.0, 0, 0)
ANY_STEP_FLOPS = 1e9
"""Stands in for what a step computes where nobody knows it: the machine that is fastest at that is taken."""


@dataclass(frozen=True)
class PlainOption:
    """The fastest that one task can be.

    Attributes:
        node: its machine.
        resources: what it gets there.
        step_time: seconds of a step, with the terms; all 0 where nobody knows what a step computes.
        samples_per_s: predicted speed; 0 likewise.
    """

    node: str
    resources: TaskResources
    step_time: StepTime
    samples_per_s: float

    def task(self) -> PlannedTask:
        """The only task of the plan."""
        task = self.resources
        return PlannedTask("worker", 0, self.node, task.cpus, task.mem_mb, task.disk_mb, task.gpus, is_plain=True)


def can_be_plain(profile: ModelProfile, hardware: Hardware) -> bool:
    """Whether the script trains without a cluster, and is saved then.

    A script that makes its steps synchronous, or hands them out by itself, asks for a cluster.
    """
    return hardware.apis[profile.api].plain_s is not None and not profile.synchronous


def fastest_plain(scenario: Scenario, max_gpus: int | None) -> PlainOption | None:
    """The fastest machine and size for one plain task; None if it fits nowhere, or the script cannot be one.

    Args:
        scenario: the model on the cluster.
        max_gpus: most GPUs it can use; None for one, as a script without a strategy of its own uses one.
    """
    profile = scenario.profile
    if not can_be_plain(profile, scenario.hardware):
        return None
    if not profile.is_measurable:
        any_step = dataclasses.replace(profile, batch_size=1, flops_step_per_sample=ANY_STEP_FLOPS)
        found = _fastest(dataclasses.replace(scenario, profile=any_step), max_gpus)
        unknown = StepTime(compute=0, input=0, latency=0, transfer=0, network=0, update=0, dispatch=0, total=0)
        return found and dataclasses.replace(found, step_time=unknown, samples_per_s=0.0)
    return _fastest(scenario, max_gpus)


def _fastest(scenario: Scenario, max_gpus: int | None) -> PlainOption | None:
    fastest: tuple[float, NodeKind, int] | None = None
    for kind in scenario.kinds:
        for gpus in range(min(kind.gpus, max_gpus or 1, 1) + 1):
            option = _option(scenario, kind, WorkerShape(gpus, kind.cpus))
            if option is not None and (fastest is None or option.samples_per_s > fastest[0]):
                fastest = option.samples_per_s, kind, gpus
    return None if fastest is None else _with_fewest_cpus(scenario, *fastest)


def _with_fewest_cpus(scenario: Scenario, most: float, kind: NodeKind, gpus: int) -> PlainOption:
    """The fewest CPUs of a machine that are as good as all of them."""

    def option(cpus: float) -> PlainOption:
        found = _option(scenario, kind, WorkerShape(gpus, cpus))
        assert found is not None, "fewer CPUs fit where more do"
        return found

    steps = range(1, int(kind.cpus / CPU_STEP) + 1)
    # More CPUs are never slower.
    fewest = bisect.bisect_left(steps, most * (1 - TIE), key=lambda count: option(count * CPU_STEP).samples_per_s)
    return option(steps[fewest] * CPU_STEP if fewest < len(steps) else kind.cpus)


def _option(scenario: Scenario, kind: NodeKind, shape: WorkerShape) -> PlainOption | None:
    """A task of that shape on a machine of that kind; None if it does not fit there."""
    model, resources = scenario.model(shape), scenario.sizes.plain(shape)
    if kind.room_for(resources) < 1 or (shape.gpus and not model.fits_gpu(kind)):
        return None
    latency_s = model.python_s(scenario.hardware.apis[scenario.profile.api].plain_s or 0.0)
    total_s = model.busy_s(kind) + latency_s
    terms = (model.compute_s(kind), model.input_s, latency_s)
    time = StepTime(*terms, transfer=0, network=0, update=0, dispatch=0, total=total_s)
    return PlainOption(kind.names[0], resources, time, scenario.profile.batch_size / total_s)
