"""Offers grouped by agent, and their conversion to solver nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.mesos.resources import ResourcePool, usable_amounts
from solver import Cluster, NodeClass
from solver.cluster import DEFAULT_NETWORK_GBPS
from solver.units import format_bytes

MIB = 2**20
HOST_ATTRIBUTE = "dike_host"
"""Attribute of agents of `dike cluster`: address under which other machines reach the agent's tasks."""
NO_OFFER_TIMEOUT_S = 10.0
"""Without any offer for this time, the user is notified."""
NO_OFFER = (
    f"No offer has arrived for {NO_OFFER_TIMEOUT_S:g} s: other jobs or other frameworks use all agents, or no agent "
    "offers anything to this role (--role)."
)
"""Reason why a job waits, if no better one is known."""
_MAX_AGENTS_SHOWN = 4


@dataclass
class AgentOffer:
    """All current offers of one agent together.

    Attributes:
        agent_id: the agent's id in Mesos.
        node: the agent's name in plans: its host name, with a part of the id if that is not unique.
        address: host or IP address under which the agent's tasks can be reached.
        attributes: the agent's attributes as text.
        offer_ids: ids of the offers.
        resources: their resources, in Mesos' JSON form.
    """

    agent_id: str
    node: str
    address: str
    attributes: dict[str, str]
    offer_ids: list[str] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pool(self) -> ResourcePool:
        """A fresh pool of everything offered."""
        return ResourcePool(self.resources)

    @property
    def amounts(self) -> dict[str, float]:
        """Offered amount of each resource (`usable_amounts`)."""
        return usable_amounts(self.resources)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that plans may use for the agent."""
        return _names(self.node.partition("/")[0], self.agent_id)

    def node_class(self) -> NodeClass:
        return node_class(self.node, self.amounts, self.attributes)


def by_agent(offers: Iterable[dict[str, Any]]) -> list[AgentOffer]:
    """Groups offers in Mesos' JSON form by agent; sorted by the agent's name."""
    agents: dict[str, AgentOffer] = {}
    for offer in offers:
        agent_id = offer["agent_id"]["value"]
        agent = agents.get(agent_id)
        if agent is None:
            taken = {one.node for one in agents.values()}
            attributes = attributes_of(offer.get("attributes", ()))
            agent = agents[agent_id] = AgentOffer(
                agent_id=agent_id,
                node=next(name for name in _names(offer["hostname"], agent_id) if name not in taken),
                address=address_of(offer),
                attributes={name: value for name, value in attributes.items() if name != HOST_ATTRIBUTE},
            )
        agent.offer_ids.append(offer["id"]["value"])
        agent.resources.extend(offer.get("resources", ()))
    return sorted(agents.values(), key=lambda agent: agent.node)


def describe_offers(agents: Iterable[AgentOffer]) -> str:
    texts = []
    for agent in agents:
        pool = agent.pool
        texts.append(
            f"{agent.node} {pool.scalar('cpus'):g} cpus, {pool.scalar('mem'):g} MiB, {pool.scalar('gpus'):g} gpus, "
            f"{len(pool.ports())} ports"
        )
    return "; ".join(texts) or "nothing"


def describe_free(nodes: Iterable[NodeClass]) -> str:
    """Describes the free resources of the first agents in a sentence; empty if unknown."""
    known = [(node, node.free) for node in nodes if node.free is not None]
    texts = []
    for node, free in known[:_MAX_AGENTS_SHOWN]:
        gpus = f", {free['gpus']:g} of {node.gpus} GPUs" if node.gpus else ""
        mem = f"{format_bytes(free['mem'] * MIB)} of {format_bytes(node.mem_bytes)}"
        texts.append(f"{free['cpus']:g} of {node.cpus:g} CPUs and {mem}{gpus} on {node.name}")
    more = f", and {len(known) - _MAX_AGENTS_SHOWN} agents more" if len(known) > _MAX_AGENTS_SHOWN else ""
    return f" Free are {'; '.join(texts)}{more}." if texts else ""


def node_names(hostnames: Mapping[str, str]) -> dict[str, str]:
    """Returns unique names of agents for plans: the host name, with as much of the id as is needed to be unique.

    Args:
        hostnames: agent's id -> host name.

    Returns:
        Agent's id -> name; the part of the id follows a slash.
    """
    count = Counter(name for one, hostname in hostnames.items() for name in _names(hostname, one))
    return {
        one: next((name for name in _names(hostname, one) if count[name] == 1), f"{hostname}/{one}")
        for one, hostname in hostnames.items()
    }


def _names(hostname: str, agent_id: str) -> tuple[str, str, str]:
    """From short to certainly unique: agents that registered at different masters may all be S0 there."""
    return hostname, f"{hostname}/{agent_id.rsplit('-', 1)[-1]}", f"{hostname}/{agent_id}"


def cluster_of(nodes: Iterable[NodeClass]) -> Cluster:
    """Returns a solver cluster with default links."""
    return Cluster(nodes=tuple(nodes))


def node_class(name: str, scalars: dict[str, float], attributes: dict[str, str]) -> NodeClass:
    """Converts resources and the attributes `gpu_model`, `rack` and `network_gbps` (default 10) to a solver node."""
    return NodeClass(
        name=name,
        count=1,
        cpus=scalars.get("cpus", 0.0),
        mem_bytes=int(scalars.get("mem", 0.0) * MIB),
        gpus=int(scalars.get("gpus", 0.0)),
        gpu_model=attributes.get("gpu_model"),
        disk_bytes=int(scalars.get("disk", 0.0) * MIB),
        network_gbps=_positive(attributes.get("network_gbps")) or DEFAULT_NETWORK_GBPS,
        rack=attributes.get("rack"),
    )


def attributes_of(attributes: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Returns scalar and text attributes as text."""
    texts = {}
    for attribute in attributes:
        kind = attribute.get("type")
        if kind == "TEXT":
            texts[attribute["name"]] = attribute_text(attribute["text"]["value"])
        elif kind == "SCALAR":
            texts[attribute["name"]] = attribute_text(attribute["scalar"]["value"])
    return texts


def attribute_text(value: str | float) -> str:
    """Formats an attribute's value the same way for offers and for the master's list of agents."""
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def address_of(offer: dict[str, Any]) -> str:
    """Returns the address of an agent's tasks: preferably its IP address, which needs no name service.

    On a cluster of `dike cluster` the agent itself has a virtual address, and names that of its tasks in an attribute.
    """
    address = offer.get("url", {}).get("address", {})
    named = attributes_of(offer.get("attributes", ())).get(HOST_ATTRIBUTE)
    return named or str(address.get("ip") or address.get("hostname") or offer["hostname"])


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value > 0 else None
