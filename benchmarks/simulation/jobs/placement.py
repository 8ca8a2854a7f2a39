"""Placement rules of a job's tasks.

A rule takes the free resources of every machine and reserves nothing; it returns None if there is no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.simulation.jobs.machines import Host, Hosts
from framework.policies.jobs.interface import Counts, TaskNeeds, fits
from solver.jobs.free_capacity import NOTHING, plus
from solver.jobs.speed import even_spread
from solver.resources import Amounts

Place = Callable[[TaskNeeds, Counts, Sequence[Amounts]], Hosts | None]
"""(resources of the tasks, numbers of tasks, free resources of each machine) -> placement."""


def fewest_machines(needs: TaskNeeds, counts: Counts, free: Sequence[Amounts]) -> Hosts | None:
    """Optimus (section 4.2): the fewest machines that hold the job in equal parts, of these the fullest.

    If no equal parts fit, fills the machines with most room one by one.
    """
    workers, ps = counts
    fullest = sorted(range(len(free)), key=lambda machine: _room(free[machine]))
    for machines in range(1, min(workers + ps, len(free)) + 1):
        hosts: list[Host] = []
        for there, on_each, ps_on_each in even_spread(workers, ps, machines):
            need, used = needs.of(on_each, ps_on_each), {host.machine for host in hosts}
            fitting = [machine for machine in fullest if machine not in used and fits(need, free[machine])]
            hosts += [Host(machine, on_each, ps_on_each) for machine in fitting[:there]]
        if sum(host.workers for host in hosts) == workers and sum(host.ps for host in hosts) == ps:
            return tuple(hosts)
    return _one_by_one(needs, counts, free, lambda machine, left: (-_room(free[machine])[0], machine))


def spread(needs: TaskNeeds, counts: Counts, free: Sequence[Amounts]) -> Hosts | None:
    """Each task on the machine with most room, the default of Kubernetes."""
    return _one_by_one(needs, counts, free, lambda machine, left: tuple(-amount for amount in _room(left)))


def best_fit(needs: TaskNeeds, counts: Counts, free: Sequence[Amounts]) -> Hosts | None:
    """Each task on the fullest machine that holds it, for little fragmentation (Tetris)."""
    return _one_by_one(needs, counts, free, lambda machine, left: _room(left))


def _one_by_one(
    needs: TaskNeeds,
    counts: Counts,
    free: Sequence[Amounts],
    order: Callable[[int, Amounts], tuple[int, ...]],
) -> Hosts | None:
    left = list(free)
    placed: dict[str, Counter[int]] = {"worker": Counter(), "ps": Counter()}
    workers, ps = counts
    # Workers and ps alternate.
    roles = [role for turn in range(max(counts)) for role, most in (("worker", workers), ("ps", ps)) if turn < most]
    for role in roles:
        need = needs.worker if role == "worker" else needs.ps
        fitting = [machine for machine, have in enumerate(left) if fits(need, have)]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda machine: order(machine, left[machine]))
        left[chosen] = plus(left[chosen], need, -1)
        placed[role][chosen] += 1
    machines = sorted(placed["worker"].keys() | placed["ps"].keys())
    return tuple(Host(machine, placed["worker"][machine], placed["ps"][machine]) for machine in machines)


def _room(free: Amounts) -> tuple[int, int, int]:
    """GPUs, CPUs and memory, the scarcest first."""
    return free[3], free[0], free[1]


def used_by(needs: TaskNeeds, host: Host) -> Amounts:
    return plus(NOTHING, needs.of(host.workers, host.ps))
