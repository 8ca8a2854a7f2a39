"""Network properties that the machines do not report themselves: links between racks, measured speeds.

    links:
      across_racks_gbps: 40
    nodes:
      - name: agent-1
        network_gbps: 9.4
        rack: r1

The keys are those of a cluster file; omitted values are unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError
from solver.cluster import Cluster, NodeClass, PairCost

LINKS = ("within_node_gbps", "across_racks_gbps", "within_node_cost", "within_rack_cost", "across_racks_cost")


@dataclass(frozen=True)
class MachineNetwork:
    """A machine's network properties.

    Attributes:
        name: of the machine, or of a class of machines; for several agents on one host, the host name suffices.
        network_gbps: speed of its network card in Gb/s, each way; None if not given.
    """

    name: str
    network_gbps: float | None = None
    rack: str | None = None


@dataclass(frozen=True)
class Network:
    """Links, and machines' network properties.

    Attributes:
        within_node_gbps, across_racks_gbps, within_node_cost, within_rack_cost, across_racks_cost: as in `Cluster`;
        None if not given.
        machines: properties of single machines.
    """

    within_node_gbps: float | None = None
    across_racks_gbps: float | None = None
    within_node_cost: float | None = None
    within_rack_cost: float | None = None
    across_racks_cost: float | None = None
    pairs: tuple[PairCost, ...] = ()
    machines: tuple[MachineNetwork, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every machine, or class of machines, that is named."""
        ends = (end for pair in self.pairs for end in (pair.first, pair.second))
        return tuple(dict.fromkeys((*(machine.name for machine in self.machines), *ends)))

    def check_names(self, cluster: Cluster) -> None:
        """Raises `BadInputError` if a machine is named that the cluster does not have."""
        known = {*cluster.node_names(), *(node.name for node in cluster.nodes)}
        if unknown := [name for name in self.names if name not in known]:
            classes = ", ".join(node.name for node in cluster.nodes)
            raise BadInputError(
                f"The network file names the machine '{unknown[0]}', which the cluster does not have; it has {classes}."
            )

    def of(self, cluster: Cluster) -> Cluster:
        """Applies these links to the cluster; entries for machines that it does not have are ignored."""
        known: Mapping[str, MachineNetwork] = {machine.name: machine for machine in self.machines}
        nodes = tuple(part for node in cluster.nodes for part in _with_network(node, known))
        names = {*(node.name for node in nodes), *(node.name for node in cluster.nodes)}
        names |= {name for node in nodes for name in node.node_names}
        links: dict[str, Any] = {name: getattr(self, name) for name in LINKS if getattr(self, name) is not None}
        if self.pairs:
            links["pairs"] = tuple(pair for pair in self.pairs if {pair.first, pair.second} <= names)
        return dataclasses.replace(cluster, nodes=nodes, **links)


def _with_network(node: NodeClass, known: Mapping[str, MachineNetwork]) -> Iterator[NodeClass]:
    """A class of machines with the network's properties; machines with properties of their own are separated."""
    own = known.get(node.name) or known.get(node.name.partition("/")[0])
    node = node if own is None else _with_properties(node, own)
    if node.count == 1 or not any(name in known for name in node.node_names):
        yield node
        return
    for name in node.node_names:
        alone = dataclasses.replace(node, name=name, count=1)
        yield _with_properties(alone, known[name]) if name in known else alone


def _with_properties(node: NodeClass, properties: MachineNetwork) -> NodeClass:
    return dataclasses.replace(
        node,
        network_gbps=node.network_gbps if properties.network_gbps is None else properties.network_gbps,
        rack=node.rack if properties.rack is None else properties.rack,
    )
