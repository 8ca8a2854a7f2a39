"""What other frameworks hold: what all hold, by the master, less what we know that we hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from framework.service.agents import AgentFacts, Amounts

WINDOW_S = 30.0


class Others:
    """What other frameworks hold on each agent.

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
        found = {agent: _least(amounts, self._before.get(agent)) for agent, amounts in self._window.items()}
        return {agent: amounts for agent, amounts in found.items() if any(amounts.values())}

    def observe(self, agents: Sequence[AgentFacts], ours: Mapping[str, Amounts], now_s: float) -> None:
        """Takes in what is known now: the agents as the master described them, and what we hold on each."""
        if now_s - self._since_s >= WINDOW_S:
            self._before, self._window, self._since_s = self._window, {}, now_s
        seen = {agent.agent_id: agent.used_by_others(ours.get(agent.agent_id, {})) for agent in agents}
        self._window = {agent: _least(amounts, self._window.get(agent)) for agent, amounts in seen.items()}


def left_of(agent: AgentFacts, others: Amounts) -> dict[str, float]:
    """What an agent has beside what others hold there."""
    return {name: max(0.0, amount - others.get(name, 0.0)) for name, amount in agent.total.items()}


def _least(amounts: Amounts, other: Amounts | None) -> dict[str, float]:
    return {name: min(amount, math.inf if other is None else other.get(name, 0.0)) for name, amount in amounts.items()}
