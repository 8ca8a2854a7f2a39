"""Plans that a job is given, and where their tasks go; Mesos' calls are fakes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest

from dike.exceptions import BadInputError, InfeasibleError
from framework.mesos.offers import by_agent
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.records import JobKind, JobRecord
from framework.service.requests import read_request, stored_request
from framework.training import planning
from framework.training.launch import place
from framework.training.planning import TrainingSizing, check_ever_fits, plan_for
from framework.training.spec import check_can_run
from solver import Cluster, NodeClass, Plan, PlannedTask, make_plan
from solver.calibration import Measurement
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.settings import PlanSettings
from tests.mesos.fake_mesos import FakeMesos
from tests.training.job_stage import GIB, JobStage, profile, spec


def any_plan() -> Plan:
    stage = JobStage(spec())
    stage.start()
    assert stage.job.result.plan is not None
    return stage.job.result.plan


def test_a_plan_for_other_agents_is_refused() -> None:
    other = NodeClass(name="elsewhere", count=1, cpus=8, mem_bytes=8 * GIB, gpus=0, gpu_model=None, disk_bytes=GIB)
    stage = JobStage(spec(plan=any_plan()), all_agents=[other])
    stage.offer(stage.mesos.offer(7))
    with pytest.raises(InfeasibleError, match="no agent is called agent-0; the agents are elsewhere"):
        stage.wait(SETTLE_S + 0.1)


def test_a_plan_that_is_too_large_for_its_agents_is_refused() -> None:
    plan = any_plan()
    wide = tuple(dataclasses.replace(task, cpus=64.0) for task in plan.tasks)
    agent = by_agent([FakeMesos().offer(0)])[0].node_class()
    with pytest.raises(InfeasibleError, match=r"can never start here: it needs 1.* cpus.* on agent-0, which is"):
        check_ever_fits(spec(plan=dataclasses.replace(plan, tasks=wide)), [agent])
    check_ever_fits(spec(plan=plan), [agent])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 2}, r"This plan cannot be run: worker:0 has 2 GPUs in it and can use 1; make one"),
        ({"gpus": 1, "role": "ps"}, r"This plan cannot be run: ps:0 has 1 GPU in it and can use 0; make one"),
    ],
)
def test_a_plan_that_no_job_can_follow_is_refused(changed: dict[str, Any], said: str) -> None:
    plan = any_plan()
    check_can_run(plan)
    role = changed.pop("role", "worker")
    tasks = tuple(dataclasses.replace(task, **changed) if task.role == role else task for task in plan.tasks)
    wide = dataclasses.replace(plan, tasks=tasks)
    request = {"kind": "training", "script": "train.py", "profile": profile().to_json(), "plan": wide.to_json()}
    with pytest.raises(BadInputError, match=said):
        read_request(request)
    # What a service has taken before it knew better is still read.
    assert stored_request(JobRecord("job", JobKind.TRAINING, "ann", "train.py", request))
    other = dataclasses.replace(plan, variables={**plan.variables, "elsewhere": 0})
    with pytest.raises(BadInputError, match="no variable 'elsewhere'"):
        check_can_run(other)


def test_jobs_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Mock(wraps=make_plan)
    monkeypatch.setattr(planning, "make_plan", planned)
    planning.planned.cache_clear()
    offers = by_agent([FakeMesos().offer(0)])
    # They come with profiles of their own, which say the same.
    plan, other = (plan_for(spec(job_id=name, profile=profile()), offers) for name in ("one", "other"))
    assert plan == other
    assert planned.call_count == 1
    plan_for(spec(), by_agent([FakeMesos().offer(0, cpus=3.0)]))
    plan_for(spec(planning=PlanSettings(objective="traffic")), offers)
    plan_for(spec(profile=dataclasses.replace(profile(), layers={"Dense": 99})), offers)
    assert planned.call_count == 4


def test_measurements_are_of_whole_machines_and_of_those_that_are_here() -> None:
    offers = by_agent([FakeMesos().offer(0, cpus=1.5), FakeMesos().offer(1)])
    whole = [agent.node_class() for agent in by_agent([FakeMesos().offer(agent) for agent in range(2)])]

    def measured(node: str, gpus: int = 0) -> Measurement:
        return Measurement(WorkerShape(gpus, 2.0), Assignment(("agent-0",), (node,), None), seconds=0.5)

    rows = (measured("agent-1"), measured("gone"), measured("agent-1", gpus=1))
    plan = plan_for(spec(planning=PlanSettings(measurements=rows)), offers, lambda: whole)
    assert any(text.startswith("Calibrated with 1 measurement:") for text in plan.why)
    assert plan.why[-1] == "2 of 3 measurements are of machines not in the cluster."
    assert plan.samples_per_s != plan_for(spec(), offers).samples_per_s
    # Offline the machines are all in the file, and what is of another is a mistake.
    with pytest.raises(BadInputError, match="machine 'gone' is not in the cluster"):
        PlanSettings(measurements=rows).request(profile(), Cluster(tuple(whole)))


def test_gpus_of_one_machine_are_numbered_across_its_agents() -> None:
    planned = tuple(PlannedTask("worker", index, f"agent-{index}", 1.0, 512, 0, 1) for index in range(2))
    mesos = FakeMesos()
    offers = [mesos.offer(agent, gpus=1) for agent in range(2)]
    tasks = place(spec(), dataclasses.replace(any_plan(), tasks=planned), by_agent(offers), 0)
    assert [task.gpu_devices for task in tasks] == [(0,), (1,)]


def test_a_saved_plan_is_followed_and_waits_for_its_nodes() -> None:
    first = JobStage(spec())
    first.start()
    plan = Plan.loads(first.job.result.plan.dumps())  # type: ignore[union-attr]

    stage = JobStage(spec(plan=plan))
    stage.offer(stage.mesos.offer(5))
    stage.wait(SETTLE_S + 0.1)
    assert "agent-0 offers nothing" in stage.observer.waits[0]
    stage.start()
    assert stage.job.result.plan == plan


def test_a_plan_alone_launches_nothing() -> None:
    stage = JobStage(spec(plan_only=True))
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
        {**FakeMesos().offer(number), **more, "id": {"value": str(number)}, "agent_id": {"value": f"x-S{number}"}}
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
