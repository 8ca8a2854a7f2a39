"""Decides which size a running job should have.

As in Optimus (EuroSys 2018, section 4.2; costs: section 5.4): a change, for which the job is saved, stopped and
restarted, pays if it saves more time than it costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dike.task import Role
from framework.mesos.offers import AgentOffer, cluster_of
from framework.policies.jobs.interface import JobView, TaskNeeds
from framework.scheduler.demand import Demand, FrameworkUsage
from framework.scheduler.exclusions import Exclusions
from framework.training.elastic.layout import Layout, Size, layout, replacement, size_of
from framework.training.spec import JobSpec, JobTask
from framework.training.state import JobRun
from solver import NodeClass, Plan
from solver.calibration.nnls import Floats
from solver.jobs.free_capacity import NOTHING
from solver.jobs.speed import GainTable, GangTable, JobTaskAmounts, SpeedTable
from solver.online import ConvergenceModel, SpeedModel, sample_sizes
from solver.request import scenario_of
from solver.resources import TaskResources, WorkerShape
from solver.shards import useful_ps_count
from solver.units import MIB

DEFAULT_COST_S = 10.0
"""Assumed cost of a change before one was measured."""
MIN_SPEEDUP = 0.05
"""Minimum relative speedup of a change; less is within the error of the speed model."""
SPEED_TOLERANCE = 0.02
"""Sizes whose speeds differ by less count as equally fast; the one with fewest tasks wins."""
AGENT_COOLDOWN_S = 600.0
"""How long an agent gets no new tasks after a worker there was a straggler or a new task failed."""
MAX_DEMAND_AGE_S = 0.5
"""Maximum age of the demand last fetched from the master."""
NEAR_WORKERS = 8
"""All numbers of workers that differ from the current one by up to this are candidates."""
FAR_WORKERS_RATIO = 1.2
"""Ratio of neighbouring candidates among the other numbers."""
MIN_SHRINK_PATIENCE_S = 30.0
SHRINK_PATIENCE_INTERVALS = 3
"""Number of resize intervals that others have to use released resources."""
MAX_SPEED_WINDOW_S = 60.0
"""Maximum window over which speed is measured."""
MIN_SPEED_WINDOW_S = 2.0
"""Minimum window, after `SPEED_WARM_UP_S`."""
MIN_SPEED_POINTS = 3
"""Minimum number of points kept, as a step may take minutes."""
SPEED_WARM_UP_S = 1.0
"""The first steps include tracing and cache warm-up."""
MAX_PS = 64
SAMPLE_SIZE_COUNT = 5
"""Number of candidate sizes for sample runs (Optimus, section 3.2), limited to sizes that need no further tasks."""
MIN_REMAINING_COSTS = 100
"""Sample runs are made if the remaining time is at least this multiple of the cost of a change."""


@dataclass(frozen=True)
class SizeDecision:
    """A size to change to.

    Attributes:
        reason: a sentence for the user.
        beneficiaries: ids of the frameworks for which the job shrinks.
        needs_no_offers: whether the change only removes tasks and so needs no offers.
    """

    size: Size
    reason: str
    beneficiaries: tuple[str, ...] = ()
    needs_no_offers: bool = False


class Autoscaler:
    """Decides the size of a job, across all its attempts.

    Args:
        demand: returns what other frameworks use and request; None if unknown.

    Attributes:
        cost_s: cost of the last change in seconds.
        total_steps: number of steps that the script trains; None until it is reported.
        allotted: the size given by the central allocation; None where the job decides for itself.
    """

    def __init__(self, spec: JobSpec, run: JobRun, demand: Callable[[], Demand | None]) -> None:
        self._spec = spec
        self._run = run
        self._demand = demand
        self._shrinks = ShrinkHistory(max(MIN_SHRINK_PATIENCE_S, SHRINK_PATIENCE_INTERVALS * spec.resize_interval_s))
        self._demand_fetched_s = -math.inf
        self._cached_demand: Demand | None = None
        self._avoided = Exclusions(AGENT_COOLDOWN_S)
        self._models: JobModels | None = None
        self._least_ps = 1
        self._planned_ps: int | None = None
        self._most_workers: int | None = None
        self.cost_s = DEFAULT_COST_S
        self.total_steps: int | None = None
        self.allotted: Size | None = None

    @property
    def is_known(self) -> bool:
        """Whether its speeds are known, measured or predicted."""
        return self._models is not None

    def plan_ahead(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """Sets up the speed model from a plan made in advance for these machines, with their total resources."""
        if self._models is None or not self._models.is_for(plan):
            self._models = JobModels(self._spec, plan, nodes)
        self._least_ps = self._planned_ps = plan.option.ps
        self._most_workers = most_workers(plan, nodes, self._spec)

    def view(self, now: Size | None, *, can_change: bool, can_grow: bool) -> JobView:
        """The job as the allocation policy sees it.

        Args:
            now: its size; None if it waits.
            can_change: whether tasks can be removed.
            can_grow: whether tasks can be added.
        """
        assert self._spec.elastic is not None
        assert self._models is not None
        models, (least, most) = self._models, self._spec.elastic
        counts = (0, 0) if now is None else (now.workers, now.ps)
        most = max(least, counts[0], min(most, models.max_workers, self._most_workers or most))
        min_ps, max_ps = self._least_ps, models.max_ps
        if now is not None and not can_grow:
            most, max_ps = counts
        kept = counts
        if now is not None and can_change:
            kept = min(least, counts[0]), min(min_ps, counts[1])
        return JobView(
            id=0,
            arrival_s=0.0,
            needs=TaskNeeds(models.amounts.worker, models.amounts.ps[0]),
            chief=models.amounts.chief,
            requested=most,
            min_workers=least,
            max_workers=most,
            min_ps=min_ps,
            max_ps=max_ps,
            now=counts,
            kept=kept,
            samples_left=models.samples_left(self.total_steps) if models.has_begun else math.nan,
            samples_per_s=models.speeds()[: max(1, max_ps), :most],
            young=not models.knows_length(self.total_steps),
            waited=0,
            change_s=self.cost_s,
        )

    def launched(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """Updates the models for a plan just launched, which may have other task shapes."""
        self._shrinks.clear()
        # With fewer ps each shard is larger than the memory that a ps has for it.
        self._least_ps = min(plan.option.ps, self._planned_ps or plan.option.ps)
        known = self._models
        if known is None or not known.is_for(plan):
            self._models = known = JobModels(self._spec, plan, nodes)
        known.restarted()

    def restarted(self) -> None:
        if self._models is not None:
            self._models.restarted()

    def progressed(self, now_s: float, step: int, loss: float | None) -> None:
        if self._models is not None:
            self._models.progressed(now_s, step, loss)

    def measure(self) -> bool:
        """Adds the speed measured at the current size to the model; returns whether one was measured."""
        return self._models is not None and self._models.measure(size_of(self._plan))

    def choose(self, sizes: Collection[Size], now_s: float) -> SizeDecision | None:
        assert self._models is not None
        demand = self._current_demand(now_s)
        fair, waiting = None, list[FrameworkUsage]()
        if demand is not None:
            demand = self._shrinks.relevant_demand(demand, now_s)
            fair = demand.max_fair_workers(size_of(self._plan).workers, *_worker_and_rest(self._run.members))
            waiting = demand.waiting
        now = size_of(self._plan)
        situation = Situation(
            now=now,
            sizes=sizes,
            samples_left=self._models.samples_left(self.total_steps),
            cost_s=self.cost_s,
            fair_workers=fair,
            waiting=tuple(one.name for one in waiting),
            allotted=self.allotted,
        )
        decision = decide(situation, self._models.samples_per_s)
        if decision is None:
            return None
        for_others = waiting if decision.size.workers < now.workers else []
        return dataclasses.replace(decision, beneficiaries=tuple(one.id for one in for_others))

    def _current_demand(self, now_s: float) -> Demand | None:
        # One decision asks several times, and a busy master answers slowly.
        if now_s - self._demand_fetched_s >= MAX_DEMAND_AGE_S:
            self._demand_fetched_s, self._cached_demand = now_s, self._demand()
        return self._cached_demand

    def sample_sizes(self, runs: int) -> list[Size]:
        """At most `runs` smaller sizes to measure, the largest first; none if that costs too much of the time left."""
        assert self._spec.elastic is not None
        assert self._models is not None
        models, now = self._models, size_of(self._plan)
        left_s = models.samples_left(self.total_steps) / models.samples_per_s(now)
        if not models.knows_length(self.total_steps) or left_s < MIN_REMAINING_COSTS * self.cost_s:
            return []
        smaller = [
            size
            for size in models.sample_sizes(self._spec.elastic[0])
            if size.workers <= now.workers and self._least_ps <= size.ps <= now.ps and size != now
        ]
        return sorted(smaller[-runs:] if runs else [], reverse=True)

    def smaller(self, size: Size) -> Layout | None:
        """The layout at a size that needs no offers; None if this size would."""
        return layout(self._spec, self._plan, self._run.members, size, ())

    def record(self, decision: SizeDecision, now_s: float) -> None:
        self._shrinks.record(decision.beneficiaries, now_s)

    def sizes(self) -> list[Size]:
        """Candidate sizes within the user's bounds, whether or not there is room."""
        assert self._spec.elastic is not None
        assert self._models is not None
        now, (least, most) = size_of(self._plan), self._spec.elastic
        most = max(least, min(most, self._models.max_workers))
        sizes = []
        for workers in worker_counts(now.workers, least, most, self._spec.replicas):
            lowest = now.ps if workers >= now.workers else max(self._least_ps, now.ps - 1)
            highest = now.ps if workers <= now.workers else min(self._models.max_ps, now.ps + 1)
            sizes += [Size(workers, ps) for ps in range(lowest, highest + 1)]
        if self.allotted is not None:
            sizes.append(self.allotted)
        return [size for size in dict.fromkeys(sizes) if size != now]

    def layouts(self, agents: Sequence[AgentOffer], now_s: float) -> dict[Size, Layout]:
        usable = [agent for agent in agents if not self._avoided.excludes(agent.agent_id, now_s)]
        members = self._run.members
        found = {size: layout(self._spec, self._plan, members, size, usable) for size in self.sizes()}
        return {size: target for size, target in found.items() if target is not None}

    def replacement(self, worker: JobTask, agents: Sequence[AgentOffer], now_s: float) -> Layout | None:
        """The layout with another worker on another agent in place of this one; None if none has room."""
        others = [agent for agent in agents if agent.agent_id != worker.agent_id]
        usable = [agent for agent in others if not self._avoided.excludes(agent.agent_id, now_s)]
        target = replacement(self._spec, self._plan, self._run.members, worker, usable)
        if target is not None:
            self.avoid(worker.agent_id, now_s)
        return target

    def avoid(self, agent_id: str, now_s: float) -> None:
        """Places no new tasks on an agent for `AGENT_COOLDOWN_S`."""
        self._avoided.exclude(agent_id, now_s)

    @property
    def _plan(self) -> Plan:
        assert self._run.plan is not None
        return self._run.plan


def worker_counts(now: int, least: int, most: int, replicas: int | None) -> list[int]:
    """Candidate numbers of workers: all near the current one, others in geometric steps, divisors of `replicas`."""
    counts = {least, most, *range(max(least, now - NEAR_WORKERS), min(most, now + NEAR_WORKERS) + 1)}
    far = float(least)
    while far < most:
        counts.add(math.ceil(far))
        far *= FAR_WORKERS_RATIO
    if replicas is not None:
        counts.update(count for count in range(least, most + 1) if replicas % count == 0)
    return sorted(counts)


def _worker_and_rest(tasks: Iterable[JobTask]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    worker: dict[str, float] = {}
    rest = {"cpus": 0.0, "mem": 0.0, "gpus": 0.0}
    for task in tasks:
        planned = task.planned
        amounts = {"cpus": planned.cpus, "mem": float(planned.mem_mb), "gpus": float(planned.gpus)}
        if planned.role == Role.WORKER:
            worker = amounts
        else:
            rest = {name: rest[name] + amount for name, amount in amounts.items()}
    return worker, rest


@dataclass(frozen=True)
class Situation:
    """Input of a decision.

    Attributes:
        sizes: other sizes within the user's bounds for which there is room.
        samples_left: samples still to train; the trained number if unknown.
        cost_s: cost of a change in seconds.
        fair_workers: maximum number of workers in a fair share; None if no other framework requests resources.
        waiting: names of frameworks that use nothing and wait.
        allotted: the size given by the central allocation; None where the job decides for itself.
    """

    now: Size
    sizes: Collection[Size]
    samples_left: float
    cost_s: float
    fair_workers: int | None = None
    waiting: tuple[str, ...] = ()
    allotted: Size | None = None


def decide(situation: Situation, samples_per_s: Callable[[Size], float]) -> SizeDecision | None:
    """Returns the size to change to; None to keep the current one.

    While others wait, a job above its fair share shrinks to it at any cost. Otherwise it grows (up to its share while
    others request resources) or shrinks if that saves time. With a central allocation it shrinks to the given size
    immediately and never exceeds it.
    """
    now, fair = situation.now, situation.fair_workers
    if situation.waiting and fair is not None and fair < now.workers:
        return _shrink(situation, fair, samples_per_s)
    allotted = situation.allotted
    if allotted is not None and allotted <= now:
        needs_no_offers = allotted.ps <= now.ps
        reason = f"it is given {allotted}, because other jobs use the rest better"
        given = SizeDecision(allotted, reason, needs_no_offers=needs_no_offers)
        return given if allotted in situation.sizes else None
    most = math.inf if fair is None else max(fair, now.workers)
    sizes = [size for size in situation.sizes if size.workers <= most]
    if allotted is not None:
        within = (size for size in sizes if now.workers <= size.workers <= allotted.workers)
        sizes = [size for size in within if size.ps <= max(now.ps, allotted.ps)]
    speeds = {size: samples_per_s(size) for size in sizes}
    present = samples_per_s(now)
    better = {size: speed for size, speed in speeds.items() if speed >= (1 + MIN_SPEEDUP) * present}
    if not better:
        return None
    best = max(better.values())
    size = min(
        (size for size in better if better[size] >= (1 - SPEED_TOLERANCE) * best), key=lambda s: (s.workers + s.ps, s)
    )
    saving_s = situation.samples_left * (1 / present - 1 / better[size])
    if saving_s <= situation.cost_s:
        return None
    return SizeDecision(
        size,
        f"{better[size] / present:.2g} times as fast is predicted, which saves {saving_s:.0f} s of the time left; the "
        f"change costs about {situation.cost_s:.1f} s",
    )


def _shrink(situation: Situation, fair: int, samples_per_s: Callable[[Size], float]) -> SizeDecision | None:
    now = situation.now
    fitting = [size for size in situation.sizes if size.workers < now.workers and size.ps <= now.ps]
    # If no size is within the fair share, the smallest is nearest to it.
    small = [size for size in fitting if size.workers <= fair] or sorted(fitting)[:1]
    if not small:
        return None
    size = max(small, key=lambda s: (samples_per_s(s), -s.ps))
    names = ", ".join(situation.waiting)
    reason = f"{names} waits for resources, and this job holds more than its fair share"
    return SizeDecision(size, reason, needs_no_offers=True)


def work_balance(replicas: int | None, size: Size) -> float:
    """Fraction of time in which the workers of a synchronous job compute, if a step is `replicas` gradients.

    If the workers do not divide that number evenly, some compute one gradient more and the others wait.
    """
    if replicas is None:
        return 1.0
    each = replicas / size.workers
    return each / math.ceil(each)


class JobModels:
    """Models of a job's speed and remaining time, in samples.

    Args:
        plan: its first plan; predicts the speed until one is measured.

    Attributes:
        max_workers: maximum number of workers. Those of a gang share a batch, so each has a sample of it.
        max_ps: maximum number of useful parameter servers; 0 for a gang, and for one task.
    """

    def __init__(self, spec: JobSpec, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        assert spec.elastic is not None
        self._spec = spec
        self._meter = SpeedMeter()
        self._losses = ConvergenceModel()
        self._step = 0
        self.worker = plan.option.worker
        self.has_begun = False
        self.max_workers, self.max_ps = spec.elastic[1], 0
        if plan.is_plain:
            useful = spec.profile.batch_size if spec.profile.can_split else 1
            self.max_workers = max(plan.option.workers, min(self.max_workers, useful))
        else:
            useful = useful_ps_count(spec.profile, min(self.max_workers, MAX_PS), spec.planning.sharding)
            self.max_ps = max(plan.option.ps, useful)
        self.amounts = JobTaskAmounts(
            worker=self.worker.amounts,
            ps=(plan.option.ps_task.amounts,) * self.max_ps or (NOTHING,),
            chief=NOTHING if plan.option.chief is None else plan.option.chief.amounts,
        )
        table = _predicted(spec, plan, nodes, self.max_workers, self.amounts)
        self._speed = SpeedModel(
            lambda workers, ps: 1 / table.s_per_sample(workers, max(1, ps)),
            synchronous=spec.profile.synchronous,
            accumulates=spec.replicas is not None,
            max_workers=self.max_workers,
            max_ps=self.max_ps,
        )

    def is_for(self, plan: Plan) -> bool:
        """Whether the models cover a plan: its task shapes, and its parameter servers."""
        has_same_roles = plan.is_plain == (self.max_ps == 0)
        return has_same_roles and plan.option.ps <= self.max_ps and plan.option.worker == self.worker

    def restarted(self) -> None:
        self._meter.restart()

    def progressed(self, now_s: float, step: int, loss: float | None) -> None:
        self.has_begun = True
        self._step = step
        self._meter.add(now_s, step)
        if loss is not None:
            self._losses.add(step, loss)

    def measure(self, size: Size) -> bool:
        """Adds the speed measured at this size to the model; returns whether one was measured."""
        rate = self._meter.steps_per_s
        if rate is None:
            return False
        self._speed.observe(
            size.workers, size.ps, rate * self._samples_per_step / work_balance(self._spec.replicas, size)
        )
        return True

    def samples_per_s(self, size: Size) -> float:
        return self._speed.samples_per_s(size.workers, size.ps) * work_balance(self._spec.replicas, size)

    def speeds(self) -> Floats:
        """Predicted samples per second of all sizes: [ps - 1, workers - 1]; of a gang [0, workers - 1]."""
        table = self._speed.table()
        return table * np.array([work_balance(self._spec.replicas, Size(w + 1, 1)) for w in range(table.shape[1])])

    def sample_sizes(self, min_workers: int) -> list[Size]:
        return [Size(*counts) for counts in sample_sizes(self._speed, SAMPLE_SIZE_COUNT, min_workers)]

    def knows_length(self, total_steps: int | None) -> bool:
        """Whether the number of steps is reported, or can be estimated from the losses."""
        return total_steps is not None or self._losses.steps_left().known

    def samples_left(self, total_steps: int | None) -> float:
        """Samples still to train, as reported or estimated from the losses; else the number trained so far."""
        steps: float = self._step
        if total_steps is not None:
            steps = total_steps - self._step
        elif (left := self._losses.steps_left()).known and math.isfinite(left.steps):
            steps = left.steps
        return max(0.0, steps) * self._samples_per_step

    @property
    def _samples_per_step(self) -> int:
        return self._spec.profile.batch_size * (self._spec.replicas or 1)


class SpeedMeter:
    """Measures the steps per second of a job of constant size."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._points: deque[tuple[float, int]] = deque()

    def restart(self) -> None:
        self._first_s = None
        self._points.clear()

    def add(self, now_s: float, step: int) -> None:
        if self._first_s is None:
            self._first_s = now_s
        if now_s - self._first_s < SPEED_WARM_UP_S:
            return
        self._points.append((now_s, step))
        while len(self._points) > MIN_SPEED_POINTS and now_s - self._points[0][0] > MAX_SPEED_WINDOW_S:
            self._points.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The mean over the window; None if the window is too short."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= MIN_SPEED_WINDOW_S and last > first else None


def most_workers(plan: Plan, nodes: Sequence[NodeClass], spec: JobSpec) -> int:
    """The maximum number of workers, shaped as in the plan, that these machines can run beside its other tasks."""
    assert spec.elastic is not None
    agents = [(node.cpus, node.mem_bytes, node.gpus) for node in nodes for _ in range(node.count)]
    worker = plan.option.worker
    beside = [plan.option.ps_task] * plan.option.ps + ([plan.option.chief] if plan.option.chief else [])
    left = [
        sum(there[number] for there in agents) - sum(_scalars(task)[number] for task in beside) for number in range(3)
    ]
    in_sum = min(math.floor(have / need + 1e-9) for have, need in zip(left, _scalars(worker), strict=True) if need)
    on_each = sum(
        min(math.floor(have / need + 1e-9) for have, need in zip(there, _scalars(worker), strict=True) if need)
        for there in agents
    )
    return max(spec.elastic[0], min(in_sum, on_each, spec.elastic[1]))


def _scalars(task: TaskResources) -> tuple[float, int, int]:
    return task.cpus, task.mem_mb * MIB, task.gpus


def _predicted(
    spec: JobSpec, plan: Plan, nodes: Sequence[NodeClass], max_workers: int, needs: JobTaskAmounts
) -> GainTable:
    """The solver's predicted speeds of all sizes, with every task on a machine of the largest kind."""
    worker = plan.option.worker
    # Fitting measurements of other jobs takes time; the job's own speed is measured soon.
    planning = dataclasses.replace(spec.planning, measurements=())
    scenario = scenario_of(planning.request(plan.profile, cluster_of(nodes)))
    kind = max(scenario.kinds, key=lambda kind: (kind.gpus, kind.cpu_millis))
    model = scenario.model(WorkerShape(worker.gpus, worker.cpus))
    if plan.is_plain:
        return GangTable(model, kind, needs, kind.room_for(worker), max_workers, worker.amounts)
    return SpeedTable(model, kind, needs, scenario.shards, max_workers, worker.amounts)


class ShrinkHistory:
    """Remembers the frameworks for which a job has shrunk, to ignore those that could not use the released resources.

    Args:
        patience_s: maximum time for another framework to use them.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: dict[str, float] = {}

    def clear(self) -> None:
        """Forgets all: the job may have taken the resources again."""
        self._since_s.clear()

    def record(self, ids: Iterable[str], now_s: float) -> None:
        for name in ids:
            self._since_s.setdefault(name, now_s)

    def relevant_demand(self, demand: Demand, now_s: float) -> Demand:
        """The demand without frameworks that still wait after `patience_s`."""
        waiting = {one.id for one in demand.waiting}
        # A framework that got resources may wait again later.
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in waiting}
        hopeless = {name for name, since_s in self._since_s.items() if now_s - since_s >= self._patience_s}
        return dataclasses.replace(demand, others=[one for one in demand.others if one.id not in hopeless])
