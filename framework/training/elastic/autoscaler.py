"""Which size a running job should have: what is known of it, of the cluster and of others, and the decision.

As in Optimus (EuroSys 2018, section 4.2; its costs: section 5.4). A change is worth while if the time it saves exceeds
what it costs: the job is saved, stopped and started again.
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
from solver.jobs.speed import SpeedTable
from solver.jobs.speed import TaskNeeds as TaskAmounts
from solver.online import ConvergenceModel, SpeedModel, sample_sizes
from solver.request import scenario_of
from solver.resources import TaskResources, WorkerShape
from solver.shards import useful_ps_count
from solver.units import MIB

DEFAULT_COST_S = 10.0
"""What a change is taken to cost before one was made."""
LEAST_GAIN = 0.05
"""Another size must be faster by this share: less is within the error of what is known of speeds."""
ALIKE = 0.02
"""Of sizes whose speeds differ by less, the one with fewer tasks is taken."""
AVOID_S = 600.0
"""How long an agent gets no new tasks on which a worker was a straggler, or a new task has failed."""
FRESH_S = 0.5
"""How long the master's answer counts as new."""
NEAR = 8
"""All numbers of workers that differ by no more from what there is are considered."""
FAR = 1.2
"""Ratio of neighbours among the others."""
LEAST_PATIENCE_S = 30.0
PATIENCE_INTERVALS = 3
"""So many intervals between changes others have to take what was given up for them."""
WINDOW_S = 60.0
"""Speed is measured over so long at most."""
LEAST_S = 2.0
"""And over so long at least, after `WARM_UP_S`."""
LEAST_POINTS = 3
"""Steps may take minutes."""
WARM_UP_S = 1.0
"""The first steps also pay for what is traced and cached."""
MOST_PS = 64
SAMPLE_RUNS = 5
"""Sample runs are chosen among so many sizes (Optimus, section 3.2), of those that the job has the tasks for."""
SAMPLES_WORTH = 100
"""They are made by jobs that have so many times as long to go as a change costs."""


@dataclass(frozen=True)
class Decision:
    """A size to change to.

    Attributes:
        size: the size.
        reason: why, as a sentence for the user.
        beneficiaries: ids of the frameworks for whose sake the job shrinks.
        needs_nothing: whether tasks are only given up, which others wait for.
    """

    size: Size
    reason: str
    beneficiaries: tuple[str, ...] = ()
    needs_nothing: bool = False


class Autoscaler:
    """Decides upon the size of a job, over all its attempts.

    Args:
        spec: the job.
        run: what runs of it.
        demand: says what other frameworks hold and want; None where that is not known.

    Attributes:
        cost_s: what a change costs, in seconds: what the last one did.
        total_steps: how long the script trains; None as long as it has not said.
        allotted: the size that somebody else has decided on; None where the job decides for itself.
    """

    def __init__(self, spec: JobSpec, run: JobRun, demand: Callable[[], Demand | None]) -> None:
        self._spec = spec
        self._run = run
        self._demand = demand
        self._room = ShrinkHistory(max(LEAST_PATIENCE_S, PATIENCE_INTERVALS * spec.resize_interval_s))
        self._asked_s = -math.inf
        self._known_demand: Demand | None = None
        self._avoided = Exclusions(AVOID_S)
        self._models: JobModels | None = None
        self._least_ps = 1
        self._foreseen_ps: int | None = None
        self._most_workers: int | None = None
        self.cost_s = DEFAULT_COST_S
        self.total_steps: int | None = None
        self.allotted: Size | None = None

    @property
    def is_known(self) -> bool:
        """Whether its speeds are known, as far as they are before it runs."""
        return self._models is not None

    def foreseen(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """A plan has been made for all that there is; the job's tasks will be shaped so.

        Args:
            plan: the plan.
            nodes: the machines, with all they have.
        """
        if self._models is None or self._models.worker != plan.option.worker:
            self._models = JobModels(self._spec, plan, nodes)
        self._least_ps = self._foreseen_ps = plan.option.ps
        self._most_workers = most_workers(plan, nodes, self._spec)

    def view(self, now: Size | None, *, can_change: bool, can_grow: bool) -> JobView:
        """What is believed of the job, for a policy of jobs.

        Args:
            now: what it has; None where it waits.
            can_change: whether tasks can be taken from it.
            can_grow: whether it can have more.
        """
        assert self._spec.elastic is not None
        assert self._models is not None
        models, (least, most) = self._models, self._spec.elastic
        counts = (0, 0) if now is None else (now.workers, now.ps)
        most = max(least, counts[0], min(most, self._most_workers or most))
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
            samples_per_s=models.speeds()[:max_ps, :most],
            young=not models.knows_length(self.total_steps),
            waited=0,
            change_s=self.cost_s,
        )

    def launched(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """A plan has been launched whose tasks may be shaped otherwise than those before.

        Args:
            plan: the plan.
            nodes: the machines that it was made for.
        """
        self._room.lost()
        # A ps was given memory for its shard; with fewer of them shards are larger.
        self._least_ps = min(plan.option.ps, self._foreseen_ps or plan.option.ps)
        known = self._models
        if known is None or known.worker != plan.option.worker or plan.option.ps > known.max_ps:
            self._models = known = JobModels(self._spec, plan, nodes)
        known.restarted()

    def restarted(self) -> None:
        """The same tasks, or some of them, have been started again."""
        if self._models is not None:
            self._models.restarted()

    def progressed(self, now_s: float, step: int, loss: float | None) -> None:
        """The chief has reported a step."""
        if self._models is not None:
            self._models.progressed(now_s, step, loss)

    def measure(self) -> bool:
        """Learns from the speed of the job as it is; whether that has been measured."""
        return self._models is not None and self._models.measure(size_of(self._plan))

    def choose(self, sizes: Collection[Size], now_s: float) -> Decision | None:
        """The best of these sizes; None to stay."""
        assert self._models is not None
        demand = self._newest_demand(now_s)
        fair, waiting = None, list[FrameworkUsage]()
        if demand is not None:
            demand = self._room.still_useful(demand, now_s)
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

    def _newest_demand(self, now_s: float) -> Demand | None:
        # A change is thought of and decided on within moments, and a busy master takes its time to answer.
        if now_s - self._asked_s >= FRESH_S:
            self._asked_s, self._known_demand = now_s, self._demand()
        return self._known_demand

    def sample_sizes(self, runs: int) -> list[Size]:
        """Sizes smaller than the job's whose speeds would tell most of all others, the largest first.

        Args:
            runs: how many at most; none where what they cost is more than a small part of the time left.
        """
        assert self._spec.elastic is not None
        assert self._models is not None
        models, now = self._models, size_of(self._plan)
        left_s = models.samples_left(self.total_steps) / models.samples_per_s(now)
        if not models.knows_length(self.total_steps) or left_s < SAMPLES_WORTH * self.cost_s:
            return []
        smaller = [
            size
            for size in models.sample_sizes(self._spec.elastic[0])
            if size.workers <= now.workers and self._least_ps <= size.ps <= now.ps and size != now
        ]
        return sorted(smaller[-runs:] if runs else [], reverse=True)

    def smaller(self, size: Size) -> Layout | None:
        """The job at a size for which it only gives tasks up."""
        return layout(self._spec, self._plan, self._run.members, size, ())

    def applied(self, decision: Decision, now_s: float) -> None:
        """The decision is being carried out."""
        self._room.made_for(decision.beneficiaries, now_s)

    def sizes(self) -> list[Size]:
        """Sizes between the user's bounds that the job does not have, wherever there may be room."""
        assert self._spec.elastic is not None
        assert self._models is not None
        now, (least, most) = size_of(self._plan), self._spec.elastic
        sizes = []
        for workers in worker_counts(now.workers, least, most, self._spec.replicas):
            lowest = now.ps if workers >= now.workers else max(self._least_ps, now.ps - 1)
            highest = now.ps if workers <= now.workers else min(self._models.max_ps, now.ps + 1)
            sizes += [Size(workers, ps) for ps in range(lowest, highest + 1)]
        if self.allotted is not None:
            sizes.append(self.allotted)
        return [size for size in dict.fromkeys(sizes) if size != now]

    def layouts(self, agents: Sequence[AgentOffer], now_s: float) -> dict[Size, Layout]:
        """Those sizes that there is room for, with the offers of these agents."""
        usable = [agent for agent in agents if not self._avoided.excludes(agent.agent_id, now_s)]
        members = self._run.members
        found = {size: layout(self._spec, self._plan, members, size, usable) for size in self.sizes()}
        return {size: target for size, target in found.items() if target is not None}

    def replacement(self, worker: JobTask, agents: Sequence[AgentOffer], now_s: float) -> Layout | None:
        """The job with another worker in the place of this one, on another agent; None if none has room."""
        others = [agent for agent in agents if agent.agent_id != worker.agent_id]
        usable = [agent for agent in others if not self._avoided.excludes(agent.agent_id, now_s)]
        target = replacement(self._spec, self._plan, self._run.members, worker, usable)
        if target is not None:
            self.avoid(worker.agent_id, now_s)
        return target

    def avoid(self, agent_id: str, now_s: float) -> None:
        """An agent gets no new tasks for a while."""
        self._avoided.exclude(agent_id, now_s)

    @property
    def _plan(self) -> Plan:
        assert self._run.plan is not None
        return self._run.plan


def worker_counts(now: int, least: int, most: int, replicas: int | None) -> list[int]:
    """Numbers of workers worth a thought: all that are near, of large ones those that make a difference."""
    counts = {least, most, *range(max(least, now - NEAR), min(most, now + NEAR) + 1)}
    far = float(least)
    while far < most:
        counts.add(math.ceil(far))
        far *= FAR
    if replicas is not None:
        counts.update(count for count in range(least, most + 1) if replicas % count == 0)
    return sorted(counts)


def _worker_and_rest(tasks: Iterable[JobTask]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """What one worker takes, and all that are no workers together."""
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
    """What a decision depends on.

    Attributes:
        now: the job's size.
        sizes: other sizes that there is room for, all between the user's bounds.
        samples_left: samples still to train; as many as were trained already where nobody knows.
        cost_s: what a change costs, in seconds.
        fair_workers: most workers of a fair share, where other frameworks want resources; None where none does.
        waiting: names of frameworks that hold nothing at all and wait.
        allotted: the size that somebody else has decided on; None where the job decides for itself.
    """

    now: Size
    sizes: Collection[Size]
    samples_left: float
    cost_s: float
    fair_workers: int | None = None
    waiting: tuple[str, ...] = ()
    allotted: Size | None = None


def decide(situation: Situation, samples_per_s: Callable[[Size], float]) -> Decision | None:
    """The size to change to; None to stay.

    While others wait, a job that holds more than its fair share gives the rest up, whatever that costs it. Otherwise it
    grows, up to its share as long as others want anything, or shrinks, where that saves time. Where somebody else has
    decided on its size it becomes as small as that at once, and no larger.

    Args:
        situation: what is known.
        samples_per_s: predicted speed of a size.
    """
    now, fair = situation.now, situation.fair_workers
    if situation.waiting and fair is not None and fair < now.workers:
        return _shrink(situation, fair, samples_per_s)
    allotted = situation.allotted
    if allotted is not None and allotted <= now:
        needs_nothing = allotted.ps <= now.ps
        given = Decision(allotted, f"it is given {allotted}, others make more of the rest", needs_nothing=needs_nothing)
        return given if allotted in situation.sizes else None
    most = math.inf if fair is None else max(fair, now.workers)
    sizes = [size for size in situation.sizes if size.workers <= most]
    if allotted is not None:
        within = (size for size in sizes if now.workers <= size.workers <= allotted.workers)
        sizes = [size for size in within if size.ps <= max(now.ps, allotted.ps)]
    speeds = {size: samples_per_s(size) for size in sizes}
    present = samples_per_s(now)
    better = {size: speed for size, speed in speeds.items() if speed >= (1 + LEAST_GAIN) * present}
    if not better:
        return None
    best = max(better.values())
    size = min((size for size in better if better[size] >= (1 - ALIKE) * best), key=lambda s: (s.workers + s.ps, s))
    saving_s = situation.samples_left * (1 / present - 1 / better[size])
    if saving_s <= situation.cost_s:
        return None
    return Decision(
        size,
        f"{better[size] / present:.2g} times as fast is predicted, which saves {saving_s:.0f} s of the time left; the "
        f"change costs about {situation.cost_s:.1f} s",
    )


def _shrink(situation: Situation, fair: int, samples_per_s: Callable[[Size], float]) -> Decision | None:
    now = situation.now
    fitting = [size for size in situation.sizes if size.workers < now.workers and size.ps <= now.ps]
    # Where nothing is as small as the fair share, the smallest comes nearest to it.
    small = [size for size in fitting if size.workers <= fair] or sorted(fitting)[:1]
    if not small:
        return None
    size = max(small, key=lambda s: (samples_per_s(s), -s.ps))
    names = ", ".join(situation.waiting)
    reason = f"{names} waits for resources, and this job holds more than its fair share"
    return Decision(size, reason, needs_nothing=True)


def evenness(replicas: int | None, size: Size) -> float:
    """Share of their time in which a synchronous job's workers compute if a step is a fixed number of gradients.

    Where the workers do not divide it evenly, some compute one gradient more than others, who wait for them.

    Args:
        replicas: gradients of one step; None for a job without such steps.
        size: how many workers there are.
    """
    if replicas is None:
        return 1.0
    each = replicas / size.workers
    return each / math.ceil(each)


class JobModels:
    """Speed and time left of one job, in samples.

    Args:
        spec: the job.
        plan: its first plan; its speed is believed until something is measured.
        nodes: machines it may run on.

    Attributes:
        worker: the resources of one worker.
        amounts: what its tasks take.
        max_ps: most parameter servers that are of use.
        has_begun: whether it has made a step.
    """

    def __init__(self, spec: JobSpec, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        assert spec.elastic is not None
        self._spec = spec
        self._meter = SpeedMeter()
        self._losses = ConvergenceModel()
        self._step = 0
        self.worker = plan.option.worker
        self.has_begun = False
        most = spec.elastic[1]
        self.max_ps = max(plan.option.ps, useful_ps_count(spec.profile, min(most, MOST_PS), spec.planning.sharding))
        self.amounts = TaskAmounts(
            worker=_amounts(self.worker),
            ps=(_amounts(plan.option.ps_task),) * self.max_ps,
            chief=(0, 0, 0, 0) if plan.option.chief is None else _amounts(plan.option.chief),
        )
        table = _predicted(spec, plan, nodes, most, self.amounts)
        self._speed = SpeedModel(
            lambda workers, ps: 1 / table.s_per_sample(workers, ps),
            synchronous=spec.profile.synchronous,
            accumulates=spec.replicas is not None,
            max_workers=most,
            max_ps=self.max_ps,
        )

    def restarted(self) -> None:
        """The job was started again, at whatever size."""
        self._meter.restart()

    def progressed(self, now_s: float, step: int, loss: float | None) -> None:
        """The chief has reported a step."""
        self.has_begun = True
        self._step = step
        self._meter.add(now_s, step)
        if loss is not None:
            self._losses.add(step, loss)

    def measure(self, size: Size) -> bool:
        """Learns from the speed at the size the job has; whether anything was measured."""
        rate = self._meter.steps_per_s
        if rate is None:
            return False
        self._speed.observe(size.workers, size.ps, rate * self._samples_per_step / evenness(self._spec.replicas, size))
        return True

    def samples_per_s(self, size: Size) -> float:
        """Predicted speed."""
        return self._speed.samples_per_s(size.workers, size.ps) * evenness(self._spec.replicas, size)

    def speeds(self) -> Floats:
        """Predicted speeds of all sizes: [ps - 1, workers - 1]."""
        table = self._speed.table()
        return table * np.array([evenness(self._spec.replicas, Size(w + 1, 1)) for w in range(table.shape[1])])

    def sample_sizes(self, min_workers: int) -> list[Size]:
        """Sizes whose speeds would tell most of all others."""
        return [Size(*counts) for counts in sample_sizes(self._speed, SAMPLE_RUNS, min_workers)]

    def knows_length(self, total_steps: int | None) -> bool:
        """Whether the script or its losses say how long it trains."""
        return total_steps is not None or self._losses.steps_left().known

    def samples_left(self, total_steps: int | None) -> float:
        """Samples still to train: what the script or its losses say, else as many as there were so far.

        Args:
            total_steps: how long the script trains, where it says so.
        """
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
    """Steps a second of a job whose size does not change."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._points: deque[tuple[float, int]] = deque()

    def restart(self) -> None:
        """The job has another size, or was started again."""
        self._first_s = None
        self._points.clear()

    def add(self, now_s: float, step: int) -> None:
        """Takes the newest step in."""
        if self._first_s is None:
            self._first_s = now_s
        if now_s - self._first_s < WARM_UP_S:
            return
        self._points.append((now_s, step))
        while len(self._points) > LEAST_POINTS and now_s - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The mean; None as long as too little was seen."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= LEAST_S and last > first else None


def most_workers(plan: Plan, nodes: Sequence[NodeClass], spec: JobSpec) -> int:
    """The largest number of workers, shaped as the plan's, that these machines hold beside its other tasks."""
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
    spec: JobSpec, plan: Plan, nodes: Sequence[NodeClass], max_workers: int, needs: TaskAmounts
) -> SpeedTable:
    """The solver's speeds of all sizes, on machines like the largest one."""
    worker = plan.option.worker
    # What was measured elsewhere takes time to fit; the job's own speed is measured soon.
    planning = dataclasses.replace(spec.planning, measurements=())
    scenario = scenario_of(planning.request(plan.profile, cluster_of(nodes)))
    kind = max(scenario.kinds, key=lambda kind: (kind.gpus, kind.cpu_millis))
    return SpeedTable(
        scenario.model(WorkerShape(worker.gpus, worker.cpus)),
        kind,
        needs,
        scenario.shards,
        max_workers,
        _amounts(worker),
    )


def _amounts(task: TaskResources) -> tuple[int, int, int, int]:
    return task.cpu_millis, task.mem_mb, task.disk_mb, task.gpus


class ShrinkHistory:
    """Remembers for whom a job has shrunk: who could not use what was given up is not given way to again.

    Args:
        patience_s: how long another framework may take to use it.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: dict[str, float] = {}

    def lost(self) -> None:
        """The room made is not there any more: the job may have taken it again."""
        self._since_s.clear()

    def made_for(self, ids: Iterable[str], now_s: float) -> None:
        """Room has been made for these frameworks."""
        for name in ids:
            self._since_s.setdefault(name, now_s)

    def still_useful(self, demand: Demand, now_s: float) -> Demand:
        """The demand without those who wait in spite of the room made for them."""
        waiting = {one.id for one in demand.waiting}
        # Whoever got something may wait for more some other day.
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in waiting}
        hopeless = {name for name, since_s in self._since_s.items() if now_s - since_s >= self._patience_s}
        return dataclasses.replace(demand, others=[one for one in demand.others if one.id not in hopeless])
