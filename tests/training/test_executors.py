"""Executors shared by a job's tasks on one agent: which tasks join, what an executor's end means; Mesos is a fake."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from executor.messages import LaunchOrder, Report
from framework.mesos import events
from framework.mesos.offers import by_agent
from framework.mesos.tasks import executor_of
from framework.scheduler.job import Need
from framework.training.controller import REPLACEMENT_TIMEOUT_S
from framework.training.launch import launch_operation, place
from framework.training.spec import JobSpec, JobTask
from solver import Plan, PlannedTask
from tests.mesos.fake_mesos import FakeMesos, scalar
from tests.training.elastic.elastic_stage import INTERVAL_S, ElasticStage, elastic
from tests.training.job_stage import JobStage, ended, profile, spec

TERMINATED = {"source": "SOURCE_AGENT", "reason": "REASON_EXECUTOR_TERMINATED", "message": "Executor terminated"}
# What real Mesos says, `test_executors_run.py` has one of them.
TOO_LATE = [
    ("TASK_DROPPED", {**TERMINATED, "message": "Executor terminating"}),
    ("TASK_FAILED", TERMINATED),
    ("TASK_ERROR", {"source": "SOURCE_MASTER", "reason": "REASON_TASK_INVALID", "message": "Total resources ..."}),
]


def own_plan(*names: str) -> Plan:
    """A plan for one agent, of tasks such as `worker:0`, in this order."""
    stage = JobStage(spec())
    stage.start()
    plan = stage.job.result.plan
    assert plan is not None
    by_name = {task.name: task for task in plan.tasks}
    return dataclasses.replace(plan, tasks=tuple(by_name[name] for name in names))


def training(job_spec: JobSpec | None = None) -> tuple[JobStage, dict[str, JobTask]]:
    """A job on one agent whose workers do not wait for each other, and that has made a step."""
    stage = JobStage(job_spec or spec())
    tasks = stage.start()
    stage.step(tasks["worker:0"], 1)
    return stage, tasks


def executor_ends(stage: JobStage, tasks: list[JobTask]) -> None:
    """Mesos says so of each of its tasks."""
    for task in tasks:
        stage.update(task, "TASK_FAILED", **TERMINATED)


def offered(stage: JobStage, **more: Any) -> list[dict[str, Any]]:
    """What is launched on an offer of the first agent."""
    before = len(stage.mesos.accepted)
    stage.offer(stage.mesos.offer(0, **more))
    stage.wait(1.0)
    return stage.mesos.accepted[before:]


def test_what_comes_later_to_an_agent_joins_the_executor_there() -> None:
    stage, tasks = training()
    (executor,) = {task.executor_id for task in tasks.values()}
    assert executor not in {task.task_id for task in tasks.values()}
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    # Mesos takes nothing else under an id that it knows (`FakeMesos`).
    (info,) = offered(stage)
    assert executor_of(info) == executor
    assert stage.job.result.restarts == 1


@pytest.mark.parametrize("first", ["ps:0", "worker:1"])
def test_who_comes_back_gets_as_much_as_the_lost_one_had(first: str) -> None:
    order = [first, *({"ps:0", "worker:0", "worker:1"} - {first})]
    stage, tasks = training(spec(plan=own_plan(*order)))
    (lost,) = (info for info in stage.mesos.accepted if info["task_id"]["value"] == tasks["worker:1"].task_id)
    held = {piece["name"]: piece["scalar"]["value"] for piece in lost["resources"] if "scalar" in piece}
    assert (held["cpus"] < tasks["worker:1"].planned.cpus) is (first == "worker:1")
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    for _ in range(2):
        # Only the lost task's resources are free.
        (back,) = offered(stage, cpus=held["cpus"], mem=held["mem"])
        assert [piece for piece in back["resources"] if "scalar" in piece] == [
            piece for piece in lost["resources"] if "scalar" in piece
        ]
        stage.update(stage.launched[back["task_id"]["value"]], "TASK_FAILED", ended(-9))


def test_the_next_service_knows_the_executors_as_they_were_launched() -> None:
    stage, tasks = training()
    stage.take_over(spec(python="another"))
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    (info,) = offered(stage)
    assert executor_of(info) == tasks["ps:0"].executor_id
    assert info["executor"]["command"]["value"] == "python3"


@pytest.mark.parametrize(("state", "status"), TOO_LATE)
def test_a_task_that_is_too_late_for_an_executor_starts_another_one(state: str, status: dict[str, str]) -> None:
    stage, tasks = training(spec(max_restarts=1))
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    (info,) = offered(stage)
    late = stage.launched[info["task_id"]["value"]]
    assert late.joined
    stage.update(late, state, **status)
    assert "not installed" not in stage.observer.restarts[-1]
    (info,) = offered(stage)
    assert executor_of(info) not in {task.executor_id for task in tasks.values()}
    # The worker's own failure, that one's only.
    assert (stage.job.result.restarts, stage.job.need) == (1, Need.NOTHING)


def test_a_task_that_ran_has_not_come_too_late() -> None:
    stage, tasks = training(spec(max_restarts=1))
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    (info,) = offered(stage)
    back = stage.launched[info["task_id"]["value"]]
    stage.update(back, "TASK_RUNNING")
    executor_ends(stage, [back])
    stage.end_killed()
    assert "no more restarts than 1" in stage.job.result.failure


@pytest.mark.parametrize("order", list(itertools.permutations(["ps:0", "worker:0", "worker:1"])))
def test_the_end_of_an_executor_is_one_failure(order: tuple[str, ...]) -> None:
    stage, tasks = training(spec(max_restarts=1))
    executor_ends(stage, [tasks[name] for name in order])
    stage.end_killed()
    assert stage.job.need is Need.REPLACE_LOST
    assert (stage.job.result.restarts, len(stage.observer.restarts)) == (1, 1)
    others = ", ".join(name for name in tasks if name != order[0])
    expected = f"{order[0]} failed on agent-0: Executor terminated; {others} ended with it"
    assert stage.observer.restarts == [expected]
    # The next attempt has one of its own.
    again = stage.start()
    assert not {task.executor_id for task in again.values()} & {task.executor_id for task in tasks.values()}


def test_workers_that_are_lost_with_their_executor_come_back_alone_and_are_one_failure() -> None:
    plan = own_plan("ps:0", "worker:0", "worker:1")
    (worker,) = (task for task in plan.tasks if task.name == "worker:1")
    there = (dataclasses.replace(worker, index=index, node="agent-1") for index in (1, 2))
    option = dataclasses.replace(plan.option, workers=3)
    stage = JobStage(
        spec(max_restarts=1, plan=dataclasses.replace(plan, option=option, tasks=(*plan.tasks[:2], *there)))
    )
    tasks = stage.start(agents=2)
    stage.step(tasks["worker:0"], 1)
    executor_ends(stage, [tasks["worker:1"], tasks["worker:2"]])
    for _ in range(2):
        stage.offer(stage.mesos.offer(1))
        stage.wait(1.0)
    assert (stage.job.result.restarts, stage.mesos.killed, stage.job.need) == (1, [], Need.NOTHING)
    assert len({task.executor_id for task in stage.job.tasks if task.node == "agent-1"}) == 1


def test_isolated_tasks_share_no_executor() -> None:
    stage, tasks = training(spec(isolate_tasks=True))
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    offered(stage)
    assert all(executor_of(info) == info["task_id"]["value"] for info in stage.mesos.accepted)
    assert len(stage.mesos.executors) == 4


@pytest.mark.parametrize("hand_out_gpus", [True, False])
def test_gpus_that_mesos_isolates_are_not_shared(hand_out_gpus: bool) -> None:
    job = spec(hand_out_gpus=hand_out_gpus)
    planned = (
        *(PlannedTask("ps", index, "agent-0", 1.0, 512, 0, 0) for index in range(2)),
        *(PlannedTask("worker", index, "agent-0", 1.0, 512, 0, 1) for index in range(2)),
    )
    plan = dataclasses.replace(own_plan("ps:0"), tasks=planned)
    (agent,) = by_agent([FakeMesos().offer(0, cpus=8, gpus=2)])
    infos = launch_operation(job, plan, place(job, plan, [agent], 0), {}, agent, 0)["launch"]["task_infos"]
    assert len({executor_of(info) for info in infos}) == (1 if hand_out_gpus else 3)
    assert [LaunchOrder.decode(info["data"]).gpu_devices for info in infos[2:]] == (
        [(0,), (1,)] if hand_out_gpus else [None, None]
    )


def test_what_an_executor_has_for_itself_may_be_reserved() -> None:
    plan = own_plan("ps:0", "worker:0", "worker:1")
    offer = FakeMesos().offer(0)
    reserved = [scalar("cpus", 0.005) | {"role": "ml"}, scalar("mem", 8) | {"role": "ml"}]
    (agent,) = by_agent([{**offer, "resources": [*offer["resources"], *reserved]}])
    infos = launch_operation(spec(), plan, place(spec(), plan, [agent], 0), {}, agent, 0)["launch"]["task_infos"]
    assert {str(info["executor"]) for info in infos} == {str(infos[0]["executor"])}
    own = [(piece["name"], piece["role"], piece["scalar"]["value"]) for piece in infos[0]["executor"]["resources"]]
    assert own == [("cpus", "ml", 0.005), ("cpus", "*", 0.005), ("mem", "ml", 8), ("mem", "*", 24)]


def growing() -> tuple[ElasticStage, list[JobTask]]:
    """A job that launches further tasks on its own agent."""
    stage = ElasticStage(elastic())
    stage.start_training()
    stage.look(stage.mesos.offer(0))
    further = stage.new_tasks
    assert further
    return stage, further


def test_a_job_grows_into_the_executor_that_it_has() -> None:
    stage, further = growing()
    assert {task.executor_id for task in further} == {stage.chief.executor_id}
    stage.get_ready()
    stage.change(step=100)
    assert set(stage.running.values()) == {1}
    assert not stage.mesos.killed


@pytest.mark.parametrize(("state", "status"), TOO_LATE)
def test_growth_that_comes_too_late_for_an_executor_is_tried_again_at_once(state: str, status: dict[str, str]) -> None:
    stage, further = growing()
    for task in further:
        stage.update(task, state, **status)
    assert status["message"] in stage.observer.notes[-1]
    began_s = stage.now
    stage.look(stage.mesos.offer(0))
    assert stage.now - began_s < INTERVAL_S
    again = stage.new_tasks
    assert [task.name for task in again] == [task.name for task in further]
    assert stage.chief.executor_id not in {task.executor_id for task in again}


def test_output_of_a_task_that_has_ended_is_not_taken_from_its_mates() -> None:
    stage, tasks = training(spec(profile=profile(synchronous=False), stream_all_logs=True))
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    stage.step(tasks["worker:1"], 77)
    assert tasks["worker:1"].step is None
    stage.step(tasks["worker:0"], 78)
    assert stage.job.result.steps == 78


def test_only_their_executor_reports_for_its_tasks() -> None:
    stage, tasks = training()
    report = Report(tasks["worker:0"].task_id, {"type": "progress", "step": 99}).encode()
    # In the name of a task too.
    for stranger in ("other", tasks["worker:0"].task_id):
        stage.scheduler.handle(events.MessageArrived("S0", stranger, report))
    assert stage.job.result.steps == 1
    stage.scheduler.handle(events.MessageArrived("S0", tasks["worker:0"].executor_id, report))
    assert stage.job.result.steps == 99


def test_a_place_that_is_not_offered_again_ends_the_attempt() -> None:
    stage, tasks = training()
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    stage.wait(REPLACEMENT_TIMEOUT_S + 1)
    stage.end_killed()
    assert stage.job.need is Need.REPLACE_LOST
    assert stage.job.to_state()["executors"] == {}
