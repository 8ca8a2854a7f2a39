"""A running elastic job that is asked to give up workers for another job of its service."""

from __future__ import annotations

import dataclasses

from dike.profile import Api
from framework.scheduler.job import Need, Reclaimable, Resizable
from framework.training.elastic.resizer import RECLAIM_HORIZON_S
from tests.training.elastic.elastic_stage import INTERVAL_S, ElasticStage, elastic, heavy
from tests.training.job_stage import ended

WHY = "job other has waited long"


def training(least: int = 1, most: int = 4, agents: int = 2, **changes: object) -> ElasticStage:
    """A job whose size may change just now."""
    stage = ElasticStage(elastic(least, most, **changes))
    stage.start_training(agents)
    stage.wait(INTERVAL_S)
    return stage


def workers(stage: ElasticStage) -> list[str]:
    return [task.task_id for task in stage.job.tasks if task.planned.role == "worker"]


def test_it_gives_up_what_it_is_asked_for_and_does_not_grow_before_the_other_runs() -> None:
    stage = training()
    before = workers(stage)
    assert isinstance(stage.job, Resizable)
    spare = stage.job.reclaimable()
    assert (set(spare.task_ids), spare.max_tasks) == (set(before), len(before) - 1)
    wanted = frozenset(before[:1])
    for _ in range(3):
        stage.job.reclaim(wanted, WHY)
        stage.wait(0.1)
    assert stage.observer.reasons == [WHY]
    assert stage.job.reclaimable() == Reclaimable(ending=wanted)
    stage.change(step=200)
    assert set(stage.mesos.killed) == wanted
    assert stage.job.reclaimable().ending == wanted
    stage.end_killed()
    assert workers(stage) == before[1:]
    names = [task.name for task in stage.job.tasks if task.task_id in before]
    assert names == [f"worker:{index}" for index in range(len(before) - 1)]
    assert [resize.reason for resize in stage.job.result.resizes] == [WHY]
    # There is room, and it would pay.
    revived = stage.mesos.calls.count("revive")
    stage.train(200)
    for _ in range(3):
        stage.job.reclaim(wanted, WHY)
        stage.wait(INTERVAL_S)
    assert stage.mesos.calls.count("revive") == revived
    stage.job.reclaim(frozenset(), "")
    stage.train(400)
    stage.look(stage.mesos.offer(1))
    assert "times as fast" in stage.observer.reasons[-1]


def test_it_is_not_asked_for_its_chief_nor_below_its_least_size() -> None:
    stage = training(profile=heavy(Api.GRAPH))
    assert stage.chief.task_id not in stage.job.reclaimable().task_ids
    stage.job.reclaim(frozenset(workers(stage)), WHY)
    stage.wait(1.0)
    assert stage.observer.reasons == [WHY]
    stage.change(step=200)
    assert workers(stage) == [stage.chief.task_id]
    least = training(2, 2)
    assert least.job.reclaimable() == Reclaimable()
    least.job.reclaim(frozenset(workers(least)[:1]), WHY)
    least.wait(1.0)
    assert least.observer.reasons == []


def test_nothing_is_spare_before_a_checkpoint_nor_long_before_the_next_change() -> None:
    stage = ElasticStage(elastic())
    stage.start(2)
    assert stage.job.reclaimable() == Reclaimable()
    stage.save(1)
    assert stage.job.reclaimable().max_tasks > 0
    patient = ElasticStage(dataclasses.replace(elastic(), resize_interval_s=10 * RECLAIM_HORIZON_S))
    patient.start_training(2)
    assert patient.job.reclaimable() == Reclaimable()
    patient.wait(9 * RECLAIM_HORIZON_S)
    assert patient.job.reclaimable().max_tasks > 0
    # Once asked it still waits until it may.
    patient.job.reclaim(frozenset(workers(patient)[:1]), WHY)
    patient.wait(1.0)
    assert patient.observer.reasons == []
    patient.wait(RECLAIM_HORIZON_S)
    assert patient.observer.reasons == [WHY]


def test_nothing_is_spare_once_a_worker_has_ended() -> None:
    stage = training(agents=3, profile=heavy(Api.GRAPH))
    assert stage.job.reclaimable().max_tasks > 0
    last = [task for task in stage.job.tasks if task.planned.role == "worker"][-1]
    stage.update(last, "TASK_FINISHED", ended(0))
    assert stage.job.need is Need.NOTHING
    assert stage.job.reclaimable() == Reclaimable()


def test_a_job_that_cannot_resume_is_not_asked_again() -> None:
    stage = training()
    stage.job.reclaim(frozenset(workers(stage)[:1]), WHY)
    stage.wait(0.1)
    stage.save(200)
    for _ in range(6):
        stage.round()
    stage.step(stage.chief, 1)
    assert "it cannot resume" in stage.observer.notes[-1]
    stage.end_killed()
    stage.wait(INTERVAL_S)
    assert stage.job.reclaimable() == Reclaimable()


def test_it_stops_looking_for_more_when_it_is_asked() -> None:
    stage = ElasticStage(elastic())
    stage.start_training()
    while stage.job.need is not Need.GROW:
        stage.wait(0.5)
    stage.offer(stage.mesos.offer(1))
    stage.job.reclaim(frozenset(workers(stage)[:1]), WHY)
    stage.wait(0.1)
    assert stage.mesos.calls[-1] == "suppress"
    assert len(stage.mesos.declined) >= 1
