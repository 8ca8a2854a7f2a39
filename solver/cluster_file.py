"""Reads cluster files and network files (YAML)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from dike.exceptions import BadInputError
from solver.cluster import (
    DEFAULT_DISK_BYTES,
    DEFAULT_NETWORK_GBPS,
    DEFAULT_WITHIN_NODE_GBPS,
    MAX_NODES,
    Cluster,
    LinkError,
    NodeClass,
    PairCost,
)
from solver.network import LINKS, MachineNetwork, Network
from solver.strict_yaml import StrictModel, YamlFile, read_yaml
from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE
from solver.units import parse_machine_bytes

MAX_CPUS = 10_000
MAX_GPUS = 1_000


Size = Annotated[int, BeforeValidator(parse_machine_bytes), Field(gt=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cost = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _two(names: list[str]) -> list[str]:
    if len(names) != 2:
        raise ValueError("it takes two machines, or classes of machines")
    return names


class _Node(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(gt=0, le=MAX_NODES)] = 1
    cpus: Annotated[float, Field(gt=0, le=MAX_CPUS, allow_inf_nan=False)]
    mem: Size
    gpus: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    gpu_model: str | None = None
    disk: Size = DEFAULT_DISK_BYTES
    network_gbps: Speed = DEFAULT_NETWORK_GBPS
    rack: str | None = None


class _Pair(StrictModel):
    between: Annotated[list[str], AfterValidator(_two)]
    cost: Cost


class _Links(StrictModel):
    within_node_gbps: Speed = DEFAULT_WITHIN_NODE_GBPS
    across_racks_gbps: Speed | None = None
    within_node_cost: Cost = COST_WITHIN_NODE
    within_rack_cost: Cost = COST_BETWEEN_NODES
    across_racks_cost: Cost | None = None
    pairs: list[_Pair] = Field(default_factory=list)


class _File(StrictModel):
    nodes: Annotated[list[_Node], Field(min_length=1)]
    links: _Links = Field(default_factory=_Links)


class _Machine(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    network_gbps: Speed | None = None
    rack: str | None = None


class _NetworkFile(StrictModel):
    links: _Links = Field(default_factory=_Links)
    nodes: list[_Machine] = Field(default_factory=list)


_PARTS: dict[str, type[StrictModel]] = {"pairs": _Pair, "links": _Links, "nodes": _Node}
"""Models of nested keys, innermost first."""
_NETWORK_PARTS: dict[str, type[StrictModel]] = {"pairs": _Pair, "links": _Links, "nodes": _Machine}


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file; `docs/planning.md` has the format.

    Raises:
        BadInputError: if it is unreadable or invalid; names the file and the line.
    """
    file = read_yaml(path, _File, "cluster file", _PARTS)
    _refuse_repeated_names(file, [_node_class(node).node_names for node in file.content.nodes])
    links = file.content.links
    try:
        return Cluster(
            nodes=tuple(_node_class(node) for node in file.content.nodes),
            within_node_gbps=links.within_node_gbps,
            across_racks_gbps=links.across_racks_gbps,
            within_node_cost=links.within_node_cost,
            within_rack_cost=links.within_rack_cost,
            across_racks_cost=links.across_racks_cost,
            pairs=tuple(PairCost(pair.between[0], pair.between[1], pair.cost) for pair in links.pairs),
        )
    except LinkError as error:
        raise file.error(error.key, f"{error.reason}.") from error


def read_network(path: Path) -> Network:
    """Reads a network file; `docs/planning.md` has the format.

    Raises:
        BadInputError: if it is unreadable or invalid; names the file and the line.
    """
    file = read_yaml(path, _NetworkFile, "network file", _NETWORK_PARTS)
    links, machines = file.content.links, file.content.nodes
    _refuse_repeated_names(file, [(machine.name,) for machine in machines])
    if links.pairs and links.across_racks_cost is not None:
        message = "costs are of pairs or of racks; leave out 'pairs' or 'across_racks_cost'."
        raise file.error(("links", "pairs"), message)
    pairs = tuple(PairCost(pair.between[0], pair.between[1], pair.cost) for pair in links.pairs)
    said = {name: getattr(links, name) for name in LINKS if name in links.model_fields_set}
    network = Network(**said, pairs=pairs, machines=tuple(MachineNetwork(**dict(machine)) for machine in machines))
    # Invalid links are reported now and not only when a job is planned.
    stand_ins = (NodeClass(name=name, cpus=1, mem_bytes=1) for name in network.names or ("",))
    try:
        network.of(Cluster(tuple(stand_ins)))
    except LinkError as error:
        raise file.error(error.key, f"{error.reason}.") from error
    return network


def write_network(path: Path, network: Network, about: str) -> None:
    """Writes a network file, without costs of pairs.

    `about`: one line on its origin.

    Raises:
        BadInputError: if it cannot be written.
    """
    links = {name: getattr(network, name) for name in LINKS if getattr(network, name) is not None}
    nodes = [
        {name: value for name, value in dataclasses.asdict(machine).items() if value is not None}
        for machine in network.machines
    ]
    text = yaml.safe_dump({**({"links": links} if links else {}), "nodes": nodes}, sort_keys=False)
    try:
        path.write_text(f"# {about}\n{text}", encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"The network file {path} cannot be written: {error.strerror}.") from error


def _node_class(node: _Node) -> NodeClass:
    return NodeClass(
        name=node.name,
        count=node.count,
        cpus=node.cpus,
        mem_bytes=node.mem,
        gpus=node.gpus,
        gpu_model=node.gpu_model,
        disk_bytes=node.disk,
        network_gbps=node.network_gbps,
        rack=node.rack,
    )


def _refuse_repeated_names(file: YamlFile[Any], names: Sequence[Sequence[str]]) -> None:
    """Rejects duplicate machine names; `names` are those of the machines of each node."""
    owners: dict[str, int] = {}
    for index, machines in enumerate(names):
        for name in machines:
            if name in owners:
                other = file.line(("nodes", owners[name], "name"))
                raise file.error(
                    ("nodes", index, "name"), f"the node name '{name}' is taken by line {other}; rename one."
                )
            owners[name] = index
