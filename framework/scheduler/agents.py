"""Cached list of the master's agents, and what other frameworks use there."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import InfeasibleError
from framework.mesos.master import LeadingMaster
from framework.mesos.offers import attribute_text, node_class, node_names
from framework.scheduler.amounts import SCALARS, SHARE_RESOURCES, Amounts, elementwise_min, subtract, total
from framework.scheduler.constraints import Constraints, parse_constraints
from framework.scheduler.demand import Demand, FrameworkUsage, framework_usages
from solver import NodeClass

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
MAX_STALENESS_S = 60.0
"""Older answers of the master are not used."""
FRAMEWORKS_INTERVAL_S = 10.0
"""Interval between requests for the list of frameworks, which costs the master more."""
MAX_GONE_AGENTS = 10_000
"""Number of deregistered agents that are remembered."""
USAGE_WINDOW_S = 30.0
"""Minimum time for which usage by other frameworks is observed before its minimum counts."""


@dataclass(frozen=True)
class AgentFacts:
    """An agent, from the master's last answer.

    Attributes:
        agent_id: its id in Mesos.
        hostname: its host name.
        node: its name in plans: the host name, with a part of the id where several agents share that.
        attributes: as text.
        total: what Dike's role may use of it when it is empty.
        reserved: other role -> amounts reserved for it.
        used: amounts used by the tasks of all frameworks.
        is_registered: whether it is registered and active.
    """

    agent_id: str
    hostname: str
    node: str
    attributes: dict[str, str] = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)
    reserved: Mapping[str, Amounts] = field(default_factory=dict)
    used: Amounts = field(default_factory=dict)
    is_registered: bool = True

    def used_by_others(self, ours: Amounts) -> dict[str, float]:
        """Amounts used by other frameworks' tasks, given those used by this framework."""
        return subtract(self.used, ours)

    def node_class(self, amounts: Amounts | None = None) -> NodeClass:
        """Converts it to a solver node with these amounts, by default all it has."""
        return node_class(self.node, dict(self.total if amounts is None else amounts), self.attributes)


class AgentDirectory:
    """Knows the agents and the other frameworks. Never blocks on the master: answers come from a cache that a thread
    refreshes.

    Args:
        ask: path -> the master's answer, None if there is none (`LeadingMaster.ask`); blocks.
        role: Dike's role.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ask: Callable[[str], dict[str, Any] | None],
        role: str = "*",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._role = role
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agents")
        self._asking = threading.Lock()
        self._refresh: Future[None] | None = None
        self._asked_s: float | None = None
        self._known: tuple[AgentFacts, ...] | None = None
        self._known_s = -math.inf
        self._gone: dict[str, AgentFacts] = {}
        self._uses: list[FrameworkUsage] = []
        self._uses_s = -math.inf
        self._needs_usages = False

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def refresh(self) -> None:
        """Queries the master now, and waits for the answer."""
        answer = self._ask("/slaves")
        if answer is None:
            return
        self._apply_agents(answer.get("slaves", []))
        self._known_s = self._clock()
        if self._needs_usages and self._clock() - self._uses_s >= FRAMEWORKS_INTERVAL_S:
            uses = framework_usages(self._ask)
            if uses is not None:
                self._uses, self._uses_s = uses, self._clock()

    def current(self) -> tuple[AgentFacts, ...] | None:
        """Registered agents by name, None if unknown; starts a refresh if the last is old. May be called from any
        thread.
        """
        now_s = self._clock()
        with self._asking:
            idle = self._refresh is None or self._refresh.done()
            if idle and (self._asked_s is None or now_s - self._asked_s >= REFRESH_S):
                if self._refresh is not None and (error := self._refresh.exception()) is not None:
                    logger.warning("the master's list of agents cannot be read: %r", error)
                self._asked_s = now_s
                self._refresh = self._pool.submit(self.refresh)
        return self._known if now_s - self._known_s < MAX_STALENESS_S else None

    @property
    def gone(self) -> tuple[AgentFacts, ...]:
        """Agents that have deregistered."""
        return tuple(self._gone.values())

    def nodes(self, constraints: Constraints) -> list[NodeClass] | None:
        """Agents that meet these constraints, with all their resources, used or not
        (`framework.training.planning.AllAgents`).
        """
        known = self.current()
        if known is None:
            return None
        return [one.node_class() for one in known if constraints.admits(one.attributes, one.hostname)]

    def demand(self, own_id: str) -> Demand | None:
        """Usage and requests of the other frameworks, some seconds old; None if unknown. The first call starts the
        observation.
        """
        self._needs_usages = True
        known = self.current()
        if not known or self._clock() - self._uses_s >= MAX_STALENESS_S:
            return None
        parts = [amounts for one in known for amounts in (one.total, *one.reserved.values())]
        whole = total(parts)
        return Demand.among({name: whole.get(name, 0.0) for name in SHARE_RESOURCES}, self._uses, own_id)

    def _apply_agents(self, slaves: list[dict[str, Any]]) -> None:
        active = [slave for slave in slaves if slave.get("active")]
        names = node_names({str(slave["id"]): str(slave["hostname"]) for slave in active})
        known = [self._facts(slave, names[str(slave["id"])]) for slave in active]
        before = {one.agent_id: one for one in (*self._gone.values(), *(self._known or ()))}
        nodes = {one.node for one in known}
        ids = {one.agent_id for one in known}
        # Neither an agent that registered again under its name nor one with a new name is gone.
        gone = [one for one in before.values() if one.node not in nodes and one.agent_id not in ids]
        self._gone = {one.node: _gone(one) for one in gone[-MAX_GONE_AGENTS:]}
        self._known = tuple(sorted(known, key=lambda one: one.node))

    def _facts(self, slave: Mapping[str, Any], node: str) -> AgentFacts:
        ours = _amounts(slave.get("unreserved_resources", slave["resources"]))
        reserved = {}
        for role, resources in slave.get("reserved_resources", {}).items():
            # A role may also use the reservations of its parent roles.
            if self._role == role or self._role.startswith(f"{role}/"):
                ours = total((ours, _amounts(resources)))
            else:
                reserved[str(role)] = {name: amount for name, amount in _amounts(resources).items() if amount > 0}
        return AgentFacts(
            agent_id=str(slave["id"]),
            hostname=str(slave["hostname"]),
            node=node,
            attributes={name: attribute_text(value) for name, value in slave.get("attributes", {}).items()},
            total=ours,
            reserved=reserved,
            used=_amounts(slave.get("used_resources", {})),
        )


class OtherFrameworksUsage:
    """Usage by other frameworks on each agent: usage by all, from the master, less this framework's own.

    The master's answer is some seconds old, while own tasks start and end. A momentary difference therefore does not
    count: the result is the minimum of the last one to two windows.
    """

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}
        self._window: dict[str, dict[str, float]] = {}
        self._since_s = -math.inf

    @property
    def all(self) -> dict[str, dict[str, float]]:
        """Agent -> resource -> amount, where others use anything."""
        found = {agent: elementwise_min(amounts, self._before.get(agent)) for agent, amounts in self._window.items()}
        return {agent: amounts for agent, amounts in found.items() if any(amounts.values())}

    def observe(self, agents: Sequence[AgentFacts], ours: Mapping[str, Amounts], now_s: float) -> None:
        """Adds an observation: the agents from the master, and this framework's usage of each."""
        if now_s - self._since_s >= USAGE_WINDOW_S:
            self._before, self._window, self._since_s = self._window, {}, now_s
        seen = {agent.agent_id: agent.used_by_others(ours.get(agent.agent_id, {})) for agent in agents}
        self._window = {agent: elementwise_min(amounts, self._window.get(agent)) for agent, amounts in seen.items()}


AllAgents = Callable[[], list[NodeClass] | None]
"""Lists all registered agents that a job may use with all their resources, used or not; None if unknown.

Raises `InfeasibleError` if there are agents, but none meets the job's constraints.
"""


def no_matching_agent_error(constraints: Sequence[str]) -> InfeasibleError:
    """The error that `AllAgents` raises."""
    return InfeasibleError(f"No agent meets --constraint {' and '.join(constraints)}.")


def admitted_agents(master: LeadingMaster, constraints: tuple[str, ...]) -> list[NodeClass] | None:
    """Queries the master for all agents that a job may use, with all their resources; None if it does not answer.

    Raises:
        InfeasibleError: if there are agents, but none meets the constraints.
    """
    nodes = master.agents(parse_constraints(constraints).admits)
    if nodes == [] and constraints and master.agents():
        raise no_matching_agent_error(constraints)
    return nodes


def _gone(facts: AgentFacts) -> AgentFacts:
    return AgentFacts(
        facts.agent_id,
        facts.hostname,
        facts.node,
        facts.attributes,
        facts.total,
        facts.reserved,
        {},
        is_registered=False,
    )


def _amounts(resources: Mapping[str, Any]) -> dict[str, float]:
    amounts = {name: float(resources.get(name, 0.0)) for name in SCALARS}
    # Text such as "[31000-31099, 31200-31200]".
    ranges = re.findall(r"(\d+)-(\d+)", str(resources.get("ports", "")))
    amounts["ports"] = float(sum(int(end) - int(begin) + 1 for begin, end in ranges))
    return amounts
