"""The placement programs and the whole search give what trying everything gives."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.bounds import Bounds, option_bounds
from solver.hardware import known_hardware
from solver.mixed_bounds import mixed_bounds
from solver.nodes import node_kinds
from solver.options import OptionSpace, default_rules, prune, raw_space
from solver.placement.fastest import Placement, calmest_placement, can_reach, fastest_placement
from solver.placement.mixed import calmest_mixed_placement, fastest_mixed_placement
from solver.placement.problem import PlacementProblem, mixed_problem, placement_problem
from solver.resources import TaskSizes, WorkerShape
from solver.search import TIE
from solver.shards import Shards, shard, useful_ps_count
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS, GIB
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile

WITHIN_GBPS = 64.0
CLOSE = 1e-5

many = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
some = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

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


def _named(classes: list[NodeClass]) -> Cluster:
    values = [dict(vars(node), name=f"n{index}") for index, node in enumerate(classes)]
    return Cluster(tuple(NodeClass(**value) for value in values), within_node_gbps=WITHIN_GBPS)


def _job(
    model: ModelProfile, cluster: Cluster, shape: WorkerShape, workers: int, shards: Shards
) -> tuple[brute_force.Job, TaskSizes]:
    sizes = TaskSizes.of(model, max(node.cpus for node in cluster.nodes))
    job = brute_force.Job(model, sizes, shape, workers, shards.sizes, WITHIN_GBPS, cluster.across_racks_gbps)
    return job, sizes


@dataclass(frozen=True)
class Case:
    """One option on one cluster, as the solver and as the enumeration see it."""

    problem: PlacementProblem
    bounds: Bounds
    job: brute_force.Job
    nodes: tuple[NodeClass, ...]


def _case(
    classes: list[NodeClass],
    model: ModelProfile,
    shape: WorkerShape,
    workers: int,
    shards: Shards,
    ps_may_share: bool = False,
) -> Case:
    cluster = _named(classes)
    kinds = node_kinds(cluster)
    job, sizes = _job(model, cluster, shape, workers, shards)
    job = dataclasses.replace(job, ps_may_share=ps_may_share)
    step_model = _step_model(model, shape, shards)
    problem = placement_problem(kinds, step_model, sizes, shards, workers, ps_may_share=ps_may_share)
    bounds = option_bounds(kinds, step_model, sizes, shards, workers, ps_may_share=ps_may_share)
    return Case(problem, bounds, job, cluster.nodes)


def _mixed_case(
    classes: list[NodeClass],
    model: ModelProfile,
    choice: tuple[WorkerShape, ...],
    workers: int,
    shards: Shards,
    least_gpus: int,
) -> Case:
    cluster = _named(classes)
    kinds = node_kinds(cluster)
    job, sizes = _job(model, cluster, choice[0], workers, shards)
    models = [_step_model(model, shape, shards) for shape in choice]
    problem = mixed_problem(kinds, models, sizes, shards, workers, least_gpus=least_gpus)
    bounds = mixed_bounds(kinds, models, sizes, shards, workers)
    return Case(problem, bounds, dataclasses.replace(job, shapes=choice, least_gpus=least_gpus), cluster.nodes)


def _step_model(model: ModelProfile, shape: WorkerShape, shards: Shards) -> StepModel:
    return StepModel(model, shape, known_hardware(), WITHIN_GBPS * BYTES_PER_S_PER_GBPS, shards.total)


def _check_against(case: Case, found: Placement | None, workers: int, *, traffic: bool) -> None:
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


@many
@given(nodes, profiles, shapes, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_placement_is_as_fast_as_the_best_of_all_placements(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int, equal: bool
) -> None:
    shards = shard(model, min(ps, len(model.variables)))
    if equal:
        shards = Shards((shards.sizes[0],) * len(shards.sizes), {})
    case = _case(classes, model, shape, workers, shards)
    found = fastest_placement(case.problem)
    expected = brute_force.best(case.job, case.nodes)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
    assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)
    assert case.bounds.samples_per_s[workers - 1] >= expected.samples_per_s * (1 - 1e-12)


network_bound_nodes = st.lists(
    st.builds(
        lambda cpus, gbps: NodeClass(name="x", cpus=cpus, mem_bytes=64 * GIB, network_gbps=gbps),
        st.sampled_from([2.0, 2.5, 3.0, 4.0]),
        st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    ),
    min_size=3,
    max_size=4,
)


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
    case = _case(classes, model, WorkerShape(0, cpus), workers, shard(model, len(sizes)))
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
    case = _case(classes, model, WorkerShape(1, 0.25), workers, shard(model, len(sizes)))
    found = fastest_placement(case.problem)
    expected = brute_force.best(case.job, case.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
        assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)


@many
@given(nodes, profiles, shapes, st.integers(1, 6), st.integers(1, 3))
def test_the_calmest_placement_has_the_least_traffic_of_all(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int
) -> None:
    case = _case(classes, model, shape, workers, shard(model, min(ps, len(model.variables))))
    found = calmest_placement(case.problem)
    expected = brute_force.least_traffic(case.job, case.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.traffic_bytes == pytest.approx(expected, rel=CLOSE)
        assert case.bounds.traffic_bytes[workers - 1] <= expected * (1 + 1e-12)


few_nodes = nodes.filter(lambda classes: len(classes) <= 3)
few = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@few
@given(few_nodes, profiles, shapes, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_parameter_servers_that_may_share_machines_are_placed_best(
    classes: list[NodeClass], model: ModelProfile, shape: WorkerShape, workers: int, ps: int, traffic: bool
) -> None:
    shards = shard(model, min(ps, len(model.variables)))
    case = _case(classes, model, shape, workers, shards, ps_may_share=True)
    found = (calmest_placement if traffic else fastest_placement)(case.problem)
    _check_against(case, found, workers, traffic=traffic)


mixed_shapes = st.lists(shapes, min_size=1, max_size=3, unique=True).map(tuple)


@few
@given(
    few_nodes, profiles, mixed_shapes, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.sampled_from([0, 0, 2])
)
def test_workers_that_may_differ_between_machines_are_placed_best(
    classes: list[NodeClass],
    model: ModelProfile,
    choice: tuple[WorkerShape, ...],
    workers: int,
    ps: int,
    traffic: bool,
    least_gpus: int,
) -> None:
    shards = shard(model, min(ps, len(model.variables)))
    case = _mixed_case(classes, model, choice, workers, shards, least_gpus)
    found = (calmest_mixed_placement if traffic else fastest_mixed_placement)(case.problem)
    _check_against(case, found, workers, traffic=traffic)
    if found is not None:
        kinds = [(group.state.kind, group.state.shape) for group in found.groups]
        assert set(kinds) <= {(kind, shape) for kind in range(len(case.problem.kinds)) for shape in choice}


two_nodes = nodes.filter(lambda classes: len(classes) <= 2)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(two_nodes, profiles)
def test_a_plan_without_rules_on_workers_and_sharing_is_the_best_of_all(
    classes: list[NodeClass], model: ModelProfile
) -> None:
    cluster, rules = _named(classes), frozenset({"cpu_gpu_ratio"})
    speeds = [0.0]
    for entry in _space(model, cluster, rules).ranges:
        for workers in range(1, 5):
            for ps in range(1, min(3, len(model.variables)) + 1):
                job, _ = _job(model, cluster, entry.shapes[0], workers, shard(model, ps))
                best = brute_force.best(dataclasses.replace(job, shapes=entry.shapes, ps_may_share=True), cluster.nodes)
                speeds.append(0.0 if best is None else best.samples_per_s)
    request = PlanRequest(model, cluster, max_workers=4, rules=rules)
    if max(speeds) == 0.0:
        return
    plan = make_plan(request)
    # The enumeration stops at three parameter servers, the plan does not.
    assert plan.samples_per_s >= max(speeds) * (1 - TIE) * (1 - CLOSE)
    if plan.option.ps <= 3 and len(model.variables) <= 3:
        assert plan.samples_per_s <= max(speeds) * (1 + CLOSE)
        assert plan.optimal


def test_too_many_ways_to_share_machines_are_refused() -> None:
    model = profile([(20 + i) * MB for i in range(40)], api=Api.GRAPH)
    with pytest.raises(
        BadInputError, match=r"40 parameter servers of 40 sizes .* more than .* ways; keep task_counts\."
    ):
        _case(
            [NodeClass(name="x", cpus=8.0, mem_bytes=64 * GIB)], model, WorkerShape(0, 1.0), 1, shard(model, 40), True
        )


def _space(model: ModelProfile, cluster: Cluster, rules: frozenset[str]) -> OptionSpace:
    kinds = node_kinds(cluster)
    sizes = TaskSizes.of(model, max(kind.cpus for kind in kinds))
    useful_ps = useful_ps_count(model, len(cluster.nodes))
    return prune(raw_space(kinds, max_workers=4), rules, kinds, known_hardware(), sizes, useful_ps)[-1].space


def _all_results(model: ModelProfile, cluster: Cluster, objective: str = "throughput") -> list[brute_force.Result]:
    results = []
    for entry in _space(model, cluster, default_rules(objective)).ranges:
        for shape in entry.shapes:
            for workers in range(entry.min_workers, entry.max_workers + 1):
                for ps in range(1, entry.max_ps + 1):
                    job, _ = _job(model, cluster, shape, workers, shard(model, ps))
                    if objective == "traffic":
                        traffic = brute_force.least_traffic(job, cluster.nodes)
                        results += [] if traffic is None else [brute_force.Result(0.0, traffic)]
                    else:
                        best = brute_force.best(job, cluster.nodes)
                        results += [] if best is None else [best]
    return results


small_nodes = nodes.filter(lambda classes: len(classes) <= 3)


@some
@given(small_nodes, profiles)
def test_the_plan_is_within_a_tie_of_the_fastest_option_and_has_least_traffic_there(
    classes: list[NodeClass], model: ModelProfile
) -> None:
    cluster = _named(classes)
    results = _all_results(model, cluster)
    request = PlanRequest(model, cluster, max_workers=4)
    if not results:
        with pytest.raises(InfeasibleError):
            make_plan(request)
        return
    plan = make_plan(request)
    fastest = max(result.samples_per_s for result in results)
    floor = fastest * (1 - TIE)
    calmest = min(result.traffic for result in results if result.samples_per_s >= floor * (1 + CLOSE))
    assert plan.samples_per_s >= floor * (1 - CLOSE)
    assert plan.traffic_bytes <= calmest * (1 + CLOSE)
    assert plan.optimal
    assert plan.gap == 0


@some
@given(small_nodes, profiles)
def test_the_plan_for_traffic_has_the_least_of_all_options(classes: list[NodeClass], model: ModelProfile) -> None:
    cluster = _named(classes)
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
    named = [dataclasses.replace(node, rack=rack) for node, rack in zip(_named(classes).nodes, racks, strict=False)]
    cluster = Cluster(tuple(named), within_node_gbps=WITHIN_GBPS, across_racks_gbps=across)
    results = _all_results(model, cluster)
    if not results:
        return
    plan = make_plan(PlanRequest(model, cluster, max_workers=4))
    best = max(result.samples_per_s for result in results)
    assert plan.samples_per_s <= best * (1 + CLOSE)
    assert plan.samples_per_s >= best * (1 - plan.gap) * (1 - TIE) * (1 - CLOSE)
    assert plan.optimal == (plan.gap == 0)


def test_a_passed_deadline_gives_a_plan_that_claims_no_proof() -> None:
    models = ("K80", "V100")
    cluster = _named(
        [NodeClass(name="x", cpus=8.0 + i, mem_bytes=32 * GIB, gpus=4 - i, gpu_model=models[i % 2]) for i in range(4)]
    )
    started = time.monotonic()
    plan = make_plan(PlanRequest(profile(), cluster, time_limit_s=0.0))
    assert time.monotonic() - started < 60
    assert not plan.optimal
    assert plan.gap > 0
