"""Agents that are left out for a while because something failed or was slow there (paper 'Hops': blacklisting)."""

from __future__ import annotations


class Exclusions:
    """Which agents are left out, and until when.

    Args:
        cool_down_s: how long; after it an agent is tried again.
    """

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._until_s: dict[str, float] = {}

    def exclude(self, agent_id: str, now_s: float) -> None:
        """Leaves an agent out from now on."""
        self._until_s[agent_id] = now_s + self._cool_down_s

    def count(self, now_s: float) -> int:
        """How many agents are left out at the moment."""
        return sum(now_s < until_s for until_s in self._until_s.values())

    def left_s(self, now_s: float) -> dict[str, float]:
        """Agent -> for how many seconds it still is left out."""
        return {agent: until_s - now_s for agent, until_s in self._until_s.items() if now_s < until_s}

    def excludes(self, agent_id: str, now_s: float) -> bool:
        """Whether an agent is left out at the moment."""
        return now_s < self._until_s.get(agent_id, now_s)
