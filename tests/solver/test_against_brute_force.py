"""Plans, their bounds and the placement programs against trying everything."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning_methods.exhaustive import iterative
from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, Objective, PlanRequest, make_plan
from solver.baselines.setting import Setting
from solver.evaluation import RatedPlan
from solver.nodes import node_kinds
from solver.options import PAPER, default_rules
from solver.placement.class_counts import proven_counts
from solver.placement.naming import Assignment
from solver.placement.problem import placement_problem
from solver.planner import PS_CPU_FACTORS
from solver.request import scenario_of
from solver.resources import WorkerShape
from solver.search.relaxation import fastest
from solver.search.simplest import Simplest, simplicity
from solver.search.space import Space, has_similar_workers
from solver.shards import shard
from solver.units import GIB, SIMPLE_TIE_SHARE
from tests.properties import examples
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile
from tests.solver.solver_random import (
    CLOSE,
    cluster_of,
    fastest_of_all,
    job_of,
    nodes,
    options,
    profiles,
    scenario_with,
    shapes,
)

MAX_WORKERS = 3

few_nodes = nodes.filter(lambda classes: len(classes) <= 2)
some_nodes = nodes.filter(lambda classes: len(classes) <= 3)
racks = st.lists(st.sampled_from(["left", "right"]), min_size=4, max_size=4)
network_bound_nodes = st.lists(
    st.builds(
        lambda cpus, gbps: NodeClass(name="x", cpus=cpus, mem_bytes=64 * GIB, network_gbps=gbps),
        st.sampled_from([2.0, 2.5, 3.0, 4.0]),
        st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    ),
    min_size=2,
    max_size=3,
)
gpu_nodes = st.lists(
    st.builds(
        lambda gpus, model, gbps: NodeClass(
            name="x", cpus=8.0, mem_bytes=64 * GIB, gpus=gpus, gpu_model=model, network_gbps=gbps
        ),
        st.integers(1, 4),
        st.sampled_from(["K80", "V100"]),
        st.sampled_from([1.0, 4.0, 10.0, 25.0]),
    ),
    min_size=2,
    max_size=3,
)


def in_racks(cluster: Cluster, of_nodes: list[str], across_gbps: float) -> Cluster:
    named = [dataclasses.replace(node, rack=rack) for node, rack in zip(cluster.nodes, of_nodes, strict=False)]
    return dataclasses.replace(cluster, nodes=tuple(named), across_racks_gbps=across_gbps)


def check_plan(model: ModelProfile, cluster: Cluster, draw_shapes: int) -> None:
    """No placement is faster than the plan's gap says, and the plan's own tasks are one of those placements.

    `draw_shapes`: number that decides which shapes of workers are tried; all would take minutes.
    """
    entry_shapes = [
        shape for entry in options(model, cluster, default_rules("throughput")).ranges for shape in entry.shapes
    ]
    of_gpus = [shape for shape in entry_shapes if shape.gpus]
    of_cpus = [shape for shape in entry_shapes if not shape.gpus]
    tried = {*of_gpus[draw_shapes % max(1, len(of_gpus)) :][:2], *of_cpus[draw_shapes % max(1, len(of_cpus)) :][:1]}
    try:
        plan = make_plan(PlanRequest(model, cluster, max_workers=MAX_WORKERS))
    except InfeasibleError:
        best = fastest_of_all(model, cluster, sorted(tried), MAX_WORKERS, (1,)) if tried else None
        assert best is None
        return
    own = {WorkerShape(task.gpus, task.cpus) for task in plan.tasks if task.role == "worker"}
    best = fastest_of_all(
        model, cluster, sorted(tried | own), MAX_WORKERS, (1, 2, PS_CPU_FACTORS[draw_shapes % len(PS_CPU_FACTORS)])
    )
    assert best is not None
    assert plan.samples_per_s >= best.samples_per_s * (1 - max(plan.gap, SIMPLE_TIE_SHARE)) * (1 - CLOSE)
    assert plan.optimal == (plan.gap == 0)


@examples(25)
@given(few_nodes, profiles, st.integers(0, 50))
def test_no_placement_is_faster_than_a_plan_says(classes: list[NodeClass], model: ModelProfile, drawn: int) -> None:
    check_plan(model, cluster_of(classes), drawn)


@pytest.mark.slow
@examples(100)
@given(network_bound_nodes, st.lists(st.integers(2, 60), min_size=2, max_size=4), st.booleans(), st.integers(0, 50))
def test_no_placement_is_faster_where_the_network_decides(
    classes: list[NodeClass], megabytes: list[int], synchronous: bool, drawn: int
) -> None:
    sizes = [size * MB for size in megabytes]
    model = profile(sizes, api=Api.GRAPH, synchronous=synchronous, flops=1e4, sample_bytes=100)
    check_plan(model, cluster_of(classes), drawn)


@pytest.mark.slow
@examples(100)
@given(
    gpu_nodes,
    st.lists(st.integers(2, 60), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([1e8, 4e9, 2e10]),
    st.integers(0, 50),
)
def test_no_placement_is_faster_where_the_machines_speeds_decide(
    classes: list[NodeClass], megabytes: list[int], synchronous: bool, flops: float, drawn: int
) -> None:
    sizes = [size * MB for size in megabytes]
    model = profile(sizes, api=Api.GRAPH, synchronous=synchronous, flops=flops, sample_bytes=100, slots=0)
    check_plan(model, cluster_of(classes), drawn)


@examples(25)
@given(few_nodes, profiles, racks, st.sampled_from([0.5, 5.0]), st.integers(0, 50))
def test_no_placement_is_faster_across_racks(
    classes: list[NodeClass], model: ModelProfile, of_nodes: list[str], across_gbps: float, drawn: int
) -> None:
    check_plan(model, in_racks(cluster_of(classes), of_nodes, across_gbps), drawn)


@pytest.mark.slow
@examples(40)
@given(some_nodes, profiles)
def test_the_bound_holds_for_numbers_of_ps_that_are_not_searched(classes: list[NodeClass], model: ModelProfile) -> None:
    cluster = cluster_of(classes)
    shapes_of = [
        shape for entry in options(model, cluster, default_rules("throughput")).ranges for shape in entry.shapes
    ][:2]
    if not shapes_of:
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("solver.search.space.MAX_ALL_PS", 0)
        patched.setattr("solver.search.space.MIN_LOAD_REDUCTION", 0.5)
        found = fastest([Space(scenario_with(model, cluster), shapes_of, (1, 2))], 0.0, time.monotonic() + 60)
    best = fastest_of_all(model, cluster, shapes_of, 2, (1,))
    assert found.bound >= (0.0 if best is None else best.samples_per_s) * (1 - CLOSE)


@pytest.mark.slow
@examples(40)
@given(some_nodes, profiles)
def test_with_the_papers_rules_workers_are_alike_and_no_such_placement_is_faster(
    classes: list[NodeClass], model: ModelProfile
) -> None:
    cluster = cluster_of(classes)
    speeds = []
    for entry in options(model, cluster, PAPER).ranges:
        for shape in entry.shapes[:2]:
            best = fastest_of_all(model, cluster, [shape], MAX_WORKERS, (1, 4))
            speeds += [] if best is None else [best.samples_per_s]
    request = PlanRequest(model, cluster, max_workers=MAX_WORKERS, rules=PAPER)
    if not speeds:
        return
    plan = make_plan(request)
    assert len(plan.worker_kinds) == 1
    assert plan.samples_per_s >= max(speeds) * (1 - max(plan.gap, SIMPLE_TIE_SHARE)) * (1 - CLOSE)


@examples(40)
@given(some_nodes, profiles, st.integers(1, 3), st.sampled_from(["throughput", "traffic"]))
def test_a_plan_is_worth_what_its_tasks_are(
    classes: list[NodeClass], model: ModelProfile, most: int, objective: Objective
) -> None:
    """The plan's tasks are those that were placed, with their own resources, one ps on a machine."""
    cluster = cluster_of(classes)
    request = PlanRequest(model, cluster, objective, max_workers=most, rules=frozenset({"cpu_gpu_ratio"}))
    try:
        plan = make_plan(request)
    except InfeasibleError:
        return
    workers = [task for task in plan.tasks if task.role == "worker"]
    servers = [task for task in plan.tasks if task.role == "ps"]
    assignment = Assignment(
        tuple(task.node for task in servers),
        tuple(task.node for task in workers),
        None,
        tuple(WorkerShape(task.gpus, task.cpus) for task in workers),
    )
    scenario = scenario_of(request)
    rated = RatedPlan.of(scenario.with_ps_cpus(servers[0].cpus), assignment)
    assert plan.samples_per_s == pytest.approx(rated.samples_per_s, rel=CLOSE)
    assert plan.step_time_s.total == pytest.approx(rated.worth.step_time.total, rel=CLOSE)
    assert len({task.node for task in servers}) == len(servers)
    for node in cluster.nodes:
        here = [task for task in plan.tasks if task.node == node.name]
        assert sum(task.cpus for task in here) <= node.cpus + 1e-6
        assert sum(task.gpus for task in here) <= node.gpus


@pytest.mark.slow
@examples(60)
@given(some_nodes, profiles, shapes, st.integers(1, 3))
def test_the_simplest_plan_has_the_fewest_tasks_of_all_that_are_fast_enough(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, factor: int
) -> None:
    cluster = cluster_of(classes)
    scenario = scenario_with(model, cluster, factor)
    space = Space(scenario, [shape], (1, MAX_WORKERS), identical=True)
    found = fastest([space], 0.0, time.monotonic() + 60)
    if found.best is None:
        return
    floor = found.best.samples_per_s * (1 - SIMPLE_TIE_SHARE)
    plan = Simplest([space], [found.best], floor, time.monotonic() + 60).find()
    assert plan.samples_per_s >= floor
    assert simplicity(plan) <= simplicity(found.best)
    fewest = min(
        workers + ps
        for ps in range(1, min(len(cluster.nodes), len(model.variables)) + 1)
        for workers in range(1, MAX_WORKERS + 1)
        if (best := brute_force.best(job_of(scenario, shape, workers, scenario.shards(ps)), cluster.nodes)) is not None
        and best.samples_per_s >= floor * (1 + CLOSE)
    )
    assert plan.tasks <= fewest


@pytest.mark.slow
@examples(100)
@given(nodes, profiles, shapes, st.integers(1, 6), st.integers(1, 3))
def test_the_program_finds_the_least_traffic_of_all_placements(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int
) -> None:
    cluster = cluster_of(classes)
    scenario = scenario_with(model, cluster)
    shards = shard(model, min(ps, len(model.variables)))
    problem = placement_problem(node_kinds(cluster), [scenario.model(shape)], scenario.sizes, shards, workers)
    counts = proven_counts(problem, lambda state: state.local_bytes / shards.total)
    expected = brute_force.least_traffic(job_of(scenario, shape, workers, shards), cluster.nodes)
    assert (counts is None) == (expected is None)
    if counts is not None and expected is not None:
        local = sum(group.state.local_bytes * group.workers * group.machines for group in counts.groups)
        assert workers * shards.total - 0.9 * local == pytest.approx(expected, rel=CLOSE)


@examples(40)
@given(some_nodes, profiles)
def test_the_plan_for_traffic_has_the_least_of_all_options(classes: list[NodeClass], model: ModelProfile) -> None:
    cluster = cluster_of(classes)
    scenario = scenario_with(model, cluster)
    least = []
    for entry in options(model, cluster, default_rules("traffic")).ranges:
        for shape in entry.shapes:
            for workers in range(entry.min_workers, entry.max_workers + 1):
                for ps in range(1, entry.max_ps + 1):
                    traffic = brute_force.least_traffic(
                        job_of(scenario, shape, workers, scenario.shards(ps)), cluster.nodes
                    )
                    least += [] if traffic is None else [traffic]
    if not least:
        return
    plan = make_plan(PlanRequest(model, cluster, objective="traffic", max_workers=4))
    assert plan.traffic_bytes == pytest.approx(min(least), rel=CLOSE)
    assert plan.optimal


def test_a_passed_deadline_gives_a_plan_that_claims_no_proof() -> None:
    models = ("K80", "V100")
    cluster = cluster_of(
        [NodeClass(name="x", cpus=8.0 + i, mem_bytes=32 * GIB, gpus=4 - i, gpu_model=models[i % 2]) for i in range(4)]
    )
    model = profile(synchronous=True)
    plans = [make_plan(PlanRequest(model, cluster, time_limit_s=limit_s)) for limit_s in (0.0, None)]
    assert plans[1].samples_per_s <= plans[0].samples_per_s / (1 - max(plans[0].gap, SIMPLE_TIE_SHARE)) * (1 + CLOSE)
    assert plans[0].gap > 0
    assert not plans[0].optimal
    assert plans[1].optimal


unlike_nodes = st.lists(
    st.builds(
        NodeClass,
        name=st.just("m"),
        cpus=st.sampled_from([4.0, 8.0, 16.0]),
        mem_bytes=st.sampled_from([32 * GIB, 64 * GIB]),
        gpus=st.sampled_from([0, 0, 1, 2, 4]),
        gpu_model=st.sampled_from(["V100", "P100", "K80"]),
        network_gbps=st.sampled_from([1.0, 10.0, 25.0]),
    ),
    min_size=2,
    max_size=4,
)
small_model = profile([4 * MB] * 6, flops=1e8, sample_bytes=3_000, slots=0)


def check_against_iterative(classes: list[NodeClass], model: ModelProfile) -> None:
    """No placement of alike workers and one ps on a machine, of all that there are, beats the plan and its gap."""
    cluster = Cluster(tuple(dataclasses.replace(one, name=f"m{index}") for index, one in enumerate(classes)))
    request = PlanRequest(model, cluster, max_gpus_per_worker=1)
    scenario = scenario_of(request)
    try:
        choice = iterative(Setting.of(request, scenario))
    except (InfeasibleError, BadInputError):
        return  # nothing fits, or there are too many placements to try them all
    if len(set(choice.assignment.ps)) < len(choice.assignment.ps):
        return
    plan = make_plan(request)
    best = RatedPlan.of(scenario, choice.assignment, choice.shape)
    if not has_similar_workers(scenario, best.assignment):
        return
    assert best.samples_per_s * (1 - max(plan.gap, SIMPLE_TIE_SHARE)) <= plan.samples_per_s * (1 + CLOSE)


@pytest.mark.slow
@examples(100)
@given(unlike_nodes, st.sampled_from([profile(slots=0), small_model]), st.booleans())
def test_a_proof_holds_on_any_small_cluster(classes: list[NodeClass], model: ModelProfile, synchronous: bool) -> None:
    check_against_iterative(classes, dataclasses.replace(model, synchronous=synchronous))


def test_a_proof_holds_where_many_small_workers_without_gpus_hide_each_others_waits() -> None:
    sizes = ((4.0, 10.0), (4.0, 1.0), (8.0, 1.0))
    classes = [NodeClass(name="m", cpus=cpus, mem_bytes=64 * GIB, network_gbps=card) for cpus, card in sizes]
    check_against_iterative(classes, profile(flops=1e8, sample_bytes=3_000, batch_size=128, slots=0))


def test_workers_that_are_far_slower_are_left_out() -> None:
    gpus = NodeClass(name="gpu", count=3, cpus=16, mem_bytes=64 * GIB, gpus=2, gpu_model="A100", network_gbps=25)
    others = NodeClass(name="cpu", count=2, cpus=32, mem_bytes=64 * GIB, network_gbps=10)
    plan = make_plan(PlanRequest(profile(slots=0), Cluster((gpus, others))))
    assert all(task.gpus for task in plan.tasks if task.role == "worker")
    # Without a GPU anywhere they are all there is.
    plan = make_plan(PlanRequest(profile(slots=0), Cluster((others,))))
    assert {task.gpus for task in plan.tasks if task.role == "worker"} == {0}
