"""One model on one cluster: the common input of all planning methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dike.profile import ModelProfile
from solver.choices import Sharding
from solver.cluster import Cluster
from solver.hardware import Hardware
from solver.nodes import NodeKind, node_kinds
from solver.resources import TaskSizes, WorkerShape
from solver.shards import DEFAULT_SHARDING, Shards, shard
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS


@dataclass(frozen=True)
class Scenario:
    """A model, machines and speeds."""

    profile: ModelProfile
    cluster: Cluster
    hardware: Hardware
    kinds: tuple[NodeKind, ...]
    sizes: TaskSizes
    sharding: Sharding = DEFAULT_SHARDING
    _shards: dict[int, Shards] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        cluster: Cluster,
        hardware: Hardware,
        sharding: Sharding = DEFAULT_SHARDING,
        task_mem_mb: int = 0,
    ) -> Scenario:
        """Builds the scenario; each task gets at least `task_mem_mb` MiB."""
        kinds = node_kinds(cluster)
        sizes = TaskSizes.of(profile, max(kind.cpus for kind in kinds), task_mem_mb)
        return cls(profile, cluster, hardware, kinds, sizes, sharding)

    @property
    def uplink_bytes_per_s(self) -> float:
        """Speed of each rack's uplink, each way; infinite if racks do not matter."""
        across = self.cluster.across_racks_gbps
        return math.inf if across is None else across * BYTES_PER_S_PER_GBPS

    @cached_property
    def fastest_card(self) -> float:
        """Bytes/s of the cluster's fastest network card, also of machines outside `kinds`."""
        return max(node.network_gbps for node in self.cluster.nodes) * BYTES_PER_S_PER_GBPS

    @cached_property
    def kind_of(self) -> dict[str, NodeKind]:
        return {name: kind for kind in self.kinds for name in kind.names}

    def shards(self, ps: int) -> Shards:
        """The variables on that number of parameter servers."""
        if ps not in self._shards:
            self._shards[ps] = shard(self.profile, ps, self.sharding)
        return self._shards[ps]

    def with_ps_cpus(self, cpus: float) -> Scenario:
        """The same with that many CPUs for each ps."""
        sizes = TaskSizes(self.profile, self.sizes.helper_cpus, self.sizes.least_mem_mb, cpus)
        return self if cpus == self.sizes.ps_cpus else replace(self, sizes=sizes)

    def within(self, kinds: Sequence[NodeKind]) -> Scenario:
        """The same on some of the machines."""
        return replace(self, kinds=tuple(kinds))

    def model(self, shape: WorkerShape) -> StepModel:
        within = self.cluster.within_node_gbps * BYTES_PER_S_PER_GBPS
        return StepModel(self.profile, shape, self.hardware, within, self.shards(1).total, self.sizes.ps_cpus)
