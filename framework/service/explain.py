"""Explains why a job does not run, from the snapshot that the service's loop publishes
(`framework.scheduler.snapshot`).

Nothing here waits for the loop or for Mesos, so any thread may call it.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence

from dike.exceptions import InfeasibleError
from framework.scheduler.agents import AgentFacts
from framework.scheduler.amounts import describe, subtract, total
from framework.scheduler.constraints import HOSTNAME, Constraints, parse_constraints
from framework.scheduler.feasibility import Nodes, Sizing, first_unplaced, nodes_for
from framework.scheduler.job import Need
from framework.scheduler.preemption import describe_contribution, shrink_reason
from framework.scheduler.records import JobRecord, TaskNeed
from framework.scheduler.snapshot import JobFacts, Snapshot
from framework.search.slot_pool import SearchSizing
from framework.service.explanation import AgentRow, Explanation, Verdict
from framework.service.requests import SearchJobRequest, TrainingRequest
from framework.training.planning import TrainingSizing

__all__ = ["AgentRow", "Explanation", "TaskNeed", "Verdict", "explain", "reason_never_fits"]

WAITS_FOR_ALLOCATION = (
    "The allocation policy of this service (dike serve --allocation) gives all workers to other jobs at the moment; "
    "the next round may give this one some."
)
MAX_NAMES = 5


def explain(record: JobRecord, snapshot: Snapshot) -> Explanation:
    """Explains why a job does not run, from a snapshot about a second old."""
    job = snapshot.jobs.get(record.id)
    if record.state.has_ended():
        why = record.failure.rstrip(".")
        because = f" {why.removeprefix('killed ')}" if why.startswith("killed by ") else f": {why}" if why else ""
        return Explanation(record.id, Verdict.ENDED, f"The job {record.state.verb}{because}.")
    if job is None:
        verdict = Verdict.HELD if record.waiting else Verdict.TURN
        sentence = record.waiting or "The job has just been submitted."
        return Explanation(record.id, verdict, sentence, last_offer_s=snapshot.last_offer_s)
    return _Case(job, snapshot).explanation()


def reason_never_fits(request: TrainingRequest | SearchJobRequest, snapshot: Snapshot) -> str:
    """Why a job about to be submitted can never run on the agents seen so far, in one sentence.

    Empty if it can, if no agent has been seen yet, or if the master does not list its agents. Raises `BadInputError`
    for malformed constraints.
    """
    agents = _seen(snapshot)
    if not agents or snapshot.agents is None:
        return ""
    found = _never_fits(sizing_of(request), parse_constraints(request.constraints), agents)
    return "" if found is None else found[1]


def _needs_of(sizing: Sizing | None, admitted: Sequence[AgentFacts]) -> tuple[TaskNeed, ...]:
    """What a job needs; empty if it can never fit, which its verdict says."""
    if sizing is None:
        return ()
    with contextlib.suppress(InfeasibleError):
        return sizing.needs(_empty_nodes(sizing, admitted))
    return ()


class _Case:
    def __init__(self, job: JobFacts, snapshot: Snapshot) -> None:
        self._job = job
        self._snapshot = snapshot
        self._agents = snapshot.agents or ()
        self._runs = False
        self._needs = _needs_of(job.sizing, self._admitted)
        self._unplaced, self._remaining = self._pack()

    def explanation(self) -> Explanation:
        verdict, sentence = self._verdict()
        self._runs = verdict in (Verdict.RUNNING, Verdict.ENDING)
        waits = not self._runs
        pilots = self._snapshot.pilots
        if waits and pilots is not None:
            sentence = f"{sentence} {pilots.explain(self._job.job_id)}".rstrip()
        return Explanation(
            job_id=self._job.job_id,
            verdict=verdict,
            sentence=sentence,
            needs=self._needs,
            agents=tuple(self._row(agent) for agent in self._agents),
            ahead=self._ahead if waits else (),
            last_offer_s=self._snapshot.last_offer_s,
            could_be_freed=tuple(self._could_be_freed()) if waits else (),
        )

    def _pack(self) -> tuple[TaskNeed | None, dict[str, dict[str, float]]]:
        """The first task that does not fit beside the others, where each fits alone; and the resources left over."""
        offers = self._snapshot.offers
        room = {one.agent_id: dict(offers[one.agent_id].free) for one in self._admitted if one.agent_id in offers}
        if not room or any(all(need.missing(free) for free in room.values()) for need in self._needs):
            return None, room
        return first_unplaced(self._needs, room), room

    @property
    def _admitted(self) -> list[AgentFacts]:
        return [one for one in self._agents if self._job.constraints.admits(one.attributes, one.hostname)]

    @property
    def _ahead(self) -> tuple[str, ...]:
        order = self._snapshot.order
        return order[: order.index(self._job.job_id)] if self._job.job_id in order else ()

    def _verdict(self) -> tuple[Verdict, str]:
        job, now = self._job, self._snapshot
        if job.is_ending:
            return Verdict.ENDING, f"The job is being ended, with {_count(job.tasks, 'task')} left."
        if job.tasks and job.need is not Need.REPLACE_LOST:
            wants = " It could use more." if job.need is not Need.NOTHING else ""
            where = _count(len(job.allocated), "agent")
            shrinks = shrink_reason(now.reservation, job.job_id)
            return Verdict.RUNNING, f"The job runs, with {_count(job.tasks, 'task')} on {where}.{wants}{shrinks}"
        if job.waits_for_allocation:
            return self._never_fits() or (Verdict.TURN, WAITS_FOR_ALLOCATION)
        if job.need is Need.NOTHING:
            return Verdict.RUNNING, "The job needs nothing now: its tasks are ending or have ended."
        if not now.connected:
            return Verdict.NOT_CONNECTED, "The service has no connection to the Mesos master; it keeps trying."
        if now.agents is None:
            return Verdict.NOT_CONNECTED, "The Mesos master does not list its agents; the service keeps asking."
        if now.agents == ():
            return Verdict.NO_AGENTS, "No agent is registered with the Mesos master."
        return self._never_fits() or self._not_now()

    def _never_fits(self) -> tuple[Verdict, str] | None:
        """Why the job could not run even on empty agents; None if it could."""
        job = self._job
        if job.sizing is None:
            return None
        found = _never_fits(job.sizing, job.constraints, _seen(self._snapshot))
        if found is not None:
            return found
        gone = _never_fits(job.sizing, job.constraints, self._agents)
        if gone is not None:
            names = _some([agent.node for agent in self._snapshot.gone])
            return gone[0], f"It would fit on all agents seen so far, but these are gone: {names}."
        left = [agent for agent in self._admitted if agent.agent_id not in job.excluded]
        if job.excluded and job.sizing.fit(_empty_nodes(job.sizing, left)).problem:
            names = _some([agent.node for agent in self._admitted if agent.agent_id in job.excluded])
            until_s = max(job.excluded.values())
            return Verdict.EXCLUDED, f"It avoids {names} after failures there, for another {until_s:.0f} s."
        return None

    def _not_now(self) -> tuple[Verdict, str]:
        job, now, reservation = self._job, self._snapshot, self._snapshot.reservation
        if job.sizing is None:
            return Verdict.TURN, f"It waits for offers behind {_count(len(self._ahead), 'other job')}."
        free = {agent: offer.free for agent, offer in now.offers.items()}
        usable = [agent for agent in self._admitted if agent.agent_id not in job.excluded]
        offered = [agent for agent in usable if agent.agent_id in free]
        mine = [agent for agent in offered if not self._is_reserved_for_other(agent)]
        problem = job.sizing.fit(nodes_for(job.sizing, [(agent, free[agent.agent_id]) for agent in mine])).problem
        if not problem:
            if self._ahead:
                count = _count(len(self._ahead), "other job")
                return Verdict.TURN, f"It fits the latest offers, and waits its turn behind {count}."
            return Verdict.TURN, "It is next in line for offers."
        if reservation is not None and reservation.job_id != job.job_id and len(mine) < len(offered):
            names = _some([agent.node for agent in offered if self._is_reserved_for_other(agent)])
            return Verdict.RESERVED, f"{names} are reserved for job {reservation.job_id}, which has waited longer."
        beside = [(agent, subtract(agent.total, now.others.get(agent.agent_id, {}))) for agent in usable]
        if job.sizing.fit(nodes_for(job.sizing, beside)).problem:
            return Verdict.NO_OFFERS, f"Other frameworks use what it needs. {self._shortage(problem)}"
        if not offered:
            return Verdict.NO_OFFERS, "No agent that it may use has offered anything yet."
        return Verdict.RESOURCES, f"The free resources do not suffice. {self._shortage(problem)}"

    def _shortage(self, problem: str) -> str:
        offers = self._snapshot.offers
        offered = [(agent, offers[agent.agent_id].free) for agent in self._admitted if agent.agent_id in offers]
        for need in self._needs:
            short = [agent for agent, free in offered if need.missing(free)]
            if short and len(short) == len(self._admitted):
                able = [agent for agent in short if not need.missing(agent.total)]
                best = min(able or short, key=lambda agent: need.shortage_ratio(offers[agent.agent_id].free))
                return (
                    f"A {need.name} needs {describe(need.amounts)}; {best.node}, which comes nearest, is "
                    f"{describe(need.missing(offers[best.agent_id].free))} short."
                )
        return problem

    def _is_reserved_for_other(self, agent: AgentFacts) -> bool:
        reservation = self._snapshot.reservation
        bound = self._job.need in (Need.START, Need.GROW)
        return (
            reservation is not None
            and bound
            and reservation.job_id != self._job.job_id
            and agent.agent_id in reservation.agents
        )

    def _row(self, agent: AgentFacts) -> AgentRow:
        offer = self._snapshot.offers.get(agent.agent_id)
        first = self._needs[0] if self._needs else TaskNeed("task")
        missing: dict[str, float] = {}
        if offer is not None and not self._runs:
            most = max(self._needs, key=lambda need: need.shortage_ratio(offer.free), default=first)
            missing = most.missing(offer.free)
            if self._unplaced is not None and agent.agent_id in self._remaining:
                missing = self._unplaced.missing(self._remaining[agent.agent_id])
        others = self._snapshot.others.get(agent.agent_id, {})
        return AgentRow(
            agent_id=agent.agent_id,
            node=agent.node,
            total=dict(agent.total),
            free=None if offer is None else dict(offer.free),
            offered_s=None if offer is None else offer.time_s,
            missing=missing,
            obstacles=tuple(self._obstacles(agent)),
            held_by_jobs={
                other.job_id: dict(other.allocated[agent.agent_id])
                for other in self._snapshot.jobs.values()
                if agent.agent_id in other.allocated
            },
            held_by_others={name: amount for name, amount in others.items() if amount > 0},
            can_ever_hold=not first.missing(agent.total),
        )

    def _obstacles(self, agent: AgentFacts) -> list[str]:
        job = self._job
        found = [
            f"The constraint {one} does not admit it."
            for one in job.constraints.unmet(agent.attributes, agent.hostname)
        ]
        if agent.agent_id in job.excluded:
            found.append(f"The job avoids it after failures, for another {job.excluded[agent.agent_id]:.0f} s.")
        if self._is_reserved_for_other(agent):
            assert self._snapshot.reservation is not None
            found.append(f"It is reserved for job {self._snapshot.reservation.job_id}.")
        found += [f"{describe(amounts)} are reserved for role {role}." for role, amounts in agent.reserved.items()]
        return found

    def _could_be_freed(self) -> list[str]:
        """The resources of other jobs on agents that the job may use, users furthest above their share first."""
        admitted = {agent.agent_id for agent in self._admitted}
        shares = self._snapshot.shares
        found = []
        others = [job for job in self._snapshot.jobs.values() if job.job_id != self._job.job_id]
        holders = [job for job in others if job.allocated.keys() & admitted]
        for job in sorted(holders, key=lambda one: -shares.get(one.user, 0.0)):
            held = total(job.allocated[agent_id] for agent_id in sorted(job.allocated.keys() & admitted))
            kind = "search" if job.sizing is not None and not job.sizing.is_gang else "job"
            found.append(
                f"The {kind} {job.job_id} of {job.user}, whose share is {100 * shares.get(job.user, 0.0):.0f} %, holds "
                f"{describe(held)} there.{describe_contribution(self._snapshot.reservation, job, self._job.job_id)}"
            )
        return found


def _never_fits(sizing: Sizing, constraints: Constraints, agents: Sequence[AgentFacts]) -> tuple[Verdict, str] | None:
    """Why these agents could not run a job even if they were empty; None if they could."""
    admitted = [agent for agent in agents if constraints.admits(agent.attributes, agent.hostname)]
    problem = sizing.fit(_empty_nodes(sizing, admitted)).problem
    if not problem:
        return None
    if not admitted:
        return Verdict.CONSTRAINTS, _unmet(constraints, agents)
    if len(admitted) < len(agents) and not sizing.fit(_empty_nodes(sizing, agents)).problem:
        texts = ", ".join(map(str, constraints.all))
        return Verdict.CONSTRAINTS, f"The agents that {texts} admits cannot hold it: {problem}"
    with_reserved = [(agent, _with_reserved(agent)) for agent in admitted]
    roles = sorted({role for agent in admitted for role in agent.reserved})
    if roles and not sizing.fit(nodes_for(sizing, with_reserved)).problem:
        return Verdict.ROLE, f"What it needs is reserved for the role {_some(roles)} (--role of the service): {problem}"
    return Verdict.NEVER_FITS, f"It can never fit on the agents seen so far: {problem}"


def _unmet(constraints: Constraints, agents: Sequence[AgentFacts]) -> str:
    known = {HOSTNAME, *(name for agent in agents for name in agent.attributes)}
    for one in constraints.all:
        if one.field not in known:
            nearest = difflib.get_close_matches(one.field, sorted(known), 1)
            meant = f"; did you mean {nearest[0]}?" if nearest else f"; they have {_some(sorted(known))}."
            return f"The constraint {one} admits no agent, since none has the attribute {one.field}{meant}"
        if not any(one.admits(agent.attributes, agent.hostname) for agent in agents):
            values = {agent.hostname if one.field == HOSTNAME else agent.attributes.get(one.field) for agent in agents}
            there = _some(sorted(value for value in values if value is not None))
            return f"The constraint {one} admits no agent; the agents have {there}."
    return f"No agent meets all the constraints {', '.join(map(str, constraints.all))}."


def _seen(snapshot: Snapshot) -> tuple[AgentFacts, ...]:
    return (*(snapshot.agents or ()), *snapshot.gone)


def _empty_nodes(sizing: Sizing, agents: Sequence[AgentFacts]) -> Nodes:
    """The agents with all their resources."""
    return nodes_for(sizing, [(agent, agent.total) for agent in agents])


def _with_reserved(agent: AgentFacts) -> dict[str, float]:
    return total((agent.total, *agent.reserved.values()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"


def sizing_of(request: TrainingRequest | SearchJobRequest) -> Sizing:
    if isinstance(request, SearchJobRequest):
        return SearchSizing(request.to_spec())
    return TrainingSizing(request.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python=""))
