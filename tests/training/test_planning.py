"""Plans that a job is given, and where their tasks go; Mesos' calls are played."""

from __future__ import annotations

import dataclasses

import pytest

from dike.exceptions import InfeasibleError
from framework.mesos.offers import by_agent
from framework.scheduler.offer_pool import SETTLE_S
from framework.training.launch import place
from framework.training.planning import TrainingSizing, check_ever_fits
from solver import NodeClass, Plan, PlannedTask
from tests.mesos.played_mesos import PlayedMesos
from tests.training.job_stage import GIB, Stage, spec


def any_plan() -> Plan:
    stage = Stage(spec())
    stage.start()
    assert stage.job.result.plan is not None
    return stage.job.result.plan


def test_a_plan_for_other_agents_is_refused() -> None:
    other = NodeClass(name="elsewhere", count=1, cpus=8, mem_bytes=8 * GIB, gpus=0, gpu_model=None, disk_bytes=GIB)
    stage = Stage(spec(plan=any_plan()), all_agents=[other])
    stage.offer(stage.mesos.offer(7))
    with pytest.raises(InfeasibleError, match="no agent is called agent-0; the agents are elsewhere"):
        stage.wait(SETTLE_S + 0.1)


def test_gpus_of_one_machine_are_numbered_across_its_agents() -> None:
    planned = tuple(PlannedTask("worker", index, f"agent-{index}", 1.0, 512, 0, 1) for index in range(2))
    mesos = PlayedMesos()
    offers = [mesos.offer(agent, gpus=1) for agent in range(2)]
    tasks = place(spec(), dataclasses.replace(any_plan(), tasks=planned), by_agent(offers), 0)
    assert [task.gpu_devices for task in tasks] == [(0,), (1,)]


def test_a_saved_plan_is_followed_and_waits_for_its_nodes() -> None:
    first = Stage(spec())
    first.start()
    plan = Plan.loads(first.job.result.plan.dumps())  # type: ignore[union-attr]

    stage = Stage(spec(plan=plan))
    stage.offer(stage.mesos.offer(5))
    stage.wait(SETTLE_S + 0.1)
    assert "agent-0 offers nothing" in stage.watcher.waits[0]
    stage.start()
    assert stage.job.result.plan == plan


def test_a_plan_alone_launches_nothing() -> None:
    stage = Stage(spec(plan_only=True))
    offer = stage.mesos.offer(0)
    stage.offer(offer)
    stage.wait(SETTLE_S + 0.1)
    assert stage.job.done
    assert stage.job.result.plan is not None
    assert stage.mesos.accepted == []
    assert stage.mesos.declined == [offer["id"]["value"]]


def test_agents_of_one_host_are_found_by_whatever_name_a_plan_has_for_them() -> None:
    more = {"hostname": "b"}
    offers = [
        {**PlayedMesos().offer(number), **more, "id": {"value": str(number)}, "agent_id": {"value": f"x-S{number}"}}
        for number in range(2)
    ]
    assert [agent.node for agent in by_agent(offers)] == ["b", "b/S1"]
    # As a service's directory calls them, which knows both before they offer anything.
    planned = tuple(PlannedTask("worker", index, name, 1.0, 512, 0, 0) for index, name in enumerate(["b/S1", "b/S0"]))
    plan = dataclasses.replace(any_plan(), tasks=planned)
    assert [task.agent_id for task in place(spec(), plan, by_agent(offers), 0)] == ["x-S1", "x-S0"]

    nodes = [dataclasses.replace(agent.node_class(), name=f"b/S{n}") for n, agent in enumerate(by_agent(offers))]
    for names in (["b", "b/S1"], ["b/S1", "b/S0"], ["b", "b"]):
        tasks = tuple(PlannedTask("worker", index, name, 1.0, 512, 0, 0) for index, name in enumerate(names))
        wanted = spec(plan=dataclasses.replace(plan, tasks=tasks))
        check_ever_fits(wanted, nodes)
        fit = TrainingSizing(wanted).fit(tuple(nodes))
        assert not fit.problem
        assert fit.nodes == ({"b/S0", "b/S1"} if len(set(names)) == 2 else {"b/S0"})
