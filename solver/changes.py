"""What-if changes: a cluster with machines added or removed, or with one field changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from dike.exceptions import BadInputError
from solver.cluster import Cluster, NodeClass
from solver.units import parse_machine_bytes

_COUNTED = re.compile(r"(add|remove)\s+(\d+)\s*(?:x|\*)?\s+(.+)", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?:(.+)\.)?([a-z_]+)\s*=\s*(.+)")
_LINK_FIELDS = ("within_node_gbps", "across_racks_gbps")
_SIZES = {"mem": "mem_bytes", "disk": "disk_bytes"}
_WHOLE = ("count", "gpus")
_NODE_FIELDS = ("count", "cpus", "mem", "disk", "gpus", "gpu_model", "network_gbps", "rack")
FIELDS = (*_NODE_FIELDS, *_LINK_FIELDS)
"""Fields that can be set: a machine's keys of the cluster file, for all machines or one class, and link speeds."""
USAGE = "use 'add 2 x CLASS', 'remove 1 x CLASS', 'CLASS.FIELD=VALUE' or 'FIELD=VALUE'"


def apply_change(cluster: Cluster, change: str) -> Cluster:
    """Applies a change to a cluster.

    Args:
        cluster: the original.
        change: `add 2 x k80`, `remove 1 x cpu`, `k80.network_gbps=25` or `network_gbps=25`. A class is one of the
            cluster's; `gpu` and `cpu` stand for the first class with and without GPUs.

    Raises:
        BadInputError: if the change is malformed or does not apply to this cluster.
    """
    text = change.strip()
    counted = _COUNTED.fullmatch(text)
    if counted is not None:
        number = int(counted[2]) * (1 if counted[1].lower() == "add" else -1)
        return _resized(cluster, counted[3].strip(), number)
    assigned = _ASSIGNED.fullmatch(text)
    if assigned is None:
        raise BadInputError(f"'{change}' is not a change of a cluster; {USAGE}.")
    return _set(cluster, assigned[1], assigned[2], assigned[3].strip())


def _resized(cluster: Cluster, name: str, by: int) -> Cluster:
    chosen = _class(cluster, name)
    left = chosen.count + by
    if left < 0:
        raise BadInputError(f"'{chosen.name}' has {chosen.count} machines, so {-by} cannot be removed.")
    nodes = [dataclasses.replace(node, count=left) if node is chosen else node for node in cluster.nodes]
    nodes = [node for node in nodes if node.count]
    names = {name for node in nodes for name in (node.name, *node.node_names)} if cluster.pairs else set()
    pairs = tuple(pair for pair in cluster.pairs if {pair.first, pair.second} <= names)
    return dataclasses.replace(cluster, nodes=tuple(nodes), pairs=pairs)


def _set(cluster: Cluster, name: str | None, field: str, text: str) -> Cluster:
    if field not in FIELDS:
        raise BadInputError(f"'{field}' cannot be changed; these can: {', '.join(FIELDS)}.")
    value = _value(field, text)
    if field in _LINK_FIELDS:
        if name is not None:
            raise BadInputError(f"'{field}' applies to links, not to '{name}'; use {field}={text}.")
        return dataclasses.replace(cluster, **{field: value})
    chosen = cluster.nodes if name is None else (_class(cluster, name),)
    attribute = _SIZES.get(field, field)
    nodes = [
        dataclasses.replace(node, **{attribute: value}) if any(node is one for one in chosen) else node
        for node in cluster.nodes
    ]
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def _value(field: str, text: str) -> Any:
    if field in ("gpu_model", "rack"):
        return text
    if field in _SIZES:
        return _bytes(field, text)
    try:
        number = int(text) if field in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if field in _WHOLE else "a number"
        raise BadInputError(f"'{field}' must be {kind}, not '{text}'.") from None
    least = 0 if field == "gpus" else 1 if field == "count" else None
    if not (0 < number < float("inf") if least is None else number >= least):
        raise BadInputError(f"'{field}' must be {'more than 0' if least is None else f'at least {least}'}, not {text}.")
    return number


def _bytes(field: str, text: str) -> int:
    try:
        size = parse_machine_bytes(text)
    except ValueError as error:
        raise BadInputError(f"'{field}' must be a size such as 32GiB, not '{text}': {error}.") from None
    if not size:
        raise BadInputError(f"'{field}' must be more than 0, not {text}.")
    return size


def _class(cluster: Cluster, name: str) -> NodeClass:
    for node in cluster.nodes:
        if node.name == name:
            return node
    generic = {"gpu": [node for node in cluster.nodes if node.gpus], "cpu": [n for n in cluster.nodes if not n.gpus]}
    candidates: Sequence[NodeClass] = generic.get(name.lower(), [])
    if candidates:
        return candidates[0]
    known = ", ".join(dict.fromkeys(node.name for node in cluster.nodes))
    raise BadInputError(f"The cluster has no machines '{name}'; it has {known}.")
