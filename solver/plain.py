"""One plain task: the script in one process without parameter servers, as `python` runs it.

The baseline of every other option. Its step has no network or server time: only compute, input, and Python's own share
(docs/planner.md, 'One plain task').
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
from solver.step_time import StepTime
from solver.units import SPEED_TIE_SHARE

NO_RESOURCES = TaskResources(0.0, 0, 0)
ANY_STEP_FLOPS = 1e9
"""Assumed FLOPs of a step if unknown, to find the fastest machine."""


@dataclass(frozen=True)
class PlainOption:
    """The fastest plain task.

    Attributes:
        step_time: seconds of a step, with the terms; all 0 if the step's FLOPs are unknown.
        samples_per_s: predicted speed; 0 likewise.
    """

    node: str
    resources: TaskResources
    step_time: StepTime
    samples_per_s: float

    @property
    def workers(self) -> int:
        return 1

    def tasks(self) -> tuple[PlannedTask, ...]:
        one = self.resources
        return (PlannedTask("worker", 0, self.node, one.cpus, one.mem_mb, one.disk_mb, one.gpus, is_plain=True),)


def can_be_plain(profile: ModelProfile, hardware: Hardware) -> bool:
    """Whether the script trains, and is saved, without a cluster.

    A script that makes its steps synchronous, or distributes them itself, needs a cluster.
    """
    return hardware.apis[profile.api].plain_s is not None and not profile.synchronous


def fastest_plain(scenario: Scenario, max_gpus: int = 1) -> PlainOption | None:
    """Finds the fastest machine and size for one plain task; None if it fits nowhere, or the script cannot be one.

    Args:
        scenario: the model on the cluster.
        max_gpus: maximum GPUs of a script whose computation is unknown, which gets as many as a machine has. Others use
            one; several are for several workers.
    """
    profile = scenario.profile
    if not can_be_plain(profile, scenario.hardware):
        return None
    if not profile.is_measurable:
        any_step = dataclasses.replace(profile, batch_size=1, flops_step_per_sample=ANY_STEP_FLOPS)
        found = _fastest(dataclasses.replace(scenario, profile=any_step), max_gpus)
        unknown = StepTime(compute=0, input=0, latency=0, transfer=0, network=0, update=0, dispatch=0, total=0)
        return found and dataclasses.replace(found, step_time=unknown, samples_per_s=0.0)
    return _fastest(scenario, 1)


def _fastest(scenario: Scenario, max_gpus: int) -> PlainOption | None:
    found = []
    # An agent may offer what is left beside its CPUs.
    for kind in (one for one in scenario.kinds if one.cpus > 0):
        for gpus in range(min(kind.gpus, max_gpus) + 1):
            option = _option(scenario, kind, WorkerShape(gpus, kind.cpus))
            if option is not None:
                found.append((option.samples_per_s, kind, gpus))
    if not found:
        return None
    most = max(speed for speed, _, _ in found)
    # GPUs that gain nothing stay free for other jobs.
    _, kind, gpus = min(
        (each for each in found if each[0] >= most * (1 - SPEED_TIE_SHARE)), key=lambda each: (each[2], -each[0])
    )
    return _with_fewest_cpus(scenario, most, kind, gpus)


def _with_fewest_cpus(scenario: Scenario, most: float, kind: NodeKind, gpus: int) -> PlainOption:
    """The fewest CPUs of a machine that are as fast as all of them."""

    def option(cpus: float) -> PlainOption:
        found = _option(scenario, kind, WorkerShape(gpus, cpus))
        assert found is not None, "fewer CPUs fit where more do"
        return found

    steps = range(1, int(kind.cpus / CPU_STEP) + 1)
    # More CPUs are never slower.
    fewest = bisect.bisect_left(
        steps, most * (1 - SPEED_TIE_SHARE), key=lambda count: option(count * CPU_STEP).samples_per_s
    )
    return option(steps[fewest] * CPU_STEP if fewest < len(steps) else kind.cpus)


def _option(scenario: Scenario, kind: NodeKind, shape: WorkerShape) -> PlainOption | None:
    """A task of that shape on a machine of that kind; None if it does not fit there."""
    model, resources = scenario.model(shape), scenario.sizes.plain(shape)
    if kind.room_for(resources) < 1 or (shape.gpus and not model.fits_gpu(kind)):
        return None
    # Several GPUs are of a script whose computation is unknown; then the fastest machine matters, and their number.
    compute_s, input_s = model.arithmetic_s(kind) / max(1, shape.gpus), model.input_s
    latency_s = model.python_s(scenario.hardware.apis[scenario.profile.api].plain_s or 0.0)
    total_s = latency_s + (max(compute_s, input_s) if shape.gpus else compute_s + input_s)
    time = StepTime(compute_s, input_s, latency_s, transfer=0, network=0, update=0, dispatch=0, total=total_s)
    return PlainOption(kind.names[0], resources, time, scenario.profile.batch_size / total_s)
