"""Gangs: equal workers without parameter servers, which start, end and restart together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dike.process import EXIT_CODE_CANNOT_SPLIT
from dike.profile import Api
from executor.messages import LaunchOrder, Report
from framework.mesos.offers import by_agent
from framework.scheduler.offer_pool import SETTLE_S
from framework.training.elastic.layout import Size
from framework.training.planning import TrainingSizing
from framework.training.spec import JobTask
from solver.settings import PlanSettings
from tests.training.job_stage import JobStage, ended, profile, spec

WHY = "the loss of a batch is not the mean of those of its samples"


def gang(strategy: str = "allreduce", **changes: Any) -> JobStage:
    """A Keras job of which two workers train twice as much as one."""
    shared = dataclasses.replace(
        profile(Api.KERAS),
        flops_forward_per_sample=1e9,
        flops_step_per_sample=3e9,
        longest_path_flops=1e9,
        why_not_split="",
    )
    values = {"profile": shared, "planning": PlanSettings(strategy=strategy), **changes}  # type: ignore[arg-type]
    return JobStage(spec(**values))


def start(stage: JobStage, agents: int = 2) -> tuple[JobTask, JobTask]:
    tasks = stage.start(agents)
    assert set(tasks) == {"worker:0", "worker:1"}
    assert all(task.planned.is_plain for task in tasks.values())
    return tasks["worker:0"], tasks["worker:1"]


def save(stage: JobStage, chief: JobTask, step: int) -> None:
    stage.step(chief, step)
    stage.say(chief, Report(chief.task_id, {"type": "checkpoint", "path": f"run-0-step-{step}", "step": step}))


def test_a_gang_has_one_cluster_and_one_chief() -> None:
    stage = gang()
    chief, follower = start(stage)
    orders = [LaunchOrder.decode(info["data"]) for info in stage.mesos.accepted]
    assert [order.task.is_synchronous for order in orders] == [True, True]
    assert [order.task.is_chief for order in orders] == [True, False]
    assert [order.stream_logs for order in orders] == [True, False]
    assert orders[0].task.cluster == {"worker": [chief.address, follower.address]}


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_ends_restarts_all_from_the_checkpoint(which: int) -> None:
    stage = gang()
    tasks = start(stage)
    save(stage, tasks[0], 10)
    # The other process ends with EXIT_CODE_PEER_LOST, and its slot waits.
    stage.update(tasks[which], "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
    assert stage.mesos.killed == [tasks[1 - which].task_id]
    assert "ended by signal 9" in stage.observer.restarts[-1]
    stage.end_killed()
    assert not stage.job.done
    start(stage)
    orders = [LaunchOrder.decode(info["data"]) for info in stage.mesos.accepted[2:]]
    assert [order.task.attempt for order in orders] == [1, 1]
    assert stage.job.result.restarts == 1
    assert stage.job.to_state()["plain"] is True


def test_a_follower_that_finishes_before_the_chief_does_not_end_the_job() -> None:
    stage = gang()
    chief, follower = start(stage)
    stage.update(follower, "TASK_FINISHED", ended(0))
    assert stage.mesos.killed == []
    assert not stage.job.done
    stage.update(chief, "TASK_FINISHED", ended(0))
    stage.wait(0.1)
    assert stage.job.done
    assert (stage.job.result.succeeded, stage.job.result.restarts) == (True, 0)


def test_a_follower_that_fails_after_the_chief_has_finished_does_not_fail_the_job() -> None:
    stage = gang(max_restarts=0)
    chief, follower = start(stage)
    stage.update(chief, "TASK_FINISHED", ended(0))
    assert not stage.job.done
    stage.update(follower, "TASK_FAILED", ended(1))
    stage.wait(0.1)
    assert stage.job.done
    assert (stage.job.result.succeeded, stage.job.result.failure) == (True, "")


def cannot_split(stage: JobStage, *, is_reported: bool = True) -> None:
    """A job starts, and its workers find that they cannot share the batches."""
    chief, follower = start(stage)
    if is_reported:
        stage.say(chief, Report(chief.task_id, {"type": "cannot_split", "why": WHY}))
    for task in (chief, follower):
        stage.update(task, "TASK_FAILED", ended(EXIT_CODE_CANNOT_SPLIT))
    stage.end_killed()


@pytest.mark.parametrize("elastic", [None, (1, 2)])
def test_workers_that_cannot_share_batches_are_planned_again_as_one_task(elastic: tuple[int, int] | None) -> None:
    stage = gang("auto", elastic=elastic, max_workers=2 if elastic is None else None)
    cannot_split(stage)
    assert stage.observer.notes[-1] == f"several workers cannot share the batches of train.py: {WHY}; planning again"
    (task,) = stage.start(2).values()
    assert task.planned.is_plain
    plan = stage.job.result.plan
    assert plan is not None
    assert f"Several workers cannot share its batches: {WHY}." in " ".join(plan.why)
    assert stage.job.result.restarts == 0


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("allreduce", {}), ("auto", {"min_workers": 2}), ("auto", {"elastic": (2, 2), "max_workers": None})],
)
def test_workers_that_cannot_share_batches_end_a_job_that_needs_several(strategy: str, changes: dict[str, Any]) -> None:
    stage = gang(strategy, **changes)
    cannot_split(stage)
    assert stage.job.done
    assert stage.job.result.failure == (
        f"several workers cannot share the batches of train.py: {WHY}; --strategy one trains it in one task, "
        "--strategy ps with parameter servers, asynchronously"
    )


def test_a_report_that_was_lost_is_waited_for_but_not_for_ever() -> None:
    stage = gang("auto", max_restarts=1)
    cannot_split(stage, is_reported=False)
    assert not stage.job.done
    cannot_split(stage, is_reported=False)
    assert stage.job.done
    assert "worker:0 failed" in stage.job.result.failure


def test_one_task_resumes_the_checkpoint_of_a_gang() -> None:
    stage = gang("auto")
    chief, follower = start(stage)
    save(stage, chief, 10)
    stage.update(follower, "TASK_LOST", reason="REASON_AGENT_REMOVED")
    stage.end_killed()
    # One of its two agents is left, with too few CPUs for two.
    stage.offer(stage.mesos.offer(0, cpus=1))
    stage.wait(SETTLE_S + 0.1)
    (task,) = stage.job.tasks
    order = LaunchOrder.decode(stage.mesos.accepted[-1]["data"])
    assert (task.name, order.task.is_synchronous, order.task.attempt) == ("worker:0", False, 1)
    assert order.task.checkpoint_dir == "/checkpoints"


@pytest.mark.parametrize("reason", ["REASON_AGENT_REMOVED", "REASON_AGENT_DISCONNECTED"])
def test_an_elastic_gang_that_loses_a_machine_restarts_on_those_that_are_left(reason: str) -> None:
    stage = gang("auto", elastic=(1, 4), max_workers=None)
    tasks = stage.start(4)
    save(stage, tasks["worker:0"], 10)
    before = len(tasks)
    lost = tasks["worker:1"].agent_id
    for task in tasks.values():
        if task.agent_id == lost:
            stage.update(task, "TASK_LOST", reason=reason)
    stage.end_killed()
    stage.offer(*(stage.mesos.offer(agent) for agent in range(4) if f"S{agent}" != lost))
    stage.wait(SETTLE_S + 0.1)
    after = stage.job.tasks
    assert 1 < len(after) < before
    assert lost not in {task.agent_id for task in after}
    assert all(task.planned.is_plain for task in after)
    assert stage.job.result.restarts == 1


@pytest.mark.parametrize(
    ("strategy", "changes", "count"),
    [
        ("auto", {}, 1),
        ("allreduce", {}, 2),
        ("auto", {"min_workers": 2}, 2),
        ("auto", {"elastic": (1, 4), "max_workers": None}, 1),
        ("allreduce", {"elastic": (1, 4), "max_workers": None}, 1),
        ("auto", {"elastic": (3, 4), "max_workers": None}, 3),
    ],
)
def test_the_smallest_size_of_a_job(strategy: str, changes: dict[str, Any], count: int) -> None:
    stage = gang(strategy, **changes)
    nodes = tuple(agent.node_class() for agent in by_agent(stage.mesos.offer(agent) for agent in range(4)))
    assert sum(need.count for need in TrainingSizing(stage.job_spec).needs(nodes)) == count


def test_sizes_without_parameter_servers_name_none() -> None:
    assert [str(Size(workers, 0)) for workers in (1, 3)] == ["1 worker", "3 workers"]
