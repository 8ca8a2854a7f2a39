"""Which size a running job should have: puts together what is known of it, of the cluster and of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dike.task import Role
from framework.elastic.decision import Situation, Size, decide
from framework.elastic.demand import Demand, FrameworkUse, RoomMade
from framework.elastic.layout import Layout, layout, replacement, size_of
from framework.elastic.models import JobModels
from framework.exclusion import Exclusions
from framework.job import JobSpec, JobTask
from framework.job_run import JobRun
from framework.offers import AgentOffer
from solver import NodeClass, Plan

DEFAULT_COST_S = 10.0
"""What a change is taken to cost before one was made."""
AVOID_S = 600.0
"""How long an agent gets no new tasks on which a worker was a straggler, or a new task has failed."""
FRESH_S = 0.5
"""How long the master's answer counts as new."""
NEAR = 8
"""All numbers of workers that differ by no more from what there is are looked at."""
FAR = 1.2
"""Ratio of neighbours among the others."""
LEAST_PATIENCE_S = 30.0
PATIENCE_INTERVALS = 3
"""So many intervals between changes others have to take what was given up for them."""


@dataclass(frozen=True)
class Choice:
    """A size to change to.

    Attributes:
        size: the size.
        reason: why, as a sentence for the user.
        beneficiaries: ids of the frameworks for whose sake the job shrinks.
    """

    size: Size
    reason: str
    beneficiaries: tuple[str, ...] = ()


class Judge:
    """Knows one attempt after the other of a job.

    Args:
        spec: the job.
        run: what runs of it.
        demand: says what other frameworks hold and want; None where that is not known.

    Attributes:
        cost_s: what a change costs, in seconds: what the last one did.
        total_steps: how long the script trains; None as long as it has not said.
    """

    def __init__(self, spec: JobSpec, run: JobRun, demand: Callable[[], Demand | None]) -> None:
        self._spec = spec
        self._run = run
        self._demand = demand
        self._room = RoomMade(max(LEAST_PATIENCE_S, PATIENCE_INTERVALS * spec.resize_interval_s))
        self._asked_s = -math.inf
        self._known_demand: Demand | None = None
        self._avoided = Exclusions(AVOID_S)
        self._models: JobModels | None = None
        self._least_ps = 1
        self.cost_s = DEFAULT_COST_S
        self.total_steps: int | None = None

    def launched(self, plan: Plan, nodes: Sequence[NodeClass]) -> None:
        """A plan has been launched whose tasks may be shaped otherwise than those before.

        Args:
            plan: the plan.
            nodes: the machines that it was made for.
        """
        self._room.lost()
        # A ps was given memory for its shard; with fewer of them shards are larger.
        self._least_ps = plan.option.ps
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

    def choose(self, sizes: Collection[Size], now_s: float) -> Choice | None:
        """The best of these sizes; None to stay."""
        assert self._models is not None
        demand = self._newest_demand(now_s)
        fair, waiting = None, list[FrameworkUse]()
        if demand is not None:
            demand = self._room.still_useful(demand, now_s)
            fair = demand.fair_workers(size_of(self._plan).workers, *_amounts(self._run.members))
            waiting = demand.waiting
        now = size_of(self._plan)
        situation = Situation(
            now=now,
            sizes=sizes,
            samples_left=self._models.samples_left(self.total_steps),
            cost_s=self.cost_s,
            fair_workers=fair,
            waiting=tuple(one.name for one in waiting),
        )
        decision = decide(situation, self._models.samples_per_s)
        if decision is None:
            return None
        for_others = waiting if decision.size.workers < now.workers else []
        return Choice(decision.size, decision.reason, tuple(one.id for one in for_others))

    def _newest_demand(self, now_s: float) -> Demand | None:
        # A change is thought of and decided on within moments, and a busy master takes its time to answer.
        if now_s - self._asked_s >= FRESH_S:
            self._asked_s, self._known_demand = now_s, self._demand()
        return self._known_demand

    def follows(self, choice: Choice, now_s: float) -> None:
        """The choice is being carried out."""
        self._room.made_for(choice.beneficiaries, now_s)

    def sizes(self) -> list[Size]:
        """Sizes between the user's bounds that the job does not have, wherever there may be room."""
        assert self._spec.elastic is not None
        assert self._models is not None
        now, (least, most) = size_of(self._plan), self._spec.elastic
        sizes = []
        for workers in _counts(now.workers, least, most, self._spec.replicas):
            lowest = now.ps if workers >= now.workers else max(self._least_ps, now.ps - 1)
            highest = now.ps if workers <= now.workers else min(self._models.max_ps, now.ps + 1)
            sizes += [Size(workers, ps) for ps in range(lowest, highest + 1)]
        return [size for size in sizes if size != now]

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


def _counts(now: int, least: int, most: int, replicas: int | None) -> list[int]:
    """Numbers of workers worth a thought: all that are near, of large ones those that make a difference."""
    counts = {least, most, *range(max(least, now - NEAR), min(most, now + NEAR) + 1)}
    far = float(least)
    while far < most:
        counts.add(math.ceil(far))
        far *= FAR
    if replicas is not None:
        counts.update(count for count in range(least, most + 1) if replicas % count == 0)
    return sorted(counts)


def _amounts(tasks: Iterable[JobTask]) -> tuple[Mapping[str, float], Mapping[str, float]]:
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
