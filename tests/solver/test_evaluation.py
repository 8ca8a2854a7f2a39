"""The value of a placement does not depend on the method that found it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.profile import Api
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.evaluation import RatedPlan, evaluate, planned_tasks
from solver.hardware import known_hardware
from solver.options import PAPER
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.units import GIB
from tests.properties import examples
from tests.solver.solver_cases import k80, profile


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("api", [Api.GRAPH, Api.KERAS])
def test_the_planner_predicts_what_the_evaluation_says(api: Api, synchronous: bool) -> None:
    cluster = Cluster((*k80(3).nodes, NodeClass(name="cpu", cpus=8, mem_bytes=32 * GIB, network_gbps=2)))
    plan = make_plan(PlanRequest(profile(api=api, synchronous=synchronous), cluster, rules=PAPER))
    scenario = Scenario.of(plan.profile, cluster, known_hardware())
    scenario = scenario.with_ps_cpus(plan.option.ps_task.cpus)
    nodes = {role: tuple(task.node for task in plan.tasks if task.role == role) for role in ("ps", "worker", "chief")}
    assignment = Assignment(nodes["ps"], nodes["worker"], next(iter(nodes["chief"]), None))
    shape = WorkerShape(plan.option.worker.gpus, plan.option.worker.cpus)
    rated = RatedPlan.of(scenario, assignment, shape)
    assert rated.samples_per_s == pytest.approx(plan.samples_per_s)
    assert rated.worth.traffic_bytes == pytest.approx(plan.traffic_bytes)
    assert planned_tasks(rated) == plan.tasks


@examples(40)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_parameter_servers_that_share_a_machine_share_its_card(ps_on: list[int], workers_on: list[int]) -> None:
    cluster = k80(4)
    scenario = Scenario.of(profile(synchronous=True), cluster, known_hardware())
    shards = scenario.shards(3)
    names = tuple(cluster.node_names())
    assignment = Assignment(tuple(names[i] for i in ps_on), tuple(names[i] for i in workers_on), None)
    worth = evaluate(scenario, WorkerShape(1, 1.0), shards, assignment)
    card = 10e9 / 8
    busiest = 0.0
    for index in range(4):
        stored = sum(size for node, size in zip(ps_on, shards.sizes, strict=True) if node == index)
        here = workers_on.count(index)
        busiest = max(busiest, 2 * stored * (4 - here) / card, 2 * here * (shards.total - stored) / card)
        busiest = max(busiest, 2 * stored * here / 8e9)
    assert worth.step_time.network == pytest.approx(busiest)
    terms = worth.step_time
    sums = max(terms.compute, terms.input) + terms.latency + terms.network + terms.update + terms.dispatch
    assert terms.total == pytest.approx(sums)
    assert worth.samples_per_s == pytest.approx(4 * 32 / terms.total)
