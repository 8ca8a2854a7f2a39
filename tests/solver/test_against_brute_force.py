"""The placement programs and the whole search give what trying everything gives."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, Objective, PlanRequest, make_plan
from solver.options import PAPER, default_rules
from solver.placement.fastest import can_reach, fastest_placement, least_traffic_placement
from solver.placement.problem import MAX_CASES
from solver.resources import WorkerShape
from solver.search.option_search import SPEED_TIE_SHARE
from solver.shards import Shards, shard
from solver.units import GIB
from tests.properties import examples
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile
from tests.solver.solver_random import (
    CLOSE,
    WITHIN_GBPS,
    case_of,
    cluster_of,
    job_of,
    nodes,
    option_space,
    profiles,
    shapes,
)

many = examples(250)
some = examples(60)


@many
@given(nodes, profiles, shapes, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_placement_is_as_fast_as_the_best_of_all_placements(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int, equal: bool
) -> None:
    shards = shard(model, min(ps, len(model.variables)))
    if equal:
        shards = Shards((shards.sizes[0],) * len(shards.sizes), {})
    case = case_of(classes, model, shape, workers, shards)
    found = fastest_placement(case.problem)
    expected = brute_force.best(case.job, case.nodes)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
    assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)
    assert case.bounds.samples_per_s[workers - 1] >= expected.samples_per_s * (1 - 1e-12)


@pytest.mark.slow
def test_of_too_many_times_of_the_slowest_machine_some_are_looked_at() -> None:
    classes = [NodeClass(name="x", cpus=4.0, mem_bytes=64 * GIB, network_gbps=0.1 * 2**index) for index in range(9)]
    model = profile([(20 + index) * MB for index in range(9)], api=Api.GRAPH, flops=1e6, slots=0)
    case = case_of(classes, model, WorkerShape(0, 1.0), 2, shard(model, 9))
    assert len(case.problem.cases) == MAX_CASES
    assert not case.problem.are_all_cases
    found = fastest_placement(case.problem)
    assert found is not None
    assert found.samples_per_s <= case.bounds.samples_per_s[1]
    # What was not looked at is not taken to be slower.
    plan = make_plan(PlanRequest(model, cluster_of(classes), max_workers=2, rules=PAPER, time_limit_s=2.0))
    assert plan.samples_per_s >= found.samples_per_s * (1 - plan.gap) * (1 - SPEED_TIE_SHARE)


network_bound_nodes = st.lists(
    st.builds(
        lambda cpus, gbps: NodeClass(name="x", cpus=cpus, mem_bytes=64 * GIB, network_gbps=gbps),
        st.sampled_from([2.0, 2.5, 3.0, 4.0]),
        st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    ),
    min_size=3,
    max_size=4,
)


@pytest.mark.slow
@many
@given(
    network_bound_nodes,
    st.lists(st.integers(20, 60), min_size=2, max_size=3),
    st.booleans(),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.integers(3, 6),
)
def test_a_placement_is_the_best_where_the_network_decides(
    classes: list[NodeClass], megabytes: list[int], synchronous: bool, cpus: float, workers: int
) -> None:
    sizes = [size * MB for size in megabytes]
    model = profile(sizes, api=Api.GRAPH, synchronous=synchronous, flops=1e4, sample_bytes=100)
    case = case_of(classes, model, WorkerShape(0, cpus), workers, shard(model, len(sizes)))
    found = fastest_placement(case.problem)
    expected = brute_force.best(case.job, case.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
        assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)
        assert can_reach(case.problem, expected.samples_per_s * (1 - CLOSE))
        assert not can_reach(case.problem, expected.samples_per_s * (1 + CLOSE))
        assert fastest_placement(case.problem, at_least=expected.samples_per_s * (1 - CLOSE)) is not None
        assert fastest_placement(case.problem, at_least=expected.samples_per_s * (1 + CLOSE)) is None


compute_bound_nodes = st.lists(
    st.builds(
        lambda gpus, model, gbps: NodeClass(
            name="x", cpus=8.0, mem_bytes=64 * GIB, gpus=gpus, gpu_model=model, network_gbps=gbps
        ),
        st.integers(1, 4),
        st.sampled_from(["K80", "V100"]),
        st.sampled_from([1.0, 2.0, 10.0]),
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.slow
@many
@given(
    compute_bound_nodes,
    st.lists(st.integers(20, 60), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([4e9, 2e10]),
    st.integers(1, 4),
)
def test_a_placement_is_the_best_where_the_machines_speeds_decide(
    classes: list[NodeClass], megabytes: list[int], synchronous: bool, flops: float, workers: int
) -> None:
    sizes = [size * MB for size in megabytes]
    model = profile(sizes, api=Api.GRAPH, synchronous=synchronous, flops=flops, sample_bytes=100, slots=0)
    case = case_of(classes, model, WorkerShape(1, 0.25), workers, shard(model, len(sizes)))
    found = fastest_placement(case.problem)
    expected = brute_force.best(case.job, case.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
        assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)


@pytest.mark.slow
@many
@given(nodes, profiles, shapes, st.integers(1, 6), st.integers(1, 3))
def test_the_calmest_placement_has_the_least_traffic_of_all(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int
) -> None:
    case = case_of(classes, model, shape, workers, shard(model, min(ps, len(model.variables))))
    found = least_traffic_placement(case.problem)
    expected = brute_force.least_traffic(case.job, case.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.traffic_bytes == pytest.approx(expected, rel=CLOSE)
        assert case.bounds.traffic_bytes[workers - 1] <= expected * (1 + 1e-12)


def _all_results(
    model: ModelProfile, cluster: Cluster, objective: Objective = "throughput"
) -> list[brute_force.Result]:
    results = []
    rules = PAPER if objective == "throughput" else default_rules(objective)
    for entry in option_space(model, cluster, rules).ranges:
        for shape in entry.shapes:
            for workers in range(entry.min_workers, entry.max_workers + 1):
                for ps in range(1, entry.max_ps + 1):
                    job, _ = job_of(model, cluster, shape, workers, shard(model, ps))
                    if objective == "traffic":
                        traffic = brute_force.least_traffic(job, cluster.nodes)
                        results += [] if traffic is None else [brute_force.Result(0.0, traffic)]
                    else:
                        best = brute_force.best(job, cluster.nodes)
                        results += [] if best is None else [best]
    return results


small_nodes = nodes.filter(lambda classes: len(classes) <= 3)


@pytest.mark.slow
@some
@given(small_nodes, profiles)
def test_the_plan_is_within_a_tie_of_the_fastest_option_and_has_least_traffic_there(
    classes: list[NodeClass], model: ModelProfile
) -> None:
    cluster = cluster_of(classes)
    results = _all_results(model, cluster)
    request = PlanRequest(model, cluster, max_workers=4, rules=PAPER)
    if not results:
        with pytest.raises(InfeasibleError):
            make_plan(request)
        return
    plan = make_plan(request)
    fastest = max(result.samples_per_s for result in results)
    floor = fastest * (1 - SPEED_TIE_SHARE)
    calmest = min(result.traffic for result in results if result.samples_per_s >= floor * (1 + CLOSE))
    assert plan.samples_per_s >= floor * (1 - CLOSE)
    assert plan.traffic_bytes <= calmest * (1 + CLOSE)
    assert plan.optimal
    assert plan.gap == 0


@some
@given(small_nodes, profiles)
def test_the_plan_for_traffic_has_the_least_of_all_options(classes: list[NodeClass], model: ModelProfile) -> None:
    cluster = cluster_of(classes)
    results = _all_results(model, cluster, "traffic")
    if not results:
        return
    plan = make_plan(PlanRequest(model, cluster, objective="traffic", max_workers=4))
    assert plan.traffic_bytes == pytest.approx(min(result.traffic for result in results), rel=CLOSE)
    assert plan.optimal


@some
@given(
    small_nodes,
    profiles,
    st.lists(st.sampled_from(["left", "right"]), min_size=4, max_size=4),
    st.sampled_from([0.5, 5]),
)
def test_with_racks_the_plan_is_as_near_the_best_as_it_says(
    classes: list[NodeClass], model: ModelProfile, racks: list[str], across: float
) -> None:
    named = [dataclasses.replace(node, rack=rack) for node, rack in zip(cluster_of(classes).nodes, racks, strict=False)]
    cluster = Cluster(tuple(named), within_node_gbps=WITHIN_GBPS, across_racks_gbps=across)
    results = _all_results(model, cluster)
    if not results:
        return
    plan = make_plan(PlanRequest(model, cluster, max_workers=4, rules=PAPER))
    best = max(result.samples_per_s for result in results)
    assert plan.samples_per_s <= best * (1 + CLOSE)
    assert plan.samples_per_s >= best * (1 - plan.gap) * (1 - SPEED_TIE_SHARE) * (1 - CLOSE)
    assert plan.optimal == (plan.gap == 0)


def test_a_passed_deadline_gives_a_plan_that_claims_no_proof() -> None:
    models = ("K80", "V100")
    cluster = cluster_of(
        [NodeClass(name="x", cpus=8.0 + i, mem_bytes=32 * GIB, gpus=4 - i, gpu_model=models[i % 2]) for i in range(4)]
    )
    started = time.monotonic()
    plan = make_plan(PlanRequest(profile(), cluster, time_limit_s=0.0))
    assert time.monotonic() - started < 60
    assert not plan.optimal
    assert plan.gap > 0
