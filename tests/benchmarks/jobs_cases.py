"""Jobs of simple speeds for the tests of the many-jobs simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.simulation.jobs.losses import TrueCurve
from benchmarks.simulation.jobs.machines import Hosts, Layout, Machines, counts_of
from benchmarks.simulation.jobs.scheduler import PlacedJob, Scheduler
from benchmarks.simulation.jobs.workload import SimulatedJob
from framework.policies.jobs.interface import TaskNeeds
from solver.choices import Sharding
from solver.jobs.free_capacity import NOTHING
from solver.resources import Amounts
from solver.shards import DEFAULT_SHARDING

CURVE = TrueCurve(epochs=20, rate=0.5, power=1.0, floor=0.1, noise=0.0)


@dataclass(frozen=True)
class LinearModel:
    """Ten samples a second for each worker, a fifth less if it is on more than one machine."""

    name: str = "linear"
    synchronous: bool = True
    needs: TaskNeeds = field(default_factory=lambda: TaskNeeds((1000, 1024, 0, 1)))
    max_ps: int = 0
    batch_sizes: tuple[int, ...] = (10,)

    def max_workers(self, batch_size: int) -> int:
        return batch_size

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding = DEFAULT_SHARDING) -> float:
        return sum(workers for workers, _ in layout) * (10.0 if len(layout) == 1 else 8.0)

    def expected_samples_per_s(self, workers: int, ps: int, batch_size: int) -> float:
        return float(workers)


def job(number: int, arrival_s: float = 0.0, samples: float = 36_000, requested: int = 1) -> SimulatedJob:
    return SimulatedJob(
        number, LinearModel(), arrival_s, 10, samples, 2 * samples, requested, max_workers=8, curve=CURVE
    )


def view(
    number: int,
    *,
    needs: Amounts = (1000, 1024, 0, 1),
    ps: Amounts = NOTHING,
    requested: int = 1,
    max_workers: int = 8,
    hosts: Hosts = (),
    samples_left: float = 3600.0,
    speeds: Sequence[float] | None = None,
    change_s: float = 30.0,
) -> PlacedJob:
    """A job without ps, unless it is said what one takes; with twice as many workers twice as fast."""
    max_ps = max_workers if ps != NOTHING else 0
    table = np.array([speeds or [float(workers) for workers in range(1, max_workers + 1)]] * max(1, max_ps))
    return PlacedJob(
        id=number,
        arrival_s=0.0,
        needs=TaskNeeds(needs, ps),
        requested=requested,
        max_workers=max_workers,
        max_ps=max_ps,
        now=counts_of(hosts),
        hosts=hosts,
        samples_left=samples_left,
        samples_per_s=table,
        young=False,
        waited=0,
        change_s=change_s,
    )


@dataclass(frozen=True)
class Recorded:
    """What a scheduler saw and decided in one round."""

    jobs: tuple[PlacedJob, ...]
    hosts: dict[int, Hosts]


def recording(scheduler: Scheduler, rounds: list[Recorded]) -> Scheduler:
    """The same scheduler; what it decides is added to the list."""

    class FakeScheduler(Scheduler):
        def schedule(self, jobs: Sequence[PlacedJob], machines: Machines) -> dict[int, Hosts]:
            decided = scheduler.schedule(jobs, machines)
            rounds.append(Recorded(tuple(jobs), decided))
            return decided

    return FakeScheduler(**{name: getattr(scheduler, name) for name in scheduler.__dataclass_fields__})


def with_hosts(job_view: PlacedJob, hosts: Hosts) -> PlacedJob:
    return replace(job_view, hosts=hosts, now=counts_of(hosts))
