"""Plans many jobs together: docs/planner.md."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import get_args

from dike.exceptions import BadInputError
from solver.choices import Order
from solver.cluster import Cluster
from solver.hardware import known_hardware
from solver.jobs.allocation import Counts, FormChooser, StartedJob, grow_counts
from solver.jobs.exact import MAX_EXACT_JOBS, MAX_EXACT_MACHINES, plan_exactly
from solver.jobs.exchange import MAX_EXCHANGE_JOBS, exchange
from solver.jobs.forms import Form, FormCatalogue
from solver.jobs.free_capacity import FreeCapacity
from solver.jobs.job import PlanJob, check_names
from solver.jobs.one_job import OneJob
from solver.jobs.packing import JobPlacement, Packer
from solver.jobs.reasons import no_form_reason, no_room_reason
from solver.jobs.report import placed_by_plan, placed_job
from solver.jobs.result import JobsPlan, PlacedJob, UnplacedJob
from solver.nodes import node_kinds
from solver.plan import Plan
from solver.units import SPEED_TIE_SHARE

MAX_ROUNDS = 3
"""Maximum rounds of growing: each distributes what the previous one could not place."""

MIN_MOVED_SHARE = 0.05
"""Moving ends when less than this share of the movable jobs moved: refilling their gaps would gain little."""


def plan_jobs(
    jobs: Sequence[PlanJob], cluster: Cluster, order: Order = "gain", time_limit_s: float | None = None
) -> JobsPlan:
    """Places many jobs on one cluster.

    `given` places the jobs one after the other; each gets its fastest option on the free resources. `gain` gives each
    its minimum first, by weight and then in the given order, so that none starves while another has more than its
    minimum; the rest goes where it saves most weighted time.

    Args:
        jobs: the jobs.
        cluster: the machines, all free.
        order: how the jobs are weighed against each other.
        time_limit_s: time after which `gain` stops improving and `given` plans none exactly; None for no limit.

    Returns:
        The placed jobs and the waiting ones, with the reason.

    Raises:
        BadInputError: if there is no job, two share a name, or the order is unknown.
    """
    started = time.monotonic()
    _check(jobs, order, time_limit_s)
    planning = _Planning(jobs, cluster, math.inf if time_limit_s is None else started + time_limit_s)
    if order == "given":
        planning.place_in_order()
    else:
        planning.place_minimums()
        planning.grow()
        planning.move()
        planning.exchange()
        planning.place_waiting()
    return planning.result(order, started)


def _check(jobs: Sequence[PlanJob], order: str, time_limit_s: float | None) -> None:
    if order not in get_args(Order):
        raise BadInputError(f"'{order}' is not an order of jobs; use {' or '.join(get_args(Order))}.")
    if not jobs:
        raise BadInputError("There is no job to place; give at least one.")
    if time_limit_s is not None and not 0 < time_limit_s < math.inf:
        raise BadInputError(f"The time limit is {time_limit_s:g} s; it must be more than 0.")
    check_names(jobs)


class _Planning:
    """State of one call of `plan_jobs`."""

    def __init__(self, jobs: Sequence[PlanJob], cluster: Cluster, deadline: float) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._deadline = deadline
        kinds = node_kinds(cluster)
        self._catalogue = FormCatalogue(jobs, cluster, kinds, known_hardware())
        self._free = FreeCapacity(kinds)
        self._packer = Packer(self._free)
        self._one_job = OneJob(self._packer, self._free)
        self._chooser = FormChooser()
        self._placements: dict[int, JobPlacement] = {}
        self._wanted: dict[int, Counts] = {}
        self._plans: dict[int, Plan] = {}
        self._waiting: list[int] = []
        self._full: set[int] = set()
        self._in_time = True

    def place_in_order(self) -> None:
        """Gives each job its fastest option on the free resources."""
        exact = len(self._jobs) <= MAX_EXACT_JOBS and self._cluster.node_count <= MAX_EXACT_MACHINES
        self._waiting = []
        for index, job in enumerate(self._jobs):
            if exact and self._plan_exactly(index, job):
                continue
            if not self._place_fastest(index, job):
                self._waiting.append(index)

    def place_minimums(self) -> None:
        """Places every job's minimum, by weight and then in the given order."""
        self._waiting = self._place_minimums_of(
            sorted(range(len(self._jobs)), key=lambda index: -self._jobs[index].weight)
        )

    def place_waiting(self) -> None:
        """Places the minimum of waiting jobs, as growing may have moved others."""
        self._waiting = self._place_minimums_of(self._waiting)

    def grow(self) -> None:
        for _ in range(MAX_ROUNDS):
            started = [
                StartedJob(index, self._jobs[index], placement.form, (placement.workers, placement.ps))
                for index, placement in sorted(self._placements.items())
                if index not in self._full
            ]
            wanted = grow_counts(started, self._free)
            growing = [(entry, counts) for entry, counts in zip(started, wanted, strict=True) if counts != entry.counts]
            # Small jobs first: they fit in more places, and more of them can grow.
            growing.sort(key=lambda item: item[0].form.table.share(item[0].form.table.needs(*item[1])))
            grown = False
            for entry, counts in growing:
                if self._check_time_over():
                    return
                self._wanted[entry.index] = counts
                grown |= self._grow(entry.index, counts)
            if not grown:
                return

    def move(self) -> None:
        """Moves jobs to other free machines where they are faster; others grow into the gaps."""
        movable = sorted(self._placements)
        for _ in range(MAX_ROUNDS):
            moved, gaps = [], set()
            self._one_job.clear_failures()
            for index in movable:
                if self._check_time_over():
                    return
                pool = self._placements[index].form.pool
                if self._place_fastest(index, self._jobs[index]):
                    moved.append(index)
                    gaps.add(pool)
            if not moved or len(moved) < MIN_MOVED_SHARE * len(movable):
                return
            movable = moved
            self._full = {index for index in self._full if self._placements[index].form.pool not in gaps}
            self.grow()

    def exchange(self) -> None:
        if len(self._jobs) > MAX_EXCHANGE_JOBS:
            return
        forms = {index: self._catalogue.forms(self._jobs[index]) for index in self._placements}
        for _ in range(MAX_ROUNDS):
            if not exchange(self._jobs, forms, self._placements, self._packer, self._one_job, self._check_time_over):
                return
            self._wanted.clear()
            self._full.clear()
            self.grow()

    def result(self, order: Order, started: float) -> JobsPlan:
        placed: dict[int, PlacedJob] = {}
        for index, job in enumerate(self._jobs):
            if index in self._plans:
                placed[index] = placed_by_plan(job, self._plans[index], self._cluster)
            elif index in self._placements:
                placed[index] = placed_job(job, self._placements[index], self._wanted.get(index), self._free)
        everything = [part for job in placed.values() for part in job.placement]
        return JobsPlan(
            order=order,
            placed=tuple(placed[index] for index in sorted(placed)),
            unplaced=tuple(UnplacedJob(self._jobs[i].name, self._reason(i)) for i in sorted(self._waiting)),
            machines=self._cluster.node_count,
            machines_used=len({machine for part in everything for machine in part.machines}),
            gpus=sum(node.count * node.gpus for node in self._cluster.nodes),
            gpus_used=sum(part.gpus * len(part.machines) for part in everything),
            solve_time_s=time.monotonic() - started,
            complete=self._in_time,
        )

    def _plan_exactly(self, index: int, job: PlanJob) -> bool:
        if self._check_time_over():
            return False
        gpus = self._catalogue.gpus_per_worker(job)
        plan = plan_exactly(job, gpus, self._cluster, self._free, self._deadline - time.monotonic())
        if plan is None:
            return False
        self._plans[index] = plan
        machine_of = {name: machine for machine, name in enumerate(self._free.names)}
        for task in plan.tasks:
            millis = math.ceil(task.cpus * 1000 - 1e-6)
            self._free.reserve(machine_of[task.node], (millis, task.mem_mb, task.disk_mb, task.gpus))
        return True

    def _place_fastest(self, index: int, job: PlanJob) -> bool:
        """Places the job as fast as the free resources allow, or moves it to other machines if faster there."""
        forms, old = self._catalogue.forms(job), self._placements.get(index)
        floor = 0.0
        if old is not None:
            forms = tuple(form for form in forms if form.pool != old.form.pool)
            floor = old.samples_per_s / (1 - SPEED_TIE_SHARE)
        found = self._one_job.fastest(job, forms, floor)
        if found is None:
            return False
        self._packer.restore(found.placement)
        if old is not None:
            self._packer.release(old)
        self._placements[index] = found.placement
        self._wanted[index] = found.wanted
        return True

    def _place_minimums_of(self, indices: Sequence[int]) -> list[int]:
        """Places minimums in this order; returns the jobs whose minimum does not fit."""
        waiting = []
        # A form that did not fit once does not fit later: resources only shrink in this loop.
        failed: set[tuple[Form, int]] = set()
        for index in indices:
            job = self._jobs[index]
            for form in self._chooser.rank(job, self._catalogue.forms(job)):
                if (form, job.min_workers) in failed:
                    continue
                placement = self._packer.place(form, job.min_workers, 1)
                if placement is not None:
                    self._placements[index] = placement
                    self._chooser.record(job, form)
                    break
                failed.add((form, job.min_workers))
            else:
                waiting.append(index)
        return waiting

    def _grow(self, index: int, counts: Counts) -> bool:
        """Places the job again with up to these counts; keeps the old placement unless that is faster."""
        old = self._placements[index]
        if counts[0] > old.workers and not self._packer.holds_a_worker(old.form):
            counts = old.workers, counts[1]
            if counts[1] == old.ps:
                self._full.add(index)
                return False
        self._packer.release(old)
        new = self._packer.place_most(old.form, *counts, self._jobs[index].min_workers)
        faster = new is not None and new.samples_per_s > old.samples_per_s
        if new is None or not faster or (new.workers, new.ps) != counts:
            self._full.add(index)
        if new is not None and faster:
            self._placements[index] = new
            return True
        if new is not None:
            self._packer.release(new)
        self._packer.restore(old)
        return False

    def _reason(self, index: int) -> str:
        job = self._jobs[index]
        forms = self._catalogue.forms(job)
        if not forms:
            return no_form_reason(
                job, self._catalogue.gpus_per_worker(job), self._free, self._catalogue.scenario(job).sizes
            )
        return no_room_reason(job, forms, self._free)

    def _check_time_over(self) -> bool:
        if time.monotonic() >= self._deadline:
            self._in_time = False
        return not self._in_time
