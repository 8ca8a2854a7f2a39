"""Where tasks go when a job changes its size."""

from __future__ import annotations

import dataclasses
from collections import Counter

from dike.profile import Api
from framework.elastic.decision import Size
from framework.elastic.judge import NEAR, _counts
from framework.elastic.layout import layout, replacement
from framework.elastic.models import LEAST_S, WARM_UP_S, WINDOW_S, JobModels, SpeedMeter
from framework.job import JobTask
from framework.offers import AgentOffer, OfferBook
from solver import Plan
from tests.elastic.elastic_stage import ElasticStage, elastic, heavy
from tests.framework.played_mesos import PlayedMesos

SPEC = elastic(1, 8, profile=heavy(Api.GRAPH))


def job(agents: int) -> tuple[Plan, list[JobTask]]:
    stage = ElasticStage(SPEC)
    stage.start(agents)
    assert stage.job.result.plan is not None
    return stage.job.result.plan, stage.job.tasks


def offers(*agents: int, **resources: float) -> list[AgentOffer]:
    book, mesos = OfferBook(), PlayedMesos()
    for agent in agents:
        book.add(mesos.offer(agent, **resources))  # type: ignore[arg-type]
    return book.agents


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


def test_large_jobs_think_of_few_numbers() -> None:
    counts = _counts(500, 1, 1024, None)
    assert {1, 1024, *range(500 - NEAR, 500 + NEAR + 1)} <= set(counts)
    assert len(counts) < 80
    assert _counts(2, 1, 4, 4) == [1, 2, 3, 4]
    assert {1, 2, 4, 8, 16, 32, 64} <= set(_counts(30, 1, 64, 64))


def test_speed_is_known_after_a_while_and_is_the_newest() -> None:
    meter = SpeedMeter()
    for tenth in range(round((WARM_UP_S + LEAST_S) * 10)):
        meter.add(tenth / 10, tenth)
        assert meter.steps_per_s is None
    for tenth in range(30, 60):
        meter.add(tenth / 10, tenth)
    assert meter.steps_per_s is not None
    assert abs(meter.steps_per_s - 10) < 1e-6
    for second in range(6, 6 + 2 * round(WINDOW_S)):
        meter.add(second, 60 + 2 * (second - 6))
    assert abs(meter.steps_per_s - 2) < 1e-6
    meter.restart()
    assert meter.steps_per_s is None


def test_what_is_left_is_what_the_script_says_or_else_as_much_as_there_was() -> None:
    plan, _ = job(1)
    models = JobModels(SPEC, plan, [agent.node_class() for agent in offers(0)])
    models.progressed(0.0, 100, None)
    assert models.samples_left(250) == 150 * 64
    assert models.samples_left(None) == 100 * 64
    assert models.samples_left(50) == 0


def test_a_measured_speed_scales_what_was_predicted() -> None:
    plan, _ = job(1)
    models = JobModels(SPEC, plan, [agent.node_class() for agent in offers(0)])
    now = Size(1, 1)
    ratio = models.samples_per_s(Size(2, 1)) / models.samples_per_s(now)
    assert not models.measure(now)
    for tenth in range(60):
        models.progressed(tenth / 10, tenth, None)
    assert models.measure(now)
    assert abs(models.samples_per_s(now) - 640) < 7
    assert abs(models.samples_per_s(Size(2, 1)) / models.samples_per_s(now) - ratio) < 0.05
