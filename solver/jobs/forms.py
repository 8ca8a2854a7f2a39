"""Forms in which a job can run: workers of one size on machines of one GPU model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solver.allreduce import gang_step
from solver.cluster import Cluster
from solver.evaluation import Evaluation, evaluate
from solver.hardware import Hardware
from solver.jobs.free_capacity import NOTHING, plus
from solver.jobs.job import PlanJob
from solver.jobs.speed import GainTable, GangTable, JobTaskAmounts, SpeedTable, even_spread
from solver.nodes import NodeKind
from solver.options import cpus_per_gpu
from solver.placement.naming import Assignment
from solver.resources import CPU_STEP, Amounts, TaskSizes, WorkerShape
from solver.scenario import Scenario
from solver.shards import useful_ps_count

MAX_TABLE_WORKERS = 1024
"""Maximum workers of a job, unless its minimum is larger: the width of the tables."""

_Key = tuple[int, int, bool]
HostCounts = tuple[int, int, int]
"""Kind of a machine, and the workers and parameter servers of one job on it."""


@dataclass(frozen=True)
class Spread:
    """Tasks spread evenly.

    Attributes:
        groups: machines, workers on each, ps on each and the resources of these; most workers first.
        most: maximum resources of the tasks on one machine.
    """

    machines: int
    groups: tuple[tuple[int, int, int, Amounts], ...]
    most: Amounts


@dataclass(frozen=True, eq=False)
class Form:
    """A form of jobs of one model: worker size and GPU model.

    Attributes:
        gpu_model: the GPUs' model; None without GPUs or if unknown.
        usable: whether workers may run on machines of a kind, by kind.
        is_gang: whether the workers sum their gradients without parameter servers. Where others have one ps, a gang has
            none: its counts of parameter servers are 1 in tables, and 0 on machines.
    """

    scenario: Scenario
    shape: WorkerShape
    gpu_model: str | None
    usable: NDArray[np.bool_]
    needs: JobTaskAmounts
    table: GainTable
    is_gang: bool = False
    _evaluated: dict[tuple[HostCounts, ...], Evaluation] = field(default_factory=dict, repr=False)
    _spreads: dict[tuple[int, int], tuple[Spread, ...]] = field(default_factory=dict, repr=False)
    _needed: dict[tuple[int, int, int, int], Amounts] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def pool(self) -> bytes:
        """Key of the machines that its workers can use."""
        return self.usable.tobytes()

    def most_workers(self, job: PlanJob) -> int:
        return min(_limit(job), self.table.max_workers)

    def needs_on(self, all_ps: int, workers: int, ps: int, chief: int = 0) -> Amounts:
        """Resources of these tasks on one machine, in a job with `all_ps` parameter servers."""
        key = all_ps, workers, ps, chief
        need = self._needed.get(key)
        if need is None:
            need = plus(NOTHING, self.needs.worker, workers)
            if ps:
                need = plus(need, self.needs.ps[all_ps - 1], ps)
            if chief:
                need = plus(need, self.needs.chief)
            self._needed[key] = need
        return need

    def spreads(self, workers: int, ps: int) -> tuple[Spread, ...]:
        """Even spreads on ever more machines, from the fewest that could hold the job; one for each distinct peak."""
        key = workers, ps
        if key not in self._spreads:
            self._spreads[key] = tuple(self._spread(workers, ps))
        return self._spreads[key]

    def _spread(self, workers: int, ps: int) -> Iterator[Spread]:
        kinds = [kind for kind, use in zip(self.scenario.kinds, self.usable, strict=True) if use]
        largest = [max(have) for have in zip(*(kind.amounts for kind in kinds), strict=True)]
        ps = 0 if self.is_gang else ps
        total = self.needs.of(workers, ps)
        fewest = max(-(-need // have) for need, have in zip(total, largest, strict=True) if have)
        before = NOTHING
        for machines in range(max(1, min(fewest, workers + ps)), workers + ps + 1):
            groups = tuple((*group, self.needs_on(ps, *group[1:])) for group in even_spread(workers, ps, machines))
            cpus, memory, disk, gpus = (max(values) for values in zip(*(group[3] for group in groups), strict=True))
            most = cpus, memory, disk, gpus
            if most != before and all(have >= need for have, need in zip(largest, most, strict=True)):
                yield Spread(machines, groups, most)
            before = most

    def evaluate(self, hosts: Sequence[HostCounts]) -> Evaluation:
        """Predicts step time and speed on these machines; the largest shards go to the first ones."""
        key = tuple(sorted(hosts, key=lambda host: (-host[1], -host[2], host[0])))
        if key not in self._evaluated:
            self._evaluated[key] = self._evaluate(key)
        return self._evaluated[key]

    def _evaluate(self, hosts: tuple[HostCounts, ...]) -> Evaluation:
        # Only the job's own machines, named by their index: the speed does not depend on others.
        names: dict[int, list[str]] = {}
        for index, (kind, _, _) in enumerate(hosts):
            names.setdefault(kind, []).append(str(index))
        kinds = tuple(dataclasses.replace(self.scenario.kinds[kind], names=tuple(here)) for kind, here in names.items())
        if self.is_gang:
            return self._evaluate_gang(kinds, {str(index): host[1] for index, host in enumerate(hosts)})
        rounds = max(ps for _, _, ps in hosts)
        ps = tuple(str(index) for turn in range(rounds) for index, host in enumerate(hosts) if host[2] > turn)
        workers = tuple(str(index) for index, host in enumerate(hosts) for _ in range(host[1]))
        scenario = dataclasses.replace(self.scenario, kinds=kinds)
        return evaluate(scenario, self.shape, scenario.shards(len(ps)), Assignment(ps, workers, None))

    def _evaluate_gang(self, kinds: tuple[NodeKind, ...], workers_on: dict[str, int]) -> Evaluation:
        scenario = dataclasses.replace(self.scenario, kinds=kinds)
        model, count = scenario.model(self.shape), sum(workers_on.values())
        step = gang_step(scenario, model, workers_on)
        if count == 1:
            alone_s = model.python_s(model.hardware.ring_step_s)
            step = dataclasses.replace(step, latency=step.latency - alone_s, total=step.total - alone_s)
        return Evaluation(step, step.total, scenario.profile.batch_size / step.total, 0.0)


class FormCatalogue:
    """The forms of every job; jobs of one model share them."""

    def __init__(
        self, jobs: Sequence[PlanJob], cluster: Cluster, kinds: Sequence[NodeKind], hardware: Hardware
    ) -> None:
        self._cluster = cluster
        self._kinds = tuple(kinds)
        self._hardware = hardware
        self._limits: Counter[_Key] = Counter()
        for job in jobs:
            key = self._key(job)
            self._limits[key] = max(self._limits[key], _limit(job))
        self._forms: dict[_Key, tuple[Form, ...]] = {}
        self._scenarios: dict[int, Scenario] = {}

    def gpus_per_worker(self, job: PlanJob) -> int:
        if job.gpus_per_worker is not None:
            return job.gpus_per_worker
        return int(any(kind.gpus for kind in self._kinds))

    def forms(self, job: PlanJob) -> tuple[Form, ...]:
        """The job's forms, none if no machine of the empty cluster holds one of its workers."""
        key = self._key(job)
        if key not in self._forms:
            each = self._make(self.scenario(job), self.gpus_per_worker(job), self._limits[key], is_gang=job.is_gang)
            self._forms[key] = tuple(each)
        return self._forms[key]

    def scenario(self, job: PlanJob) -> Scenario:
        key = id(job.profile)
        if key not in self._scenarios:
            sizes = TaskSizes.of(job.profile, max(kind.cpus for kind in self._kinds))
            self._scenarios[key] = Scenario(job.profile, self._cluster, self._hardware, self._kinds, sizes)
        return self._scenarios[key]

    def _key(self, job: PlanJob) -> _Key:
        return id(job.profile), self.gpus_per_worker(job), job.is_gang

    def _make(self, scenario: Scenario, gpus: int, limit: int, *, is_gang: bool) -> Iterator[Form]:
        if not gpus:
            everywhere = np.ones(len(self._kinds), dtype=bool)
            for shape in self._shapes(scenario, self._kinds, 0, is_gang=is_gang):
                yield from self._form(scenario, shape, None, everywhere, limit, is_gang=is_gang)
        else:
            for gpu_model in dict.fromkeys(kind.gpu_model for kind in self._kinds if kind.gpus):
                usable = np.array([kind.gpus > 0 and kind.gpu_model == gpu_model for kind in self._kinds])
                pool = tuple(kind for kind, use in zip(self._kinds, usable, strict=True) if use)
                for shape in self._shapes(scenario, pool, gpus, is_gang=is_gang):
                    if scenario.model(shape).fits_gpu(pool[0]):
                        yield from self._form(scenario, shape, gpu_model, usable, limit, is_gang=is_gang)

    def _shapes(self, scenario: Scenario, pool: Sequence[NodeKind], gpus: int, *, is_gang: bool) -> list[WorkerShape]:
        """A worker's CPUs: enough to feed its GPUs, or an even share of a machine beside one ps and the chief."""
        helpers = 0.0 if is_gang else scenario.sizes.helper_cpus * (1 if scenario.sizes.chief is None else 2)
        if not gpus:
            parts = {(kind.cpus, 2**power) for kind in pool for power in range(int(kind.cpus).bit_length() or 1)}
            shares = {_round_down_cpus((cpus - beside) / count) for cpus, count in parts for beside in (0.0, helpers)}
            return [WorkerShape(0, share) for share in sorted(shares, reverse=True)]
        each = set()
        for kind in pool:
            # Where CPUs are scarce, the rest beside the helpers is divided evenly.
            feeding, _ = cpus_per_gpu(scenario.profile, self._hardware, kind)
            share = _round_down_cpus((kind.cpus - helpers) / kind.gpus)
            each.add(min(feeding, share))
            if is_gang:
                # Each worker prepares whole batches, of which it computes a part.
                each.add(share)
        return [WorkerShape(gpus, cpus * gpus) for cpus in dict.fromkeys((min(each), max(each)))]

    def _form(
        self,
        scenario: Scenario,
        shape: WorkerShape,
        gpu_model: str | None,
        usable: NDArray[np.bool_],
        limit: int,
        *,
        is_gang: bool,
    ) -> Iterator[Form]:
        worker = scenario.sizes.plain(shape) if is_gang else scenario.sizes.worker(shape)
        pool = [kind for kind, use in zip(self._kinds, usable, strict=True) if use]
        rooms = [kind.count * max(0, kind.room_for(worker)) for kind in pool]
        if not sum(rooms):
            return
        workers = min(limit, sum(rooms))
        total = functools.reduce(lambda sum_, kind: plus(sum_, kind.amounts, kind.count), pool, NOTHING)
        usual = pool[rooms.index(max(rooms))]
        if is_gang:
            needs = JobTaskAmounts(worker.amounts, (NOTHING,), NOTHING)
            most, room = min(workers, scenario.profile.batch_size), usual.room_for(worker)
            gangs = GangTable(scenario.model(shape), usual, needs, room, most, total)
            yield Form(scenario, shape, gpu_model, usable, needs, gangs, is_gang=True)
            return
        most_ps = useful_ps_count(scenario.profile, min(sum(kind.count for kind in self._kinds), workers))
        each_ps = tuple(scenario.sizes.ps(scenario.shards(ps).sizes[0]).amounts for ps in range(1, most_ps + 1))
        chief = scenario.sizes.chief
        needs = JobTaskAmounts(worker.amounts, each_ps, NOTHING if chief is None else chief.amounts)
        table = SpeedTable(scenario.model(shape), usual, needs, scenario.shards, workers, total)
        yield Form(scenario, shape, gpu_model, usable, needs, table)


def _round_down_cpus(cpus: float) -> float:
    """Rounds a worker's CPUs down to a multiple of the step, at least one step."""
    return max(CPU_STEP, math.floor(cpus / CPU_STEP + 1e-9) * CPU_STEP)


def _limit(job: PlanJob) -> int:
    return max(job.min_workers, min(job.max_workers or MAX_TABLE_WORKERS, MAX_TABLE_WORKERS))
