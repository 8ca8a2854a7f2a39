"""Schedulers: an allocation, a placement and a sharding."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.simulation.jobs.machines import Hosts, Machines, counts_of
from benchmarks.simulation.jobs.placement import Place, best_fit, fewest_machines, spread, used_by
from benchmarks.simulation.jobs.schedulers import SCHEDULERS
from dike.exceptions import BadInputError
from framework.policies.jobs.interface import Allocate, Counts, JobView
from framework.policies.jobs.registry import POLICIES
from solver.choices import Sharding
from solver.jobs.free_capacity import plus
from solver.resources import Amounts

ALLOCATIONS: dict[str, Allocate] = {
    "gain": POLICIES["optimus"],
    "relative-gain": POLICIES["dike"],
    "drf": POLICIES["drf"],
    "tetris": POLICIES["tetris"],
    "fifo": POLICIES["fifo"],
}
PLACEMENTS: dict[str, Place] = {"fewest": fewest_machines, "spread": spread, "best-fit": best_fit}
SHARDINGS: dict[str, Sharding] = {"balanced": "greedy", "paa": "optimus", "in-turn": "round_robin"}
LEARNING = ("gain", "relative-gain", "tetris")
"""Allocations that use estimates of a job's speed and remaining work."""
REFERENCE = "optimus"
CONSOLIDATION_FACTOR = 20
"""A job moves to fewer machines if its remaining time is at least this multiple of the cost of a move."""


@dataclass(frozen=True, kw_only=True)
class PlacedJob(JobView):
    """A scheduler's view of a job; `hosts` is empty while it waits."""

    hosts: Hosts


@dataclass(frozen=True)
class Scheduler:
    """Decides in every round.

    Attributes:
        learns: whether it needs a job's speed before the job starts.
        consolidates: whether jobs move to fewer machines when there is room.
    """

    name: str
    allocate: Allocate
    place: Place
    sharding: Sharding
    learns: bool
    consolidates: bool

    def schedule(self, jobs: Sequence[PlacedJob], machines: Machines) -> dict[int, Hosts]:
        """Decides a round; returns the machines of running jobs by job id.

        Jobs that keep their size keep their machines; the others are placed in the order of the allocation, with fewer
        tasks if there is no room for all.
        """
        by_id = {job.id: job for job in jobs}
        wanted = self.allocate(jobs, machines.total)
        free = [machines.capacity] * machines.count
        hosts: dict[int, Hosts] = {}
        for id_, counts in wanted.items():
            if by_id[id_].hosts and counts_of(by_id[id_].hosts) == counts:
                hosts[id_] = by_id[id_].hosts
                _take(by_id[id_], hosts[id_], free)
        for id_, counts in wanted.items():
            if id_ not in hosts:
                found = self._place_most(by_id[id_], counts, free)
                if found is not None:
                    hosts[id_] = found
                    _take(by_id[id_], found, free)
        if self.consolidates:
            for id_, there in sorted(hosts.items(), key=lambda item: -len(item[1])):
                job = by_id[id_]
                if len(there) > 1 and job.seconds_left(counts_of(there)) > CONSOLIDATION_FACTOR * job.change_s:
                    hosts[id_] = self._consolidate(job, there, free)
        return hosts

    def _consolidate(self, job: JobView, hosts: Hosts, free: list[Amounts]) -> Hosts:
        """Moves the job to fewer machines if there is room."""
        _take(job, hosts, free, times=1)
        found = self.place(job.needs, counts_of(hosts), free)
        chosen = found if found is not None and len(found) < len(hosts) else hosts
        _take(job, chosen, free)
        return chosen

    def _place_most(self, job: JobView, counts: Counts, free: Sequence[Amounts]) -> Hosts | None:
        workers, ps = counts
        for fewer in range(workers, 0, -1):
            found = self.place(job.needs, (fewer, min(ps, fewer) if fewer < workers else ps), free)
            if found is not None:
                return found
        return None


def scheduler_named(name: str) -> Scheduler:
    """One of `SCHEDULERS`, or any ALLOCATION/PLACEMENT/SHARDING, such as `gain/spread/in-turn`.

    Raises:
        BadInputError: if the name is unknown.
    """
    parts = SCHEDULERS.get(name, name).split("/")
    if len(parts) != 3:
        near = difflib.get_close_matches(name.lower(), SCHEDULERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(
            f"There is no policy '{name}'; {hint}choose one of {', '.join(SCHEDULERS)}, "
            f"or combine rules, as in {SCHEDULERS['drf']}."
        )
    rules: tuple[Collection[str], ...] = (ALLOCATIONS, PLACEMENTS, SHARDINGS)
    for part, known in zip(parts, rules, strict=True):
        if part not in known:
            raise BadInputError(f"'{part}' in the policy '{name}' is unknown; choose one of {', '.join(known)}.")
    allocation, placement, sharding = parts
    return Scheduler(
        name,
        ALLOCATIONS[allocation],
        PLACEMENTS[placement],
        SHARDINGS[sharding],
        learns=allocation in LEARNING,
        consolidates=placement == "fewest",
    )


def _take(job: JobView, hosts: Hosts, free: list[Amounts], times: int = -1) -> None:
    """Subtracts a job's resources from the free ones; adds them with `times` 1."""
    for host in hosts:
        free[host.machine] = plus(free[host.machine], used_by(job.needs, host), times)
