"""Random small cases of the placement problem, and what trying everything says of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass
from solver.capacity import Machines
from solver.hardware import known_hardware
from solver.nodes import node_kinds
from solver.options import OptionSpace, prune, raw_space
from solver.placement.fastest import Placement
from solver.placement.problem import PlacementProblem, mixed_problem, placement_problem
from solver.resources import TaskSizes, WorkerShape
from solver.search.bounds import Bounds, ShapeBounds
from solver.search.mixed_bounds import mixed_bounds
from solver.search.scope import Scope
from solver.shards import Shards, useful_ps_count
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS, GIB
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


def job_of(
    model: ModelProfile, cluster: Cluster, shape: WorkerShape, workers: int, shards: Shards
) -> tuple[brute_force.Job, TaskSizes]:
    sizes = TaskSizes.of(model, max(node.cpus for node in cluster.nodes))
    job = brute_force.Job(model, sizes, shape, workers, shards.sizes, WITHIN_GBPS, cluster.across_racks_gbps)
    job = dataclasses.replace(job, requests=shards.requests)
    return job, sizes


@dataclass(frozen=True)
class Case:
    """One option on one cluster, as the solver and as the enumeration see it."""

    problem: PlacementProblem
    bounds: Bounds
    job: brute_force.Job
    nodes: tuple[NodeClass, ...]


def case_of(
    classes: list[NodeClass],
    model: ModelProfile,
    shape: WorkerShape,
    workers: int,
    shards: Shards,
    ps_may_share: bool = False,
) -> Case:
    cluster = cluster_of(classes)
    kinds = node_kinds(cluster)
    job, sizes = job_of(model, cluster, shape, workers, shards)
    job = dataclasses.replace(job, ps_may_share=ps_may_share)
    step_model = _step_model(model, shape, shards, sizes)
    problem = placement_problem(kinds, step_model, sizes, shards, workers, ps_may_share=ps_may_share)
    bounds = ShapeBounds(Scope(Machines(kinds), workers, None, ps_may_share), step_model, sizes).of(shards)
    return Case(problem, bounds, job, cluster.nodes)


def mixed_case_of(
    classes: list[NodeClass],
    model: ModelProfile,
    choice: tuple[WorkerShape, ...],
    workers: int,
    shards: Shards,
    least_gpus: int,
) -> Case:
    cluster = cluster_of(classes)
    kinds = node_kinds(cluster)
    job, sizes = job_of(model, cluster, choice[0], workers, shards)
    models = [_step_model(model, shape, shards, sizes) for shape in choice]
    problem = mixed_problem(kinds, models, sizes, shards, workers, least_gpus=least_gpus)
    bounds = mixed_bounds(Scope(Machines(kinds), workers), models, sizes, shards)
    return Case(problem, bounds, dataclasses.replace(job, shapes=choice, least_gpus=least_gpus), cluster.nodes)


def _step_model(model: ModelProfile, shape: WorkerShape, shards: Shards, sizes: TaskSizes) -> StepModel:
    return StepModel(
        model, shape, known_hardware(), WITHIN_GBPS * BYTES_PER_S_PER_GBPS, shards.total, sizes.helper_cpus
    )


def check_against(case: Case, found: Placement | None, workers: int, *, traffic: bool) -> None:
    """The placement is the best of all, and no bound excludes it."""
    best = brute_force.best(case.job, case.nodes)
    least = brute_force.least_traffic(case.job, case.nodes)
    assert (found is None) == (best is None)
    if found is None or best is None or least is None:
        return
    if traffic:
        assert found.traffic_bytes == pytest.approx(least, rel=CLOSE)
    else:
        assert found.samples_per_s == pytest.approx(best.samples_per_s, rel=CLOSE)
        assert found.traffic_bytes >= best.traffic * (1 - CLOSE)
    assert case.bounds.samples_per_s[workers - 1] >= best.samples_per_s * (1 - 1e-12)
    assert case.bounds.traffic_bytes[workers - 1] <= least * (1 + 1e-12)


def option_space(model: ModelProfile, cluster: Cluster, rules: frozenset[str]) -> OptionSpace:
    kinds = node_kinds(cluster)
    sizes = TaskSizes.of(model, max(kind.cpus for kind in kinds))
    useful_ps = useful_ps_count(model, len(cluster.nodes))
    return prune(raw_space(kinds, max_workers=4), rules, kinds, known_hardware(), sizes, useful_ps)[-1].space
