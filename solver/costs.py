"""Weights of a byte between two tasks, by their machines (the paper 'Dike', Eq. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE


class Costs(Protocol):
    """Weight of one byte between two tasks, by their machines."""

    def between(self, first: str, second: str) -> float:
        """The weight; the same in both directions."""
        ...

    @property
    def cheapest(self) -> tuple[float, float]:
        """The smallest weight on one machine, and between any two."""
        ...

    def total(self, stored: Mapping[str, int], workers: Mapping[str, int]) -> float:
        """Eq. 1, in weighted bytes: every worker moves every shard once.

        Args:
            stored: machine -> bytes of the shards on it.
            workers: machine -> workers on it.
        """
        ...


@dataclass(frozen=True)
class UniformCosts:
    """Eq. 1's Cost_in and Cost_out: a byte stays on its machine or leaves it."""

    within_node: float = COST_WITHIN_NODE
    between_nodes: float = COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        return self.within_node if first == second else self.between_nodes

    @property
    def cheapest(self) -> tuple[float, float]:
        return self.within_node, self.between_nodes

    def total(self, stored: Mapping[str, int], workers: Mapping[str, int]) -> float:
        every = sum(stored.values()) * sum(workers.values())
        return self.between_nodes * every - (self.between_nodes - self.within_node) * _local_bytes(stored, workers)


@dataclass(frozen=True)
class RackCosts:
    """Costs for bytes that stay on a machine, in its rack, or cross racks."""

    rack_of: Mapping[str, str | None]
    within_node: float = COST_WITHIN_NODE
    within_rack: float = COST_BETWEEN_NODES
    across_racks: float = 4 * COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        if first == second:
            return self.within_node
        return self.within_rack if self.rack_of[first] == self.rack_of[second] else self.across_racks

    @property
    def cheapest(self) -> tuple[float, float]:
        return self.within_node, min(self.within_rack, self.across_racks)

    def total(self, stored: Mapping[str, int], workers: Mapping[str, int]) -> float:
        every = sum(stored.values()) * sum(workers.values())
        in_racks = _local_bytes(self._by_rack(stored), self._by_rack(workers))
        in_nodes = _local_bytes(stored, workers)
        return (
            self.across_racks * every
            - (self.across_racks - self.within_rack) * in_racks
            - (self.within_rack - self.within_node) * in_nodes
        )

    def _by_rack(self, amounts: Mapping[str, int]) -> dict[str | None, int]:
        sums: dict[str | None, int] = {}
        for node, amount in amounts.items():
            sums[self.rack_of[node]] = sums.get(self.rack_of[node], 0) + amount
        return sums


@dataclass(frozen=True)
class NodeCosts:
    """Any cost for any two machines: the paper's Costout_jk.

    Attributes:
        pairs: (machine, machine) -> weight; each pair once, in either order.
        otherwise: weight of pairs that are not listed.
    """

    pairs: Mapping[tuple[str, str], float]
    within_node: float = COST_WITHIN_NODE
    otherwise: float = COST_BETWEEN_NODES

    def between(self, first: str, second: str) -> float:
        if first == second:
            return self.within_node
        return self.pairs.get((first, second), self.pairs.get((second, first), self.otherwise))

    @property
    def cheapest(self) -> tuple[float, float]:
        return self.within_node, min([self.otherwise, *self.pairs.values()])

    def total(self, stored: Mapping[str, int], workers: Mapping[str, int]) -> float:
        return sum(
            size * count * self.between(holder, node)
            for holder, size in stored.items()
            for node, count in workers.items()
        )


_Place = TypeVar("_Place")


def _local_bytes(stored: Mapping[_Place, int], workers: Mapping[_Place, int]) -> int:
    """Bytes that workers move without leaving their machine, or their rack."""
    return sum(size * workers.get(place, 0) for place, size in stored.items())
