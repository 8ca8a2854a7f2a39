"""Placement of many jobs' tasks, as data for JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from solver.choices import Order
from solver.plan import Option

Method = Literal["exact", "optimus"]
"""`exact`: as `make_plan` plans one job; `optimus`: counts from a table of speeds, even placement."""


@dataclass(frozen=True)
class MachineTasks:
    """Machines on which one job has the same tasks with the same resources.

    Attributes:
        chief: 1 if the separate chief is there, else 0.
    """

    machines: tuple[str, ...]
    workers: int
    ps: int
    chief: int
    cpus: float
    mem_mb: int
    disk_mb: int
    gpus: int


@dataclass(frozen=True)
class PlacedJob:
    """A job with its option and machines.

    Attributes:
        gpu_model: model of its GPUs; None without GPUs, if unknown, or if there are several.
        remaining_s: predicted seconds until its last sample.
        note: what it did not get, in a sentence; empty if it got everything.
    """

    name: str
    method: Method
    option: Option
    gpu_model: str | None
    placement: tuple[MachineTasks, ...]
    samples_per_s: float
    step_time_s: float
    remaining_s: float
    note: str = ""

    @property
    def tasks(self) -> int:
        return self.option.workers + self.option.ps + (self.option.chief is not None)


@dataclass(frozen=True)
class UnplacedJob:
    """A waiting job with the scarce resource."""

    name: str
    reason: str


@dataclass(frozen=True)
class JobsPlan:
    """A plan for many jobs.

    Attributes:
        complete: whether there was time for everything; if not, some jobs have only their minimum, or wait.
    """

    order: Order
    placed: tuple[PlacedJob, ...]
    unplaced: tuple[UnplacedJob, ...]
    machines: int
    machines_used: int
    gpus: int
    gpus_used: int
    solve_time_s: float
    complete: bool = True

    @property
    def tasks(self) -> int:
        return sum(job.tasks for job in self.placed)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "tasks": self.tasks}
