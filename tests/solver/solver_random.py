"""Random small cases of the placement problem, and what trying everything says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass
from solver.hardware import known_hardware
from solver.nodes import node_kinds
from solver.options import OptionSpace, prune, raw_space
from solver.resources import TaskSizes, WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards, useful_ps_count
from solver.units import GIB
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile

WITHIN_GBPS = 64.0
CLOSE = 1e-5

# Small models on slow networks, so that compute, network, updates and dispatch each decide some of the cases.
nodes = st.lists(
    st.builds(
        lambda cpus, mem, gpus, model, gbps, disk: NodeClass(
            name="x",
            cpus=cpus,
            mem_bytes=mem * GIB,
            gpus=gpus,
            gpu_model=model if gpus else None,
            network_gbps=gbps,
            disk_bytes=disk * GIB,
        ),
        st.sampled_from([1.0, 2.0, 3.5, 4.0, 8.0]),
        st.sampled_from([1, 2, 4, 8, 16, 32]),
        st.sampled_from([0, 0, 1, 2, 3]),
        st.sampled_from(["K80", "V100", "T4"]),
        st.sampled_from([0.5, 1.0, 2.0, 10.0, 25.0]),
        st.sampled_from([1, 3, 50, 50]),
    ),
    min_size=1,
    max_size=4,
)
profiles = st.builds(
    lambda sizes, sync, api, flops: profile(
        [size * MB for size in sizes], synchronous=sync, api=api, flops=flops, sample_bytes=6_000, slots=0
    ),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([Api.GRAPH, Api.KERAS]),
    st.sampled_from([1e4, 1e6, 1e8, 4e9]),
)
shapes = st.builds(WorkerShape, st.sampled_from([0, 0, 1, 2]), st.sampled_from([0.25, 0.25, 0.5, 1.0, 1.75]))


def cluster_of(classes: list[NodeClass]) -> Cluster:
    values = [dict(vars(node), name=f"n{index}") for index, node in enumerate(classes)]
    return Cluster(tuple(NodeClass(**value) for value in values), within_node_gbps=WITHIN_GBPS)


def job_of(scenario: Scenario, shape: WorkerShape, workers: int, shards: Shards) -> brute_force.Job:
    return brute_force.Job(
        scenario.profile,
        scenario.sizes,
        shape,
        workers,
        shards.sizes,
        WITHIN_GBPS,
        scenario.cluster.across_racks_gbps,
        requests=shards.requests,
    )


def scenario_with(model: ModelProfile, cluster: Cluster, factor: int = 1) -> Scenario:
    scenario = Scenario.of(model, cluster, known_hardware())
    return scenario.with_ps_cpus(factor * scenario.sizes.helper_cpus)


def options(model: ModelProfile, cluster: Cluster, rules: frozenset[str], most: int = 4) -> OptionSpace:
    kinds = node_kinds(cluster)
    sizes = TaskSizes.of(model, max(kind.cpus for kind in kinds))
    useful_ps = useful_ps_count(model, len(cluster.nodes))
    return prune(raw_space(kinds, max_workers=most), rules, kinds, known_hardware(), sizes, useful_ps)[-1].space


def fastest_of_all(
    model: ModelProfile, cluster: Cluster, shapes: Sequence[WorkerShape], workers: int, factors: Sequence[int]
) -> brute_force.Result | None:
    """The fastest of all placements: any number of ps with these multiples of the fewest CPUs, up to that number of
    workers, each machine with one of the shapes.
    """
    found = []
    for factor in factors:
        scenario = scenario_with(model, cluster, factor)
        for ps in range(1, min(len(cluster.nodes), max(1, len(model.variables))) + 1):
            for count in range(1, workers + 1):
                job = job_of(scenario, shapes[0], count, scenario.shards(ps))
                best = brute_force.best(dataclasses.replace(job, shapes=tuple(shapes), similar=True), cluster.nodes)
                found += [] if best is None else [best]
    return max(found, key=lambda result: result.samples_per_s, default=None)
