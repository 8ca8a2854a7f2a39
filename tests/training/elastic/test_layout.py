"""Where tasks go when a job changes its size."""

from __future__ import annotations

import dataclasses
from collections import Counter

from dike.profile import Api
from framework.mesos.offers import AgentOffer, by_agent
from framework.training.elastic.layout import Size, layout, replacement
from framework.training.spec import JobTask
from solver import Plan
from solver.settings import PlanSettings
from tests.mesos.fake_mesos import FakeMesos
from tests.training.elastic.elastic_stage import ElasticStage, elastic, heavy

SPEC = elastic(1, 8, profile=heavy(Api.GRAPH))


def job(agents: int) -> tuple[Plan, list[JobTask]]:
    stage = ElasticStage(SPEC)
    stage.start(agents)
    assert stage.job.result.plan is not None
    return stage.job.result.plan, stage.job.tasks


def offers(*agents: int, **resources: float) -> list[AgentOffer]:
    mesos = FakeMesos()
    return by_agent(mesos.offer(agent, **resources) for agent in agents)  # type: ignore[arg-type]


def test_those_there_are_stay_and_further_ones_are_shaped_alike() -> None:
    plan, tasks = job(2)
    workers = plan.option.workers
    target = layout(SPEC, plan, tasks, Size(workers + 2, 1), offers(4, 5))
    assert target is not None
    assert {task.task_id for task in tasks} == set(target.stays)
    assert [(task.name, task.cpus) for task in target.new] == [
        (f"worker:{workers}", plan.option.worker.cpus),
        (f"worker:{workers + 1}", plan.option.worker.cpus),
    ]
    assert [task.name for task in target.plan.tasks] == ["ps:0", *(f"worker:{index}" for index in range(workers + 2))]
    assert target.size == Size(workers + 2, 1)
    Plan.loads(target.plan.dumps())


def test_machines_of_the_job_are_filled_first_and_few_others_used() -> None:
    plan, tasks = job(1)
    target = layout(SPEC, plan, tasks, Size(plan.option.workers + 2, 1), offers(0, 4, 5, cpus=8))
    assert target is not None
    assert {task.node for task in target.new} == {"agent-0"}


def test_where_there_is_no_room_there_is_no_layout() -> None:
    plan, tasks = job(1)
    assert layout(SPEC, plan, tasks, Size(plan.option.workers + 1, 1), offers(3, cpus=0.1)) is None
    assert layout(SPEC, plan, tasks, Size(plan.option.workers + 1, 1), offers(3, ports=False)) is None
    assert layout(SPEC, plan, tasks, Size(plan.option.workers + 1, 1), []) is None


def test_the_chief_stays_and_machines_with_few_tasks_are_left_first() -> None:
    plan, tasks = job(3)
    here = Counter(task.agent_id for task in tasks)
    target = layout(SPEC, plan, tasks, Size(plan.option.workers - 1, 1), [])
    assert target is not None
    (given_up,) = target.surplus
    spare = [task for task in tasks if task.planned.role == "worker" and task.name != "worker:0"]
    assert here[next(task for task in spare if task.task_id == given_up).agent_id] == min(
        here[task.agent_id] for task in spare
    )
    smallest = layout(SPEC, plan, tasks, Size(1, 1), [])
    assert smallest is not None
    chief = next(task for task in tasks if task.name == "worker:0")
    assert smallest.stays[chief.task_id].name == "worker:0"
    assert [task.name for task in smallest.plan.tasks] == ["ps:0", "worker:0"]


def test_those_that_stay_close_the_gaps() -> None:
    plan, tasks = job(3)
    workers = [task for task in tasks if task.planned.role == "worker"]
    target = replacement(SPEC, plan, tasks, workers[1], offers(7))
    assert target is not None
    assert [(task.name, task.node) for task in target.new] == [("worker:1", "agent-7")]
    assert target.surplus == {workers[1].task_id}
    assert target.stays[workers[2].task_id].name == "worker:2"


def test_more_parameter_servers_share_the_variables_anew() -> None:
    variables = tuple(dataclasses.replace(heavy().variables[0], name=name) for name in ("a", "b"))
    profile = dataclasses.replace(heavy(Api.GRAPH), variables=variables, parameter_bytes=80_000)
    plan, tasks = job(1)
    plan = dataclasses.replace(plan, profile=profile, variables={"a": 0, "b": 0})
    target = layout(SPEC, plan, tasks, Size(plan.option.workers, 2), offers(4))
    assert target is not None
    assert sorted(target.plan.variables.values()) == [0, 1]
    assert [task.name for task in target.new] == ["ps:1"]


def test_a_new_size_deals_the_variables_out_as_the_job_wants() -> None:
    sizes = {"a": 40_000, "b": 30_000, "c": 20_000, "d": 10_000}
    like = heavy().variables[0]
    variables = tuple(dataclasses.replace(like, name=name, size_bytes=size) for name, size in sizes.items())
    profile = dataclasses.replace(heavy(Api.GRAPH), variables=variables, parameter_bytes=sum(sizes.values()))
    plan, tasks = job(1)
    plan = dataclasses.replace(plan, profile=profile, variables=dict.fromkeys(sizes, 0))
    for sharding, together in (("greedy", {"a", "d"}), ("round_robin", {"a", "c"})):
        spec = dataclasses.replace(SPEC, planning=PlanSettings(sharding=sharding))
        target = layout(spec, plan, tasks, Size(plan.option.workers, 2), offers(4))
        assert target is not None
        dealt = target.plan.variables
        assert {name for name, ps in dealt.items() if ps == dealt["a"]} == together
