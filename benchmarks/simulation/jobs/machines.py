"""The machines that simulated jobs share, and a job's tasks on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dike.exceptions import BadInputError
from framework.policies.jobs.interface import Counts, TaskNeeds, fits
from solver.cluster import Cluster, NodeClass
from solver.jobs.free_capacity import NOTHING, plus
from solver.jobs.speed import even_spread
from solver.nodes import node_kinds
from solver.resources import Amounts
from solver.units import GIB

Layout = tuple[Counts, ...]
"""Workers and parameter servers of a job on each of its machines, most first; which machines does not matter."""


class Host(NamedTuple):
    """A machine, by its number, and the tasks of one job on it."""

    machine: int
    workers: int
    ps: int


Hosts = tuple[Host, ...]


@dataclass(frozen=True)
class Machines:
    """Identical machines.

    Attributes:
        network_gbps: speed of each network card, each way.
    """

    count: int = 16
    gpus: int = 4
    cpus: float = 48
    mem_gib: float = 192
    network_gbps: float = 10
    gpu_model: str = "T4"

    def __post_init__(self) -> None:
        if self.count < 1 or self.gpus < 1:
            raise BadInputError(
                f"There must be at least 1 machine with 1 GPU, not {self.count} machines with {self.gpus} GPUs each."
            )
        for what, value in (("CPUs", self.cpus), ("GiB of memory", self.mem_gib), ("Gb/s", self.network_gbps)):
            if not 0 < value < float("inf"):
                raise BadInputError(f"A machine must have more than 0 {what}, not {value:g}.")

    def cluster(self, network_factor: float = 1.0) -> Cluster:
        """The machines as a cluster of the planner; `network_factor` scales the speed of the network cards."""
        return Cluster(
            (
                NodeClass(
                    name="machine",
                    count=self.count,
                    cpus=self.cpus,
                    mem_bytes=int(self.mem_gib * GIB),
                    gpus=self.gpus,
                    gpu_model=self.gpu_model,
                    disk_bytes=1000 * GIB,
                    network_gbps=self.network_gbps * network_factor,
                ),
            )
        )

    @property
    def capacity(self) -> Amounts:
        """Resources of one machine."""
        return node_kinds(self.cluster())[0].amounts

    @property
    def total(self) -> Amounts:
        return plus(NOTHING, self.capacity, self.count)


def counts_of(hosts: Iterable[Host]) -> Counts:
    """Workers and parameter servers on all machines."""
    placed = tuple(hosts)
    return sum(host.workers for host in placed), sum(host.ps for host in placed)


def layout_of(hosts: Iterable[Host]) -> Layout:
    return tuple(sorted(((host.workers, host.ps) for host in hosts), reverse=True))


@functools.cache
def even_layout(needs: TaskNeeds, counts: Counts, machine: Amounts) -> Layout | None:
    """The fewest empty machines that hold a job in equal parts; None if no number of machines does."""
    workers, ps = counts
    for machines in range(1, workers + ps + 1):
        groups = even_spread(workers, ps, machines)
        if all(fits(needs.of(on_each, ps_on_each), machine) for _, on_each, ps_on_each in groups):
            return tuple((on_each, ps_on_each) for there, on_each, ps_on_each in groups for _ in range(there))
    return None
