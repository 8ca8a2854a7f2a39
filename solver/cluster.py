"""The machines that a plan may use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dike.exceptions import BadInputError
from solver.costs import Costs, NodeCosts, RackCosts, UniformCosts
from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE
from solver.units import GIB

MAX_NODES = 100_000
DEFAULT_NETWORK_GBPS = 10.0
DEFAULT_WITHIN_NODE_GBPS = 64.0
DEFAULT_DISK_BYTES = 10 * GIB
MAX_PAIRS = 1_000_000
"""Maximum number of pairs of machines with costs of their own."""


@dataclass(frozen=True, kw_only=True)
class NodeClass:
    """A number of identical machines.

    Attributes:
        name: the machine's name; with a count above 1 the machines are called `name-0`, `name-1` and so on.
        gpu_model: their model, such as `K80`; None if unknown.
        network_gbps: speed of its network card in Gb/s, each way.
        free: resource -> unused amount at the moment, for messages only; None if unknown.
    """

    name: str
    count: int = 1
    cpus: float
    mem_bytes: int
    gpus: int = 0
    gpu_model: str | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES
    network_gbps: float = DEFAULT_NETWORK_GBPS
    rack: str | None = None
    free: Mapping[str, float] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def node_names(self) -> tuple[str, ...]:
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{index}" for index in range(self.count))


@dataclass(frozen=True)
class PairCost:
    """Cost of a byte between two machines, or between any two of two classes of machines.

    Attributes:
        first: a machine, or a class, which stands for all its machines.
        second: another; or the same class again, for every two machines in it.
        cost: Eq. 1's weight of a byte between them.
    """

    first: str
    second: str
    cost: float


class LinkError(BadInputError):
    """A link is invalid.

    Attributes:
        reason: the problem, as a clause.
        key: its location by the keys of a cluster file: `("links", "pairs", 2)` is the third pair.
    """

    def __init__(self, reason: str, *key: str | int) -> None:
        super().__init__(f"{reason[:1].upper()}{reason[1:]}.")
        self.reason = reason
        self.key = key


@dataclass(frozen=True)
class Cluster:
    """All machines and the links between them.

    Attributes:
        within_node_gbps: speed between two tasks on one machine, in Gb/s.
        across_racks_gbps: speed of each rack's uplink in Gb/s, each way; None if racks do not matter.
        within_node_cost: Eq. 1's weight of a byte that stays on its machine.
        within_rack_cost: weight of a byte between machines; within one rack, if `across_racks_cost` is given.
        across_racks_cost: weight of a byte between racks; None if racks do not matter.
    """

    nodes: tuple[NodeClass, ...]
    within_node_gbps: float = DEFAULT_WITHIN_NODE_GBPS
    across_racks_gbps: float | None = None
    within_node_cost: float = COST_WITHIN_NODE
    within_rack_cost: float = COST_BETWEEN_NODES
    across_racks_cost: float | None = None
    pairs: tuple[PairCost, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise BadInputError("A cluster needs at least one node.")
        if self.node_count > MAX_NODES:
            raise BadInputError(f"A cluster of {self.node_count:,} nodes is too large; {MAX_NODES:,} are the most.")
        seen: set[str] = set()
        for name in self.node_names():
            if name in seen:
                raise BadInputError(f"Two nodes of the cluster are called '{name}'; give each its own name.")
            seen.add(name)
        for field in ("within_node_gbps", "across_racks_gbps", "within_node_cost"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise LinkError(f"'{field}' is {value:g}; it must be more than 0", "links", field)
        for index, node in enumerate(self.nodes):
            if not node.network_gbps > 0:
                raise LinkError(
                    f"'network_gbps' of '{node.name}' is {node.network_gbps:g}; it must be more than 0",
                    *("nodes", index, "network_gbps"),
                )
        for field, least in (("within_rack_cost", "within_node_cost"), ("across_racks_cost", "within_rack_cost")):
            cost, below = getattr(self, field), getattr(self, least)
            if cost is not None and cost < below:
                raise LinkError(f"'{field}' is {cost:g}, less than {below:g}, the '{least}'; raise it", "links", field)
        if self.pairs:
            self.costs()

    def node_names(self) -> Iterator[str]:
        """Names of all machines, class by class."""
        for node in self.nodes:
            yield from node.node_names

    @property
    def node_count(self) -> int:
        return sum(node.count for node in self.nodes)

    def costs(self) -> Costs:
        """Eq. 1's weights: by rack if racks have a cost, by pair of machines if any pair has, else uniform.

        Raises:
            LinkError: if a pair names an unknown machine, is invalid, or contradicts another pair or the racks.
        """
        racks = None
        if self.across_racks_cost is not None:
            rack_of = {name: node.rack for node in self.nodes for name in node.node_names}
            racks = RackCosts(rack_of, self.within_node_cost, self.within_rack_cost, self.across_racks_cost)
        pairs = self._pair_costs(racks)
        if racks is not None:
            return racks
        if pairs:
            return NodeCosts(pairs, self.within_node_cost, self.within_rack_cost)
        return UniformCosts(self.within_node_cost, self.within_rack_cost)

    def _pair_costs(self, racks: RackCosts | None) -> dict[tuple[str, str], float]:
        """Costs of single pairs of machines, each pair in the order of the cluster."""
        found: dict[tuple[str, str], float] = {}
        for index, pair in enumerate(self.pairs):
            where = ("links", "pairs", index)
            if pair.cost < self.within_node_cost:
                raise LinkError(
                    f"a byte between '{pair.first}' and '{pair.second}' costs {pair.cost:g}, less than "
                    f"{self.within_node_cost:g}, the 'within_node_cost'; raise it",
                    *where,
                )
            for ends in self._ends(pair, where):
                known = racks.between(*ends) if racks is not None else found.setdefault(ends, pair.cost)
                if known != pair.cost:
                    other = "their racks" if racks is not None else "an earlier pair"
                    raise LinkError(
                        f"contradictory links: the cost between '{ends[0]}' and '{ends[1]}' is {pair.cost:g} here and "
                        f"{known:g} by {other}; keep one",
                        *where,
                    )
        return found

    def _ends(self, pair: PairCost, where: Sequence[str | int]) -> Iterator[tuple[str, str]]:
        """The distinct pairs of machines that a pair of names stands for."""
        members = self._members
        for name in (pair.first, pair.second):
            if name not in members:
                known = ", ".join(dict.fromkeys(node.name for node in self.nodes))
                raise LinkError(f"there is no machine '{name}'; the classes of machines are {known}", *where)
        first, second = members[pair.first], members[pair.second]
        if len(first) * len(second) > MAX_PAIRS:
            raise LinkError(
                f"'{pair.first}' and '{pair.second}' are {len(first) * len(second):,} pairs of machines, more than "
                f"{MAX_PAIRS:,}; use racks",
                *where,
            )
        if first == second and len(first) == 1:
            raise LinkError(f"'{pair.first}' is paired with itself; bytes within it cost 'within_node_cost'", *where)
        order = self._order
        ends = {
            (one, other) if order[one] < order[other] else (other, one)
            for one in first
            for other in second
            if one != other
        }
        yield from sorted(ends, key=lambda both: (order[both[0]], order[both[1]]))

    @functools.cached_property
    def _members(self) -> Mapping[str, tuple[str, ...]]:
        """Machines that a name in a pair stands for: one machine, or all of a class."""
        members = {name: (name,) for name in self.node_names()}
        return {node.name: node.node_names for node in self.nodes} | members

    @functools.cached_property
    def _order(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.node_names())}
