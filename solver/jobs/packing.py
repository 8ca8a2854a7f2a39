"""Packs a job's tasks onto machines with room for them.

Optimus (EuroSys 2018, section 4.3): the fewest machines that hold the job with equal counts of workers and parameter
servers on each. Of the machines with enough room the fullest are used, in one rack and behind equal network cards if
possible, so that large gaps remain for large jobs. If no even spread fits, the machines with most room are filled one
by one; if that fails too, the job gets less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.jobs.forms import Form, Spread
from solver.jobs.free_capacity import NOTHING, FreeCapacity
from solver.resources import Amounts


class Host(NamedTuple):
    """A machine and the tasks of one job on it."""

    machine: int
    workers: int
    ps: int
    chief: int


class _Filled(NamedTuple):
    """Machines filled one by one, and the number of workers they hold; None for the machines if that is too few."""

    hosts: list[Host] | None
    workers: int


@dataclass(frozen=True, eq=False)
class JobPlacement:
    """A job's tasks on machines."""

    form: Form
    workers: int
    ps: int
    hosts: tuple[Host, ...]
    samples_per_s: float
    step_time_s: float

    def need(self, host: Host) -> Amounts:
        return _need(self.form, self.ps, host)


class Packer:
    """Places jobs on the free resources, and removes them again."""

    def __init__(self, free: FreeCapacity) -> None:
        self._free = free
        domains = {(kind.rack, kind.network_bytes_per_s): None for kind in free.kinds}
        numbers = {domain: number for number, domain in enumerate(domains)}
        self._domain_of_kind: NDArray[np.intp] = np.array(
            [numbers[kind.rack, kind.network_bytes_per_s] for kind in free.kinds]
        )
        self._pool_is_split: dict[bytes, bool] = {}

    def place(self, form: Form, workers: int, ps: int) -> JobPlacement | None:
        """Places these tasks and reserves their resources; None, with nothing reserved, if they do not fit.

        With one ps, None is exact: there is no room in any arrangement.
        """
        hosts = self._place_evenly(form, workers, ps)
        if hosts is None:
            hosts = self._place_unevenly(form, workers, ps).hosts
        return None if hosts is None else self._placement(form, workers, ps, hosts)

    def place_most(self, form: Form, workers: int, ps: int, at_least: int) -> JobPlacement | None:
        """As `place`; if there is no room, places as many workers as fit, and proportionally fewer ps."""
        while True:
            hosts = self._place_evenly(form, workers, ps)
            room = workers
            if hosts is None:
                hosts, room = self._place_unevenly(form, workers, ps)
            if hosts is not None:
                return self._placement(form, workers, ps, hosts)
            if room >= at_least:
                workers, ps = room, max(1, round(ps * room / workers))
            elif ps > 1:
                ps //= 2
            else:
                return None

    def holds_a_worker(self, form: Form) -> bool:
        return len(self._free.holding(form.needs.worker, form.usable)) > 0

    def release(self, placement: JobPlacement) -> None:
        for host in placement.hosts:
            self._free.release(host.machine, placement.need(host))

    def restore(self, placement: JobPlacement) -> None:
        """Reserves the resources of a released placement again."""
        for host in placement.hosts:
            self._free.reserve(host.machine, placement.need(host))

    def _placement(self, form: Form, workers: int, ps: int, hosts: Sequence[Host]) -> JobPlacement:
        kinds = self._free.kind_of
        evaluation = form.evaluate([(kinds[host.machine], host.workers, host.ps) for host in hosts])
        return JobPlacement(form, workers, ps, tuple(hosts), evaluation.samples_per_s, evaluation.step_time.total)

    def _place_evenly(self, form: Form, workers: int, ps: int) -> list[Host] | None:
        for spread in form.spreads(workers, ps):
            chosen = self._choose(form, spread)
            if chosen is None:
                continue
            for host in chosen:
                self._free.reserve(host.machine, _need(form, ps, host))
            hosts = self._with_chief(form, chosen)
            if hosts is not None:
                return hosts
            self._release_hosts(form, ps, chosen)
        return None

    def _choose(self, form: Form, spread: Spread) -> list[Host] | None:
        usable = form.usable
        rows = self._free.holding(spread.most, usable)
        if len(rows) and self._in_several_domains(form):
            domain_of_row = self._domain_of_kind[self._free.row_kinds[rows]]
            there = np.bincount(domain_of_row, self._free.counts[rows])
            enough = np.flatnonzero(there >= spread.machines)
            if len(enough):
                domain = enough[there[enough].argmin()]
                usable, rows = usable & (self._domain_of_kind == domain), rows[domain_of_row == domain]
        hosts: list[Host] = []
        used: dict[int, int] = {}
        for count, workers, ps, need in spread.groups:
            fitting = rows if need == spread.most else self._free.holding(need, usable)
            if not len(fitting):
                return None
            for row in self._free.fullest_first(fitting):
                before = used.get(row, 0)
                taken = min(count, int(self._free.counts[row]) - before)
                hosts += [Host(machine, workers, ps, 0) for machine in self._free.machines(row, taken, before)]
                used[row] = before + taken
                count -= taken
                if not count:
                    break
            else:
                return None
        return hosts

    def _in_several_domains(self, form: Form) -> bool:
        """Whether the form's machines differ in rack or network card."""
        if form.pool not in self._pool_is_split:
            self._pool_is_split[form.pool] = len(np.unique(self._domain_of_kind[form.usable])) > 1
        return self._pool_is_split[form.pool]

    def _with_chief(self, form: Form, hosts: list[Host]) -> list[Host] | None:
        """Places the chief, if any: on a machine of the job, the emptiest first, else on any."""
        chief = form.needs.chief
        if chief == NOTHING:
            return hosts
        for index in range(len(hosts) - 1, -1, -1):
            machine = hosts[index].machine
            if all(have >= need for have, need in zip(self._free.free_on(machine), chief, strict=True)):
                self._free.reserve(machine, chief)
                return [*hosts[:index], hosts[index]._replace(chief=1), *hosts[index + 1 :]]
        for row in self._free.fullest_first(self._free.holding(chief, self._free.anywhere)):
            machine = next(self._free.machines(row, 1))
            self._free.reserve(machine, chief)
            return [*hosts, Host(machine, 0, 0, 1)]
        return None

    def _place_unevenly(self, form: Form, workers: int, ps: int) -> _Filled:
        """Places ps and chief where they cost least room for workers, then workers where most fit.

        With one ps and a chief this finds a placement if there is one: the best two machines are the cheapest for each,
        unless both prefer the same one. Then either may get it, or both together.
        """
        one_ps, chief = Host(-1, 0, 1, 0), Host(-1, 0, 0, 1)
        if form.is_gang:
            orders: list[list[tuple[Host, int]]] = [[]]
        elif form.needs.chief == NOTHING:
            orders = [[(one_ps, ps)]]
        elif ps == 1:
            orders = [[(one_ps, 1), (chief, 1)], [(chief, 1), (one_ps, 1)], [(Host(-1, 0, 1, 1), 1)]]
        else:
            orders = [[(one_ps, ps), (chief, 1)]]
        most = 0
        for helpers in orders:
            filled = self._fill(form, workers, ps, helpers)
            if filled.hosts is not None:
                return filled
            most = max(most, filled.workers)
        return _Filled(None, most)

    def _fill(self, form: Form, workers: int, ps: int, helpers: Sequence[tuple[Host, int]]) -> _Filled:
        taken: dict[int, Host] = {}

        def add(machines: Iterable[int], tasks: Host) -> None:
            need = _need(form, ps, tasks)
            for machine in machines:
                self._free.reserve(machine, need)
                old = taken.get(machine, Host(machine, 0, 0, 0))
                taken[machine] = Host(machine, old.workers + tasks.workers, old.ps + tasks.ps, old.chief + tasks.chief)

        left = workers
        for helper, count in helpers:
            while count:
                cheapest = self._cheapest(form, _need(form, ps, helper), count)
                add(cheapest, helper)
                count -= len(cheapest)
                if not cheapest:
                    self._release_hosts(form, ps, taken.values())
                    return _Filled(None, 0)
        rooms = self._free.capacity(form.needs.worker, form.usable)
        rows = np.flatnonzero(rooms > 0)
        order = rows[np.argsort(-rooms[rows], kind="stable")].tolist()
        # Chosen up front, as rows change once their machines are reserved.
        chosen = [(int(rooms[row]), tuple(self._free.machines(row, -(-left // int(rooms[row]))))) for row in order]
        for room, machines in chosen:
            full = left // room
            add(machines[:full], Host(-1, room, 0, 0))
            left -= room * min(full, len(machines))
            if 0 < left < room and len(machines) > full:
                add(machines[full : full + 1], Host(-1, left, 0, 0))
                left = 0
            if not left:
                return _Filled(list(taken.values()), workers)
        self._release_hosts(form, ps, taken.values())
        return _Filled(None, workers - left)

    def _cheapest(self, form: Form, helper: Amounts, count: int) -> list[int]:
        """Up to `count` machines that each hold a helper and lose least room for workers; ties by most room left."""
        before = self._free.capacity(form.needs.worker, form.usable)
        after = self._free.capacity(form.needs.worker, form.usable, helper)
        rows = np.flatnonzero(after >= 0)
        lost = before[rows] - after[rows]
        machines: list[int] = []
        for row in rows[np.lexsort((-after[rows], lost))].tolist():
            machines += self._free.machines(row, count - len(machines))
            if len(machines) == count:
                break
        return machines

    def _release_hosts(self, form: Form, ps: int, hosts: Iterable[Host]) -> None:
        for host in hosts:
            self._free.release(host.machine, _need(form, ps, host))


def _need(form: Form, ps: int, host: Host) -> Amounts:
    return form.needs_on(ps, host.workers, host.ps, host.chief)
