"""The machines that a plan may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dike.exceptions import BadInputError
from solver.units import GIB

DEFAULT_NETWORK_GBPS = 10.0
DEFAULT_WITHIN_NODE_GBPS = 64.0
DEFAULT_DISK_BYTES = 10 * GIB


@dataclass(frozen=True, kw_only=True)
class NodeClass:
    """A number of machines that are all alike.

    Attributes:
        name: the machine's name; with a count above 1 the machines are called `name-0`, `name-1` and so on.
        count: how many machines.
        cpus: CPU cores of one machine.
        mem_bytes: memory of one machine.
        gpus: GPUs of one machine.
        gpu_model: their model, such as `K80`; None where it is not known.
        disk_bytes: disk space of one machine.
        network_gbps: speed of its network card in Gb/s, each way.
        rack: the rack it stands in; None where it is not known.
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

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of its machines."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{index}" for index in range(self.count))


@dataclass(frozen=True)
class Cluster:
    """All machines and how they are connected.

    Attributes:
        nodes: classes of machines.
        within_node_gbps: speed between two tasks on one machine, in Gb/s.
        across_racks_gbps: speed of each rack's uplink in Gb/s, each way; None where racks do not matter.
    """

    nodes: tuple[NodeClass, ...]
    within_node_gbps: float = DEFAULT_WITHIN_NODE_GBPS
    across_racks_gbps: float | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise BadInputError("A cluster needs at least one node.")
        seen: set[str] = set()
        for name in self.node_names():
            if name in seen:
                raise BadInputError(f"Two nodes of the cluster are called '{name}'; give each its own name.")
            seen.add(name)

    def node_names(self) -> Iterator[str]:
        """Names of all machines, class by class."""
        for node in self.nodes:
            yield from node.node_names

    @property
    def node_count(self) -> int:
        """How many machines there are."""
        return sum(node.count for node in self.nodes)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Reads a cluster file; `docs/solver.md` has the format.

        Raises:
            BadInputError: if the file cannot be read or something in it is wrong; names the file and the line.
        """
        from solver.cluster_file import read_cluster

        return read_cluster(Path(path))
