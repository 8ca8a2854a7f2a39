"""Agent cooldown: agents where something failed or was slow are not used for a while (paper 'Hops': blacklisting)."""

from __future__ import annotations


class Exclusions:
    """Agents in cooldown.

    Args:
        cooldown_s: duration of a cooldown.
    """

    def __init__(self, cooldown_s: float) -> None:
        self._cooldown_s = cooldown_s
        self._until_s: dict[str, float] = {}

    def exclude(self, agent_id: str, now_s: float) -> None:
        """Starts an agent's cooldown."""
        self._until_s[agent_id] = now_s + self._cooldown_s

    def count(self, now_s: float) -> int:
        """Number of agents in cooldown."""
        return sum(now_s < until_s for until_s in self._until_s.values())

    def left_s(self, now_s: float) -> dict[str, float]:
        """Agent -> remaining seconds of its cooldown."""
        return {agent: until_s - now_s for agent, until_s in self._until_s.items() if now_s < until_s}

    def excludes(self, agent_id: str, now_s: float) -> bool:
        """Whether an agent is in cooldown."""
        return now_s < self._until_s.get(agent_id, now_s)
