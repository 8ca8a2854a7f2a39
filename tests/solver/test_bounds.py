"""Placements that were once faster than a plan's bound, or were said not to fit, one test for each cause."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.evaluation import RatedPlan
from solver.options import PAPER
from solver.placement.naming import Assignment
from solver.request import scenario_of
from solver.resources import WorkerShape
from solver.search.space import has_similar_workers
from solver.units import GIB, SIMPLE_TIE_SHARE
from tests.properties import examples
from tests.solver.solver_cases import MB, profile


def gpus(*models: str, cpus: float = 8.0, gbps: float = 10.0) -> Cluster:
    return Cluster(
        tuple(
            NodeClass(
                name=f"n{index}", cpus=cpus, mem_bytes=64 * GIB, gpus=1, gpu_model=model, network_gbps=gbps
            )
            for index, model in enumerate(models)
        )
    )  # fmt: skip


def check(request: PlanRequest, shape: WorkerShape, on: tuple[str, ...], ps: tuple[str, ...], ps_cpus: float) -> Plan:
    """An allowed placement is no faster than the plan and its gap say."""
    scenario = scenario_of(request).with_ps_cpus(ps_cpus)
    allowed = RatedPlan.of(scenario, Assignment(ps, on, None, (shape,) * len(on)))
    assert has_similar_workers(scenario, allowed.assignment), "the case is none"
    plan = make_plan(request)
    assert plan.samples_per_s >= allowed.samples_per_s * (1 - max(plan.gap, SIMPLE_TIE_SHARE)) * (1 - 1e-6)
    return plan


@pytest.mark.parametrize("number", range(8))
def test_the_fastest_gpus_are_within_their_range_of_steps_whatever_is_rounded(number: int) -> None:
    model = profile([4 * MB] * 2, api=Api.GRAPH, flops=1e9 + number * 3.7e7, sample_bytes=100, slots=0)
    check(PlanRequest(model, gpus("A100", "K80", "V100")), WorkerShape(1, 1.0), ("n0", "n2"), ("n0",), 1.0)


def test_alike_workers_may_have_few_cpus_so_that_a_fast_gpu_is_not_too_fast_for_a_slow_one() -> None:
    model = profile([4 * MB] * 2, api=Api.GRAPH, flops=5e9, sample_bytes=100_000, slots=0)
    request = PlanRequest(model, gpus("A100", "T4", cpus=16.0, gbps=25.0), rules=PAPER)
    check(request, WorkerShape(1, 0.75), ("n0", "n1"), ("n0",), 1.0)


def test_a_shard_of_more_than_half_of_all_bytes_is_bounded_for_numbers_of_ps_that_are_not_searched() -> None:
    """In rotation over seven ps the three large variables come together."""
    sizes = [300 * MB if index % 7 == 0 else 5 * MB for index in range(21)]
    sizes[20] = 5 * MB
    model = profile(sizes, api=Api.GRAPH, flops=1e6, sample_bytes=100, slots=0)
    large = NodeClass(name="g", cpus=48, gpus=8, gpu_model="A100", mem_bytes=256 * GIB)
    small = tuple(NodeClass(name=f"c{index}", cpus=9, mem_bytes=16 * GIB) for index in range(9))
    cluster = Cluster((large, *small), within_node_gbps=640)
    request = PlanRequest(model, cluster, sharding="round_robin", max_workers=8, max_gpus_per_worker=1)
    check(request, WorkerShape(1, 4.0), ("g",) * 8, ("g", *(f"c{index}" for index in range(6))), 8.0)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("fewest", [1, 2, 3])
def test_as_many_workers_as_wanted_fit_on_one_machine(synchronous: bool, fewest: int) -> None:
    model = profile(
        [20 * MB] * 2, api=Api.GRAPH, flops=1e6, sample_bytes=100, slots=0, synchronous=synchronous
    )  # fmt: skip
    cluster = Cluster((NodeClass(name="n0", cpus=3.5, mem_bytes=8 * GIB),))
    assert make_plan(PlanRequest(model, cluster, min_workers=fewest)).option.workers >= fewest


@pytest.mark.parametrize("count", [5, 6, 9])
def test_the_chief_leaves_the_only_machine_with_room_for_a_worker_to_that(count: int) -> None:
    model = profile([20 * MB] * 2, api=Api.KERAS, flops=4e9, sample_bytes=100, slots=0)
    small = tuple(NodeClass(name=f"s{index}", cpus=2 + index / 10, mem_bytes=GIB) for index in range(count))
    plan = make_plan(PlanRequest(model, Cluster((NodeClass(name="big", cpus=8, mem_bytes=int(2.6 * GIB)), *small))))
    assert {task.node for task in plan.tasks if task.role == "worker"} == {"big"}


machines = st.lists(
    st.builds(
        lambda cpus, gpus, model, gbps: NodeClass(
            name="m", cpus=cpus, mem_bytes=64 * GIB, gpus=gpus, gpu_model=model if gpus else None, network_gbps=gbps
        ),
        st.sampled_from([4.0, 8.0, 16.0]),
        st.sampled_from([0, 1, 2, 4]),
        st.sampled_from(["K80", "T4", "V100", "A100"]),
        st.sampled_from([1.0, 10.0, 25.0]),
    ),
    min_size=2,
    max_size=4,
)


@examples(60)
@given(machines, st.sampled_from([1e8, 1e9, 6e9]), st.sampled_from([100, 100_000]))
def test_no_asynchronous_worker_of_a_plan_is_too_slow_beside_the_others(
    classes: list[NodeClass], flops: float, sample_bytes: int
) -> None:
    cluster = Cluster(tuple(dataclasses.replace(one, name=f"m{index}") for index, one in enumerate(classes)))
    model: ModelProfile = profile([4 * MB] * 4, flops=flops, sample_bytes=sample_bytes, slots=0)
    request = PlanRequest(model, cluster)
    try:
        plan = make_plan(request)
    except InfeasibleError:
        return
    workers = [task for task in plan.tasks if task.role == "worker"]
    shapes = tuple(WorkerShape(task.gpus, task.cpus) for task in workers)
    assignment = Assignment(("m0",), tuple(task.node for task in workers), None, shapes)
    assert has_similar_workers(scenario_of(request), assignment)


def test_variables_without_bytes_are_planned() -> None:
    for synchronous in (False, True):
        model = profile([0] * 8, api=Api.GRAPH, flops=1e9, sample_bytes=100, slots=0, synchronous=synchronous)
        assert make_plan(PlanRequest(model, gpus(*["K80"] * 8))).option.workers >= 1


def test_a_class_of_no_machines_is_no_class() -> None:
    some = NodeClass(name="some", count=2, cpus=4.0, mem_bytes=16 * GIB)
    none = dataclasses.replace(some, name="none", count=0, cpus=8.0)
    plan = make_plan(PlanRequest(profile([4 * MB] * 4, flops=1e8), Cluster((some, none))))
    assert {task.node for task in plan.tasks} <= {"some-0", "some-1"}
