"""The master's agents as one role sees them, kept up to date in the background, and what others hold there."""

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
"""What the master has said is not believed any longer than this."""
FRAMEWORKS_INTERVAL_S = 10.0
"""How often it is asked for the frameworks, which is more work for it."""
MAX_GONE_AGENTS = 10_000
"""How many agents that are gone are remembered."""
USAGE_WINDOW_S = 30.0
"""How long what other frameworks hold is observed before the least of it counts."""


@dataclass(frozen=True)
class AgentFacts:
    """An agent, as the master described it last.

    Attributes:
        agent_id: Mesos' id of it.
        hostname: its host name.
        node: its name in plans: the host name, with a part of the id where several agents share that.
        attributes: as text.
        total: what our role may use of it when nothing runs there.
        reserved: other role -> what is kept for it.
        used: what tasks of any framework hold.
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
        """What other frameworks' tasks hold, where ours hold this much."""
        return subtract(self.used, ours)

    def node_class(self, amounts: Amounts | None = None) -> NodeClass:
        """It as the solver sees it, with these amounts in place of all it has."""
        return node_class(self.node, dict(self.total if amounts is None else amounts), self.attributes)


class AgentDirectory:
    """Knows the agents, and who else uses them, without ever waiting for the master, which may hang.

    Args:
        ask: path -> what the master answers, None where it does not (`LeadingMaster.ask`); blocks.
        role: ours.
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
        self._wants_uses = False

    def close(self) -> None:
        """Asks no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def refresh(self) -> None:
        """Asks now, and waits for the answer."""
        answer = self._ask("/slaves")
        if answer is None:
            return
        self._take_in(answer.get("slaves", []))
        self._known_s = self._clock()
        if self._wants_uses and self._clock() - self._uses_s >= FRAMEWORKS_INTERVAL_S:
            uses = framework_usages(self._ask)
            if uses is not None:
                self._uses, self._uses_s = uses, self._clock()

    def current(self) -> tuple[AgentFacts, ...] | None:
        """Those registered, by name; None as long as the master does not say. Asks it again if that is long ago.

        May be called by any thread.
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
        """Those that were registered and are not any more."""
        return tuple(self._gone.values())

    def nodes(self, constraints: Constraints) -> list[NodeClass] | None:
        """What a job may use, with all its resources, used or not (`framework.training.planning.AllAgents`)."""
        known = self.current()
        if known is None:
            return None
        return [one.node_class() for one in known if constraints.admits(one.attributes, one.hostname)]

    def demand(self, own_id: str) -> Demand | None:
        """What the other frameworks hold and want; None as long as the master does not say.

        Asked for the first time it makes the directory find out; from then on what it says is some seconds old.

        Args:
            own_id: Mesos' id of the framework that asks.
        """
        self._wants_uses = True
        known = self.current()
        if not known or self._clock() - self._uses_s >= MAX_STALENESS_S:
            return None
        parts = [amounts for one in known for amounts in (one.total, *one.reserved.values())]
        whole = total(parts)
        return Demand.among({name: whole.get(name, 0.0) for name in SHARE_RESOURCES}, self._uses, own_id)

    def _take_in(self, slaves: list[dict[str, Any]]) -> None:
        active = [slave for slave in slaves if slave.get("active")]
        names = node_names({str(slave["id"]): str(slave["hostname"]) for slave in active})
        known = [self._facts(slave, names[str(slave["id"])]) for slave in active]
        before = {one.agent_id: one for one in (*self._gone.values(), *(self._known or ()))}
        there = {one.node for one in known}
        ids = {one.agent_id for one in known}
        # An agent that has registered anew under its name is not gone, nor is one that is called otherwise now.
        gone = [one for one in before.values() if one.node not in there and one.agent_id not in ids]
        self._gone = {one.node: _gone(one) for one in gone[-MAX_GONE_AGENTS:]}
        self._known = tuple(sorted(known, key=lambda one: one.node))

    def _facts(self, slave: Mapping[str, Any], node: str) -> AgentFacts:
        ours = _amounts(slave.get("unreserved_resources", slave["resources"]))
        reserved = {}
        for role, resources in slave.get("reserved_resources", {}).items():
            # What is reserved for a role may be used by those below it.
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
    """What other frameworks hold on each agent: what all hold, by the master, less what we know that we hold.

    The master's answer is some seconds old, and our own tasks come and go meanwhile. So what has looked like others'
    for a moment only is not: the least of the last half to whole minute counts.
    """

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}
        self._window: dict[str, dict[str, float]] = {}
        self._since_s = -math.inf

    @property
    def all(self) -> dict[str, dict[str, float]]:
        """Agent -> resource -> amount, where others hold anything."""
        found = {agent: elementwise_min(amounts, self._before.get(agent)) for agent, amounts in self._window.items()}
        return {agent: amounts for agent, amounts in found.items() if any(amounts.values())}

    def observe(self, agents: Sequence[AgentFacts], ours: Mapping[str, Amounts], now_s: float) -> None:
        """Takes in what is known now: the agents as the master described them, and what we hold on each."""
        if now_s - self._since_s >= USAGE_WINDOW_S:
            self._before, self._window, self._since_s = self._window, {}, now_s
        seen = {agent.agent_id: agent.used_by_others(ours.get(agent.agent_id, {})) for agent in agents}
        self._window = {agent: elementwise_min(amounts, self._window.get(agent)) for agent, amounts in seen.items()}


AllAgents = Callable[[], list[NodeClass] | None]
"""Lists every registered agent that a job may use with all its resources, used or not; None where that is not known.

Raises `InfeasibleError` if there are agents, but none that meets the job's constraints."""


def no_matching_agent_error(constraints: Sequence[str]) -> InfeasibleError:
    """What `AllAgents` raises."""
    return InfeasibleError(f"No agent meets --constraint {' and '.join(constraints)}.")


def admitted_agents(master: LeadingMaster, constraints: tuple[str, ...]) -> list[NodeClass] | None:
    """Every registered agent that a job may use, with all its resources; None where the master does not tell.

    Raises:
        InfeasibleError: if there are agents, but none that meets the constraints.
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
    # As text: "[31000-31099, 31200-31200]".
    ranges = re.findall(r"(\d+)-(\d+)", str(resources.get("ports", "")))
    amounts["ports"] = float(sum(int(end) - int(begin) + 1 for begin, end in ranges))
    return amounts
